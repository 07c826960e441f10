"""The disk tier in the core: what is written, found, fetched and given up."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from asking import A, B
from disk_world import DiskWorld
from test_mirrors import DENSE, declare, join, settle
from world import SHARD, key

from kmesh.layout import TILE_BYTES
from kmesh_spand.core import events as ev
from kmesh_spand.core import requests as rq
from kmesh_spand.core import results as rs
from kmesh_spand.core.codes import Reason, Trouble, Verdict
from kmesh_spand.core.config import DiskConfig
from kmesh_spand.core.diskfile import file_bytes
from kmesh_spand.core.tags import tag
from kmesh_spand.core.tenants import Tenancy, decode_owner

ONE = file_bytes(TILE_BYTES, 0)


def made(files: int = 8, tiles: int = 2, **limits: object) -> DiskWorld:
    config = DiskConfig(capacity=files * ONE, max_files=64, **limits)  # type: ignore[arg-type]
    world = DiskWorld({0: tiles}, disk=config)
    world.scan()
    return world


def names(*numbers: int) -> list[bytes]:
    return [key(number) for number in numbers]


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


def test_an_acquire_that_waits_is_answered_when_all_has_come() -> None:
    world = made(tiles=4)
    session = world.connect()
    for number in range(8):
        world.store(session, names(number))
        world.settle()
    wanted = names(0, 1, 7)
    assert world.acquire_waiting(session, wanted) is None
    (first, second) = list(world.fetches)
    world.fetch_ends(first)
    assert world.arrivals
    world.check()
    world.fetch_ends(second)
    assert not world.arrivals
    (lease,) = world.leases.values()
    assert all(lease[1])
    world.check()


def test_what_is_here_makes_no_room_for_what_comes() -> None:
    world = made(tiles=2)
    session = world.connect()
    for number in range(3):
        world.store(session, names(number))
        world.settle()
    # Span 1 was used before span 2, and would be the first to go.
    assert world.acquire_waiting(session, names(1, 0)) is None
    world.check()
    world.settle()
    (lease,) = world.leases.values()
    assert all(lease[1])
    assert {row.key for row in world.core.spans(now_ms=world.now)} == {key(0), key(1)}
    world.check()


def test_64_sessions_that_want_one_file_read_it_once() -> None:
    world = made()
    first = world.connect()
    for number in range(3):
        world.store(first, names(number))
        world.settle()
    sessions = [world.connect() for _ in range(64)]
    for session in sessions:
        assert world.acquire_waiting(session, names(0)) is None
    assert len(world.fetches) == 1
    world.settle()
    assert len(world.leases) == 64
    assert sum(world.reads.values()) == 1
    counters = world.core.counters
    assert counters["disk_fetched_bytes"] == TILE_BYTES
    assert (counters["disk_fetch_leads"], counters["disk_fetch_joins"]) == (1, 63)
    assert counters["disk_fetch_shared_bytes"] == 63 * TILE_BYTES
    world.check()


def on_disk(world: DiskWorld, count: int = 1) -> int:
    """Spans 0 … count - 1 are only in files."""
    session = world.connect()
    for number in range(count):
        world.store(session, names(number))
        world.settle()
    rows = world.core.spans(now_ms=world.now)
    world.send(ev.Evict([row.slot for row in rows]))
    return session


def test_a_leader_that_dies_strands_nobody() -> None:
    world = made(max_reads=1)
    on_disk(world, 2)
    leader, other, last = (world.connect() for _ in range(3))
    assert world.acquire_waiting(leader, names(0)) is None
    assert world.acquire_waiting(leader, names(1)) is None
    assert world.acquire_waiting(other, names(1)) is None
    world.close(leader)
    assert world.core.counters["disk_fetch_promotions"] == 1
    world.check()
    # What is read already comes; what nobody wants any more is not begun.
    assert world.acquire_waiting(last, names(0, 1)) is None
    world.close(other)
    world.settle()
    assert len(world.leases) == 1
    world.check()


def test_a_flight_that_nobody_wants_is_not_begun() -> None:
    world = made(max_reads=1)
    on_disk(world, 2)
    one, two = world.connect(), world.connect()
    assert world.acquire_waiting(one, names(0)) is None
    assert world.acquire_waiting(two, names(1)) is None
    world.close(two)
    world.settle()
    assert world.reads == {1: 1}
    world.check()


def test_who_has_waited_long_enough_gets_what_is_there() -> None:
    world = made(max_reads=1)
    session = on_disk(world, 2)
    assert world.acquire_waiting(session, names(0, 1)) is None
    world.fetch_ends(next(iter(world.fetches)))
    world.hurry(session, world.request)
    (lease,) = world.leases.values()
    assert [bool(item) for item in lease[1]] == [True, False]
    world.settle()
    # It was told PENDING, so that it came all the same.
    assert world.core.counters["disk_fetched"] == 2
    assert world.core.counters["disk_hurried"] == 1
    world.check()


@pytest.mark.parametrize("how", ["flip", "gone", "other"])
def test_a_file_that_is_not_what_it_was_is_a_miss_and_removed(how: str) -> None:
    world = made()
    session = on_disk(world)
    world.damage(1, how)
    assert world.acquire_waiting(session, names(0)) is None
    world.settle()
    answer = world.answered[session, world.request]
    assert isinstance(answer, rs.AcquireResult)
    assert list(answer.reason) == [Reason.MISS]
    assert world.core.counters["disk_corrupt"] == 1
    assert not world.files
    assert not world.disk_index
    world.store(session, names(0))
    world.check()


def test_a_file_that_can_not_be_read_is_left_alone_and_then_given_up() -> None:
    world = made(hold_ms=1000, max_failures=3)
    session = on_disk(world)
    for attempt in range(3):
        assert world.acquire_waiting(session, names(0)) is None
        world.fetch_ends(next(iter(world.fetches)), Trouble.IO)
        for _ in range(3):
            assert list(world.acquire(session, names(0)).reason) == [Reason.MISS]
        assert not world.fetches
        assert not world.disk_index
        world.now += (1000 << attempt) - 1
        world.send(ev.Tick())
        assert not world.disk_index
        world.now += 1
        world.send(ev.Tick())
        world.check()
    assert world.core.counters["disk_fetch_failed"] == 3
    world.settle()
    assert not world.files


def test_a_fetch_for_which_there_is_no_room_is_not_asked_for_again_at_once() -> None:
    world = made(tiles=1)
    session = on_disk(world, 2)
    world.acquire(session, names(1))
    world.settle()
    assert list(world.acquire(session, names(1)).reason) == [Reason.OK]
    for _ in range(3):
        assert list(world.acquire(session, names(0)).reason) in ([Reason.PENDING], [Reason.MISS])
    assert world.core.counters["disk_fetch_no_room"] == 1
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
    rows = world.core.spans(now_ms=world.now)
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
    world.send(ev.Evict([row.slot for row in world.core.spans(now_ms=world.now)]))
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


def test_tails_that_begin_alike_are_all_fetched() -> None:
    """The first one's file has the names that both have."""
    world = made()
    session = world.connect()
    for number in (48, 49):
        world.store(session, names(number), tokens=48, sub_keys=tuple(names(16, 32)))
        world.settle()
        world.send(ev.Evict([row.slot for row in world.core.spans(now_ms=world.now)]))
    for number in (49, 48):
        assert world.acquire_waiting(session, names(number)) is None
        world.settle()
    assert len(world.leases) == 2
    assert (world.core.counters["disk_fetched"], world.core.counters["disk_corrupt"]) == (2, 0)
    world.check()
    world.reboot()
    world.scan()
    session = world.connect()
    for number in (16, 49, 48):
        world.acquire_waiting(session, names(number))
        world.settle()
        assert list(world.acquire(session, names(number)).reason) == [Reason.OK]
    assert world.core.counters["disk_corrupt"] == 0
    world.check()


