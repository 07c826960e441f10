"""Brings to the host what only a GPU reads: recipes' tables, by which rounds are planned, and spans
that have to be decoded."""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from kmesh import _host
from kmesh.cuda.device import Device
from kmesh.cuda.memory import Registration
from kmesh.errors import DeadlineExceeded
from kmesh_vllm.gpu import Gpu

if TYPE_CHECKING:
    from kmesh.kernels.cuda_fetch import PendingFetch

#: What is brought of a recipe at first: most have smaller tables, and the rest of larger ones takes
#: a second turn. Multiples of what ``kmesh.codec.many.tables_bytes`` counts by.
_USUAL_BYTES, _MOST_BYTES = 4096, 16384
#: Bytes that one launch or copy brings, so that no more memory is pinned. Whole pages.
_LAUNCH_BYTES = 8 << 20
#: Seconds that a thread of ours waits for the GPU; it takes less than milliseconds.
_DEVICE_WAIT = 30.0
_POLL = 50e-6


class Brought(NamedTuple):
    """Copies of heads and tables: their addresses here, as long as ``kept`` lives."""

    addresses: npt.NDArray[np.uint64]
    kept: object


class _Window:
    """Memory that the GPU copies into, so that starting a copy does not wait for its end.

    Raises:
        CudaError, OSError: there is no such memory.
    """

    def __init__(self, device: Device, size: int) -> None:
        self._memory = mmap.mmap(-1, size)
        try:
            here = _host.address(self._memory)
            self._seen = Registration(device, here, size, writable=True)
        except BaseException:
            self._memory.close()
            raise
        self.size, self.address = size, self._seen.address

    def read(self, size: int) -> memoryview:
        return memoryview(self._memory)[:size]

    def close(self) -> None:
        self._seen.close()


class Bringer:
    """For threads of ours, which wait; one at a time gets its turn.

    Args:
        begin, end: as ``GpuMemory.join`` and ``end``: what is read for a load stays, also if the
            GPU hangs and the load, which began before its turn, has failed and ended.
    """

    def __init__(self, gpu: Gpu, begin: Callable[[], int], end: Callable[[int], None]) -> None:
        self._gpu = gpu
        self._begin, self._end = begin, end
        self._fetcher = gpu.fetcher()
        self._stream, self._event = gpu.stream(), gpu.event()
        self._lock = threading.Lock()
        self._usual = _USUAL_BYTES
        #: Made when data is asked for: few ever do.
        self._window: _Window | None = None
        #: What the GPU has not ended in time, where it may still write, and a load's number.
        self._late: tuple[Callable[[], bool], PendingFetch | None, int] | None = None

    @property
    def stuck(self) -> bool:
        """Whether the GPU hangs, and may go on reading and writing at any time."""
        late = self._late
        return late is not None and not late[0]()

    def tables(self, addresses: npt.NDArray[np.uint64], lengths: npt.NDArray[np.uint64]) -> Brought:
        """What ``kmesh.codec.ManyTables`` reads of recipes, at least one, that lie on tiles.

        Args:
            addresses, lengths: u64, of each, as the GPU sees it.

        Raises:
            DeadlineExceeded: the GPU hangs.
        """
        from kmesh.codec.many import tables_bytes

        with self._turn() as load:
            first = _units(np.minimum(lengths, np.uint64(self._usual)))
            memory, here = self._pieces(addresses, first, load)
            # By the copies of heads, and no others are read from here on.
            sizes = tables_bytes(here, lengths)
            more = sizes > first
            if not more.any():
                return Brought(here, memory)
            known, left = first[more], sizes[more] - first[more]
            rest, _ = self._pieces(addresses[more] + known, left, load)
            self._usual = max(self._usual, min(int(sizes.max()), _MOST_BYTES))
        begins = here[more] - np.uint64(_address_of(memory))
        parts = _cut(memory, begins, known), _cut(rest, np.cumsum(left) - left, left)
        whole = np.concatenate([part for pair in zip(*parts, strict=True) for part in pair])
        ends = np.cumsum(sizes[more])
        here[more] = ends - sizes[more] + np.uint64(_address_of(whole))
        return Brought(here, (memory, whole))

    def data(self, address: int, size: int) -> bytearray:
        """A copy of bytes, at the GPU's address.

        Raises:
            DeadlineExceeded: the GPU hangs.
            CudaError, OSError: there is no memory that it could copy into.
        """
        found = bytearray(size)
        with self._turn() as load:
            window = self._window = self._window or _Window(self._gpu.device, _LAUNCH_BYTES)
            for at in range(0, size, window.size):
                some = min(window.size, size - at)
                self._gpu.fetch(window.address, address + at, some, self._stream)
                self._gpu.record(self._event, self._stream)
                self._wait(lambda: self._gpu.done(self._event), None, load)
                self._gpu.wait(self._event)
                found[at : at + some] = window.read(some)
        return found

    def close(self) -> None:
        """Frees what was allocated; nothing is under way."""
        self._fetcher.close()
        if self._window is not None:
            self._window.close()
            self._window = None

    def _pieces(
        self, addresses: npt.NDArray[np.uint64], sizes: npt.NDArray[np.uint64], load: int
    ) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint64]]:
        """Memory with copies one behind the other, and their addresses."""
        ends = np.cumsum(sizes)
        memory = np.empty(int(ends[-1]), np.uint8)
        starts = ends - sizes
        at = 0
        while at < len(sizes):
            room = np.searchsorted(ends, starts[at] + np.uint64(_LAUNCH_BYTES), side="right")
            behind = max(int(room), at + 1)
            pending = self._fetcher.fetch(addresses[at:behind], sizes[at:behind], self._stream)
            self._wait(pending.done, pending, load)
            memory[int(starts[at]) : int(ends[behind - 1])] = pending.wait()
            at = behind
        return memory, starts + np.uint64(_address_of(memory))

    @contextmanager
    def _turn(self) -> Iterator[int]:
        """A thread's turn, with the number of the load that keeps what is read."""
        with self._lock:
            self._gpu.enter()
            if self._late is not None:
                done, written, load = self._late
                if not done():
                    raise DeadlineExceeded("the GPU still hangs")
                self._late = None
                try:
                    if written is not None:
                        # Else what it was started with would stay in use.
                        written.wait()
                finally:
                    self._end(load)
            load = self._begin()
            try:
                yield load
            finally:
                if self._late is None:
                    self._end(load)

    def _wait(self, done: Callable[[], bool], written: PendingFetch | None, load: int) -> None:
        """Waits until the GPU has written that."""
        latest = time.monotonic() + _DEVICE_WAIT
        while not done():
            if time.monotonic() >= latest:
                self._late = done, written, load
                raise DeadlineExceeded("the GPU does not end what brings recipes to the host")
            time.sleep(_POLL)


def _address_of(memory: npt.NDArray[np.uint8]) -> int:
    return int(memory.ctypes.data)


def _cut(
    memory: npt.NDArray[np.uint8], begins: npt.NDArray[np.uint64], sizes: npt.NDArray[np.uint64]
) -> list[npt.NDArray[np.uint8]]:
    """Parts of it."""
    each = zip(begins.tolist(), sizes.tolist(), strict=True)
    return [memory[begin : begin + size] for begin, size in each]


def _units(sizes: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Rounded up to multiples of 64, of which a recipe's last tile has the bytes."""
    return (sizes + np.uint64(63)) // np.uint64(64) * np.uint64(64)
