"""Keys that are not tried for a while, since loading them failed."""

from __future__ import annotations

import time
from collections.abc import Callable


class Quarantine:
    """Each failure of a key keeps it away twice as long as the one before.

    Args:
        first: seconds after the first failure.
        longest: seconds at most.
    """

    def __init__(
        self, first: float, longest: float = 3600.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._first = first
        self._longest = max(first, longest)
        self._clock = clock
        self._until: dict[bytes, tuple[float, float]] = {}
        #: Grows when a key is added.
        self.generation = 0

    def __len__(self) -> int:
        return len(self._until)

    def add(self, key: bytes) -> None:
        """A load of this key failed."""
        now = self._clock()
        self._forget(now)
        wait = min(self._until[key][1] * 2, self._longest) if key in self._until else self._first
        self._until[key] = (now + wait, wait)
        self.generation += 1

    def __contains__(self, key: bytes) -> bool:
        if not self._until:
            return False
        found = self._until.get(key)
        return found is not None and self._clock() < found[0]

    def _forget(self, now: float) -> None:
        """Drops keys that have been left alone for as long again as they were kept away."""
        for key in [k for k, (until, wait) in self._until.items() if until + wait < now]:
            del self._until[key]
