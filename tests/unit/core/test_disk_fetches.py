"""Fetches: who leads and who waits, what comes back, and a disk that does not answer."""

from __future__ import annotations

import itertools

import pytest
from contents import SHARD, key
from disk_cases import ONE, made, names, on_disk
from disk_world import DiskWorld

from kmesh.layout import TILE_BYTES
from kmesh_spand.core import events as ev
from kmesh_spand.core import requests as rq
from kmesh_spand.core import results as rs
from kmesh_spand.core.codes import Reason, Trouble
from kmesh_spand.core.config import DiskConfig


def test_an_acquire_that_waits_is_answered_when_all_has_come() -> None:
    world = made(tiles=4)
    session = world.connect()
    for number in range(8):
        world.store(session, names(number))
        world.settle()
    wanted = names(0, 1, 7)
    assert world.acquire_waiting(session, wanted) is None
    (first, second) = list(world.fetches)
    world.fetch_ends(first)
    assert world.arrivals
    world.check()
    world.fetch_ends(second)
    assert not world.arrivals
    (lease,) = world.leases.values()
    assert all(lease[1])
    world.check()


def test_what_is_here_makes_no_room_for_what_comes() -> None:
    world = made(tiles=2)
    session = world.connect()
    for number in range(3):
        world.store(session, names(number))
        world.settle()
    # Span 1 was used before span 2, and would be the first to go.
    assert world.acquire_waiting(session, names(1, 0)) is None
    world.check()
    world.settle()
    (lease,) = world.leases.values()
    assert all(lease[1])
    assert {row.key for row in world.core.views.spans(now_ms=world.now)} == {key(0), key(1)}
    world.check()


def test_64_sessions_that_want_one_file_read_it_once() -> None:
    world = made()
    first = world.connect()
    for number in range(3):
        world.store(first, names(number))
        world.settle()
    sessions = [world.connect() for _ in range(64)]
    for session in sessions:
        assert world.acquire_waiting(session, names(0)) is None
    assert len(world.fetches) == 1
    world.settle()
    assert len(world.leases) == 64
    assert sum(world.reads.values()) == 1
    counters = world.core.counters
    assert counters["disk_fetched_bytes"] == TILE_BYTES
    assert (counters["disk_fetch_leads"], counters["disk_fetch_joins"]) == (1, 63)
    assert counters["disk_fetch_shared_bytes"] == 63 * TILE_BYTES
    world.check()


def test_a_leader_that_dies_strands_nobody() -> None:
    world = made(max_reads=1)
    on_disk(world, 2)
    leader, other, last = (world.connect() for _ in range(3))
    assert world.acquire_waiting(leader, names(0)) is None
    assert world.acquire_waiting(leader, names(1)) is None
    assert world.acquire_waiting(other, names(1)) is None
    world.close(leader)
    assert world.core.counters["disk_fetch_promotions"] == 1
    world.check()
    # What is read already comes; what nobody wants any more is not begun.
    assert world.acquire_waiting(last, names(0, 1)) is None
    world.close(other)
    world.settle()
    assert len(world.leases) == 1
    world.check()


def test_a_flight_that_nobody_wants_is_not_begun() -> None:
    world = made(max_reads=1)
    on_disk(world, 2)
    one, two = world.connect(), world.connect()
    assert world.acquire_waiting(one, names(0)) is None
    assert world.acquire_waiting(two, names(1)) is None
    world.close(two)
    world.settle()
    assert world.reads == {1: 1}
    world.check()


def test_who_has_waited_long_enough_gets_what_is_there() -> None:
    world = made(max_reads=1)
    session = on_disk(world, 2)
    assert world.acquire_waiting(session, names(0, 1)) is None
    world.fetch_ends(next(iter(world.fetches)))
    world.hurry(session, world.request)
    (lease,) = world.leases.values()
    assert [bool(item) for item in lease[1]] == [True, False]
    world.settle()
    # It was told PENDING, so that it came all the same.
    assert world.core.counters["disk_fetched"] == 2
    assert world.core.counters["disk_hurried"] == 1
    world.check()


