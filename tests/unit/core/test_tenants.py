"""Tenants: apart in slabs, quotas, eviction, the index and what they are told."""

from __future__ import annotations

import pytest
from contents import NAMESPACE, SHARD, key
from hypothesis import given
from hypothesis import strategies as st
from world import World

from kmesh.layout import TILE_BYTES, Shard
from kmesh_spand.core import events as ev
from kmesh_spand.core import requests as rq
from kmesh_spand.core import results as rs
from kmesh_spand.core.batch import Rows
from kmesh_spand.core.codes import Reason
from kmesh_spand.core.policy import LRU
from kmesh_spand.core.tenants import (
    MAX_IDLE,
    OWNER_BYTES,
    SHARED,
    OwnerState,
    SlabOwner,
    Tenancy,
    decode_owner,
    tenant_name,
)

A, B = key("salt a"), key("salt b")
TWO = Tenancy(groups=(1000, 1001))


def names(world: World, slab: int) -> str:
    return {item.slab: item.tenant for item in world.core.views.status().slabs}[slab]


def test_the_same_key_of_two_uids_is_two_spans() -> None:
    world = World({0: 4, 1: 4}, tenancy=TWO)
    mine, theirs = world.connect(uid=1000), world.connect(uid=1001)
    world.store(mine, [key(1)])
    assert world.acquire(theirs, [key(1)]).reason == [Reason.MISS]
    # Not even that it exists is told.
    world.store(theirs, [key(1)])
    first, second = world.acquire(mine, [key(1)]), world.acquire(theirs, [key(1)])
    assert [first.slab[0], second.slab[0]] == [0, 1]
    assert (names(world, 0), names(world, 1)) == ("1000", "1001")
    assert {group for group, *_ in world.index} == {1000, 1001}
    assert [world.core.may_map(slab, uid) for uid in (1000, 1001) for slab in (0, 1)] == [
        True,
        False,
        False,
        True,
    ]
    world.check()


def test_the_same_key_under_two_salts_is_two_spans() -> None:
    world = World({0: 4, 1: 4}, tenancy=TWO)
    session = world.connect()
    world.store(session, [key(1)], salt=A)
    for salt in (b"", B):
        assert world.acquire(session, [key(1)], salt=salt).reason == [Reason.MISS]
    assert world.acquire(session, [key(1)], salt=A).reason == [Reason.OK]
    # The other uid's slab is kept for it.
    assert world.reserve(session, [key(2)], salt=B).reason == [Reason.POOL_FULL]
    world.check()


def test_sharing_is_asked_for() -> None:
    world = World({0: 4}, tenancy=Tenancy(groups=(SHARED,), shared=True))
    world.store(world.connect(uid=1), [key(1)])
    other = world.connect(uid=2)
    assert world.acquire(other, [key(1)]).reason == [Reason.OK]
    assert world.core.may_map(0, 2)
    assert [row.name for row in world.core.views.tenants()] == ["all"]


def test_eviction_stays_inside_a_tenant() -> None:
    world = World({0: 2, 1: 2}, tenancy=TWO)
    mine, theirs = world.connect(uid=1000), world.connect(uid=1001)
    world.store(theirs, [key("old")])
    for number in range(20):
        world.store(mine, [key(number)])
    assert world.acquire(theirs, [key("old")]).reason == [Reason.OK]
    mine_row, their_row = world.core.views.tenants()
    assert (mine_row.spans, mine_row.counters["evicted"]) == (2, 18)
    assert (their_row.spans, their_row.counters["evicted"]) == (1, 0)
    assert mine_row.counters["committed"] == 20
    assert their_row.counters["hits"] == 1
    world.check()


def test_a_quota_evicts_and_then_refuses() -> None:
    tenancy = Tenancy(groups=(1000,), quotas={"1000": 2 * TILE_BYTES})
    world = World({0: 8}, tenancy=tenancy)
    session = world.connect()
    world.store(session, [key(1), key(2)])
    world.store(session, [key(3)])
    assert world.acquire(session, [key(1)]).reason == [Reason.MISS]
    lease = world.acquire(session, [key(2), key(3)]).lease
    assert world.reserve(session, [key(4)]).reason == [Reason.QUOTA]
    assert world.reserve(session, [key(4)], length=3 * TILE_BYTES).reason == [Reason.QUOTA]
    world.release(session, [lease])
    world.store(session, [key(4)], length=2 * TILE_BYTES)
    (row,) = world.core.views.tenants()
    assert (row.quota, row.used, row.spans) == (2 * TILE_BYTES, 2 * TILE_BYTES, 1)
    assert row.counters["reserve_quota"] == 2
    assert world.core.counters["reserve_quota"] == 2
    world.check()


def test_quotas_are_found_by_name() -> None:
    tenancy = Tenancy(quotas={"7": 1, tenant_name(7, A): 2}, default_quota=3)
    assert [tenancy.quota(*who) for who in ((7, b""), (7, A), (7, B), (8, A))] == [1, 2, 1, 3]


