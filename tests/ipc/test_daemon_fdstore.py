"""A daemon ends, in any way, and is started again with what systemd kept for it."""

from __future__ import annotations

import mmap
import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from daemon_process import Daemon, wait_for
from managed import Managed
from rawclient import RawClient
from stored import COUNT, SETTINGS, assert_filled, fill, key, payload, read

from kmesh.v1 import common_pb2
from kmesh_spand.inherit import SEALED

Start = Callable[..., Daemon]

#: All that is stored of a daemon with these settings, but its index.
NAMES = ["catalog", "life", "manifest", *(f"slab-{n}" for n in range(4))]


@pytest.fixture
def manager(start_spand: Start, socket_dir: Path) -> Iterator[Managed]:
    with Managed(start_spand, socket_dir.parent / "notify") as made:
        yield made


def assert_empty(daemon: Daemon) -> None:
    with RawClient(daemon.socket_dir) as client:
        for number in range(COUNT):
            assert read(client, number) == common_pb2.REASON_MISS


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_lost_by_a_restart(manager: Managed, how: int) -> None:
    first = manager.daemon(**SETTINGS)
    fill(first)
    before = {name: os.fstat(manager.fd(name)).st_ino for name in NAMES}
    assert len(manager.names) == len(NAMES) + 1
    with RawClient(first.socket_dir) as client:
        found = client.acquire([key(7)])
        _, slab_fd = client.attach_slab(found.slab[0])
        _, (index_fd,) = client.call(attach_index={})
        epoch = client.epoch
        with (
            mmap.mmap(slab_fd, 0, prot=mmap.PROT_READ) as slab,
            mmap.mmap(index_fd, 0, prot=mmap.PROT_READ) as index,
        ):
            at, length = found.offset[0], found.length[0]
            assert slab[at : at + length] == payload(7)
            assert not index[40]
            if how == signal.SIGKILL:
                # It had no time to say anything.
                first.kill()
                assert not index[40]
            else:
                assert first.stop() == 0
            second = manager.daemon(**SETTINGS)
            assert "memory of an earlier daemon, version 0.1.0, is used" in second.log()
            # The mapping of the client that lived on is what it was, and it knows of the end.
            assert slab[at : at + length] == payload(7)
            assert index[40] == 1
    with RawClient(second.socket_dir) as client:
        assert client.epoch != epoch
    assert_filled(second)
    assert {name: os.fstat(manager.fd(name)).st_ino for name in NAMES} == before
    assert len(manager.names) == len(NAMES) + 1
    assert manager.states.count("READY=1") == 2
    # It is a daemon like any other: it stores, and its control may die.
    second.wait_populated()
    with RawClient(second.socket_dir) as client:
        assert client.store(b"n" * 32, b"new") == 0
    second.errors = True
    os.kill(second.child("control"), signal.SIGKILL)
    second.wait_ready(2)
    with RawClient(second.socket_dir) as client:
        assert client.read(b"n" * 32) == b"new"
        assert read(client, 7) == payload(7)
        (index,) = (name for name in manager.names if name.startswith("index-"))
        assert f"{client.epoch:016x}" in index


def test_crashes_at_any_moment_lose_nothing(manager: Managed) -> None:
    first = manager.daemon(**SETTINGS)
    fill(first)
    first.kill()
    moments: list[Callable[[Daemon], object]] = [
        lambda daemon: True,
        lambda daemon: Path(f"/proc/{daemon.pid}/task/{daemon.pid}/children").read_text(),
        lambda daemon: "is used" in daemon.log(),
        lambda daemon: daemon.child("worker"),
        lambda daemon: daemon.wait_ready() or True,
    ]
    for moment in moments:
        daemon = manager.daemon(ready=False, **SETTINGS)
        wait_for(lambda daemon=daemon, moment=moment: moment(daemon))
        daemon.kill()
    assert_filled(manager.daemon(**SETTINGS))
    assert len(manager.names) == len(NAMES) + 1


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"slab_size": "4MiB"}, "slab_size was 8388608, and is 4194304"),
        ({"hardened": "true"}, "hardened was False, and is True"),
    ],
)
def test_memory_that_does_not_fit_is_given_up(
    manager: Managed, changed: dict[str, object], text: str
) -> None:
    first = manager.daemon(**SETTINGS)
    fill(first, 3)
    before = {os.fstat(fd).st_ino for _, fd in manager.stored}
    first.stop()
    second = manager.daemon(**{**SETTINGS, **changed})
    assert f"spans of an earlier daemon are given up: {text}" in second.log()
    assert not before & {os.fstat(fd).st_ino for _, fd in manager.stored}
    assert_empty(second)


