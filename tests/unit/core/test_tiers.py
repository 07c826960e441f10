"""Host memory and GPUs: apart in names, slabs, eviction and the index."""

from __future__ import annotations

from contents import key
from world import World

from kmesh.layout import TILE_BYTES
from kmesh_spand.core import events as ev
from kmesh_spand.core import requests as rq
from kmesh_spand.core.codes import Reason
from kmesh_spand.core.tenants import Tenancy

A, B = key("salt a"), key("salt b")
#: Two slabs of host memory, one on the first GPU, two on the second.
TIERS = {2: 1, 3: 2, 4: 2}
SIZES = {0: 4, 1: 4, 2: 3, 3: 2, 4: 2}


def world_of_tiers(**how: object) -> World:
    return World(SIZES, tiers=TIERS, tenancy=Tenancy(groups=(1000,)), **how)  # type: ignore[arg-type]


def test_the_same_key_in_two_tiers_is_two_spans() -> None:
    world = world_of_tiers()
    session = world.connect()
    world.store(session, [key(1)])
    assert world.acquire(session, [key(1)], tier=1).reason == [Reason.MISS]
    world.store(session, [key(1)], tier=1)
    world.store(session, [key(1)], tier=2)
    assert world.reserve(session, [key(1)], tier=1).reason == [Reason.EXISTS]
    slabs = [world.acquire(session, [key(1)], tier=tier).slab[0] for tier in (0, 1, 2)]
    assert slabs == [0, 2, 3]
    names = [(row.name, row.spans, row.slabs) for row in world.core.views.tenants()]
    assert names == [("1000", 1, 1), ("1000@gpu0", 1, 1), ("1000@gpu1", 1, 1)]
    assert [row.tenant for row in world.core.views.status().slabs] == [
        *("1000", "", "1000@gpu0", "1000@gpu1", ""),
    ]
    world.check()


def test_the_index_tells_tiers_apart() -> None:
    world = world_of_tiers()
    session = world.connect()
    world.store(session, [key(1), key(2)], tier=1)
    assert {tier for _, tier, _ in world.index} == {1}
    assert world.core.views.status().index_entries == 2
    world.store(session, [key(1)])
    assert sorted(tier for _, tier, _ in world.index) == [0, 1, 1]
    world.check()


def test_eviction_stays_inside_a_tier() -> None:
    world = world_of_tiers()
    session = world.connect()
    world.store(session, [key("old")])
    for number in range(10):
        world.store(session, [key(number)], tier=1)
    assert world.acquire(session, [key("old")]).reason == [Reason.OK]
    for number, reason in ((6, Reason.MISS), (7, Reason.OK), (9, Reason.OK)):
        assert world.acquire(session, [key(number)], tier=1).reason == [reason]
    # All of it is leased now, and nothing of another tier is taken for it.
    world.acquire(session, [key(8)], tier=1)
    assert world.reserve(session, [key(11)], tier=1).reason == [Reason.POOL_FULL]
    assert world.core.views.status().slabs[2].used == 3 * TILE_BYTES
    assert world.core.views.status().slabs[4].used == 0
    world.check()


def test_what_no_slab_of_a_tier_can_hold_is_too_large() -> None:
    world = world_of_tiers()
    session = world.connect()
    for tier, most in ((0, 4), (1, 3), (2, 2)):
        too_long = world.reserve(session, [key(tier)], length=(most + 1) * TILE_BYTES, tier=tier)
        assert too_long.reason == [Reason.TOO_LARGE]
        world.store(session, [key(tier)], length=most * TILE_BYTES, tier=tier)


def test_a_tier_without_slabs_is_not_ready() -> None:
    world = world_of_tiers()
    session = world.connect()
    assert world.reserve(session, [key(1)], tier=3).reason == [Reason.NOT_READY]
    assert world.acquire(session, [key(1)], tier=3).reason == [Reason.MISS]


