"""Flights of the core: who computes, who waits, and what lands."""

from __future__ import annotations

from asking import A, B, C, D, E
from contents import OTHER_SHARD, SHARD, key
from flight_cases import LANDED, LEAD, answer, ended, join
from world import World

from kmesh.layout import Shard
from kmesh_spand.core import events as ev
from kmesh_spand.core import requests as rq
from kmesh_spand.core import results as rs
from kmesh_spand.core.codes import FlightCause, Standing
from kmesh_spand.core.tenants import Tenancy


def test_the_first_leads_and_the_others_wait_until_it_has_landed(world: World) -> None:
    leader, other = world.connect(), world.connect()
    assert world.claim(leader, [A, B, C]) == rs.ClaimResult(Standing.LEAD, 1, covered=3)
    world.now += 70
    assert world.claim(other, [A, B, D]) == rs.ClaimResult(
        Standing.COMPUTING,
        1,
        0,
        2,
        ahead=2,
        progress=rs.Progress(age_ms=70, quiet_ms=70),
    )
    waiting = join(world, other, [A, B, D])
    world.store(leader, [A])
    world.core.check()
    assert answer(world, other, waiting) is None
    assert world.claim(other, [A, B]).standing == Standing.STORED
    found = world.claim(other, [B, C, D])
    assert (found.first, found.covered, found.ahead, found.progress.landed) == (1, 2, 2, 1)
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


def test_a_leader_that_is_done_is_waited_for_until_its_copies_have_ended(world: World) -> None:
    leader, other = world.connect(), world.connect()
    flight = world.claim(leader, [A, B]).flight
    waiting = join(world, other, [A, B])
    reserved = world.reserve(leader, [A, B])
    world.commit(leader, list(reserved.reservation))
    assert world.land(leader, flight)
    world.core.check()
    assert world.core.views.flight_rows(0, 9, now_ms=world.now)[0].state == "landing"
    assert answer(world, other, waiting) is None
    # It may be joined still.
    assert world.claim(other, [A]).standing == Standing.COMPUTING
    world.settle()
    assert answer(world, other, waiting) == LANDED
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
        (row,) = world.core.views.spans(now_ms=world.now)
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
        assert world.ask(rq.Await, other, *event) is None
        waits.append(world.request)
    left = world.ask(rq.Leave, other, claim.flight, 0, 8)
    assert left == rs.LeaveResult(1)
    assert answer(world, other, waits[0]) is None
    assert answer(world, other, waits[1]) == ended(FlightCause.LEFT)
    # Two numbers that name different waits name none.
    assert world.ask(rq.Leave, other, claim.flight, waits[0], 8) == rs.LeaveResult(0)
    assert world.leave(other, claim.flight) == 1


def test_a_leader_never_waits_for_itself(world: World) -> None:
    leader, other = world.connect(), world.connect()
    flight = world.claim(leader, [A]).flight
    assert world.claim(leader, [A, B]).standing == Standing.NONE
    # As one that was promoted since its claim was answered: it looks again.
    assert world.ask(rq.Await, leader, flight, 0, 1, [SHARD]) == LANDED
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
    assert world.ask(rq.Await, theirs, flight, 0, 1, [SHARD]) == LANDED
    assert not world.land(theirs, flight)
    world.store(theirs, [A])
    assert [row.flight for row in world.core.views.flight_rows(0, 9, now_ms=0, group=1000)] == [
        1,
        3,
    ]
    assert not world.core.views.flight_rows(0, 9, now_ms=0, group=1001)


def test_progress_is_what_the_leader_says_and_what_lands(world: World) -> None:
    leader, other = world.connect(), world.connect()
    world.claim(leader, [A, B, C], place="gpu 0")
    world.now += 40
    assert world.progress(leader, 1, computed=2) == rs.Progress(0, 0, 2, 40, 0, 40)
    world.now += 10
    assert world.progress(other, 1) == rs.Progress(0, 0, 2, 50, 10, 40)
    # Nobody else's word counts, and none that takes something back.
    assert world.progress(other, 1, computed=3) == rs.Progress(0, 0, 2, 50, 10, 40)
    assert world.progress(leader, 1, computed=1) == rs.Progress(0, 0, 2, 50, 10, 40)
    world.store(leader, [A])
    assert world.progress(other, 1) == rs.Progress(0, 1, 2, 50, 0, 40)
    world.now += 60
    # More than it promised is all of it.
    assert world.progress(leader, 1, computed=2**32 - 1) == rs.Progress(0, 1, 3, 110, 0, 60)
    found = world.claim(other, [B, C], place="gpu 0")
    assert found.progress == rs.Progress(0, 1, 3, 110, 0, 60, beside=True)
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
    assert world.progress(leader, 1, computed=3) == rs.Progress(1, 0, 0, 5, 5, 0)
    assert world.progress(other, 1, computed=1) == rs.Progress(1, 0, 1, 5, 0, 5)
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
