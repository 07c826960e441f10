"""Explain, Evict, Drain and Watch of a real daemon, over gRPC."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import pytest
from daemon_process import Daemon, wait_for

from kmesh.keys import KeyChain, Namespace, salt_digest
from kmesh.layout import Shard
from kmesh.session import ReserveBatch, Role, Session
from kmesh.store import put_spans
from kmesh.v1 import admin_pb2, admin_pb2_grpc, common_pb2, sessions_pb2, sessions_pb2_grpc

SPACE = Namespace("a model", "w", "float32", 4, 2, 8)
SHARD = Shard(0, 4, 0, 2)
WIRE_SHARD = common_pb2.Shard(layer_begin=0, layer_end=4, head_begin=0, head_end=2)


class Operator:
    """Admin's stub, with the metadata of a session."""

    def __init__(self, channel: grpc.Channel, metadata: Any) -> None:
        self._stub = admin_pb2_grpc.AdminStub(channel)
        self._metadata = metadata

    def explain(self, **request: Any) -> admin_pb2.ExplainResponse:
        message = admin_pb2.ExplainRequest(**request)
        return self._stub.Explain(message, metadata=self._metadata, timeout=20)

    def evict(self, **request: Any) -> admin_pb2.EvictResponse:
        message = admin_pb2.EvictRequest(**request)
        return self._stub.Evict(message, metadata=self._metadata, timeout=20)

    def drain(self, **request: Any) -> Any:
        message = admin_pb2.DrainRequest(**request)
        return self._stub.Drain(message, metadata=self._metadata, timeout=20)

    def watch(self, **request: Any) -> Any:
        message = admin_pb2.WatchRequest(**request)
        return self._stub.Watch(message, metadata=self._metadata, timeout=60)


@contextmanager
def operator(daemon: Daemon) -> Iterator[Operator]:
    with daemon.rpc() as (channel, metadata):
        yield Operator(channel, metadata)


@contextmanager
def engine(daemon: Daemon, space: Namespace = SPACE) -> Iterator[Session]:
    """A session that has stated its namespace, with staging."""
    with Session.connect(daemon.socket_dir, role=Role.TOOL, namespace=space) as session:
        yield session


def chain_of(tokens: list[int], space: Namespace = SPACE) -> KeyChain:
    chain = KeyChain(space.digest())
    chain.extend(tokens)
    return chain


def store(
    session: Session, tokens: list[int], space: Namespace = SPACE, size: int = 1000
) -> KeyChain:
    """Stores all full spans of a prompt."""
    chain = chain_of(tokens, space)
    count = chain.spans
    batch = ReserveBatch(
        space.digest(), SHARD, chain.keys, [64] * count, range(0, 64 * count, 64), [size] * count
    )
    staging = session.staging(1 << 20)
    assert put_spans(session, staging, batch, [bytes(size)] * count) == [0] * count
    return chain


# Explain.


def test_a_prompt_that_is_served_in_part(spand: Daemon) -> None:
    with engine(spand) as session, operator(spand) as ask:
        store(session, list(range(128)))
        answer = ask.explain(fields=SPACE.fields(), tokens=[*range(128), *range(900, 1000)])
        (part,) = answer.shards
        assert (answer.tokens, answer.spans) == (228, 3)
        assert (part.spans, part.tokens) == (2, 128)
        assert part.shard == WIRE_SHARD
        assert part.verdict == admin_pb2.VERDICT_NEVER
        assert part.key == chain_of([*range(128), *range(900, 964)]).key(2)
        assert not answer.nearest
        whole = ask.explain(namespace=SPACE.digest(), tokens=list(range(128)))
        assert whole.shards[0].verdict == admin_pb2.VERDICT_SERVED
        assert dict(whole.fields) == SPACE.fields()
        # Ten tokens more have no key, 20 have one.
        more = ask.explain(namespace=SPACE.digest(), tokens=list(range(138)))
        assert more.shards[0].verdict == admin_pb2.VERDICT_SERVED
        more = ask.explain(namespace=SPACE.digest(), tokens=list(range(148)))
        assert more.shards[0].verdict == admin_pb2.VERDICT_NEVER


