"""What a new epoch takes over."""

from __future__ import annotations

import pytest
from asking import A, B, C, D, E, F, reasons
from contents import OTHER_SHARD, key
from world import World

from kmesh.layout import TILE_BYTES
from kmesh_spand.core import effects as fx
from kmesh_spand.core import events as ev
from kmesh_spand.core import requests as rq
from kmesh_spand.core import results as rs
from kmesh_spand.core.codes import Reason
from kmesh_spand.core.core import Core
from kmesh_spand.core.record import Record
from kmesh_spand.core.states import State
from kmesh_spand.core.tenants import decode_owner


def test_recovered_spans_are_served_after_a_verification(world: World) -> None:
    one = world.connect()
    world.store(one, [A, B, C])
    world.store(one, [D], tokens=48, sub_keys=(E, F))
    world.flip(0, 1)
    damaged = next(row.key for row in world.core.views.spans(now_ms=0) if row.offset == TILE_BYTES)
    world.restart()
    assert len(world.verifies) == world.config.max_verify
    assert world.core.views.status().recovering == 4
    one = world.connect()
    assert not world.index
    assert reasons(world.acquire(one, [A, E, key("x")])) == [
        Reason.PENDING,
        Reason.PENDING,
        Reason.MISS,
    ]
    world.settle()
    for name in (A, B, C, D, E, F):
        expected = Reason.MISS if name == damaged else Reason.OK
        assert reasons(world.acquire(one, [name])) == [expected]
    counters = world.core.counters
    assert (counters["recovered"], counters["verified"], counters["corrupt"]) == (4, 3, 1)
    world.check()


def test_a_wanted_span_is_verified_first() -> None:
    world = World({0: 8}, max_verify=1)
    one = world.connect()
    world.store(one, [A, B, C, D])
    world.restart()
    one = world.connect()
    last = world.core.views.spans(now_ms=0)[-1]
    world.acquire(one, [last.key])
    (job,) = world.verifies
    world.verify_ends(job)
    (verify,) = world.verifies.values()
    assert verify.offset == last.offset
    # A whole prefix is wanted at once, not key by key.
    names = [row.key for row in world.core.views.spans(now_ms=0) if row.state == "recovered"]
    answer = world.acquire(one, [last.key, *names], prefix=True)
    assert reasons(answer)[0] == Reason.PENDING
    assert list(world.core._verifier._urgent[0]) == [
        row.slot + 1 for row in world.core.views.spans(now_ms=0) if row.key in names
    ]


def test_a_payload_that_kills_the_worker_is_given_up() -> None:
    world = World({0: 8}, max_verify=1)
    world.store(world.connect(), [A])
    world.restart()
    for _ in range(3):
        assert len(world.verifies) == 1
        world.verify_ends(min(world.verifies), answered=False)
    assert not world.verifies
    assert world.core.counters["corrupt"] == 1
    assert world.core.views.spans(now_ms=0) == []
    world.check()


