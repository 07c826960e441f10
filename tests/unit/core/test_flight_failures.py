"""Flights that fail: who leads on, who is told, and what kills its leaders."""

from __future__ import annotations

import pytest
from asking import A, B, C, D, F
from contents import OTHER_SHARD, key
from flight_cases import LANDED, LEAD, answer, ended, join
from world import World

from kmesh_spand.core.codes import FlightCause, Standing


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
    assert world.core.views.flight_rows(0, 9, now_ms=world.now)[0].keys == 4
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


def test_a_promoted_leader_promises_what_it_wanted_in_its_own_shards(world: World) -> None:
    leader, other, third = world.connect(), world.connect(), world.connect()
    world.claim(leader, [A, B, C, D])
    world.store(leader, [A])
    found = world.claim(other, [B, C])
    assert world.wait(other, found, [OTHER_SHARD]) is None
    late = join(world, third, [D])
    world.close(leader)
    world.core.check()
    row = world.core.views.flight_rows(0, 9, now_ms=world.now)[0]
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
    assert F not in next(iter(world.core.flights.promises.by_key.values()))
