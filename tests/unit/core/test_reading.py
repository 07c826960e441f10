"""Leases, suspicion, and what the core shows."""

from __future__ import annotations

import sys

import pytest
from asking import A, B, C, D, E, F, reasons, refused
from contents import NAMESPACE, OTHER_SHARD, SHARD, key
from world import TOOL, World

from kmesh.handles import Location
from kmesh.layout import TILE_BYTES
from kmesh_spand.core import events as ev
from kmesh_spand.core import requests as rq
from kmesh_spand.core import results as rs
from kmesh_spand.core.codes import Code, Reason

# Leases


def test_what_acquire_leased_is_there(world: World) -> None:
    """Eviction takes other spans, and refuses when all that is left is leased."""
    one = world.connect()
    world.store(one, [A, B], length=3 * TILE_BYTES)
    lease = world.acquire(one, [A]).lease
    world.store(one, [C], length=3 * TILE_BYTES)
    assert reasons(world.acquire(one, [A, B, C])) == [0, Reason.MISS, 0]
    assert reasons(world.reserve(one, [D], length=3 * TILE_BYTES)) == [Reason.POOL_FULL]
    assert world.core.counters["evicted"] == 1
    world.release(one, [lease])
    world.check()


def test_leases_end_with_their_session_only(world: World) -> None:
    scheduler, worker = world.connect("e"), world.connect("e")
    world.store(worker, [A, B])
    mine, other = world.acquire(scheduler, [A]).lease, world.acquire(worker, [A, B]).lease
    answer = world.release(worker, [mine, other, other, 0, 77])
    assert (answer.released, answer.refused) == (1, [mine, other, 0, 77])
    assert world.core.counters["release_refused"] == 4
    info = world.core.views.session_info(scheduler)
    assert info
    assert (info.leases, info.leased_spans, info.leased_bytes) == (1, 1, TILE_BYTES)
    world.close(scheduler)
    status = world.core.views.status()
    assert (status.leases, status.leased_spans, status.leased_bytes) == (0, 0, 0)
    assert world.core.views.session_info(scheduler) is None
    world.check()


def test_a_lease_does_not_end_by_time(world: World) -> None:
    one = world.connect()
    world.store(one, [A])
    lease = world.acquire(one, [A]).lease
    # Its request waits in a queue for a year, while others need all the room there is.
    for _ in range(12):
        world.now += 30 * 86_400_000
        world.reserve(one, [key(world.now)], length=5 * TILE_BYTES)
    assert world.core.views.status().leases == 1
    assert reasons(world.acquire(one, [A])) == [0]
    assert world.release(one, [lease]).released == 1
    world.check()


def test_asking_again_costs_nothing(world: World) -> None:
    one = world.connect()
    world.store(one, [A])
    leases = [world.acquire(one, [A, A]).lease for _ in range(100)]
    assert len(set(leases)) == 100
    assert world.core.views.spans(now_ms=world.now)[0].leases == 200
    world.release(one, leases)
    assert world.core.views.spans(now_ms=world.now)[0].leases == 0
    world.check()


def test_prefix_stops_at_the_first_key_that_is_not_whole(world: World) -> None:
    one = world.connect()
    world.store(one, [A, B, C])
    world.store(one, [A, C], shard=OTHER_SHARD)
    both = [SHARD, OTHER_SHARD]
    miss = Reason.MISS
    assert reasons(world.acquire(one, [A, B, C], both, prefix=True)) == [0, 0] + [miss] * 4
    assert reasons(world.acquire(one, [A, B, C], both)) == [0, 0, 0, miss, 0, 0]
    assert reasons(world.acquire(one, [B, A], both[::-1], prefix=True)) == [miss] * 4
    assert reasons(world.acquire(one, [A, D, B], prefix=True)) == [0, miss, miss]
    world.reserve(one, [D])
    assert reasons(world.acquire(one, [A, D, B], prefix=True)) == [0, Reason.PENDING, miss]
    assert world.acquire(one, [D, A], prefix=True).lease == 0
    assert world.acquire(one, []).lease == 0
    world.check()


