"""A connection driven by one thread: sends what callers give it, hears what the daemon says."""

from __future__ import annotations

import collections
import logging
import math
import os
import select
import socket
import threading
import time
from collections.abc import Callable

from google.protobuf.message import Message

from kmesh import errors, packets
from kmesh.wire import MAX_MESSAGE_BYTES, MAX_UNANSWERED, Done, Exchange

logger = logging.getLogger("kmesh")

#: Packets that may wait for the daemon to read before callers are refused.
MAX_UNSENT = 4096


class Channel:
    """Owns a connected socket and the thread that reads it.

    No method waits for the daemon. Callbacks run in the channel's thread, except those of a call
    that fails at once. In a forked child the connection is closed, so that the session still
    ends with the process that opened it.

    Raises:
        OSError, RuntimeError: no descriptor or no thread is left; the socket is closed.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.exchange = Exchange()
        self._error: BaseException | None = None
        try:
            self.peer_pid = packets.peer_pid(sock)
            self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        except BaseException:
            sock.close()
            raise
        self._sock = sock
        self._buffer = bytearray(MAX_MESSAGE_BYTES)
        self._lock = threading.Lock()
        self._unsent: collections.deque[bytes] = collections.deque()
        self._on_close: list[Callable[[], None]] = []
        self._over = False
        self._thread = threading.Thread(target=self._run, name="kmesh-session", daemon=True)
        try:
            self._thread.start()
        except BaseException:
            sock.close()
            os.close(self._wake)
            raise
        packets.close_in_child(self)

    @property
    def closed(self) -> bool:
        return self._error is not None

    @property
    def error(self) -> BaseException | None:
        """Why the connection is over; None while it is not."""
        return self._error

    @property
    def in_callback(self) -> bool:
        """Whether the caller runs in the channel's own thread, which must not wait for itself."""
        return threading.current_thread() is self._thread

    def limit(self, max_message_bytes: int) -> None:
        """Sets how long a packet may be, in both directions."""
        self.exchange.max_message_bytes = max_message_bytes
        self._buffer = bytearray(max_message_bytes)

    def call(self, body: Message, deadline: float, done: Done) -> None:
        """Sends a request; ``done`` hears of its end, by ``deadline`` (monotonic) at the latest.

        Raises:
            ConnectionClosed, TooLarge: nothing was sent and ``done`` will not be called.
        """
        if self._error is not None:
            raise errors.ConnectionClosed(f"the session is over: {self._error}")
        call = self.exchange.request(body, now=time.monotonic(), deadline=deadline, done=done)
        self._send(call.packet, wake=call.sooner)

    def forget(self, body: Message) -> None:
        """Sends something whose answer nobody waits for, unless the session is over."""
        if self._error is not None:
            return
        try:
            self._send(self.exchange.forget(body).packet)
        except errors.ConnectionClosed:
            return

    def on_close(self, callback: Callable[[], None]) -> None:
        """Runs ``callback`` once when the connection is over; at once if it already is."""
        with self._lock:
            if not self._over:
                self._on_close.append(callback)
                return
        callback()

    def close(self) -> None:
        """Ends the session, and waits for the channel's thread unless called in it."""
        self._fail(errors.ConnectionClosed("closed"))
        if not self.in_callback:
            self._thread.join()

    def forked(self) -> None:
        """Lets go of the connection in a child, where the thread does not exist."""
        self._lock = threading.Lock()
        self._error = self._error or errors.ConnectionClosed("belongs to the parent process")
        if self._sock.fileno() >= 0:
            self._sock.close()
            os.close(self._wake)

    def _send(self, packet: bytes, wake: bool = False) -> None:
        with self._lock:
            if self._error is not None:
                return  # The exchange is closed right now and tells the caller.
            if self._unsent or not self._try(packet):
                self._unsent.append(packet)
                wake = True
            if wake:
                os.eventfd_write(self._wake, 1)
            stuck = len(self._unsent) > MAX_UNSENT
        if stuck:
            self._fail(errors.ConnectionClosed("the daemon does not read its socket"))

    def _try(self, packet: bytes) -> bool:
        try:
            self._sock.send(packet, socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return False
        except OSError:
            return True  # The peer is gone; the reader finds out and ends every call.
        return True

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            if self._error is None:
                self._error = error
                os.eventfd_write(self._wake, 1)

    def _run(self) -> None:
        try:
            self._loop()
        except errors.KMeshError as error:
            if isinstance(error, errors.ProtocolError):
                logger.error("closing the session: %s", str(error))
            self._fail(error)
        except BaseException as error:
            self._fail(errors.ConnectionClosed(f"the session's thread failed: {error!r}"))
            raise
        finally:
            self._finish()

    def _loop(self) -> None:
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        while self._error is None:
            wanted = select.POLLIN | (select.POLLOUT if self._unsent else 0)
            poll.register(self._sock, wanted)
            for fd, event in poll.poll(self._milliseconds()):
                if fd == self._wake:
                    os.eventfd_read(self._wake)
                elif event & ~select.POLLOUT:
                    self._read()
            self._flush()
            self.exchange.expire(time.monotonic())
            if self.exchange.unanswered > MAX_UNANSWERED:
                raise errors.ProtocolError("the daemon leaves requests unanswered")

    def _milliseconds(self) -> int | None:
        now = time.monotonic()
        deadline = self.exchange.next_deadline(now)
        return None if deadline == math.inf else math.ceil(max(deadline - now, 0) * 1000)

    def _read(self) -> None:
        while self._error is None:
            try:
                packet, fds = packets.receive(self._sock, self._buffer)
            except BlockingIOError:
                return
            except OSError as gone:
                raise errors.ConnectionClosed(f"the connection broke: {gone.strerror}") from None
            if not packet and not fds:
                raise errors.ConnectionClosed("the daemon closed the connection")
            for undo in self.exchange.receive(packet, fds):
                self._send(undo)

    def _flush(self) -> None:
        with self._lock:
            while self._unsent and self._try(self._unsent[0]):
                self._unsent.popleft()

    def _finish(self) -> None:
        with self._lock:
            error = self._error or errors.ConnectionClosed("closed")
            self._sock.close()
            os.close(self._wake)
            self._unsent.clear()
        self.exchange.close(error)
        with self._lock:
            self._over = True
            callbacks, self._on_close = self._on_close, []
        for callback in callbacks:
            try:
                callback()
            except Exception:
                logger.exception("a callback for the end of a session failed")