@pytest.mark.parametrize("how", ["flip", "gone", "other"])
def test_a_file_that_is_not_what_it_was_is_a_miss_and_removed(how: str) -> None:
    world = made()
    session = on_disk(world)
    world.damage(1, how)
    assert world.acquire_waiting(session, names(0)) is None
    world.settle()
    answer = world.answered[session, world.request]
    assert isinstance(answer, rs.AcquireResult)
    assert list(answer.reason) == [Reason.MISS]
    assert world.core.counters["disk_corrupt"] == 1
    assert not world.files
    assert not world.disk_index
    world.store(session, names(0))
    world.check()


def test_a_file_that_can_not_be_read_is_left_alone_and_then_given_up() -> None:
    world = made(hold_ms=1000, max_failures=3)
    session = on_disk(world)
    for attempt in range(3):
        assert world.acquire_waiting(session, names(0)) is None
        world.fetch_ends(next(iter(world.fetches)), Trouble.IO)
        for _ in range(3):
            assert list(world.acquire(session, names(0)).reason) == [Reason.MISS]
        assert not world.fetches
        assert not world.disk_index
        world.now += (1000 << attempt) - 1
        world.send(ev.Tick())
        assert not world.disk_index
        world.now += 1
        world.send(ev.Tick())
        world.check()
    assert world.core.counters["disk_fetch_failed"] == 3
    world.settle()
    assert not world.files


def test_a_fetch_for_which_there_is_no_room_is_not_asked_for_again_at_once() -> None:
    world = made(tiles=1)
    session = on_disk(world, 2)
    world.acquire(session, names(1))
    world.settle()
    assert list(world.acquire(session, names(1)).reason) == [Reason.OK]
    for _ in range(3):
        assert list(world.acquire(session, names(0)).reason) in ([Reason.PENDING], [Reason.MISS])
    assert world.core.counters["disk_fetch_no_room"] == 1
    world.check()


def test_tails_that_begin_alike_are_all_fetched() -> None:
    """The first one's file has the names that both have."""
    world = made()
    session = world.connect()
    for number in (48, 49):
        world.store(session, names(number), tokens=48, sub_keys=tuple(names(16, 32)))
        world.settle()
        world.send(ev.Evict([row.slot for row in world.core.views.spans(now_ms=world.now)]))
    for number in (49, 48):
        assert world.acquire_waiting(session, names(number)) is None
        world.settle()
    assert len(world.leases) == 2
    assert (world.core.counters["disk_fetched"], world.core.counters["disk_corrupt"]) == (2, 0)
    world.check()
    world.reboot()
    world.scan()
    session = world.connect()
    for number in (16, 49, 48):
        world.acquire_waiting(session, names(number))
        world.settle()
        assert list(world.acquire(session, names(number)).reason) == [Reason.OK]
    assert world.core.counters["disk_corrupt"] == 0
    world.check()


def test_waits_for_flights_and_for_the_disk_count_together() -> None:
    """Together they leave half of what a session may have pending for its work."""
    world = DiskWorld(
        {0: 4}, disk=DiskConfig(capacity=8 * ONE, max_files=64), max_waits=2, max_flights=4
    )
    world.scan()
    session = on_disk(world, 2)
    leader = world.connect()
    claim = world.claim(leader, names(20, 21))
    assert world.acquire_waiting(session, names(0)) is None
    assert world.ask(rq.Await, session, claim.flight, 0, 2, [SHARD]) is None
    refused = world.ask(rq.Await, session, claim.flight, 0, 2, [SHARD])
    assert isinstance(refused, rs.Refused)
    answer = world.acquire_waiting(session, names(1))
    assert answer is not None


def hanging(world: DiskWorld) -> int:
    """Waits end one after the other, until the tier is treated as not there."""
    session = on_disk(world, 6)
    for number in range(3):
        assert not world.outages
        assert world.acquire_waiting(session, names(number)) is None
        world.now += 750
        world.hurry(session, world.request)
    assert world.outages == [True]
    return session