def test_damaged_memory_is_given_up_and_damaged_spans_are_dropped(manager: Managed) -> None:
    first = manager.daemon(**SETTINGS)
    fill(first)
    with RawClient(first.socket_dir) as client:
        found = client.acquire([key(5)])
    first.flip(found.offset[0], found.slab[0])
    first.stop()
    second = manager.daemon(errors=True, **SETTINGS)
    with RawClient(second.socket_dir) as client:
        assert read(client, 6) == payload(6)
        wait_for(lambda: read(client, 5) in (common_pb2.REASON_MISS, common_pb2.REASON_CORRUPT))
        assert read(client, 5) != payload(5)
    second.stop()
    # A manifest of which nothing is known.
    fd = os.memfd_create("other")
    os.write(fd, b"KMESHMAN and something else")
    manager.replace("manifest", fd)
    third = manager.daemon(**SETTINGS)
    assert "spans of an earlier daemon are given up: the manifest has the seals" in third.log()
    assert_empty(third)
    assert len(manager.names) == len(NAMES) + 1


def test_other_file_descriptors_of_systemd_are_told_apart(
    manager: Managed, socket_dir: Path
) -> None:
    first = manager.daemon(**SETTINGS)
    fill(first)
    first.stop()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(socket_dir.parent / "activated"))
        listener.listen()
        manager.stored.insert(2, ("kmesh-spand.socket", os.dup(listener.fileno())))
        second = manager.daemon(**SETTINGS)
        assert "from systemd is not used: 'kmesh-spand.socket'" in second.log()
        assert_filled(second)
        second.stop()
        # What is meant for another process is left alone.
        env = {"LISTEN_PID": "1", "LISTEN_FDS": "2", "LISTEN_FDNAMES": "kmesh-store-life:a"}
        manager.clear()
        third = manager.daemon(env=env, **SETTINGS)
        assert "earlier daemon" not in third.log()
        assert_empty(third)


def test_a_store_that_is_too_small_is_not_used(start_spand: Start, socket_dir: Path) -> None:
    with Managed(start_spand, socket_dir.parent / "notify", size=8) as manager:
        daemon = manager.daemon(**SETTINGS)
        assert "FileDescriptorStoreMax is 8, and 9 are needed" in daemon.log()
        fill(daemon, 1)
        assert manager.names == manager.refused == []
        assert daemon.stop() == 0


def test_sealed_slabs_that_are_given_as_dma_bufs_are_not_kept(manager: Managed) -> None:
    """No further DMA-BUF could be made of them: it is said at the start, not at the next one."""
    hardened = {**SETTINGS, "hardened": "true"}
    first = manager.daemon(dma_buf="slabs", **hardened)
    assert f"spans will not survive a restart of the daemon: {SEALED}" in first.log()
    fill(first, 1)
    assert manager.names == []
    first.kill()
    second = manager.daemon(**hardened)
    fill(second, 1)
    assert manager.names
    second.kill()
    third = manager.daemon(dma_buf="slabs", **hardened)
    assert f"spans of an earlier daemon are given up: {SEALED}" in third.log()
    assert_empty(third)
    assert manager.names == []
