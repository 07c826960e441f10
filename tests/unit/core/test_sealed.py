"""Slabs that an earlier daemon sealed: read, given up as a whole, replaced."""

from __future__ import annotations

import pytest
from contents import SHARD, heir_of, key
from world import World

from kmesh.layout import TILE_BYTES
from kmesh_spand.core import events as ev
from kmesh_spand.core import requests as rq
from kmesh_spand.core import victims
from kmesh_spand.core.codes import Reason
from kmesh_spand.core.tenants import Tenancy

TILES = 4


def world_of(count: int, slabs: int = 2, **more: object) -> World:
    """A daemon that sealed its slabs, and the one after it; so many spans of a tile are stored."""
    world = World({n: TILES for n in range(slabs)}, hardened=True, patience_ms=1, **more)  # type: ignore[arg-type]
    world.store(world.connect(), [key(n) for n in range(count)])
    world.restart()
    world.settle()
    return world


def places(world: World, count: int) -> list[int]:
    """The slab of each span that is there."""
    session = world.connect()
    answer = world.acquire(session, [key(n) for n in range(count)])
    world.close(session)
    found = zip(answer.reason, answer.slab, strict=True)
    return [slab for reason, slab in found if reason == Reason.OK]


def reserve(world: World, name: object = "new", length: int = TILE_BYTES) -> int:
    """What comes of a store."""
    session = world.connect()
    reason = world.reserve(session, [key(name)], length=length).reason[0]
    world.close(session)
    world.check()
    return reason


def test_what_is_sealed_is_served_and_what_is_empty_is_replaced() -> None:
    world = world_of(3)
    assert world.given_up == {1: TILES}
    assert set(world.sizes) == world.sealed == {0}
    assert places(world, 3) == [0, 0, 0]
    # Until there is another slab nobody is told that there is no room, or that it is too large.
    assert reserve(world) == reserve(world, length=TILES * TILE_BYTES) == Reason.NOT_READY
    assert reserve(world, length=5 * TILE_BYTES) == Reason.TOO_LARGE
    world.replace(1)
    world.send(ev.GraceEnded())
    world.store(world.connect(), [key("new")])
    assert world.core.views.status().slabs[1].used == TILE_BYTES
    assert [slab.sealed for slab in world.core.views.status().slabs] == [True, False]
    # The last tile of the sealed slab is nobody's, and nobody gets it.
    assert world.core.views.status().slabs[0].used == 3 * TILE_BYTES
    world.check()


def test_a_slab_goes_with_its_last_span() -> None:
    world = world_of(5)
    world.send(ev.GraceEnded())
    assert world.sealed == {0, 1}
    session = world.connect()
    lease = world.acquire(session, [key(4)]).lease
    (slot,) = (row.slot for row in world.core.views.spans(now_ms=world.now) if row.key == key(4))
    world.send(ev.Evict([slot]))
    world.flip(1, 0)
    world.ask(rq.ReportCorrupt, session, lease, [0])
    world.settle()
    # It is not served any more, but leased.
    assert world.sealed == {0, 1}
    world.release(session, [lease])
    assert world.given_up == {1: TILES}
    assert world.sealed == {0}
    assert world.who_of(1) is None
    world.check()


@pytest.mark.parametrize("held", ["nothing", "the oldest", "one of each"])
def test_a_full_pool_gives_up_the_slab_with_the_oldest_span(held: str) -> None:
    world = world_of(8)
    assert reserve(world) == Reason.NOT_READY
    assert not world.given_up
    world.send(ev.GraceEnded())
    session = world.connect()
    # Slab 1 is used after slab 0.
    for name in (key(0), key(5)):
        lease = world.acquire(session, [name]).lease
        world.release(session, [lease])
    kept = {"nothing": [], "the oldest": [key(1)], "one of each": [key(1), key(7)]}[held]
    if kept:
        world.acquire(session, kept)
    before = world.core.counters["evicted"]
    if held == "one of each":
        assert reserve(world) == Reason.POOL_FULL
        assert (world.given_up, world.core.counters["evicted"] - before) == ({}, 0)
        return
    assert reserve(world) == Reason.NOT_READY
    gone = 1 if kept else 0
    assert world.given_up == {gone: TILES}
    assert world.core.counters["evicted"] - before == TILES
    assert world.core.counters["slabs_given_up"] == 1
    assert set(places(world, 8)) == {1 - gone}
    world.replace(gone)
    world.store(session, [key(n) for n in range(20, 24)])
    # What was written is younger than what is sealed, and goes if that must stay.
    assert reserve(world) == (Reason.OK if kept else Reason.NOT_READY)
    assert key(1) in {row.key for row in world.core.views.spans(now_ms=world.now)} or not kept


