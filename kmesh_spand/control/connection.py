"""One connection of the session socket: packets in, packets out, in bounded memory."""

from __future__ import annotations

import array
import asyncio
import contextlib
import logging
import os
import select
import socket
import time
from collections import deque
from collections.abc import Callable

from google.protobuf.message import DecodeError, Message

from kmesh import _host, errors
from kmesh.v1 import (
    common_pb2,
    flights_pb2,
    session_socket_pb2,
    sessions_pb2,
    spans_pb2,
)
from kmesh_spand.control import limits
from kmesh_spand.control.handler import Handler
from kmesh_spand.control.registry import Member, Peer

logger = logging.getLogger(__name__)

#: One more than a packet may have, so that a longer one is seen. Only used inside a callback.
_BUFFER = memoryview(bytearray(limits.MAX_MESSAGE_BYTES + 1))
#: Packets, and seconds, that one connection is served before the others get their turn.
_TURN = 16
# An enum's operators take longer than the rest of a look at a packet.
_CUT_CONTROL, _CUT_DATA = int(socket.MSG_CTRUNC), int(socket.MSG_TRUNC)
_TURN_SECONDS = 0.005
#: Between looks at a client that sends no more but is owed answers.
_HALF_SECONDS = 0.05

#: Sent at the end of a turn, behind answers that somebody waits for: each wakes the client. Pong
#: says that all that was asked before is answered, so nothing waits behind it.
_UNHURRIED = (
    spans_pb2.ReleaseResponse,
    spans_pb2.AbortResponse,
    flights_pb2.LeaveResponse,
    flights_pb2.LandResponse,
    flights_pb2.ProgressResponse,
)

#: Number in Response of each answer.
_ANSWERS = {
    field.message_type.full_name: field.number
    for field in session_socket_pb2.Response.DESCRIPTOR.oneofs_by_name["body"].fields
    if field.message_type is not None
}


