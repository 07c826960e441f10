"""Flights of the core: who computes, who waits, and how each of them ends."""

from __future__ import annotations

import pytest
from asking import A, B, C, D, E, F, refused
from world import OTHER_SHARD, SHARD, World, key

from kmesh.layout import Shard
from kmesh_spand.core import effects as fx
from kmesh_spand.core import events as ev
from kmesh_spand.core.codes import Arrival, Code, FlightCause, Standing
from kmesh_spand.core.config import CoreConfig
from kmesh_spand.core.core import Core
from kmesh_spand.core.tenants import Tenancy

LANDED = fx.AwaitResult(Arrival.LANDED)
LEAD = fx.AwaitResult(Arrival.LEAD)


def ended(cause: FlightCause) -> fx.AwaitResult:
    return fx.AwaitResult(Arrival.ENDED, cause)


def join(world: World, session: int, keys: list[bytes], salt: bytes = b"") -> int:
    """Claims what another computes, and waits for it; the Await's number."""
    found = world.claim(session, keys, salt=salt)
    assert found.standing == Standing.COMPUTING
    assert world.wait(session, found) is None
    return world.request


def answer(world: World, session: int, request: int) -> fx.Result | None:
    return world.answered.get((session, request))


def test_the_first_leads_and_the_others_wait_until_it_has_landed(world: World) -> None:
    leader, other = world.connect(), world.connect()
    assert world.claim(leader, [A, B, C]) == fx.ClaimResult(Standing.LEAD, 1, covered=3)
    world.now += 70
    assert world.claim(other, [A, B, D]) == fx.ClaimResult(
        Standing.COMPUTING,
        1,
        0,
        2,
        ahead=2,
        landed=0,
        age_ms=70,
        progress=fx.Progress(age_ms=70, quiet_ms=70),
    )
    waiting = join(world, other, [A, B, D])
    world.store(leader, [A])
    world.core.check()
    assert answer(world, other, waiting) is None
    assert world.claim(other, [A, B]).standing == Standing.STORED
    found = world.claim(other, [B, C, D])
    assert (found.first, found.covered, found.ahead, found.landed) == (1, 2, 2, 1)
    world.store(leader, [B])
    assert answer(world, other, waiting) == LANDED
    assert world.core.counters["flight_landed"] == 0
    world.store(leader, [C])
    world.core.check()
    assert not world.core.flights
    assert not world.land(leader, 1)
    counters = world.core.counters
    assert counters["flight_leads"] == counters["flight_joins"] == counters["flight_landed"] == 1
    assert (counters["flight_shared"], counters["flight_shared_tokens"]) == (1, 128)
    assert counters["flight_shared_bytes"] == 2 * 65536


def test_a_flight_of_what_is_stored_already_is_none(world: World) -> None:
    session = world.connect()
    world.store(session, [A, C])
    assert world.claim(session, [A]).standing == Standing.STORED
    led = world.claim(session, [B, C, D])
    assert (led.standing, led.covered) == (Standing.LEAD, 3)
    world.store(session, [D])
    world.store(session, [B])
    assert world.core.counters["flight_landed"] == 1


def test_keys_that_another_flight_has_promised_are_left_to_it(world: World) -> None:
    first, second = world.connect(), world.connect()
    world.claim(first, [C, D])
    assert world.claim(second, [A, B, C, D]).covered == 2
    world.core.check()


@pytest.mark.parametrize("how", ["closed", "aborted", "preempted"])
def test_the_first_that_waits_leads_when_the_leader_fails(world: World, how: str) -> None:
    leader, second, third = world.connect(), world.connect(), world.connect()
    flight = world.claim(leader, [A, B, C]).flight
    one, two = join(world, second, [A, B]), join(world, third, [A, B, C])
    if how == "closed":
        world.close(leader)
    else:
        assert world.land(leader, flight, FlightCause[how.upper()])
    world.core.check()
    assert (answer(world, second, one), answer(world, third, two)) == (LEAD, None)
    assert world.claim(third, [A]).standing == Standing.COMPUTING
    # Nobody computes the rest any more.
    assert world.claim(third, [C]).standing == Standing.LEAD
    world.store(second, [A, B])
    assert answer(world, third, two) == LANDED
    assert world.core.counters["flight_promotions"] == 1
    world.core.check()


