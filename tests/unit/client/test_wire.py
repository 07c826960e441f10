"""The exchange: every call ends once, and nothing that comes late is kept."""

from __future__ import annotations

import math
import os
from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, multiple, rule

from kmesh import errors
from kmesh.v1 import session_socket_pb2 as frames
from kmesh.v1 import sessions_pb2, spans_pb2
from kmesh.wire import Answer, Done, Exchange

EPOCH = 77


class Caller:
    """Remembers how its call ended."""

    def __init__(self) -> None:
        self.answers: list[Answer] = []
        self.errors: list[BaseException] = []

    def __call__(self, answer: Answer | None, error: BaseException | None) -> None:
        assert (answer is None) != (error is None)
        if answer is not None:
            self.answers.append(answer)
        if error is not None:
            self.errors.append(error)

    @property
    def ends(self) -> int:
        return len(self.answers) + len(self.errors)


def respond(call_id: int, **body: object) -> bytes:
    return frames.Response(id=call_id, epoch=EPOCH, **body).SerializeToString()  # type: ignore[arg-type]


def acquired(call_id: int, lease: int = 0) -> bytes:
    return respond(call_id, acquire=spans_pb2.AcquireResponse(lease=lease))


def read(packet: bytes) -> frames.Request:
    return frames.Request.FromString(packet)


def open_fd() -> int:
    return os.open("/dev/null", os.O_RDONLY)


def is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


@pytest.fixture
def exchange() -> Exchange:
    return Exchange()


def ask(exchange: Exchange, done: Done, body: object = None, deadline: float = 5.0) -> int:
    request = body if body is not None else spans_pb2.AcquireRequest(keys=bytes(32))
    return exchange.request(request, now=0.0, deadline=deadline, done=done).id  # type: ignore[arg-type]


def test_answers_are_matched_by_id_in_any_order(exchange: Exchange) -> None:
    callers = [Caller() for _ in range(3)]
    ids = [ask(exchange, caller) for caller in callers]
    for i in (2, 0, 1):
        assert exchange.receive(acquired(ids[i], lease=i + 10), []) == []
    for i, caller in enumerate(callers):
        assert caller.answers[0].body.lease == i + 10  # type: ignore[attr-defined]
        assert caller.ends == 1
    assert exchange.pending == exchange.unanswered == 0


def test_a_request_carries_what_is_left_of_its_deadline(exchange: Exchange) -> None:
    body = sessions_pb2.Ping()
    call = exchange.request(body, now=10.0, deadline=12.5, done=Caller())
    request = read(call.packet)
    assert request.deadline_ms == 2500
    assert request.WhichOneof("body") == "ping"


def test_a_refusal_is_the_error_of_its_code(exchange: Exchange) -> None:
    caller = Caller()
    call = ask(exchange, caller)
    response = frames.Response(id=call, epoch=EPOCH)
    response.status.code = 6
    response.status.message = "sessions disagree"
    response.status.field = "namespace.dtype"
    exchange.receive(response.SerializeToString(), [])
    (error,) = caller.errors
    assert isinstance(error, errors.NamespaceMismatch)
    assert error.field == "namespace.dtype"


def test_a_late_lease_is_released(exchange: Exchange) -> None:
    caller = Caller()
    call = ask(exchange, caller, deadline=5.0)
    exchange.expire(4.9)
    assert caller.ends == 0
    exchange.expire(5.0)
    assert isinstance(caller.errors[0], errors.DeadlineExceeded)
    (undo,) = exchange.receive(acquired(call, lease=9), [])
    assert list(read(undo).release.leases) == [9]
    assert exchange.unanswered == 1
    release = spans_pb2.ReleaseResponse(released=1)
    assert exchange.receive(respond(read(undo).id, release=release), []) == []
    assert caller.ends == 1
    assert exchange.pending == exchange.unanswered == 0


def test_a_late_miss_needs_no_release(exchange: Exchange) -> None:
    call = ask(exchange, Caller())
    exchange.abandon(call)
    assert exchange.receive(acquired(call), []) == []
    assert exchange.unanswered == 0


def test_late_reservations_are_aborted(exchange: Exchange) -> None:
    call = ask(exchange, Caller(), spans_pb2.ReserveRequest())
    exchange.abandon(call)
    body = spans_pb2.ReserveResponse(reason=[0, 4, 0], reservation=[7, 0, 8])
    (undo,) = exchange.receive(respond(call, reserve=body), [])
    assert list(read(undo).abort.reservation) == [7, 8]


def test_a_late_descriptor_is_closed(exchange: Exchange) -> None:
    fd = open_fd()
    call = ask(exchange, Caller(), sessions_pb2.AttachSlab(slab=0))
    exchange.abandon(call)
    assert exchange.receive(respond(call, slab=sessions_pb2.SlabHandle()), [fd]) == []
    assert not is_open(fd)


def test_an_answer_to_nothing_breaks_the_protocol(exchange: Exchange) -> None:
    call = ask(exchange, Caller())
    exchange.receive(acquired(call), [])
    for unknown in (call, call + 1, 0):
        with pytest.raises(errors.ProtocolError, match="never made"):
            exchange.receive(acquired(unknown), [])


