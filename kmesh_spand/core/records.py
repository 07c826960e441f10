"""Many records at once: what a catalog holds, as it was written, without an object for each."""

from __future__ import annotations

import struct
import zlib
from array import array
from collections.abc import Sequence
from itertools import compress, count, starmap

from kmesh_spand.core.record import HEADS, RECORD_BYTES, Record, unpack

#: Slots that are looked at in one step; most of a catalog may never have been written.
_STEP = 4096
_SUMMED = struct.Struct("<124s4x")
_WHOLE = struct.Struct(f"<{RECORD_BYTES}s")
_KIND = struct.Struct("<44xQ40x32s4x")
# A record as u32.
_U32 = RECORD_BYTES // 4
_GENERATION, _SLAB, _DENSE, _CRC = 4, 5, 10, 31
_STATE = 6


class Records:
    """Good records of a catalog, by number, from 0 on, in order of their slots.

    Args:
        slots: of each, ascending.
        data: the records, ``RECORD_BYTES`` each.

    Attributes:
        states: ``State`` of each record.
        kinds: of each record, which of ``pairs`` it has.
        pairs: distinct (shard code, namespace).
    """

    def __init__(self, slots: Sequence[int] = (), data: bytes = b"") -> None:
        self.slots = slots if isinstance(slots, array) else array("I", slots)
        self.data = data
        self.states = bytearray(data[_STATE::RECORD_BYTES])
        numbers: dict[tuple[int, bytes], int] = _Numbers()
        self.kinds = array("I", map(numbers.__getitem__, _KIND.iter_unpack(data)))
        self.pairs = list(numbers)

    def __len__(self) -> int:
        return len(self.slots)

    def __getitem__(self, number: int) -> Record:
        at = number * RECORD_BYTES
        return unpack(self.data[at : at + RECORD_BYTES])

    def below(self, slots: int) -> Records:
        """Those of the first ``slots`` slots."""
        if not self.slots or self.slots[-1] < slots:
            return self
        kept = sum(slot < slots for slot in self.slots)
        return Records(self.slots[:kept], self.data[: kept * RECORD_BYTES])

    @property
    def generations(self) -> list[int]:
        return self._column(_GENERATION)

    @property
    def slabs(self) -> list[int]:
        return self._column(_SLAB)

    @property
    def dense(self) -> list[int]:
        """Payload bytes that each one's recipe gives, 0 for others."""
        return self._column(_DENSE)

    def _column(self, word: int) -> list[int]:
        return memoryview(self.data).cast("I")[word::_U32].tolist()


class _Numbers(dict[tuple[int, bytes], int]):
    """Numbers things in the order in which they are first asked for."""

    def __missing__(self, thing: tuple[int, bytes]) -> int:
        number = self[thing] = len(self)
        return number


def read(catalog: memoryview, slots: int) -> tuple[Records, array[int]]:
    """Good records of the first ``slots`` slots, and which slots hold something that is none.

    A slot whose first byte is 0 was never written.
    """
    found, damaged, pieces = array("I"), array("I"), []
    for begin in range(0, slots, _STEP):
        end = min(begin + _STEP, slots)
        part = catalog[begin * RECORD_BYTES : end * RECORD_BYTES]
        marks = part[::RECORD_BYTES].tobytes()
        if marks.count(0) == len(marks):
            continue
        data = part.tobytes()
        words = memoryview(data).cast("I")
        sums = starmap(zlib.crc32, _SUMMED.iter_unpack(data))
        heads = memoryview(data).cast("Q")[:: RECORD_BYTES // 8].tolist()
        good = [
            head in HEADS and told == summed
            for head, told, summed in zip(heads, words[_CRC::_U32].tolist(), sums, strict=True)
        ]
        found.extend(compress(range(begin, end), good))
        if all(good):
            pieces.append(data)
            continue
        pieces += (piece for (piece,) in compress(_WHOLE.iter_unpack(data), good))
        damaged.extend(
            slot
            for slot, mark, held in zip(count(begin), marks, good, strict=False)
            if mark and not held
        )
    return Records(found, b"".join(pieces)), damaged