def advance(world: World, leader: int, flight: int, state: str) -> list[int]:
    """Brings a flight over A and B into a state; reservations that are still open."""
    if state == "partly landed":
        world.store(leader, [A])
    if state not in ("reserved", "copying", "landing"):
        return []
    reserved = list(world.reserve(leader, [A]).reservation)
    if state == "reserved":
        return reserved
    world.commit(leader, reserved)
    if state == "landing":
        assert world.land(leader, flight)
    return []


@pytest.mark.parametrize("how", ["closed", "aborted", "preempted"])
@pytest.mark.parametrize(
    "state", ["claimed", "reserved", "copying", "partly landed", "landing", "promoted"]
)
def test_a_leader_is_cancelled_in_each_state(world: World, state: str, how: str) -> None:
    """The first that waits leads, or all are told what has come of it; nobody is stranded."""
    leader, second, third = world.connect(), world.connect(), world.connect()
    flight = world.claim(leader, [A, B]).flight
    waits = {session: join(world, session, [A, B]) for session in (second, third)}
    reserved = advance(world, leader, flight, state)
    if state == "promoted":
        # Two that die would have the keys left alone.
        assert world.land(leader, flight, FlightCause.ABORTED)
        leader = second
        assert answer(world, second, waits.pop(second)) == LEAD
    if how == "closed":
        world.close(leader)
    else:
        # One that has said that it is done leads nothing any more.
        assert world.land(leader, flight, FlightCause[how.upper()]) == (state != "landing")
    world.check()
    world.settle()
    leads = [session for session, number in waits.items() if answer(world, session, number) == LEAD]
    assert leads == ([] if state == "landing" else [next(iter(waits))])
    for session in leads:
        taken = world.reserve(session, [A, B]).reservation
        world.commit(session, [number for number in taken if number])
    if reserved and how != "closed":
        world.commit(leader, reserved)
    world.settle()
    world.check()
    told = {answer(world, session, number) for session, number in waits.items()} - {LEAD}
    assert None not in told
    # With its session goes what is being copied, and nothing has landed.
    nothing = state == "landing" and how == "closed"
    assert told <= {ended(FlightCause.NOT_STORED) if nothing else LANDED}
    assert not world.core.flights


def test_without_waiters_a_failed_flight_is_gone(world: World) -> None:
    leader, other = world.connect(), world.connect()
    world.claim(leader, [A, B])
    world.close(leader)
    assert not world.core.flights
    assert world.core.counters["flight_ended_closed"] == 1
    assert world.claim(other, [A]).standing == Standing.LEAD


def test_a_leader_that_is_done_is_waited_for_until_its_copies_have_ended(world: World) -> None:
    leader, other = world.connect(), world.connect()
    flight = world.claim(leader, [A, B]).flight
    waiting = join(world, other, [A, B])
    reserved = world.reserve(leader, [A, B])
    world.commit(leader, list(reserved.reservation))
    assert world.land(leader, flight)
    world.core.check()
    assert world.core.flight_rows(0, 9, now_ms=world.now)[0].state == "landing"
    assert answer(world, other, waiting) is None
    # It may be joined still.
    assert world.claim(other, [A]).standing == Standing.COMPUTING
    world.settle()
    assert answer(world, other, waiting) == LANDED
    assert not world.core.flights


@pytest.mark.parametrize("stored", [0, 1])
def test_what_a_leader_that_is_done_has_not_stored_ends_its_flight(
    world: World, stored: int
) -> None:
    leader, other = world.connect(), world.connect()
    flight = world.claim(leader, [A, B, C]).flight
    waiting = join(world, other, [A, B, C])
    if stored:
        world.store(leader, [A])
    assert world.land(leader, flight)
    assert answer(world, other, waiting) == (LANDED if stored else ended(FlightCause.NOT_STORED))
    assert world.core.counters["flight_promotions"] == 0
    assert world.core.counters["flight_ended_not_stored"] == 1
    assert world.core.counters["flight_shared_tokens"] == 64 * stored


