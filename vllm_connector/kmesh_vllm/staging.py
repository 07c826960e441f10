"""Who has which bytes of a worker's staging memory."""

from __future__ import annotations

import threading
from collections import deque


class StagingRing:
    """Hands out ranges of a ring of ``size`` bytes, in order; they may be freed in any order.

    A range never wraps. Thread-safe.
    """

    def __init__(self, size: int, *, align: int = 64) -> None:
        self._size = size
        self._align = align
        self._lock = threading.Lock()
        # [begin, end, freed], oldest first.
        self._ranges: deque[list[int]] = deque()

    @property
    def used(self) -> int:
        """Bytes that are not free, padding included."""
        with self._lock:
            return sum(end - begin for begin, end, _ in self._ranges)

    def allocate(self, length: int) -> int | None:
        """Offset of ``length`` free bytes, or None if there are not so many in one piece."""
        length = self._whole(length)
        with self._lock:
            begin = self._fit(length)
            if begin is None:
                return None
            self._ranges.append([begin, begin + length, 0])
            return begin

    def fits(self, length: int) -> bool:
        """Whether ``allocate`` would find so many bytes."""
        with self._lock:
            return self._fit(self._whole(length)) is not None

    def free(self, offset: int) -> None:
        """Gives a range back.

        Raises:
            ValueError: no range begins there.
        """
        with self._lock:
            for entry in self._ranges:
                if entry[0] == offset and not entry[2]:
                    entry[2] = 1
                    break
            else:
                raise ValueError(f"no range of this ring begins at {offset}")
            while self._ranges and self._ranges[0][2]:
                self._ranges.popleft()

    def _whole(self, length: int) -> int:
        return -(-max(length, 1) // self._align) * self._align

    def _fit(self, length: int) -> int | None:
        if not self._ranges:
            return 0 if length <= self._size else None
        oldest, newest = self._ranges[0][0], self._ranges[-1][1]
        if newest > oldest:
            if newest + length <= self._size:
                return newest
            return 0 if length <= oldest else None
        return newest if newest + length <= oldest else None
