"""Whether a worker takes messages: it is asked now and then, and answers at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kmesh_spand import ipc, messages

_BEAT_SECONDS = 1.0


class Heartbeat:
    """That of one worker. At most one beat is on its way."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._beats = 0
        self._sent_at: float | None = None
        self._next = 0.0

    @property
    def silent_seconds(self) -> float:
        """How long the worker has owed a beat; 0 if it owes none."""
        return 0.0 if self._sent_at is None else self._loop.time() - self._sent_at

    def begin(self) -> None:
        """It is another worker from here on, which owes nothing."""
        self._beats = 0
        self._sent_at, self._next = None, 0.0

    def ask(self, send: Callable[[ipc.AnyMessage], None]) -> None:
        """Sends one, if none is on its way and the last was long enough ago."""
        now = self._loop.time()
        if self._sent_at is None and now >= self._next:
            self._beats += 1
            self._sent_at = now
            self._next = now + _BEAT_SECONDS
            send(messages.Beat(self._beats))

    def hear(self, beat: messages.Beat) -> None:
        """One came back."""
        if beat.number == self._beats:
            self._sent_at = None

    def gone(self) -> None:
        """The worker is: it owes none any more."""
        self._sent_at = None
