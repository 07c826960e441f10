"""Flights: what a session may lead and wait for, and what many of them cost."""

from __future__ import annotations

import pytest
from asking import A, B, C, D, E, F, refused
from contents import OTHER_SHARD, SHARD, key
from flight_cases import LANDED, LEAD, answer, ended, join
from world import World

from kmesh_spand.core import effects as fx
from kmesh_spand.core import events as ev
from kmesh_spand.core import requests as rq
from kmesh_spand.core import results as rs
from kmesh_spand.core.codes import Code, FlightCause, Standing
from kmesh_spand.core.config import CoreConfig
from kmesh_spand.core.core import Core


def test_limits_of_a_session() -> None:
    world = World({0: 8}, max_flights=2, max_waits=2, max_batch=4, max_flight_shards=1)
    leader, other = world.connect(), world.connect()
    flight = world.claim(leader, [A]).flight
    world.claim(leader, [B])
    assert refused(world.ask(rq.Claim, leader, C, [SHARD])) == (Code.EXHAUSTED, "keys")
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
        assert refused(world.ask(rq.Claim, leader, keys, shards, salt)) == (
            Code.INVALID_ARGUMENT,
            at,
        )
    many = b"".join(key(n) for n in range(5))
    assert refused(world.ask(rq.Claim, leader, many, [SHARD])) == (Code.TOO_LARGE, "keys")
    two = [SHARD, OTHER_SHARD]
    assert refused(world.ask(rq.Claim, leader, A, two)) == (Code.TOO_LARGE, "shards")
    for first, covered in ((0, 0), (0, 2), (1, 1)):
        asked = world.ask(rq.Await, other, flight, first, covered, [SHARD])
        assert refused(asked) == (Code.INVALID_ARGUMENT, "covered")
    assert refused(world.ask(rq.Land, leader, flight, FlightCause.CLOSED)) == (
        Code.INVALID_ARGUMENT,
        "cause",
    )


def test_keys_of_a_sessions_flights_are_limited() -> None:
    world = World({0: 8}, max_flight_keys=3)
    leader, other = world.connect(), world.connect()
    assert world.claim(leader, [A, B]).covered == 2
    assert refused(world.ask(rq.Claim, leader, C + D, [SHARD])) == (Code.EXHAUSTED, "keys")
    assert world.claim(leader, [C]).standing == Standing.LEAD
    world.claim(other, [E, F])
    waiting = join(world, other, [A, B])
    world.close(leader)
    assert answer(world, other, waiting) == ended(FlightCause.CLOSED)


def test_a_shard_that_occurs_twice_is_refused(world: World) -> None:
    asked = world.ask(rq.Claim, world.connect(), A, [SHARD, SHARD])
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
def test_a_million_joins_leave_nothing() -> None:
    core = Core(CoreConfig(max_spans=8, max_waits=1000))
    for session in (1, 2):
        core.handle(ev.SessionOpened(session, 0, f"{session}", 1), 0)
    keys = A + B
    core.handle(rq.Claim(1, 1, keys, [SHARD]), 0)
    (claimed,) = core.handle(rq.Claim(2, 2, keys, [SHARD]), 0)
    assert isinstance(claimed, fx.Reply)
    found = claimed.result
    assert isinstance(found, rs.ClaimResult)
    request = 2
    for _ in range(1000):
        for _ in range(1000):
            request += 1
            wait = rq.Await(2, request, found.flight, found.first, found.covered, [SHARD])
            assert core.handle(wait, 0) == []
        request += 1
        answers = core.handle(rq.Leave(2, request, found.flight), 0)
        assert len(answers) == 1001
    core.check()
    assert core.counters["flight_joins"] == core.counters["flight_leaves"] == 1_000_000
    assert [row.waiters for row in core.views.flight_rows(0, 9, now_ms=0)] == [0]
    core.handle(ev.SessionClosed(1), 0)
    assert not core.flights


@pytest.mark.parametrize("asked", ["claim", "wait", "progress"])
def test_a_place_has_a_longest(world: World, asked: str) -> None:
    leader, place = world.connect(), "x" * 65
    if asked == "claim":
        found = world.ask(rq.Claim, leader, A, [SHARD], b"", 0, place)
    elif asked == "wait":
        found = world.ask(rq.Await, leader, 1, 0, 1, [SHARD], 0, place)
    else:
        found = world.ask(rq.AskProgress, leader, 1, 0, place)
    assert refused(found) == (Code.INVALID_ARGUMENT, "place")
