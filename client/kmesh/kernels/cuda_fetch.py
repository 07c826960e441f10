"""Many small pieces of memory that only a GPU reads, to the host by one launch.

A copy for each would cost a call of the driver, and a turn at the interpreter, for each. Nothing
here waits for the GPU but ``PendingFetch.wait`` and ``close``. Needs CuPy, which is imported when a
``Fetcher`` is made.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kmesh.kernels.device import Device, Slot
from kmesh.kernels.started import Started

__all__ = ["UNIT", "Fetcher", "PendingFetch"]

#: Pieces begin at multiples of so many bytes, and are so many times as large.
UNIT = 16

_PIECE = np.dtype([("address", "<u8"), ("at", "<u4"), ("vectors", "<u4")])
_BLOCKS = 4  # for each multiprocessor


class PendingFetch(Started[int, npt.NDArray[np.uint8]]):
    """Pieces on their way, of so many bytes together. ``wait`` gives them, one behind the other.

    What they are copied from stays until they have come.
    """

    def _read(self, job: int, slot: Slot) -> npt.NDArray[np.uint8]:
        return slot.results(job // 4, np.uint32).view(np.uint8).copy()


class Fetcher:
    """Fetches from one GPU, and from what else that one reads.

    Not thread-safe: one thread uses it at a time.

    Args:
        device: ordinal, as this process counts.
    """

    def __init__(self, device: int = 0) -> None:
        self._device = Device(device)

    def fetch(
        self, addresses: npt.NDArray[np.uint64], sizes: npt.NDArray[np.uint64], stream: int
    ) -> PendingFetch:
        """Starts to fetch pieces, at least one.

        Args:
            addresses: of each, as the device sees it; multiples of ``UNIT``.
            sizes: bytes of each; multiples of ``UNIT``.
            stream: handle of a CUDA stream of the device.

        Raises:
            ValueError: an address or a size is no such multiple.
        """
        if (addresses % UNIT).any() or (sizes % UNIT).any():
            raise ValueError(f"pieces are fetched by {UNIT} bytes")
        ends = np.cumsum(sizes // UNIT)
        pieces = np.zeros(len(addresses), _PIECE)
        pieces["address"], pieces["vectors"] = addresses, sizes // UNIT
        pieces["at"] = ends - pieces["vectors"]
        size, count = int(ends[-1]) * UNIT, len(pieces)
        device = self._device
        with device:
            with device.slot() as slot:
                slot.reserve(pieces.nbytes)[: pieces.nbytes] = pieces.view(np.uint8)
            with device.job(stream, slot):
                device.bring("round", slot, pieces.nbytes, stream)
                slot.expect(size // 4)
                blocks = min(count, _BLOCKS * device.multiprocessors)
                device.launch("round", "kmesh_round_fetch", blocks, 0, slot, (0, count), stream)
            return PendingFetch(device, slot, size)

    def close(self) -> None:
        """Waits for what is under way and frees what was allocated."""
        with self._device:
            self._device.close()
