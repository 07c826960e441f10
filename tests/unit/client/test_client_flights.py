"""What a client's flights leave behind when it stops waiting."""

# The fake runs in another thread, which no asyncio.Event can tell of.
# ruff: noqa: ASYNC110

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kmesh import errors
from kmesh.aio import AsyncSession
from kmesh.flight import Arrival, FlightCause, Standing
from kmesh.layout import Shard
from kmesh.session import Role
from kmesh.testing import FakeDaemon
from kmesh.v1 import flights_pb2

SHARD = Shard(0, 2, 0, 2)


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end, "it did not come true"
        time.sleep(0.005)


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[FakeDaemon]:
    with FakeDaemon(socket_dir=tmp_path) as fake:
        yield fake


def test_numbers_are_those_of_the_wire() -> None:
    for ours, theirs, prefix in (
        (Standing, flights_pb2.Standing, "STANDING_"),
        (Arrival, flights_pb2.Arrival, "ARRIVAL_"),
        (FlightCause, flights_pb2.FlightCause, "FLIGHT_CAUSE_"),
    ):
        wire = {name.removeprefix(prefix): number for name, number in theirs.items() if number}
        assert {item.name: item.value for item in ours if item.value} == wire
    assert FlightCause(99) is FlightCause.UNKNOWN


def test_a_claim_that_comes_too_late_is_given_back(daemon: FakeDaemon) -> None:
    with daemon.connect() as session:
        with daemon.hold("claim"), pytest.raises(errors.DeadlineExceeded):
            session.claim(os.urandom(32), [SHARD], timeout=0.05)
        until(lambda: daemon.flights == 0 and session.pending == 0)


def test_a_lead_that_comes_too_late_is_given_back(daemon: FakeDaemon) -> None:
    with daemon.connect() as leader, daemon.connect() as other:
        # Where the wait has ended before the leader lands, it waits longer.
        for seconds in (0.5, 4.0, 32.0):
            keys = os.urandom(64)
            mine = leader.claim(keys, [SHARD])
            found = other.claim(keys, [SHARD])
            with daemon.hold("await_flight"):
                waiting = other.await_flight_async(found, seconds)
                until(lambda: daemon.waits == 1 or waiting.done())  # noqa: B023
                leader.land(mine.flight, FlightCause.ABORTED)
                promoted = daemon.flights == 1
                with pytest.raises(errors.DeadlineExceeded):
                    waiting.result(60)
            # It leads, and does not know; then the answer comes, and it lets go.
            until(lambda: daemon.flights == 0 and other.pending == 0)
            if promoted:
                break
        assert promoted


async def test_coroutines_claim_wait_leave_and_land(daemon: FakeDaemon, tmp_path: Path) -> None:
    keys = os.urandom(64)
    async with (
        await AsyncSession.connect(tmp_path, role=Role.TOOL) as leader,
        await AsyncSession.connect(tmp_path, role=Role.TOOL) as other,
    ):
        mine = await leader.claim(keys, [SHARD])
        found = await other.claim(keys, [SHARD])
        assert (mine.standing, found.standing) == (Standing.LEAD, Standing.COMPUTING)
        task = asyncio.create_task(other.await_flight(found, 30))
        while not daemon.waits:
            await asyncio.sleep(0.005)
        await other.leave(found.flight)
        assert (await task).cause is FlightCause.LEFT
        task = asyncio.create_task(other.await_flight(found, 30))
        while not daemon.waits:
            await asyncio.sleep(0.005)
        await leader.land(mine.flight)
        assert (await task).arrival is Arrival.ENDED
        with pytest.raises(errors.ConfigError):
            await other.await_flight(mine)


async def test_a_cancelled_wait_is_left(daemon: FakeDaemon, tmp_path: Path) -> None:
    keys = os.urandom(64)
    async with (
        await AsyncSession.connect(tmp_path, role=Role.TOOL) as leader,
        await AsyncSession.connect(tmp_path, role=Role.TOOL) as other,
    ):
        mine = await leader.claim(keys, [SHARD])
        found = await other.claim(keys, [SHARD])
        for how in ("waiting", "answered"):
            task = asyncio.create_task(other.await_flight(found, 3000))
            while not daemon.waits:
                await asyncio.sleep(0.005)
            if how == "answered":
                # Promoted in the same moment: its answer is there when it is cancelled.
                await leader.land(mine.flight, FlightCause.ABORTED)
                end = time.monotonic() + 30
                while daemon.waits and time.monotonic() < end:
                    time.sleep(0.005)  # noqa: ASYNC251 - the loop must not see the answer yet
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            while daemon.waits:
                await asyncio.sleep(0.005)
        while daemon.flights:
            await asyncio.sleep(0.005)


async def test_a_cancelled_claim_is_given_back(daemon: FakeDaemon, tmp_path: Path) -> None:
    async with await AsyncSession.connect(tmp_path, role=Role.TOOL) as session:
        task = asyncio.create_task(session.claim(os.urandom(32), [SHARD]))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        while session.pending or daemon.flights:
            await asyncio.sleep(0.005)
