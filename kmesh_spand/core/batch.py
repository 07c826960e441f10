"""What is done for all rows of a request at once, over the columns of the table.

``Batch`` is plain Python. The daemon puts a native one in its place (``control.native``), which
does the same: a test compares the two. Rows are ``array("I")``; row 0 is no span.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from typing import TypeAlias

KEY_BYTES = 32

Rows: TypeAlias = "array[int]"
Words: TypeAlias = "tuple[array[int], array[int], array[int], array[int]]"


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
