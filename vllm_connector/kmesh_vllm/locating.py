"""Where leased spans lie in memory that is attached, checked before anything is read there."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kmesh import _host
from kmesh.errors import ProtocolError
from kmesh.layout import TILE_BYTES
from kmesh_vllm.movers import Slab

_EXTENT = struct.Struct("<4Q")
#: number, address, address of its sums, whether it is GPU memory
_SLAB = struct.Struct("<4Q")


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
            here = numbers == number
            offset, length = offsets[here], lengths[here]
            # Apart, and together, as that sum may overflow.
            ends = int(offset.max()), int(length.max()), int((offset + length).max())
            slab = self._checked(number, ends)
            if slab is None:
                return None
            found.address[here] = offset + np.uint64(slab.address)
            found.sums_address[here] += np.uint64(slab.sums_address(0))
            found.on_gpu[here] = self._reads_gpu(slab)
        return found

    def around(self, spans: bytes, heads: bytes) -> bytes | None:
        """The slabs of spans, as ``_host.leased_parts`` takes them; None if one is not attached.

        Args:
            spans, heads: as there.

        Raises:
            ProtocolError: no slab can have these bytes.
        """
        try:
            extents = _host.leased_extents(spans, heads)
        except ValueError as wrong:
            raise ProtocolError(f"a lease names what is not to be had: {wrong}") from None
        found = []
        for number, *ends in _EXTENT.iter_unpack(extents):
            slab = self._checked(number, ends)
            if slab is None:
                return None
            gpu = self._reads_gpu(slab)
            found.append(_SLAB.pack(number, slab.address, slab.sums_address(0), gpu))
        return b"".join(found)

    def _checked(self, number: int, ends: Sequence[int]) -> Slab | None:
        """A slab, in which spans may end at each of these; None if it is not attached."""
        slab = self.slabs.get(number) or self._slab_of(number)
        if slab is None:
            return None
        self.slabs[number] = slab
        if not all([slab.contains(0, end) for end in ends]):
            raise ProtocolError(f"a lease names bytes outside slab {slab.slab}")
        return slab
