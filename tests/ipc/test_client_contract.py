"""What a session may rely on: one suite for the real daemon and for the fake of ``kmesh.testing``.

Whatever the fake answers otherwise than the daemon is found here.
"""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import pytest

from kmesh import errors
from kmesh.keys import KeyChain, Namespace
from kmesh.layout import TILE_BYTES, Shard
from kmesh.session import ReserveBatch, Role, Session
from kmesh.store import put_spans, read_span
from kmesh.testing import FakeDaemon
from kmesh.v1 import common_pb2 as pb

SHARD = Shard(0, 2, 0, 2)
OTHER = Shard(2, 4, 0, 2)
SPACE = Namespace("contract", "w", "float32", 4, 2, 8)

Connect = Callable[..., Session]


@pytest.fixture(params=["fake", "daemon"])
def connect(request: pytest.FixtureRequest) -> Iterator[Connect]:
    """Opens sessions, which are closed at the end of the test."""
    with contextlib.ExitStack() as stack:
        if request.param == "fake":
            dial: Connect = stack.enter_context(FakeDaemon()).connect
        else:
            dial = partial(Session.connect, request.getfixturevalue("spand").socket_dir)

        def connect(role: Role = Role.TOOL, **kw: object) -> Session:
            return stack.enter_context(dial(role=role, **kw))

        yield connect


def until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come true"
        time.sleep(0.01)


def reserve(keys: bytes, shard: Shard = SHARD, **kw: Sequence[int] | bytes) -> ReserveBatch:
    """Full spans of 1,000 bytes, unless said otherwise."""
    count = len(keys) // 32
    fields: dict[str, object] = {
        "tokens": [64] * count,
        "start": range(0, 64 * count, 64),
        "length": [1000] * count,
    }
    return ReserveBatch(SPACE.digest(), shard, keys, **(fields | kw))  # type: ignore[arg-type]


def test_store_then_read_from_another_session(connect: Connect) -> None:
    writer, reader = connect(), connect()
    lengths = [1, 4095, TILE_BYTES, TILE_BYTES + 1, 3 * TILE_BYTES - 7]
    payloads = [os.urandom(n) for n in lengths]
    keys = os.urandom(32 * len(lengths))
    staging = writer.staging(sum(lengths))
    assert put_spans(writer, staging, reserve(keys, length=lengths), payloads) == [0] * 5
    assert reader.index.probe(keys, [SHARD.code()]).hits == 5
    with reader.acquire(keys, [SHARD]) as lease:
        assert lease.hits == 5
        assert list(lease.length) == lengths
        assert list(lease.tokens) == [64] * 5
        for i, payload in enumerate(payloads):
            assert lease.entry(i).offset % TILE_BYTES == 0
            assert read_span(reader, lease, i) == payload


def test_positions_are_said_to_who_asks(connect: Connect) -> None:
    """A segment's tail, found by a part of it too, and what is missing."""
    session = connect()
    keys, parts, missing = os.urandom(64), os.urandom(64), os.urandom(32)
    batch = reserve(keys, tokens=[64, 48], start=[37, 101], sub_keys=parts)
    put_spans(session, session.staging(4096), batch, [b"a" * 1000, b"b" * 1000])
    with session.acquire(missing + keys + parts, [SHARD], prefix=False, positions=True) as lease:
        assert list(lease.reason) == [pb.REASON_MISS, 0, 0, 0, 0]
        assert list(lease.start) == [0, 37, 101, 101, 101]
        assert list(lease.tokens) == [0, 64, 48, 48, 48]
    with session.acquire(keys + missing * 2000, [SHARD], positions=True) as lease:
        assert list(lease.start[:3]) == [37, 101, 0]
        assert len(lease.start) == len(lease) == 2002
    with session.acquire(keys, [SHARD]) as lease:
        assert len(lease.start) == 0
        assert lease.hits == 2


