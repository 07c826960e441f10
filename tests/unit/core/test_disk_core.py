"""The disk tier in the core: what is written, what room it takes, and what is given up."""

from __future__ import annotations

from asking import A, B
from contents import SHARD, key
from disk_cases import ONE, made, names, on_disk
from disk_world import DiskWorld
from mirror_cases import DENSE, declare, join, settle

from kmesh.layout import TILE_BYTES
from kmesh_spand.core import events as ev
from kmesh_spand.core import results as rs
from kmesh_spand.core.codes import Reason, Trouble, Verdict
from kmesh_spand.core.config import DiskConfig
from kmesh_spand.core.tags import tag


def test_what_memory_forgets_is_found_in_its_file() -> None:
    world = made()
    session = world.connect()
    for number in range(3):
        world.store(session, names(number))
        world.settle()
    assert world.core.counters["evicted"] == 1
    assert world.core.counters["disk_spilled"] == 3
    assert set(world.disk_index) == {(1000, tag(key(0), SHARD))}
    assert world.core.fates.of(key(0), SHARD, world.now).verdict is Verdict.ON_DISK
    answer = world.acquire(session, names(0))
    assert list(answer.reason) == [Reason.PENDING]
    world.settle()
    assert list(world.acquire(session, names(0)).reason) == [Reason.OK]
    assert world.core.counters["disk_fetched"] == 1
    world.check()


def test_a_disk_that_refuses_is_left_alone_and_tried_again() -> None:
    world = made(hold_ms=1000, longest_hold_ms=2000)
    session = world.connect()
    pauses = []
    for number in range(3):
        world.store(session, names(number))
        world.spill_ends(next(iter(world.spills)), Trouble.IO)
        world.check()
        world.store(session, names(10 + number))
        assert not world.spills
        for waited in range(10):
            world.now += 500
            world.send(ev.Tick())
            if world.spills:
                pauses.append((waited + 1) * 500)
                break
        world.spill_ends(next(iter(world.spills)), Trouble.IO)
        world.now += 2000
        world.send(ev.Tick())
    assert pauses[0] == 1000
    assert set(pauses[1:]) == {2000}
    assert world.core.counters["disk_spill_failed"] == 6
    world.store(session, names(99))
    world.settle()
    assert world.core.disk is not None
    assert world.core.disk.failing_since_ms is None


def test_a_full_file_system_costs_our_own_oldest_files() -> None:
    world = made(hold_ms=1000)
    session = on_disk(world, 3)
    world.store(session, names(7))
    world.spill_ends(next(iter(world.spills)), Trouble.FULL)
    assert [unlink.name for unlink in world.unlinks.values()] == [1]
    world.settle()
    assert sorted(world.files) == [2, 3]
    world.check()


def test_the_disk_is_never_fuller_than_it_may_be() -> None:
    world = made(files=3)
    session = world.connect()
    for number in range(4):
        world.store(session, names(number))
        for job in list(world.spills):
            world.spill_ends(job)
    # Only once a file is gone is the next one written.
    assert (len(world.files), len(world.unlinks), world.spills) == (3, 1, {})
    world.check()
    world.unlink_ends(next(iter(world.unlinks)))
    assert len(world.spills) == 1
    for number in range(4, 10):
        world.settle()
        world.store(session, names(number))
        world.check()
    world.settle()
    assert len(world.files) == 3
    assert world.core.counters["disk_evicted"] == 7


def test_the_last_used_file_stays() -> None:
    world = made(files=2)
    session = on_disk(world, 2)
    world.acquire(session, names(0))
    world.settle()
    world.store(session, names(5))
    world.settle()
    assert {span.key for span, _ in world.files.values()} == {key(0), key(5)}


def test_a_quota_is_a_tenants_own() -> None:
    world = made(files=8, tiles=6, quotas={"1000": 2 * ONE})
    session = world.connect()
    salt = key("salt")
    for number in range(4):
        world.store(session, names(number))
        world.settle()
        world.check_room()
    assert len(world.files) == 2
    big = DiskWorld(
        {0: 2, 1: 2}, disk=DiskConfig(capacity=3 * ONE, max_files=64, quotas={"1000": 2 * ONE})
    )
    big.scan()
    session = big.connect()
    for number in range(2):
        big.store(session, names(number))
        big.store(session, [key((number, "salted"))], salt=salt)
        big.settle()
        big.check()
    # The one who has more gives way.
    assert sorted(bool(span.salt) for span, _ in big.files.values()) in (
        [False, False, True],
        [False, True, True],
    )
    assert big.core.counters["disk_evicted"] == 1


def test_a_span_stored_again_with_other_bytes_replaces_its_file() -> None:
    world = made()
    session = on_disk(world)
    world.store(session, names(0))
    assert [unlink.name for unlink in world.unlinks.values()] == [1]
    world.settle()
    assert sorted(world.files) == [2]
    world.check()


def test_a_file_that_is_written_when_its_span_is_stored_anew_is_abandoned() -> None:
    world = made(tiles=1)
    session = world.connect()
    world.store(session, names(0))
    rows = world.core.views.spans(now_ms=world.now)
    spill = next(iter(world.spills))
    world.spills[spill], kept = world.spills[spill], dict(world.memory)
    world.send(ev.Evict([row.slot for row in rows]))
    world.store(session, names(0))
    now, world.memory = world.memory, kept
    world.spill_ends(spill)
    world.memory = now
    world.check()
    world.settle()
    assert [content for _, content in world.files.values()] == [world.content]


