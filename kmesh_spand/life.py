"""One life of a daemon: as long as any of its processes may write what it holds.

A daemon that takes memory over from another waits for the end of that one's life. The lock is on
a memfd that travels with the memory, so that it holds between any two daemons that can have it.
"""

from __future__ import annotations

import fcntl
import os
import time

from kmesh_spand.memory import make_memfd, reopen_read_only

_POLL_SECONDS = 0.01


class Life:
    """The lock on one memory.

    Attributes:
        memory: the memfd, which others may be given. held: locked, for processes that write;
            the lock ends with the last of them, or by ``release``. Both are owned.

    Args:
        memory: of an earlier life; None makes one.
    """

    def __init__(self, memory: int | None = None) -> None:
        self.memory = make_memfd("life", 0) if memory is None else memory
        try:
            # Locks belong to one opening of a file, and are shared by all its duplicates.
            self.held = reopen_read_only(self.memory)
        except BaseException:
            if memory is None:
                os.close(self.memory)
            raise

    def try_begin(self) -> bool:
        """Whether this life has begun: no other one lasts."""
        try:
            fcntl.flock(self.held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def begin(self, seconds: float) -> bool:
        """As ``try_begin``, and waits so long for the end of another."""
        until = time.monotonic() + seconds
        while not self.try_begin():
            if time.monotonic() >= until:
                return False
            time.sleep(_POLL_SECONDS)
        return True

    def release(self) -> None:
        """Lets another life begin; no process of this one writes any more."""
        fcntl.flock(self.held, fcntl.LOCK_UN)

    def close(self) -> None:
        os.close(self.held)
        os.close(self.memory)
