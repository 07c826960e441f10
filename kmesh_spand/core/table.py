"""The span table: one row for each catalog slot, as columns of machine integers.

Row r is slot r - 1. Row 0 is no span and holds zeros in every column, so that a batch with
misses is gathered like one without. Rows are found by (key, shard) through open addressing
with linear probing; removal shifts entries back, so there are no tombstones.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from operator import itemgetter

from kmesh_spand.core.intern import Interner
from kmesh_spand.core.states import State
from kmesh_spand.core.tags import splitmix64

KEY_BYTES = 32
#: An entry lies at most this many places after its own; a key that finds none is not stored.
PROBE_LIMIT = 256
_GROW_ROWS = 4096
_MAX_SHARDS = 0xFFFF
_MAX_NAMESPACES = 0xFFFF_FFFE


class SpanTable:
    """Columns of all slots, and the hash from (key, shard) to row.

    Attributes (each indexed by row):
        key: 32 bytes a row. shard, space: numbers of ``shards`` and ``spaces``.
        state: ``State``. tokens, start: in tokens. slab, tile: where the span begins.
        length: bytes. root: fold of the tile sums. generation: of the slot.
        pins: leases. born, used: ticks of the commit and of the last lease.
    An alias holds its span's row in ``tile`` and the span's next alias in ``start``.
    """

    def __init__(self, max_spans: int) -> None:
        self.max_rows = max_spans
        self.rows = 0
        self.key = bytearray()
        self.state = bytearray()
        self.shard = array("H")
        self.tokens = array("H")
        self.slab = array("H")
        self.space = array("I")
        self.tile = array("I")
        self.length = array("I")
        self.start = array("I")
        self.generation = array("I")
        self.pins = array("I")
        self.born = array("I")
        self.used = array("I")
        self.root = array("Q")
        self.shards: Interner[int] = Interner(_MAX_SHARDS)
        self.spaces: Interner[bytes] = Interner(_MAX_NAMESPACES)
        self.keyed = 0
        self._words = (
            self.shard,
            self.tokens,
            self.slab,
            self.space,
            self.tile,
            self.length,
            self.start,
            self.generation,
            self.pins,
            self.born,
            self.used,
            self.root,
        )
        self._free = array("I")
        places = 1 << (max_spans + max_spans // 2).bit_length()
        self._index = array("I", bytes(4 * places))
        self._mask = places - 1
        self.resize(1)

    # Rows

    def resize(self, rows: int) -> None:
        """Give every row below ``rows`` its columns."""
        missing = rows - len(self.state)
        if missing <= 0:
            return
        step = min(max(missing, _GROW_ROWS, len(self.state) // 8), self.max_rows + 1)
        self.key += bytes(KEY_BYTES * step)
        self.state += bytes(step)
        for column in self._words:
            column.frombytes(bytes(column.itemsize * step))

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
        self.resize(self.rows + 1)
        return self.rows

    def claim_rows(self, taken: Sequence[int]) -> None:
        """Take given rows, of a table that has none yet (recovery)."""
        self.rows = max(taken, default=0)
        self.resize(self.rows + 1)
        held = set(taken)
        self._free = array("I", (row for row in range(self.rows, 0, -1) if row not in held))

    def give_row(self, row: int) -> None:
        """Clear a row (its generation stays) and make it free."""
        self.state[row] = State.FREE
        for column in self._words:
            if column is not self.generation:
                column[row] = 0
        self._free.append(row)

    def free_rows(self) -> Sequence[int]:
        """Rows that were given back."""
        return self._free

    # Keys

    def key_of(self, row: int) -> bytes:
        """The 32 bytes of a row's key."""
        return bytes(self.key[row * KEY_BYTES : (row + 1) * KEY_BYTES])

    def _home(self, row: int) -> int:
        word = int.from_bytes(self.key[row * KEY_BYTES : row * KEY_BYTES + 8], "little")
        return (word ^ splitmix64(self.shards.value(self.shard[row]))) & self._mask

    def find(self, key: bytes, shard: int) -> int:
        """The row of (key, shard code), or 0."""
        return self.find_run(key, [int.from_bytes(key[:8], "little")], shard, prefix=True)[0]

    def find_run(self, keys: bytes, words: Sequence[int], shard: int, *, prefix: bool) -> list[int]:
        """Rows of many keys in one shard (a code); 0 where there is none.

        Args:
            keys: 32 bytes each.
            words: the first u64 of each key.
            prefix: stop after the first key that is missing.
        """
        number = self.shards.find(shard)
        if not number:
            return [0] if prefix and words else [0] * len(words)
        index, mask, column, shards = self._index, self._mask, self.key, self.shard
        mix = splitmix64(shard)
        rows: list[int] = []
        append = rows.append
        begin = 0
        for word in words:
            place = (word ^ mix) & mask
            end = begin + KEY_BYTES
            row = index[place]
            if row:
                at = row * KEY_BYTES
                key = keys[begin:end]
                if column[at : at + KEY_BYTES] != key or shards[row] != number:
                    row = self._probe(place, key, number)
            append(row)
            if prefix and not row:
                break
            begin = end
        return rows

    def _probe(self, place: int, key: bytes, number: int) -> int:
        index, mask, column = self._index, self._mask, self.key
        for step in range(1, PROBE_LIMIT):
            row = index[place + step & mask]
            if not row:
                return 0
            at = row * KEY_BYTES
            if column[at : at + KEY_BYTES] == key and self.shard[row] == number:
                return row
        return 0

    def place_for(self, key: bytes, shard: int) -> int | None:
        """Where an absent (key, shard code) would go; None when its neighbourhood is full."""
        home = int.from_bytes(key[:8], "little") ^ splitmix64(shard)
        for step in range(PROBE_LIMIT):
            place = home + step & self._mask
            if not self._index[place]:
                return place
        return None

    def insert(self, row: int, key: bytes, shard: int, place: int) -> None:
        """Name a row; ``place`` as ``place_for`` said, with no change of the table since."""
        self.key[row * KEY_BYTES : (row + 1) * KEY_BYTES] = key
        self.shard[row] = self.shards.take(shard)
        self._index[place] = row
        self.keyed += 1

    def remove(self, row: int) -> None:
        """Make a row unfindable; its key and shard number stay readable until ``give_row``."""
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


def gather(rows: Sequence[int], *columns: Sequence[int]) -> list[tuple[int, ...]]:
    """The columns' values at ``rows``, in order."""
    if len(rows) < 2:
        return [tuple(column[row] for row in rows) for column in columns]
    pick = itemgetter(*rows)
    return [pick(column) for column in columns]
