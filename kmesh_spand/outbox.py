"""Messages on their way to another of the daemon's processes, which may not read just now."""

from __future__ import annotations

import errno
import os
import socket
import time
from collections import deque

from kmesh_spand import ipc, messages

#: The kernel has no memory for a message, or too many file descriptors are on their way. A socket
#: counts as writable meanwhile, so that it is tried again after a while instead.
_SCARCE = (errno.ENOBUFS, errno.ENOMEM, errno.ETOOMANYREFS)
RETRY_SECONDS = 0.05


class Outbox:
    """Sends in order and never waits: what does not fit the socket is kept.

    Args:
        sock: non-blocking; stays the caller's.

    Attributes:
        retry_at: when to ``flush``, by the monotonic clock; None: nothing waits for a time.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._queue: deque[tuple[ipc.AnyMessage, int | None]] = deque()
        self.retry_at: float | None = None

    @property
    def waiting(self) -> int:
        """Messages that are kept."""
        return len(self._queue)

    @property
    def blocked(self) -> bool:
        """Whether to ``flush`` when the socket can be written."""
        return bool(self._queue) and self.retry_at is None

    def send(self, message: ipc.AnyMessage, fd: int | None = None) -> None:
        """Sends now or keeps it, with a duplicate of ``fd``, which stays the caller's.

        Of the states of one GPU that follow each other only the last is kept: they come for ever,
        also when the peer reads nothing for ever.

        Raises:
            ConnectionError: the peer is gone.
            OSError: there is no file descriptor for the duplicate; nothing was kept.
        """
        if (self._queue or not self._sent(message, fd)) and not self._replaces(message):
            self._queue.append((message, None if fd is None else os.dup(fd)))

    def _replaces(self, message: ipc.AnyMessage) -> bool:
        if isinstance(message, messages.GpuState):
            for number in range(len(self._queue) - 1, -1, -1):
                kept, _ = self._queue[number]
                if not isinstance(kept, messages.GpuState):
                    break
                if kept.gpu == message.gpu:
                    self._queue[number] = message, None
                    return True
        return False

    def flush(self) -> None:
        """Sends what the socket takes.

        Raises:
            ConnectionError: the peer is gone.
        """
        self.retry_at = None
        while self._queue:
            message, fd = self._queue[0]
            if not self._sent(message, fd):
                return
            self._queue.popleft()
            if fd is not None:
                os.close(fd)

    def _sent(self, message: ipc.AnyMessage, fd: int | None) -> bool:
        self.retry_at = None
        try:
            ipc.send(self._sock, message, fd)
        except BlockingIOError:
            return False
        except OSError as failed:
            if failed.errno not in _SCARCE:
                raise
            self.retry_at = time.monotonic() + RETRY_SECONDS
            return False
        return True

    def close(self) -> None:
        """Forgets what was kept."""
        self.retry_at = None
        while self._queue:
            _, fd = self._queue.popleft()
            if fd is not None:
                os.close(fd)
