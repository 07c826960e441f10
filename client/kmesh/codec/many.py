"""Head and tables of many recipes at once, for whoever moves their literals from where they lie."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kmesh import _host
from kmesh.codec import records
from kmesh.codec.memory import address_of

#: Why a recipe that is right is decoded on the host.
_NOT_MOVED = {
    "cold": "recipes in the cold form are decoded on the host",
    "xor": "recipes with differences (XOR) are decoded on the host",
}
#: What most recipes' tables take.
_USUAL_BYTES = 4096


class ManyTables:
    """As ``RecipeTables``, of as many recipes as there are, in one call.

    They are copied before they are checked: memory that somebody else can write must not change
    between its check and its use. The copies live as long as this object.

    Attributes:
        addresses: u64, of each copy.
        heads: array of ``records.HEAD_RECORD``; means something where ``wrong`` has nothing.
        wrong: by number of a recipe, the first field that says what it must not.
        unsupported: by number of one that is right and has to be decoded on the host, why.

    Args:
        addresses, lengths: u64, of each recipe, in memory that this process reads.
    """

    def __init__(self, addresses: npt.NDArray[np.uint64], lengths: npt.NDArray[np.uint64]) -> None:
        places = np.stack([addresses, lengths], axis=1).astype(np.uint64)
        offsets = np.zeros(len(places), np.uint64)
        self._memory = _aligned(_USUAL_BYTES * len(places))
        size, found = _host.recipe_tables(places.data, self._memory.data, offsets.data)
        while size > self._memory.size:
            self._memory = _aligned(size)
            size, found = _host.recipe_tables(places.data, self._memory.data, offsets.data)
        self.addresses = offsets + np.uint64(address_of(self._memory))
        self.unsupported = {n: _NOT_MOVED[what] for n, what in found if what in _NOT_MOVED}
        self.wrong = {n: what for n, what in found if what not in _NOT_MOVED}
        self.heads = self._heads(offsets)

    def _heads(self, offsets: npt.NDArray[np.uint64]) -> npt.NDArray[np.void]:
        units = records.HEAD.size // records.RUN_ALIGN
        # One that is too short for a head is wrong, and may be the last in the memory.
        rows = self._memory.reshape(-1, records.RUN_ALIGN)
        first = offsets.astype(np.intp)[:, None] // records.RUN_ALIGN
        numbers = np.minimum(first + np.arange(units), len(rows) - 1)
        heads: npt.NDArray[Any] = rows[numbers].reshape(len(offsets), records.HEAD.size)
        return heads.view(records.HEAD_RECORD).reshape(-1)


def tables_bytes(
    addresses: npt.NDArray[np.uint64], lengths: npt.NDArray[np.uint64]
) -> npt.NDArray[np.uint64]:
    """Of each recipe, how much ``ManyTables`` reads, rounded up to a multiple of 64.

    Heads say it, which nobody has checked. Only these are read: 256 bytes, or all there is of less.

    Args:
        addresses, lengths: as of ``ManyTables``; of each, its head is there.
    """
    places = np.stack([addresses, lengths], axis=1).astype(np.uint64)
    offsets = np.zeros(len(places), np.uint64)
    # Where there is no room nothing is copied, and sizes are counted all the same.
    size, _ = _host.recipe_tables(places.data, np.zeros(1, np.uint64).data, offsets.data)
    return np.diff(offsets, append=np.uint64(size))


def _aligned(size: int) -> npt.NDArray[np.uint8]:
    """Memory of whole units, at least a head's, that begins at a multiple of a unit."""
    step = records.RUN_ALIGN
    room = records.aligned(max(size, records.HEAD.size), step)
    memory = np.empty(room + step, np.uint8)
    begin = -address_of(memory) % step
    return memory[begin : begin + room]
