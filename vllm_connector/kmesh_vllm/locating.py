"""Where leased spans lie in memory that is attached, checked before anything is read there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kmesh.errors import ProtocolError
from kmesh.layout import TILE_BYTES
from kmesh_vllm.movers import Slab


class Located(NamedTuple):
    """Of each span: addresses as whoever moves it sees them, and whether that is GPU memory."""

    address: npt.NDArray[np.uint64]
    sums_address: npt.NDArray[np.uint64]
    on_gpu: npt.NDArray[np.bool_]


class Locator:
    """Finds the spans of one load.

    Attributes:
        slabs: that were needed, by number.

    Args:
        slab_of: a slab, or None if it is not attached.
        reads_gpu: whether a slab is GPU memory.
    """

    def __init__(
        self, slab_of: Callable[[int], Slab | None], reads_gpu: Callable[[Slab], bool]
    ) -> None:
        self.slabs: dict[int, Slab] = {}
        self._slab_of = slab_of
        self._reads_gpu = reads_gpu

    def slab(self, number: int) -> Slab:
        """One of them, which is attached.

        Raises:
            ProtocolError: it is not.
        """
        slab = self.slabs.get(number) or self._slab_of(number)
        if slab is None:
            raise ProtocolError(f"slab {number} is not attached")
        self.slabs[number] = slab
        return slab

    def locate(
        self,
        numbers: npt.NDArray[Any],
        offsets: npt.NDArray[np.uint64],
        lengths: npt.NDArray[np.uint64],
    ) -> Located | None:
        """Places of spans by slab, offset and length; None if a slab is not attached.

        Raises:
            ProtocolError: no slab can have these bytes.
        """
        if (offsets % TILE_BYTES).any():
            raise ProtocolError("a lease names bytes that begin no tile")
        count = len(numbers)
        found = Located(
            np.zeros(count, np.uint64), offsets // TILE_BYTES * 8, np.zeros(count, np.bool_)
        )
        for number in set(numbers.tolist()):
            slab = self.slabs.get(number) or self._slab_of(number)
            if slab is None:
                return None
            self.slabs[number] = slab
            here = numbers == number
            offset, length = offsets[here], lengths[here]
            # Apart, then together, so that no sum can overflow.
            largest = int(offset.max()), int(length.max())
            if not all(slab.contains(0, n) for n in largest) or not slab.contains(
                0, int((offset + length).max())
            ):
                raise ProtocolError(f"a lease names bytes outside slab {slab.slab}")
            found.address[here] = offset + np.uint64(slab.address)
            found.sums_address[here] += np.uint64(slab.sums_address(0))
            found.on_gpu[here] = self._reads_gpu(slab)
        return found
