"""Files that are to go: a few at a time, so that no burst of them stands before other work."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from kmesh_spand.core.effects import Unlink
from kmesh_spand.core.store import SpanStore


class Removals:
    """Jobs that remove files, at most ``limit`` in flight; the others wait their turn.

    Attributes:
        names: of all files that are to go.
        strays: how many of them have no row.
    """

    def __init__(self, store: SpanStore, jobs: Iterator[int], limit: int) -> None:
        self.names: set[int] = set()
        self.strays = 0
        self._store = store
        self._jobs = jobs
        self._limit = limit
        self._flying: dict[int, tuple[int, int]] = {}
        self._waiting: deque[tuple[int, int]] = deque()

    @property
    def rows(self) -> list[int]:
        """Rows of files that are to go; for checks."""
        return [row for row, _ in (*self._flying.values(), *self._waiting) if row]

    @property
    def flying(self) -> int:
        """Removals in flight."""
        return len(self._flying)

    def remove(self, row: int, name: int) -> None:
        """Remove a file, of a row or (0) of none."""
        self.names.add(name)
        self.strays += not row
        self._waiting.append((row, name))
        self._pump()

    def ended(self, job: int) -> int:
        """A removal has ended; the row whose file it was, or 0."""
        if job not in self._flying:
            return 0
        row, name = self._flying.pop(job)
        self.names.discard(name)
        self.strays -= not row
        self._pump()
        return row

    def _pump(self) -> None:
        while self._waiting and len(self._flying) < self._limit:
            row, name = self._waiting.popleft()
            job = next(self._jobs)
            self._flying[job] = row, name
            self._store.out.append(Unlink(job, name))
