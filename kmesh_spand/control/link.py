"""Control's end of the ways to the supervisor and to the store worker."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable

from kmesh_spand import ipc
from kmesh_spand.outbox import RETRY_SECONDS, Outbox

logger = logging.getLogger(__name__)


class Link:
    """A non-blocking channel on the event loop; owns its socket.

    Args:
        heard: called with every message and its fd, which it owns.
        lost: called once, when the peer is gone.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        sock: socket.socket,
        heard: Callable[[ipc.AnyMessage, int | None], None],
        lost: Callable[[], None],
    ) -> None:
        self._loop = loop
        self._sock = sock
        self._heard = heard
        self._lost = lost
        self.open = True
        sock.setblocking(False)
        self._outbox = Outbox(sock)
        self._writes = False
        self._retry: asyncio.TimerHandle | None = None
        loop.add_reader(sock.fileno(), self._readable)

    def send(self, message: ipc.AnyMessage, fd: int | None = None) -> None:
        """Sends now or soon, in order. ``fd`` stays the caller's. Lost if the peer is gone.

        Raises:
            OSError: it has to wait, and there is no file descriptor left to keep ``fd`` by.
        """
        if not self.open:
            return
        try:
            self._outbox.send(message, fd)
        except ConnectionError:
            # The reader will see the end: never tell of it in the middle of the caller's work.
            logger.debug("a message to a process that is gone")
        self._await()

    def close(self) -> None:
        """Ends the channel; ``lost`` is not called."""
        if not self.open:
            return
        self.open = False
        self._loop.remove_reader(self._sock.fileno())
        self._loop.remove_writer(self._sock.fileno())
        self._writes = False
        if self._retry is not None:
            self._retry.cancel()
        self._sock.close()
        self._outbox.close()

    def _end(self) -> None:
        if self.open:
            self.close()
            self._lost()

    def _flush(self) -> None:
        try:
            self._outbox.flush()
        except ConnectionError:
            self._outbox.close()
        self._await()

    def _await(self) -> None:
        """Has what is kept sent: when the socket can be written, or after a while."""
        blocked = self._outbox.blocked
        if blocked and not self._writes:
            self._loop.add_writer(self._sock.fileno(), self._flush)
        elif self._writes and not blocked:
            self._loop.remove_writer(self._sock.fileno())
        self._writes = blocked
        if self._outbox.retry_at is not None and self._retry is None:
            self._retry = self._loop.call_later(RETRY_SECONDS, self._again)

    def _again(self) -> None:
        self._retry = None
        self._flush()

    def _readable(self) -> None:
        # A bounded number, so that other sockets get their turn.
        for _ in range(64):
            if not self.open:
                return
            try:
                message, fd = ipc.receive(self._sock)
            except BlockingIOError:
                return
            except (EOFError, OSError):
                self._end()
                return
            self._heard(message, fd)
