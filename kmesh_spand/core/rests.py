"""Spans that were recipes until somebody asked for them dense: they are left so for a while."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator

from kmesh_spand.core.store import SpanStore


class Rests:
    """In the order in which they were last read by somebody who takes no recipes.

    Args:
        rest_ms: how long after that a span may become a recipe again.
    """

    def __init__(self, store: SpanStore, rest_ms: int) -> None:
        self._store = store
        self._rest_ms = rest_ms
        self._since: OrderedDict[int, tuple[int, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._since)

    def __iter__(self) -> Iterator[int]:
        """Rows that rest."""
        generations = self._store.table.generation
        return (row for row, (known, _) in self._since.items() if generations[row] == known)

    def begin(self, row: int) -> None:
        """A span was made dense."""
        self._since[row] = self._store.table.generation[row], self._store.now_ms
        self._since.move_to_end(row)

    def read(self, rows: Iterable[int]) -> None:
        """Somebody who takes no recipes has asked for these rows."""
        if self._since:
            generations = self._store.table.generation
            for row in self._since.keys() & set(rows):
                if self._since[row][0] == generations[row]:
                    self.begin(row)

    def over(self) -> int:
        """A row whose rest is over, which ends it; or 0."""
        generations = self._store.table.generation
        while self._since:
            row, (generation, since) = next(iter(self._since.items()))
            there = generations[row] == generation
            if there and self._store.now_ms - since < self._rest_ms:
                return 0
            del self._since[row]
            if there:
                return row
        return 0
