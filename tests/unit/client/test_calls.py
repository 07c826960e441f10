"""Batches: cut to the daemon's limits, joined again, given back when they fail half-way."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import pytest
from google.protobuf.message import Message
from hypothesis import given, settings
from hypothesis import strategies as st

from kmesh import calls, errors
from kmesh.calls import ReserveBatch, Welcome
from kmesh.handles import HandleKind, Location
from kmesh.layout import Shard
from kmesh.v1 import session_socket_pb2, sessions_pb2, spans_pb2
from kmesh.wire import Answer

SHARD = Shard(0, 2, 0, 2)


def welcome(max_batch: int = 1024, max_message_bytes: int = 128 * 1024) -> Welcome:
    return Welcome(
        session_id=1,
        token="secret-token",
        daemon_version="1",
        max_message_bytes=max_message_bytes,
        max_batch=max_batch,
        span_tokens=64,
        sub_tokens=16,
        tile_bytes=65536,
        max_staging_bytes=1 << 20,
        slab_count=1,
        handle_kinds=(HandleKind.MEMFD,),
    )


T = TypeVar("T")


def drive(
    procedure: calls.Procedure[T], daemon: Callable[[Message], Message | Exception]
) -> tuple[T, list[Message]]:
    """Runs a procedure against a function; returns its value and what it sent."""
    sent = []
    try:
        body = next(procedure)
        while True:
            sent.append(body)
            answer = daemon(body)
            if isinstance(answer, Exception):
                body = procedure.throw(answer)
            else:
                body = procedure.send(Answer(answer, 1))
    except StopIteration as done:
        return done.value, sent


def keys(count: int) -> bytes:
    return b"".join(i.to_bytes(32, "little") for i in range(count))


class Daemon:
    """Has the keys below ``known``; its leases and reservations count up."""

    def __init__(self, known: int, fail_at: int = 1 << 30) -> None:
        self.known = known
        self.calls = 0
        self.fail_at = fail_at

    def __call__(self, body: Message) -> Message | Exception:
        self.calls += 1
        if self.calls == self.fail_at:
            return errors.DeadlineExceeded("too late")
        if isinstance(body, spans_pb2.AcquireRequest):
            numbers = [
                int.from_bytes(body.keys[i : i + 32], "little")
                for i in range(0, len(body.keys), 32)
            ]
            entries = [n for n in numbers for _ in body.shards]
            ok = [n < self.known for n in entries]
            return spans_pb2.AcquireResponse(
                lease=self.calls if any(ok) else 0,
                reason=[0 if k else 1 for k in ok],
                slab=[0] * len(ok),
                offset=[n * 65536 if k else 0 for n, k in zip(entries, ok, strict=True)],
                length=[100 if k else 0 for k in ok],
                tokens=[64 if k else 0 for k in ok],
                generation=[3 if k else 0 for k in ok],
                root=[n + 1 if k else 0 for n, k in zip(entries, ok, strict=True)],
            )
        if isinstance(body, spans_pb2.ReserveRequest):
            count = len(body.tokens)
            first = self.calls * 10_000
            return spans_pb2.ReserveResponse(
                reason=[0] * count, reservation=range(first, first + count)
            )
        if isinstance(body, spans_pb2.CommitRequest):
            return spans_pb2.CommitResponse(reason=[0] * len(body.reservation))
        raise AssertionError(body)


@given(
    count=st.integers(0, 60),
    known=st.integers(0, 70),
    shards=st.integers(1, 3),
    max_batch=st.integers(3, 40),
    prefix=st.booleans(),
)
def test_acquire_cut_and_joined_is_acquire(
    count: int, known: int, shards: int, max_batch: int, prefix: bool
) -> None:
    parts = [Shard(i, i + 1, 0, 1) for i in range(shards)]
    procedure = calls.acquire(welcome(max_batch), keys(count), parts, prefix, lambda _: None)
    lease, sent = drive(procedure, Daemon(known))
    assert len(lease) == count * shards
    assert lease.hits == min(count, known)
    for i in range(count):
        for j in range(shards):
            entry = lease.index(i, j)
            if i < known:
                assert lease.entry(i, j) == Location(0, i * 65536, 100, 3)
                assert lease.root[entry] == i + 1
            else:
                assert lease.reason[entry] == 1
                with pytest.raises(LookupError):
                    lease.entry(i, j)
    for body in sent:
        assert isinstance(body, spans_pb2.AcquireRequest)
        assert len(body.keys) // 32 * len(body.shards) <= max_batch
    if prefix:
        per_message = max_batch // shards
        whole = -(-count // per_message)
        assert len(sent) == min(whole, known // per_message + 1)


def test_a_lease_over_several_messages_releases_them_all_once() -> None:
    forgotten: list[Message] = []
    lease, sent = drive(
        calls.acquire(welcome(8), keys(20), [SHARD], True, forgotten.append), Daemon(20)
    )
    assert len(sent) == 3
    assert lease.ids == (1, 2, 3)
    with lease:
        assert not lease.released
    lease.release()
    assert lease.released
    assert forgotten == [spans_pb2.ReleaseRequest(leases=[1, 2, 3])]


def test_an_acquire_that_fails_half_way_holds_nothing() -> None:
    forgotten: list[Message] = []
    procedure = calls.acquire(welcome(8), keys(20), [SHARD], True, forgotten.append)
    with pytest.raises(errors.DeadlineExceeded):
        drive(procedure, Daemon(20, fail_at=3))
    assert forgotten == [spans_pb2.ReleaseRequest(leases=[1, 2])]


def test_an_acquire_answer_of_the_wrong_size_is_given_back() -> None:
    forgotten: list[Message] = []
    procedure = calls.acquire(welcome(), keys(2), [SHARD], True, forgotten.append)
    with pytest.raises(errors.ProtocolError):
        drive(procedure, lambda _: spans_pb2.AcquireResponse(lease=5, reason=[0, 0]))
    assert forgotten == [spans_pb2.ReleaseRequest(leases=[5])]


@pytest.mark.parametrize(
    ("bad_keys", "shards"), [(b"x" * 33, [SHARD]), (b"", []), (bytes(32), [SHARD] * 9)]
)
def test_malformed_acquires_are_refused_here(bad_keys: bytes, shards: list[Shard]) -> None:
    with pytest.raises(errors.ConfigError):
        drive(calls.acquire(welcome(8), bad_keys, shards, True, lambda _: None), Daemon(0))


tokens = st.lists(st.sampled_from([16, 32, 48, 64]), max_size=80)


def batch(token_counts: list[int]) -> ReserveBatch:
    subs = sum(0 if n == 64 else n // 16 - 1 for n in token_counts)
    return ReserveBatch(
        namespace=b"n" * 32,
        shard=SHARD,
        keys=keys(len(token_counts)),
        tokens=token_counts,
        start=[64 * i for i in range(len(token_counts))],
        length=[1 << 40] * len(token_counts),
        sub_keys=b"".join((1000 + i).to_bytes(32, "little") for i in range(subs)),
    )


@settings(deadline=None)
@given(counts=tokens, max_batch=st.integers(1, 100), max_bytes=st.integers(1024, 8192))
def test_reserve_is_cut_to_both_limits_and_joined(
    counts: list[int], max_batch: int, max_bytes: int
) -> None:
    whole = batch(counts)
    limits = welcome(max_batch, max_bytes)
    result, sent = drive(calls.reserve(limits, whole, lambda _: None), Daemon(0))
    assert len(result.reason) == len(result.reservation) == len(counts)
    assert len(set(result.reservation)) == len(counts)
    bodies = [body for body in sent if isinstance(body, spans_pb2.ReserveRequest)]
    for body in bodies:
        frame = session_socket_pb2.Request(id=2**63, deadline_ms=2**31, reserve=body)
        assert frame.ByteSize() <= max_bytes
        assert len(body.tokens) <= max_batch
        expected = sum(0 if n == 64 else n // 16 - 1 for n in body.tokens)
        assert len(body.sub_keys) == 32 * expected
    assert b"".join(body.keys for body in bodies) == whole.keys
    assert b"".join(body.sub_keys for body in bodies) == whole.sub_keys
    assert [n for body in bodies for n in body.start] == list(whole.start)
    assert [n for body in bodies for n in body.tokens] == counts


def test_a_reserve_that_fails_half_way_is_aborted() -> None:
    forgotten: list[Message] = []
    procedure = calls.reserve(welcome(2), batch([64] * 6), forgotten.append)
    with pytest.raises(errors.DeadlineExceeded):
        drive(procedure, Daemon(0, fail_at=3))
    ended = [r for body in forgotten for r in body.reservation]  # type: ignore[attr-defined]
    assert ended == [10_000, 10_001, 20_000, 20_001]
    assert all(len(body.reservation) <= 2 for body in forgotten)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "change",
    [
        {"namespace": b"short"},
        {"keys": bytes(31)},
        {"start": []},
        {"length": [1, 2]},
        {"tokens": [17]},
        {"tokens": [80]},
        {"sub_keys": bytes(32)},
    ],
)
def test_malformed_reserves_are_refused_here(change: dict[str, object]) -> None:
    fields: dict[str, object] = {
        "namespace": b"n" * 32,
        "shard": SHARD,
        "keys": bytes(32),
        "tokens": [64],
        "start": [0],
        "length": [100],
    }
    with pytest.raises(errors.ConfigError):
        drive(
            calls.reserve(welcome(), ReserveBatch(**(fields | change)), lambda _: None),  # type: ignore[arg-type]
            Daemon(0),
        )


@given(count=st.integers(0, 50), max_batch=st.integers(1, 20))
def test_commit_is_cut_and_joined(count: int, max_batch: int) -> None:
    reasons, sent = drive(
        calls.commit(welcome(max_batch), range(1, count + 1), range(count)), Daemon(0)
    )
    assert reasons == [0] * count
    assert len(sent) == -(-count // max_batch)
    assert [r for body in sent for r in body.reservation] == list(range(1, count + 1))  # type: ignore[attr-defined]


def test_corrupt_entries_go_to_the_lease_that_holds_them() -> None:
    lease, _ = drive(calls.acquire(welcome(4), keys(10), [SHARD], True, lambda _: None), Daemon(10))
    procedure = calls.report_corrupt(welcome(4), lease, [0, 5, 9])
    accepted, sent = drive(procedure, lambda _: spans_pb2.ReportCorruptResponse(accepted=1))
    assert accepted == 3
    assert [(body.lease, list(body.entry)) for body in sent] == [(1, [0]), (2, [1]), (3, [1])]  # type: ignore[attr-defined]


def test_welcome_hides_its_token_and_needs_its_limits() -> None:
    body = sessions_pb2.Welcome(
        token="secret-token", max_batch=1, span_tokens=64, sub_tokens=16, max_message_bytes=4096
    )
    body.handle_kinds.extend([1, 99])  # type: ignore[list-item]
    known, _ = drive(calls.hello(sessions_pb2.Hello()), lambda _: body)
    assert known.handle_kinds == (HandleKind.MEMFD,)
    assert known.token == "secret-token"
    assert "secret-token" not in repr(known)
    body.max_batch = 0
    with pytest.raises(errors.ProtocolError):
        drive(calls.hello(sessions_pb2.Hello()), lambda _: body)
    body.max_batch, body.max_message_bytes = 1, 1 << 31
    with pytest.raises(errors.ProtocolError, match="packets"):
        drive(calls.hello(sessions_pb2.Hello()), lambda _: body)