@pytest.mark.parametrize("state", ["led", "landing"])
def test_a_copy_that_fails_ends_the_flight(world: World, state: str) -> None:
    leader, other = world.connect(), world.connect()
    flight = world.claim(leader, [A, B]).flight
    waiting = join(world, other, [A, B])
    reserved = world.reserve(leader, [A, B])
    world.commit(leader, list(reserved.reservation))
    if state == "landing":
        world.land(leader, flight)
    job = min(world.copies)
    world.wanted = {}
    world.copy_ends(job, ok=False)
    world.core.check()
    assert answer(world, other, waiting) == ended(FlightCause.NOT_STORED)


def test_reservations_that_end_with_a_worker_leave_the_flight_to_its_leader(world: World) -> None:
    scheduler = world.connect("e", 1)
    worker, other = world.connect("e", 2), world.connect()
    flight = world.claim(scheduler, [A]).flight
    waiting = join(world, other, [A])
    world.reserve(worker, [A])
    world.close(worker)
    assert answer(world, other, waiting) is None
    world.close(scheduler)
    assert answer(world, other, waiting) == LEAD
    assert world.led[flight] == other


def test_a_full_pool_ends_the_flight_and_nobody_is_promoted(world: World) -> None:
    leader, other, third = world.connect(), world.connect(), world.connect()
    world.store(third, [key(n) for n in range(6)])
    world.acquire(third, [key(n) for n in range(6)])
    world.claim(leader, [A, B, C, D])
    whole, part = join(world, other, [A, B, C, D]), join(world, third, [A])
    last = join(world, other, [D])
    world.reserve(leader, [A, B, C, D])
    world.core.check()
    # Not all of them have room; the others are not waited for.
    assert answer(world, other, last) == ended(FlightCause.NOT_STORED)
    assert world.core.flight_rows(0, 9, now_ms=world.now)[0].keys == 4
    world.commit(leader, [n for n, want in world.wanted.items() if want.session == leader])
    world.settle()
    assert answer(world, other, whole) == LANDED
    assert answer(world, third, part) == LANDED
    assert world.core.counters["flight_ended_not_stored"] == 1
    assert world.core.counters["flight_promotions"] == 0
    assert world.core.counters["flight_shared_tokens"] == 192


def test_another_engines_full_pool_is_not_the_leaders(world: World) -> None:
    leader, other, third = world.connect("a", 1), world.connect("b", 1), world.connect()
    world.store(third, [key(n) for n in range(8)])
    world.acquire(third, [key(n) for n in range(8)])
    world.claim(leader, [A])
    world.reserve(other, [A])
    assert len(world.core.flights) == 1
    world.reserve(world.connect("a", 2), [A])
    assert not world.core.flights


def test_other_keys_than_were_announced_are_no_progress(world: World) -> None:
    leader, other = world.connect(), world.connect()
    flight = world.claim(leader, [A, B]).flight
    waiting = join(world, other, [A, B])
    world.store(leader, [C, D])
    world.store(leader, [A], shard=OTHER_SHARD)
    assert answer(world, other, waiting) is None
    world.land(leader, flight)
    assert answer(world, other, waiting) == ended(FlightCause.NOT_STORED)


def test_a_key_has_landed_when_every_shard_of_the_leader_has(world: World) -> None:
    leader, other = world.connect(), world.connect()
    world.claim(leader, [A], [SHARD, OTHER_SHARD])
    waiting = join(world, other, [A])
    world.store(leader, [A])
    assert answer(world, other, waiting) is None
    world.store(leader, [A], shard=OTHER_SHARD)
    assert answer(world, other, waiting) == LANDED
    assert world.core.counters["flight_shared_bytes"] == 2 * 65536
    assert world.core.counters["flight_shared_tokens"] == 64


