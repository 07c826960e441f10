"""A device worker: the only process with a context on its GPU, and with none on another.

It makes the GPU's slabs and hands their file descriptors to the supervisor, which holds them
without CUDA; a later device worker imports what an earlier one has made. Then it does for these
slabs what the store worker does for those of host memory.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Sequence
from typing import NamedTuple, NoReturn

from kmesh.cuda import driver as cuda
from kmesh.cuda.device import Device, see_all
from kmesh.cuda.driver import Attribute
from kmesh.cuda.memory import DeviceMemory
from kmesh.errors import ConfigError, CudaError, KMeshError
from kmesh_spand import ipc, jobmessages, messages
from kmesh_spand.budget import shortage
from kmesh_spand.gpurecipes import GpuRecipes
from kmesh_spand.gpustore import Copiers, GpuStore
from kmesh_spand.jobs import Copier, Crews, JobWorker, Store
from kmesh_spand.recipes import Recipes
from kmesh_spand.settings import Settings
from kmesh_spand.units import format_size

logger = logging.getLogger(__name__)

#: How often the supervisor hears that the driver still answers.
STATE_SECONDS = 2.0
#: ``CUDA_ERROR_ECC_UNCORRECTABLE``: what was read is lost.
_MEMORY_IS_BROKEN = 214


class Piece(NamedTuple):
    """A slab to make, or to import from ``fd`` if that is not negative."""

    slab: int
    size: int
    fd: int


class GpuWorker(JobWorker):
    """One life of a device worker.

    Args:
        gpu: which of the settings' GPUs.
        supervisor, control: the ways to them.
    """

    def __init__(
        self,
        settings: Settings,
        gpu: int,
        supervisor: socket.socket,
        control: socket.socket,
        pieces: Sequence[Piece],
    ) -> None:
        super().__init__(control, settings.verify_rate)
        self._gpu = gpu
        self._name = settings.gpu[gpu]
        self._headroom = settings.memory_headroom
        self._threads = settings.copy_threads
        self._supervisor = supervisor
        self._pieces = pieces
        self._slabs: dict[int, DeviceMemory] = {}
        self._telling = threading.Lock()
        self._told_at = 0.0
        self._in_host = settings.gpu_place == "host"
        self._node: int | None = None
        self._device: Device
        self._copies: Copiers
        self._checks: GpuStore
        self._recipes: GpuRecipes

    def run(self) -> int:
        """The process's life; returns its exit status."""
        try:
            see_all()
            self._device = device = Device(cuda.load(), self._name)
            device.check_whole()
            if self._in_host:
                self._node = device.host_node
            self._tell(ready=False)
            self._check_room(device)
            for piece in self._pieces:
                self._slabs[piece.slab] = self._take(device, piece)
            logger.info("GPU memory is there: %s, %s", device.name, device.uuid)
            # One for each thread that uses it.
            self._checks, encoding = (GpuStore(device, self._slabs) for _ in range(2))
            self._copies = Copiers(GpuStore(device, self._slabs) for _ in range(self._threads))
            self._recipes = GpuRecipes(device, encoding, self._send)
            try:
                crews = Crews.hired(self._threads)
            except RuntimeError as lacking:
                raise KMeshError(f"gpu: the device worker of {self._name}: {lacking}") from None
            self.serve(crews, self._supervisor, self._turn)
        except KMeshError as failed:
            setting = isinstance(failed, ConfigError)
            self._say(messages.GpuFailed(self._gpu, str(failed), setting))
            return 1

    def _check_room(self, device: Device) -> None:
        """All that is still to be made must fit: rather none of it than a part."""
        missing = sum(piece.size for piece in self._pieces if piece.fd < 0)
        if self._in_host:
            if missing and (short := shortage(missing, self._headroom)):
                raise ConfigError(f"gpu_memory: {format_size(missing)} are too much: {short}")
            return
        free, total = device.memory_info()
        if missing > free:
            raise ConfigError(
                f"gpu_memory: {format_size(missing)} are more than the {free >> 20} MiB that are "
                f"free on {device.uuid} ({total >> 20} MiB in all)"
            )

    def _take(self, device: Device, piece: Piece) -> DeviceMemory:
        if piece.fd >= 0:
            memory = DeviceMemory.open(device, piece.fd, piece.size, writable=True)
            os.close(piece.fd)
            return memory
        memory = DeviceMemory.create(device, piece.size, node=self._node)
        # The driver promises nothing about what was there before.
        memory.fill(0)
        fd = memory.export()
        try:
            with self._telling:
                ipc.send(self._supervisor, messages.GpuSlab(piece.slab, piece.size), fd)
        finally:
            os.close(fd)
        return memory

    def _tell(self, *, ready: bool) -> None:
        device = self._device
        free, total = device.memory_info()
        dma_buf = device.can(Attribute.DMA_BUF) and not self._in_host
        state = messages.GpuState(self._gpu, device.uuid, device.name, ready, free, total, dma_buf)
        self._say(state)

    def _say(self, message: ipc.AnyMessage) -> None:
        with self._telling:
            ipc.send(self._supervisor, message)

    def _turn(self) -> float:
        """Says now and then that the driver answers."""
        now = time.monotonic()
        if now >= self._told_at + STATE_SECONDS:
            self._tell(ready=True)
            self._told_at = now
        return self._told_at + STATE_SECONDS - now

    # Jobs

    def stores(self) -> tuple[Copier, Store]:
        return self._copies, self._checks

    def recipes(self) -> Recipes:
        return self._recipes

    def ends_by(self, job: ipc.AnyMessage, failed: Exception) -> None:
        """After most errors of the driver its context is gone, and the next one has to be new.

        That nobody could look says nothing about a span: control hears of it only where the
        driver says that it is the memory.
        """
        if not isinstance(failed, CudaError):
            return
        if isinstance(job, jobmessages.Verify):
            if failed.code == _MEMORY_IS_BROKEN:
                self._send(jobmessages.Failed(job.job, str(failed)))
            self._end(failed)
        if isinstance(job, jobmessages.Wipe):
            self._end(failed)
        try:
            self._device.memory_info()
        except CudaError:
            # Whoever waits for a copy hears of it by the end of the way to it.
            self._end(failed)

    def _end(self, failed: CudaError) -> NoReturn:
        try:
            self._say(messages.GpuFailed(self._gpu, str(failed), setting=False))
        finally:
            os._exit(1)


def run(
    settings: Settings,
    gpu: int,
    supervisor: socket.socket,
    control: socket.socket,
    pieces: Sequence[Piece],
) -> int:
    """Entry of the process."""
    try:
        return GpuWorker(settings, gpu, supervisor, control, pieces).run()
    except ConnectionError:
        # The supervisor is gone, and the memory with it.
        return 0
