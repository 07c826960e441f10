"""A disk that does not answer is treated as not there for a while, and tried again."""

from __future__ import annotations

from kmesh_spand.core.config import DiskConfig


class Outage:
    """Says whether files may be fetched.

    They may not when several waits have ended although nothing was read for longer than
    ``stall_ms``. After a pause one fetch is tried at a time; the pause is twice as long each time
    that it gets no answer either. Whatever is answered, good or bad, ends the outage at once.

    Attributes:
        since_ms: when it began; None: the disk answers.
    """

    def __init__(self, config: DiskConfig) -> None:
        self.since_ms: int | None = None
        self._config = config
        self._busy_since_ms: int | None = None
        self._late = 0
        self._pause_ms = 0
        self._until_ms = 0
        self._trial = False

    def started(self, now_ms: int) -> None:
        """A read is under way."""
        if self._busy_since_ms is None:
            self._busy_since_ms = now_ms

    def answered(self, now_ms: int, *, busy: bool) -> bool:
        """A read has ended; ``busy``: others are under way. Returns whether an outage ended."""
        ended = self.since_ms is not None
        self.since_ms, self._late, self._pause_ms, self._trial = None, 0, 0, False
        self._busy_since_ms = now_ms if busy else None
        return ended

    def lost(self, *, busy: bool) -> None:
        """A read was given up, of which the disk said nothing."""
        if not busy:
            self._busy_since_ms = None

    def late(self, now_ms: int) -> bool:
        """A wait has ended before its files came. Returns whether an outage began."""
        if self.since_ms is not None or not self._stalled(now_ms):
            return False
        self._late += 1
        if self._late < self._config.max_late:
            return False
        self.since_ms = now_ms
        self._extend(now_ms)
        return True

    def admits(self, now_ms: int) -> bool:
        """Whether a fetch may be asked for. In an outage one may be, when a pause is over."""
        if self.since_ms is None:
            return True
        if now_ms < self._until_ms:
            return False
        if self._trial:
            self._extend(now_ms)
            return False
        self._trial = True
        self._until_ms = now_ms + self._config.stall_ms
        return True

    def _stalled(self, now_ms: int) -> bool:
        began = self._busy_since_ms
        return began is not None and now_ms - began >= self._config.stall_ms

    def _extend(self, now_ms: int) -> None:
        config = self._config
        self._pause_ms = min(self._pause_ms * 2 or config.hold_ms, config.longest_hold_ms)
        self._until_ms, self._trial = now_ms + self._pause_ms, False
