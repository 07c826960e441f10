"""What an earlier daemon left is used as it is, or refused by name of what differs."""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from room import settings

from kmesh import index
from kmesh_spand import manifest as manifests
from kmesh_spand.fdstore import FdStore
from kmesh_spand.holdings import Holdings
from kmesh_spand.inherit import PREFIX, Inherited, Named, gpu_name, inherit, slab_name
from kmesh_spand.life import Life
from kmesh_spand.manifest import Manifest, Unfit
from kmesh_spand.memory import make_memfd, memory_limits
from kmesh_spand.settings import Settings
from kmesh_spand.storage import Memory, Storage

SETTINGS = {"slab_size": "1MiB", "gpu": "0", "gpu_memory": "4MiB", "gpu_slab_size": "2MiB"}
SLABS = 4


@pytest.fixture
def chosen(socket_dir: Path) -> Settings:
    return settings(socket_dir, **SETTINGS)


@pytest.fixture
def left(chosen: Settings) -> Iterator[dict[str, int]]:
    """Duplicates of what a daemon holds, by the last part of the name."""
    held = Holdings(chosen, "1", FdStore({}))
    names = {name.removeprefix(PREFIX): os.dup(fd) for name, fd in held.named()}
    # A daemon that was killed says nothing to those that read its index.
    for unpoisoned in held.storage.indexes.values():
        os.close(unpoisoned.fd)
    held.storage.indexes.clear()
    with_index = next(name for name in names if name.startswith("index-"))
    names["index"] = names.pop(with_index)
    held.life.release()
    held.close()
    yield names
    for fd in names.values():
        os.close(fd)


def take(left: dict[str, int], chosen: Settings, version: str = "2") -> Inherited:
    """``inherit`` of duplicates."""
    full = {"index": "index-0123456789abcdef-0"}
    return inherit(
        [Named(PREFIX + full.get(name, name), os.dup(fd)) for name, fd in left.items()],
        chosen,
        version,
    )


def poisoned(left: dict[str, int]) -> bool:
    return os.pread(left["index"], 44, 0)[40:] != bytes(4)


def start_index(left: dict[str, int]) -> None:
    """As control does."""
    os.pwrite(left["index"], index.MAGIC, 0)


def test_what_fits_is_used(left: dict[str, int], chosen: Settings) -> None:
    start_index(left)
    os.pwrite(left["slab-1"], b"bytes", 4096)
    gpu = {number: os.memfd_create("gpu") for number in (4, 5)}
    for number, fd in gpu.items():
        left[gpu_name(number, "GPU-a-b").removeprefix(PREFIX)] = fd
    found = take(left, chosen)
    assert [os.pread(slab.fd, 5, 4096) for slab in found.slabs.values()] == [
        b"bytes" if number == 1 else bytes(5) for number in range(SLABS)
    ]
    assert {number: device for number, (_, device) in found.gpu.items()} == {
        4: "GPU-a-b",
        5: "GPU-a-b",
    }
    assert found.version == "1"
    assert 4096 <= found.resident < 4 << 20
    assert not poisoned(left)
    found.poison()
    assert poisoned(left)
    found.close()


def test_memory_that_is_held_counts_as_there(left: dict[str, int], chosen: Settings) -> None:
    """What is taken over is not asked for twice."""
    found = take(left, chosen)
    os.posix_fallocate(found.slabs[0].fd, 0, 1 << 20)
    assert found.resident >= 1 << 20
    found.close()
    machine = next(limit for limit in memory_limits() if "MemAvailable" in limit.source)
    held = next(limit for limit in memory_limits(held=1 << 50) if "MemAvailable" in limit.source)
    assert held.size > machine.size + (1 << 49)


def other_seals(fd: int, seals: int) -> int:
    """A memfd of the same size with other seals."""
    made = os.memfd_create("other", os.MFD_ALLOW_SEALING)
    os.ftruncate(made, os.fstat(fd).st_size)
    fcntl.fcntl(made, fcntl.F_ADD_SEALS, seals)
    return made


def swap(left: dict[str, int], name: str, fd: int) -> None:
    os.close(left[name])
    left[name] = fd


def a_pipe(_: int) -> int:
    ours, theirs = os.pipe()
    os.close(theirs)
    return ours


