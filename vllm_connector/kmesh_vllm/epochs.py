"""Which daemon a worker's session is with, and which daemons are gone for good."""

from __future__ import annotations

import threading
from collections.abc import Callable

from kmesh.errors import ConnectionClosed
from kmesh.session import Session


class Epochs:
    """The worker's live session, and those epochs of the daemon that are over.

    An epoch never comes back, so that nobody waits for one whose session was followed by another's.

    Args:
        current: the worker's live session, or None.
    """

    def __init__(self, current: Callable[[], Session | None]) -> None:
        self._current = current
        self._lock = threading.Lock()
        self._last = 0
        self._over: set[int] = set()

    def changed(self, session: Session | None) -> None:
        """A session is new, or was lost. Never waits."""
        if session is None or session.epoch == self._last:
            return
        with self._lock:
            # A thread may tell late of a session that it has seen.
            if session.epoch not in self._over:
                self._over.add(self._last)
                self._last = session.epoch

    def session_of(self, epoch: int) -> Session | None:
        """The live session, if it is of this epoch; None: it may still come.

        Raises:
            ConnectionClosed: the daemon of that epoch is gone, and its memory with it.
        """
        session = self._current()
        self.changed(session)
        if session is not None and session.epoch == epoch:
            return session
        if epoch in self._over or (session is None and epoch == self._last):
            raise ConnectionClosed("the daemon that gave the lease is gone")
        return None