def test_a_disk_that_hangs_is_not_waited_for() -> None:
    world = made(tiles=4, hold_ms=1000, max_reads=8)
    session = hanging(world)
    assert world.core.counters["disk_outages"] == 1
    for number in (0, 5):
        # What is being read too: nobody knows when it comes.
        answer = world.acquire_waiting(session, names(number))
        assert answer is not None
        assert list(answer.reason) == [Reason.MISS]
    assert world.core.counters["disk_outage_misses"] > 0
    world.check()


def test_all_who_wait_for_a_disk_that_hangs_are_answered_together() -> None:
    world = made(tiles=4)
    session = on_disk(world, 6)
    others = [world.connect() for _ in range(3)]
    for other in others:
        world.acquire_waiting(other, names(5))
    world.now += 750
    for number in range(3):
        assert len(world.arrivals) == 3
        assert world.acquire_waiting(session, names(number)) is None
        world.now += 10
        world.hurry(session, world.request)
    assert not world.arrivals
    world.check()


def test_waits_that_were_short_say_nothing_of_the_disk() -> None:
    world = made(tiles=4)
    session = on_disk(world, 6)
    for _ in range(10):
        assert world.acquire_waiting(session, names(0)) is None
        world.now += 40
        world.hurry(session, world.request)
    assert not world.outages


def test_reads_that_end_meanwhile_say_that_the_disk_works() -> None:
    world = made(tiles=16)
    session = on_disk(world, 6)
    for number in range(6):
        assert world.acquire_waiting(session, names(number, (number + 1) % 6)) is None
        world.now += 400
        world.fetch_ends(next(iter(world.fetches)))
        world.now += 400
        if (session, world.request) in world.arrivals:
            world.hurry(session, world.request)
    assert not world.outages


def test_a_disk_that_comes_back_is_used_at_once() -> None:
    world = made(tiles=6)
    session = hanging(world)
    world.fetch_ends(next(iter(world.fetches)))
    assert world.outages == [True, False]
    assert world.acquire_waiting(session, names(5)) is None
    world.settle()
    assert list(world.acquire(session, names(5)).reason) == [Reason.OK]
    world.check()


def test_a_disk_that_does_not_answer_is_tried_by_one_at_a_time_and_less_often() -> None:
    world = made(tiles=4, hold_ms=1000, longest_hold_ms=4000, max_reads=8)
    session = hanging(world)
    other = world.connect()
    began, tries = world.now, list[int]()
    while world.now < began + 20_000:
        if world.acquire_waiting(session, names(4)) is None:
            tries.append(world.now - began)
            answer = world.acquire_waiting(other, names(4))
            assert answer is not None, "one is enough"
            world.now += 750
            world.hurry(session, world.request)
        world.now += 50
        world.check()
    gaps = [later - earlier for earlier, later in itertools.pairwise(tries)]
    assert 950 <= tries[0] <= 1100
    assert gaps == sorted(gaps)
    assert 4000 <= gaps[-1] <= 5000
    # One that gets its answer ends it.
    while world.acquire_waiting(session, names(4)) is not None:
        world.now += 50
    world.settle()
    assert world.outages == [True, False]
    assert list(world.acquire(session, names(4)).reason) == [Reason.OK]
    world.check()


def test_a_worker_that_hung_and_died_is_followed_by_one_that_is_asked() -> None:
    world = made(tiles=4)
    session = hanging(world)
    world.worker_dies()
    answer = world.acquire_waiting(session, names(5))
    assert answer is not None
    world.scan()
    assert world.outages == [True, False]
    assert world.acquire_waiting(session, names(5)) is None
    world.settle()
    world.check()


def test_who_took_all_its_leases_while_it_waited_is_refused() -> None:
    world = DiskWorld({0: 4}, disk=DiskConfig(capacity=8 * ONE, max_files=64), max_leases=1)
    world.scan()
    session = on_disk(world, 1)
    world.store(session, names(7))
    assert world.acquire_waiting(session, names(0)) is None
    waits = world.request
    world.acquire(session, names(7))
    assert len(world.leases) == 1
    refused = world.core.counters["refused"]
    world.settle()
    answer = world.answered[session, waits]
    assert isinstance(answer, rs.Refused)
    assert (answer.field, world.core.counters["refused"]) == ("keys", refused + 1)
    assert len(world.leases) == 1
    world.check()
