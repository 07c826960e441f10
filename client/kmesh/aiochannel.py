"""A connection driven by an event loop: as ``kmesh.channel``, for ``kmesh.aio``."""

from __future__ import annotations

import asyncio
import collections
import logging
import math
import socket
import time
from collections.abc import Callable

from google.protobuf.message import Message

from kmesh import errors, packets
from kmesh.channel import MAX_UNSENT
from kmesh.wire import MAX_MESSAGE_BYTES, MAX_UNANSWERED, Answer, Exchange, awaited

logger = logging.getLogger("kmesh")


class AsyncChannel:
    """Owns a connected socket, read and written by one event loop.

    Using it from another loop or thread is a RuntimeError, but for ``forget``.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.exchange = Exchange()
        self._sock = sock
        self._buffer = bytearray(MAX_MESSAGE_BYTES)
        self._loop = asyncio.get_running_loop()
        self._unsent: collections.deque[bytes] = collections.deque()
        self._on_close: list[Callable[[], None]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._error: BaseException | None = None
        try:
            self._loop.add_reader(sock, self._readable)
        except BaseException:
            sock.close()
            raise
        packets.close_in_child(self)

    @property
    def closed(self) -> bool:
        return self._error is not None

    @property
    def error(self) -> BaseException | None:
        """Why the connection is over; None while it is not."""
        return self._error

    def guard(self) -> None:
        """RuntimeError unless the caller runs in this channel's event loop."""
        if asyncio.get_running_loop() is not self._loop:
            raise RuntimeError("a session belongs to the event loop that opened it")

    def limit(self, max_message_bytes: int) -> None:
        """Sets how long a packet may be, in both directions."""
        self.exchange.max_message_bytes = max_message_bytes
        self._buffer = bytearray(max_message_bytes)

    async def call(self, body: Message, deadline: float) -> Answer:
        """The answer to a request. When the caller is cancelled, what comes is given back."""
        future: asyncio.Future[Answer] = self._loop.create_future()

        def done(answer: Answer | None, error: BaseException | None) -> None:
            if future.done():
                if answer is not None:
                    self._undo(body, answer)
            elif error is not None:
                future.set_exception(error)
            elif answer is not None:
                future.set_result(answer)

        if self._error is not None:
            raise errors.ConnectionClosed(f"the session is over: {self._error}")
        call = self.exchange.request(body, now=time.monotonic(), deadline=deadline, done=done)
        self._send(call.packet)
        if call.sooner:
            self._arm()
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.exception() is None:
                self._undo(body, future.result())
            else:
                self.exchange.abandon(call.id)
            raise

    def forget(self, body: Message) -> None:
        """Sends something whose answer nobody waits for, from any thread."""
        if self._error is not None:
            return
        try:
            packet = self.exchange.forget(body).packet
        except errors.ConnectionClosed:
            return
        try:
            here = asyncio.get_running_loop() is self._loop
        except RuntimeError:
            here = False
        if here:
            self._send(packet)
        elif not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._send, packet)

    def on_close(self, callback: Callable[[], None]) -> None:
        """Runs ``callback`` once when the connection is over; at once if it already is."""
        if self._error is None:
            self._on_close.append(callback)
        else:
            callback()

    def close(self, error: BaseException | None = None) -> None:
        """Ends the session. May be called again."""
        if self._error is not None:
            return
        self._error = error or errors.ConnectionClosed("closed")
        if isinstance(error, errors.ProtocolError):
            logger.error("closing the session: %s", str(error))
        self._loop.remove_reader(self._sock)
        self._loop.remove_writer(self._sock)
        if self._timer is not None:
            self._timer.cancel()
        self._sock.close()
        self._unsent.clear()
        self.exchange.close(self._error)
        callbacks, self._on_close = self._on_close, []
        for callback in callbacks:
            try:
                callback()
            except Exception:
                logger.exception("a callback for the end of a session failed")

    def forked(self) -> None:
        """Lets go of the connection in a child, where the loop does not run."""
        self._error = self._error or errors.ConnectionClosed("belongs to the parent process")
        if self._sock.fileno() >= 0:
            self._sock.close()

    def _undo(self, body: Message, answer: Answer) -> None:
        for packet in self.exchange.undo(answer, awaited(body)):
            self._send(packet)

    def _send(self, packet: bytes) -> None:
        if self._error is not None:
            return
        if self._unsent or not self._try(packet):
            self._unsent.append(packet)
            self._loop.add_writer(self._sock, self._writable)
            if len(self._unsent) > MAX_UNSENT:
                self.close(errors.ConnectionClosed("the daemon does not read its socket"))

    def _try(self, packet: bytes) -> bool:
        try:
            self._sock.send(packet, socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return False
        except OSError:
            return True  # The peer is gone; the reader finds out and ends every call.
        return True

    def _writable(self) -> None:
        while self._unsent and self._try(self._unsent[0]):
            self._unsent.popleft()
        if not self._unsent:
            self._loop.remove_writer(self._sock)

    def _readable(self) -> None:
        try:
            while self._error is None:
                packet, fds = packets.receive(self._sock, self._buffer)
                if not packet and not fds:
                    raise errors.ConnectionClosed("the daemon closed the connection")
                for undo in self.exchange.receive(packet, fds):
                    self._send(undo)
        except BlockingIOError:
            return
        except OSError as gone:
            self.close(errors.ConnectionClosed(f"the connection broke: {gone.strerror}"))
        except errors.KMeshError as error:
            self.close(error)

    def _arm(self) -> None:
        """Sets the timer to the next deadline."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        now = time.monotonic()
        deadline = self.exchange.next_deadline(now)
        if deadline < math.inf and self._error is None:
            self._timer = self._loop.call_later(max(deadline - now, 0), self._expire)

    def _expire(self) -> None:
        self.exchange.expire(time.monotonic())
        if self.exchange.unanswered > MAX_UNANSWERED:
            self.close(errors.ProtocolError("the daemon leaves requests unanswered"))
        self._arm()