class Connection:
    """Owns its socket until it is closed, and the session that Hello opened.

    Args:
        refusal: answer the first packet with this and end, whatever it is.
        ended: called once when the connection is over.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        handler: Handler,
        sock: socket.socket,
        peer: Peer,
        ended: Callable[[Connection], None],
        refusal: errors.RequestError | None = None,
        patience: float = limits.HELLO_SECONDS,
    ) -> None:
        self.peer = peer
        self.refused = refusal is not None
        self._loop = loop
        self._handler = handler
        self._sock = sock
        self._fd = sock.fileno()
        self._ended = ended
        self._refusal = refusal
        self._member: Member | None = None
        self._notices = False
        self._queue: deque[tuple[bytes, int]] = deque()
        # Answers of this turn that nobody waits for; None between turns.
        self._unhurried: list[bytes] | None = None
        self._paused = False
        self._half = False
        self._open = True
        self._timer: asyncio.TimerHandle | None = loop.call_later(
            patience, self.close, "no Hello in time"
        )
        sock.setblocking(False)
        loop.add_reader(self._fd, self._readable)

    @property
    def member(self) -> Member | None:
        """The session, once Hello was accepted."""
        return self._member

    def close(self, reason: str) -> None:
        """Ends the connection and its session."""
        if not self._open:
            return
        self._open = False
        self._loop.remove_reader(self._fd)
        self._loop.remove_writer(self._fd)
        if self._timer is not None:
            self._timer.cancel()
        self._sock.close()
        for _, fd in self._queue:
            if fd >= 0:
                os.close(fd)
        self._queue.clear()
        try:
            if self._member is not None:
                self._handler.close(self._member.id, reason)
            else:
                logger.info(
                    "connection ended before a session began",
                    extra={"uid": self.peer.uid, "peer": self.peer.pid, "reason": reason},
                )
        finally:
            self._ended(self)

    def notify(self, notice: Message) -> None:
        """Tells the session something that it did not ask for, if it takes notices."""
        if self._notices:
            self._respond(0, notice, -1, None)

    # Reading.

    def _readable(self) -> None:
        self._unhurried = []
        try:
            self._turn()
        except Exception:
            logger.exception("a connection failed", extra={"uid": self.peer.uid})
            self.close("a bug in the daemon")
        finally:
            self._send_unhurried()
            self._unhurried = None

    def _send_unhurried(self) -> None:
        if self._unhurried:
            unhurried, self._unhurried = self._unhurried, []
            for packet in unhurried:
                self._send(packet, -1)

    def _turn(self) -> None:
        until = time.monotonic() + _TURN_SECONDS
        for _ in range(_TURN):
            if not self._open or self._paused or not self._read_one():
                return
            if time.monotonic() > until:
                return

    def _read_one(self) -> bool:
        """Returns whether there may be more."""
        try:
            # No room for control data: the kernel flags fds and never installs them.
            size, _, flags, _ = self._sock.recvmsg_into([_BUFFER])
        except BlockingIOError:
            return False
        except OSError as failed:
            self.close(f"read: {failed.strerror}")
            return False
        if flags & _CUT_CONTROL:
            return self._fatal(errors.InvalidArgument("file descriptors are not accepted"))
        if flags & _CUT_DATA or size > limits.MAX_MESSAGE_BYTES:
            return self._fatal(
                errors.TooLarge(f"a packet has at most {limits.MAX_MESSAGE_BYTES} bytes")
            )
        if size == 0:
            self._ended_sending()
            return False
        try:
            request = session_socket_pb2.Request.FromString(bytes(_BUFFER[:size]))
        except DecodeError:
            return self._fatal(errors.InvalidArgument("a packet that is no Request"))
        self._on_request(request)
        return True

    def _ended_sending(self) -> None:
        """The client sends no more; if it still reads, it gets the answers that it is owed."""
        if self._gone():
            self.close("closed by the client")
            return
        self._half = True
        self._loop.remove_reader(self._fd)
        # Not now: this turn's last answers go out at its end.
        self._loop.call_soon(self._watch_half)

    def _watch_half(self) -> None:
        """Ends a half-closed connection when nothing is owed, or when the client is gone.

        What tells readable also tells of a half-closed socket, always: it can't be waited with.
        """
        if not self._open:
            return
        owed = self._member is not None and self._handler.owes(self._member.id)
        if self._gone() or not (owed or self._queue):
            self.close("closed by the client")
        else:
            self._loop.call_later(_HALF_SECONDS, self._watch_half)

    def _gone(self) -> bool:
        """Whether the client has closed its end, and not only ended what it sends."""
        poll = select.poll()
        poll.register(self._fd, 0)
        return bool(poll.poll(0))

    def _fatal(self, failed: errors.RequestError) -> bool:
        """Says why, under no request's id, and ends the connection."""
        self._handler.counters["protocol_errors"] += 1
        self._last_words(0, failed)
        return False

    def _last_words(self, number: int, failed: errors.RequestError) -> None:
        """Answers a request and ends the connection."""
        self._send_unhurried()
        self._handler.count_refusal(failed)
        self._respond(number, None, -1, failed)
        # What lies unread when a socket is closed makes the peer lose what it was told.
        with contextlib.suppress(OSError):
            for _ in range(_TURN):
                if not self._sock.recv_into(_BUFFER):
                    break
        self.close(failed.message)

    def _on_request(self, request: session_socket_pb2.Request) -> None:
        if self._refusal is not None:
            self._last_words(request.id, self._refusal)
            return
        number = request.id
        name = request.WhichOneof("body")
        failed: errors.RequestError
        if name is None:
            failed = errors.InvalidArgument("no known request", field="body")
            self._handler.count_refusal(failed)
            self._respond(number, None, -1, failed)
        elif name == "hello":
            self._hello(request)
        elif self._member is None:
            failed = errors.Unauthenticated("Hello comes first", field=name)
            self._last_words(number, failed)
        else:
            self._handler.call(
                self._member.id,
                getattr(request, name),
                request.deadline_ms,
                lambda body, fd, failed: self._respond(number, body, fd, failed),
                number,
            )

    def _hello(self, request: session_socket_pb2.Request) -> None:
        try:
            if self._member is not None:
                raise errors.InvalidArgument("this connection has its session", field="hello")
            member = self._handler.open(request.hello, self.peer)
        except errors.RequestError as refused:
            if self._member is None:
                self._last_words(request.id, refused)
            else:
                self._handler.count_refusal(refused)
                self._respond(request.id, None, -1, refused)
            return
        self._member = member
        self._notices = request.hello.notices
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._respond(request.id, self._handler.welcome(member), -1, None)

    # Writing.

    def _respond(
        self, number: int, body: Message | None, fd: int, failed: errors.RequestError | None
    ) -> None:
        response = session_socket_pb2.Response(id=number, epoch=self._handler.epoch)
        if failed is not None:
            response.status.CopyFrom(status_of(failed))
        packet = response.SerializeToString()
        if failed is None and body is not None:
            # Put behind it, as a field of bytes is written: setting it would copy all of it.
            answer = _ANSWERS[body.DESCRIPTOR.full_name]
            packet += _host.pack_field(answer, body.SerializeToString(), True)
        if self._unhurried is not None and isinstance(body, _UNHURRIED):
            self._unhurried.append(packet)
        else:
            if self._unhurried and isinstance(body, sessions_pb2.Pong):
                self._send_unhurried()
            self._send(packet, fd)

    def _send(self, packet: bytes, fd: int) -> None:
        if not self._open:
            return
        if not self._queue and self._send_now(packet, fd):
            return
        if not self._open:
            return
        if len(self._queue) >= limits.MAX_PACKETS:
            self.close("the client does not read its answers")
            return
        try:
            kept = os.dup(fd) if fd >= 0 else -1
        except OSError as failed:
            self.close(f"an answer's file descriptor: {failed.strerror}")
            return
        if not self._queue:
            self._loop.add_writer(self._fd, self._writable)
        self._queue.append((packet, kept))
        if len(self._queue) >= limits.PAUSE_PACKETS and not self._paused and not self._half:
            self._paused = True
            self._loop.remove_reader(self._fd)

    def _send_now(self, packet: bytes, fd: int) -> bool:
        """Returns False if the client has to read first."""
        try:
            if fd < 0:
                self._sock.send(packet, socket.MSG_NOSIGNAL)
            else:
                rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))]
                self._sock.sendmsg([packet], rights, socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return False
        except OSError as failed:
            # The reader would see this too, but not while it is paused.
            self._loop.call_soon(self.close, f"write: {failed.strerror}")
        return True

    def _writable(self) -> None:
        while self._queue and self._open:
            packet, fd = self._queue[0]
            if not self._send_now(packet, fd):
                return
            self._queue.popleft()
            if fd >= 0:
                os.close(fd)
        if not self._open:
            return
        self._loop.remove_writer(self._fd)
        if self._paused:
            self._paused = False
            self._loop.add_reader(self._fd, self._readable)


def status_of(failed: errors.RequestError) -> common_pb2.Status:
    """A refusal as it is sent."""
    return common_pb2.Status(
        code=common_pb2.Code.ValueType(failed.code), message=failed.message, field=failed.field
    )
