"""A device worker: the only process with a context on its GPU, and with none on another.

It makes the GPU's slabs and hands their file descriptors to the supervisor, which holds them
without CUDA. A later device worker imports what an earlier one has made.
"""

from __future__ import annotations

import logging
import os
import select
import socket
from collections.abc import Sequence
from typing import NamedTuple

from kmesh.cuda import driver as cuda
from kmesh.cuda.device import Device, see_all
from kmesh.cuda.memory import DeviceMemory
from kmesh.errors import ConfigError, KMeshError
from kmesh_spand import ipc
from kmesh_spand.units import format_size

logger = logging.getLogger(__name__)

#: How often the supervisor hears that the driver still answers.
STATE_MS = 2000


class Piece(NamedTuple):
    """A slab to make, or to import from ``fd`` if that is not negative."""

    slab: int
    size: int
    fd: int


class GpuWorker:
    """One life of a device worker.

    Args:
        gpu: which of the settings' GPUs. name: how the settings call it.
    """

    def __init__(
        self, gpu: int, name: str, channel: socket.socket, pieces: Sequence[Piece]
    ) -> None:
        self._gpu = gpu
        self._name = name
        self._channel = channel
        self._pieces = pieces
        self._slabs: list[DeviceMemory] = []

    def run(self) -> int:
        """The process's life; returns its exit status."""
        try:
            see_all()
            device = Device(cuda.load(), self._name)
            self._tell(device, ready=False)
            self._check_room(device)
            for piece in self._pieces:
                self._slabs.append(self._take(device, piece))
        except KMeshError as failed:
            setting = isinstance(failed, ConfigError)
            ipc.send(self._channel, ipc.GpuFailed(self._gpu, str(failed), setting))
            return 1
        logger.info(
            "GPU memory is there: %s, %s, %d slabs", device.name, device.uuid, len(self._slabs)
        )
        poll = select.poll()
        poll.register(self._channel, select.POLLIN)
        while True:
            self._tell(device, ready=True)
            # The supervisor says nothing: what can be read is its end.
            if poll.poll(STATE_MS):
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
            ipc.send(self._channel, ipc.GpuSlab(piece.slab, piece.size), fd)
        finally:
            os.close(fd)
        return memory

    def _tell(self, device: Device, *, ready: bool) -> None:
        free, total = device.memory_info()
        ipc.send(
            self._channel,
            ipc.GpuState(self._gpu, device.uuid, device.name, ready, free, total),
        )


def run(gpu: int, name: str, channel: socket.socket, pieces: Sequence[Piece]) -> int:
    """Entry of the process."""
    try:
        return GpuWorker(gpu, name, channel, pieces).run()
    except ConnectionError:
        # The supervisor is gone, and the memory with it.
        return 0
