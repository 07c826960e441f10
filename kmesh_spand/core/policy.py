"""Which spans go first when memory, or the disk, is short. A policy only names them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterator, Sequence

from kmesh_spand.core.batch import Batch


class Policy(ABC):
    """Orders the rows that may be evicted. The core decides, checks and evicts.

    Host memory and the disk have policies of one kind. A row is *entered* when it begins to hold
    something; then it is added and discarded in turn, each time that it is not used for a while,
    and is again. What was discarded and is added again was used in between. Whatever a policy
    raises or names wrongly is counted and survived.
    """

    @abstractmethod
    def add(self, rows: Sequence[int]) -> None:
        """These rows may be evicted from now on; the first of them should go first."""

    @abstractmethod
    def discard(self, rows: Sequence[int]) -> None:
        """These rows may not be evicted any more."""

    def enter(self, row: int, name: int) -> None:
        """A row that is in no order holds something new; ``name``: 64 bits that tell what."""
        return

    def enter_all(self, rows: Sequence[int], name_of: Callable[[int], int]) -> None:
        """``enter`` for each of these rows."""
        for row in rows:
            self.enter(row, name_of(row))

    def used(self, row: int) -> None:
        """What a row that is in no order holds was of use."""
        return

    def evicted(self, row: int) -> None:
        """A row is about to be discarded to make room, and to be entered anew if ever."""
        return

    def another(self) -> Policy:
        """An empty order of the same kind, for another tenant."""
        raise NotImplementedError

    @abstractmethod
    def victims(self) -> Iterator[int]:
        """Rows to evict, best first. The policy does not change while this is read."""


class LRU(Policy):
    """Least recently used first. A span counts as used until its last lease has ended.

    A doubly linked list over two columns; row 0, or one behind all rows, is its head and tail.

    Args:
        max_rows: highest row.
        batch: operations over many rows.
    """

    def __init__(self, max_rows: int, batch: Batch | None = None) -> None:
        self._batch = batch or Batch()
        self._next = array("I", [0]) * (max_rows + 1)
        self._before = array("I", [0]) * (max_rows + 1)
        self._head = 0

    def another(self) -> LRU:
        """A list in the same columns: a row is in one of them at a time."""
        made = LRU.__new__(LRU)
        made._batch = self._batch
        made._next, made._before, made._head = self._next, self._before, len(self._next)
        for column in (made._next, made._before):
            column.append(made._head)
        return made

    def enter_all(self, rows: Sequence[int], name_of: Callable[[int], int]) -> None:
        """Nothing: what a row holds makes no difference."""

    def add(self, rows: Sequence[int]) -> None:
        """O(len(rows)); a row must not be in the list."""
        self._batch.link(self._next, self._before, self._head, rows)

    def discard(self, rows: Sequence[int]) -> None:
        """O(len(rows)); a row must be in the list."""
        self._batch.unlink(self._next, self._before, rows)

    def victims(self) -> Iterator[int]:
        """From the head of the list to its end."""
        row = self._next[self._head]
        while row != self._head:
            yield row
            row = self._next[row]
