"""Spans to and from paged KV on a GPU. See ``docs/kernels.md``.

Payloads may be in the GPU's memory or in host memory that is registered with it; addresses are
those that the GPU uses. Nothing here waits for the GPU but ``Pending.wait`` and ``close``.
Needs CuPy (extras ``cuda12`` and ``cuda13``), which is imported when a ``Restorer`` or a
``Storer`` is made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kmesh import _host
from kmesh.kernels import plan
from kmesh.kernels.chooser import Rates, Route, choose
from kmesh.kernels.copying import Buffers, Copier
from kmesh.kernels.device import UNIT_THREADS, Device, Slot
from kmesh.kernels.host import PagedLayout, part_reads
from kmesh.kernels.plan import Load, Memory, Request
from kmesh.kernels.rotary import Rotary
from kmesh.kernels.started import Started

__all__ = ["H200", "Load", "Memory", "Pending", "Request", "Restorer", "Settings", "Storer"]

#: Seen on an H200 (PCIe 5.0 x16); what another machine does is measured, not guessed.
H200 = Rates(
    kernel=50.9e9,
    kernel_block=4.9e9,
    copy=55.1e9,
    write=3.1e12,
    write_block=18.0e9,
    kernel_start=45e-6,
    copy_start=110e-6,
    copy_chunk=4 << 20,
)


#: From how many requests on units are read in bursts; below, more than a few stages only wait.
_BURST_REQUESTS = 8
_SINGLE_STAGES = 3


@dataclass(frozen=True, slots=True)
class Grid:
    """Of one launch: blocks, and the most stages and shared memory of each; the same for one that
    moves units, and how many units it asks for together."""

    blocks: int
    stages: int
    shared: int
    unit_blocks: int
    unit_stages: int
    unit_shared: int
    burst: int


@dataclass(frozen=True, slots=True)
class Settings:
    """How much of the GPU a restore or a store may use.

    Attributes:
        max_ctas: thread blocks of one launch, at most; None: as many as are of use.
        host_ctas, host_stages: blocks where payloads are in host memory and one request wants
            them, and how many stages of 16 KiB each of them has in flight. A few blocks fill the
            bus; more of them only wait for it.
        gpu_ctas, gpu_stages: the same for each multiprocessor, for payloads in the GPU's memory
            or for several requests, whose pages are more to write than the bus brings.
        unit_ctas, unit_stages: where whole pages are moved, from the GPU's memory: blocks, one
            each of so many multiprocessors (None: of all), and how many stages of 32 KiB each of
            them has. 0 stages: nothing is moved that way.
        chunk_bytes, chunks: of the copy engine's buffers.
    """

    max_ctas: int | None = None
    host_ctas: int = 16
    host_stages: int = 3
    gpu_ctas: int = 4
    gpu_stages: int = 2
    unit_ctas: int | None = None
    unit_stages: int = 6
    chunk_bytes: int = 32 << 20
    chunks: int = 3

    def __post_init__(self) -> None:
        if self.unit_stages < 0 or (self.unit_ctas is not None and self.unit_ctas < 1):
            raise ValueError(f"unit_stages is {self.unit_stages}, unit_ctas {self.unit_ctas}")
        for name in ("host_ctas", "host_stages", "gpu_ctas", "gpu_stages", "chunk_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, not at least 1")
        if self.max_ctas is not None and self.max_ctas < 1:
            raise ValueError(f"max_ctas is {self.max_ctas}, not at least 1")
        if self.chunks < 2:
            raise ValueError(f"chunks is {self.chunks}: one is copied while one is scattered")

    def grid(self, device: Device, memory: Memory, requests: int = 1) -> Grid:
        """Blocks of a launch for so many requests."""
        each = self.gpu_ctas
        blocks, stages = each * device.multiprocessors, self.gpu_stages
        if memory is Memory.HOST:
            stages = self.host_stages
            if requests == 1:
                blocks, each = self.host_ctas, 1
            elif requests <= 4:
                blocks, each = device.multiprocessors, 1
        # Reads over the bus are slower in units: their runs lie far apart.
        units = self.unit_ctas or device.multiprocessors
        unit_stages = self.unit_stages if memory is Memory.GPU else 0
        # Many pages for each read: reading in bursts spares the memory turning around.
        burst = unit_stages if requests >= _BURST_REQUESTS else 1
        if burst == 1:
            unit_stages = min(unit_stages, _SINGLE_STAGES)
        most = self.max_ctas or max(blocks, units)
        return Grid(
            blocks=min(blocks, most),
            stages=stages,
            shared=device.shared(each),
            unit_blocks=min(units, most),
            unit_stages=unit_stages,
            unit_shared=device.shared(1),
            burst=max(burst, 1),
        )


class Pending(Started[plan.Job, list[list[bytes]]]):
    """A restore that was started.

    ``wait`` gives for each load, for each of its requests, a ``Status`` for each part, one byte
    each; it raises as ``plan.write``, if that was seen late. Then no page was written.

    Attributes:
        route: what brings payloads in host memory.
        read_bytes: of payloads that are read where they lie: by the kernel the tiles that hold
            what is wanted, by the copy engine all.

    Args:
        job: or why there is none.
    """

    def __init__(
        self, device: Device, slot: Slot, job: plan.Job | Exception, route: Route, read_bytes: int
    ) -> None:
        super().__init__(device, slot, job)
        self.route = route
        self.read_bytes = read_bytes

    def _read(self, job: plan.Job, slot: Slot) -> list[list[bytes]]:
        return job.statuses(slot.results(job.parts, np.uint32))


def _whole(loads: Sequence[Load]) -> int:
    """Bytes of all payloads."""
    return sum([_host.payload_bytes(load.records)[0] for load in loads])


class Restorer:
    """Restores spans into the pages of one engine on one GPU.

    Not thread-safe: one thread uses it at a time.

    Args:
        layout: addresses are the device's.
        device: ordinal, as this process counts.
        rotary: how keys are turned, where a request asks for it.
        rates: what the choice between kernel and copy engine is made by.
        options: more for the compiler, for comparisons.

    Attributes:
        rates: the same, which may be set at any time.
    """

    def __init__(
        self,
        layout: PagedLayout,
        *,
        device: int = 0,
        rotary: Rotary | None = None,
        settings: Settings | None = None,
        rates: Rates = H200,
        options: tuple[str, ...] = (),
    ) -> None:
        self._layout = layout
        self._device = Device(device, options)
        self._rotary = rotary
        self._settings = settings or Settings()
        self.rates = rates
        self._buffers = Buffers(self._device, self._settings.chunk_bytes, self._settings.chunks)
        self._grids: dict[tuple[Memory, int], Grid] = {}

    def prepare(self, *, copies: bool) -> None:
        """Compiles and allocates what the first restore would otherwise wait for. May be called in
        any thread, before another one uses this object.

        Args:
            copies: and the copy engine's buffers, if the GPU has memory for them.

        Raises:
            MemoryError: there is none for a job now; the first restore will ask again.
        """
        with self._device:
            self._device.prepare("restore", "kmesh_restore_16")
            self._device.reserve()
            if copies:
                self._buffers.get()

    def restore(
        self,
        loads: Sequence[Load],
        stream: int,
        *,
        memory: Memory,
        route: Route | None = None,
    ) -> Pending:
        """Starts loads on a stream, all in one launch (or one a chunk, by the copy engine).

        Args:
            loads: ``plan.merged`` puts those together that can share a read.
            stream: handle of a CUDA stream of the device.
            memory: where all the payloads are.
            route: of payloads in host memory; by default the faster one. Copies need all of each
                payload to be readable, and neighbours in memory to be of one registration; where
                the GPU has no memory for their buffers, the kernel does it. ``Pending.route``
                says what was done.

        Raises:
            UnsupportedError, ValueError: as ``plan.write``; nothing was started. What is seen when
                copies are under way is raised by ``Pending.wait``. Neither is waited for here.
        """
        requests = max([len(load.requests) for load in loads], default=0)
        grid = self._grid(memory, requests)
        if memory is Memory.GPU:
            route = Route.KERNEL
        elif route is None:
            route = self._choose(loads, requests, grid)
        if route is Route.COPY and not self._fits(loads, requests):
            route = Route.KERNEL
        with self._device:
            if route is Route.COPY and (copier := self._buffers.get()):
                return self._by_copies(loads, requests, stream, copier)
            with self._device.slot() as slot:
                job = self._write(slot, loads, grid)
            with self._device.job(stream, slot):
                self._bring(slot, job.upload_bytes, stream)
                slot.expect(job.parts)
                self._launch(job, slot, grid, (0, job.parts), stream)
            return Pending(self._device, slot, job, Route.KERNEL, job.read_bytes)

    def close(self) -> None:
        """Waits for what is under way and frees what was allocated."""
        with self._device:
            self._device.close()
            self._buffers.close()

    def _grid(self, memory: Memory, requests: int) -> Grid:
        grid = self._grids.get((memory, requests))
        if grid is None:
            grid = self._settings.grid(self._device, memory, requests)
            self._grids[memory, requests] = grid
        return grid

    def _fits(self, loads: Sequence[Load], requests: int) -> bool:
        # What is for nobody has no part in the job, what is read more than once would be copied
        # twice, and what fits no buffer can't be.
        if not all([load.requests for load in loads]):
            return False
        largest = max([_host.payload_bytes(load.records)[1] for load in loads], default=0)
        return requests <= plan.SHARED_BY and largest <= self._settings.chunk_bytes

    def _choose(self, loads: Sequence[Load], requests: int, grid: Grid) -> Route:
        row = self._layout.row_bytes
        size = sum(sum(part_reads(load.records.data, row)) for load in loads)
        if not size or not requests:
            return Route.KERNEL
        return choose(size, requests, grid.blocks, self.rates, _whole(loads))

    def _by_copies(
        self, loads: Sequence[Load], requests: int, stream: int, copier: Copier
    ) -> Pending:
        grid = self._grid(Memory.GPU, requests)
        # What is first on the bus is on its way before the job is written.
        trip = copier.start(loads)
        try:
            with self._device.slot() as slot:
                try:
                    job = self._write(slot, trip.loads, grid)
                except Exception as wrong:
                    slot.record(copier.stream)
                    return Pending(self._device, slot, wrong, Route.COPY, 0)
            with self._device.job(stream, slot):
                self._bring(slot, job.upload_bytes, stream)
                slot.expect(job.parts)
                for parts in trip.chunks(stream):
                    self._launch(job, slot, grid, parts, stream)
        except BaseException:
            # Whoever hears of it may give the payloads up at once.
            copier.wait()
            raise
        finally:
            trip.end(stream)
        return Pending(self._device, slot, job, Route.COPY, _whole(loads))

    def _write(self, slot: Slot, loads: Sequence[Load], grid: Grid) -> plan.Job:
        return plan.write(
            self._layout,
            loads,
            rotary=self._rotary,
            stages=grid.stages,
            shared=grid.shared,
            unit_stages=grid.unit_stages,
            unit_shared=grid.unit_shared,
            burst=grid.burst,
            allocate=slot.reserve,
        )

    def _bring(self, slot: Slot, size: int, stream: int) -> None:
        self._device.bring("restore", slot, size, stream, self._settings.max_ctas)

    def _launch(
        self, job: plan.Job, slot: Slot, grid: Grid, parts: tuple[int, int], stream: int
    ) -> None:
        way = "units_" if job.units else "turn_" if job.turns else ""
        blocks, threads = (grid.unit_blocks, UNIT_THREADS) if job.units else (grid.blocks, 0)
        self._device.launch(
            "restore", f"kmesh_restore_{way}{job.vector}",
            max(min(blocks, job.items + job.units), 1), job.shared_bytes, slot, parts, stream,
            threads,
        )  # fmt: skip


class PendingStore(Started[plan.Job, tuple[bytes, list[npt.NDArray[np.uint64]]]]):
    """A store that was started.

    ``wait`` gives a ``Status`` for each part, and the sums of each part's tiles, from the first to
    the last of which a byte was moved, bytes that were not moved taken as zero.
    """

    def _read(self, job: plan.Job, slot: Slot) -> tuple[bytes, list[npt.NDArray[np.uint64]]]:
        sums = job.sums(slot.results(job.tiles, np.uint64).copy())
        statuses = job.statuses(np.zeros(job.parts, dtype=np.uint32))
        return statuses[0][0], sums


class Storer:
    """Copies pages of one engine into payloads, on the GPU or in registered host memory.

    Args: as ``Restorer``'s.
    """

    def __init__(
        self, layout: PagedLayout, *, device: int = 0, settings: Settings | None = None
    ) -> None:
        self._layout = layout
        self._device = Device(device)
        self._settings = settings or Settings()

    def store(
        self, records: npt.NDArray[np.void], request: Request, stream: int, *, memory: Memory
    ) -> PendingStore:
        """Starts a store on a stream; sums are of what was written.

        Args:
            records: parts, as an array of ``plan.RECORD``; root and sums_address mean nothing.
            memory: where the payloads are.

        Raises:
            UnsupportedError: as ``plan.write``; nothing was started.
        """
        blocks = self._settings.grid(self._device, memory, requests=8).blocks
        with self._device:
            with self._device.slot() as slot:
                job = plan.write(self._layout, [Load(records, [request])], allocate=slot.reserve)
            with self._device.job(stream, slot):
                most = self._settings.max_ctas
                self._device.bring("store", slot, job.upload_bytes, stream, most)
                slot.expect(2 * job.tiles)
                blocks = max(min(blocks, job.items), 1)
                name = f"kmesh_store_{job.vector}"
                self._device.launch("store", name, blocks, 0, slot, None, stream)
            return PendingStore(self._device, slot, job)

    def close(self) -> None:
        """Waits for what is under way and frees what was allocated."""
        with self._device:
            self._device.close()


def root_of(sums: npt.NDArray[np.uint64]) -> int:
    """The root of a whole payload's sums."""
    sums = np.ascontiguousarray(sums)
    return _host.fold(sums.ctypes.data, len(sums))