def test_a_tail_counts(spand: Daemon) -> None:
    with engine(spand) as session, operator(spand) as ask:
        chain = chain_of(list(range(48)))
        batch = ReserveBatch(
            SPACE.digest(),
            SHARD,
            chain.key(0, 48),
            [48],
            [0],
            [100],
            b"".join(chain.sub_keys(0, 32)),
        )
        assert put_spans(session, session.staging(4096), batch, [bytes(100)]) == [0]
        answer = ask.explain(namespace=SPACE.digest(), tokens=[*range(32), *range(500, 600)])
        assert answer.shards[0].tokens == 32
        assert answer.shards[0].spans == 0
        answer = ask.explain(namespace=SPACE.digest(), tokens=list(range(50)))
        assert (answer.shards[0].tokens, answer.shards[0].verdict) == (
            48,
            admin_pb2.VERDICT_SERVED,
        )


def test_which_namespace_field_differs(spand: Daemon) -> None:
    salted = Namespace("a model", "w", "float32", 4, 2, 8, salt=salt_digest("tenant"))
    hidden = Namespace("a model", "w", "float32", 4, 2, 8, adapter="lora")
    tokens = list(range(192))
    with engine(spand) as session, operator(spand) as ask:
        store(session, tokens[:128])
        answer = ask.explain(fields=salted.fields(), tokens=tokens)
        assert answer.shards[0].verdict == admin_pb2.VERDICT_NEVER
        (match,) = answer.nearest
        assert (match.digest, match.tokens) == (SPACE.digest(), 128)
        assert list(match.differing) == ["salt"]
        # More of it lies under a namespace of which nobody ever said the fields.
        with engine(spand) as other:
            store(other, tokens, hidden)
        answer = ask.explain(fields=salted.fields(), tokens=tokens)
        first, second = answer.nearest
        assert (first.digest, first.tokens) == (hidden.digest(), 192)
        assert not first.fields
        assert not first.differing
        assert second.digest == SPACE.digest()
        # Where the asked namespace has the most, no other is named.
        assert not ask.explain(namespace=hidden.digest(), tokens=tokens).nearest


def test_causes(start_spand: Callable[..., Daemon]) -> None:
    daemon = start_spand(errors=False)
    daemon.wait_populated()
    tokens = list(range(64 * 4))
    with engine(daemon) as session, operator(daemon) as ask:

        def verdict() -> tuple[int, str, str]:
            part = ask.explain(namespace=SPACE.digest(), tokens=tokens).shards[0]
            assert part.ended_ms < 60_000
            return (
                part.spans,
                admin_pb2.Verdict.Name(part.verdict).removeprefix("VERDICT_").lower(),
                admin_pb2.Cause.Name(part.cause).removeprefix("CAUSE_").lower(),
            )

        assert verdict() == (0, "never", "unspecified")
        # Being written, then given up.
        chain = chain_of(tokens)
        batch = ReserveBatch(SPACE.digest(), SHARD, chain.key(0), [64], [0], [1000])
        reserved = session.reserve(batch)
        assert verdict() == (0, "writing", "unspecified")
        session.abort(reserved.reservation)
        assert verdict() == (0, "ended", "aborted")
        # Stored, then dropped by an operator.
        store(session, tokens)
        assert verdict() == (4, "served", "unspecified")
        assert ask.evict(keys=chain.key(2)).spans == 1
        assert verdict() == (2, "ended", "operator")
        # Corrupt: reported by its reader.
        with session.acquire(chain.key(1), [SHARD]) as lease:
            span = lease.entry(0)
            daemon.flip(span.offset, span.slab)
            assert session.report_corrupt(lease, [0]) == 1
            wait_for(lambda: verdict() == (1, "ended", "corrupt"))
        # Evicted to make room: the pool has 32 MiB.
        for first in (10_000, 20_000, 30_000):
            with engine(daemon) as second:
                store(second, list(range(first, first + 64 * 12)), size=1 << 20)
        assert verdict() == (0, "ended", "pressure")
        assert daemon.status().counters["spans_discarded"] == 1
        assert daemon.status().counters["spans_discarded_bytes"] == 1000


