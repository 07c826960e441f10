"""Families whose spans lie on GPUs: each tier has its own base, its own recipes, its own jobs."""

from __future__ import annotations

import pytest
from asking import A, B, C, D, E, reasons
from contents import key
from mirror_cases import DENSE, declare, join, settle
from world import World

from kmesh_spand.core import effects as fx
from kmesh_spand.core import events as ev
from kmesh_spand.core import requests as rq
from kmesh_spand.core import results as rs
from kmesh_spand.core.codes import MirrorFate, Reason

HOST, ONE, TWO = 0, 1, 2


@pytest.fixture
def room() -> World:
    return World({0: 12, 1: 12, 2: 12}, tiers={1: ONE, 2: TWO})


def stored(world: World, session: int, keys: list[bytes], *tiers: int) -> None:
    for tier in tiers:
        world.store(session, keys, length=DENSE, tier=tier)


def named(world: World, base: list[bytes], member: list[bytes]) -> int:
    """A session that has declared a family with one member, and takes recipes everywhere."""
    session = world.connect()
    for tier in (ONE, TWO):
        world.store(session, [key("read")], tier=tier)
        world.acquire(session, [key("read")], tier=tier, recipes=True)
    world.release(session, list(world.leases))
    assert isinstance(declare(world, session, base), rs.DeclareResult)
    assert isinstance(join(world, session, member), rs.JoinResult)
    return session


def recipes(world: World, session: int, name: bytes, tier: int) -> bool:
    answer = world.acquire(session, [name], tier=tier, recipes=True)
    assert reasons(answer) == [Reason.OK]
    return any(answer.dense_length)


@pytest.mark.parametrize("last", [[A], [B]], ids=["base last", "member last"])
def test_recipes_are_made_where_the_base_is(room: World, last: list[bytes]) -> None:
    session = named(room, [A], [B])
    first = [A] if last == [B] else [B]
    stored(room, session, first, HOST, ONE)
    stored(room, session, last, ONE)
    settle(room)
    assert {room.tiers.get(mirror.slab, 0) for mirror in room.mirrors} == {ONE}
    assert recipes(room, session, B, ONE)
    if last == [A]:
        assert not recipes(room, session, B, HOST), "its base is on the GPU only"
        stored(room, session, [A], HOST)
        settle(room)
        assert recipes(room, session, B, HOST)
    room.check()


def test_the_same_family_in_all_tiers(room: World) -> None:
    """A base that goes in one tier is no other's matter."""
    session = named(room, [A], [B, C])
    stored(room, session, [A, B, C], HOST, ONE, TWO)
    settle(room)
    assert sorted(room.tiers.get(mirror.slab, 0) for mirror in room.mirrors) == [0, 0, 1, 1, 2, 2]
    rows = [row for row in room.core.views.spans(now_ms=room.now) if row.mirrors]
    assert {row.mirrors for row in rows} == {2}
    (on_gpu,) = [row for row in rows if room.tiers.get(row.slab, 0) == ONE]
    room.send(ev.EvictBases([(on_gpu.slot, on_gpu.generation)], drop=True))
    room.settle()
    assert reasons(room.acquire(session, [A, B, C], tier=ONE)) == [Reason.MISS, 0, 0]
    for tier in (HOST, TWO):
        assert reasons(room.acquire(session, [A], tier=tier)) == [Reason.OK]
        assert recipes(room, session, B, tier)
    room.check()


def test_a_gpu_whose_worker_is_down_keeps_nothing_else_waiting(room: World) -> None:
    """Its own jobs wait for it: encodings, and what is to be made dense."""
    session = named(room, [A], [B, C, D])
    stored(room, session, [A, B, C, D], ONE)
    (waiting,) = room.encodes
    stored(room, session, [A, B, C, D], HOST)
    for _ in range(3):
        (job,) = room.encodes.keys() - {waiting}
        room.encode_ends(job)
        room.keep_ends(job)
    assert room.encodes.keys() == {waiting}
    settle(room)
    for name in (B, C, D):
        room.acquire(session, [name], tier=ONE)
    stuck = set(room.densifies)
    assert len(stuck) == 2
    for name in (B, C, D):
        assert reasons(room.acquire(session, [name])) == [Reason.PENDING]
        for job in room.densifies.keys() - stuck:
            room.densify_ends(job)
        assert reasons(room.acquire(session, [name])) == [Reason.OK]
    assert room.densifies.keys() == stuck
    room.settle()
    for name in (B, C, D):
        room.acquire(session, [name], tier=ONE)
    room.settle()
    assert reasons(room.acquire(session, [B, C, D], tier=ONE)) == [Reason.OK] * 3
    room.check()


def test_on_a_gpu_nothing_is_encoded_before_somebody_takes_recipes(room: World) -> None:
    """Engines that don't would have each span made dense again. Host memory has no such rule."""
    session = room.connect()
    declare(room, session, [A])
    join(room, session, [B, C])
    stored(room, session, [A, B], HOST, ONE, TWO)
    settle(room)
    assert {room.tiers.get(mirror.slab, 0) for mirror in room.mirrors} == {HOST}
    assert reasons(room.acquire(session, [A, B], tier=ONE)) == [Reason.OK] * 2
    assert not room.encodes
    # Asked for with recipes, even where nothing is found; for that tier alone.
    assert reasons(room.acquire(session, [C], tier=ONE, recipes=True)) == [Reason.MISS]
    settle(room)
    assert sorted(room.tiers.get(mirror.slab, 0) for mirror in room.mirrors) == [HOST, ONE]
    stored(room, session, [C], ONE, TWO)
    settle(room)
    assert sorted(room.tiers.get(mirror.slab, 0) for mirror in room.mirrors) == [HOST, ONE, ONE]
    room.check()


