"""Control's end of the ways to the supervisor and to the store worker."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable

from kmesh_spand import ipc
from kmesh_spand.outbox import Outbox

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
        loop.add_reader(sock.fileno(), self._readable)

    def send(self, message: ipc.AnyMessage, fd: int | None = None) -> None:
        """Sends now or soon, in order. ``fd`` stays the caller's. Lost if the peer is gone.

        Raises:
            OSError: it has to wait, and there is no file descriptor left to keep ``fd`` by.
        """
        if not self.open:
            return
        waited = self._outbox.waiting
        try:
            self._outbox.send(message, fd)
        except ConnectionError:
            # The reader will see the end: never tell of it in the middle of the caller's work.
            logger.debug("a message to a process that is gone")
        if self._outbox.waiting and not waited:
            self._loop.add_writer(self._sock.fileno(), self._writable)

    def close(self) -> None:
        """Ends the channel; ``lost`` is not called."""
        if not self.open:
            return
        self.open = False
        self._loop.remove_reader(self._sock.fileno())
        self._loop.remove_writer(self._sock.fileno())
        self._sock.close()
        self._outbox.close()

    def _end(self) -> None:
        if self.open:
            self.close()
            self._lost()

    def _writable(self) -> None:
        try:
            self._outbox.flush()
        except ConnectionError:
            self._outbox.close()
        if not self._outbox.waiting:
            self._loop.remove_writer(self._sock.fileno())

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
