"""What tests of the disk tier in the core begin with."""

from __future__ import annotations

from contents import key
from disk_world import DiskWorld

from kmesh.layout import TILE_BYTES
from kmesh_spand.core import events as ev
from kmesh_spand.core.config import DiskConfig
from kmesh_spand.core.diskfile import file_bytes

ONE = file_bytes(TILE_BYTES, 0)


def made(files: int = 8, tiles: int = 2, **limits: object) -> DiskWorld:
    config = DiskConfig(capacity=files * ONE, max_files=64, **limits)  # type: ignore[arg-type]
    world = DiskWorld({0: tiles}, disk=config)
    world.scan()
    return world


def names(*numbers: int) -> list[bytes]:
    return [key(number) for number in numbers]


def on_disk(world: DiskWorld, count: int = 1) -> int:
    """Spans 0 … count - 1 are only in files."""
    session = world.connect()
    for number in range(count):
        world.store(session, names(number))
        world.settle()
    rows = world.core.views.spans(now_ms=world.now)
    world.send(ev.Evict([row.slot for row in rows]))
    return session
