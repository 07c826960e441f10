"""Messages on their way to another of the daemon's processes, which may not read just now."""

from __future__ import annotations

import errno
import os
import socket
from collections import deque

from kmesh_spand import ipc

#: The kernel takes no more just now.
_FULL = (errno.EAGAIN, errno.ENOBUFS, errno.ENOMEM, errno.ETOOMANYREFS)


class Outbox:
    """Sends in order and never waits: what does not fit the socket is kept.

    Args:
        sock: non-blocking; stays the caller's.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._queue: deque[tuple[ipc.AnyMessage, int | None]] = deque()

    @property
    def waiting(self) -> int:
        """Messages that are kept; ``flush`` when the socket can be written."""
        return len(self._queue)

    def send(self, message: ipc.AnyMessage, fd: int | None = None) -> None:
        """Sends now or keeps it, with a duplicate of ``fd``, which stays the caller's.

        Raises:
            ConnectionError: the peer is gone.
            OSError: there is no file descriptor for the duplicate; nothing was kept.
        """
        if self._queue or not self._sent(message, fd):
            self._queue.append((message, None if fd is None else os.dup(fd)))

    def flush(self) -> None:
        """Sends what the socket takes.

        Raises:
            ConnectionError: the peer is gone.
        """
        while self._queue:
            message, fd = self._queue[0]
            if not self._sent(message, fd):
                return
            self._queue.popleft()
            if fd is not None:
                os.close(fd)

    def _sent(self, message: ipc.AnyMessage, fd: int | None) -> bool:
        try:
            ipc.send(self._sock, message, fd)
        except OSError as failed:
            if failed.errno in _FULL:
                return False
            raise
        return True

    def close(self) -> None:
        """Forgets what was kept."""
        while self._queue:
            _, fd = self._queue.popleft()
            if fd is not None:
                os.close(fd)