def test_what_is_written_is_evicted_where_that_is_older() -> None:
    world = world_of(8)
    world.send(ev.GraceEnded())
    assert reserve(world) == Reason.NOT_READY
    (slab,) = world.given_up
    world.replace(slab)
    session = world.connect()
    world.store(session, [key(n) for n in range(20, 24)])
    world.now += 10_000
    left = [n for n in range(8) if places(world, 8) and world.acquire(session, [key(n)]).lease]
    assert len(left) == 4
    world.close(session)
    assert reserve(world) == Reason.OK
    assert len(places(world, 8)) == 4
    assert not world.given_up


def test_a_slab_is_replaced_for_the_same_users() -> None:
    tenancy = Tenancy(groups=(1000, 1001))
    world = World({n: 2 for n in range(4)}, tenancy=tenancy, hardened=True, patience_ms=1)
    one, other = world.connect(uid=1000), world.connect(uid=1001)
    world.store(one, [key(n) for n in range(4)])
    world.store(other, [key(10)])
    world.restart()
    world.settle()
    world.send(ev.GraceEnded())
    mine = {row.slab for row in world.core.views.spans(now_ms=world.now, group=1000)}
    one = world.connect(uid=1000)
    world.replace(next(iter(world.given_up)))
    world.store(one, [key(20), key(21)])
    assert world.reserve(one, [key(22)]).reason[0] == Reason.NOT_READY
    (gone,) = world.given_up
    assert gone in mine
    world.replace(gone)
    # The other user has none of it, and gives up what is its own.
    other = world.connect(uid=1001)
    assert world.reserve(other, [key(30)]).reason[0] == Reason.NOT_READY
    (theirs,) = world.given_up
    assert theirs not in mine
    assert not world.core.may_map(gone ^ 8, 1001)
    world.replace(theirs)
    world.store(other, [key(30)])
    world.store(one, [key(22)])
    assert world.core.may_map(gone ^ 8, 1000)
    world.check()


def test_a_slab_of_which_nobody_knows_whose_it_is_is_given_back() -> None:
    world = World({0: TILES, 1: TILES}, hardened=True)
    world.store(world.connect(), [key(n) for n in range(3)])
    world.owners[0] = bytes([world.owners[0][0] ^ 1]) + world.owners[0][1:]
    world.restart()
    assert set(world.given_up) == {0, 1}
    assert world.core.counters["recovered_dropped"] == 3
    for slab in (0, 1):
        world.replace(slab)
    world.store(world.connect(), [key(0)], shard=SHARD)
    world.check()


def test_the_daemon_that_sealed_a_slab_has_it_back() -> None:
    """One that took over gave it up, and was broken off: the bytes are still there."""
    tenancy = Tenancy(groups=(1000, 1001))
    world = World({0: TILES, 1: TILES}, tenancy=tenancy, hardened=True, patience_ms=1)
    world.store(world.connect(uid=1000), [key(0)])
    (slab,) = (row.slab for row in world.core.views.spans(now_ms=world.now))
    sizes, memory = dict(world.sizes), dict(world.memory)
    world.restart()
    world.settle()
    world.send(ev.GraceEnded())
    world.send(ev.Evict([row.slot for row in world.core.views.spans(now_ms=world.now)]))
    assert slab in world.given_up
    world.hardened, world.given_up = False, {}
    world.sizes, world.memory = sizes, memory
    world.restart()
    assert list(world.wipes.values()) == [slab]
    assert not world.core.may_map(slab, 1001)
    world.settle()
    world.store(world.connect(uid=1001), [key(1)])
    assert {row.slab for row in world.core.views.spans(now_ms=world.now)} == {1 - slab}
    world.check()


