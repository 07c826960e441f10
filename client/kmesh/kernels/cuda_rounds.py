"""Rounds of siblings to paged KV on a GPU, in one launch. See ``docs/kernels.md``.

Payloads and recipes may be in the GPU's memory or in host memory that is registered with it;
addresses are those that the GPU uses. Nothing here waits for the GPU but ``PendingRound.wait`` and
``close``. Needs CuPy, which is imported when a ``RoundRestorer`` is made.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kmesh.kernels import rounds
from kmesh.kernels.device import Device, Slot
from kmesh.kernels.host import PagedLayout
from kmesh.kernels.rounds import Round, RoundStatuses

__all__ = ["PendingRound", "RoundRestorer", "RoundSettings"]


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
    """

    ctas: int = 3
    max_ctas: int | None = None
    slow_ctas: int = 64
    stages: int = 4

    def __post_init__(self) -> None:
        for name in ("ctas", "slow_ctas", "stages"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, not at least 1")
        if self.max_ctas is not None and self.max_ctas < 1:
            raise ValueError(f"max_ctas is {self.max_ctas}, not at least 1")


class PendingRound:
    """A round that was started. Its pages, payloads and recipes stay alive until it ends.

    Attributes:
        read_bytes: that it reads, sums left out.
    """

    def __init__(self, device: Device, slot: Slot, job: rounds.RoundJob) -> None:
        self._device = device
        self._slot: Slot | None = slot
        self._job = job
        self._statuses = RoundStatuses(b"", b"")
        self.read_bytes = job.read_bytes

    def done(self) -> bool:
        """Whether it has ended."""
        return self._slot is None or self._slot.done()

    def wait(self) -> RoundStatuses:
        """Waits for the end; says what became of members and bases."""
        if self._slot is not None:
            self._slot.wait()
            self._statuses = self._job.statuses(self._slot.results(self._job.parts, np.uint32))
            self._device.release(self._slot)
            self._slot = None
        return self._statuses


class RoundRestorer:
    """Restores rounds into the pages of one engine on one GPU.

    Not thread-safe: one thread uses it at a time.

    Args:
        layout: addresses are the device's.
        device: ordinal, as this process counts.
        options: more for the compiler, for comparisons.
    """

    def __init__(
        self,
        layout: PagedLayout,
        *,
        device: int = 0,
        settings: RoundSettings | None = None,
        options: tuple[str, ...] = (),
    ) -> None:
        self._layout = layout
        self._device = Device(device, options)
        self._settings = settings or RoundSettings()

    def restore(self, round: Round, stream: int) -> PendingRound:
        """Starts a round on a stream.

        Args:
            round: its addresses are those that the device reads.
            stream: handle of a CUDA stream of the device.

        Raises:
            UnsupportedError: as ``rounds.write``; nothing was started.
        """
        settings, device = self._settings, self._device
        blocks = settings.ctas * device.multiprocessors
        with device:
            with device.job(stream) as slot:
                job = rounds.write(
                    self._layout,
                    round,
                    stages=settings.stages,
                    shared=device.shared(settings.ctas),
                    blocks=min(blocks, settings.max_ctas or blocks),
                    slow_blocks=settings.slow_ctas,
                    allocate=slot.reserve,
                )
                slot.upload(job.upload_bytes, stream)
                slot.expect(job.parts)
                device.launch(
                    "round", f"kmesh_round_{job.vector}", job.blocks, job.shared_bytes, slot,
                    (0, job.parts), stream,
                )  # fmt: skip
            return PendingRound(device, slot, job)

    def close(self) -> None:
        """Waits for what is under way and frees what was allocated."""
        with self._device:
            self._device.close()
