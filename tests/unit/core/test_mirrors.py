"""Mirrors: what holds what, who takes whose names over, and what goes with what."""

from __future__ import annotations

from dataclasses import replace

import pytest
from asking import A, B, C, D, E, F, reasons
from contents import NAMESPACE, SHARD, key
from mirror_cases import DENSE, TAIL, declare, join, mirrored, settle
from world import World

from kmesh.layout import TILE_BYTES
from kmesh_spand.core import events as ev
from kmesh_spand.core import requests as rq
from kmesh_spand.core import results as rs
from kmesh_spand.core.codes import Cause, MirrorFate, Reason


def test_a_mirror_holds_its_base_until_it_is_gone(room: World) -> None:
    one = mirrored(room, [A], [B, C])
    status = room.core.views.status()
    assert (status.mirrors, status.base_spans, status.mirror_dense_bytes) == (2, 1, 2 * DENSE)
    slots = {row.key: row.slot for row in room.core.views.spans(now_ms=0)}
    room.send(ev.Evict([slots[A]]))
    assert reasons(room.acquire(one, [A])) == [Reason.OK]
    room.send(ev.Evict([slots[B], slots[C]]))
    assert room.core.views.status().base_spans == 0
    room.release(one, list(room.leases))
    room.send(ev.Evict([slots[A]]))
    assert reasons(room.acquire(one, [A])) == [Reason.MISS]
    room.check()


def test_readers_of_the_dense_span_keep_it(room: World) -> None:
    """Its names are another row's, but its bytes stay until the last lease has ended."""
    one = room.connect()
    room.store(one, [A, B], length=DENSE)
    lease = room.acquire(one, [B]).lease
    before = room.core.place(one, lease, 0)
    declare(room, one, [A])
    join(room, one, [B])
    settle(room)
    room.check()
    assert before is not None
    assert room.core.place(one, lease, 0) == before
    states = sorted(row.state for row in room.core.views.spans(now_ms=0))
    assert states == ["committed", "committed", "retired"]
    answer = room.acquire(one, [B], recipes=True)
    assert list(answer.dense_length) == [DENSE]
    room.release(one, list(room.leases))
    assert sorted(row.state for row in room.core.views.spans(now_ms=0)) == ["committed"] * 2
    room.check()


def test_a_tails_further_names_move_with_it(room: World) -> None:
    one = room.connect()
    room.store(one, [A], length=DENSE)
    room.store(one, [D], length=TAIL, tokens=48, sub_keys=(E, F))
    declare(room, one, [A])
    join(room, one, [D])
    settle(room)
    for name in (D, E, F):
        answer = room.acquire(one, [name], recipes=True)
        assert list(answer.dense_length) == [TAIL]
    room.check()
    room.restart()
    room.settle()
    one = room.connect()
    for name in (D, E, F):
        assert reasons(room.acquire(one, [name], recipes=True)) == [Reason.OK]
    room.check()


def test_dense_is_made_once_for_all_who_ask(room: World) -> None:
    one = mirrored(room, [A], [B])
    two = room.connect()
    for session in (one, two, one):
        assert reasons(room.acquire(session, [B])) == [Reason.PENDING]
    (job,) = room.densifies
    room.densify_ends(job)
    answer = room.acquire(two, [B])
    assert reasons(answer) == [Reason.OK]
    assert room.core.views.status().base_spans == 0
    assert room.core.counters["densified"] == 1
    room.check()


def test_without_room_for_it_dense_is_a_miss() -> None:
    world = World({0: 5})
    one = mirrored(world, [A], [B])
    world.acquire(one, [A])
    world.store(one, [key("more")], length=DENSE)
    world.acquire(one, [key("more")])
    assert reasons(world.acquire(one, [B])) == [Reason.MISS]
    assert world.core.counters["densify_no_room"] == 1
    assert reasons(world.acquire(one, [B], recipes=True)) == [Reason.OK]
    world.check()


def test_dense_for_a_while(room: World) -> None:
    """What was made dense for a reader becomes a mirror again when such readers stay away."""
    one = mirrored(room, [A], [B])
    room.acquire(one, [B])
    room.settle()
    assert not room.mirrors
    rest = room.core.config.dense_rest_ms
    assert room.core.waits
    for _ in range(3):
        room.now += rest - 1
        room.send(ev.Tick())
        assert not room.encodes
        room.release(one, [room.acquire(one, [B]).lease])
    # Readers of recipes don't mind.
    room.now += rest - 1
    room.release(one, [room.acquire(one, [B], recipes=True).lease])
    room.now += 1
    room.send(ev.Tick())
    room.settle()
    assert len(room.mirrors) == 1
    assert not room.core.waits
    room.check()
    # Without its family nobody makes it one.
    room.acquire(one, [B])
    room.settle()
    room.ask(rq.Dissolve, one, "round", MirrorFate.KEEP)
    room.now += rest
    room.send(ev.Tick())
    assert not room.encodes
    room.check()