def test_a_lease_in_one_slab_hides_no_other_victim(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many spans lie beside what is leased: only so many victims are looked at."""
    monkeypatch.setattr(victims, "MAX_TRIES", 8)
    tiles = 8 + 4
    world = World({0: tiles, 1: 2, 2: 2}, hardened=True, patience_ms=1, max_spans=2 * tiles)
    world.store(world.connect(), [key(n) for n in range(tiles + 4)])
    world.restart()
    world.settle()
    world.send(ev.GraceEnded())
    hot = world.connect()
    # Older than all others, and leased for good.
    assert places(world, tiles)[0] == 0
    world.acquire(hot, [key(0)])
    for n in range(tiles, tiles + 4):
        world.release(hot, [world.acquire(hot, [key(n)]).lease])
    assert reserve(world) == Reason.NOT_READY
    assert set(world.given_up) == {1}
    world.replace(1)
    world.store(hot, [key("one"), key("other")])
    # Then the next one; and what was written, where nothing sealed may go.
    assert reserve(world) == Reason.NOT_READY
    world.replace(2)
    world.store(hot, [key("third"), key("fourth")])
    assert reserve(world) == Reason.OK
    assert Reason.OK in world.acquire(hot, [key(0)]).reason


def test_slabs_are_not_given_up_one_after_another_while_no_memory_comes() -> None:
    world = world_of(12, slabs=3)
    world.send(ev.GraceEnded())
    assert reserve(world) == Reason.NOT_READY
    (slab,) = world.given_up
    world.replace(slab, populated=False)
    for _ in range(5):
        world.now += 10
        assert reserve(world) in (Reason.NOT_READY, Reason.POOL_FULL)
        assert not world.given_up
    assert len(places(world, 12)) == 8
    world.send(ev.Populated(heir_of(slab), TILES * TILE_BYTES))
    assert reserve(world) == Reason.OK


def test_no_hot_slab_is_given_up_for_a_colder_one_while_memory_is_awaited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(victims, "MAX_TRIES", 2)
    world = world_of(12, slabs=3)
    world.send(ev.GraceEnded())
    assert reserve(world) == Reason.NOT_READY
    (first,) = world.given_up
    cold, warm = sorted({row.slab for row in world.core.views.spans(now_ms=world.now)})
    hot = world.connect()
    for row in world.core.views.spans(now_ms=world.now):
        if row.slab == warm:
            world.release(hot, [world.acquire(hot, [row.key]).lease])
    world.replace(first, populated=False)
    for _ in range(3):
        world.now += 10
        assert reserve(world) in (Reason.NOT_READY, Reason.POOL_FULL)
    world.send(ev.Populated(heir_of(first), TILES * TILE_BYTES))
    world.store(hot, [key(("new", n)) for n in range(TILES)])
    assert reserve(world) == Reason.NOT_READY
    assert set(world.given_up) == {cold}


def test_a_slab_among_what_was_looked_at_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its spans lie between others beside which there is no room."""
    monkeypatch.setattr(victims, "MAX_TRIES", 2)
    world = World({0: 8, 1: 8}, hardened=True, patience_ms=1)
    world.store(world.connect(), [key(n) for n in range(9)])
    world.restart()
    world.settle()
    world.send(ev.GraceEnded())
    rows = {row.key: row for row in world.core.views.spans(now_ms=world.now)}
    alone = rows[key(8)].slab
    world.send(ev.Evict([rows[key(n)].slot for n in range(8)]))
    world.replace(1 - alone)
    session = world.connect()
    world.store(session, [key(n) for n in range(20, 28)])
    for n in range(20, 28, 2):
        world.acquire(session, [key(n)])
    for n in (21, 8, 23, 25, 27):
        world.release(session, [world.acquire(session, [key(n)]).lease])
    assert reserve(world, length=2 * TILE_BYTES) == Reason.NOT_READY
    assert set(world.given_up) == {alone}


def test_a_spare_is_not_taken_for_the_memory_of_a_daemon_that_was_broken_off() -> None:
    """One that took over wrote into a slab of this number, which went with it."""
    world = world_of(1, slabs=1)
    sizes, memory, sealed = dict(world.sizes), dict(world.memory), set(world.sealed)
    # The one that takes over: it gives the slab up, and stores in its own spare.
    world.restart()
    world.settle()
    world.send(ev.GraceEnded())
    world.send(ev.Evict([row.slot for row in world.core.views.spans(now_ms=world.now)]))
    world.replace(0)
    world.store(world.connect(), [key("theirs")])
    assert world.sizes == {heir_of(0): TILES}
    # It is broken off. Control of the one before starts anew, with the catalog as it is.
    world.sizes, world.memory, world.sealed = sizes, memory, sealed
    world.restart()
    assert world.given_up == {0: TILES}
    world.replace(0)
    assert world.core.counters["recovered_dropped"] == 1
    world.check()
    # Nothing was visible in that memory, so that nothing waits for anybody.
    world.store(world.connect(), [key("theirs")])
    world.send(ev.GraceEnded())
    world.store(world.connect(), [key(n) for n in range(1, TILES)])
    world.check()