def test_id_zero_says_why_the_connection_ends(exchange: Exchange) -> None:
    response = frames.Response(id=0, epoch=EPOCH)
    response.status.code = 3
    response.status.message = "uid 12 is not allowed"
    with pytest.raises(errors.PermissionDenied, match="uid 12"):
        exchange.receive(response.SerializeToString(), [])


@pytest.mark.parametrize(
    ("body", "fds"),
    [
        ({"acquire": spans_pb2.AcquireResponse()}, 1),
        ({"acquire": spans_pb2.AcquireResponse()}, 2),
        ({"slab": sessions_pb2.SlabHandle()}, 1),
        ({"pong": sessions_pb2.Pong()}, 0),
        ({}, 0),
    ],
    ids=["fd unasked", "two fds", "another handle", "another answer", "no body"],
)
def test_a_wrong_answer_breaks_the_protocol(
    exchange: Exchange, body: dict[str, object], fds: int
) -> None:
    caller = Caller()
    call = ask(exchange, caller)
    sent = [open_fd() for _ in range(fds)]
    with pytest.raises(errors.ProtocolError):
        exchange.receive(respond(call, **body), sent)
    assert not any(is_open(fd) for fd in sent)
    exchange.close(errors.ConnectionClosed("broken"))
    assert caller.ends == 1


def test_an_attach_answer_without_a_descriptor_breaks_the_protocol(exchange: Exchange) -> None:
    caller = Caller()
    call = ask(exchange, caller, sessions_pb2.AttachIndex())
    with pytest.raises(errors.ProtocolError, match="missing"):
        exchange.receive(respond(call, index=sessions_pb2.IndexHandle()), [])
    assert isinstance(caller.errors[0], errors.ProtocolError)


def test_a_descriptor_with_a_refusal_breaks_the_protocol(exchange: Exchange) -> None:
    call = ask(exchange, Caller(), sessions_pb2.AttachIndex())
    response = frames.Response(id=call, epoch=EPOCH)
    response.status.code = 2
    fd = open_fd()
    with pytest.raises(errors.ProtocolError):
        exchange.receive(response.SerializeToString(), [fd])
    assert not is_open(fd)


def test_bytes_that_are_no_response_break_the_protocol(exchange: Exchange) -> None:
    fd = open_fd()
    with pytest.raises(errors.ProtocolError, match="no Response"):
        exchange.receive(b"\xff" * 40, [fd])
    assert not is_open(fd)


def test_the_epoch_may_not_change(exchange: Exchange) -> None:
    exchange.receive(acquired(ask(exchange, Caller())), [])
    other = frames.Response(
        id=ask(exchange, Caller()), epoch=EPOCH + 1, acquire=spans_pb2.AcquireResponse()
    )
    with pytest.raises(errors.ProtocolError, match="epoch"):
        exchange.receive(other.SerializeToString(), [])


def test_closing_fails_every_call_and_every_later_one(exchange: Exchange) -> None:
    callers = [Caller() for _ in range(4)]
    for caller in callers:
        ask(exchange, caller)
    exchange.forget(spans_pb2.ReleaseRequest(leases=[1]))
    gone = errors.ConnectionClosed("the daemon closed the connection")
    exchange.close(gone)
    assert all(caller.errors == [gone] for caller in callers)
    assert exchange.pending == exchange.unanswered == 0
    with pytest.raises(errors.ConnectionClosed):
        ask(exchange, Caller())


def test_a_request_that_fits_no_packet_is_refused_here(exchange: Exchange) -> None:
    exchange.max_message_bytes = 1000
    with pytest.raises(errors.TooLarge) as refused:
        ask(exchange, Caller(), spans_pb2.AcquireRequest(keys=bytes(1024)))
    assert refused.value.field == "acquire"
    assert exchange.pending == 0


def test_the_alarm_is_set_early_but_not_for_every_call(exchange: Exchange) -> None:
    def sooner(deadline: float) -> bool:
        body = sessions_pb2.Ping()
        return exchange.request(body, now=0.0, deadline=deadline, done=Caller()).sooner

    assert sooner(5.0)
    assert exchange.next_deadline(0.0) == 5.0
    assert not sooner(6.0)
    assert sooner(2.0)
    assert exchange.next_deadline(0.0) == 2.0
    exchange.expire(2.0)
    assert exchange.next_deadline(2.0) == 5.0
    assert exchange.pending == 2