def test_by_keys_and_what_is_refused(shared_spand: Daemon) -> None:
    with operator(shared_spand) as ask:
        answer = ask.explain(keys=os.urandom(96))
        assert answer.spans == 3
        assert answer.shards[0].verdict == admin_pb2.VERDICT_NEVER
        for request, field in (
            ({}, "tokens"),
            ({"tokens": [1], "keys": bytes(32)}, "tokens"),
            ({"keys": bytes(31)}, "keys"),
            ({"tokens": [1], "namespace": b"short"}, "namespace"),
            ({"tokens": [1], "fields": {"model": "m"}}, "fields.weights"),
            ({"tokens": [1], "fields": SPACE.fields(), "namespace": bytes(32)}, "namespace"),
            ({"keys": bytes(32), "shards": [common_pb2.Shard()]}, "shards[0]"),
        ):
            with pytest.raises(grpc.RpcError) as refused:
                ask.explain(**request)
            assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
            assert dict(refused.value.trailing_metadata())["kmesh-field"] == field
        with pytest.raises(grpc.RpcError) as refused:
            ask.explain(keys=bytes(32 * 8193))
        assert dict(refused.value.trailing_metadata())["kmesh-code"] == "CODE_TOO_LARGE"


def test_a_long_prompt_fits(shared_spand: Daemon) -> None:
    with operator(shared_spand) as ask:
        tokens = [150_000] * 262_144
        assert ask.explain(namespace=SPACE.digest(), tokens=tokens).spans == 4096


def test_few_endings_are_remembered(start_spand: Callable[..., Daemon]) -> None:
    daemon = start_spand(remembered_keys=2)
    daemon.wait_populated()
    with engine(daemon) as session, operator(daemon) as ask:
        chain = store(session, list(range(64 * 5)))
        assert ask.evict(all=True).spans == 5
        verdicts = [
            ask.explain(keys=chain.key(span), shards=[WIRE_SHARD]).shards[0].verdict
            for span in range(5)
        ]
        assert sorted(verdicts) == [admin_pb2.VERDICT_ENDED] * 2 + [admin_pb2.VERDICT_UNKNOWN] * 3


def test_after_a_restart_it_does_not_say_never(start_spand: Callable[..., Daemon]) -> None:
    daemon = start_spand(errors=True)
    os.kill(daemon.child("control"), signal.SIGKILL)
    daemon.wait_ready(times=2)
    with operator(daemon) as ask:
        assert ask.explain(keys=bytes(32)).shards[0].verdict == admin_pb2.VERDICT_UNKNOWN


# Evict.


def test_evict_chooses(spand: Daemon) -> None:
    other = Namespace("another model", "w", "float16", 4, 2, 8)
    with engine(spand) as session, engine(spand, other) as second, operator(spand) as ask:
        chain = store(session, list(range(64 * 5)))
        store(second, list(range(64 * 3)), other)
        with session.acquire(chain.key(0), [SHARD]):
            dry = ask.evict(namespace=SPACE.digest(), dry_run=True)
            assert (dry.spans, dry.bytes, dry.leased, dry.busy) == (4, 4000, 1, 0)
            assert spand.status().spans == 8
            real = ask.evict(namespace=SPACE.digest())
            assert (real.spans, real.bytes, real.leased) == (4, 4000, 1)
            assert spand.status().spans == 4
            # An age that nothing has, and one that all but the leased one have.
            assert ask.evict(min_age_ms=3_600_000).spans == 0
            time.sleep(0.3)
            assert ask.evict(min_idle_ms=100, dry_run=True).spans == 3
            assert ask.evict(all=True).spans == 3
        assert ask.evict(keys=chain.keys).spans == 1
        assert spand.status().spans == 0
        # What is gone is a miss for everyone, at once.
        with session.acquire(chain.keys, [SHARD]) as lease:
            assert lease.hits == 0


