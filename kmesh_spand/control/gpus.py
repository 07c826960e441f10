"""What control knows of GPUs: their memory, by file descriptor, and how their workers are."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from dataclasses import dataclass

from kmesh import errors
from kmesh.handles import HandleKind
from kmesh.layout import slab_capacity
from kmesh.v1 import admin_pb2
from kmesh_spand import ipc, messages
from kmesh_spand.core.views import SlabStatus
from kmesh_spand.settings import Settings

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Gpu:
    """One of the settings' GPUs.

    Attributes:
        setting: how the settings call it.
        device: its UUID. name: as its maker calls it; both empty until a worker has found it.
        ready: its worker runs and has all slabs. pid: of the worker, 0 while there is none.
        free, total: bytes of the whole GPU, whoever uses them.
        dma_buf: its memory can be had as DMA-BUF.
        error: what the last worker said before it ended.
    """

    setting: str
    device: str = ""
    name: str = ""
    ready: bool = False
    free: int = 0
    total: int = 0
    dma_buf: bool = False
    restarts: int = 0
    pid: int = 0
    error: str = ""


class Gpus:
    """Slabs of GPU memory and the GPUs that they are on. Needs no CUDA.

    Attributes:
        gpus: as the settings list them.
        slabs: fd and bytes of each slab that is there, by number; owned by this object.
        in_host: all of them lie in the host's memory.
    """

    def __init__(self, settings: Settings) -> None:
        self.gpus = [Gpu(name) for name in settings.gpu]
        self.slabs: dict[int, tuple[int, int]] = {}
        self.in_host = settings.gpu_place == "host"
        self._plan = {plan.slab: plan for plan in settings.gpu_slabs()}

    def hear(self, message: ipc.AnyMessage, fd: int | None) -> bool:
        """Takes a message of the supervisor, with its fd; False if it is not about GPUs."""
        match message:
            case messages.GpuSlab():
                self._keep(message, fd)
            case messages.GpuState():
                gpu = self.gpus[message.gpu]
                gpu.device, gpu.name, gpu.ready = message.device, message.name, message.ready
                gpu.free, gpu.total = message.free, message.total
                gpu.dma_buf = message.dma_buf
                if message.ready:
                    gpu.error = ""
            case messages.GpuFailed():
                self.gpus[message.gpu].error = message.error
            case messages.GpuWorker():
                gpu = self.gpus[message.gpu]
                gpu.restarts, gpu.pid = message.restarts, message.pid
                gpu.ready = gpu.ready and bool(message.pid)
            case _:
                return False
        return True

    def _keep(self, message: messages.GpuSlab, fd: int | None) -> None:
        if fd is None:
            logger.error("no file descriptor is left for a slab", extra={"slab": message.slab})
            return
        if message.slab in self.slabs:
            os.close(self.slabs[message.slab][0])
        self.slabs[message.slab] = fd, message.size

    def missing(self) -> list[int]:
        """Slabs that are made, and can't be given to sessions: no file descriptor came."""
        return [
            number
            for number, plan in self._plan.items()
            if self.gpus[plan.gpu].ready and number not in self.slabs
        ]

    def close(self) -> None:
        """Gives the memory back, as far as this process holds it."""
        for fd, _ in self.slabs.values():
            os.close(fd)
        self.slabs.clear()

    def slab_count(self) -> int:
        """Slabs that there are, or will be."""
        return len(self._plan)

    @property
    def expected(self) -> frozenset[int]:
        """All slabs of GPU memory, also those that are still to come."""
        return frozenset(self._plan)

    def planned(self, slab: int) -> bool:
        """Whether there is such a slab of GPU memory, or will be."""
        return slab in self._plan

    def gpu_of(self, slab: int) -> int | None:
        """Which GPU a slab is on; None for host memory."""
        plan = self._plan.get(slab)
        return None if plan is None else plan.gpu

    def numbers(self, gpu: int) -> list[int]:
        """Slabs of a GPU."""
        return [number for number, plan in self._plan.items() if plan.gpu == gpu]

    def capacity(self, slab: int) -> int:
        """Bytes of a slab for payloads."""
        return slab_capacity(self._plan[slab].size)

    def tier(self, device: str, field: str) -> int:
        """The core's tier of a GPU by UUID; 0, which is host memory, for none.

        Raises:
            InvalidArgument: the daemon has no memory there.
            Unavailable: it may have some, on a GPU that no worker has found yet.
        """
        if not device:
            return 0
        for number, gpu in enumerate(self.gpus):
            if gpu.device == device:
                return number + 1
        if not all(gpu.device for gpu in self.gpus):
            raise errors.Unavailable("not all of the daemon's GPUs were found yet", field=field)
        raise errors.InvalidArgument("the daemon has no memory on this GPU", field=field)

    def tier_device(self, tier: int) -> str:
        """The inverse of ``tier``."""
        return self.gpus[tier - 1].device if tier else ""

    def device(self, slab: int) -> str:
        """UUID of the GPU that a slab is on; empty for host memory."""
        plan = self._plan.get(slab)
        return "" if plan is None else self.gpus[plan.gpu].device

    @property
    def dma_buf(self) -> bool:
        """Whether some of the memory can be had as DMA-BUF."""
        return any(gpu.dma_buf for gpu in self.gpus)

    @property
    def warning(self) -> str:
        """Which GPUs are without a worker, and why, or nothing."""
        return "; ".join(
            f"GPU {gpu.device or gpu.setting}: "
            + (gpu.error or ("its worker starts" if gpu.pid else "it has no worker"))
            for gpu in self.gpus
            if not gpu.ready
        )

    def slab_rows(self, known: Iterable[SlabStatus]) -> list[admin_pb2.SlabInfo]:
        """For Admin.Status.

        Args:
            known: slabs that the core knows, of whatever memory.
        """
        used = {slab.slab: slab for slab in known}
        rows = []
        for number, plan in self._plan.items():
            slab = used.get(number, SlabStatus(number, self.capacity(number), 0, 0, ""))
            rows.append(
                admin_pb2.SlabInfo(
                    slab=number,
                    kind=HandleKind.CUDA_VMM_FD.name,
                    size=plan.size,
                    capacity=slab.capacity,
                    populated=slab.capacity if number in self.slabs else 0,
                    used=slab.used,
                    tenant=slab.tenant,
                    device=self.device(number),
                    in_host=self.in_host,
                )
            )
        return rows

    def rows(self) -> list[admin_pb2.GpuInfo]:
        """For Admin.Status."""
        return [
            admin_pb2.GpuInfo(
                device=gpu.device,
                name=gpu.name,
                ready=gpu.ready,
                restarts=gpu.restarts,
                pid=gpu.pid,
                slabs=len(sizes),
                slab_bytes=sum(sizes),
                free_bytes=gpu.free,
                total_bytes=gpu.total,
                error=gpu.error,
            )
            for number, gpu in enumerate(self.gpus)
            for sizes in [[s for n, (_, s) in self.slabs.items() if self._plan[n].gpu == number]]
        ]