def test_what_has_landed_is_there_for_other_shardings_and_counts_once(world: World) -> None:
    leader, other = world.connect(), world.connect()
    world.claim(leader, [A, B], [SHARD, OTHER_SHARD])
    waiting = join(world, other, [A])
    for _ in range(2):
        world.store(leader, [A])
        (row,) = world.core.spans(now_ms=world.now)
        world.send(ev.Evict([row.slot]))
    world.store(leader, [A], shard=OTHER_SHARD)
    assert answer(world, other, waiting) == LANDED
    assert world.core.counters["flight_shared_bytes"] == 2 * 65536
    # Whoever stores it in shards of its own finds it in these.
    third = Shard(0, 8, 0, 2).code()
    assert world.claim(other, [A, B], [third]).standing == Standing.STORED
    assert world.claim(other, [B], [third]).standing == Standing.COMPUTING


def test_a_sub_key_lands_with_its_tail(world: World) -> None:
    leader, other = world.connect(), world.connect()
    world.claim(leader, [A])
    waiting = join(world, other, [A])
    world.store(leader, [B], tokens=32, sub_keys=(A,))
    assert answer(world, other, waiting) == LANDED
    assert world.core.counters["flight_shared_tokens"] == 16


def test_leaving_is_answered_and_leaves_others_alone(world: World) -> None:
    leader, other = world.connect(), world.connect()
    flight = world.claim(leader, [A, B]).flight
    one, two = join(world, other, [A]), join(world, other, [A, B])
    assert world.leave(other, flight, only=one) == 1
    assert answer(world, other, one) == ended(FlightCause.LEFT)
    assert answer(world, other, two) is None
    assert world.leave(other, flight) == 1
    assert answer(world, other, two) == ended(FlightCause.LEFT)
    assert world.leave(other, flight) == world.leave(other, 99) == 0
    world.close(leader)
    assert not world.core.flights
    assert world.core.counters["flight_leaves"] == 2


def test_a_wait_is_left_by_its_own_number(world: World) -> None:
    leader, other = world.connect(), world.connect()
    claim = world.claim(leader, [A])
    waits = []
    for number in (7, 8):
        found = world.claim(other, [A])
        world.waits[other, world.request + 1] = found.flight
        event = found.flight, found.first, found.covered, [SHARD], number
        assert world.ask(ev.Await, other, *event) is None
        waits.append(world.request)
    left = world.ask(ev.Leave, other, claim.flight, 0, 8)
    assert left == fx.LeaveResult(1)
    assert answer(world, other, waits[0]) is None
    assert answer(world, other, waits[1]) == ended(FlightCause.LEFT)
    # Two numbers that name different waits name none.
    assert world.ask(ev.Leave, other, claim.flight, waits[0], 8) == fx.LeaveResult(0)
    assert world.leave(other, claim.flight) == 1


def test_a_leader_never_waits_for_itself(world: World) -> None:
    leader, other = world.connect(), world.connect()
    flight = world.claim(leader, [A]).flight
    assert world.claim(leader, [A, B]).standing == Standing.NONE
    # As one that was promoted since its claim was answered: it looks again.
    assert world.ask(ev.Await, leader, flight, 0, 1, [SHARD]) == LANDED
    one, two = join(world, other, [A]), join(world, other, [A])
    world.close(leader)
    assert (answer(world, other, one), answer(world, other, two)) == (LEAD, LANDED)
    world.core.check()


def test_a_flight_that_is_gone_is_looked_for_again(world: World) -> None:
    leader, other = world.connect(), world.connect()
    world.claim(leader, [A, B])
    found = world.claim(other, [A, B])
    world.store(leader, [A, B])
    assert world.wait(other, found) == LANDED
    assert world.core.counters["flight_joins"] == 0


def test_what_kills_two_leaders_is_left_alone_for_a_while(world: World) -> None:
    first, second, third = world.connect(), world.connect(), world.connect()
    world.claim(first, [A, B])
    one, two = join(world, second, [A, B]), join(world, third, [A, B])
    world.close(first)
    assert answer(world, second, one) == LEAD
    world.now += 1000
    world.close(second)
    assert answer(world, third, two) == ended(FlightCause.BACK_OFF)
    assert world.claim(third, [A, B]).standing == Standing.NONE
    assert world.claim(third, [B]).standing == Standing.LEAD
    world.now += world.config.hold_ms
    fourth = world.connect()
    assert world.claim(fourth, [A]).standing == Standing.LEAD
    # The third death holds it twice as long.
    world.close(fourth)
    world.now += world.config.hold_ms
    assert world.claim(third, [A]).standing == Standing.NONE
    world.now += world.config.hold_ms
    assert world.claim(third, [A]).standing == Standing.LEAD
    assert world.core.counters["flight_ended_back_off"] == 2


