"""Orders of eviction: S3-FIFO against a plain model of it, and what the disk asks of an order."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

import pytest
from contents import key
from disk_world import DiskWorld

from kmesh.errors import ConfigError
from kmesh.layout import TILE_BYTES
from kmesh_spand.control.native import NativeBatch
from kmesh_spand.core import events as ev
from kmesh_spand.core.batch import Batch
from kmesh_spand.core.config import DiskConfig
from kmesh_spand.core.diskfile import file_bytes
from kmesh_spand.core.fileorder import FileTenant, Largest
from kmesh_spand.core.policies import POLICIES, make_policy
from kmesh_spand.core.policy import LRU
from kmesh_spand.core.s3fifo import S3FIFO, Ghosts

ONE = file_bytes(TILE_BYTES, 0)


class Model:
    """S3-FIFO as a reader of the paper would write it, for rows that leave their queue in use."""

    def __init__(self) -> None:
        self.small: list[int] = []
        self.main: list[int] = []
        self.uses: dict[int, int] = {}
        self.names: dict[int, int] = {}
        self.ghosts: dict[int, int] = {}
        self.left = 0

    def enter(self, row: int, name: int) -> None:
        self.uses[row], self.names[row] = -1, name

    def add(self, rows: list[int]) -> None:
        total = len(self.small) + len(self.main)
        for row in rows:
            new = self.uses[row] < 0
            when = self.ghosts.pop(self.names[row], -total) if new else 0
            if new and self.left - when >= total:
                self.small.append(row)
                self.uses[row] = 0
                continue
            if new:
                self.uses[row] = 0
            else:
                self.uses[row] = min(self.uses[row] + 1, 3)
            self.main.append(row)

    def discard(self, row: int) -> None:
        (self.small if row in self.small else self.main).remove(row)

    def evicted(self, row: int) -> None:
        if row in self.small:
            self.left += 1
            self.ghosts[self.names[row]] = self.left

    def victims(self) -> list[int]:
        if len(self.small) * 10 >= len(self.small) + len(self.main) or not self.main:
            return self.small + self.main
        while self.uses[self.main[0]]:
            self.uses[self.main[0]] -= 1
            self.main.append(self.main.pop(0))
        return self.main + self.small


@pytest.mark.parametrize("batch", [Batch(), NativeBatch()], ids=["plain", "native"])
def test_s3_fifo_against_a_plain_model(batch: Batch) -> None:
    rng = random.Random(5)
    rows, names = 40, list(range(1, 65))
    policy, model = S3FIFO(rows, batch), Model()
    free, there, away = set(range(1, rows + 1)), set[int](), set[int]()
    again = 0
    for _ in range(6000):
        step = rng.random()
        if step < 0.4 and free:
            row = min(free)
            held = {model.names[other] for other in there | away}
            name = rng.choice([name for name in names if name not in held])
            again += name in model.ghosts
            for one in (policy, model):
                one.enter(row, name)
                one.add([row])
            free.remove(row)
            there.add(row)
        elif step < 0.6 and there:
            row = rng.choice(sorted(there))
            policy.discard([row])
            model.discard(row)
            there.remove(row)
            away.add(row)
        elif step < 0.75 and away:
            back = rng.sample(sorted(away), rng.randint(1, min(3, len(away))))
            policy.add(back)
            model.add(back)
            there.update(back)
            away.difference_update(back)
        elif there and len(free) < 4:
            row = next(policy.victims())
            assert row == model.victims()[0]
            for one in (policy, model):
                one.evicted(row)
            policy.discard([row])
            model.discard(row)
            there.remove(row)
            free.add(row)
        # Asking lets what was used go round, so that both are asked equally often.
        found = list(policy.victims())
        assert found == (model.victims() if there else [])
        assert sorted(found) == sorted(there)
    assert again > 50


def test_ghosts_are_forgotten_when_enough_have_left_since() -> None:
    ghosts = Ghosts(64)
    for name in range(1, 11):
        ghosts.add(name)
    assert not ghosts.take(4, 6)
    assert ghosts.take(5, 6)
    assert not ghosts.take(5, 6), "taken already"
    assert not ghosts.take(0, 100)


def test_what_left_not_long_ago_is_remembered_almost_all() -> None:
    """A chain of which one in four is forgotten comes back with gaps, and is not hit behind one."""
    rng = random.Random(7)
    names = [rng.getrandbits(64) for _ in range(3000)]
    ghosts = Ghosts(1000)
    for name in names:
        ghosts.add(name)
    assert sum(ghosts.take(name, 700) for name in names[-600:]) > 570
    assert not any(ghosts.take(name, 700) for name in names[:-700])


def test_a_victim_waits_for_few_of_those_that_were_used() -> None:
    """Whoever wants room waits while they go round."""
    rows = 5000
    policy, rounds = S3FIFO(rows), 0
    for row in range(1, rows + 1):
        policy.enter(row, row)
        policy.used(row)
    policy.add(range(1, rows + 1))
    main, add = policy._main, policy._main.add

    def count(these: Sequence[int]) -> None:
        nonlocal rounds
        rounds += len(these)
        add(these)

    main.add = count  # type: ignore[method-assign]
    for _ in range(3):
        rounds = 0
        assert next(policy.victims())
        assert 0 < rounds <= 256


def test_queues_of_several_tenants_share_columns() -> None:
    first = S3FIFO(6)
    second = first.another()
    for row in range(1, 7):
        first.enter(row, row)
    first.add([1, 2])
    second.add([3, 4, 5])
    second.discard([4])
    second.evicted(5)
    second.discard([5])
    first.enter(5, 5)
    first.add([4, 5, 6])
    assert (list(first.victims()), list(second.victims())) == ([1, 2, 6, 4, 5], [3])


@pytest.mark.parametrize("name", POLICIES)
def test_a_decision_costs_the_same_with_many_rows(name: str) -> None:
    """Each row was used, so that S3-FIFO has something to go round."""

    def seconds(rows: int) -> float:
        policy = make_policy(name, rows, NativeBatch())
        everything = list(range(1, rows + 1))
        for row in everything:
            policy.enter(row, row)
        for _ in range(3):
            policy.add(everything)
            policy.discard(everything)
        policy.add(everything)
        began = time.process_time()
        for _ in range(rows // 2):
            row = next(policy.victims())
            policy.evicted(row)
            policy.discard([row])
        return (time.process_time() - began) / rows

    few, many = (min(seconds(rows) for _ in range(3)) for rows in (500, 8000))
    assert many < 8 * few


def test_the_tenant_with_most_is_found_without_looking_at_all() -> None:
    rng = random.Random(2)
    largest, tenants = Largest(), dict[int, FileTenant]()
    for step in range(20_000):
        number = rng.randint(1, 12)
        tenant = tenants.setdefault(number, FileTenant(number, 0, b"", 0, LRU(1), LRU(1)))
        if rng.random() < 0.1:
            del tenants[number]
        elif rng.random() < 0.3:
            tenant.evictable = rng.randint(0, 1)
            largest.changed(tenant, tenants)
        else:
            tenant.blocks = rng.randint(0, 50)
            largest.changed(tenant, tenants)
        if step % 3 == 0:
            found = largest.find(tenants)
            most = max((one.blocks for one in tenants.values() if one.evictable), default=None)
            assert (found.blocks if found else None) == most


def test_a_policy_that_is_not_known_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="policy: mru is none of lru, s3-fifo"):
        DiskConfig(capacity=ONE, max_files=1, policy="mru")


# What the disk tells its order


def stored(world: DiskWorld, session: int, *numbers: int) -> None:
    for number in numbers:
        world.store(session, [key(number)])
        world.settle()


def files(world: DiskWorld) -> set[int]:
    known = {key(number): number for number in range(100)}
    return {known[span.key] for span, _ in world.files.values()}


@pytest.mark.parametrize("policy", POLICIES)
def test_files_of_what_memory_has_go_last(policy: str) -> None:
    """Memory forgets what was used longest ago: what it has is younger than all else."""
    config = DiskConfig(capacity=4 * ONE, max_files=16, policy=policy)
    world = DiskWorld({0: 3}, disk=config)
    world.scan()
    session = world.connect()
    stored(world, session, 0, 1)
    for _ in range(3):
        # Used again and again in memory, of which the disk sees nothing.
        world.release(session, [world.acquire(session, [key(0)]).lease])
    for number in range(2, 6):
        stored(world, session, number)
        world.release(session, [world.acquire(session, [key(0)]).lease])
        world.check()
    assert 0 in files(world)
    assert key(0) in {row.key for row in world.core.views.spans(now_ms=world.now)}


@pytest.mark.parametrize(("policy", "kept"), [("lru", False), ("s3-fifo", True)])
def test_a_scan_pushes_out_what_was_used_only_with_lru(policy: str, kept: bool) -> None:
    config = DiskConfig(capacity=6 * ONE, max_files=32, policy=policy)
    world = DiskWorld({0: 1}, disk=config)
    world.scan()
    session = world.connect()
    stored(world, session, 0, 1)
    assert world.acquire_waiting(session, [key(0)]) is None
    world.settle()
    world.release(session, list(world.leases))
    stored(world, session, *range(2, 20))
    world.check()
    assert (0 in files(world)) is kept


def test_what_a_scan_of_the_directory_finds_goes_in_the_order_in_which_it_was_used() -> None:
    for policy in POLICIES:
        world = DiskWorld({0: 1}, disk=DiskConfig(capacity=4 * ONE, max_files=16, policy=policy))
        world.scan()
        stored(world, world.connect(), 0, 1, 2, 3)
        world.reboot()
        world.scan()
        stored(world, world.connect(), 4, 5)
        assert files(world) == {2, 3, 4, 5}
        world.check()


def test_host_memory_takes_the_same_orders() -> None:
    world = DiskWorld(
        {0: 4}, disk=DiskConfig(capacity=64 * ONE, max_files=64), policy=S3FIFO(64, NativeBatch())
    )
    world.scan()
    session = world.connect()
    stored(world, session, 0)
    world.release(session, [world.acquire(session, [key(0)]).lease])
    stored(world, session, *range(1, 12))
    assert key(0) in {row.key for row in world.core.views.spans(now_ms=world.now)}
    assert world.core.counters["policy_faults"] == 0
    world.check()
    world.send(ev.Evict([row.slot for row in world.core.views.spans(now_ms=world.now)]))
    world.check()
