"""Reservations, commits and eviction."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
from asking import A, B, C, D, E, F, reasons, refused
from contents import NAMESPACE, SHARD, key
from world import World

from kmesh.layout import TILE_BYTES
from kmesh_spand.core import effects as fx
from kmesh_spand.core import events as ev
from kmesh_spand.core import requests as rq
from kmesh_spand.core import results as rs
from kmesh_spand.core import victims
from kmesh_spand.core.codes import Code, Reason
from kmesh_spand.core.policy import LRU, Policy
from kmesh_spand.core.record import decode
from kmesh_spand.core.s3fifo import S3FIFO
from kmesh_spand.core.tenants import Tenancy

# Reserve


def test_one_writer_for_a_key(world: World) -> None:
    one, two = world.connect(), world.connect()
    assert reasons(world.reserve(one, [A, A])) == [0, Reason.PENDING]
    assert reasons(world.reserve(two, [A])) == [Reason.PENDING]
    assert reasons(world.acquire(two, [A])) == [Reason.PENDING]
    world.close(one)
    assert reasons(world.acquire(two, [A])) == [Reason.MISS]
    world.store(two, [A])
    assert reasons(world.reserve(two, [A])) == [Reason.EXISTS]
    world.check()


def test_sizes_that_never_fit_and_memory_that_is_not_there_yet() -> None:
    world = World({0: 8}, populated=False, patience_ms=100)
    one = world.connect()
    full, wait = Reason.POOL_FULL, Reason.NOT_READY
    assert reasons(world.reserve(one, [A], length=9 * TILE_BYTES)) == [Reason.TOO_LARGE]
    assert reasons(world.reserve(one, [A], length=2**40)) == [Reason.TOO_LARGE]
    assert reasons(world.reserve(one, [A])) == [wait]
    world.send(ev.Populated(0, 2 * TILE_BYTES + 5))
    world.store(one, [A, B])
    assert reasons(world.reserve(one, [C, D])) == [wait, wait]
    assert world.core.counters["evicted"] == 0
    world.now += 101
    # It no longer grows: what is there is all there is.
    assert reasons(world.reserve(one, [C], length=3 * TILE_BYTES)) == [full]
    assert world.core.counters["evicted"] == 0
    world.store(one, [C], length=2 * TILE_BYTES)
    assert world.core.counters["evicted"] == 2
    world.check()


def test_without_a_slab_nothing_is_ready() -> None:
    world = World({})
    assert reasons(world.reserve(world.connect(), [A])) == [Reason.NOT_READY]


def test_eviction_clears_a_window_and_nothing_else() -> None:
    """Three neighbours go for a span of three tiles, although older spans lie elsewhere."""
    world = World({0: 8})
    one = world.connect()
    world.store(one, [A, B, C, D, E, F, key("g"), key("h")])
    slots = {row.key: row.offset // TILE_BYTES for row in world.core.views.spans(now_ms=0)}
    names = sorted(slots, key=slots.__getitem__)
    world.acquire(one, [names[1], names[4]])
    answer = world.reserve(one, [key("i")], length=3 * TILE_BYTES)
    assert reasons(answer) == [0]
    left = {row.key for row in world.core.views.spans(now_ms=0) if row.state == "committed"}
    assert left == set(names[:5])
    assert reasons(world.reserve(one, [key("j")], length=3 * TILE_BYTES)) == [Reason.POOL_FULL]
    assert {row.key for row in world.core.views.spans(now_ms=0) if row.state == "committed"} == left
    world.check()


def test_a_full_catalog_evicts_for_a_slot() -> None:
    world = World({0: 8}, max_spans=2)
    one = world.connect()
    world.store(one, [A, B])
    world.acquire(one, [B])
    world.store(one, [C])
    world.acquire(one, [C])
    assert reasons(world.reserve(one, [D])) == [Reason.CATALOG_FULL]
    # A tail's further names are given up where there is no slot for them.
    world = World({0: 8}, max_spans=1)
    one = world.connect()
    world.store(one, [A], tokens=48, sub_keys=(B, C))
    assert reasons(world.acquire(one, [A, B])) == [0, Reason.MISS]
    world.check()


def test_a_session_may_not_take_more_than_its_share() -> None:
    world = World({0: 8}, max_reservations=2, max_leases=1, max_batch=3)
    one = world.connect()
    world.store(one, [A])
    world.reserve(one, [B])
    reserve = (NAMESPACE, SHARD, C + D, [64] * 2, [0] * 2, [1] * 2, b"")
    assert refused(world.ask(rq.Reserve, one, *reserve)) == (Code.EXHAUSTED, "keys")
    world.acquire(one, [A])
    assert refused(world.ask(rq.Acquire, one, A, [SHARD], False)) == (Code.EXHAUSTED, "keys")
    world.check()


def test_a_session_may_not_lease_spans_without_end() -> None:
    world = World({0: 8}, max_leased_spans=2)
    one = world.connect()
    world.store(one, [A])
    world.acquire(one, [A])
    lease = world.acquire(one, [A]).lease
    assert refused(world.ask(rq.Acquire, one, A, [SHARD], False)) == (Code.EXHAUSTED, "keys")
    world.release(one, [lease])
    assert reasons(world.acquire(one, [A])) == [0]
    world.check()


def test_draining_lets_only_what_is_in_flight_finish(world: World) -> None:
    one = world.connect()
    world.store(one, [A])
    number = world.reserve(one, [B]).reservation[0]
    world.send(ev.Drain())
    answer = world.ask(rq.Reserve, one, NAMESPACE, SHARD, C, [64], [0], [1], b"")
    assert refused(answer) == (Code.DRAINING, "")
    assert world.commit(one, [number]) is None
    assert not world.core.idle
    world.settle()
    assert world.core.idle
    assert world.core.views.status().draining
    assert reasons(world.acquire(one, [A, B])) == [0, 0]


# Commit


@pytest.mark.parametrize("offset", [-64, 63, 64 * 3 + 64, 2**63, 2**64 - 64])
def test_staging_offsets_are_checked_before_anything_is_copied(world: World, offset: int) -> None:
    one = world.connect()
    numbers = list(world.reserve(one, [A, B], length=100).reservation)
    answer = world.ask(rq.Commit, one, numbers, [0, offset], 64 * 3 + 100)
    assert refused(answer) == (Code.INVALID_ARGUMENT, "staging_offset[1]")
    assert not world.copies
    answer = world.ask(rq.Commit, one, numbers, [0, 64 * 3], 64 * 3 + 100)
    assert answer is None
    world.settle()
    assert world.answer == rs.CommitResult([0, 0])
    world.check()


def test_commit_is_answered_once_after_its_last_copy(world: World) -> None:
    one, two = world.connect(), world.connect()
    a, b, c = world.reserve(one, [A, B, C]).reservation
    foreign = world.reserve(two, [D]).reservation[0]
    assert world.commit(one, [a, foreign, b, b, c]) is None
    jobs = sorted(world.copies)
    assert len(jobs) == 3
    assert world.commit(one, [a]) == rs.CommitResult([Reason.STALE])
    world.copy_ends(jobs[2])
    world.abort(one, [a])
    world.wanted.pop(b)
    world.copy_ends(jobs[1], ok=False)
    assert world.waiting
    effects = world.core.handle(ev.CopyDone(jobs[0], 5), 0)
    del world.copies[jobs[0]]
    assert effects == [
        fx.Reply(
            one,
            effects[0].request,
            rs.CommitResult(  # type: ignore[union-attr]
                [Reason.ABORTED, Reason.STALE, Reason.COPY_FAILED, Reason.STALE, Reason.OK]
            ),
        )
    ]
    world.waiting.clear()
    assert reasons(world.acquire(one, [A, B, C])) == [Reason.MISS, Reason.MISS, 0]
    assert world.commit(one, []) == rs.CommitResult([])
    assert world.core.handle(ev.CopyDone(jobs[0], 5), 0) == []
    world.check()


def test_record_then_index_then_answer(world: World) -> None:
    one = world.connect()
    number = world.reserve(one, [A], tokens=32, sub_keys=(B,)).reservation[0]
    world.commit(one, [number])
    (job,) = world.copies
    effects = world.core.handle(ev.CopyDone(job, 2**64 - 1), 0)
    assert [type(effect) for effect in effects] == [
        fx.PutRecord,
        fx.PutRecord,
        fx.Publish,
        fx.SpanCommitted,
        fx.Reply,
    ]
    put = effects[0]
    assert isinstance(put, fx.PutRecord)
    record = decode(put.data)
    assert record
    assert (record.root, record.key, record.tokens) == (2**64 - 1, A, 32)


def full(policy: type[Policy]) -> tuple[World, int, int]:
    """A world of sixteen tiles, each a span's, and two sessions; the first has stored them."""
    world = World({0: 16}, policy=policy(64), patience_ms=1)
    world.now += 10
    one, two = world.connect(), world.connect()
    world.store(one, [key(n) for n in range(16)])
    return world, one, two


