"""Spans out of pages on a GPU: into a buffer there at once, and from it into staging later.

The engine's stream waits until the pages were read, so what it computes next can't change what is
stored. Reading them into a buffer in the GPU's memory keeps that short; the bus is much slower, and
nobody waits for the copies over it.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from typing import TypeVar

import numpy as np

from kmesh.cuda.memory import Registration
from kmesh.errors import DeadlineExceeded
from kmesh.kernels.cuda import Memory, PendingStore, Settings
from kmesh.kernels.host import PagedLayout
from kmesh.kernels.plan import Request
from kmesh.session import Staging
from kmesh_vllm.gpu import Gpu
from kmesh_vllm.movers import Ids, Records
from kmesh_vllm.staging import StagingRing

logger = logging.getLogger("kmesh_vllm")

T = TypeVar("T")

_ALIGN = 256
#: Seconds that a thread of ours waits for the GPU; it takes milliseconds.
_DEVICE_WAIT = 30.0
_POLL = 0.0002


class GpuStore:
    """Takes spans; ``take`` is for the engine's thread, what it returns for one thread of ours.

    Args:
        buffer_bytes: of the buffer, which is made at the first store. It never takes more than half
            of what the GPU has left.
    """

    def __init__(
        self, gpu: Gpu, layout: PagedLayout, settings: Settings, buffer_bytes: int
    ) -> None:
        self._gpu = gpu
        self._storer = gpu.storer(layout, settings)
        self._gathering, self._fetching = gpu.stream(), gpu.stream()
        self._filled, self._read, self._fetched = gpu.event(), gpu.event(), gpu.event()
        self._wanted = buffer_bytes
        self._address = 0
        self._ring = StagingRing(0)
        self._freed = threading.Event()
        self._lock = threading.Lock()
        #: What has not ended in time, as it is asked for and then ended; ranges of the buffer that
        #: are free when all of it has.
        self._late: list[tuple[Callable[[], bool], Callable[[], object]]] = []
        self._kept: list[int] = []
        self._staging: dict[Staging, Registration] = {}

    @property
    def stuck(self) -> bool:
        """Whether the GPU hangs, and may go on writing at any time."""
        with self._lock:
            if not self._late:
                return False
            left = []
            for done, end in self._late:
                if not done():
                    left.append((done, end))
                else:
                    with contextlib.suppress(Exception):
                        end()
            self._late = left
            if left:
                return True
            logger.warning("the GPU has ended what stores had started: they go on")
            for offset in self._kept:
                self._ring.free(offset)
            self._kept.clear()
        self._freed.set()
        return False

    def take(self, records: Records, pages: Ids) -> TakenOnGpu:
        """Starts to read as many spans as the buffer has room for."""
        gpu = self._gpu
        if self.stuck:
            records = records[:0]
        elif not self._address:
            self._make_buffer(int(records["length"].max(initial=0)))
        offsets: list[int] = []
        for length in records["length"].tolist():
            offset = self._ring.allocate(length)
            if offset is None:
                break
            offsets.append(offset)
        records = records[: len(offsets)].copy()
        records["address"] = np.asarray(offsets, np.uint64) + np.uint64(self._address)
        taken = TakenOnGpu(self, records, offsets)
        if offsets:
            try:
                gpu.record(self._filled, gpu.compute())
                gpu.follow(self._gathering, self._filled)
                taken.pending = self._storer.store(
                    records, Request(pages), self._gathering, memory=Memory.GPU
                )
                gpu.record(self._read, self._gathering)
                gpu.follow(gpu.compute(), self._read)
            except BaseException:
                taken.end()
                raise
        return taken

    def room(self, length: int, timeout: float) -> bool:
        """Whether the buffer has room for so many bytes; waits a while until it has."""
        until = time.monotonic() + timeout
        while not self.stuck and not self._ring.fits(length):
            self._freed.clear()
            if self._ring.fits(length):
                return True
            if not self._ring.used or not self._freed.wait(max(until - time.monotonic(), 0)):
                return False
        return not self.stuck

    def prepare(self, staging: Staging) -> None:
        """Registers staging, once, in a thread of ours."""
        self.enter()
        seen = Registration(self._gpu.device, staging.address, staging.size, writable=True)
        with self._lock:
            self._staging[staging] = seen

    def fetch(self, records: Records, offsets: list[int], staging: Staging) -> None:
        """Copies payloads from the buffer to these offsets of the staging, and waits for it."""
        gpu = self._gpu
        if self.stuck:
            raise DeadlineExceeded("the GPU still hangs")
        with self._lock:
            seen = self._staging[staging]
            # One thread puts, in order: nobody writes what an earlier session gave. What a later
            # one gave may be there already.
            order = list(self._staging)
            old = order[: order.index(staging)]
            ended = [self._staging.pop(s) for s in old]
        for registration in ended:
            registration.close()
        for target, source, size in _runs(records, offsets):
            gpu.fetch(seen.address + target, source, size, self._fetching)
        gpu.record(self._fetched, self._fetching)
        self.until(lambda: gpu.done(self._fetched), lambda: gpu.wait(self._fetched))

    def until(self, done: Callable[[], bool], end: Callable[[], T]) -> T:
        """Waits until the GPU is done; returns what ``end`` does then.

        Raises:
            DeadlineExceeded: it hangs. It may go on writing at any time, so nothing is stored
                until it is done.
        """
        latest = time.monotonic() + (0 if self.stuck else _DEVICE_WAIT)
        while not done():
            if time.monotonic() >= latest:
                with self._lock:
                    first = not self._late
                    self._late.append((done, end))
                if first:
                    logger.error("nothing is stored: the GPU does not end what a store has started")
                raise DeadlineExceeded("the GPU does not end what a store has started")
            time.sleep(_POLL)
        return end()

    def enter(self) -> None:
        """A thread of ours begins."""
        self._gpu.enter()

    def free(self, offset: int) -> None:
        """The buffer's range that begins there is free again, unless the GPU may still use it."""
        with self._lock:
            if self._late:
                self._kept.append(offset)
                return
            self._ring.free(offset)
        self._freed.set()

    def close(self) -> None:
        """Waits for what is under way and gives memory back."""
        self._storer.close()
        for registration in self._staging.values():
            registration.close()
        self._staging.clear()
        if self._address:
            self._gpu.free(self._address)
            self._address = 0

    def _make_buffer(self, smallest: int) -> None:
        # Half of what is left: the engine may want some of it later.
        size = min(self._wanted, self._gpu.device.memory_info()[0] // 2)
        while size >= max(smallest, 1):
            try:
                self._address = self._gpu.allocate(size)
            except Exception as wrong:
                logger.warning("no %d bytes of GPU memory to store through: %s", size, str(wrong))
                size //= 2
                continue
            self._ring = StagingRing(size, align=_ALIGN)
            return


class TakenOnGpu:
    """See ``movers.Taken``.

    Attributes:
        pending: the reading of the pages.
    """

    kept = True

    def __init__(self, store: GpuStore, records: Records, offsets: list[int]) -> None:
        self._store = store
        self._records = records
        self._offsets = offsets
        self._freed = 0
        self.count = len(offsets)
        self.pending: PendingStore | None = None
        self._statuses = b""

    def put(self, first: int, offsets: list[int], staging: Staging) -> bytes:
        self._store.enter()
        if self.pending is not None:
            self._statuses, _ = self._store.until(self.pending.done, self.pending.wait)
            self.pending = None
        last = first + len(offsets)
        self._store.fetch(self._records[first:last], offsets, staging)
        self._free(last)
        return self._statuses[first:last]

    def drop(self) -> None:
        # Should it fail, the GPU says what is wrong.
        with contextlib.suppress(Exception):
            self._store.enter()
        self.end()

    def end(self) -> None:
        """As ``drop``, in the engine's thread."""
        if self.pending is not None:
            try:
                self._store.until(self.pending.done, self.pending.wait)
            except DeadlineExceeded:
                pass  # Its part of the buffer is still being written, and kept.
            except Exception as wrong:
                logger.error("pages that were read for a store: %s", str(wrong))
            self.pending = None
        self._free(self.count)

    def _free(self, last: int) -> None:
        for offset in self._offsets[self._freed : last]:
            self._store.free(offset)
        self._freed = max(self._freed, last)


def _runs(records: Records, offsets: list[int]) -> list[tuple[int, int, int]]:
    """(target, source, bytes) of the fewest copies: neighbours on both sides are one."""
    runs: list[tuple[int, int, int]] = []
    sources, lengths = records["address"].tolist(), records["length"].tolist()
    for target, source, size in zip(offsets, sources, lengths, strict=True):
        if runs:
            at, behind, before = runs[-1]
            if (target - at, source - behind) == (before, before):
                runs[-1] = at, behind, before + size
                continue
        runs.append((target, source, size))
    return runs
