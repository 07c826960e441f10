"""Mirrors: what holds what, who takes whose names over, and what goes with what."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from asking import A, B, C, D, E, F, reasons
from world import NAMESPACE, SHARD, World, key

from kmesh.layout import TILE_BYTES
from kmesh_spand.core import effects as fx
from kmesh_spand.core import events as ev
from kmesh_spand.core import requests as rq
from kmesh_spand.core import results as rs
from kmesh_spand.core.codes import Cause, MirrorFate, Reason
from kmesh_spand.core.family import Run

#: Of a span of 64 tokens: bfloat16, 4 layers, 2 heads of 64.
DENSE = 2 * TILE_BYTES
TAIL = DENSE * 48 // 64


def declare(world: World, session: int, keys: list[bytes], **how: object) -> rs.Result | None:
    fields = {
        "family": "round",
        "namespace": NAMESPACE,
        "dtype": "bfloat16",
        "head_dim": 64,
        "shards": [SHARD],
        "base": b"".join(keys),
        "frequencies": (),
        "interleaved": False,
        "salt": b"",
        **how,
    }
    return world.ask(rq.Declare, session, *fields.values())


def join(
    world: World, session: int, keys: list[bytes], name: str = "a", runs: Sequence[Run] = ()
) -> rs.Result | None:
    return world.ask(rq.Join, session, "round", name, NAMESPACE, b"".join(keys), [SHARD], runs)


def mirrored(world: World, base: list[bytes], member: list[bytes]) -> int:
    """A session that has stored a base and a member, which is mirrors by now."""
    one = world.connect()
    world.store(one, base, length=DENSE)
    world.store(one, member, length=DENSE)
    assert isinstance(declare(world, one, base), rs.DeclareResult)
    assert join(world, one, member) == rs.JoinResult(len(member), len(member))
    settle(world)
    assert len(world.mirrors) == len(member)
    world.check()
    return one


def settle(world: World) -> None:
    while world.encodes or world.keeps:
        for job in list(world.encodes):
            world.encode_ends(job)
        for job in list(world.keeps):
            world.keep_ends(job)


@pytest.fixture
def room() -> World:
    return World({0: 24})


def test_a_mirror_holds_its_base_until_it_is_gone(room: World) -> None:
    one = mirrored(room, [A], [B, C])
    status = room.core.status()
    assert (status.mirrors, status.base_spans, status.mirror_dense_bytes) == (2, 1, 2 * DENSE)
    slots = {row.key: row.slot for row in room.core.spans(now_ms=0)}
    room.send(ev.Evict([slots[A]]))
    assert reasons(room.acquire(one, [A])) == [Reason.OK]
    room.send(ev.Evict([slots[B], slots[C]]))
    assert room.core.status().base_spans == 0
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
    states = sorted(row.state for row in room.core.spans(now_ms=0))
    assert states == ["committed", "committed", "retired"]
    answer = room.acquire(one, [B], recipes=True)
    assert list(answer.dense_length) == [DENSE]
    room.release(one, list(room.leases))
    assert sorted(row.state for row in room.core.spans(now_ms=0)) == ["committed"] * 2
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
    assert room.core.status().base_spans == 0
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


def test_a_failed_job_is_tried_once_more(room: World) -> None:
    one = room.connect()
    room.store(one, [A, B], length=DENSE)
    declare(room, one, [A])
    join(room, one, [B])
    for _ in range(2):
        (job,) = room.encodes
        room.encode_ends(job, ok=False)
    assert not room.encodes
    assert room.core.counters["encode_failed"] == 2
    assert reasons(room.acquire(one, [B])) == [Reason.OK]
    (member,) = room.core.family_views.members(room.core.families.by_id[1], 0, 10)
    assert (member.dense, member.refused, member.refusal) == (1, 1, "the job failed")
    room.check()


def test_what_a_later_join_says_counts_for_spans_that_wait(room: World) -> None:
    """Whose turn was yet to come, whose job is begun anew, or that were stored behind it."""
    one = room.connect()
    room.store(one, [A, B, C], length=DENSE)
    declare(room, one, [A])
    join(room, one, [B, C, D])
    (job,) = room.encodes
    assert room.encodes[job].span.key == B
    join(room, one, [B, C, D], runs=[Run(0, 64, A, 0)])
    room.store(one, [D], length=DENSE)
    seen = []
    room.encode_ends(job, ok=False)
    while room.encodes:
        (job,) = room.encodes
        seen.append((room.encodes[job].span.key, room.encodes[job].pieces))
        room.encode_ends(job)
        room.keep_ends(job)
    # They begin at token 1, 2 and 0.
    pieces = [fx.Piece(0, 63, 0, 1), fx.Piece(0, 62, 0, 2), fx.Piece(0, 64, 0, 0)]
    assert seen == [(name, [piece]) for name, piece in zip((B, C, D), pieces, strict=True)]
    room.check()


@pytest.mark.parametrize("length", [0, DENSE], ids=["nothing shared", "too large"])
def test_what_a_job_was_not_told_yet_is_tried_too(room: World, length: int) -> None:
    one = room.connect()
    room.store(one, [A, B], length=DENSE)
    declare(room, one, [A])
    join(room, one, [B])
    (job,) = room.encodes
    join(room, one, [B], runs=[Run(0, 64, A, 0)])
    room.encode_ends(job, length, used=bool(length))
    (job,) = room.encodes
    assert room.encodes[job].pieces
    room.encode_ends(job, length, used=bool(length))
    assert not room.encodes
    assert room.core.counters["encode_refused"] == 1
    room.check()


@pytest.mark.parametrize("spoiled", [A, B])
def test_what_an_encoding_finds_changed_is_read_again(room: World, spoiled: bytes) -> None:
    one = room.connect()
    room.store(one, [A, B], length=DENSE)
    declare(room, one, [A])
    join(room, one, [B])
    (row,) = [row for row in room.core.spans(now_ms=0) if row.key == spoiled]
    place = row.slab, row.offset // TILE_BYTES
    room.memory[place] = -1
    room.flipped.add(place)
    (job,) = room.encodes
    room.encode_ends(job)
    assert reasons(room.acquire(one, [A, B])) == [
        Reason.PENDING if name == spoiled else Reason.OK for name in (A, B)
    ]
    room.settle()
    counters = room.core.counters
    assert (counters["encode_spoiled"], counters["corrupt"]) == (1, 1)
    assert reasons(room.acquire(one, [spoiled])) == [Reason.MISS]
    assert not room.core.counters["encodes"]
    room.check()


@pytest.mark.parametrize("written", [False, True])
def test_an_encoding_over_a_base_in_doubt_is_done_again(room: World, written: bool) -> None:
    """The base is reported, wrongly, while a recipe over it is made, or while it is written."""
    one = room.connect()
    room.store(one, [A, B], length=DENSE)
    declare(room, one, [A])
    join(room, one, [B])
    (job,) = room.encodes
    lease = room.acquire(one, [A]).lease
    if written:
        room.encode_ends(job)
    room.ask(rq.ReportCorrupt, one, lease, [0])
    if written:
        room.keep_ends(job)
    else:
        room.encode_ends(job)
    assert not room.encodes
    assert not room.mirrors
    room.check()
    room.settle()
    assert len(room.mirrors) == 1
    assert room.core.counters["corrupt_false"] == 1
    room.check()


def test_an_encoding_that_found_a_good_base_changed_is_done_again_once(room: World) -> None:
    """What it read was wrong, and what lies there is not."""
    one = room.connect()
    room.store(one, [A, B], length=DENSE)
    declare(room, one, [A])
    join(room, one, [B])
    for _ in range(2):
        ((job, _),) = room.encodes.items()
        del room.encodes[job]
        room.send(ev.EncodeSpoiled(job, False, [0]))
        assert not room.encodes
        for verifying in list(room.verifies):
            room.verify_ends(verifying)
    assert not room.encodes
    assert room.core.counters["encode_spoiled"] == 2
    room.check()


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
    (slot,) = [row.slot for row in room.core.spans(now_ms=room.now) if row.key == B]
    room.send(ev.Evict([slot]))
    offered: list[int] = []
    room.core.families.stored = offered.append  # type: ignore[method-assign]
    room.now += room.core.config.dense_rest_ms
    room.send(ev.Tick())
    assert not offered
    assert not room.core.waits
    room.check()


def test_a_recipe_that_saves_no_tile_is_not_kept(room: World) -> None:
    one = room.connect()
    room.store(one, [A, B], length=DENSE)
    declare(room, one, [A])
    join(room, one, [B])
    (job,) = room.encodes
    room.encode_ends(job, TILE_BYTES + 1)
    assert not room.keeps
    assert room.core.counters["encode_refused"] == 1
    assert not room.made, "the worker was not told to forget it"
    # Nor is it tried again.
    join(room, one, [B], "b")
    assert not room.encodes
    room.check()


def test_what_changes_under_a_job_is_left_alone(room: World) -> None:
    """The span is reported while it is encoded: it is read again, and then encoded anew."""
    one = room.connect()
    room.store(one, [A, B], length=DENSE)
    declare(room, one, [A])
    join(room, one, [B])
    (job,) = room.encodes
    lease = room.acquire(one, [B]).lease
    room.ask(rq.ReportCorrupt, one, lease, [0])
    room.encode_ends(job)
    assert not room.keeps
    assert not room.made
    assert not room.encodes
    room.check()
    room.settle()
    assert room.core.status().mirrors == 1
    room.check()


def test_a_bad_base_takes_its_mirrors_along(room: World) -> None:
    """What is leased of them ends with the lease, and nothing of it is found any more."""
    one = mirrored(room, [A], [B, C])
    lease = room.acquire(one, [B], recipes=True).lease
    base = next(row for row in room.core.spans(now_ms=0) if row.mirrors)
    room.flip(base.slab, base.offset // TILE_BYTES)
    room.ask(rq.ReportCorrupt, one, lease, [0])
    # Until it is read again nothing of the family is served.
    assert reasons(room.acquire(one, [A, B, C], recipes=True)) == [Reason.PENDING] * 3
    for job in list(room.verifies):
        room.verify_ends(job)
    assert reasons(room.acquire(one, [A, B, C], recipes=True)) == [Reason.MISS] * 3
    room.check()
    assert {row.state for row in room.core.spans(now_ms=0)} == {"doomed"}
    room.release(one, [lease])
    assert room.core.spans(now_ms=0) == []
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
    mirror = next(row for row in room.core.spans(now_ms=0) if row.dense)
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
    base = next(row for row in room.core.spans(now_ms=0) if row.mirrors)
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
    base = next(row for row in world.core.spans(now_ms=0) if row.mirrors)
    world.store(one, [key("more")], length=DENSE)
    world.acquire(one, [key("more")])
    world.send(ev.EvictBases([(base.slot, base.generation)], drop))
    assert not world.densifies
    expected = [Reason.MISS] * 2 if drop else [Reason.OK] * 2
    assert reasons(world.acquire(one, [A, B], recipes=True)) == expected
    world.check()


def test_an_evicted_base_goes_when_its_mirrors_are_dense(room: World) -> None:
    one = mirrored(room, [A], [B, C])
    base = next(row for row in room.core.spans(now_ms=0) if row.mirrors)
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


def test_a_member_that_becomes_base_while_it_is_encoded(room: World) -> None:
    one = room.connect()
    room.store(one, [A, B], length=DENSE)
    declare(room, one, [A])
    join(room, one, [B])
    assert isinstance(declare(room, one, [B], family="other"), rs.DeclareResult)
    settle(room)
    assert not room.mirrors
    room.check()


def test_a_mirror_is_refused_as_base(room: World) -> None:
    one = mirrored(room, [A], [B])
    answer = declare(room, one, [C, B], family="other")
    assert isinstance(answer, rs.Refused)
    assert (answer.field, answer.message) == ("base[1]", "is a recipe itself")


def test_drain_begins_no_recipe(room: World) -> None:
    one = mirrored(room, [A], [B])
    room.store(one, [C], length=DENSE)
    room.send(ev.Drain())
    join(room, one, [C], "b")
    assert not room.encodes
    assert reasons(room.acquire(one, [B])) == [Reason.MISS]
    room.send(ev.Resume())
    assert len(room.encodes) == 1
    room.check()


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
    (base,) = [row for row in room.core.spans(now_ms=0) if row.key == A]
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
