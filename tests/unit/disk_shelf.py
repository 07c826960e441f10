"""A directory of the disk tier and a slab, for tests of its files."""

from __future__ import annotations

import hashlib
import os
from dataclasses import replace
from pathlib import Path

import pytest

from kmesh import _host, layout
from kmesh.layout import TILE_BYTES, Shard
from kmesh.mapping import Mapping
from kmesh_spand.core.codes import Trouble
from kmesh_spand.core.diskfile import SpanFile
from kmesh_spand.diskstore import DiskStore, DiskTrouble, path_of
from kmesh_spand.hoststore import HostStore, Slab
from kmesh_spand.memory import make_memfd

DIRECTORY = bytes(range(16))
SIZE = 2 << 20
FAR = 12 * TILE_BYTES
LENGTH = 3 * TILE_BYTES + 1001


def digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=32).digest()


SPAN = SpanFile(
    group=1000,
    salt=digest("salt"),
    key=digest("key"),
    namespace=digest("namespace"),
    shard=Shard(0, 4, 0, 2).code(),
    tokens=48,
    start=128,
    length=LENGTH,
    root=0,
    names=((16, digest("16")), (32, digest("32"))),
)


class Shelf:
    """A slab, and a directory below it."""

    def __init__(self, path: Path, sync: str = "off") -> None:
        self.path = path
        path.mkdir(mode=0o700, exist_ok=True)
        self._memfd = make_memfd("slab0", SIZE)
        os.posix_fallocate(self._memfd, 0, SIZE)
        self.mapping = Mapping(self._memfd, SIZE, writable=True)
        self._root = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        slabs = HostStore({0: Slab(self._memfd, SIZE, self.mapping)}, 0)
        self.store = DiskStore(self._root, DIRECTORY, slabs, 1 << 40, sync)
        self.store.prepare()

    def close(self) -> None:
        self.mapping.close()
        os.close(self._memfd)
        os.close(self._root)

    def put(self, data: bytes, offset: int = 0) -> SpanFile:
        """A payload in the slab, as the span that it is."""
        self.mapping.view(offset, len(data))[:] = data
        sums = bytearray(8 * layout.tiles(len(data)))
        root = _host.tile_sums(self.mapping.address + offset, len(data), _host.address(sums))
        return replace(SPAN, length=len(data), root=root)

    def get(self, length: int, offset: int = FAR) -> bytes:
        return bytes(self.mapping.view(offset, length))

    def holds(self, span: SpanFile, offset: int = FAR) -> bool:
        """Whether a range is the span, with sums that say so."""
        base = self.mapping.address
        sums = base + layout.sums_offset(SIZE) + offset // TILE_BYTES * 8
        return _host.verify(base + offset, span.length, sums, span.root)

    def file(self, name: int) -> Path:
        return self.path / path_of(name)


def content(length: int = LENGTH) -> bytes:
    return hashlib.shake_128(b"content").digest(length)


def refused(shelf: Shelf, name: int, span: SpanFile) -> Trouble:
    with pytest.raises(DiskTrouble) as told:
        shelf.store.read(name, 0, FAR, span)
    return told.value.kind
