"""Acquire and Release in the core alone: no socket, no protobuf, no payload."""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Callable, Iterator, Sequence

from benchmarks.results import Row
from kmesh.layout import TILE_BYTES, Shard
from kmesh_spand.control.native import NativeBatch
from kmesh_spand.core import events as ev
from kmesh_spand.core import requests as rq
from kmesh_spand.core.config import CoreConfig
from kmesh_spand.core.core import Core
from kmesh_spand.core.effects import Copy, Effect, Reply
from kmesh_spand.core.results import AcquireResult, ReserveResult

SHARD = Shard(0, 32, 0, 8).code()
BATCH = 256
_FILL = 1024


def key(number: int) -> bytes:
    return hashlib.blake2b(number.to_bytes(8, "little"), digest_size=32).digest()


def result_of(effects: Sequence[Effect]) -> object:
    replies = [effect.result for effect in effects if isinstance(effect, Reply)]
    assert len(replies) == 1
    return replies[0]


def filled(spans: int, apply: Callable[[Sequence[Effect]], None] = lambda batch: None) -> Core:
    """A core that holds spans 0 … spans - 1, of one tile each, in one slab.

    Args:
        apply: told the effects of every event.
    """
    core = Core(CoreConfig(max_spans=spans), batch=NativeBatch())
    core.handle(ev.SlabAdded(0, spans * TILE_BYTES), 0)
    core.handle(ev.Populated(0, spans * TILE_BYTES), 0)
    core.handle(ev.SessionOpened(1, 0, "engine", 2), 0)
    namespace = bytes(32)
    for first in range(0, spans, _FILL):
        count = min(_FILL, spans - first)
        keys = b"".join(key(number) for number in range(first, first + count))
        starts = [64 * (number % 512) for number in range(first, first + count)]
        reserve = rq.Reserve(
            1, 1, namespace, SHARD, keys, [64] * count, starts, [TILE_BYTES] * count
        )
        reserved = core.handle(reserve, first)
        apply(reserved)
        answer = result_of(reserved)
        assert isinstance(answer, ReserveResult)
        assert not any(answer.reason)
        offsets = [i * TILE_BYTES for i in range(count)]
        commit = rq.Commit(1, 2, answer.reservation, offsets, count * TILE_BYTES)
        copies = core.handle(commit, first)
        apply(copies)
        for effect in copies:
            assert isinstance(effect, Copy)
            apply(core.handle(ev.CopyDone(effect.job, effect.job), first))
    core.handle(ev.SessionClosed(1), spans)
    return core


def time_acquire(core: Core, spans: int, batch: int, seconds: float) -> dict[str, list[float]]:
    """Milliseconds of processor time of each call, by name."""
    rng = random.Random(1)
    core.handle(ev.SessionOpened(2, 0, "engine", 1), 0)
    times: dict[str, list[float]] = {"acquire": [], "release": [], "miss": []}
    end = time.monotonic() + seconds
    misses = b"".join(key(spans + number) for number in range(batch))
    while time.monotonic() < end:
        first = rng.randrange(spans - batch)
        keys = b"".join(key(number) for number in range(first, first + batch))
        acquire = rq.Acquire(2, 3, keys, [SHARD], True)
        begin = time.thread_time()
        effects = core.handle(acquire, 0)
        times["acquire"].append((time.thread_time() - begin) * 1e3)
        answer = result_of(effects)
        assert isinstance(answer, AcquireResult)
        assert not any(answer.reason)
        release = rq.Release(2, 4, [answer.lease])
        begin = time.thread_time()
        core.handle(release, 0)
        times["release"].append((time.thread_time() - begin) * 1e3)
        miss = rq.Acquire(2, 5, misses, [SHARD], False)
        begin = time.thread_time()
        core.handle(miss, 0)
        times["miss"].append((time.thread_time() - begin) * 1e3)
    return times


def run(quick: bool) -> Iterator[Row]:
    """Rows of this file."""
    spans = 20_000 if quick else 100_000
    core = filled(spans)
    what = f"{BATCH} of {spans:,} spans, processor time, no socket"
    for name, values in time_acquire(core, spans, BATCH, 1.0 if quick else 3.0).items():
        yield Row(f"core_{name}", "ms", "median", {name: values[:1000]}, what)