def test_a_tail_is_found_by_every_sub_key(world: World) -> None:
    one = world.connect()
    subs = (key("16"), key("32"))
    world.store(one, [A], tokens=48, sub_keys=subs)
    answer = world.acquire(one, [*subs, A])
    assert reasons(answer) == [0, 0, 0]
    assert list(answer.tokens) == [48] * 3
    assert len(set(answer.offset)) == 1
    assert reasons(world.reserve(one, [subs[0]], tokens=16)) == [Reason.EXISTS]
    world.release(one, [answer.lease])
    world.store(one, [B], length=8 * TILE_BYTES)
    assert reasons(world.acquire(one, [*subs, A])) == [Reason.MISS] * 3
    world.check()


def test_an_earlier_owner_keeps_a_sub_key(world: World) -> None:
    one = world.connect()
    short = key("16")
    world.store(one, [short], tokens=16)
    world.store(one, [A], tokens=32, sub_keys=(short,))
    assert list(world.acquire(one, [short, A]).tokens) == [16, 32]
    world.check()


def test_oldest_goes_first_and_a_chain_from_its_end() -> None:
    world = World({0: 4})
    one = world.connect()
    world.store(one, [A, B, C, D])
    world.release(one, [world.acquire(one, [B]).lease])
    world.store(one, [E])
    assert reasons(world.acquire(one, [A])) == [Reason.MISS]
    world.release(one, [world.acquire(one, [B, C, D, E]).lease])
    world.store(one, [F])
    assert reasons(world.acquire(one, [B, C, D, E, F])) == [0, 0, 0, Reason.MISS, 0]


# Suspicion


def test_only_an_engine_that_leases_a_span_is_told_its_place(world: World) -> None:
    one, same, other = world.connect("e"), world.connect("e"), world.connect()
    world.store(one, [A, B], length=2 * TILE_BYTES - 1)
    answer = world.acquire(one, [A, C, B])
    place = world.core.place(one, answer.lease, 2)
    assert place == Location(
        answer.slab[2], answer.offset[2], 2 * TILE_BYTES - 1, answer.generation[2]
    )
    assert world.core.place(same, answer.lease, 2) == place
    for session, lease, entry in (
        (other, answer.lease, 2),
        (77, answer.lease, 2),
        (one, answer.lease + 1, 2),
        (one, answer.lease, 1),
        (one, answer.lease, 3),
        (one, answer.lease, -1),
    ):
        assert world.core.place(session, lease, entry) is None, (session, lease, entry)
    # What somebody distrusts is not handed on.
    world.ask(rq.ReportCorrupt, one, answer.lease, [0])
    assert world.core.place(one, answer.lease, 0) is None
    world.release(one, [answer.lease])
    assert world.core.place(one, answer.lease, 2) is None
    world.check()


def test_a_reported_span_is_read_again_before_it_is_served(world: World) -> None:
    one, two, tool = world.connect("e"), world.connect("e"), world.connect()
    world.store(one, [A, B])
    answer = world.acquire(one, [C, A, B])
    assert refused(world.ask(rq.ReportCorrupt, tool, answer.lease, [1])) == (
        Code.NOT_FOUND,
        "lease",
    )
    # A worker of the engine may report what its scheduler leased.
    assert world.ask(rq.ReportCorrupt, two, answer.lease, [0, 1, 1, 9, -1]) == (
        rs.ReportCorruptResult(2)
    )
    assert reasons(world.acquire(one, [A])) == [Reason.PENDING]
    assert reasons(world.reserve(one, [A])) == [Reason.PENDING]
    world.settle()
    assert reasons(world.acquire(one, [A])) == [0]
    assert world.core.counters["corrupt_false"] == 1
    world.check()


