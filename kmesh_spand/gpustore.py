"""Spans in slabs of GPU memory: written from staging, verified, wiped, exported.

Bytes go through a buffer of the worker's own, so that what is summed is what is written: a client
that changes its staging meanwhile changes nothing.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable
from collections.abc import Mapping as Table
from queue import SimpleQueue

from kmesh import _host, layout
from kmesh.cuda.device import Device
from kmesh.cuda.memory import DeviceMemory
from kmesh.dmabuf import NotExported
from kmesh.errors import CudaError, UnsupportedError
from kmesh.handles import HandleRefusal
from kmesh.mapping import Mapping

#: Whole tiles that are moved at a time.
_BUFFER_BYTES = 4 << 20
_SUM_BYTES = 8


class GpuStore:
    """See ``jobs.Store`` for the methods. Does one job at a time.

    Args:
        slabs: of the GPU, mapped writable, by number.
    """

    def __init__(self, device: Device, slabs: Table[int, DeviceMemory]) -> None:
        self._device = device
        self._slabs = slabs
        self._buffer = mmap.mmap(-1, _BUFFER_BYTES)
        self._address = _host.address(self._buffer)
        with device.current() as driver:
            driver.register(self._address, _BUFFER_BYTES, read_only=False)

    def copy(self, slab: int, offset: int, staging: Mapping, begin: int, length: int) -> int:
        memory, sums_at = self._place(slab, offset, length)
        if begin < 0 or begin + length > staging.size:
            raise ValueError(f"the source ends at {begin + length}, outside of {staging.size}")
        # The view keeps the staging mapped should it be dropped meanwhile.
        view = staging.view(begin, length)
        return self._put(memory, sums_at, offset, _host.address(view), length)

    def put(self, slab: int, offset: int, data: memoryview) -> int:
        """Bytes of this process into a range, with their sums, whose root it returns."""
        memory, sums_at = self._place(slab, offset, data.nbytes)
        return self._put(memory, sums_at, offset, _host.address(data), data.nbytes)

    def _put(
        self, memory: DeviceMemory, sums_at: int, offset: int, source: int, length: int
    ) -> int:
        sums = bytearray(memory.read(sums_at, layout.tiles(length) * _SUM_BYTES))
        # A reader whose lease has ended must not take the new bytes for the old ones.
        memory.write(bytes(byte ^ 0xFF for byte in sums), sums_at)
        for at, size in _pieces(length):
            place = _host.address(sums) + at // layout.TILE_BYTES * _SUM_BYTES
            _host.copy_with_sums(self._address, source + at, size, place)
            memory.write(memoryview(self._buffer)[:size], offset + at)
        memory.write(sums, sums_at)
        return _host.fold(_host.address(sums), layout.tiles(length))

    def verify(self, slab: int, offset: int, length: int, root: int) -> bool:
        memory, sums_at = self._place(slab, offset, length)
        sums = memory.read(sums_at, layout.tiles(length) * _SUM_BYTES)
        if _host.fold(_host.address(sums), layout.tiles(length)) != root:
            return False
        for at, size in _pieces(length):
            memory.fetch(self._address, offset + at, size)
            first = at // layout.TILE_BYTES * _SUM_BYTES
            found = bytearray(layout.tiles(size) * _SUM_BYTES)
            _host.tile_sums(self._address, size, _host.address(found))
            if found != sums[first : first + len(found)]:
                return False
        return True

    def view(self, slab: int, offset: int, length: int) -> memoryview:
        """A copy of a payload. May be called by any thread."""
        memory, _ = self._place(slab, offset, length)
        data = bytearray(length)
        memory.fetch(_host.address(data), offset, length)
        return memoryview(data)

    def sums(self, slab: int, offset: int, length: int) -> bytes:
        """A payload's tile sums. May be called by any thread."""
        memory, sums_at = self._place(slab, offset, length)
        return memory.read(sums_at, layout.tiles(length) * _SUM_BYTES)

    def address(self, slab: int, offset: int, length: int) -> int:
        """Of a payload, as the GPU sees it."""
        memory, _ = self._place(slab, offset, length)
        return memory.address + offset

    def wipe(self, slab: int) -> None:
        self._slab(slab).fill(0)

    def export(self, slab: int, offset: int, length: int) -> int:
        try:
            return self._slab(slab).dma_buf(offset, length)
        except UnsupportedError as refused:
            raise NotExported(HandleRefusal.NO_DEVICE, str(refused)) from None
        except CudaError as refused:
            if not self._context_lives():
                raise
            raise NotExported(HandleRefusal.NO_DEVICE, str(refused)) from None

    def _context_lives(self) -> bool:
        """Whether the driver still answers: without a context it refuses whatever it is asked."""
        try:
            self._device.memory_info()
        except CudaError:
            return False
        return True

    def _slab(self, number: int) -> DeviceMemory:
        found = self._slabs.get(number)
        if found is None:
            raise ValueError(f"there is no slab {number} here")
        return found

    def _place(self, slab: int, offset: int, length: int) -> tuple[DeviceMemory, int]:
        """The slab, and where the payload's sums begin in it."""
        memory = self._slab(slab)
        if offset < 0 or offset % layout.TILE_BYTES or length < 1:
            raise ValueError(f"{length} bytes at {offset} are no span")
        if offset + length > layout.slab_capacity(memory.size):
            raise ValueError(f"{length} bytes at {offset} end outside the slab")
        tile = offset // layout.TILE_BYTES
        return memory, layout.sums_offset(memory.size) + tile * _SUM_BYTES


class Copiers:
    """Stores that copy for as many threads, each for one at a time."""

    def __init__(self, stores: Iterable[GpuStore]) -> None:
        self._idle: SimpleQueue[GpuStore] = SimpleQueue()
        for store in stores:
            self._idle.put(store)

    def copy(self, slab: int, offset: int, staging: Mapping, begin: int, length: int) -> int:
        """See ``jobs.Store.copy``."""
        store = self._idle.get()
        try:
            return store.copy(slab, offset, staging, begin, length)
        finally:
            self._idle.put(store)


def _pieces(length: int) -> list[tuple[int, int]]:
    """Where the pieces begin in which a payload is moved, and their bytes."""
    return [(at, min(_BUFFER_BYTES, length - at)) for at in range(0, length, _BUFFER_BYTES)]
