"""Files of an earlier epoch: what a scan finds is served, kept, or removed."""

from __future__ import annotations

from dataclasses import replace

import pytest
from contents import key
from disk_cases import ONE, made, names, on_disk
from disk_world import DiskWorld

from kmesh.layout import TILE_BYTES
from kmesh_spand.core import events as ev
from kmesh_spand.core.config import DiskConfig
from kmesh_spand.core.tenants import Tenancy, decode_owner


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
        rows = world.core.views.spans(now_ms=world.now)
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
