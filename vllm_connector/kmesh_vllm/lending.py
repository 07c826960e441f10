"""Payloads of this process's own, where whoever moves spans can read them for a while."""

from __future__ import annotations

import logging
import mmap
import threading
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kmesh.cuda.device import Device
from kmesh.cuda.memory import Registration
from kmesh.errors import CudaError
from kmesh.layout import TILE_BYTES
from kmesh_vllm.decoding import Payload

logger = logging.getLogger("kmesh_vllm")


class Lent:
    """Payloads in memory as it is, for a mover on the host.

    Attributes:
        addresses, sums_addresses: u64, of each payload, as the mover sees them.
        closed: there is nothing to give back.
    """

    closed = True

    def __init__(self, payloads: Sequence[Payload]) -> None:
        self._payloads = payloads
        self.addresses = np.array([one.data.ctypes.data for one in payloads], np.uint64)
        self.sums_addresses = np.array([one.sums.ctypes.data for one in payloads], np.uint64)

    def close(self) -> None:
        """Nothing reads them any more. May be called again, in any thread."""


class LentToGpu(Lent):
    """Copies of payloads in memory that a GPU reads.

    They lie as in a slab: each on a tile, and behind all of them their sums.

    Raises:
        CudaError, OSError: there is no such memory.
    """

    def __init__(self, payloads: Sequence[Payload], device: Device) -> None:
        starts = np.cumsum([0, *(_whole(one.data.size) for one in payloads)])
        sums = starts[-1] + np.cumsum([0, *(one.sums.nbytes for one in payloads)])
        size = max(int(sums[-1]), 1)
        self.closed = False
        self._device, self._lock = device, threading.Lock()
        self._memory: mmap.mmap | None = mmap.mmap(-1, -(-size // mmap.PAGESIZE) * mmap.PAGESIZE)
        written: npt.NDArray[np.uint8] = np.frombuffer(self._memory, np.uint8)
        for one, begin, own in zip(payloads, starts.tolist(), sums.tolist(), strict=False):
            written[begin : begin + one.data.size] = one.data
            written[own : own + one.sums.nbytes] = one.sums.view(np.uint8)
        address, room = written.ctypes.data, written.size
        del written
        try:
            self._seen = Registration(device, address, room, writable=True)
        except BaseException:
            self._memory.close()
            raise
        self.addresses = (starts[:-1] + self._seen.address).astype(np.uint64)
        self.sums_addresses = (sums[:-1] + self._seen.address).astype(np.uint64)

    def close(self) -> None:
        with self._lock:
            memory, self._memory = self._memory, None
        if memory is None:
            return
        try:
            self._device.enter()
            self._seen.close()
        except CudaError as wrong:
            logger.warning("memory of decoded spans: %s", str(wrong))
        memory.close()
        self.closed = True


def _whole(size: int) -> int:
    return -(-size // TILE_BYTES) * TILE_BYTES