@pytest.mark.parametrize("decoding", [False, True])
def test_nothing_is_looked_for_where_there_is_enough_to_do(room: World, decoding: bool) -> None:
    """A GPU that could encode more, or takes no recipes, has no say in host memory's."""
    session = room.connect()
    stored(room, session, [A, B, C, D], HOST)
    stored(room, session, [A], ONE)
    if decoding:
        room.acquire(session, [B], tier=ONE, recipes=True)
    declare(room, session, [A])
    for name, member in {"b": B, "c": C, "d": D}.items():
        join(room, session, [member], name)
    for left in (2, 1):
        (job,) = room.encodes
        assert room.core.families.waiting == [HOST]
        assert not room.core.behind
        room.encode_ends(job)
        room.keep_ends(job)
        assert len(room.mirrors) == 3 - left
    assert not room.core.families.waiting
    settle(room)
    assert len(room.mirrors) == 3
    # A family that is forgotten meanwhile is not looked for either.
    stored(room, session, [E], HOST)
    join(room, session, [E, B], "e")
    join(room, session, [C, D], "f")
    assert room.core.families.waiting == [HOST]
    room.ask(rq.Dissolve, session, "round", 0, b"")
    assert not room.core.families.waiting
    room.check()


def test_what_is_not_wanted_is_forgotten_where_it_was_made(room: World) -> None:
    session = named(room, [A], [B])
    stored(room, session, [A, B], ONE)
    (job,) = room.encodes
    room.send(ev.Drain())
    effects = room.core.handle(ev.Encoded(job, 100, [0]), room.now)
    (forgotten,) = [effect for effect in effects if isinstance(effect, fx.ForgetRecipe)]
    assert room.tiers[forgotten.slab] == ONE


def test_a_restart_serves_recipes_where_their_base_is(room: World) -> None:
    session = named(room, [A], [B])
    stored(room, session, [A, B], ONE)
    settle(room)
    # The same key in host memory is another span.
    stored(room, session, [A], HOST)
    room.restart()
    assert {verify.recipe for verify in room.verifies.values()} == {True, False}
    room.settle()
    session = room.connect()
    assert recipes(room, session, B, ONE)
    room.send(ev.GraceEnded())
    assert reasons(room.acquire(session, [B], tier=ONE)) == [Reason.PENDING]
    room.settle()
    assert reasons(room.acquire(session, [B], tier=ONE)) == [Reason.OK]
    room.check()


def test_a_base_of_another_tier_is_none(room: World) -> None:
    """What a recipe names is looked for where the recipe lies."""
    session = named(room, [A], [B])
    stored(room, session, [A, B], HOST, ONE)
    settle(room)
    on_gpu = next(slot for slot in room.catalog if room.record(slot).key == A
                  and room.record(slot).slab == ONE)  # fmt: skip
    catalog = {slot: data for slot, data in room.catalog.items() if slot != on_gpu}
    room.restart(catalog)
    room.settle()
    session = room.connect()
    assert reasons(room.acquire(session, [B], tier=ONE, recipes=True)) == [Reason.MISS]
    assert recipes(room, session, B, HOST)
    room.check()


def test_a_recipe_of_any_tier_is_no_base(room: World) -> None:
    session = named(room, [A], [B])
    stored(room, session, [A, B], TWO)
    settle(room)
    answer = declare(room, session, [B], family="other")
    assert isinstance(answer, rs.Refused)
    assert answer.field == "base[0]"


def test_dissolve_makes_all_of_them_dense(room: World) -> None:
    session = named(room, [A], [B])
    stored(room, session, [A, B], HOST, ONE, TWO)
    settle(room)
    answer = room.ask(rq.Dissolve, session, "round", MirrorFate.DENSE, b"")
    assert answer == rs.DissolveResult(1, 3)
    room.settle()
    assert not room.mirrors
    room.check()


def test_views_are_of_one_tier(room: World) -> None:
    session = named(room, [A], [B, C])
    stored(room, session, [A, B], ONE)
    stored(room, session, [B, C], HOST)
    settle(room)
    again = join(room, session, [B, C, D, E])
    assert again == rs.JoinResult(4, 2), "spans that are there, wherever"
    views = room.core.family_views
    family = views.find(name="round", group=room.who(session)[0], every=False)
    assert family is not None
    host, gpu = (views.row(family, room.now, tier) for tier in (HOST, ONE))
    assert (host.base_stored, host.mirrors, host.dense_bytes) == (0, 0, 2 * DENSE)
    assert (gpu.base_stored, gpu.mirrors, gpu.dense_bytes) == (1, 1, 2 * DENSE)
    assert list(host.gpus) == list(gpu.gpus) == [ONE]
    assert views.rows(0, 9, now_ms=room.now, tier=ONE) == [gpu]
    (on_host,), (on_gpu,) = (views.members(family, 0, 9, tier) for tier in (HOST, ONE))
    assert (on_host.mirrors, on_host.dense, on_host.waiting) == (0, 2, 2)
    assert (on_gpu.mirrors, on_gpu.dense, on_gpu.waiting) == (1, 0, 3)