def test_every_report_leads_to_a_verification(world: World) -> None:
    one = world.connect()
    world.store(one, [A])
    lease = world.acquire(one, [A]).lease
    for _ in range(3):
        world.ask(rq.ReportCorrupt, one, lease, [0])
        assert len(world.verifies) == 1
        world.settle()
        assert reasons(world.acquire(one, [A])) == [0]
    world.check()


@pytest.mark.parametrize("released", ["before", "after"])
def test_bad_bytes_are_dropped_and_their_range_waits_for_the_last_reader(
    world: World, released: str
) -> None:
    one = world.connect()
    world.store(one, [A], length=8 * TILE_BYTES)
    lease = world.acquire(one, [A]).lease
    world.flip(0, 3)
    world.ask(rq.ReportCorrupt, one, lease, [0])
    if released == "before":
        world.release(one, [lease])
    world.settle()
    assert reasons(world.acquire(one, [A])) == [Reason.MISS]
    assert world.core.counters["corrupt"] == 1
    if released == "after":
        assert world.core.views.spans(now_ms=0)[0].state == "doomed"
        assert reasons(world.reserve(one, [A])) == [Reason.POOL_FULL]
        world.release(one, [lease])
    world.store(one, [A])
    world.check()


# Cost


def test_closing_costs_what_was_held_not_what_there_is() -> None:
    """Counted in lines of Python that run, not in seconds."""
    costs = []
    for stored in (20, 100):
        world = World({0: 512}, max_spans=512, max_batch=512)
        one, two = world.connect(), world.connect()
        for n in range(stored):
            world.store(one, [key(n)])
        world.acquire(two, [key(n) for n in range(10)])
        world.reserve(
            two,
            [
                key(
                    "r",
                ),
                key("s"),
            ],
        )
        lines = 0

        def count(frame: object, event: str, arg: object) -> object:
            nonlocal lines
            lines += event == "line"
            return count

        before = sys.gettrace()
        sys.settrace(count)  # type: ignore[arg-type]
        try:
            world.core.handle(ev.SessionClosed(two), 0)
        finally:
            sys.settrace(before)
        costs.append(lines)
    assert costs[1] < costs[0] * 1.2


# Views


def test_views(world: World) -> None:
    one = world.connect("e", TOOL)
    world.store(one, [A, B, C])
    number = world.reserve(one, [D]).reservation[0]
    world.now += 10_000
    lease = world.acquire(one, [A]).lease
    rows = world.core.views.spans(now_ms=world.now)
    assert [row.slot for row in rows] == [0, 1, 2, 3]
    assert [row.state for row in rows] == ["committed"] * 3 + ["reserved"]
    by_key = {row.key: row for row in rows}
    assert by_key[A].leases == 1
    assert by_key[A].idle_ms == 0
    assert 9_900 <= by_key[B].idle_ms <= 10_100
    assert 9_900 <= by_key[A].age_ms <= 10_100
    assert [row.slot for row in world.core.views.spans(0, 2, now_ms=world.now)] == [1, 2]
    assert world.core.views.spans(2, 5, NAMESPACE, now_ms=world.now)[0].key == D
    assert world.core.views.spans(namespace=key("other"), now_ms=world.now) == []
    (space,) = world.core.views.namespaces()
    assert (space.namespace, space.spans, space.bytes) == (NAMESPACE, 3, 3 * TILE_BYTES)
    status = world.core.views.status()
    assert (status.spans, status.slots, status.reservations) == (3, 4, 1)
    assert (status.leased_bytes, status.index_entries) == (TILE_BYTES, 3)
    assert status.slabs[0].used == 4 * TILE_BYTES
    assert world.ask(rq.Abort, one, [number, number, 99]) == rs.AbortResult(1)
    world.wanted.clear()
    world.release(one, [lease])
    info = world.core.views.session_info(one)
    assert info
    assert (info.reservations, info.reserved_bytes, info.leases) == (0, 0, 0)
    world.check()