def test_a_reboot_serves_what_the_files_hold() -> None:
    world = made()
    on_disk(world, 3)
    world.reboot()
    world.scan()
    session = world.connect()
    assert world.core.counters["disk_found"] == 3
    assert world.acquire_waiting(session, names(0, 1)) is None
    world.settle()
    assert len(world.leases) == 1
    world.check()


def test_a_gpu_that_comes_late_says_nothing_of_the_use_of_files() -> None:
    config = DiskConfig(capacity=2 * ONE, max_files=64)
    world = DiskWorld({0: 2, 1: 2}, disk=config, tiers={1: 1})
    world.scan()
    session = world.connect()
    for number in range(2):
        world.store(session, names(number))
        world.settle()
    world.store(session, names(9), tier=1)
    gpu = world.sizes.pop(1)
    world.restart()
    world.scan()
    world.settle()
    session = world.connect()
    world.now += 1000
    held = world.acquire(session, names(0))
    world.release(session, [held.lease])
    world.now += 1000
    world.sizes[1] = gpu
    world.send(ev.SlabAdded(1, gpu * TILE_BYTES, decode_owner(world.owners[1]), 1))
    world.send(ev.Populated(1, gpu * TILE_BYTES))
    world.settle()
    assert world.core.counters["recovered"] == 3
    for number in range(2):
        rows = world.core.spans(now_ms=world.now)
        world.send(ev.Evict([row.slot for row in rows if row.key == key(number)]))
    world.send(ev.GraceEnded())
    world.store(session, names(5))
    world.settle()
    assert {span.key for span, _ in world.files.values()} == {key(0), key(5)}
    world.check()