def test_tails_are_found_by_all_of_their_names() -> None:
    world = made()
    session = world.connect()
    sub_keys = tuple(names(16, 32))
    world.store(session, names(48), tokens=48, sub_keys=sub_keys)
    world.settle()
    world.send(ev.Evict([row.slot for row in world.core.views.spans(now_ms=world.now)]))
    assert len(world.disk_index) == 3
    world.reboot()
    world.scan()
    session = world.connect()
    assert len(world.disk_index) == 3
    assert world.acquire_waiting(session, names(16)) is None
    world.settle()
    assert len(world.leases) == 1
    for name in (16, 32, 48):
        assert list(world.acquire(session, names(name)).reason) == [Reason.OK]
    world.check()


def test_shards_are_found_of_what_only_the_disk_has() -> None:
    world = made()
    on_disk(world, 2)
    world.reboot()
    world.scan()
    fates = world.core.fates
    assert fates.shards(key(0), 16) == [SHARD]
    assert fates.of(key(0), SHARD, world.now).verdict is Verdict.ON_DISK
    assert fates.shards(key(9), 16) == []


def test_a_worker_that_dies_takes_nothing_along() -> None:
    world = made()
    session = on_disk(world, 2)
    world.store(session, names(5))
    assert world.acquire_waiting(session, names(0)) is None
    world.worker_dies()
    answer = world.answered[session, world.request]
    assert isinstance(answer, rs.AcquireResult)
    assert list(answer.reason) == [Reason.MISS]
    world.check()
    world.scan()
    world.now += 10_000
    world.send(ev.Tick())
    assert world.acquire_waiting(session, names(0)) is None
    world.settle()
    world.check()
    assert world.core.counters["disk_found"] == 0


def test_an_operator_forgets_files_too() -> None:
    world = made()
    session = on_disk(world, 2)
    assert world.core.disk is not None
    swept = world.core.sweep.files(0, 100)
    assert len(swept.slots) == 2
    world.send(ev.Forget([*swept.slots, 0, -1, 10**6]))
    world.settle()
    assert not world.files
    assert list(world.acquire(session, names(0)).reason) == [Reason.MISS]
    world.check()


def test_a_drain_waits_for_what_is_to_be_written() -> None:
    world = made(max_writes=1)
    session = world.connect()
    world.store(session, names(0))
    world.store(session, names(1))
    world.send(ev.Drain())
    assert not world.core.idle
    world.spill_ends(next(iter(world.spills)))
    assert not world.core.idle
    world.spill_ends(next(iter(world.spills)))
    assert world.core.idle
    world.check()


def test_a_recipe_is_not_written_and_its_payload_stays_in_the_file() -> None:
    world = DiskWorld({0: 24}, disk=DiskConfig(capacity=64 * ONE, max_files=64))
    world.scan()
    session = world.connect()
    for name in (A, B):
        world.store(session, [name], length=DENSE)
        world.settle()
    assert isinstance(declare(world, session, [A]), rs.DeclareResult)
    assert join(world, session, [B]) == rs.JoinResult(1, 1)
    settle(world)
    assert world.core.views.status().mirrors == 1
    before = dict(world.files)
    assert len(before) == 2
    # The file of a span that is a recipe now is as it was, also after a restart.
    world.restart()
    world.send(ev.GraceEnded())
    world.scan()
    world.settle()
    assert world.core.views.status().mirrors == 1
    assert world.files == before
    world.check()
    session = world.connect()
    slot = next(row.slot for row in world.core.views.spans(now_ms=world.now) if row.key == B)
    world.send(ev.Evict([slot]))
    assert world.core.views.status().mirrors == 0
    world.check()
    assert world.acquire_waiting(session, [B]) is None
    world.settle()
    ((_, (held,)),) = world.leases.values()
    assert held is not None
    assert held.count == DENSE // TILE_BYTES
    world.check()


def test_namespaces_of_which_only_files_are_left() -> None:
    world = made(tiles=4)
    assert world.core.views.namespaces() == []
    on_disk(world, 3)
    (space,) = world.core.views.namespaces()
    assert (space.spans, space.files, space.file_bytes) == (0, 3, 3 * TILE_BYTES)
    assert world.core.views.namespaces(group=1000) == [space]
    assert world.core.views.namespaces(group=1001) == []
    world.acquire(world.connect(), names(0))
    world.settle()
    (space,) = world.core.views.namespaces()
    assert (space.spans, space.bytes, space.files) == (1, TILE_BYTES, 3)
    assert world.core.disk is not None
    world.send(ev.Forget(world.core.sweep.files(0, 100).slots))
    (space,) = world.core.views.namespaces()
    assert (space.spans, space.files) == (1, 0)
    world.check()


def test_files_are_removed_a_few_at_a_time() -> None:
    world = made(files=40, tiles=40, max_removals=4)
    on_disk(world, 30)
    assert world.core.disk is not None
    world.send(ev.Forget(world.core.sweep.files(0, 100).slots))
    assert len(world.unlinks) == 4
    world.check()
    removed = 0
    while world.unlinks:
        assert len(world.unlinks) <= 4
        world.unlink_ends(next(iter(world.unlinks)))
        removed += 1
        world.check()
    assert removed == 30
    assert not world.files
