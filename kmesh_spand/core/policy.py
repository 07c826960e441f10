"""Which spans go first when memory is short. A policy only names them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterator, Sequence


class Policy(ABC):
    """Orders the rows that may be evicted. The core decides, checks and evicts.

    Whatever a policy raises or names wrongly is counted and survived.
    """

    @abstractmethod
    def add(self, rows: Sequence[int]) -> None:
        """These rows may be evicted from now on; the first of them should go first."""

    @abstractmethod
    def discard(self, rows: Sequence[int]) -> None:
        """These rows may not be evicted any more."""

    @abstractmethod
    def victims(self) -> Iterator[int]:
        """Rows to evict, best first. The policy does not change while this is read."""


class LRU(Policy):
    """Least recently used first. A span counts as used until its last lease has ended.

    A doubly linked list over two columns; row 0 is its head and tail.

    Args:
        max_rows: highest row.
    """

    def __init__(self, max_rows: int) -> None:
        self._next = array("I", [0]) * (max_rows + 1)
        self._before = array("I", [0]) * (max_rows + 1)

    def add(self, rows: Sequence[int]) -> None:
        """O(len(rows)); a row must not be in the list."""
        after, before = self._next, self._before
        last = before[0]
        for row in rows:
            after[last] = row
            before[row] = last
            last = row
        after[last] = 0
        before[0] = last

    def discard(self, rows: Sequence[int]) -> None:
        """O(len(rows)); a row must be in the list."""
        after, before = self._next, self._before
        for row in rows:
            left, right = before[row], after[row]
            after[left] = right
            before[right] = left

    def victims(self) -> Iterator[int]:
        """From the head of the list to its end."""
        row = self._next[0]
        while row:
            yield row
            row = self._next[row]