def test_what_was_evicted_rests_no_more(room: World) -> None:
    """Nor is its slot, which may lie in a slab that is gone by now."""
    one = mirrored(room, [A], [B])
    room.acquire(one, [B])
    room.settle()
    room.close(one)
    (slot,) = [row.slot for row in room.core.views.spans(now_ms=room.now) if row.key == B]
    room.send(ev.Evict([slot]))
    offered: list[int] = []
    room.core.families.stored = offered.append  # type: ignore[method-assign]
    room.now += room.core.config.dense_rest_ms
    room.send(ev.Tick())
    assert not offered
    assert not room.core.waits
    room.check()


def test_a_bad_base_takes_its_mirrors_along(room: World) -> None:
    """What is leased of them ends with the lease, and nothing of it is found any more."""
    one = mirrored(room, [A], [B, C])
    lease = room.acquire(one, [B], recipes=True).lease
    base = next(row for row in room.core.views.spans(now_ms=0) if row.mirrors)
    room.flip(base.slab, base.offset // TILE_BYTES)
    room.ask(rq.ReportCorrupt, one, lease, [0])
    # Until it is read again nothing of the family is served.
    assert reasons(room.acquire(one, [A, B, C], recipes=True)) == [Reason.PENDING] * 3
    for job in list(room.verifies):
        room.verify_ends(job)
    assert reasons(room.acquire(one, [A, B, C], recipes=True)) == [Reason.MISS] * 3
    room.check()
    assert {row.state for row in room.core.views.spans(now_ms=0)} == {"doomed"}
    room.release(one, [lease])
    assert room.core.views.spans(now_ms=0) == []
    assert room.core.counters["mirrors_dropped"] == 2
    room.check()


def test_a_false_report_of_a_mirror(room: World) -> None:
    one = mirrored(room, [A], [B])
    lease = room.acquire(one, [B], recipes=True).lease
    room.ask(rq.ReportCorrupt, one, lease, [0])
    room.settle()
    assert reasons(room.acquire(one, [A, B], recipes=True)) == [Reason.OK] * 2
    assert room.core.counters["corrupt_false"] == 2
    room.check()


def test_a_recipe_that_does_not_give_its_payload_is_dropped(room: World) -> None:
    one = mirrored(room, [A], [B])
    mirror = next(row for row in room.core.views.spans(now_ms=0) if row.dense)
    room.acquire(one, [B])
    (job,) = room.densifies
    room.flip(mirror.slab, mirror.offset // TILE_BYTES)
    room.densify_ends(job)
    assert reasons(room.acquire(one, [B], recipes=True)) == [Reason.MISS]
    assert room.core.fates.of(B, SHARD, room.now).cause is Cause.CORRUPT
    room.check()


def test_after_a_restart_a_mirror_needs_its_base(room: World) -> None:
    mirrored(room, [A], [B])
    catalog = dict(room.catalog)
    slot = next(slot for slot in catalog if room.record(slot).key == A)
    room.restart({**catalog, slot: bytes(128)})
    room.settle()
    one = room.connect()
    assert reasons(room.acquire(one, [A, B], recipes=True)) == [Reason.MISS] * 2
    assert room.core.counters["mirrors_dropped"] == 1
    room.check()


def test_after_a_restart_a_base_stored_anew_is_another(room: World) -> None:
    """Its key is there again before the mirror was read, with other bytes."""
    mirrored(room, [A], [B])
    catalog = dict(room.catalog)
    slot = next(slot for slot in catalog if room.record(slot).key == A)
    room.restart({**catalog, slot: bytes(128)})
    one = room.connect()
    room.send(ev.GraceEnded())
    world_copies = room.reserve(one, [A], length=DENSE)
    room.commit(one, list(world_copies.reservation))
    room.settle()
    assert reasons(room.acquire(one, [A, B], recipes=True)) == [Reason.OK, Reason.MISS]
    room.check()


def test_after_a_restart_a_base_that_is_bad(room: World) -> None:
    mirrored(room, [A], [B])
    base = next(row for row in room.core.views.spans(now_ms=0) if row.mirrors)
    room.flip(base.slab, base.offset // TILE_BYTES)
    room.restart()
    room.settle()
    one = room.connect()
    assert reasons(room.acquire(one, [A, B], recipes=True)) == [Reason.MISS] * 2
    room.check()


def test_a_pool_full_of_a_family_gives_way() -> None:
    """A base goes with its mirrors, in one request, when nothing else would do."""
    world = World({0: 6})
    mirrored(world, [A], [B])
    two = world.connect()
    answer = world.reserve(two, [key("large")], length=6 * TILE_BYTES)
    assert list(answer.reason) == [Reason.OK]
    assert not world.mirrors
    world.check()


def test_a_leased_mirror_keeps_its_base_in_a_full_pool() -> None:
    world = World({0: 6})
    one = mirrored(world, [A], [B])
    world.acquire(one, [B], recipes=True)
    answer = world.reserve(one, [key("large")], length=6 * TILE_BYTES)
    assert list(answer.reason) == [Reason.POOL_FULL]
    world.check()


@pytest.mark.parametrize("drop", [False, True])
def test_an_operator_evicts_a_base(drop: bool) -> None:
    """Its mirrors are made dense first; without room they stay, or go too."""
    world = World({0: 5})
    one = mirrored(world, [A], [B])
    base = next(row for row in world.core.views.spans(now_ms=0) if row.mirrors)
    world.store(one, [key("more")], length=DENSE)
    world.acquire(one, [key("more")])
    world.send(ev.EvictBases([(base.slot, base.generation)], drop))
    assert not world.densifies
    expected = [Reason.MISS] * 2 if drop else [Reason.OK] * 2
    assert reasons(world.acquire(one, [A, B], recipes=True)) == expected
    world.check()


def test_an_evicted_base_goes_when_its_mirrors_are_dense(room: World) -> None:
    one = mirrored(room, [A], [B, C])
    base = next(row for row in room.core.views.spans(now_ms=0) if row.mirrors)
    room.send(ev.EvictBases([(base.slot, base.generation)], False))
    for job in list(room.densifies):
        room.densify_ends(job)
    assert reasons(room.acquire(one, [A, B, C])) == [Reason.MISS, Reason.OK, Reason.OK]
    assert room.core.fates.of(A, SHARD, room.now).cause is Cause.OPERATOR
    room.check()


def test_no_chains_through_forgotten_families(room: World) -> None:
    """What mirrors refer to is never made a recipe, whoever joins it where."""
    one = mirrored(room, [A], [B])
    room.ask(rq.Dissolve, one, "round", MirrorFate.KEEP)
    room.store(one, [C], length=DENSE)
    declare(room, one, [C])
    join(room, one, [A])
    assert not room.encodes
    room.check()


def test_a_mirror_is_refused_as_base(room: World) -> None:
    one = mirrored(room, [A], [B])
    answer = declare(room, one, [C, B], family="other")
    assert isinstance(answer, rs.Refused)
    assert (answer.field, answer.message) == ("base[1]", "is a recipe itself")


def test_answers_name_a_bounded_number_of_bases() -> None:
    world = World({0: 40}, max_bases=1)
    one = mirrored(world, [A], [B])
    world.store(one, [C, D], length=DENSE)
    declare(world, one, [C], family="other")
    world.ask(rq.Join, one, "other", "a", NAMESPACE, D, [SHARD])
    settle(world)
    answer = world.acquire(one, [B, D], recipes=True)
    assert reasons(answer) == [Reason.OK, Reason.MISS]


@pytest.mark.parametrize(
    "change",
    [
        {"key": key("x")},
        {"generation": 9},
        {"root": 9},
        {"tokens": 48},
        {"position": 9},
    ],
)
def test_a_recipe_names_its_base_by_all_that_it_is(room: World, change: dict[str, object]) -> None:
    """What is read in a mirror after a restart must be there as it says."""
    mirrored(room, [A], [B])
    (mirror,) = room.mirrors
    recipe = room.recipes[mirror.root]
    (fact,) = recipe.facts.bases
    facts = replace(recipe.facts, bases=[replace(fact, **change)])  # type: ignore[arg-type]
    room.recipes[mirror.root] = replace(recipe, facts=facts)
    room.restart()
    room.settle()
    one = room.connect()
    assert reasons(room.acquire(one, [A, B], recipes=True)) == [Reason.OK, Reason.MISS]
    room.check()


def test_a_base_is_read_again_when_a_recipe_over_it_gives_other_bytes(room: World) -> None:
    """It may be why; what else refers to it would give other bytes, too."""
    one = mirrored(room, [A], [B, C])
    (base,) = [row for row in room.core.views.spans(now_ms=0) if row.key == A]
    place = base.slab, base.offset // TILE_BYTES
    room.memory[place] = -1
    room.flipped.add(place)
    assert reasons(room.acquire(one, [B])) == [Reason.PENDING]
    (job,) = room.densifies
    room.densify_ends(job)
    assert reasons(room.acquire(one, [A, B], recipes=True)) == [Reason.PENDING, Reason.MISS]
    (job,) = room.verifies
    room.verify_ends(job)
    assert reasons(room.acquire(one, [A, B, C], recipes=True)) == [Reason.MISS] * 3
    assert not room.mirrors
    room.check()