class ExchangeMachine(RuleBasedStateMachine):
    """A daemon that answers, late or not; a caller that waits, or not."""

    calls = Bundle("calls")

    def __init__(self) -> None:
        super().__init__()
        self.exchange = Exchange()
        self.now = 0.0
        self.waiting: dict[int, Caller] = {}
        self.owed: dict[int, Callable[[], tuple[bytes, list[int]]]] = {}
        self.callers: list[Caller] = []
        self.held: set[int] = set()
        self.fds: list[int] = []
        self.last_lease = 0

    @rule(target=calls, seconds=st.floats(0.1, 10.0), attach=st.booleans())
    def request(self, seconds: float, attach: bool) -> int:
        caller = Caller()
        body = sessions_pb2.AttachSlab() if attach else spans_pb2.AcquireRequest()
        call = self.exchange.request(body, now=self.now, deadline=self.now + seconds, done=caller)
        self.callers.append(caller)
        self.waiting[call.id] = caller

        def answer() -> tuple[bytes, list[int]]:
            if attach:
                self.fds.append(open_fd())
                return respond(call.id, slab=sessions_pb2.SlabHandle()), [self.fds[-1]]
            self.last_lease += 1
            self.held.add(self.last_lease)
            return acquired(call.id, self.last_lease), []

        self.owed[call.id] = answer
        return call.id

    @rule(call=calls)
    def answer(self, call: int) -> None:
        make = self.owed.pop(call, None)
        if make is not None:
            self.deliver(*make())

    def deliver(self, packet: bytes, fds: list[int]) -> None:
        for undo in self.exchange.receive(packet, fds):
            request = read(undo)
            self.held.difference_update(request.release.leases)
            body = spans_pb2.ReleaseResponse(released=1)
            self.exchange.receive(respond(request.id, release=body), [])

    @rule(call=calls)
    def abandon(self, call: int) -> None:
        self.exchange.abandon(call)

    @rule(seconds=st.floats(0.0, 12.0))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.exchange.expire(self.now)

    @rule(target=calls)
    def nothing(self) -> object:
        return multiple()

    @invariant()
    def every_call_ends_at_most_once(self) -> None:
        assert all(caller.ends <= 1 for caller in self.callers)

    @invariant()
    def every_request_is_accounted_for(self) -> None:
        assert self.exchange.pending + self.exchange.unanswered == len(self.owed)

    def teardown(self) -> None:
        for call in list(self.owed):
            self.answer(call)
        assert self.exchange.pending == self.exchange.unanswered == 0
        answers = [caller.answers[0] for caller in self.callers if caller.answers]
        # What is held is what a caller was told of, no more.
        leases = {a.body.lease for a in answers if isinstance(a.body, spans_pb2.AcquireResponse)}
        assert self.held == leases
        told = [answer.fd for answer in answers if answer.fd >= 0]
        for fd in told:
            os.close(fd)
        assert not any(is_open(fd) for fd in self.fds)


TestExchangeMachine = ExchangeMachine.TestCase
TestExchangeMachine.settings = settings(max_examples=60, deadline=None)


def test_a_call_may_take_for_ever(exchange: Exchange) -> None:
    call = exchange.request(sessions_pb2.Ping(), now=5.0, deadline=math.inf, done=Caller())
    assert read(call.packet).deadline_ms > 86_400_000
    assert exchange.next_deadline(5.0) * 1000 < 2**31


def gone(*slabs: int, epoch: int = EPOCH, number: int = 0) -> bytes:
    notice = sessions_pb2.SlabsGone(slab=slabs)
    return frames.Response(id=number, epoch=epoch, slabs_gone=notice).SerializeToString()


def test_a_notice_answers_nothing(exchange: Exchange) -> None:
    told: list[int] = []
    exchange.gone = told.extend
    caller = Caller()
    call = ask(exchange, caller)
    exchange.receive(acquired(ask(exchange, Caller())), [])
    assert exchange.receive(gone(3, 4), []) == []
    assert (told, caller.ends, exchange.pending) == ([3, 4], 0, 1)
    exchange.receive(acquired(call), [])
    assert caller.answers


def test_a_notice_of_a_later_daemon_is_passed_over(exchange: Exchange) -> None:
    told: list[int] = []
    exchange.gone = told.extend
    caller = Caller()
    call = ask(exchange, caller)
    exchange.receive(acquired(ask(exchange, Caller())), [])
    fd = open_fd()
    # An empty body that has the number 1000.
    later = respond(0) + b"\xc2\x3e\x00"
    assert exchange.receive(later, [fd]) == exchange.receive(later, []) == []
    assert (told, caller.ends, exchange.pending) == ([], 0, 1)
    assert not is_open(fd)
    exchange.receive(acquired(call), [])
    assert caller.answers


def test_what_is_no_notice_breaks_the_protocol() -> None:
    fd = open_fd()
    first = respond(0, pong=sessions_pb2.Pong())
    wrong = (
        (gone(1), [fd]),
        (gone(1, epoch=1), []),
        (gone(1, number=9), []),
        (first, []),
        (b"", []),
    )
    for packet, fds in wrong:
        exchange, told = Exchange(), list[int]()
        exchange.gone = told.extend
        exchange.receive(acquired(ask(exchange, Caller())), [])
        with pytest.raises(errors.ProtocolError):
            exchange.receive(packet, fds)
        assert told == []
    assert not is_open(fd)
    # Nothing can be given up before anything was given.
    with pytest.raises(errors.ProtocolError):
        Exchange().receive(gone(1), [])