def test_evict_says_what_is_being_written(spand: Daemon) -> None:
    with engine(spand) as session, operator(spand) as ask:
        chain = chain_of(list(range(64)))
        session.reserve(ReserveBatch(SPACE.digest(), SHARD, chain.keys, [64], [0], [1000]))
        answer = ask.evict(keys=chain.keys * 2)
        assert (answer.spans, answer.busy) == (0, 1)


def test_evict_refuses_what_is_unclear(shared_spand: Daemon) -> None:
    with operator(shared_spand) as ask:
        for request, field in (
            ({}, "all"),
            ({"dry_run": True}, "all"),
            ({"all": True, "keys": bytes(32)}, "all"),
            ({"namespace": bytes(31)}, "namespace"),
            ({"keys": bytes(33)}, "keys"),
        ):
            with pytest.raises(grpc.RpcError) as refused:
                ask.evict(**request)
            assert dict(refused.value.trailing_metadata())["kmesh-field"] == field


def test_serving_goes_on_while_much_is_evicted(start_spand: Callable[..., Daemon]) -> None:
    daemon = start_spand(host_memory="256MiB", max_spans=65536)
    daemon.wait_populated()
    with engine(daemon) as session, engine(daemon) as reader, operator(daemon) as ask:
        # Who asks may itself not run meanwhile, but not each time.
        for _ in range(10):
            store(session, list(range(64 * 3500)), size=64)
            done = threading.Event()
            pings = itertools.count()

            def ping(done: threading.Event = done, pings: Iterator[int] = pings) -> None:
                while not done.is_set():
                    reader.ping()
                    next(pings)

            thread = threading.Thread(target=ping)
            thread.start()
            try:
                assert ask.evict(all=True).spans == 3500
            finally:
                done.set()
                thread.join()
            if next(pings) > 3:
                return
    raise AssertionError("nobody was served between the turns")


def test_all_of_it_needs_a_token(shared_spand: Daemon) -> None:
    with grpc.insecure_channel(f"unix:{shared_spand.socket_dir}/grpc.sock") as channel:
        for metadata in ((), (("kmesh-session", "no.such"),)):
            ask = Operator(channel, metadata)
            for call in (
                lambda ask=ask: ask.explain(keys=bytes(32)),
                lambda ask=ask: ask.evict(all=True),
                lambda ask=ask: list(ask.drain()),
                lambda ask=ask: next(iter(ask.watch())),
            ):
                with pytest.raises(grpc.RpcError) as refused:
                    call()
                assert refused.value.code() == grpc.StatusCode.UNAUTHENTICATED
    assert not shared_spand.status().draining


# Sessions.


def test_a_session_says_what_it_did(spand: Daemon) -> None:
    with engine(spand) as session, spand.rpc() as (channel, metadata):
        chain = store(session, list(range(64 * 3)))
        again = ReserveBatch(SPACE.digest(), SHARD, chain.keys, [64] * 3, [0] * 3, [1000] * 3)
        assert session.reserve(again).reason == [4, 4, 4]
        stub = sessions_pb2_grpc.SessionsStub(channel)
        with session.acquire(chain.keys + os.urandom(32), [SHARD], prefix=False):
            listed = stub.List(sessions_pb2.ListSessionsRequest(), metadata=metadata, timeout=20)
        (info,) = (s for s in listed.sessions if s.session_id == session.welcome.session_id)
        assert (info.hits, info.misses, info.pending) == (3, 1, 0)
        assert (info.committed, info.committed_bytes, info.leased_bytes) == (3, 3000, 3000)
        assert dict(info.reasons) == {"exists": 3}