def test_ranges_of_an_earlier_epoch_rest_until_grace_has_ended() -> None:
    world = World({0: 3}, max_spans=4)
    world.store(world.connect(), [A, B])
    bad = next(row for row in world.core.views.spans(now_ms=0) if row.key == A)
    world.flip(0, bad.offset // TILE_BYTES)
    world.restart()
    world.settle()
    one = world.connect()
    world.store(one, [C])
    assert reasons(world.reserve(one, [D])) == [Reason.NOT_READY]
    assert world.core.counters["evicted"] == 0
    world.check()
    world.send(ev.GraceEnded())
    world.store(one, [D])
    assert world.core.counters["evicted"] == 0
    world.check()


def test_records_that_contradict_each_other_are_dropped(world: World) -> None:
    world.store(world.connect(), [A, B, C, D], length=2 * TILE_BYTES)
    rows = {row.key: row for row in world.core.views.spans(now_ms=0)}
    catalog = dict(world.catalog)
    catalog[40] = catalog[rows[A].slot]
    for name, field, value in (
        (B, "offset", rows[A].offset + TILE_BYTES),
        (C, "tokens", 65),
        (D, "offset", 7 * TILE_BYTES),
    ):
        record = world.record(rows[name].slot)
        values = {n: getattr(record, n) for n in record.__slots__}
        catalog[rows[name].slot] = type(record)(**{**values, field: value}).encode()
    world.restart(catalog)
    world.settle()
    world.check()
    left = [row.key for row in world.core.views.spans(now_ms=0)]
    assert left in ([A], [B])  # whichever of the two that overlap has the lower slot
    assert world.core.counters["recovered_dropped"] == 4
    assert reasons(world.acquire(world.connect(), [C, D])) == [Reason.MISS] * 2
    world.send(ev.GraceEnded())
    world.check()


def test_slabs_and_slots_that_are_gone_take_their_records_along(world: World) -> None:
    world.store(world.connect(), [A, B, C, D])
    records, _ = world.read_catalog()
    core = Core(type(world.config)(max_spans=2))
    core.handle(ev.Recovered(records), 0)
    assert core.counters["recovered_dropped"] == 2
    core.check()
    effects = core.handle(ev.GraceEnded(), 0)
    assert [type(effect) for effect in effects] == [fx.SpanEnded, fx.PutRecord] * 2
    core.check()
    core.handle(ev.SlabAdded(0, 8 * TILE_BYTES), 0)
    assert core.views.status().spans == 0
    with pytest.raises(ValueError, match="slab 0"):
        core.handle(ev.SlabAdded(0, 8 * TILE_BYTES), 0)


def test_records_of_a_slab_that_is_expected_wait_for_it(world: World) -> None:
    world.store(world.connect(), [A, B])
    records, _ = world.read_catalog()
    core = Core(world.config)
    core.handle(ev.Recovered(records), 0)
    core.handle(ev.GraceEnded(frozenset({0})), 0)
    assert core.counters["recovered_dropped"] == 0
    core.handle(ev.SlabAdded(0, 8 * TILE_BYTES, decode_owner(world.owners[0])), 0)
    assert core.counters["recovered"] == 2
    core.check()


def test_what_a_record_that_is_dropped_after_grace_named_is_free(world: World) -> None:
    world.store(world.connect(), [A, B])
    (slot,) = [row.slot for row in world.core.views.spans(now_ms=0) if row.key == A]
    good = world.record(slot)
    values = {name: getattr(good, name) for name in good.__slots__}
    world.catalog[slot] = type(good)(**{**values, "tokens": 65}).encode()
    records, _ = world.read_catalog()
    core = Core(world.config)
    core.handle(ev.Recovered(records), 0)
    core.handle(ev.GraceEnded(frozenset({0})), 0)
    core.handle(ev.SlabAdded(0, 8 * TILE_BYTES, decode_owner(world.owners[0])), 0)
    assert core.counters["recovered_dropped"] == 1
    assert core.views.status().slabs[0].used == good.length
    core.check()


def test_a_catalog_without_spans_is_not_kept(world: World) -> None:
    world.store(world.connect(), [A, B])
    ended = {
        slot: Record(state=State.FREE, generation=world.record(slot).generation).encode()
        for slot in world.catalog
    }
    world.restart(ended)
    assert len(world.catalog) == len(ended) > 0
    assert not len(world.core._recovery._records)
    world.check()


def test_of_two_records_with_one_key_one_is_dropped(world: World) -> None:
    world.store(world.connect(), [A, B])
    catalog = dict(world.catalog)
    slot = next(row.slot for row in world.core.views.spans(now_ms=0) if row.key == B)
    record = world.record(slot)
    values = {name: getattr(record, name) for name in record.__slots__}
    catalog[slot] = type(record)(**{**values, "key": A}).encode()
    world.restart(catalog)
    world.check()
    assert [row.key for row in world.core.views.spans(now_ms=0)] == [A]
    assert world.core.counters["recovered_dropped"] == 1
    # What the dropped one named is not reused yet either.
    assert world.core.views.status().slabs[0].used == 2 * TILE_BYTES
    world.send(ev.GraceEnded())
    assert world.core.views.status().slabs[0].used == TILE_BYTES
    world.check()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("root", 99),
        ("offset", 7 * TILE_BYTES),
        ("shard", OTHER_SHARD),
        ("namespace", key("other")),
        ("tokens", 48),
        ("tokens", 8),
        ("primary", 60),
        ("key", A),
    ],
)
def test_an_alias_that_does_not_fit_its_span_is_dropped(
    world: World, field: str, value: object
) -> None:
    world.store(world.connect(), [A], tokens=48, sub_keys=(E, F))
    catalog = dict(world.catalog)
    slot = next(slot for slot in catalog if world.record(slot).key == E)
    record = world.record(slot)
    values = {name: getattr(record, name) for name in record.__slots__}
    catalog[slot] = type(record)(**{**values, field: value}).encode()
    world.restart(catalog)
    world.settle()
    world.check()
    assert world.core.counters["recovered_dropped"] == 1
    assert reasons(world.acquire(world.connect(), [A, E, F])) == [0, Reason.MISS, 0]