def test_deaths_that_lie_far_apart_are_forgotten(world: World) -> None:
    for _ in range(3):
        session = world.connect()
        assert world.claim(session, [A]).standing == Standing.LEAD
        world.close(session)
        world.now += world.config.death_memory_ms
    assert world.claim(world.connect(), [A]).standing == Standing.LEAD


def test_deaths_are_remembered_of_so_many_keys() -> None:
    world = World({0: 8}, remembered_deaths=2)
    for name in (A, B, C):
        session = world.connect()
        world.claim(session, [name])
        world.close(session)
    assert len(world.core.flights.deaths) == 2


def test_draining_ends_what_is_not_on_its_way(world: World) -> None:
    leader, other = world.connect(), world.connect()
    world.claim(leader, [A, B])
    world.claim(leader, [C])
    whole, on_its_way, none = (join(world, other, keys) for keys in ([A, B], [A], [C]))
    reserved = world.reserve(leader, [A])
    world.commit(leader, list(reserved.reservation))
    world.send(ev.Drain())
    world.core.check()
    assert answer(world, other, none) == ended(FlightCause.DRAINING)
    assert world.claim(other, [E]).standing == Standing.NONE
    world.settle()
    assert answer(world, other, on_its_way) == answer(world, other, whole) == LANDED
    assert world.core.counters["flight_ended_draining"] == 2
    world.send(ev.Resume())
    assert world.claim(other, [E]).standing == Standing.LEAD


def test_tenants_do_not_see_each_others_flights() -> None:
    world = World({0: 4, 1: 4, 2: 4}, tenancy=Tenancy(groups=(1000, 1001)))
    mine, theirs = world.connect(uid=1000), world.connect(uid=1001)
    flight = world.claim(mine, [A]).flight
    assert world.claim(theirs, [A]).standing == Standing.LEAD
    assert world.claim(mine, [A], salt=key("salt")).standing == Standing.LEAD
    assert world.ask(ev.Await, theirs, flight, 0, 1, [SHARD]) == LANDED
    assert not world.land(theirs, flight)
    world.store(theirs, [A])
    assert [row.flight for row in world.core.flight_rows(0, 9, now_ms=0, group=1000)] == [1, 3]
    assert not world.core.flight_rows(0, 9, now_ms=0, group=1001)


def test_limits_of_a_session() -> None:
    world = World({0: 8}, max_flights=2, max_waits=2, max_batch=4, max_flight_shards=1)
    leader, other = world.connect(), world.connect()
    flight = world.claim(leader, [A]).flight
    world.claim(leader, [B])
    assert refused(world.ask(ev.Claim, leader, C, [SHARD])) == (Code.EXHAUSTED, "keys")
    found = world.claim(other, [A])
    for _ in range(2):
        assert world.wait(other, found) is None
    answer = world.wait(other, found)
    assert refused(answer) == (Code.EXHAUSTED, "flight")
    for keys, shards, salt, at in (
        (b"", [SHARD], b"", "keys"),
        (A[:31], [SHARD], b"", "keys"),
        (A + A, [SHARD], b"", "keys"),
        (A, [], b"", "shards"),
        (A, [0], b"", "shards"),
        (A, [SHARD], b"x", "salt"),
    ):
        assert refused(world.ask(ev.Claim, leader, keys, shards, salt)) == (
            Code.INVALID_ARGUMENT,
            at,
        )
    many = b"".join(key(n) for n in range(5))
    assert refused(world.ask(ev.Claim, leader, many, [SHARD])) == (Code.TOO_LARGE, "keys")
    two = [SHARD, OTHER_SHARD]
    assert refused(world.ask(ev.Claim, leader, A, two)) == (Code.TOO_LARGE, "shards")
    for first, covered in ((0, 0), (0, 2), (1, 1)):
        asked = world.ask(ev.Await, other, flight, first, covered, [SHARD])
        assert refused(asked) == (Code.INVALID_ARGUMENT, "covered")
    assert refused(world.ask(ev.Land, leader, flight, FlightCause.CLOSED)) == (
        Code.INVALID_ARGUMENT,
        "cause",
    )