def test_files_that_do_not_fit_any_more_are_removed_by_the_scan() -> None:
    world = made()
    on_disk(world, 3)
    world.disk = DiskConfig(capacity=2 * ONE, max_files=64)
    world.reboot()
    world.scan()
    world.settle()
    assert len(world.files) == 2
    assert world.core.counters["disk_found_dropped"] == 1
    world.check()


@pytest.mark.parametrize(
    "change",
    [
        {"group": 4242},
        {"shard": 1 << 63},
        {"names": ((1 << 20, bytes(32)),)},
        {"names": ((0, bytes(32)),)},
    ],
)
def test_files_of_which_nobody_can_ask_are_removed(change: dict[str, object]) -> None:
    """As of a uid that is not allowed any more."""
    config = DiskConfig(capacity=8 * ONE, max_files=64)
    world = DiskWorld({0: 2}, disk=config, tenancy=Tenancy((1000,)))
    world.scan()
    on_disk(world, 2)
    name, (span, content) = next(iter(world.files.items()))
    world.files[name] = replace(span, **change), content  # type: ignore[arg-type]
    world.reboot()
    world.scan()
    world.settle()
    assert name not in world.files
    assert len(world.files) == 1
    assert {group for group, _ in world.disk_index} == {1000}
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


def test_waits_for_flights_and_for_the_disk_count_together() -> None:
    """Together they leave half of what a session may have pending for its work."""
    world = DiskWorld(
        {0: 4}, disk=DiskConfig(capacity=8 * ONE, max_files=64), max_waits=2, max_flights=4
    )
    world.scan()
    session = on_disk(world, 2)
    leader = world.connect()
    claim = world.claim(leader, names(20, 21))
    assert world.acquire_waiting(session, names(0)) is None
    assert world.ask(rq.Await, session, claim.flight, 0, 2, [SHARD]) is None
    refused = world.ask(rq.Await, session, claim.flight, 0, 2, [SHARD])
    assert isinstance(refused, rs.Refused)
    answer = world.acquire_waiting(session, names(1))
    assert answer is not None


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
    assert world.core.status().mirrors == 1
    before = dict(world.files)
    assert len(before) == 2
    # The file of a span that is a recipe now is as it was, also after a restart.
    world.restart()
    world.send(ev.GraceEnded())
    world.scan()
    world.settle()
    assert world.core.status().mirrors == 1
    assert world.files == before
    world.check()
    session = world.connect()
    slot = next(row.slot for row in world.core.spans(now_ms=world.now) if row.key == B)
    world.send(ev.Evict([slot]))
    assert world.core.status().mirrors == 0
    world.check()
    assert world.acquire_waiting(session, [B]) is None
    world.settle()
    ((_, (held,)),) = world.leases.values()
    assert held is not None
    assert held.count == DENSE // TILE_BYTES
    world.check()


def test_namespaces_of_which_only_files_are_left() -> None:
    world = made(tiles=4)
    assert world.core.namespaces() == []
    on_disk(world, 3)
    (space,) = world.core.namespaces()
    assert (space.spans, space.files, space.file_bytes) == (0, 3, 3 * TILE_BYTES)
    assert world.core.namespaces(group=1000) == [space]
    assert world.core.namespaces(group=1001) == []
    world.acquire(world.connect(), names(0))
    world.settle()
    (space,) = world.core.namespaces()
    assert (space.spans, space.bytes, space.files) == (1, TILE_BYTES, 3)
    assert world.core.disk is not None
    world.send(ev.Forget(world.core.sweep.files(0, 100).slots))
    (space,) = world.core.namespaces()
    assert (space.spans, space.files) == (1, 0)
    world.check()


# A disk that does not answer


def hanging(world: DiskWorld) -> int:
    """Waits end one after the other, until the tier is treated as not there."""
    session = on_disk(world, 6)
    for number in range(3):
        assert not world.outages
        assert world.acquire_waiting(session, names(number)) is None
        world.now += 750
        world.hurry(session, world.request)
    assert world.outages == [True]
    return session