@pytest.mark.parametrize("policy", [LRU, S3FIFO])
def test_victims_without_room_beside_them_hide_no_others_for_long(
    monkeypatch: pytest.MonkeyPatch, policy: type[Policy]
) -> None:
    """However many there are: each request looks at some, and the next one at others."""
    monkeypatch.setattr(victims, "MAX_TRIES", 4)
    world, one, two = full(policy)
    held = [world.acquire(two, [key(n)]).lease for n in range(0, 12, 2)]
    wide = {"length": 2 * TILE_BYTES}
    assert reasons(world.reserve(one, [key("wide")], **wide)) == [Reason.POOL_FULL]
    assert reasons(world.reserve(one, [key("wide")], **wide)) == [0]
    assert not any(reasons(world.acquire(one, [key(n) for n in range(0, 12, 2)])))
    world.release(two, held)
    world.check()


@pytest.mark.parametrize("policy", [LRU, S3FIFO])
def test_victims_without_room_beside_them_are_in_vain_once(
    monkeypatch: pytest.MonkeyPatch, policy: type[Policy]
) -> None:
    """What is evicted behind them gives them no room; those that it does are found in time."""
    monkeypatch.setattr(victims, "MAX_TRIES", 4)
    world, one, two = full(policy)
    held = [world.acquire(two, [key(n)]).lease for n in range(0, 10, 2)]
    wide = {"length": 2 * TILE_BYTES}
    told = [reasons(world.reserve(one, [key(("wide", n))], **wide)) for n in range(4)]
    assert told == [[Reason.POOL_FULL], [0], [0], [0]]
    seen = world.acquire(one, [key(n) for n in range(9)])
    assert not any(reasons(seen))
    world.release(one, [seen.lease])
    world.release(two, held)
    told = [reasons(world.reserve(one, [key(("late", n))], **wide)) for n in range(2)]
    assert told == [[0], [0]]
    world.check()


