"""Files of the disk tier: their form, and their damage."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import hypothesis.strategies as st
import pytest
from disk_shelf import DIRECTORY, FAR, LENGTH, SPAN, Shelf, content, digest, refused
from hypothesis import given, settings

from kmesh import _host, layout
from kmesh.layout import TILE_BYTES, Shard
from kmesh_spand import diskstore
from kmesh_spand.core.codes import Trouble
from kmesh_spand.core.diskfile import BLOCK_BYTES, BadFile, Header, SpanFile, decode, file_bytes
from kmesh_spand.diskstore import DiskTrouble, Found, path_of


@pytest.fixture
def shelf(tmp_path: Path) -> Iterator[Shelf]:
    made = Shelf(tmp_path / "disk")
    yield made
    made.close()


@pytest.mark.parametrize("sync", ["off", "file", "all"])
@pytest.mark.parametrize("length", [1, 4095, TILE_BYTES, LENGTH])
def test_what_is_written_is_read(tmp_path: Path, sync: str, length: int) -> None:
    shelf = Shelf(tmp_path / "disk", sync)
    try:
        span = shelf.put(content(length))
        name = shelf.store.write(0, 0, span)
        assert shelf.file(name).stat().st_size == file_bytes(length, len(span.names))
        shelf.store.read(name, 0, FAR, span)
        assert shelf.get(length) == content(length)
        assert shelf.holds(span)
        assert list(shelf.store.scan()) == [Found(name, span)]
        shelf.store.remove(name)
        shelf.store.remove(name)
        assert refused(shelf, name, span) is Trouble.BAD
    finally:
        shelf.close()


def test_pieces_of_a_payload_are_put_together(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(diskstore, "PIECE_BYTES", 2 * TILE_BYTES)
    span = shelf.put(content(5 * TILE_BYTES + 7))
    name = shelf.store.write(0, 0, span)
    monkeypatch.setattr(diskstore, "PIECE_BYTES", 3 * TILE_BYTES)
    shelf.store.read(name, 0, FAR, span)
    assert shelf.get(span.length) == content(span.length)
    assert shelf.holds(span)


def test_a_range_that_is_not_the_spans_any_more_is_not_written(shelf: Shelf) -> None:
    span = shelf.put(content())
    shelf.mapping.view(5000, 1)[0] ^= 1
    with pytest.raises(DiskTrouble) as told:
        shelf.store.write(0, 0, span)
    assert told.value.kind is Trouble.LOST
    assert not [path for path in shelf.path.rglob("*") if path.is_file()]


def test_a_slab_that_is_given_back_meanwhile_stays_mapped_until_it_is_read(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    span, copy = shelf.put(content()), _host.copy_with_sums

    def closing(*arguments: int) -> int:
        with contextlib.suppress(BufferError):
            shelf.mapping.close()
        return copy(*arguments)

    monkeypatch.setattr(_host, "copy_with_sums", closing)
    name = shelf.store.write(0, 0, span)
    assert (shelf.path / path_of(name)).stat().st_size == file_bytes(span.length, len(span.names))
    monkeypatch.undo()
    with pytest.raises(DiskTrouble) as told:
        shelf.store.write(0, 0, span)
    assert told.value.kind is Trouble.LOST


@pytest.mark.parametrize(
    "other",
    [
        {"group": 1001},
        {"salt": b""},
        {"salt": digest("other")},
        {"key": digest("other")},
        {"namespace": digest("other")},
        {"shard": Shard(0, 2, 0, 2).code()},
        {"tokens": 32},
        {"start": 0},
        {"length": LENGTH - 1},
        {"root": 7},
        {"names": ((16, digest("other")),)},
        {"names": ((15, digest("16")),)},
    ],
)
def test_a_file_of_another_span_is_refused(shelf: Shelf, other: dict[str, object]) -> None:
    """Another tenant's, another namespace's (so another dtype's), another shard's ..."""
    span = shelf.put(content())
    name = shelf.store.write(0, 0, span)
    before = shelf.get(TILE_BYTES)
    assert refused(shelf, name, replace(span, **other)) is Trouble.BAD
    assert shelf.get(TILE_BYTES) == before


@pytest.mark.parametrize("left", [0, 1, 200])
def test_names_that_other_files_have_are_not_missed(shelf: Shelf, left: int) -> None:
    """Tails of one conversation begin alike: one of their files has the names of all."""
    every = tuple((tokens, digest(str(tokens))) for tokens in range(16, 16 * 251, 16))
    span = replace(shelf.put(content()), tokens=4016, names=every)
    name = shelf.store.write(0, 0, span)
    assert shelf.file(name).stat().st_size > file_bytes(LENGTH, left)
    shelf.store.read(name, 0, FAR, replace(span, names=every[50 : 50 + left]))
    assert shelf.get(LENGTH) == content()


def test_a_file_under_anothers_name_is_refused(shelf: Shelf) -> None:
    span = shelf.put(content())
    one, two = shelf.store.write(0, 0, span), shelf.store.write(0, 0, span)
    shelf.file(one).write_bytes(shelf.file(two).read_bytes())
    assert refused(shelf, one, span) is Trouble.BAD
    assert [type(found) for found in shelf.store.scan()].count(str) == 1
    assert not shelf.file(one).exists()


def test_a_file_of_another_directory_is_refused(shelf: Shelf, tmp_path: Path) -> None:
    span = shelf.put(content())
    name = shelf.store.write(0, 0, span)
    shelf.store._directory = bytes(16)
    assert refused(shelf, name, span) is Trouble.BAD


@settings(max_examples=80, deadline=None)
@given(data=st.data(), mask=st.integers(1, 255))
def test_a_changed_byte_anywhere_is_found(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, mask: int
) -> None:
    shelf = Shelf(tmp_path_factory.mktemp("flip") / "disk")
    try:
        span = shelf.put(content(TILE_BYTES + 100))
        name = shelf.store.write(0, 0, span)
        raw = bytearray(shelf.file(name).read_bytes())
        at = data.draw(st.one_of(st.integers(0, len(raw) - 1), st.integers(0, 2 * BLOCK_BYTES - 1)))
        raw[at] ^= mask
        shelf.file(name).write_bytes(raw)
        assert refused(shelf, name, span) is Trouble.BAD
    finally:
        shelf.close()


def test_each_byte_of_a_header_counts() -> None:
    whole = Header(SPAN, 7, DIRECTORY, bytes(8 * layout.tiles(LENGTH))).encode()
    assert decode(whole).span == SPAN
    for at in range(len(whole)):
        raw = bytearray(whole)
        raw[at] ^= 1 << at % 8
        with pytest.raises(BadFile):
            decode(bytes(raw))


@settings(deadline=None)
@given(
    span=st.builds(
        SpanFile,
        group=st.integers(0, 2**32 - 1),
        salt=st.one_of(st.just(b""), st.binary(min_size=32, max_size=32)),
        key=st.binary(min_size=32, max_size=32),
        namespace=st.binary(min_size=32, max_size=32),
        shard=st.integers(0, 2**64 - 1),
        tokens=st.integers(0, 2**32 - 1),
        start=st.integers(0, 2**32 - 1),
        length=st.integers(1, 4 * TILE_BYTES),
        root=st.integers(0, 2**64 - 1),
        names=st.lists(
            st.tuples(st.integers(0, 2**32 - 1), st.binary(min_size=32, max_size=32)), max_size=255
        ).map(tuple),
    ),
    name=st.integers(0, 2**64 - 1),
)
def test_headers_are_read_as_they_were_written(span: SpanFile, name: int) -> None:
    sums = bytes(8 * layout.tiles(span.length))
    header = Header(span, name, DIRECTORY, sums)
    assert decode(header.encode()) == header


@given(data=st.binary(max_size=2 * BLOCK_BYTES))
def test_what_is_no_header_is_refused(data: bytes) -> None:
    with pytest.raises(BadFile):
        decode(data)


@given(size=st.integers(0, 2**32 - 1), version=st.integers(0, 2**32 - 1))
def test_a_header_that_claims_much_is_refused(size: int, version: int) -> None:
    block = b"KMSHSPAN" + version.to_bytes(4, "little") + size.to_bytes(4, "little")
    with pytest.raises(BadFile):
        decode(block.ljust(BLOCK_BYTES, b"\0"))


@pytest.mark.parametrize(
    "cut", [0, 1, BLOCK_BYTES - 1, BLOCK_BYTES, 2 * BLOCK_BYTES, -1, -BLOCK_BYTES]
)
def test_a_file_that_is_cut_short_is_refused(shelf: Shelf, cut: int) -> None:
    span = shelf.put(content())
    name = shelf.store.write(0, 0, span)
    size = shelf.file(name).stat().st_size
    os.truncate(shelf.file(name), cut if cut >= 0 else size + cut)
    assert refused(shelf, name, span) is Trouble.BAD
    (told,) = shelf.store.scan()
    assert isinstance(told, str)
    assert not shelf.file(name).exists()


def test_a_file_that_grew_is_refused(shelf: Shelf) -> None:
    span = shelf.put(content())
    name = shelf.store.write(0, 0, span)
    with shelf.file(name).open("ab") as file:
        file.write(bytes(BLOCK_BYTES))
    assert refused(shelf, name, span) is Trouble.BAD


@pytest.mark.parametrize("what", ["link", "folder", "pipe"])
def test_links_are_not_followed(shelf: Shelf, tmp_path: Path, what: str) -> None:
    span = shelf.put(content())
    name = shelf.store.write(0, 0, span)
    path, elsewhere = shelf.file(name), tmp_path / "elsewhere"
    path.rename(elsewhere)
    if what == "link":
        path.symlink_to(elsewhere)
    elif what == "folder":
        path.mkdir()
    else:
        os.mkfifo(path, 0o600)
    assert refused(shelf, name, span) is Trouble.BAD
    assert [type(found) for found in shelf.store.scan()] == [str]
    assert elsewhere.exists()


def test_leftovers_are_cleared_and_strange_files_left(shelf: Shelf) -> None:
    left, strange = shelf.path / "00" / "00ff.new", shelf.path / "00" / "notes.txt"
    left.write_bytes(b"half")
    strange.write_bytes(b"mine")
    assert list(shelf.store.scan()) == []
    assert not left.exists()
    assert strange.exists()


def test_what_was_used_last_is_found_last(shelf: Shelf) -> None:
    span = shelf.put(content(TILE_BYTES))
    names = [shelf.store.write(0, 0, span) for _ in range(3)]
    for at, name in enumerate(names):
        os.utime(shelf.file(name), (at, at))
    shelf.store.read(names[0], 0, FAR, span)
    found = [item.name for item in shelf.store.scan() if isinstance(item, Found)]
    assert found == [names[1], names[2], names[0]]


def test_a_tier_that_became_smaller_keeps_what_was_used_last(shelf: Shelf) -> None:
    span = shelf.put(content(TILE_BYTES))
    names = [shelf.store.write(0, 0, span) for _ in range(4)]
    for at, name in enumerate(names):
        os.utime(shelf.file(name), (at, at))
    shelf.store._capacity = 2 * shelf.file(names[0]).stat().st_size + 1
    found = [item.name for item in shelf.store.scan() if isinstance(item, Found)]
    assert found == names[2:]
    assert [shelf.file(name).exists() for name in names] == [False, False, True, True]


def test_one_file_of_an_absurd_size_is_removed_alone(shelf: Shelf) -> None:
    span = shelf.put(content(TILE_BYTES))
    names = [shelf.store.write(0, 0, span) for _ in range(3)]
    large = shelf.file(names[0]).with_name(f"{names[0] ^ 1:016x}")
    large.touch(0o600)
    os.truncate(large, shelf.store._capacity + 1)
    other = large.with_name("0" * 15 + "_")
    other.touch(0o600)
    found = list(shelf.store.scan())
    assert sorted(item.name for item in found if isinstance(item, Found)) == sorted(names)
    (said,) = [item for item in found if isinstance(item, str)]
    assert said.endswith("larger than the disk tier")
    assert not large.exists()


def test_files_are_their_owners_alone(shelf: Shelf) -> None:
    before = os.umask(0)
    try:
        name = shelf.store.write(0, 0, shelf.put(content()))
    finally:
        os.umask(before)
    assert stat.S_IMODE(shelf.file(name).stat().st_mode) == 0o600
    assert stat.S_IMODE(shelf.file(name).parent.stat().st_mode) == 0o700


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (errno.ENOSPC, Trouble.FULL),
        (errno.EDQUOT, Trouble.FULL),
        (errno.EFBIG, Trouble.FULL),
        (errno.EIO, Trouble.IO),
        (errno.EROFS, Trouble.IO),
    ],
)
def test_a_write_that_fails_leaves_nothing(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch, number: int, kind: Trouble
) -> None:
    span = shelf.put(content())

    def fail(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "pwritev", fail)
    with pytest.raises(DiskTrouble) as told:
        shelf.store.write(0, 0, span)
    assert told.value.kind is kind
    assert not [path for path in shelf.path.rglob("*") if path.is_file()]


def test_no_short_write_is_accepted(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    span, pwritev = shelf.put(content()), os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda fd, data, at: pwritev(fd, [data[0][:-4096]], at))
    with pytest.raises(DiskTrouble) as told:
        shelf.store.write(0, 0, span)
    assert told.value.kind is Trouble.FULL
    assert not [path for path in shelf.path.rglob("*") if path.is_file()]


def test_no_short_read_is_accepted(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    span, preadv = shelf.put(content()), os.preadv
    name = shelf.store.write(0, 0, span)
    monkeypatch.setattr(os, "preadv", lambda fd, data, at: preadv(fd, [data[0][:-4096]], at))
    assert refused(shelf, name, span) is Trouble.BAD


def test_a_read_that_fails_keeps_the_file(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    span = shelf.put(content())
    name = shelf.store.write(0, 0, span)

    def fail(*_: object) -> int:
        raise OSError(errno.EIO, "no")

    monkeypatch.setattr(os, "preadv", fail)
    assert refused(shelf, name, span) is Trouble.IO
    assert shelf.file(name).exists()


def test_a_file_system_without_direct_io_is_used_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = os.open

    def without(path: str, flags: int, *more: int, **named: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no direct I/O here")
        return opened(path, flags, *more, **named)

    monkeypatch.setattr(os, "open", without)
    shelf = Shelf(tmp_path / "disk")
    try:
        assert not shelf.store.direct
        span = shelf.put(content())
        shelf.store.read(shelf.store.write(0, 0, span), 0, FAR, span)
        assert shelf.get(LENGTH) == content()
    finally:
        shelf.close()
