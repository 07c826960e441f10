"""Flights between real processes, some of which are killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from daemon_process import Daemon, environment, wait_for
from test_cli import DOCS, as_json, kmesh

from kmesh import errors
from kmesh.flight import Arrival, FlightCause, Standing
from kmesh.layout import Shard
from kmesh.session import Role, Session

SCRIPT = Path(__file__).with_name("flight_client.py")
SHARD = Shard(0, 2, 0, 2)


@pytest.fixture(scope="module", autouse=True)
def daemon(shared_spand: Daemon) -> Daemon:
    return shared_spand


class Client:
    """A ``flight_client`` in a process of its own."""

    def __init__(self, daemon: Daemon, keys: bytes) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(SCRIPT), str(daemon.socket_dir), keys.hex()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment(),
            text=True,
        )

    def said(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def go_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


@contextmanager
def clients(daemon: Daemon, keys: bytes, count: int) -> Iterator[list[Client]]:
    with ExitStack() as stack:
        found = []
        for _ in range(count):
            found.append(Client(daemon, keys))
            stack.callback(found[-1].close)
        for client in found:
            assert client.said() == "up"
        yield found


def counters(daemon: Daemon) -> dict[str, int]:
    return dict(daemon.status().counters)


def waiting(daemon: Daemon, joins: int) -> None:
    wait_for(lambda: counters(daemon)["flight_joins"] == joins, 60)


def test_of_a_race_one_leads_and_its_death_promotes_one(daemon: Daemon) -> None:
    before = counters(daemon)
    with clients(daemon, os.urandom(64), 4) as racing:
        for client in racing:
            client.go_on()
        said = [client.said() for client in racing]
        assert sorted(said) == ["COMPUTING"] * 3 + ["LEAD"]
        leader = racing[said.index("LEAD")]
        others = [client for client in racing if client is not leader]
        waiting(daemon, before["flight_joins"] + 3)
        leader.kill()
        wait_for(
            lambda: counters(daemon)["flight_promotions"] == before["flight_promotions"] + 1, 60
        )
        # The one that was promoted is told to store; the others read on when they have the news.
        for client in others:
            client.go_on()
        arrived = sorted(client.said() for client in others)
        assert arrived == ["LANDED", "LANDED", "LEAD"]
    after = counters(daemon)
    assert after["flight_leads"] == before["flight_leads"] + 1
    assert after["flight_landed"] == before["flight_landed"] + 1
    assert after["flight_shared_tokens"] == before["flight_shared_tokens"] + 2 * 128
    assert after["flight_shared_bytes"] == before["flight_shared_bytes"] + 2 * 2000


def test_a_waiter_that_is_killed_is_forgotten(daemon: Daemon) -> None:
    before = counters(daemon)
    keys = os.urandom(64)
    with Session.connect(daemon.socket_dir, role=Role.TOOL) as leader:
        mine = leader.claim(keys, [SHARD])
        with clients(daemon, keys, 1) as (client,):
            client.go_on()
            assert client.said() == "COMPUTING"
            waiting(daemon, before["flight_joins"] + 1)
            client.kill()
        wait_for(
            lambda: not as_json("flights", socket_dir=daemon.socket_dir)["flights"][0]["waiters"]
        )
        leader.land(mine.flight, FlightCause.ABORTED)
        leader.ping()
    after = counters(daemon)
    assert after["flight_promotions"] == before["flight_promotions"]


def test_more_waits_than_a_session_may_have_cost_only_that_session(daemon: Daemon) -> None:
    keys = os.urandom(64)
    with ExitStack() as stack:
        leader, greedy, modest = (
            stack.enter_context(Session.connect(daemon.socket_dir, role=Role.TOOL))
            for _ in range(3)
        )
        mine = leader.claim(keys, [SHARD])
        claim = greedy.claim(keys, [SHARD])
        waits = [greedy.await_flight_async(claim, 60) for _ in range(500)]
        greedy.ping(30)
        refused = [wait for wait in waits if wait.done()]
        assert len(refused) == 500 - 128
        assert all(isinstance(wait.exception(), errors.Exhausted) for wait in refused)
        other = modest.await_flight_async(modest.claim(keys, [SHARD]), 60)
        modest.ping()
        assert not other.done()
        leader.land(mine.flight, FlightCause.NOT_STORED)
        assert other.result(60).arrival is Arrival.ENDED
        kept = [wait for wait in waits if wait not in refused]
        assert all(wait.result(60).cause is FlightCause.NOT_STORED for wait in kept)


def test_flights_are_listed(daemon: Daemon) -> None:
    keys = os.urandom(64)
    where = daemon.socket_dir
    with ExitStack() as stack:
        leader, other = (
            stack.enter_context(Session.connect(where, role=Role.TOOL)) for _ in range(2)
        )
        assert "nothing is in the air" in kmesh("flights", socket_dir=where).stdout
        mine = leader.claim(keys, [SHARD])
        wait = other.await_flight_async(other.claim(keys, [SHARD]), 60)
        second = other.claim(os.urandom(32), [SHARD])
        assert second.standing is Standing.LEAD
        document = as_json("flights", socket_dir=where)
        found, _ = document["flights"]
        assert found["age_ms"] >= 0
        assert {name: found[name] for name in found if name != "age_ms"} == {
            "flight": mine.flight,
            "state": "led",
            "tenant": str(os.getuid()),
            "leader": leader.welcome.session_id,
            "keys": 2,
            "landed": 0,
            "waiters": 1,
            "deaths": 0,
            "key": keys[:32].hex(),
        }
        for name in found:
            assert f"`{name}`" in DOCS, f"docs/cli.md does not explain {name}"
        assert len(as_json("flights", "--limit", "1", socket_dir=where)["flights"]) == 1
        shown = kmesh("flights", socket_dir=where).stdout
        assert keys[:8].hex() in shown
        again = kmesh("flights", "--interval", "0.05", "--count", "2", "--json", socket_dir=where)
        lines = [json.loads(line) for line in again.stdout.splitlines()]
        assert [len(line["flights"]) for line in lines] == [2, 2]
        assert lines[0]["time_ms"] <= lines[1]["time_ms"]
        raw = kmesh("call", "Flights/List", '{"limit": 1}', socket_dir=where)
        assert json.loads(raw.stdout)["next_page_token"] == str(mine.flight)
        wrong = kmesh("call", "Flights/List", '{"page_token": "x"}', socket_dir=where)
        assert wrong.returncode == 4
        leader.land(mine.flight)
        assert wait.result(60).arrival is Arrival.ENDED