def test_an_empty_slab_goes_to_another_salt_of_its_tier_only() -> None:
    world = World({0: 2, 1: 2}, tiers={1: 1}, tenancy=Tenancy(groups=(1000,)))
    session = world.connect()
    world.store(session, [key(1)], salt=A)
    # The GPU's slab is nobody's, but it is no host memory.
    assert world.reserve(session, [key(2)], salt=B).reason == [Reason.POOL_FULL]
    world.store(session, [key(3)], salt=A, tier=1)
    assert world.reserve(session, [key(4)], salt=B, tier=1).reason == [Reason.POOL_FULL]
    world.send(ev.Evict([slot for slot in range(world.config.max_spans)]))
    assert world.reserve(session, [key(4)], salt=B, tier=1).reason == [Reason.NOT_READY]
    assert list(world.wipes.values()) == [1]
    world.check()


def test_a_restart_puts_spans_back_into_their_tier() -> None:
    world = world_of_tiers()
    session = world.connect()
    world.store(session, [key(1)])
    world.store(session, [key(1), key(2)], tier=1)
    world.restart()
    for job in list(world.verifies):
        world.verify_ends(job)
    session = world.connect()
    found = world.acquire(session, [key(1), key(2)], tier=1)
    assert (found.reason, list(found.slab)) == ([Reason.OK] * 2, [2, 2])
    assert world.acquire(session, [key(2)]).reason == [Reason.MISS]
    assert len(world.index) == 3
    world.check()


def test_a_tier_whose_worker_is_down_keeps_no_other_from_being_verified() -> None:
    """Its verifications wait for it, and are as many as may be in flight."""
    world = world_of_tiers(max_verify=1)
    session = world.connect()
    world.store(session, [key(1), key(2), key(3)], tier=1)
    world.store(session, [key(4), key(5)])
    world.restart()
    session = world.connect()
    # One of the GPU is wanted first.
    assert world.acquire(session, [key(1)], tier=1).reason == [Reason.PENDING]
    for _ in range(2):
        (job,) = [job for job, verify in world.verifies.items() if verify.slab in (0, 1)]
        world.verify_ends(job)
    lease = world.acquire(session, [key(4), key(5)])
    assert lease.reason == [Reason.OK] * 2
    world.ask(rq.ReportCorrupt, session, lease.lease, [0])
    (job,) = [job for job, verify in world.verifies.items() if verify.slab in (0, 1)]
    world.verify_ends(job)
    assert world.core.counters["corrupt_false"] == 1
    (waiting,) = world.verifies.values()
    assert waiting.slab == 2
    for _ in range(3):
        world.verify_ends(min(world.verifies))
    assert world.acquire(session, [key(1), key(2), key(3)], tier=1).reason == [Reason.OK] * 3
    world.check()


def test_the_limit_of_verifications_is_each_tiers_own() -> None:
    world = world_of_tiers(max_verify=2)
    session = world.connect()
    for tier in (0, 1, 2):
        world.store(session, [key((tier, n)) for n in range(3)], tier=tier)
    world.restart()
    assert sorted(world.tiers.get(v.slab, 0) for v in world.verifies.values()) == [0, 0, 1, 1, 2, 2]
    world.settle()
    assert world.core.counters["verified"] == 9
    world.check()


def test_however_many_rows_of_a_tier_that_is_down_come_first_the_others_are_verified() -> None:
    """They lie in runs that are longer than anybody would look at in one go."""
    world = World(
        {0: 3, 1: 160},
        tiers={1: 1},
        tenancy=Tenancy(groups=(1000,)),
        max_spans=123,
        max_verify=2,
    )
    session = world.connect()
    for run in range(3):
        world.store(session, [key((run, n)) for n in range(40)], tier=1)
        world.store(session, [key((run, "host"))])
    world.restart()
    for _ in range(3):
        mine = [job for job, verify in world.verifies.items() if verify.slab == 0]
        world.verify_ends(mine[0])
    session = world.connect()
    found = world.acquire(session, [key((run, "host")) for run in range(3)])
    assert found.reason == [Reason.OK] * 3
    assert [verify.slab for verify in world.verifies.values()] == [1, 1]
    # What is evicted while it waits, and what is given its row, is passed over.
    rows = world.core.views.spans(limit=200, now_ms=world.now)
    gone = [row.slot for row in rows if row.state == "recovered"][:20]
    world.send(ev.Evict(gone))
    world.store(session, [key(("new", n)) for n in range(20)], tier=1)
    world.settle()
    assert world.core.counters["verified"] == 103
    world.check()