def test_keys_of_a_sessions_flights_are_limited() -> None:
    world = World({0: 8}, max_flight_keys=3)
    leader, other = world.connect(), world.connect()
    assert world.claim(leader, [A, B]).covered == 2
    assert refused(world.ask(ev.Claim, leader, C + D, [SHARD])) == (Code.EXHAUSTED, "keys")
    assert world.claim(leader, [C]).standing == Standing.LEAD
    world.claim(other, [E, F])
    waiting = join(world, other, [A, B])
    world.close(leader)
    assert answer(world, other, waiting) == ended(FlightCause.CLOSED)


def test_a_shard_that_occurs_twice_is_refused(world: World) -> None:
    asked = world.ask(ev.Claim, world.connect(), A, [SHARD, SHARD])
    assert refused(asked) == (Code.INVALID_ARGUMENT, "shards")


def test_a_leader_that_has_enough_flights_is_passed_over() -> None:
    world = World({0: 8}, max_flights=1)
    leader, busy, free = world.connect(), world.connect(), world.connect()
    world.claim(leader, [A])
    world.claim(busy, [B])
    one, two = join(world, busy, [A]), join(world, free, [A])
    world.close(leader)
    assert answer(world, busy, one) == ended(FlightCause.CLOSED)
    assert answer(world, free, two) == LEAD


def test_many_joins_cost_their_sessions_and_nobody_else() -> None:
    world = World({0: 8}, max_waits=2000)
    leader, other = world.connect(), world.connect()
    world.claim(leader, [A, B])
    found = world.claim(other, [A])
    numbers = []
    for _ in range(2000):
        assert world.wait(other, found) is None
        numbers.append(world.request)
    world.store(leader, [A])
    assert all(answer(world, other, number) == LANDED for number in numbers)
    world.core.check()


@pytest.mark.slow
def test_a_hundred_thousand_joins_leave_nothing() -> None:
    core = Core(CoreConfig(max_spans=8, max_waits=1000))
    for session in (1, 2):
        core.handle(ev.SessionOpened(session, 0, f"{session}", 1), 0)
    keys = A + B
    core.handle(ev.Claim(1, 1, keys, [SHARD]), 0)
    (claimed,) = core.handle(ev.Claim(2, 2, keys, [SHARD]), 0)
    assert isinstance(claimed, fx.Reply)
    found = claimed.result
    assert isinstance(found, fx.ClaimResult)
    request = 2
    for _ in range(100):
        for _ in range(1000):
            request += 1
            wait = ev.Await(2, request, found.flight, found.first, found.covered, [SHARD])
            assert core.handle(wait, 0) == []
        request += 1
        answers = core.handle(ev.Leave(2, request, found.flight), 0)
        assert len(answers) == 1001
    core.check()
    assert core.counters["flight_joins"] == core.counters["flight_leaves"] == 100_000
    assert [row.waiters for row in core.flight_rows(0, 9, now_ms=0)] == [0]
    core.handle(ev.SessionClosed(1), 0)
    assert not core.flights


def test_a_promoted_leader_promises_what_it_wanted_in_its_own_shards(world: World) -> None:
    leader, other, third = world.connect(), world.connect(), world.connect()
    world.claim(leader, [A, B, C, D])
    world.store(leader, [A])
    found = world.claim(other, [B, C])
    assert world.wait(other, found, [OTHER_SHARD]) is None
    late = join(world, third, [D])
    world.close(leader)
    world.core.check()
    row = world.core.flight_rows(0, 9, now_ms=world.now)[0]
    assert (row.keys, row.landed, row.leader, row.deaths) == (2, 0, other, 1)
    for name in (B, C):
        world.store(other, [name], shard=OTHER_SHARD)
    # Nobody computes D: who waits for it looks again.
    assert answer(world, third, late) == LANDED
    assert not world.core.flights