@pytest.mark.parametrize("policy", [LRU, S3FIFO])
def test_a_look_that_finds_no_room_leaves_the_order_as_it_is(
    monkeypatch: pytest.MonkeyPatch, policy: type[Policy]
) -> None:
    """What was only looked at was not used: it still goes first."""
    monkeypatch.setattr(victims, "MAX_TRIES", 4)
    world, one, two = full(policy)
    held = [world.acquire(two, [key(n)]).lease for n in range(0, 16, 2)]
    for _ in range(3):
        refusal = world.reserve(one, [key("wide")], length=2 * TILE_BYTES)
        assert reasons(refusal) == [Reason.POOL_FULL]
    world.release(two, held)
    world.store(one, [key(("new", n)) for n in range(4)])
    gone = [n for n in range(16) if reasons(world.acquire(one, [key(n)])) != [0]]
    assert gone == [1, 3, 5, 7]
    world.check()


class Mute(LRU):
    """Names nothing; what it is told is written down."""

    def __init__(self, max_rows: int) -> None:
        super().__init__(max_rows)
        self.told: list[int] = []

    def victims(self) -> Iterator[int]:
        return iter(())

    def discard(self, rows: Sequence[int]) -> None:
        self.told += rows
        super().discard(rows)


def test_what_is_looked_at_without_the_policy_stays_where_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However often one walk meets it: it may be in no order at all."""
    monkeypatch.setattr(victims, "MAX_TRIES", 4)
    policy = Mute(64)
    world = World({0: 8}, policy=policy, patience_ms=1)
    world.now += 10
    one, two = world.connect(), world.connect()
    world.store(one, [key(n) for n in range(8)])
    for n in range(0, 8, 2):
        world.acquire(two, [key(n)])
    policy.told.clear()
    for _ in range(3):
        refusal = world.reserve(one, [key("wide")], length=2 * TILE_BYTES)
        assert reasons(refusal) == [Reason.POOL_FULL]
    assert not policy.told
    world.check()


def test_a_full_quota_changes_no_order_where_another_slab_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(victims, "MAX_TRIES", 4)
    tenancy = Tenancy(default_quota=16 * TILE_BYTES)
    world = World({0: 16, 1: 16}, tenancy=tenancy, patience_ms=1)
    world.now += 10
    one, two = world.connect(), world.connect()
    world.store(one, [key(n) for n in range(16)])
    for n in range(0, 16, 2):
        world.acquire(two, [key(n)])
    assert reasons(world.reserve(one, [key("wide")], length=2 * TILE_BYTES)) == [0]
    gone = [n for n in range(16) if reasons(world.acquire(one, [key(n)])) != [0]]
    assert gone == [1, 3]
    world.check()


def test_staging_outlives_its_session_while_a_copy_reads_it(world: World) -> None:
    one, two = world.connect(), world.connect()
    a, b, _ = world.reserve(one, [A, B, C], length=2 * TILE_BYTES).reservation
    world.commit(one, [a, b])
    first, second = sorted(world.copies)
    world.close(one)
    assert world.closed == {one}
    assert world.core.views.status().slabs[0].used == 4 * TILE_BYTES
    assert reasons(world.reserve(two, [A], length=5 * TILE_BYTES)) == [Reason.POOL_FULL]
    world.copy_ends(first)
    assert world.closed == {one}
    world.copy_ends(second, ok=False)
    assert not world.closed
    assert not world.index
    assert world.core.views.status().slabs[0].used == 0
    world.close(two)
    assert not world.closed
    world.check()


def test_generations_tell_tenants_of_a_slot_apart() -> None:
    world = World({0: 1}, max_spans=1)
    one = world.connect()
    seen = []
    for name in (A, B, C):
        world.store(one, [name])
        answer = world.acquire(one, [name])
        seen.append(answer.generation[0])
        world.release(one, [answer.lease])
        if name == B:
            world.restart()
            world.settle()
            world.send(ev.GraceEnded())
            one = world.connect()
    assert seen == [1, 2, 3]


# Policies that fail


class Raising(Policy):
    def add(self, rows: Sequence[int]) -> None:
        raise RuntimeError("add")

    def discard(self, rows: Sequence[int]) -> None:
        raise RuntimeError("discard")

    def victims(self) -> Iterator[int]:
        raise RuntimeError("victims")


class Silent(Raising):
    def add(self, rows: Sequence[int]) -> None: ...

    def discard(self, rows: Sequence[int]) -> None: ...

    def victims(self) -> Iterator[int]:
        return iter(())


class Lying(LRU):
    def victims(self) -> Iterator[int]:
        while True:
            yield from (0, -1, 1, 10**9)


@pytest.mark.parametrize("policy", [Raising(), Silent(), Lying(64)])
def test_a_failing_policy_is_survived(policy: Policy) -> None:
    world = World({0: 4}, policy=policy)
    one = world.connect()
    world.store(one, [A, B, C, D])
    first = next(row.key for row in world.core.views.spans(now_ms=0) if row.slot == 0)
    world.acquire(one, [first])
    for n in range(20):
        world.store(one, [key(n)])
    assert reasons(world.acquire(one, [first])) == [0]
    assert world.core.counters["evicted"] == 20
    assert world.core.counters["policy_faults"] >= 20
    world.check()
