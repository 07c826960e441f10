"""The session socket's protocol without a socket: packets in, packets out.

``Exchange`` numbers requests, matches answers, keeps deadlines and undoes answers that nobody
waits for any more. The thread of ``kmesh.channel`` and the event loop of ``kmesh.aiochannel`` both
drive one.
"""

from __future__ import annotations

import logging
import math
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from google.protobuf.message import DecodeError, Message

from kmesh import errors
from kmesh.v1 import families_pb2, flights_pb2, session_socket_pb2, sessions_pb2, spans_pb2

logger = logging.getLogger("kmesh")

#: One packet, before Welcome has said otherwise.
MAX_MESSAGE_BYTES = 128 * 1024
#: Seconds that a call may take unless its caller says otherwise.
DEFAULT_TIMEOUT = 5.0
#: Answers that may be owed to us past their deadline before the daemon counts as broken.
MAX_UNANSWERED = 65_536

#: For each request message: its name in Request, and that of its answer in Response.
_NAMES: dict[type[Message], tuple[str, str]] = {
    sessions_pb2.Hello: ("hello", "welcome"),
    sessions_pb2.AttachIndex: ("attach_index", "index"),
    sessions_pb2.AttachSlab: ("attach_slab", "slab"),
    sessions_pb2.AttachStaging: ("attach_staging", "staging"),
    sessions_pb2.Ping: ("ping", "pong"),
    sessions_pb2.ExportSpan: ("export_span", "span"),
    spans_pb2.AcquireRequest: ("acquire", "acquire"),
    spans_pb2.ReleaseRequest: ("release", "release"),
    spans_pb2.ReserveRequest: ("reserve", "reserve"),
    spans_pb2.CommitRequest: ("commit", "commit"),
    spans_pb2.AbortRequest: ("abort", "abort"),
    spans_pb2.ReportCorruptRequest: ("report_corrupt", "report_corrupt"),
    flights_pb2.ClaimRequest: ("claim", "claim"),
    flights_pb2.AwaitRequest: ("await_flight", "await_flight"),
    flights_pb2.LeaveRequest: ("leave", "leave"),
    flights_pb2.LandRequest: ("land", "land"),
    flights_pb2.ProgressRequest: ("progress", "progress"),
    families_pb2.DeclareFamilyRequest: ("declare_family", "declare_family"),
    families_pb2.JoinFamilyRequest: ("join_family", "join_family"),
    families_pb2.ForkMemberRequest: ("fork_member", "fork_member"),
    families_pb2.DissolveFamilyRequest: ("dissolve_family", "dissolve_family"),
    families_pb2.DescribeFamilyRequest: ("describe_family", "describe_family"),
    families_pb2.ListFamiliesRequest: ("list_families", "list_families"),
}
#: Seconds that a call may take, whatever its caller says: more has no place in a message.
_LONGEST = 1_000_000.0
_WITH_FD = frozenset({"index", "slab", "staging", "span"})


@dataclass(frozen=True, slots=True)
class Answer:
    """What the daemon said. Whoever takes it owns ``fd`` (-1: none came)."""

    body: Message
    epoch: int
    fd: int = -1


#: Called once with an answer or an error, never both, outside of every lock.
Done = Callable[[Answer | None, BaseException | None], None]

#: Numbers of slabs that are none any more.
Gone = Callable[[Sequence[int]], None]


@dataclass(frozen=True, slots=True)
class Call:
    """A request on its way.

    Attributes:
        id: names it towards ``Exchange.abandon``.
        packet: to be sent.
        sooner: its deadline comes before the last ``Exchange.next_deadline``.
    """

    id: int
    packet: bytes
    sooner: bool


@dataclass(frozen=True, slots=True)
class _Pending:
    answer: str
    deadline: float
    done: Done
    flight: int = 0


