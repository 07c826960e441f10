"""How long to wait before a process is started again."""

from __future__ import annotations

_FIRST = 0.1
_LAST = 10.0
#: A process that lived this long is restarted at once.
_STEADY_SECONDS = 10.0


class Backoff:
    """Of one process, over all of its lives. Times are seconds of one monotonic clock."""

    def __init__(self) -> None:
        self._wait = 0.0
        self._started = 0.0

    def started(self, now: float) -> None:
        self._started = now

    def died(self, now: float) -> float:
        """The moment of the next start: at once after a steady life, else later each time."""
        if now - self._started >= _STEADY_SECONDS:
            self._wait = 0.0
        at = now + self._wait
        self._wait = min(max(2 * self._wait, _FIRST), _LAST)
        return at
