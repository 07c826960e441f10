"""Drain and Watch of a real daemon, over gRPC."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from daemon_process import Daemon
from rawclient import RawClient
from test_operator import SHARD, SPACE, WIRE_SHARD, Operator, chain_of, engine, operator, store

from kmesh import errors
from kmesh.session import ReserveBatch
from kmesh.store import put_spans
from kmesh.v1 import admin_pb2


def names(events: Any) -> list[str]:
    return [admin_pb2.EventKind.Name(e.kind).removeprefix("EVENT_KIND_").lower() for e in events]


# Drain.


def test_drain_refuses_stores_and_serves_reads(spand: Daemon) -> None:
    with engine(spand) as session, operator(spand) as ask:
        chain = store(session, list(range(64)))
        last = list(ask.drain())[-1]
        assert (last.draining, last.done, last.late, last.stopping) == (True, True, False, False)
        assert spand.status().draining
        batch = ReserveBatch(SPACE.digest(), SHARD, os.urandom(32), [64], [0], [1000])
        with pytest.raises(errors.Draining, match="no new spans"):
            session.reserve(batch)
        # New sessions come in, and read.
        with engine(spand) as reader, reader.acquire(chain.keys, [SHARD]) as lease:
            assert lease.hits == 1
        # Until it is taken back.
        assert not next(iter(ask.drain(cancel=True))).draining
        assert session.reserve(batch).reason == [0]


def test_drain_waits_for_what_is_being_written(spand: Daemon) -> None:
    with engine(spand) as session, operator(spand) as ask:
        chain = chain_of(list(range(64)))
        batch = ReserveBatch(SPACE.digest(), SHARD, chain.keys, [64], [0], [1000])
        staging = session.staging(4096)
        reserved = session.reserve(batch)
        assert staging.size
        progress = iter(ask.drain(deadline_ms=10_000))
        first = next(progress)
        assert (first.reservations, first.done) == (1, False)
        assert session.commit(reserved.reservation, [0]) == [0]
        last = list(progress)[-1]
        assert (last.reservations, last.done, last.late) == (0, True, False)
        with session.acquire(chain.keys, [SHARD]) as lease:
            assert lease.hits == 1


def test_drain_has_a_deadline(spand: Daemon) -> None:
    with engine(spand) as session, operator(spand) as ask:
        session.reserve(ReserveBatch(SPACE.digest(), SHARD, os.urandom(32), [64], [0], [1000]))
        last = list(ask.drain(deadline_ms=300))[-1]
        assert (last.done, last.late, last.reservations) == (False, True, 1)
        assert last.elapsed_ms >= 300


def test_drain_goes_on_without_its_caller_and_stops(spand: Daemon) -> None:
    with engine(spand) as session, operator(spand) as ask:
        batch = ReserveBatch(SPACE.digest(), SHARD, os.urandom(32), [64], [0], [1000])
        staging = session.staging(4096)
        reserved = session.reserve(batch)
        assert staging.size
        call = ask.drain(stop=True, deadline_ms=20_000)
        assert not next(iter(call)).stopping
        call.cancel()
        with pytest.raises(grpc.RpcError) as refused:
            list(ask.drain(cancel=True))
        assert refused.value.code() == grpc.StatusCode.UNAVAILABLE
        assert session.commit(reserved.reservation, [0]) == [0]
        assert spand.process.wait(20) == 0
    assert "stopping" in spand.log()


# Watch.


def test_watch_tells_in_order(spand: Daemon) -> None:
    with operator(spand) as ask:
        call = ask.watch()
        answers = iter(call)
        events = list(next(answers).events)
        assert names(events)[0] == "started"
        with engine(spand) as session:
            chain = store(session, list(range(64 * 2)))
            ask.evict(keys=chain.key(1))
            number = session.welcome.session_id
        list(ask.drain())
        while "drain_ended" not in names(events):
            events += next(answers).events
        call.cancel()
    assert [event.sequence for event in events] == list(range(1, len(events) + 1))
    mine = [e for e in events if e.session_id == number or e.key in (chain.key(0), chain.key(1))]
    assert names(mine) == [
        "session_opened",
        "span_committed",
        "span_committed",
        "span_evicted",
        "session_closed",
    ]
    opened, first, _, evicted, closed = mine
    assert (opened.uid, opened.text) == (os.getuid(), "kmesh")
    assert (first.namespace, first.tokens, first.length) == (SPACE.digest(), 64, 1000)
    assert first.shard == WIRE_SHARD
    assert evicted.cause == admin_pb2.CAUSE_OPERATOR
    assert "closed" in closed.text
    assert abs(first.time_ms / 1000 - time.time()) < 60


def test_watch_resumes(spand: Daemon) -> None:
    with engine(spand) as session, operator(spand) as ask:
        before = next(iter(ask.watch()))
        store(session, list(range(64 * 3)))
        kinds = [admin_pb2.EVENT_KIND_SPAN_COMMITTED]
        answer = next(
            iter(ask.watch(after_sequence=before.last_sequence, epoch=before.epoch, kinds=kinds))
        )
        assert not answer.lost
        assert names(answer.events) == ["span_committed"] * 3
        # From now on: nothing of that.
        call = ask.watch(only_new=True)
        assert not next(iter(call)).events
        call.cancel()
        # Of another epoch: all that is known, and that there was more.
        other = next(iter(ask.watch(after_sequence=before.last_sequence, epoch=7)))
        assert other.lost
        assert other.events[0].sequence == 1
        with pytest.raises(grpc.RpcError) as refused:
            next(iter(ask.watch(after_sequence=10**9)))
        assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT


def test_a_slow_watcher_loses_events_and_is_told(start_spand: Callable[..., Daemon]) -> None:
    daemon = start_spand(watch_events=16)
    daemon.wait_populated()
    with engine(daemon) as session, operator(daemon) as ask:
        place = next(iter(ask.watch()))
        store(session, list(range(64 * 40)))
        answer = next(iter(ask.watch(after_sequence=place.last_sequence, epoch=place.epoch)))
        assert answer.lost
        assert len(answer.events) == 16
        assert answer.events[0].sequence > place.last_sequence + 1


def test_a_watcher_that_does_not_read_costs_nothing(start_spand: Callable[..., Daemon]) -> None:
    daemon = start_spand(watch_events=64)
    daemon.wait_populated()
    count = 200
    with engine(daemon) as session, operator(daemon) as ask:
        answers = iter(ask.watch())
        first = next(answers)
        chain = chain_of(list(range(64 * count)))
        batch = ReserveBatch(
            SPACE.digest(), SHARD, chain.keys, [64] * count, [0] * count, [64] * count
        )
        staging = session.staging(1 << 20)
        for _ in range(30):
            assert not any(put_spans(session, staging, batch, [bytes(64)] * count))
            assert ask.evict(keys=chain.keys).spans == count
        newest = next(iter(ask.watch(only_new=True))).last_sequence
        assert newest > 30 * 2 * count
        # What it reads now are the few that were on their way, then a gap, then the last ones.
        seen, lost, last = 0, False, first.last_sequence
        while last < newest:
            answer = next(answers)
            lost = lost or answer.lost
            seen += len(answer.events)
            assert all(e.sequence > last for e in answer.events)
            last = answer.last_sequence
    assert lost
    assert seen < newest - 1000


def test_watch_ends_with_its_session(spand: Daemon) -> None:
    client = RawClient(spand.socket_dir)
    with grpc.insecure_channel(f"unix:{spand.socket_dir}/grpc.sock") as channel:
        ask = Operator(channel, (("kmesh-session", client.welcome.token),))
        answers = iter(ask.watch())
        next(answers)
        client.close()
        with pytest.raises(grpc.RpcError) as ended:
            list(answers)
        assert ended.value.code() == grpc.StatusCode.UNAUTHENTICATED


def test_a_restart_is_a_new_epoch_for_who_watches(start_spand: Callable[..., Daemon]) -> None:
    daemon = start_spand(errors=True)
    daemon.wait_populated()
    with operator(daemon) as ask:
        place = next(iter(ask.watch()))
    os.kill(daemon.child("worker"), signal.SIGKILL)
    os.kill(daemon.child("control"), signal.SIGKILL)
    daemon.wait_ready(times=2)
    with operator(daemon) as ask:
        answer = next(iter(ask.watch(after_sequence=place.last_sequence, epoch=place.epoch)))
    assert answer.lost
    assert answer.epoch != place.epoch
    assert names(answer.events)[0] == "started"
    assert "worker_started" in names(answer.events)