class Exchange:
    """Requests and answers of one connection. Thread-safe; does no input or output.

    Times are seconds of one monotonic clock, the driver's.

    Attributes:
        gone: hears of slabs that the daemon has given up, where the driver takes packets in.
    """

    def __init__(self) -> None:
        self.gone: Gone = lambda slabs: None
        self.max_message_bytes = MAX_MESSAGE_BYTES
        self.epoch: int | None = None
        self._lock = threading.Lock()
        self._last_id = 0
        self._pending: dict[int, _Pending] = {}
        # What is owed, and for an Await the flight that it is for.
        self._abandoned: dict[int, tuple[str, int]] = {}
        self._alarm = math.inf
        self._closed: BaseException | None = None

    @property
    def pending(self) -> int:
        """Calls whose callers wait."""
        return len(self._pending)

    @property
    def unanswered(self) -> int:
        """Requests for whose answer nobody waits, but which must still come."""
        return len(self._abandoned)

    def request(self, body: Message, *, now: float, deadline: float, done: Done) -> Call:
        """Numbers and encodes a request; ``done`` hears of its end.

        Raises:
            ConnectionClosed: the connection is over.
            TooLarge: the request does not fit in a packet. Nothing is pending then.
        """
        kind, answer = _NAMES[type(body)]
        deadline = min(deadline, now + _LONGEST)
        with self._lock:
            call = self._number(kind, body, max(deadline - now, 0.001))
            self._pending[call.id] = _Pending(answer, deadline, done, awaited(body))
            if deadline < self._alarm:
                self._alarm = deadline
                return Call(call.id, call.packet, True)
            return call

    def forget(self, body: Message) -> Call:
        """As ``request``, for something whose answer nobody waits for."""
        kind, answer = _NAMES[type(body)]
        with self._lock:
            call = self._number(kind, body, DEFAULT_TIMEOUT)
            self._abandoned[call.id] = answer, 0
            return call

    def abandon(self, call_id: int) -> None:
        """The caller waits no longer: a late answer will be undone. ``done`` is not called."""
        with self._lock:
            call = self._pending.pop(call_id, None)
            if call is not None:
                self._abandoned[call_id] = call.answer, call.flight

    def next_deadline(self, now: float) -> float:
        """When ``expire`` has to be called next; infinity if nothing waits."""
        with self._lock:
            if not now < self._alarm < math.inf:
                self._alarm = min((c.deadline for c in self._pending.values()), default=math.inf)
            return self._alarm

    def expire(self, now: float) -> None:
        """Ends the calls whose deadline has passed."""
        with self._lock:
            if now < self._alarm:
                return
            late = {i: call for i, call in self._pending.items() if call.deadline <= now}
            for call_id, call in late.items():
                del self._pending[call_id]
                self._abandoned[call_id] = call.answer, call.flight
        for call in late.values():
            call.done(None, errors.DeadlineExceeded(f"no answer in time ({call.answer})"))

    def receive(self, packet: bytes, fds: Sequence[int]) -> list[bytes]:
        """Takes a packet and the descriptors that came with it, which it owns from now on.

        Returns packets to send: they give back what a late answer brought.

        Raises:
            ProtocolError: the daemon broke the protocol; the connection must be closed.
            RequestError: the daemon ended the connection and said why.
        """
        left = list(fds)
        try:
            response = self._parse(packet, left)
            if not response.id and self._noticed(response, left):
                return []
            with self._lock:
                call = self._pending.pop(response.id, None)
                late = ("", 0) if call else self._abandoned.pop(response.id, ("", 0))
            expected = call.answer if call else late[0]
            if not expected:
                raise errors.ProtocolError(f"answer to a request never made: {response.id}")
            try:
                answer: Answer | BaseException = self._answer(response, expected, left)
            except errors.ProtocolError as broken:
                if call:
                    call.done(None, broken)
                raise
        finally:
            for fd in left:
                os.close(fd)
        if call is None:
            return self.undo(answer, late[1]) if isinstance(answer, Answer) else []
        if isinstance(answer, Answer):
            call.done(answer, None)
        else:
            call.done(None, answer)
        return []

    def undo(self, answer: Answer, flight: int = 0) -> list[bytes]:
        """Packets that give back what an unwanted answer brought; closes its descriptor.

        Args:
            flight: that an Await was for.
        """
        if answer.fd >= 0:
            os.close(answer.fd)
        body = answer.body
        try:
            if isinstance(body, spans_pb2.AcquireResponse) and body.lease:
                return [self.forget(spans_pb2.ReleaseRequest(leases=[body.lease])).packet]
            if isinstance(body, spans_pb2.ReserveResponse):
                reservations = [r for r in body.reservation if r]
                if reservations:
                    request = spans_pb2.AbortRequest(reservation=reservations)
                    return [self.forget(request).packet]
            if flight := _led(body, flight):
                aborted = flights_pb2.FLIGHT_CAUSE_ABORTED
                land = flights_pb2.LandRequest(flight=flight, cause=aborted)
                return [self.forget(land).packet]
        except errors.ConnectionClosed:
            return []
        if isinstance(body, spans_pb2.ReleaseResponse) and body.refused:
            logger.warning("the daemon refused to release %d leases", len(body.refused))
        return []

    def close(self, error: BaseException) -> None:
        """Ends every pending call with ``error``; later requests raise ConnectionClosed."""
        with self._lock:
            if self._closed is None:
                self._closed = error
            pending, self._pending = self._pending, {}
            self._abandoned = {}
        for call in pending.values():
            call.done(None, error)

    def _number(self, kind: str, body: Message, seconds: float) -> Call:
        if self._closed is not None:
            raise errors.ConnectionClosed(f"the session is over: {self._closed}")
        self._last_id += 1
        request = session_socket_pb2.Request(id=self._last_id, deadline_ms=int(seconds * 1000) or 1)
        getattr(request, kind).CopyFrom(body)
        packet = request.SerializeToString()
        if len(packet) > self.max_message_bytes:
            raise errors.TooLarge(
                f"{len(packet)} bytes are more than {self.max_message_bytes}", field=kind
            )
        return Call(self._last_id, packet, False)

    def _parse(self, packet: bytes, fds: list[int]) -> session_socket_pb2.Response:
        if len(fds) > 1:
            raise errors.ProtocolError(f"{len(fds)} file descriptors in one packet")
        try:
            response = session_socket_pb2.Response.FromString(packet)
        except DecodeError:
            raise errors.ProtocolError("a packet that is no Response") from None
        if response.id == 0 and response.status.code:
            status = response.status
            raise errors.from_code(status.code, status.message, status.field)
        return response

    def _noticed(self, response: session_socket_pb2.Response, fds: list[int]) -> bool:
        """Takes a notice; False if it is none. What only later daemons say is passed over."""
        kind = response.WhichOneof("body")
        if kind not in (None, "slabs_gone"):
            return False
        if self.epoch != response.epoch:
            raise errors.ProtocolError("a notice of another epoch")
        if kind is not None:
            if fds:
                raise errors.ProtocolError("a notice with a file descriptor")
            self.gone(response.slabs_gone.slab)
        return True

    def _answer(
        self, response: session_socket_pb2.Response, expected: str, fds: list[int]
    ) -> Answer | BaseException:
        """The answer, which takes its descriptor out of ``fds``, or the refusal."""
        if response.status.code:
            if fds:
                raise errors.ProtocolError("a file descriptor came with a refusal")
            status = response.status
            return errors.from_code(status.code, status.message, status.field)
        kind = response.WhichOneof("body")
        if kind != expected:
            raise errors.ProtocolError(f"expected {expected} in an answer, got {kind}")
        if (kind in _WITH_FD) != bool(fds):
            raise errors.ProtocolError(
                f"{kind}: a file descriptor {'came unasked' if fds else 'is missing'}"
            )
        if self.epoch is None:
            self.epoch = response.epoch
        elif response.epoch != self.epoch:
            raise errors.ProtocolError("the epoch changed within a connection")
        return Answer(getattr(response, kind), response.epoch, fds.pop() if fds else -1)


def awaited(body: Message) -> int:
    return body.flight if isinstance(body, flights_pb2.AwaitRequest) else 0


def _led(body: Message, flight: int) -> int:
    """The flight that an answer lets us lead; 0 if none."""
    if isinstance(body, flights_pb2.ClaimResponse):
        return body.flight if body.standing == flights_pb2.STANDING_LEAD else 0
    if isinstance(body, flights_pb2.AwaitResponse):
        return flight if body.arrival == flights_pb2.ARRIVAL_LEAD else 0
    return 0