FLAWS: dict[str, tuple[Callable[[dict[str, int]], object], str]] = {
    "no manifest": (lambda left: os.close(left.pop("manifest")), "there is no manifest"),
    "no slab": (lambda left: os.close(left.pop("slab-2")), "there is no slab-2"),
    "no catalog": (lambda left: os.close(left.pop("catalog")), "there is no catalog"),
    "no life": (lambda left: os.close(left.pop("life")), "there is no life"),
    "another slab": (
        lambda left: left.update({"slab-4": os.dup(left["slab-1"])}),
        "nothing is known of slab-4",
    ),
    "a strange name": (
        lambda left: left.update({"disk-0": os.memfd_create("disk")}),
        "nothing is known of disk-0",
    ),
    "a GPU slab that is not planned": (
        lambda left: left.update({"gpu-7-GPU-a": os.memfd_create("gpu")}),
        "nothing is known of gpu-7-GPU-a",
    ),
    "a GPU slab of two GPUs": (
        lambda left: left.update(
            {"gpu-4-GPU-a": os.memfd_create("gpu"), "gpu-4-GPU-b": os.memfd_create("gpu")}
        ),
        "nothing is known of gpu-4-GPU-a",
    ),
    "one slab twice": (
        lambda left: swap(left, "slab-3", os.dup(left["slab-1"])),
        "slab-1 and slab-3 are the same memory",
    ),
    "a short slab": (
        lambda left: swap(left, "slab-0", make_memfd("slab0", 4096)),
        "slab-0 has 4096 bytes instead of 1048576",
    ),
    "a slab without seals": (
        lambda left: swap(left, "slab-0", other_seals(left["slab-0"], 0)),
        "slab-0 has the seals 0x0 instead of",
    ),
    "a hardened slab": (
        lambda left: swap(left, "slab-0", other_seals(left["slab-0"], 0x17)),
        "slab-0 has the seals 0x17 instead of",
    ),
    "a slab that can only be read": (
        lambda left: swap(left, "slab-0", os.open(f"/proc/self/fd/{left['slab-0']}", os.O_RDONLY)),
        "slab-0 can't be written",
    ),
    "a file": (
        lambda left: swap(left, "catalog", os.open(__file__, os.O_RDONLY)),
        "catalog has ",
    ),
    "a pipe": (lambda left: swap(left, "slab-0", a_pipe(0)), "slab-0 is no memory"),
    "an index that is none": (
        lambda left: os.pwrite(left["index"], b"something", 0),
        "index-0123456789abcdef-0 is no index",
    ),
    "a manifest that can be written": (
        lambda left: swap(left, "manifest", other_seals(left["manifest"], 0xF ^ 8)),
        "the manifest has the seals",
    ),
    "a large manifest": (
        lambda left: swap(left, "manifest", make_memfd("manifest", 1 << 21)),
        "the manifest has 2097152 bytes",
    ),
}


@pytest.mark.parametrize("flaw", FLAWS)
def test_what_does_not_fit_is_refused(left: dict[str, int], chosen: Settings, flaw: str) -> None:
    start_index(left)
    change, text = FLAWS[flaw]
    change(left)
    with pytest.raises(Unfit) as refused:
        take(left, chosen)
    assert str(refused.value).startswith(text)
    # Those who read it hear of the end nevertheless.
    assert poisoned(left) == (flaw != "an index that is none")


@pytest.mark.parametrize("name", ["manifest", "slab-1", "catalog"])
def test_what_is_there_twice_is_refused(left: dict[str, int], chosen: Settings, name: str) -> None:
    items = [Named(PREFIX + name, os.dup(fd)) for name, fd in left.items() if name != "index"]
    items.append(Named(PREFIX + name, os.dup(left[name])))
    with pytest.raises(Unfit, match=f"{name} is there 2 times"):
        inherit(items, chosen, "2")


CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "slab size": ({"slab_size": "2MiB"}, "slab_size was 1048576, and is 2097152"),
    "memory": ({"host_memory": "5MiB"}, "host_memory was 4194304, and is 5242880"),
    "spans": ({"max_spans": 512}, "max_spans was 256, and is 512"),
    "tokens": ({"span_tokens": 128}, "span_tokens was 64, and is 128"),
    "sharing": ({"share": "all"}, "share was 'uid', and is 'all'"),
    "quotas": ({"tenants": "default=1MiB"}, "tenants was {}, and is {'default': 1048576}"),
    "huge pages": ({"hugepages": "off"}, "hugepages was True, and is False"),
    "GPU": ({"gpu": "1"}, "gpu was ['0'], and is ['1']"),
    "GPU memory": ({"gpu_memory": "6MiB"}, "gpu_memory was 4194304, and is 6291456"),
    "its place": ({"gpu_place": "host"}, "gpu_place was 'gpu', and is 'host'"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_settings_must_agree(
    left: dict[str, int], chosen: Settings, socket_dir: Path, what: str
) -> None:
    change, text = CHANGES[what]
    with pytest.raises(Unfit) as refused:
        take(left, settings(socket_dir, **{**SETTINGS, **change}))
    assert str(refused.value) == text


def test_other_uids_and_hardened_memory_are_refused(socket_dir: Path) -> None:
    uid = os.getuid()

    def made(**more: str) -> Manifest:
        return Manifest.of(settings(socket_dir, slab_size="1MiB", **more), "1", 0)

    with pytest.raises(Unfit, match=f"groups was \\[{uid}\\], and is \\[{uid}, {uid + 1}\\]"):
        made().check(made(allow_uids=f"{uid + 1},{uid}"))
    with pytest.raises(Unfit, match="hardened was False, and is True"):
        made().check(made(hardened="true"))
    made(allow_uids=f"{uid},{uid + 1}").check(made(allow_uids=f"{uid + 1},{uid}"))


def test_sealed_slabs_have_one_of_two_numbers(socket_dir: Path) -> None:
    chosen = settings(socket_dir, host_memory="4MiB", slab_size="1MiB", hardened="true")
    held = Holdings(chosen, "1", FdStore({}))
    named = [Named(name, os.dup(fd)) for name, fd in held.named()]
    held.life.release()
    held.storage.drop_writable()
    held.close()

    def taken(**names: str) -> Inherited:
        """What is left when some slabs have other names, or none."""
        left = (
            (names.get(name.removeprefix(PREFIX).replace("-", "_"), name), fd) for name, fd in named
        )
        return inherit([Named(name, os.dup(fd)) for name, fd in left if name], chosen, "2")

    try:
        found = taken(slab_1=slab_name(5), slab_2="")
        # One of them was being replaced as its daemon died.
        assert set(found.slabs) == {0, 3, 5}
        found.close()
        with pytest.raises(Unfit, match="slab-1 and slab-5 are one place's"):
            taken(slab_2=slab_name(5))
        with pytest.raises(Unfit, match="nothing is known of slab-9"):
            taken(slab_2=slab_name(9))
        chosen = msgspec.structs.replace(chosen, dma_buf="slabs")
        with pytest.raises(Unfit, match="dma_buf: slabs of an earlier daemon are sealed"):
            taken()
    finally:
        for _, fd in named:
            os.close(fd)


def test_sealed_slabs_are_replaced_one_by_one(socket_dir: Path) -> None:
    """At no time is there more than the settings say, and what was sealed stays so."""
    chosen = settings(socket_dir, host_memory="4MiB", slab_size="1MiB", hardened="true")
    first = Storage(chosen)
    inherited = {n: Memory(os.dup(first.slabs[n].fd), 1 << 20) for n in (0, 2, 3)}
    catalog = Memory(os.dup(first.catalog.fd), first.catalog.size)
    first.drop_writable()
    first.close()
    storage = Storage(chosen, (inherited, catalog))
    try:
        assert storage.sealed == {0, 2, 3}
        assert set(storage.slabs) == {0, 1, 2, 3}
        assert set(storage.spares) == {4, 6, 7}
        assert storage.writable is not None
        assert set(storage.writable) == {1, 4, 6, 7}
        with pytest.raises(PermissionError):
            mmap.mmap(storage.slabs[0].fd, 1 << 20)
        assert storage.replace(2) == 6
        assert set(storage.slabs) == {0, 1, 3, 6}
        assert sum(slab.size for slab in storage.slabs.values()) == chosen.host_memory
        storage.writable[6].view()[:5] = b"bytes"
        assert os.pread(storage.slabs[6].fd, 5, 0) == b"bytes"
        for number in (1, 2, 6):
            with pytest.raises(KeyError):
                storage.replace(number)
    finally:
        storage.drop_writable()
        storage.close()


def test_what_does_not_say_what_memory_is_may_change(
    left: dict[str, int], socket_dir: Path
) -> None:
    more = {"staging_memory": "3MiB", "remembered_keys": 9, "grace_ms": 1, "log_level": "debug"}
    take(left, settings(socket_dir, **{**SETTINGS, **more})).close()


def test_versions_must_agree(left: dict[str, int], chosen: Settings) -> None:
    made = manifests.decode(os.pread(left["manifest"], 1 << 20, 0))
    for formats, text in (
        ({**made.formats, "records": 9}, "made by kmesh-spand 1: records of version 9, this is 2"),
        ({**made.formats, "more": 1}, "made by kmesh-spand 1: more of version 1, this is 2"),
        ({"layout": 1, "records": 2}, "owners of version 1, this is 2 with owners of version 1"),
    ):
        swap(left, "manifest", manifests.make(msgspec.structs.replace(made, formats=formats)))
        with pytest.raises(Unfit, match=text):
            take(left, chosen)


def test_a_manifest_of_another_version_is_refused_as_such() -> None:
    body = b"anything"
    head = struct.pack("<8sII", manifests.MAGIC, 2, len(body))
    with pytest.raises(Unfit, match="the manifest is of version 2, and not of 1"):
        manifests.decode(head + struct.pack("<I", zlib.crc32(head + body)) + body)


MADE = Manifest("1", {"layout": 1}, {"host_memory": 5, "gpu": []}, (1, 2), 3)


@given(st.data())
def test_damaged_manifests_are_refused(data: st.DataObject) -> None:
    whole = manifests.encode(MADE)
    assert manifests.decode(whole) == MADE
    kind = data.draw(st.sampled_from(["bit", "cut", "more", "any"]))
    if kind == "bit":
        bit = data.draw(st.integers(0, 8 * len(whole) - 1))
        found = bytearray(whole)
        found[bit // 8] ^= 1 << bit % 8
        damaged = bytes(found)
    elif kind == "cut":
        damaged = whole[: data.draw(st.integers(0, len(whole) - 1))]
    elif kind == "more":
        damaged = whole + data.draw(st.binary(min_size=1))
    else:
        damaged = data.draw(st.binary(max_size=200))
    with pytest.raises(Unfit):
        manifests.decode(damaged)


@given(st.recursive(st.none() | st.integers(-9, 9) | st.text(max_size=9), st.lists))
def test_strange_manifests_with_a_right_sum_are_refused(body: object) -> None:
    packed = msgspec.msgpack.encode(body)
    head = struct.pack("<8sII", manifests.MAGIC, manifests.VERSION, len(packed))
    with pytest.raises(Unfit, match="the manifest can't be read"):
        manifests.decode(head + struct.pack("<I", zlib.crc32(head + packed)) + packed)


def test_a_life_waits_for_the_end_of_another() -> None:
    """Also for that of a process that was forked in it."""
    first = Life()
    assert first.begin(0)
    second = Life(os.dup(first.memory))
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(theirs)
        os.read(ours, 1)
        os._exit(0)
    os.close(ours)
    first.close()
    try:
        assert not second.try_begin()
        assert not second.begin(0.05)
    finally:
        os.close(theirs)
        os.waitpid(child, 0)
    assert second.begin(0)
    third = Life(os.dup(second.memory))
    assert not third.try_begin()
    second.release()
    assert third.try_begin()
    second.close()
    third.close()


def test_memory_of_which_a_process_still_runs_is_given_up(
    left: dict[str, int], chosen: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kmesh_spand.holdings._LIFE_SECONDS", 0.05)
    start_index(left)
    other = Life(os.dup(left["life"]))
    assert other.try_begin()
    full = {"index": "index-0123456789abcdef-0"}
    for begun in (True, False):
        store = FdStore({})
        store.received = [
            Named(PREFIX + full.get(name, name), os.dup(fd)) for name, fd in left.items()
        ]
        held = Holdings(chosen, "2", store)
        same = os.path.sameopenfile(held.storage.slabs[0].fd, left["slab-0"])
        assert same == (not begun)
        assert poisoned(left)
        held.close()
        if begun:
            other.close()


def test_a_mapping_of_what_is_refused_stays(left: dict[str, int], chosen: Settings) -> None:
    with mmap.mmap(left["slab-0"], 0) as mapped:
        mapped[:5] = b"bytes"
        os.close(left.pop("manifest"))
        with pytest.raises(Unfit):
            take(left, chosen)
        assert mapped[:5] == b"bytes"
    assert slab_name(0) == PREFIX + "slab-0"
