"""What an engine does whose requests all wait for others."""

from __future__ import annotations

import threading

#: Seconds of a first rest, and of the longest.
_FIRST, _LONGEST = 0.002, 0.008


class Rest:
    """Pauses in steps in which nothing is to be done.

    Such an engine would step as fast as it can, on cores that the leader needs; and each of its
    steps, empty as it is, has vLLM record an event on the GPU, for which the leader's work there is
    put aside. News end a pause, so that nobody who waits begins later for it. A request that comes
    meanwhile is seen behind it: so pauses are short at first, and each is twice as long as the one
    before, until something comes.

    Args:
        lockstep: other engines wait for each step of this one: pauses stay short.
    """

    def __init__(self, *, lockstep: bool = False) -> None:
        self._longest = _FIRST if lockstep else _LONGEST
        self._next = _FIRST
        self._news = threading.Event()

    def tell(self, _: object = None) -> None:
        """There is news for who waits. From any thread."""
        self._news.set()

    def disturb(self) -> None:
        """There is something to do: the next pause is a short one again."""
        self._next = _FIRST

    def rest(self) -> None:
        """Pauses until there is news, or its time is over."""
        if self._news.wait(self._next):
            self._next = _FIRST
        else:
            self._next = min(2 * self._next, self._longest)

    def renew(self) -> None:
        """All that is known has been looked at."""
        self._news.clear()