def test_spans_above_the_populated_memory_are_not_evicted_in_vain(world: World) -> None:
    """Evicting them gives no range that may be handed out yet."""
    world.store(world.connect(), [A, B], length=4 * TILE_BYTES)
    records, _ = world.read_catalog()
    core = Core(world.config)
    core.handle(ev.Recovered(records), 0)
    for event in (
        ev.SlabAdded(0, 8 * TILE_BYTES),
        ev.Populated(0, 2 * TILE_BYTES),
        ev.GraceEnded(),
        ev.SessionOpened(1, 0, "", 3),
    ):
        effects = core.handle(event, 0)
        jobs = [effect.job for effect in effects if isinstance(effect, fx.Verify)]
        for job in jobs:
            core.handle(ev.VerifyDone(job, True), 0)
    reserve = rq.Reserve(1, 1, key("space"), OTHER_SHARD, C, [64], [0], [TILE_BYTES])
    effects = core.handle(reserve, core.config.patience_ms)
    assert effects == [fx.Reply(1, 1, rs.ReserveResult([Reason.POOL_FULL], [0]))]
    assert core.counters["evicted"] == 0
    core.check()


def ages(world: World) -> dict[bytes, tuple[int, int]]:
    """Age and time without a lease of each span, in ms."""
    return {row.key: (row.age_ms, row.idle_ms) for row in world.core.views.spans(now_ms=world.now)}


def test_ages_go_on_over_restarts(world: World) -> None:
    world.store(world.connect(), [A])
    world.now += 3_600_000
    world.store(world.connect(), [B], tokens=48, sub_keys=(E, F))
    for lives in (1, 2):
        world.restart()
        world.settle()
        world.check()
        aged = ages(world)
        assert abs(aged[A][0] - 3_600_000 - (lives - 1) * 60_000) < 200
        assert abs(aged[B][0] - (lives - 1) * 60_000) < 200
        # When it was leased last is not written down.
        assert aged[A][1] < 200
        world.now += 60_000
    part = world.core.sweep.part(0, 64, min_age_ms=3_600_000, now_ms=world.now)
    assert {world.record(slot).key for slot in part.slots} == {A}
    assert reasons(world.acquire(world.connect(), [A, B, E])) == [0, 0, 0]


def test_what_is_of_the_future_is_new(world: World) -> None:
    """As a daemon of another time namespace may have it."""
    world.now += 3_600_000
    world.store(world.connect(), [A])
    world.now -= 1_800_000
    world.restart()
    world.settle()
    assert ages(world)[A] == (0, 0)
    world.now += 10_000
    assert abs(ages(world)[A][0] - 10_000) < 200
