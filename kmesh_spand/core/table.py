"""The span table: one row for each catalog slot, as columns of machine integers.

Row r is slot r - 1. Row 0 is no span and holds zeros in every column, so that a batch with
misses is gathered like one without. Rows are found by (key, scope) through open addressing
with linear probing; removal shifts entries back, so there are no tombstones.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterator, Sequence
from itertools import compress

from kmesh_spand.core.batch import KEY_BYTES, Batch, Ground, Rows, Words
from kmesh_spand.core.intern import Interner
from kmesh_spand.core.states import State
from kmesh_spand.core.tags import mix

#: An entry lies at most this many places after its own; a key that finds none is not stored.
PROBE_LIMIT = 256
_KEY = struct.Struct("<4Q")
_MAX_SCOPES = 0xFFFF
_MAX_NAMESPACES = 0xFFFF_FFFE


class SpanTable:
    """Columns of all slots, and the hash from (key, scope) to row.

    Args:
        batch: operations over many rows.

    Attributes (each indexed by row):
        words: the key as four u64, a column each.
        scope, space: numbers of ``scopes`` (see ``tags.scope``) and ``spaces``.
        state: ``State``. tokens, start: in tokens. slab, tile: where the span begins.
        length: bytes. root: fold of the tile sums. generation: of the slot.
        pins: leases. born, used: ticks of the commit and of the end of the last lease.
    An alias holds its span's row in ``tile`` and the span's next alias in ``start``.
    """

    def __init__(self, max_spans: int, batch: Batch | None = None) -> None:
        self.batch = batch or Batch()
        self.max_rows = max_spans
        self.rows = 0
        rows = max_spans + 1
        self.words: Words = (
            _zeros("Q", rows),
            _zeros("Q", rows),
            _zeros("Q", rows),
            _zeros("Q", rows),
        )
        self.state = bytearray(rows)
        self.scope = _zeros("H", rows)
        self.tokens = _zeros("H", rows)
        self.slab = _zeros("H", rows)
        self.space = _zeros("I", rows)
        self.tile = _zeros("I", rows)
        self.length = _zeros("I", rows)
        self.start = _zeros("I", rows)
        self.generation = _zeros("I", rows)
        self.pins = _zeros("I", rows)
        self.born = _zeros("I", rows)
        self.used = _zeros("I", rows)
        self.root = _zeros("Q", rows)
        self.scopes: Interner[int] = Interner(_MAX_SCOPES)
        self.spaces: Interner[bytes] = Interner(_MAX_NAMESPACES)
        self.keyed = 0
        self._cleared = (
            self.scope,
            self.tokens,
            self.slab,
            self.space,
            self.tile,
            self.length,
            self.start,
            self.pins,
            self.born,
            self.used,
            self.root,
        )
        self._free = array("I")
        places = 1 << (max_spans + max_spans // 2).bit_length()
        self._index = _zeros("I", places)
        self._mask = places - 1

    # Rows

    @property
    def vacant(self) -> int:
        """Rows that ``take_row`` can still give."""
        return len(self._free) + self.max_rows - self.rows

    def take_row(self) -> int:
        """A row of no span, taken out of the free ones; IndexError when there is none."""
        if self._free:
            return self._free.pop()
        if self.rows == self.max_rows:
            raise IndexError("no free row")
        self.rows += 1
        return self.rows

    def claim_rows(self, taken: Sequence[int]) -> None:
        """Take given rows, of a table that has none yet (recovery)."""
        self.rows = max(taken, default=0)
        free = bytearray(b"\1") * (self.rows + 1)
        for row in taken:
            free[row] = 0
        self._free = array("I", compress(range(self.rows, 0, -1), reversed(free)))

    def give_row(self, row: int) -> None:
        """Clear a row (its generation stays) and make it free."""
        self.state[row] = State.FREE
        for column in self._cleared:
            column[row] = 0
        self._free.append(row)

    def free_rows(self) -> Sequence[int]:
        """Rows that were given back."""
        return self._free

    # Keys

    def key_of(self, row: int) -> bytes:
        """The 32 bytes of a row's key."""
        first, second, third, fourth = self.words
        return _KEY.pack(first[row], second[row], third[row], fourth[row])

    def ground(self, owner: array[int]) -> Ground:
        """Where spans are placed, in a slab with these owners. ``keyed`` is the caller's."""
        return Ground(
            self.words,
            self._index,
            owner,
            self.scope,
            self.space,
            self.tokens,
            self.start,
            self.slab,
            self.tile,
            self.length,
            self.root,
            self.born,
            self.used,
        )

    def name_of(self, row: int) -> int:
        """64 bits that tell (key, scope) of a row from others."""
        return self.words[0][row] ^ mix(self.scopes.value(self.scope[row]))

    def _home(self, row: int) -> int:
        return self.name_of(row) & self._mask

    def find(self, key: bytes, scope: int) -> int:
        """The row of (key, scope), or 0."""
        number = self.scopes.find(scope)
        return self._probe(_KEY.unpack(key), number, mix(scope)) if number else 0

    def find_all(self, keys: bytes, scope: int) -> tuple[Rows, int]:
        """Rows of many keys (32 bytes each) in one scope, 0 where there is none; how many are."""
        number = self.scopes.find(scope)
        if not number:
            return array("I", bytes(len(keys) // KEY_BYTES * 4)), 0
        return self.batch.find(
            self._index, self.words, self.scope, keys, mix(scope), number, PROBE_LIMIT
        )

    def _probe(self, key: Sequence[int], number: int, fold: int) -> int:
        index, mask, column = self._index, self._mask, self.words[0]
        word = key[0]
        home = word ^ fold
        for place in range(home, home + PROBE_LIMIT):
            row = index[place & mask]
            if not row:
                return 0
            if (
                column[row] == word
                and self.scope[row] == number
                and all(column[row] == part for column, part in zip(self.words, key, strict=True))
            ):
                return row
        return 0

    def place_for(self, key: bytes, scope: int) -> int | None:
        """Where an absent (key, scope) would go; None when its neighbourhood is full."""
        home = int.from_bytes(key[:8], "little") ^ mix(scope)
        for step in range(PROBE_LIMIT):
            place = home + step & self._mask
            if not self._index[place]:
                return place
        return None

    def insert(self, row: int, key: bytes, scope: int, place: int) -> None:
        """Name a row; ``place`` as ``place_for`` said, with no change of the table since."""
        self.label(row, key, scope)
        self.list(row, place)

    def label(self, row: int, key: bytes, scope: int) -> None:
        """Write a key and a scope at a row that is not to be found by them, or not yet."""
        for column, word in zip(self.words, _KEY.unpack(key), strict=True):
            column[row] = word
        self.scope[row] = self.scopes.take(scope)

    def list(self, row: int, place: int) -> None:
        """Make a row findable by what it is labelled with; ``place`` as for ``insert``."""
        self._index[place] = row
        self.keyed += 1

    def remove(self, row: int) -> None:
        """Make a row unfindable; its key and scope number stay readable until ``give_row``."""
        index, mask = self._index, self._mask
        place = self._home(row)
        while index[place] != row:
            place = place + 1 & mask
        gap = place
        while True:
            place = place + 1 & mask
            moved = index[place]
            if not moved:
                break
            home = self._home(moved)
            # An entry may fill the gap unless its home lies cyclically after the gap.
            if (place - home & mask) >= (place - gap & mask):
                index[gap] = moved
                gap = place
        index[gap] = 0
        self.keyed -= 1

    def entries(self) -> Iterator[int]:
        """All rows in the hash."""
        return (row for row in self._index if row)


def _zeros(kind: str, count: int) -> array[int]:
    # Repeating allocates exactly; filling from bytes leaves room to grow.
    return array(kind, [0]) * count
