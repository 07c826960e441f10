"""A device worker: the only process with a context on its GPU, and with none on another.

It makes the GPU's slabs and hands their file descriptors to the supervisor, which holds them
without CUDA; a later device worker imports what an earlier one has made. Then it does for these
slabs what the store worker does for those of host memory.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from kmesh.cuda import driver as cuda
from kmesh.cuda.device import Device, see_all
from kmesh.cuda.memory import DeviceMemory
from kmesh.errors import ConfigError, KMeshError
from kmesh.mapping import Mapping
from kmesh_spand import ipc, logs
from kmesh_spand.gpustore import GpuStore
from kmesh_spand.settings import Settings
from kmesh_spand.throttle import Throttle
from kmesh_spand.units import format_size

logger = logging.getLogger(__name__)

#: How often the supervisor hears that the driver still answers.
STATE_SECONDS = 2.0


class Piece(NamedTuple):
    """A slab to make, or to import from ``fd`` if that is not negative."""

    slab: int
    size: int
    fd: int


class GpuWorker:
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
        self._gpu = gpu
        self._name = settings.gpu[gpu]
        self._supervisor = supervisor
        self._control = control
        self._pieces = pieces
        self._slabs: dict[int, DeviceMemory] = {}
        self._staging: dict[int, Mapping] = {}
        self._throttle = Throttle(settings.verify_rate)
        self._sending = threading.Lock()

    def run(self) -> int:
        """The process's life; returns its exit status."""
        try:
            see_all()
            device = Device(cuda.load(), self._name)
            self._tell(device, ready=False)
            self._check_room(device)
            for piece in self._pieces:
                self._slabs[piece.slab] = self._take(device, piece)
            logger.info("GPU memory is there: %s, %s", device.name, device.uuid)
            self._serve(device)
        except KMeshError as failed:
            setting = isinstance(failed, ConfigError)
            ipc.send(self._supervisor, ipc.GpuFailed(self._gpu, str(failed), setting))
            return 1
        return 0

    def _check_room(self, device: Device) -> None:
        """All that is still to be made must fit: rather none of it than a part."""
        missing = sum(piece.size for piece in self._pieces if piece.fd < 0)
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
        memory = DeviceMemory.create(device, piece.size)
        # The driver promises nothing about what was there before.
        memory.fill(0)
        fd = memory.export()
        try:
            ipc.send(self._supervisor, ipc.GpuSlab(piece.slab, piece.size), fd)
        finally:
            os.close(fd)
        return memory

    def _tell(self, device: Device, *, ready: bool) -> None:
        free, total = device.memory_info()
        state = ipc.GpuState(self._gpu, device.uuid, device.name, ready, free, total)
        ipc.send(self._supervisor, state)

    # Jobs

    def _serve(self, device: Device) -> None:
        """Until the supervisor is gone."""
        # Copies never queue behind verifications.
        copies, checks = (GpuStore(device, self._slabs) for _ in range(2))
        crews = {copies: ThreadPoolExecutor(1, "copy"), checks: ThreadPoolExecutor(1, "verify")}
        poll = select.poll()
        for channel in (self._supervisor, self._control):
            poll.register(channel, select.POLLIN)
        due = 0.0
        while True:
            now = time.monotonic()
            if now >= due:
                self._tell(device, ready=True)
                due = now + STATE_SECONDS
            ready = {fd for fd, _ in poll.poll(max(1, int((due - now) * 1000)))}
            # The supervisor says nothing: what can be read is its end.
            if self._supervisor.fileno() in ready:
                os._exit(0)
            if self._control.fileno() in ready:
                try:
                    message, fd = ipc.receive(self._control)
                except (EOFError, ConnectionError):
                    # The supervisor is about to end this process.
                    poll.unregister(self._control)
                    continue
                store = copies if isinstance(message, ipc.Copy) else checks
                if isinstance(message, ipc.Copy | ipc.Verify | ipc.Wipe):
                    crews[store].submit(self._job, store, message)
                else:
                    self._heard(message, fd)

    def _heard(self, message: ipc.AnyMessage, fd: int | None) -> None:
        match message:
            case ipc.Beat():
                self._answer(message)
            case ipc.Staging() if fd is not None:
                try:
                    self._staging[message.session] = Mapping(fd, message.size)
                except OSError as failed:
                    # Its copies will say that there is no staging.
                    logger.error("staging: %s", failed, extra={"session": message.session})
                finally:
                    os.close(fd)
            case ipc.DropStaging():
                dropped = self._staging.pop(message.session, None)
                if dropped is not None:
                    dropped.close()
            case _:
                logger.error("unexpected message %s", type(message).__name__)

    def _job(self, store: GpuStore, job: ipc.Copy | ipc.Verify | ipc.Wipe) -> None:
        answer: ipc.AnyMessage
        about = (job.session, job.request) if isinstance(job, ipc.Copy) else (0, 0)
        with logs.about(*about):
            try:
                match job:
                    case ipc.Copy():
                        answer = self._copy(store, job)
                    case ipc.Verify():
                        self._throttle.wait(job.length)
                        good = store.verify(job.slab, job.offset, job.length, job.root)
                        answer = ipc.Verified(job.job, good)
                    case ipc.Wipe():
                        store.wipe(job.slab)
                        answer = ipc.Wiped(job.job)
            except Exception as failed:
                logger.exception("a job failed", extra={"job": job.job})
                answer = ipc.Failed(job.job, f"{type(failed).__name__}: {failed}")
        self._answer(answer)

    def _copy(self, store: GpuStore, job: ipc.Copy) -> ipc.AnyMessage:
        staging = self._staging.get(job.session)
        if staging is None:
            raise ValueError("the session has no staging")
        began = time.perf_counter()
        root = store.copy(job.slab, job.offset, staging, job.staging_offset, job.length)
        return ipc.CopyDone(job.job, root, time.perf_counter() - began)

    def _answer(self, message: ipc.AnyMessage) -> None:
        with self._sending:
            try:
                ipc.send(self._control, message)
            except OSError:
                # Control is gone, and its job with it.
                logger.debug("an answer for nobody")


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