def test_an_empty_slab_goes_to_the_next_salt_wiped() -> None:
    world = World({0: 4}, tenancy=Tenancy(groups=(1000,)))
    session = world.connect()
    answer = world.reserve(session, [key(1)], salt=A)
    world.commit(session, list(answer.reservation))
    assert world.reserve(session, [key(2)], salt=B).reason == [Reason.POOL_FULL]
    world.copy_ends(*world.copies, ok=False)
    # Bytes of A are in the slab, though it holds nothing.
    assert world.memory
    assert world.reserve(session, [key(2)], salt=B).reason == [Reason.NOT_READY]
    assert world.reserve(session, [key(2)], salt=B).reason == [Reason.NOT_READY]
    (job,) = world.wipes
    world.wipe_ends(job)
    world.store(session, [key(2)], salt=B)
    assert names(world, 0) == tenant_name(1000, B)
    assert world.core.counters["wiped"] == 1
    world.check()


def test_a_slab_that_can_not_be_wiped_is_not_used() -> None:
    world = World({0: 4, 1: 4}, tenancy=Tenancy(groups=(1000,)))
    session = world.connect()
    world.store(session, [key(1)], salt=A)
    answer = world.reserve(session, [key(1)], salt=B)
    world.abort(session, list(answer.reservation))
    third = key("salt c")
    assert world.reserve(session, [key(2)], salt=third).reason == [Reason.NOT_READY]
    world.wipe_ends(*world.wipes, ok=False)
    assert world.reserve(session, [key(2)], salt=third).reason == [Reason.POOL_FULL]
    assert not world.core.may_map(1, 1000)
    assert world.core.counters["wipe_failed"] == 1
    world.check()


def test_a_wipe_that_a_restart_cut_short_begins_again() -> None:
    world = World({0: 4}, tenancy=Tenancy(groups=(1000,)))
    session = world.connect()
    answer = world.reserve(session, [key(1)], salt=A)
    world.commit(session, list(answer.reservation))
    world.copy_ends(*world.copies, ok=False)
    world.reserve(session, [key(2)], salt=B)
    world.restart()
    session = world.connect()
    assert world.reserve(session, [key(2)], salt=B).reason == [Reason.NOT_READY]
    world.wipe_ends(*world.wipes)
    world.store(session, [key(2)], salt=B)
    world.check()


def test_another_uid_never_gets_a_slab_that_was_mapped() -> None:
    world = World({0: 4, 1: 4, 2: 4}, tenancy=TWO)
    mine, theirs = world.connect(uid=1000), world.connect(uid=1001)
    for number in range(2):
        answer = world.reserve(mine, [key(number)], length=4 * TILE_BYTES)
        world.abort(mine, list(answer.reservation))
    world.store(mine, [key(1)], length=4 * TILE_BYTES)
    world.store(mine, [key(2)], length=4 * TILE_BYTES)
    # One is kept for the other uid, which then has no more than that.
    assert world.reserve(mine, [key(3)], length=4 * TILE_BYTES, salt=A).reason == [Reason.POOL_FULL]
    world.store(theirs, [key(1)], length=4 * TILE_BYTES)
    world.restart()
    world.settle()
    world.send(ev.GraceEnded())
    assert [world.core.may_map(slab, 1000) for slab in range(3)] == [True, True, False]
    session = world.connect(uid=1001)
    for number in range(5):
        world.store(session, [key(number)], length=4 * TILE_BYTES)
    assert [world.core.may_map(slab, 1001) for slab in range(3)] == [False, False, True]
    world.check()


def test_spans_stay_their_tenants_over_a_restart() -> None:
    world = World({0: 4, 1: 4, 2: 4}, tenancy=TWO)
    mine, theirs = world.connect(uid=1000), world.connect(uid=1001)
    world.store(mine, [key(1)])
    world.store(mine, [key(2)], salt=A)
    world.store(theirs, [key(3)])
    world.restart()
    world.settle()
    mine, theirs = world.connect(uid=1000), world.connect(uid=1001)
    keys = [key(1), key(2), key(3)]
    ok, miss = Reason.OK, Reason.MISS
    assert world.acquire(mine, keys).reason == [ok, miss, miss]
    assert world.acquire(mine, keys, salt=A).reason == [miss, ok, miss]
    assert world.acquire(theirs, keys).reason == [miss, miss, ok]
    world.check()


def test_without_its_owner_a_slab_is_lost() -> None:
    world = World({0: 4, 1: 4}, tenancy=TWO)
    world.store(world.connect(), [key(1)])
    del world.owners[0]
    world.restart()
    session = world.connect()
    assert world.acquire(session, [key(1)]).reason == [Reason.MISS]
    assert world.core.counters["recovered_dropped"] == 1
    world.send(ev.GraceEnded())
    world.store(session, [key(1)])
    assert not world.core.may_map(0, 1000)
    world.check()


