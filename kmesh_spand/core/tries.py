"""Jobs that fail for reasons of their own are tried again, but not for ever."""

from __future__ import annotations

#: Jobs for one span that may fail so.
_MAX_TRIES = 2


class Tries:
    """How many of a span's jobs have failed."""

    def __init__(self) -> None:
        self._failed: dict[tuple[int, int], int] = {}

    def once_more(self, row: int, generation: int) -> bool:
        """A job for a span has failed: whether another is begun. After the last it is forgotten."""
        failed = self._failed.pop((row, generation), 0) + 1
        if failed < _MAX_TRIES:
            self._failed[row, generation] = failed
        return failed < _MAX_TRIES
