"""Who wants to know what becomes of spans."""

from __future__ import annotations

from typing import Protocol

from kmesh_spand.core.codes import Cause


class Watch(Protocol):
    """Told what becomes of rows, while it is not empty."""

    def __len__(self) -> int: ...

    def stored(self, row: int) -> None:
        """A row is committed."""

    def gone(self, row: int, cause: Cause) -> None:
        """A row's names are about to go."""


class Watches:
    """Several of them, in order; empty while all are."""

    def __init__(self, *watches: Watch) -> None:
        self._watches = watches

    def __len__(self) -> int:
        return sum(map(len, self._watches))

    def stored(self, row: int) -> None:
        for watch in self._watches:
            if watch:
                watch.stored(row)

    def gone(self, row: int, cause: Cause) -> None:
        for watch in self._watches:
            if watch:
                watch.gone(row, cause)