def test_a_disk_that_hangs_is_not_waited_for() -> None:
    world = made(tiles=4, hold_ms=1000, max_reads=8)
    session = hanging(world)
    assert world.core.counters["disk_outages"] == 1
    for number in (0, 5):
        # What is being read too: nobody knows when it comes.
        answer = world.acquire_waiting(session, names(number))
        assert answer is not None
        assert list(answer.reason) == [Reason.MISS]
    assert world.core.counters["disk_outage_misses"] > 0
    world.check()


def test_all_who_wait_for_a_disk_that_hangs_are_answered_together() -> None:
    world = made(tiles=4)
    session = on_disk(world, 6)
    others = [world.connect() for _ in range(3)]
    for other in others:
        world.acquire_waiting(other, names(5))
    world.now += 750
    for number in range(3):
        assert len(world.arrivals) == 3
        assert world.acquire_waiting(session, names(number)) is None
        world.now += 10
        world.hurry(session, world.request)
    assert not world.arrivals
    world.check()


def test_waits_that_were_short_say_nothing_of_the_disk() -> None:
    world = made(tiles=4)
    session = on_disk(world, 6)
    for _ in range(10):
        assert world.acquire_waiting(session, names(0)) is None
        world.now += 40
        world.hurry(session, world.request)
    assert not world.outages


def test_reads_that_end_meanwhile_say_that_the_disk_works() -> None:
    world = made(tiles=16)
    session = on_disk(world, 6)
    for number in range(6):
        assert world.acquire_waiting(session, names(number, (number + 1) % 6)) is None
        world.now += 400
        world.fetch_ends(next(iter(world.fetches)))
        world.now += 400
        if (session, world.request) in world.arrivals:
            world.hurry(session, world.request)
    assert not world.outages


def test_a_disk_that_comes_back_is_used_at_once() -> None:
    world = made(tiles=6)
    session = hanging(world)
    world.fetch_ends(next(iter(world.fetches)))
    assert world.outages == [True, False]
    assert world.acquire_waiting(session, names(5)) is None
    world.settle()
    assert list(world.acquire(session, names(5)).reason) == [Reason.OK]
    world.check()


def test_a_disk_that_does_not_answer_is_tried_by_one_at_a_time_and_less_often() -> None:
    world = made(tiles=4, hold_ms=1000, longest_hold_ms=4000, max_reads=8)
    session = hanging(world)
    other = world.connect()
    began, tries = world.now, list[int]()
    while world.now < began + 20_000:
        if world.acquire_waiting(session, names(4)) is None:
            tries.append(world.now - began)
            answer = world.acquire_waiting(other, names(4))
            assert answer is not None, "one is enough"
            world.now += 750
            world.hurry(session, world.request)
        world.now += 50
        world.check()
    gaps = [later - earlier for earlier, later in itertools.pairwise(tries)]
    assert 950 <= tries[0] <= 1100
    assert gaps == sorted(gaps)
    assert 4000 <= gaps[-1] <= 5000
    # One that gets its answer ends it.
    while world.acquire_waiting(session, names(4)) is not None:
        world.now += 50
    world.settle()
    assert world.outages == [True, False]
    assert list(world.acquire(session, names(4)).reason) == [Reason.OK]
    world.check()


def test_a_worker_that_hung_and_died_is_followed_by_one_that_is_asked() -> None:
    world = made(tiles=4)
    session = hanging(world)
    world.worker_dies()
    answer = world.acquire_waiting(session, names(5))
    assert answer is not None
    world.scan()
    assert world.outages == [True, False]
    assert world.acquire_waiting(session, names(5)) is None
    world.settle()
    world.check()


# Bounds


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


def test_files_without_a_row_are_removed_a_few_at_a_time_and_found_once() -> None:
    world = made(files=40, tiles=40)
    on_disk(world, 30)
    world.disk = DiskConfig(capacity=2 * ONE, max_files=64, max_removals=4)
    world.reboot()
    world.scan()
    world.scan()
    assert len(world.unlinks) == 4
    assert world.core.counters["disk_found_dropped"] == 28
    world.settle()
    assert len(world.files) == 2
    world.check()


def test_who_took_all_its_leases_while_it_waited_is_refused() -> None:
    world = DiskWorld({0: 4}, disk=DiskConfig(capacity=8 * ONE, max_files=64), max_leases=1)
    world.scan()
    session = on_disk(world, 1)
    world.store(session, names(7))
    assert world.acquire_waiting(session, names(0)) is None
    waits = world.request
    world.acquire(session, names(7))
    assert len(world.leases) == 1
    refused = world.core.counters["refused"]
    world.settle()
    answer = world.answered[session, waits]
    assert isinstance(answer, rs.Refused)
    assert (answer.field, world.core.counters["refused"]) == ("keys", refused + 1)
    assert len(world.leases) == 1
    world.check()
