"""The store worker and the device workers: each job goes to the one whose memory it is about."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from kmesh_spand import messages
from kmesh_spand.control.exports import Made
from kmesh_spand.control.recodes import Recode
from kmesh_spand.control.storeworker import StoreWorker
from kmesh_spand.core import effects


class Workers:
    """What carries out jobs. See ``StoreWorker`` for the methods.

    Args:
        host: has the slabs of host memory.
        gpus: device workers, as the settings list their GPUs.
        gpu_of: which of them has a slab; None for host memory.
    """

    def __init__(
        self,
        host: StoreWorker,
        gpus: Sequence[StoreWorker],
        gpu_of: Callable[[int], int | None],
    ) -> None:
        self.host = host
        self.gpus = gpus
        self._gpu_of = gpu_of

    def _of(self, slab: int) -> StoreWorker:
        gpu = self._gpu_of(slab)
        return self.host if gpu is None else self.gpus[gpu]

    def copy(self, job: effects.Copy) -> None:
        self._of(job.slab).copy(job)

    def verify(self, job: effects.Verify) -> None:
        self._of(job.slab).verify(job)

    def wipe(self, job: effects.Wipe) -> None:
        self._of(job.slab).wipe(job)

    def replaced(self, message: messages.Replaced) -> None:
        self.host.replaced(message)

    def recode(self, job: Recode) -> None:
        # Base, span and recipe lie in one tier.
        slab = job.span.slab if isinstance(job, effects.Encode) else job.slab
        self._of(slab).recode(job)

    def forget_recipe(self, forgotten: effects.ForgetRecipe) -> None:
        self._of(forgotten.slab).forget_recipe(forgotten.job)

    def export(self, slab: int, offset: int, length: int, made: Made) -> None:
        self._of(slab).export(slab, offset, length, made)

    def add_staging(self, session: int, fd: int, size: int) -> None:
        """All of them may read from it, or none.

        Raises:
            OSError: no file descriptor is left; ``fd`` stays the caller's.
        """
        try:
            for gpu in self.gpus:
                copy = os.dup(fd)
                try:
                    gpu.add_staging(session, copy, size)
                except OSError:
                    os.close(copy)
                    raise
            self.host.add_staging(session, fd, size)
        except OSError:
            for gpu in self.gpus:
                gpu.drop_staging(session)
            raise

    def drop_staging(self, session: int) -> int:
        for gpu in self.gpus:
            gpu.drop_staging(session)
        return self.host.drop_staging(session)

    def staging_size(self, session: int) -> int:
        return self.host.staging_size(session)

    def staging_fd(self, session: int) -> int:
        return self.host.staging_fd(session)

    def check(self) -> None:
        for worker in (self.host, *self.gpus):
            worker.check()

    def close(self) -> None:
        for worker in (self.host, *self.gpus):
            worker.close()