def test_prefix_stops_where_a_shard_is_missing(connect: Connect) -> None:
    session = connect()
    keys = os.urandom(32 * 4)
    staging = session.staging(1 << 16)
    put_spans(session, staging, reserve(keys), [bytes(1000)] * 4)
    put_spans(session, staging, reserve(keys[:64], shard=OTHER), [bytes(1000)] * 2)
    with session.acquire(keys, [SHARD, OTHER]) as lease:
        assert lease.hits == 2
        assert list(lease.reason[:4]) == [0] * 4
        assert lease.reason[5] == pb.REASON_MISS
        assert list(lease.reason[6:]) == [pb.REASON_MISS] * 2
    with session.acquire(keys, [SHARD, OTHER], prefix=False) as lease:
        assert lease.hits == 2
        assert [lease.reason[i] for i in (4, 6)] == [0, 0]
    with session.acquire(keys, [SHARD]) as lease:
        assert lease.hits == 4


def test_what_is_not_there(connect: Connect) -> None:
    session = connect()
    with session.acquire(os.urandom(64), [SHARD]) as lease:
        assert lease.hits == 0
        assert lease.ids == ()
        assert set(lease.reason) == {pb.REASON_MISS}
    with session.acquire(b"", [SHARD]) as lease:
        assert lease.hits == len(lease) == 0


def test_a_gpu_on_which_the_daemon_has_nothing_is_refused(connect: Connect) -> None:
    session, gpu = connect(), "GPU-00000000-0000-0000-0000-000000000000"
    with pytest.raises(errors.InvalidArgument) as failed:
        session.acquire(os.urandom(32), [SHARD], device=gpu)
    assert failed.value.field == "acquire.device"
    with pytest.raises(errors.InvalidArgument) as failed:
        session.reserve(replace(reserve(os.urandom(32)), device=gpu))
    assert failed.value.field == "reserve.device"


def test_nothing_is_visible_before_commit(connect: Connect) -> None:
    writer, reader = connect(), connect()
    key = os.urandom(32)
    staging = writer.staging(4096)
    reserved = writer.reserve(reserve(key))
    assert reserved.reason == [0]
    assert reader.index.probe(key, [SHARD.code()]).hits == 0
    with reader.acquire(key, [SHARD]) as lease:
        assert lease.hits == 0
        assert lease.reason[0] == pb.REASON_PENDING
    assert reader.reserve(reserve(key)).reason == [pb.REASON_PENDING]
    staging.view()[:1000] = b"a" * 1000
    assert writer.commit(reserved.reservation, [0]) == [0]
    assert reader.index.probe(key, [SHARD.code()]).hits == 1
    assert reader.reserve(reserve(key)).reason == [pb.REASON_EXISTS]
    assert reader.reserve(reserve(key)).reservation == [0]


def test_commit_answers_for_each_reservation(connect: Connect) -> None:
    session, stranger = connect(), connect()
    keys = os.urandom(96)
    session.staging(8192)
    stranger.staging(8192)
    reserved = session.reserve(reserve(keys)).reservation
    assert stranger.commit(reserved[:1], [0]) == [pb.REASON_STALE]
    assert session.abort(reserved[1:2]) == 1
    assert session.abort(reserved[1:2]) == 0
    assert session.commit([*reserved, 987654], [0] * 4) == [0, pb.REASON_STALE, 0, pb.REASON_STALE]
    assert session.commit(reserved, [0] * 3) == [pb.REASON_STALE] * 3


def test_offsets_outside_of_the_staging_are_refused(connect: Connect) -> None:
    session = connect()
    reservation = session.reserve(reserve(os.urandom(32))).reservation
    with pytest.raises(errors.RequestError):
        session.commit(reservation, [0])
    size = session.staging(4096).size
    for offset in (size, size - 960, 1 << 60, 1):
        with pytest.raises(errors.InvalidArgument) as refused:
            session.commit(reservation, [offset])
        assert "staging_offset" in refused.value.field
    assert session.commit(reservation, [size - 1024]) == [0]


