"""Leases that several requests of one engine use: siblings ask for the same spans."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from concurrent.futures import Future

from kmesh.errors import DeadlineExceeded
from kmesh.keys import KEY_BYTES
from kmesh.lease import Lease


class Held:
    """A lease that is there or on its way, as long as somebody uses it. Thread-safe.

    Attributes:
        future: of the lease.
        lease: the same, once somebody has seen it there.
        deadline: when nobody waits for it any more.
        told: that it did not come was counted.
        packed: spans, mirrors and bases as load plans have them, by numbers of the first span, of
            spans skipped and of keys: siblings have the same. For the scheduler's thread.

    Args:
        unused: told when nobody uses it any more, in whichever thread.
    """

    def __init__(
        self, future: Future[Lease], deadline: float, unused: Callable[[Held], None]
    ) -> None:
        self.future = future
        self.deadline = deadline
        self.lease: Lease | None = None
        self.told = False
        self.packed: dict[tuple[int, int, int], tuple[bytes, bytes, bytes]] = {}
        self._unused = unused
        self._users = 1
        self._lock = threading.Lock()

    def join(self, soonest: float) -> bool:
        """One more uses it; False: nobody does any more, it is not all that was asked for, or it is
        still to come and not waited for until ``soonest``."""
        with self._lock:
            if not self._users or not self._serves(soonest):
                return False
            self._users += 1
            return True

    def leave(self) -> None:
        """One uses it no longer; after the last it goes back, also one that is still to come."""
        with self._lock:
            self._users -= 1
            if self._users:
                return
        self._unused(self)
        self.future.add_done_callback(_release)

    def error(self, now: float) -> BaseException | None:
        """Why there is no lease; None: it is in ``lease``, or still to come and waited for."""
        if self.lease is not None:
            return None
        if not self.future.done():
            return DeadlineExceeded("no lease in time") if now >= self.deadline else None
        error = self.future.exception()
        if error is None:
            self.lease = self.future.result()
        return error

    def _serves(self, soonest: float) -> bool:
        lease = self.lease
        if lease is None:
            if not self.future.done():
                return self.deadline >= soonest
            if self.future.exception() is not None:
                return False
            lease = self.lease = self.future.result()
        return lease.hits * KEY_BYTES == len(lease.keys)


class Leases:
    """What an engine has asked for. For the scheduler's thread."""

    def __init__(self) -> None:
        self._held: dict[Hashable, Held] = {}

    def ask(
        self,
        question: Hashable,
        acquire: Callable[[], Future[Lease]],
        *,
        now: float,
        timeout: float,
    ) -> Held:
        """A lease; the one that answers the same question already, if there is one.

        One that is under way has at least half of its time left.

        Args:
            question: all that the answer depends on.
            acquire: asks the daemon; its errors are raised.
            timeout: seconds that it waits.
        """
        found = self._held.get(question)
        if found is None or not found.join(now + timeout / 2):
            found = self._held[question] = Held(
                acquire(), now + timeout, lambda held: self._forget(question, held)
            )
        return found

    def _forget(self, question: Hashable, held: Held) -> None:
        # Should another one be asked for just now, it is merely shared with nobody.
        if self._held.get(question) is held:
            self._held.pop(question, None)


def _release(future: Future[Lease]) -> None:
    if future.exception() is None:
        future.result().release()
