"""What is done for all rows of a request at once, over the columns of the table.

``Batch`` is plain Python. The daemon puts a native one in its place (``control.native``), which
does the same: a test compares the two. Rows are ``array("I")``; row 0 is no span.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from kmesh.layout import TILE_BYTES
from kmesh_spand.core.record import RECORD_BYTES

KEY_BYTES = 32
#: Of a record: tokens, start, born, offset, length, root, key. See ``record``.
_PLACED = struct.Struct("<8xII8xIQI12xQ4Q36x")

Rows: TypeAlias = "array[int]"
Words: TypeAlias = "tuple[array[int], array[int], array[int], array[int]]"


class Ground(NamedTuple):
    """Columns in which spans are placed: of a ``SpanTable``, its hash, and a slab's owners."""

    words: Words
    places: array[int]
    owner: array[int]
    scope: array[int]
    space: array[int]
    tokens: array[int]
    start: array[int]
    slab: array[int]
    tile: array[int]
    length: array[int]
    root: array[int]
    born: array[int]
    used: array[int]


class Arrivals(NamedTuple):
    """Records (see ``records.Records``) of spans in one slab, which are to be placed.

    Attributes:
        data, slots, kinds: of all records.
        which: numbers of those that are to be placed, in order.
        scopes, folds, spaces: for each kind, its numbers of scope and namespace, and what a key is
            XORed with to find its place. Scope 0: none of that kind holds.
    """

    data: bytes
    slots: Rows
    kinds: Rows
    which: Rows
    scopes: array[int]
    folds: array[int]
    spaces: array[int]


class Terms(NamedTuple):
    """What a record must keep to: the slab, sizes in tokens, how far a key may lie from its
    place, and what time it is."""

    slab: int
    span_tokens: int
    sub_tokens: int
    limit: int
    tick: int


class Batch:
    """Operations over many rows. Each row must be one of the columns'."""

    def find(
        self,
        index: array[int],
        words: Words,
        scopes: array[int],
        keys: bytes,
        fold: int,
        number: int,
        limit: int,
    ) -> tuple[Rows, int]:
        """Rows of keys, 0 where there is none, and how many were found.

        Args:
            index: rows by place, 0 where a place is free; a power of two of them.
            words: the keys of all rows, as four u64 each; ``scopes`` their scope numbers.
            keys: 32 bytes each, that are looked for in scope ``number``.
            fold: what a key's first word is XORed with to find its place.
            limit: places that are looked at for one key.
        """
        mask, first, found = len(index) - 1, words[0], 0
        rows = array("I", bytes(len(keys) // KEY_BYTES * 4))
        for entry, key in enumerate(struct.iter_unpack("<4Q", keys)):
            word = key[0]
            home = word ^ fold
            for place in range(home, home + limit):
                row = index[place & mask]
                if not row:
                    break
                if (
                    first[row] == word
                    and scopes[row] == number
                    and all(column[row] == part for column, part in zip(words, key, strict=True))
                ):
                    rows[entry] = row
                    found += 1
                    break
        return rows, found

    def gather(self, rows: Rows, column: array[int], kind: str = "", factor: int = 1) -> array[int]:
        """A column's values at ``rows``, each times ``factor``, in order.

        Args:
            kind: type code of the answer, which must have room for them; the column's if empty.
        """
        return array(kind or column.typecode, [column[row] * factor for row in rows])

    def gather_bytes(self, rows: Rows, column: bytearray) -> bytearray:
        """As ``gather``, of a column of bytes."""
        return bytearray(column[row] for row in rows)

    def pin(self, pins: array[int], rows: Rows) -> Rows:
        """One more in ``pins`` for each row, which may occur more than once.

        Returns rows that had none, in order.
        """
        fresh = array("I")
        for row in rows:
            count = pins[row]
            if not count:
                fresh.append(row)
            pins[row] = count + 1
        return fresh

    def unpin(self, pins: array[int], rows: Rows, used: array[int], tick: int) -> Rows:
        """One less in ``pins`` for each row, the last one first.

        Returns rows that have none any more, in the order in which they lost it; their ``used``
        becomes ``tick``.
        """
        idle = array("I")
        for row in reversed(rows):
            count = pins[row] - 1
            pins[row] = count
            if not count:
                idle.append(row)
                used[row] = tick
        return idle

    def link(self, after: array[int], before: array[int], head: int, rows: Sequence[int]) -> None:
        """Appends rows, which are in no list, to the doubly linked list with this head and tail."""
        last = before[head]
        for row in rows:
            after[last] = row
            before[row] = last
            last = row
        after[last] = head
        before[head] = last

    def unlink(self, after: array[int], before: array[int], rows: Sequence[int]) -> None:
        """Takes rows out of the list that they are in."""
        for row in rows:
            left, right = before[row], after[row]
            after[left] = right
            before[right] = left

    def place(self, ground: Ground, arrivals: Arrivals, terms: Terms) -> bytearray:
        """Writes to the columns and to the hash what arrives and holds, one after the other.

        A span does not hold that has impossible sizes, that is in part outside of the slab or
        where another one is, that has another one's key, or whose key finds no place.

        Returns whether each of ``arrivals.which`` holds, as 1 or 0. Of one that does not, nothing
        is written.
        """
        held = bytearray(len(arrivals.which))
        for at, number in enumerate(arrivals.which):
            held[at] = _place(ground, arrivals, terms, number)
        return held


def _place(ground: Ground, arrivals: Arrivals, terms: Terms, number: int) -> bool:
    tokens, start, born, offset, length, root, *key = _PLACED.unpack_from(
        arrivals.data, number * RECORD_BYTES
    )
    row, kind = arrivals.slots[number] + 1, arrivals.kinds[number]
    scope = arrivals.scopes[kind]
    first, uneven = divmod(offset, TILE_BYTES)
    end = first - -length // TILE_BYTES
    if (
        not scope
        or uneven
        or not length
        or not 0 < tokens <= terms.span_tokens
        or tokens % terms.sub_tokens
        or end > len(ground.owner)
        or any(ground.owner[first:end])
    ):
        return False
    place = _free_place(ground, key, key[0] ^ arrivals.folds[kind], scope, terms.limit)
    if place < 0:
        return False
    ground.owner[first:end] = array("I", [row]) * (end - first)
    ground.places[place] = row
    for column, word in zip(ground.words, key, strict=True):
        column[row] = word
    ground.scope[row] = scope
    ground.space[row] = arrivals.spaces[kind]
    ground.tokens[row] = tokens
    ground.start[row] = start
    ground.slab[row] = terms.slab
    ground.tile[row] = first
    ground.length[row] = length
    ground.root[row] = root
    ground.born[row] = min(born, terms.tick)
    ground.used[row] = terms.tick
    return True


def _free_place(ground: Ground, key: Sequence[int], home: int, scope: int, limit: int) -> int:
    """Where a key goes; -1 if it is there already, or there is no room near its place."""
    mask = len(ground.places) - 1
    for place in range(home, home + limit):
        row = ground.places[place & mask]
        if not row:
            return place & mask
        if ground.scope[row] == scope and all(
            column[row] == word for column, word in zip(ground.words, key, strict=True)
        ):
            return -1
    return -1
