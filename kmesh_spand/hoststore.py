"""Spans in slabs of host memory: written from staging, verified, wiped, exported."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Mapping as ByKey

from kmesh import _host, dmabuf, layout
from kmesh.handles import HandleRefusal
from kmesh.mapping import Mapping
from kmesh_spand.budget import shortage

_WIPE_BYTES = 32 << 20


class Slab:
    """A slab that is mapped: payload tiles, then their sums.

    Args:
        mapping: where there is one already. sealed: it can only be read.
    """

    __slots__ = ("capacity", "fd", "mapping", "sealed", "sums")

    def __init__(
        self, fd: int, size: int, mapping: Mapping | None, *, sealed: bool = False
    ) -> None:
        self.fd = fd
        self.sealed = sealed
        self.mapping = mapping or Mapping(fd, size, writable=not sealed)
        self.capacity = layout.slab_capacity(size)
        self.sums = layout.sums_offset(size)

    def place(self, offset: int, length: int) -> tuple[int, int]:
        """Addresses of a payload and of its first tile sum.

        Raises:
            ValueError: that range is no span of this slab.
        """
        if offset < 0 or offset % layout.TILE_BYTES or length < 1:
            raise ValueError(f"{length} bytes at {offset} are no span")
        if offset + length > self.capacity:
            raise ValueError(f"{length} bytes at {offset} end outside the slab")
        base = self.mapping.address
        return base + offset, base + self.sums + offset // layout.TILE_BYTES * 8

    def missing(self) -> int:
        """Bytes that have no pages yet."""
        return max(0, self.mapping.size - os.fstat(self.fd).st_blocks * 512)

    def populated(self) -> bool:
        """Whether all of it has pages."""
        return not self.missing()

    def wipe(self) -> None:
        """Zeros wherever something was written; pages stay."""
        base, end = self.mapping.address, 0
        while True:
            try:
                begin = os.lseek(self.fd, end, os.SEEK_DATA)
            except OSError as nothing:
                if nothing.errno == errno.ENXIO:
                    return
                raise
            end = os.lseek(self.fd, begin, os.SEEK_HOLE)
            for at in range(begin, end, _WIPE_BYTES):
                ctypes.memset(base + at, 0, min(_WIPE_BYTES, end - at))


class HostStore:
    """See ``jobs.Store`` for the methods. Does several jobs at a time.

    Args:
        slabs: by their numbers.
        headroom: bytes that are left to others when pages are made.
    """

    def __init__(self, slabs: ByKey[int, Slab], headroom: int) -> None:
        self.slabs = slabs
        self._headroom = headroom

    def copy(self, slab: int, offset: int, staging: Mapping, begin: int, length: int) -> int:
        end = begin + length
        if begin < 0 or end > staging.size:
            raise ValueError(f"the source ends at {end}, outside of {staging.size} bytes")
        # The view keeps the staging mapped should it be dropped meanwhile.
        view = staging.view(begin, length)
        payload, sums = self.writable(slab, offset, length)
        return _host.copy_with_sums(payload, _host.address(view), length, sums)

    def verify(self, slab: int, offset: int, length: int, root: int) -> bool:
        payload, sums = self.place(slab, offset, length)
        return _host.verify(payload, length, sums, root)

    def wipe(self, slab: int) -> None:
        self._unsealed(slab).wipe()

    def export(self, slab: int, offset: int, length: int) -> int:
        """Pages that it would have to make are not for it to take."""
        found = self._slab(slab)
        need = min(length, found.missing())
        if need and (short := shortage(need, self._headroom)):
            raise dmabuf.NotExported(HandleRefusal.NO_MEMORY, short)
        return dmabuf.create(found.fd, [(offset, length)])

    def place(self, slab: int, offset: int, length: int) -> tuple[int, int]:
        """Addresses of a payload and of its first tile sum; ValueError if no span can lie there."""
        return self._slab(slab).place(offset, length)

    def writable(self, slab: int, offset: int, length: int) -> tuple[int, int]:
        """As ``place``, of a slab that may be written; ValueError for others too."""
        return self._unsealed(slab).place(offset, length)

    def view(self, slab: int, offset: int, length: int) -> memoryview:
        """A payload's bytes, which the view keeps mapped; ValueError as for ``place``."""
        found = self._slab(slab)
        found.place(offset, length)
        return found.mapping.view(offset, length)

    def sums(self, slab: int, offset: int, length: int) -> bytes:
        """A payload's tile sums; ValueError as for ``place``."""
        return ctypes.string_at(self.place(slab, offset, length)[1], 8 * layout.tiles(length))

    def put(self, slab: int, offset: int, data: memoryview) -> int:
        """Bytes into a range, with their sums, whose root it returns; ValueError as above."""
        payload, sums = self.writable(slab, offset, data.nbytes)
        return _host.copy_with_sums(payload, _host.address(data), data.nbytes, sums)

    def _slab(self, number: int) -> Slab:
        found = self.slabs.get(number)
        if found is None:
            raise ValueError(f"there is no slab {number}")
        return found

    def _unsealed(self, number: int) -> Slab:
        found = self._slab(number)
        if found.sealed:
            raise ValueError(f"slab {number} is sealed")
        return found
