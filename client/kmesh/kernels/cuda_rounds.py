"""Rounds of siblings to paged KV on a GPU, in one launch. See ``docs/kernels.md``.

Payloads and recipes may be in the GPU's memory or in host memory that is registered with it;
addresses are those that the GPU uses. Nothing here waits for the GPU but ``PendingRound.wait`` and
``close``. Needs CuPy, which is imported when a ``RoundRestorer`` is made.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kmesh.kernels import rounds
from kmesh.kernels.chooser import Rates, Route, choose
from kmesh.kernels.copying import Buffers, Copier
from kmesh.kernels.cuda import H200
from kmesh.kernels.device import Device, Slot
from kmesh.kernels.host import PagedLayout
from kmesh.kernels.plan import Load
from kmesh.kernels.rounds import Round, RoundStatuses
from kmesh.kernels.started import Started
from kmesh.layout import TILE_BYTES

__all__ = ["PendingRound", "RoundRestorer", "RoundSettings"]

#: Of a job of some hundred recipes, in a model of some dozen layers.
_JOB_BYTES = 4 << 20
#: Of what the bus brings, how much of it is there when all that was in the GPU's memory is moved.
_HERE_DONE = 0.8


@dataclass(frozen=True, slots=True)
class RoundSettings:
    """How much of the GPU a round may use.

    Attributes:
        ctas: thread blocks for each multiprocessor. Keys that are turned need registers: more than
            three do not fit.
        max_ctas: of one launch, at most; None: as many as are of use.
        slow_ctas: blocks that read host memory, where bases or recipes are in the GPU's own; the
            others move these meanwhile. Where all is in one memory, all blocks read it.
        stages: of 16 KiB that a block has in flight, at most.
        chunk_bytes, chunks: of the copy engine's buffers.
    """

    ctas: int = 3
    max_ctas: int | None = None
    slow_ctas: int = 64
    stages: int = 4
    chunk_bytes: int = 32 << 20
    chunks: int = 4

    def __post_init__(self) -> None:
        if self.chunks < 2:
            raise ValueError(f"chunks is {self.chunks}: one is copied while one is scattered")
        for name in ("ctas", "slow_ctas", "stages", "chunk_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, not at least 1")
        if self.max_ctas is not None and self.max_ctas < 1:
            raise ValueError(f"max_ctas is {self.max_ctas}, not at least 1")


class PendingRound(Started[rounds.RoundJob, RoundStatuses]):
    """A round that was started. ``wait`` says what became of members and bases; it raises
    ``UnsupportedError``, as ``rounds.write``, if that was seen late. Then no page was written.

    Attributes:
        read_bytes: that its kernel reads, sums left out.
        route: what brings what is in host memory.

    Args:
        job: or why there is none.
    """

    def __init__(
        self, device: Device, slot: Slot, job: rounds.RoundJob | Exception, route: Route
    ) -> None:
        super().__init__(device, slot, job)
        self.read_bytes = 0 if isinstance(job, Exception) else job.read_bytes
        self.route = route

    def _read(self, job: rounds.RoundJob, slot: Slot) -> RoundStatuses:
        return job.statuses(slot.results(job.parts, np.uint32))


class RoundRestorer:
    """Restores rounds into the pages of one engine on one GPU.

    Not thread-safe: one thread uses it at a time.

    Args:
        layout: addresses are the device's.
        device: ordinal, as this process counts.
        rates: what the choice between kernel and copy engine is made by.
        options: more for the compiler, for comparisons.
    """

    def __init__(
        self,
        layout: PagedLayout,
        *,
        device: int = 0,
        settings: RoundSettings | None = None,
        rates: Rates = H200,
        options: tuple[str, ...] = (),
    ) -> None:
        self._layout = layout
        self._device = Device(device, options)
        self._settings = settings or RoundSettings()
        self.rates = rates
        self._buffers = Buffers(self._device, self._settings.chunk_bytes, self._settings.chunks)

    def prepare(self, *, copies: bool) -> None:
        """Compiles and allocates what the first round would otherwise wait for. May be called in
        any thread, before another one uses this object.

        Args:
            copies: and the copy engine's buffers, if the GPU has memory for them.

        Raises:
            MemoryError: there is none for a job now; the first round will ask again.
        """
        with self._device:
            self._device.prepare("round", "kmesh_round_16")
            self._device.reserve(_JOB_BYTES)
            if copies:
                self._buffers.get()

    def restore(self, round: Round, stream: int, *, route: Route | None = None) -> PendingRound:
        """Starts a round on a stream: one launch, or by the copy engine one for each chunk.

        Args:
            round: its addresses are those that the device reads.
            stream: handle of a CUDA stream of the device.
            route: of what is in host memory; by default the faster one. Copies need all of each
                payload and recipe to be readable, and where one begins on the tile behind another,
                as in a slab, what is between them. Where the GPU has no memory for their buffers,
                or one does not fit a buffer, the kernel does it. ``PendingRound.route`` says what
                was done.

        Raises:
            UnsupportedError: as ``rounds.write``; nothing was started. What is seen when copies are
                under way is raised by ``PendingRound.wait``. Neither is waited for here.
        """
        device = self._device
        with device:
            if route is not Route.KERNEL:
                # Where copies are asked for together, one more costs less than what is between two.
                host = rounds.HostBytes(round, 0 if device.batch else TILE_BYTES)
                if self._by_copies(host, route) and (copier := self._buffers.get()):
                    return self._copied(host, stream, copier)
            with device.slot() as slot:
                job = self._write(slot, round, self._settings.slow_ctas)
            with device.job(stream, slot):
                self._bring(slot, job.upload_bytes, stream)
                slot.expect(job.parts)
                self._launch(job, slot, (0, job.parts), stream)
            return PendingRound(device, slot, job, Route.KERNEL)

    def close(self) -> None:
        """Waits for what is under way and frees what was allocated."""
        with self._device:
            self._device.close()
            self._buffers.close()

    def _by_copies(self, host: rounds.HostBytes, route: Route | None) -> bool:
        lengths = host.records["length"]
        if not len(lengths) or int(lengths.max()) > self._settings.chunk_bytes:
            return False
        if route is None:
            route = choose(int(lengths.sum()), 1, self._blocks, self.rates)
        return route is Route.COPY

    def _copied(self, host: rounds.HostBytes, stream: int, copier: Copier) -> PendingRound:
        # What is first on the bus is on its way before anybody has looked at recipes.
        trip = copier.start([Load(host.records, [])])
        try:
            with self._device.slot() as slot:
                try:
                    job = self._write(slot, host.moved(trip.loads[0].records["address"]), 0)
                except Exception as wrong:
                    slot.record(copier.stream)
                    return PendingRound(self._device, slot, wrong, Route.COPY)
            with self._device.job(stream, slot):
                self._bring(slot, job.upload_bytes, stream)
                slot.expect(job.parts)
                # What is there already is moved while the bus is at work, and done before it ends.
                here = int(np.searchsorted(job.orders, 1))
                brought = np.cumsum(trip.sizes)
                share = np.minimum(brought / (_HERE_DONE * brought[-1]), 1)
                turns = [0, *np.ceil(here * share).astype(int).tolist()]
                for number, (begin, end) in enumerate(trip.chunks(stream)):
                    first, behind = np.searchsorted(job.orders, (begin + 1, end + 1)).tolist()
                    self._launch(job, slot, (first, behind), stream)
                    self._launch(job, slot, (turns[number], turns[number + 1]), stream)
        except BaseException:
            # Whoever hears of it may give payloads and recipes up at once.
            copier.wait()
            raise
        finally:
            trip.end(stream)
        return PendingRound(self._device, slot, job, Route.COPY)

    @property
    def _blocks(self) -> int:
        blocks = self._settings.ctas * self._device.multiprocessors
        return min(blocks, self._settings.max_ctas or blocks)

    def _write(self, slot: Slot, round: Round, slow_blocks: int) -> rounds.RoundJob:
        return rounds.write(
            self._layout,
            round,
            stages=self._settings.stages,
            shared=self._device.shared(self._settings.ctas),
            blocks=self._blocks,
            slow_blocks=slow_blocks,
            allocate=slot.reserve,
        )

    def _bring(self, slot: Slot, size: int, stream: int) -> None:
        self._device.bring("round", slot, size, stream, self._settings.max_ctas)

    def _launch(
        self, job: rounds.RoundJob, slot: Slot, parts: tuple[int, int], stream: int
    ) -> None:
        if parts[0] < parts[1]:
            self._device.launch(
                "round", f"kmesh_round_{job.vector}", job.blocks, job.shared_bytes, slot, parts,
                stream,
            )  # fmt: skip