def test_a_session_takes_all_with_it(connect: Connect) -> None:
    writer, reader = connect(), connect()
    keys = os.urandom(64)
    put_spans(writer, writer.staging(4096), reserve(keys[:32]), [bytes(1000)])
    assert writer.reserve(reserve(keys[32:])).reason == [0]
    lease = writer.acquire(keys[:32], [SHARD])
    writer.close()
    lease.release()
    until(lambda: reader.acquire(keys[32:], [SHARD]).reason[0] == pb.REASON_MISS)
    with reader.acquire(keys[:32], [SHARD]) as mine:
        assert mine.hits == 1


def test_sub_keys_find_the_span(connect: Connect) -> None:
    session = connect()
    chain = KeyChain(SPACE.digest(), span_tokens=64, sub_tokens=16)
    chain.extend([random.randrange(1 << 16) for _ in range(64 + 48)])
    subs = chain.sub_keys(1, 48)
    keys = chain.key(0) + subs[-1]
    batch = reserve(keys, tokens=[64, 48], sub_keys=b"".join(subs[:-1]))
    payloads = [os.urandom(1000) for _ in range(2)]
    assert put_spans(session, session.staging(4096), batch, payloads) == [0, 0]
    with session.acquire(b"".join(subs), [SHARD], prefix=False) as lease:
        assert lease.hits == 3
        assert list(lease.tokens) == [48] * 3
        assert len(set(lease.offset)) == 1
        assert read_span(session, lease, 0) == payloads[1]


def test_workers_read_what_their_scheduler_leased(connect: Connect) -> None:
    engine = {"engine_id": "engine-1", "namespace": SPACE}
    scheduler = connect(Role.SCHEDULER, **engine)
    worker = connect(Role.WORKER, **engine)
    key, payload = os.urandom(32), os.urandom(1000)
    put_spans(worker, worker.staging(4096), reserve(key), [payload])
    lease = scheduler.acquire(key, [SHARD])
    assert read_span(worker, lease, 0) == payload
    assert worker.report_corrupt(lease, [0]) == 1
    assert scheduler.report_corrupt(lease, [0]) == 1
    with pytest.raises(errors.RequestError):
        connect().report_corrupt(lease, [0])
    # A good span survives being reported.
    scheduler.release(lease)
    until(lambda: scheduler.acquire(key, [SHARD]).hits == 1)


def test_sessions_of_one_engine_must_agree(connect: Connect) -> None:
    connect(Role.SCHEDULER, engine_id="engine-2", namespace=SPACE)
    other = Namespace("contract", "w", "float16", 4, 2, 8)
    with pytest.raises(errors.NamespaceMismatch) as refused:
        connect(Role.WORKER, engine_id="engine-2", namespace=other)
    assert refused.value.field == "hello.namespace.dtype"


def test_slabs_and_staging_have_their_limits(connect: Connect) -> None:
    session = connect()
    assert session.welcome.slab_count >= 1
    assert session.slab(0) is session.slab(0)
    with pytest.raises(errors.NotFound):
        session.slab(session.welcome.slab_count)
    with pytest.raises(errors.RequestError):
        session.staging(1 << 50)
    staging = session.staging(4096)
    assert staging.size >= 4096
    # Who did not hear the answer asks again, and gets the same memory.
    staging.view()[:4] = b"abcd"
    assert session.staging(4096).view()[:4] == b"abcd"
    with pytest.raises(errors.InvalidArgument, match="has its 4096 bytes already"):
        session.staging(8192)


def test_spans_that_no_slab_can_hold(connect: Connect) -> None:
    session = connect()
    answer = session.reserve(reserve(os.urandom(32), length=[1 << 40]))
    assert answer.reason == [pb.REASON_TOO_LARGE]
    assert answer.reservation == [0]


def test_calls_may_be_pipelined(connect: Connect) -> None:
    session = connect()
    keys = os.urandom(32 * 40)
    put_spans(session, session.staging(1 << 16), reserve(keys), [bytes(1000)] * 40)
    futures = [session.acquire_async(keys[: 32 * (i % 40 + 1)], [SHARD]) for i in range(300)]
    for i, future in enumerate(futures):
        with future.result(10) as lease:
            assert lease.hits == i % 40 + 1
    session.ping()
    assert session.pending == 0
