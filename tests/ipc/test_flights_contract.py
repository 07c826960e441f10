"""What a session may rely on of flights: one suite for the daemon and for the fake.

Whatever the fake answers otherwise than the daemon is found here.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import pytest
from daemon_process import Daemon, wait_for

from kmesh import errors
from kmesh.flight import Arrival, Claim, FlightCause, Standing
from kmesh.layout import Shard
from kmesh.session import ReserveBatch, Role, Session
from kmesh.store import put_spans
from kmesh.testing import FakeDaemon

SHARD = Shard(0, 2, 0, 2)

Connect = Callable[[], Session]


@pytest.fixture(scope="module", autouse=True)
def _started(shared_spand: Daemon) -> None:
    """The daemon runs before a test looks at what it leaves behind."""


@pytest.fixture(params=["fake", "daemon"])
def connect(request: pytest.FixtureRequest, shared_spand: Daemon) -> Iterator[Connect]:
    """Opens sessions, which are closed at the end of the test."""
    with contextlib.ExitStack() as stack:
        if request.param == "fake":
            dial: Callable[..., Session] = stack.enter_context(FakeDaemon()).connect
        else:
            dial = partial(Session.connect, shared_spand.socket_dir)
        yield lambda: stack.enter_context(dial(role=Role.TOOL))


def reserve(keys: bytes, length: int = 1000) -> ReserveBatch:
    """Full spans of one length."""
    count = len(keys) // 32
    start = range(0, 64 * count, 64)
    return ReserveBatch(b"n" * 32, SHARD, keys, [64] * count, start, [length] * count)


def test_one_computes_and_the_others_find_it(connect: Connect) -> None:
    leader, other = connect(), connect()
    keys = os.urandom(32 * 3)
    mine = leader.claim(keys, [SHARD])
    assert (mine.standing, mine.covered) == (Standing.LEAD, 3)
    assert leader.claim(keys, [SHARD]).standing is Standing.NONE
    found = other.claim(keys[:64] + os.urandom(32), [SHARD])
    assert found.standing is Standing.COMPUTING
    assert (found.flight, found.first, found.covered) == (mine.flight, 0, 2)
    assert (found.ahead, found.progress.landed, found.shards) == (2, 0, (SHARD,))
    # Another salt's keys are other keys.
    assert other.claim(keys[:32], [SHARD], salt=b"s" * 32).standing is Standing.LEAD
    waiting = other.await_flight_async(found, 30)
    staging = leader.staging(1 << 16)
    assert put_spans(leader, staging, reserve(keys[:32]), [bytes(1000)]) == [0]
    other.ping()
    assert not waiting.done()
    assert other.claim(keys, [SHARD]).standing is Standing.STORED
    behind = other.claim(keys[32:], [SHARD])
    assert (behind.first, behind.covered, behind.ahead, behind.progress.landed) == (1, 2, 2, 1)
    assert put_spans(leader, staging, reserve(keys[32:64]), [bytes(1000)]) == [0]
    assert waiting.result(30).arrival is Arrival.LANDED
    with other.acquire(keys, [SHARD]) as lease:
        assert lease.hits == 2
    waiting = other.await_flight_async(behind, 30)
    assert put_spans(leader, staging, reserve(keys[64:]), [bytes(1000)]) == [0]
    assert waiting.result(30).arrival is Arrival.LANDED
    # It is over: whoever waits now looks again at once.
    assert other.await_flight_async(behind, 30).result(30).arrival is Arrival.LANDED
    leader.land(mine.flight)
    leader.ping()


@pytest.mark.parametrize("how", ["closed", "aborted"])
def test_the_first_that_waits_takes_a_failed_flight_over(connect: Connect, how: str) -> None:
    leader, second, third = connect(), connect(), connect()
    keys = os.urandom(64)
    mine = leader.claim(keys, [SHARD])
    waits = []
    for session in (second, third):
        found = session.claim(keys, [SHARD])
        waits.append(session.await_flight_async(found, 30))
        session.ping()
    if how == "closed":
        leader.close()
    else:
        leader.land(mine.flight, FlightCause.ABORTED)
    assert waits[0].result(30).arrival is Arrival.LEAD
    third.ping()
    assert not waits[1].done()
    second.land(mine.flight, FlightCause.NOT_STORED)
    arrived = waits[1].result(30)
    assert (arrived.arrival, arrived.cause) == (Arrival.ENDED, FlightCause.NOT_STORED)
    assert third.claim(keys, [SHARD]).standing is Standing.LEAD


def test_a_wait_ends_when_it_is_left_or_late(connect: Connect) -> None:
    leader, other = connect(), connect()
    keys = os.urandom(64)
    mine = leader.claim(keys, [SHARD])
    found = other.claim(keys, [SHARD])
    waiting = other.await_flight_async(found, 30)
    other.leave(found.flight)
    arrived = waiting.result(30)
    assert (arrived.arrival, arrived.cause) == (Arrival.ENDED, FlightCause.LEFT)
    # A deadline that lies in the past is one.
    for seconds in (0.05, 0, -1):
        with pytest.raises(errors.DeadlineExceeded):
            other.await_flight_async(found, seconds).result(30)
    wait_for(lambda: other.pending == 0, 30)
    # Nobody is left that could be promoted.
    leader.land(mine.flight, FlightCause.ABORTED)
    leader.ping()
    assert other.claim(keys, [SHARD]).standing is Standing.LEAD


def test_one_of_several_waits_is_left(connect: Connect) -> None:
    leader, other = connect(), connect()
    keys = os.urandom(64)
    mine = leader.claim(keys, [SHARD])
    found = other.claim(keys, [SHARD])
    waits = [other.await_flight_async(found, 30, wait=number) for number in (7, 8, 0)]
    other.leave(found.flight, 8)
    other.leave(found.flight, 9)
    assert waits[1].result(30).cause is FlightCause.LEFT
    other.ping()
    assert not waits[0].done()
    assert not waits[2].done()
    other.leave(found.flight)
    assert [wait.result(30).cause for wait in waits] == [FlightCause.LEFT] * 3
    leader.land(mine.flight, FlightCause.ABORTED)


def test_a_flight_of_which_two_leaders_died_is_nobodys(connect: Connect) -> None:
    first, second, third = connect(), connect(), connect()
    keys = os.urandom(64)
    first.claim(keys, [SHARD])
    waits = []
    for session in (second, third):
        waits.append(session.await_flight_async(session.claim(keys, [SHARD]), 30))
        session.ping()
    first.close()
    assert waits[0].result(30).arrival is Arrival.LEAD
    second.close()
    arrived = waits[1].result(30)
    assert (arrived.arrival, arrived.cause) == (Arrival.ENDED, FlightCause.BACK_OFF)
    # Its next key is left alone for a while; those behind it, and other tenants', are not.
    assert third.claim(keys, [SHARD]).standing is Standing.NONE
    assert third.claim(keys[32:], [SHARD]).standing is Standing.LEAD
    assert third.claim(keys, [SHARD], salt=b"s" * 32).standing is Standing.LEAD


def test_a_key_of_which_two_leaders_died_alone_is_left_alone(connect: Connect) -> None:
    other = connect()
    key = os.urandom(32)
    for standing in (Standing.LEAD, Standing.NONE):
        leader = connect()
        assert leader.claim(key, [SHARD]).standing is Standing.LEAD
        leader.close()
        found: list[Claim] = []

        def ended(found: list[Claim] = found) -> bool:
            found.append(other.claim(key, [SHARD]))
            return found[-1].standing is not Standing.COMPUTING

        wait_for(ended, 30)
        assert found[-1].standing is standing
        other.land(found[-1].flight)
        other.ping()


def test_flights_of_a_gpu_that_is_not_there_are_refused(connect: Connect) -> None:
    session = connect()
    with pytest.raises(errors.InvalidArgument) as refused:
        session.claim(os.urandom(32), [SHARD], device="GPU-00000000-0000-0000-0000-000000000000")
    assert refused.value.field == "claim.device"


def test_what_a_leader_has_on_its_way_is_waited_for(connect: Connect) -> None:
    leader, other = connect(), connect()
    keys = os.urandom(64)
    mine = leader.claim(keys, [SHARD])
    waiting = other.await_flight_async(other.claim(keys, [SHARD]), 30)
    leader.staging(4096)
    reserved = leader.reserve(reserve(keys)).reservation
    leader.land(mine.flight)
    leader.ping()
    other.ping()
    assert not waiting.done()
    assert leader.commit(reserved, [0, 1024]) == [0, 0]
    assert waiting.result(30).arrival is Arrival.LANDED


def test_what_does_not_fit_in_a_slab_ends_its_flight(connect: Connect) -> None:
    leader, other = connect(), connect()
    keys = os.urandom(64)
    leader.claim(keys, [SHARD])
    waiting = other.await_flight_async(other.claim(keys, [SHARD]), 30)
    other.ping()
    leader.reserve(reserve(keys, length=1 << 40))
    assert waiting.result(30).cause is FlightCause.NOT_STORED


def test_claims_that_make_no_sense(connect: Connect) -> None:
    leader, other = connect(), connect()
    key = os.urandom(32)
    for keys, shards, salt in ((b"", [SHARD], b""), (key[:31], [SHARD], b""), (key, [SHARD], b"s")):
        with pytest.raises(errors.ConfigError):
            leader.claim(keys, shards, salt=salt)
    with pytest.raises(errors.InvalidArgument) as refused:
        leader.claim(key, [])
    assert "shards" in refused.value.field
    with pytest.raises(errors.InvalidArgument) as refused:
        leader.claim(key + key, [SHARD])
    assert refused.value.field == "claim.keys"
    mine = leader.claim(key, [SHARD])
    with pytest.raises(errors.ConfigError):
        leader.await_flight_async(mine).result(30)
    with pytest.raises(errors.ConfigError):
        leader.land(mine.flight, FlightCause.CLOSED)
    found = other.claim(key, [SHARD])
    for wrong in (replace(found, covered=2), replace(found, first=1)):
        with pytest.raises(errors.InvalidArgument) as refused:
            other.await_flight_async(wrong).result(30)
        assert refused.value.field == "await_flight.covered"
    own = replace(mine, standing=Standing.COMPUTING)
    assert leader.await_flight_async(own).result(30).arrival is Arrival.LANDED
    # Of more keys than a batch has, the first are claimed.
    many = leader.claim(os.urandom(32 * 1500), [SHARD])
    assert many.covered == leader.welcome.max_batch


def test_progress_is_told_by_its_leader_and_asked_by_others(connect: Connect) -> None:
    leader, second, third = connect(), connect(), connect()
    keys = os.urandom(96)
    mine = leader.claim(keys, [SHARD], place="gpu 0")
    assert mine.progress is not None
    assert (mine.place, mine.progress.computed) == ("gpu 0", 0)
    found = second.claim(keys[32:], [SHARD], place="gpu 0")
    assert found.progress is not None
    assert found.progress.beside
    waiting = second.await_flight_async(found, 30)
    leader.computed(mine.flight, 2)
    leader.ping()
    far = second.progress_async(mine.flight, "gpu 1").result(30)
    assert far is not None
    assert (far.begin, far.landed, far.computed, far.beside) == (0, 0, 2, False)
    assert far.quiet_ms + far.pause_ms <= far.age_ms + 1
    # Only its leader's word counts.
    second.computed(mine.flight, 3)
    staging = leader.staging(1 << 16)
    assert put_spans(leader, staging, reserve(keys[:32]), [bytes(1000)]) == [0]
    far = third.progress_async(mine.flight, "gpu 0").result(30)
    assert far is not None
    assert (far.landed, far.computed, far.beside) == (1, 2, True)
    # The next leader begins behind what has landed, on a device of its own.
    leader.land(mine.flight, FlightCause.PREEMPTED)
    assert waiting.result(30).arrival is Arrival.LEAD
    far = third.progress_async(mine.flight).result(30)
    assert far is not None
    assert (far.begin, far.landed, far.computed, far.pause_ms) == (1, 0, 0, 0)
    second.land(mine.flight, FlightCause.NOT_STORED)
    second.ping()
    assert third.progress_async(mine.flight).result(30) is None


@pytest.mark.parametrize("asked", ["claim", "await_flight", "progress"])
def test_a_place_has_a_longest(connect: Connect, asked: str) -> None:
    leader, other = connect(), connect()
    keys, place = os.urandom(32), "x" * 65
    mine = leader.claim(keys, [SHARD])
    found = other.claim(keys, [SHARD])
    far = replace(found, place=place)
    ask: Callable[[], object] = {
        "claim": lambda: other.claim(keys, [SHARD], place=place),
        "await_flight": lambda: other.await_flight_async(far, 30).result(30),
        "progress": lambda: other.progress_async(mine.flight, place).result(30),
    }[asked]
    with pytest.raises(errors.InvalidArgument) as caught:
        ask()
    assert caught.value.field == f"{asked}.place"