def test_who_waits_for_less_than_a_new_leader_brings_looks_again(world: World) -> None:
    leader, second, third = world.connect(), world.connect(), world.connect()
    world.claim(leader, [A, B, C])
    world.now += 1
    one, two = join(world, second, [B, C]), join(world, third, [A])
    world.land(leader, 1, FlightCause.ABORTED)
    assert (answer(world, second, one), answer(world, third, two)) == (LEAD, LANDED)
    assert world.claim(third, [A]).standing == Standing.LEAD
    world.core.check()
    assert F not in world.core.flights.by_key[next(iter(world.core.flights.by_key))]


def test_progress_is_what_the_leader_says_and_what_lands(world: World) -> None:
    leader, other = world.connect(), world.connect()
    world.claim(leader, [A, B, C], place="gpu 0")
    world.now += 40
    assert world.progress(leader, 1, computed=2) == fx.Progress(0, 0, 2, 40, 0, 40)
    world.now += 10
    assert world.progress(other, 1) == fx.Progress(0, 0, 2, 50, 10, 40)
    # Nobody else's word counts, and none that takes something back.
    assert world.progress(other, 1, computed=3) == fx.Progress(0, 0, 2, 50, 10, 40)
    assert world.progress(leader, 1, computed=1) == fx.Progress(0, 0, 2, 50, 10, 40)
    world.store(leader, [A])
    assert world.progress(other, 1) == fx.Progress(0, 1, 2, 50, 0, 40)
    world.now += 60
    # More than it promised is all of it.
    assert world.progress(leader, 1, computed=2**32 - 1) == fx.Progress(0, 1, 3, 110, 0, 60)
    found = world.claim(other, [B, C], place="gpu 0")
    assert found.progress == fx.Progress(0, 1, 3, 110, 0, 60, beside=True)
    world.core.check()


def test_progress_begins_anew_with_another_leader(world: World) -> None:
    leader, other, third = world.connect(), world.connect(), world.connect()
    world.claim(leader, [A, B, C], place="gpu 0")
    world.store(leader, [A])
    found = world.claim(other, [B, C], place="gpu 1")
    assert world.wait(other, found, place="gpu 1") is None
    world.now += 30
    assert world.progress(leader, 1, computed=3) is not None
    world.land(leader, 1, FlightCause.PREEMPTED)
    world.core.check()
    world.now += 5
    assert world.progress(leader, 1, computed=3) == fx.Progress(1, 0, 0, 5, 5, 0)
    assert world.progress(other, 1, computed=1) == fx.Progress(1, 0, 1, 5, 0, 5)
    for place, beside in (("gpu 0", False), ("gpu 1", True), ("", False)):
        far = world.progress(third, 1, place=place)
        assert far is not None
        assert far.beside is beside


def test_progress_of_what_is_gone_or_another_groups_is_none() -> None:
    world = World({0: 4, 1: 4, 2: 4}, tenancy=Tenancy(groups=(1000, 1001)))
    ours, theirs = world.connect(uid=1000), world.connect(uid=1001)
    flight = world.claim(ours, [A]).flight
    assert world.progress(ours, flight) is not None
    assert world.progress(theirs, flight, computed=1) is None
    assert world.progress(ours, flight + 1) is None


@pytest.mark.parametrize("asked", ["claim", "wait", "progress"])
def test_a_place_has_a_longest(world: World, asked: str) -> None:
    leader, place = world.connect(), "x" * 65
    if asked == "claim":
        found = world.ask(ev.Claim, leader, A, [SHARD], b"", 0, place)
    elif asked == "wait":
        found = world.ask(ev.Await, leader, 1, 0, 1, [SHARD], 0, place)
    else:
        found = world.ask(ev.AskProgress, leader, 1, 0, place)
    assert refused(found) == (Code.INVALID_ARGUMENT, "place")