def test_lists_can_be_limited_to_a_group() -> None:
    world = World({0: 4, 1: 4}, tenancy=TWO)
    world.store(world.connect(uid=1000), [key(1)])
    world.store(world.connect(uid=1001), [key(2), key(3)])
    for group, spans in ((1000, 1), (1001, 2), (1002, 0), (None, 3)):
        assert len(world.core.views.spans(now_ms=0, group=group)) == spans
        assert sum(row.spans for row in world.core.views.namespaces(group)) == spans
    assert [row.name for row in world.core.views.tenants(1001)] == ["1001"]


def test_a_sweep_of_a_group_does_not_depend_on_what_others_have(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World({0: 4, 1: 4}, tenancy=TWO)
    theirs = world.connect(uid=1001)
    for shard in (SHARD, Shard(0, 1, 0, 1).code()):
        world.store(theirs, [key(1), key(2)], shard=shard)
    sweep, ages = world.core.sweep, {"min_age_ms": 0, "min_idle_ms": 0, "now_ms": world.now}
    unknown, known = (
        sweep.part(0, 1, name, **ages, group=1000) for name in (key("no namespace"), NAMESPACE)
    )
    assert unknown == known
    assert known.next_slot == 1
    table = world.core._store.table
    find_all, tried = table.find_all, list[int]()

    def counted(keys: bytes, scope: int) -> tuple[Rows, int]:
        tried.append(scope)
        return find_all(keys, scope)

    monkeypatch.setattr(table, "find_all", counted)
    for group, scopes in ((1000, 0), (1001, 2)):
        tried.clear()
        sweep.keys(key(1), **ages, group=group)
        assert len(tried) == scopes


def test_a_sweep_can_be_limited_to_a_group() -> None:
    world = World({0: 4, 1: 4}, tenancy=TWO)
    world.store(world.connect(uid=1000), [key(1)])
    theirs = world.connect(uid=1001)
    world.store(theirs, [key(1), key(2)])
    world.acquire(theirs, [key(2)])
    sweep, ages = world.core.sweep, {"min_age_ms": 0, "min_idle_ms": 0, "now_ms": world.now}
    for group, spans, leased in ((1000, 1, 0), (1001, 1, 1), (1002, 0, 0), (None, 2, 1)):
        by_key = sweep.keys(key(1) + key(2), **ages, group=group)
        for swept in (by_key, sweep.part(0, 64, **ages, group=group)):
            assert (len(swept.slots), swept.leased) == (spans, leased)


def test_salts_that_get_nothing_are_forgotten() -> None:
    world = World({0: 1}, tenancy=Tenancy(groups=(1000,)))
    session = world.connect()
    world.store(session, [key(1)])
    for number in range(2 * MAX_IDLE):
        answer = world.reserve(session, [key(2)], salt=key(number))
        assert answer.reason == [Reason.POOL_FULL]
    assert len(world.core.views.tenants()) == MAX_IDLE + 1
    world.check()


@pytest.mark.parametrize("length", [1, 31, 33])
def test_a_salt_is_a_digest(length: int) -> None:
    world = World({0: 1})
    session = world.connect()
    answer = world.ask(rq.Acquire, session, key(1), [SHARD], False, bytes(length))
    assert isinstance(answer, rs.Refused)
    assert answer.field == "salt"
    answer = world.ask(
        rq.Reserve, session, key(0), SHARD, key(1), [64], [0], [1], b"", bytes(length)
    )
    assert isinstance(answer, rs.Refused)
    assert answer.field == "salt"


def test_a_name_shows_no_salt() -> None:
    assert tenant_name(1000, b"") == "1000"
    assert tenant_name(SHARED, b"") == "all"
    name = tenant_name(1000, A)
    assert name.startswith("1000:")
    assert A.hex()[:8] not in name
    assert name != tenant_name(1000, B)


@given(
    st.sampled_from([OwnerState.OWNED, OwnerState.DIRTY, OwnerState.CLEAN]),
    st.integers(0, SHARED),
    st.sampled_from([b"", A, bytes(32)]),
    st.integers(0, OWNER_BYTES - 1),
    st.integers(1, 255),
)
def test_owners_are_read_as_written(
    state: OwnerState, group: int, salt: bytes, at: int, flip: int
) -> None:
    owner = SlabOwner(state, group, salt)
    data = bytearray(owner.encode())
    assert len(data) == OWNER_BYTES
    assert decode_owner(data) == owner
    data[at] ^= flip
    found = decode_owner(data)
    assert found is not None
    assert found.state is OwnerState.LOST
    assert decode_owner(bytes(OWNER_BYTES)) is None


def test_lists_of_several_tenants_share_columns() -> None:
    first = LRU(5)
    second = first.another()
    first.add([1, 2])
    second.add([3, 4, 5])
    second.discard([4])
    first.add([4])
    assert (list(first.victims()), list(second.victims())) == ([1, 2, 4], [3, 5])
