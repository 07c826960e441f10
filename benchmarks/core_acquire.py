"""Time of Acquire and Release in the core, and its memory for each span.

    python benchmarks/core_acquire.py [--spans N] [--memory-spans N] [--batch N] [--seconds S]

Prints processor time over random batches, and writes nothing. Only the core runs here: no socket, no
protobuf, no payload.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import platform
import random
import statistics
import time
import tracemalloc

from kmesh.layout import TILE_BYTES, Shard
from kmesh_spand.core import events as ev
from kmesh_spand.core.config import CoreConfig
from kmesh_spand.core.core import Core
from kmesh_spand.core.effects import AcquireResult, Copy, Reply, ReserveResult

SHARD = Shard(0, 32, 0, 8).code()
BATCH = 1024


def key(number: int) -> bytes:
    return hashlib.blake2b(number.to_bytes(8, "little"), digest_size=32).digest()


def result_of(effects: list[object]) -> object:
    replies = [effect.result for effect in effects if isinstance(effect, Reply)]
    assert len(replies) == 1
    return replies[0]


def filled(spans: int) -> Core:
    """A core that holds spans 0 … spans - 1, of one tile each, in one slab."""
    core = Core(CoreConfig(max_spans=spans))
    core.handle(ev.SlabAdded(0, spans * TILE_BYTES), 0)
    core.handle(ev.Populated(0, spans * TILE_BYTES), 0)
    core.handle(ev.SessionOpened(1, 0, "engine", 2), 0)
    namespace = bytes(32)
    for first in range(0, spans, BATCH):
        count = min(BATCH, spans - first)
        keys = b"".join(key(number) for number in range(first, first + count))
        starts = [64 * (number % 512) for number in range(first, first + count)]
        reserve = ev.Reserve(
            1, 1, namespace, SHARD, keys, [64] * count, starts, [TILE_BYTES] * count
        )
        answer = result_of(core.handle(reserve, first))
        assert isinstance(answer, ReserveResult)
        assert not any(answer.reason)
        offsets = [i * TILE_BYTES for i in range(count)]
        commit = ev.Commit(1, 2, answer.reservation, offsets, count * TILE_BYTES)
        for effect in core.handle(commit, first):
            assert isinstance(effect, Copy)
            core.handle(ev.CopyDone(effect.job, effect.job), first)
    core.handle(ev.SessionClosed(1), spans)
    return core


def time_acquire(core: Core, spans: int, batch: int, seconds: float) -> dict[str, list[float]]:
    """Seconds of processor time of each call, by name."""
    rng = random.Random(1)
    core.handle(ev.SessionOpened(2, 0, "engine", 1), 0)
    times: dict[str, list[float]] = {"acquire": [], "release": [], "miss": []}
    end = time.monotonic() + seconds
    misses = b"".join(key(spans + number) for number in range(batch))
    while time.monotonic() < end:
        first = rng.randrange(spans - batch)
        keys = b"".join(key(number) for number in range(first, first + batch))
        acquire = ev.Acquire(2, 3, keys, [SHARD], True)
        begin = time.thread_time()
        effects = core.handle(acquire, 0)
        times["acquire"].append(time.thread_time() - begin)
        answer = result_of(effects)
        assert isinstance(answer, AcquireResult)
        assert not any(answer.reason)
        release = ev.Release(2, 4, [answer.lease])
        begin = time.thread_time()
        core.handle(release, 0)
        times["release"].append(time.thread_time() - begin)
        miss = ev.Acquire(2, 5, misses, [SHARD], False)
        begin = time.thread_time()
        core.handle(miss, 0)
        times["miss"].append(time.thread_time() - begin)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--spans", type=int, default=100_000)
    parser.add_argument("--memory-spans", type=int, default=200_000)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=5.0)
    args = parser.parse_args()
    print(f"python {platform.python_version()}, {platform.machine()}")
    core = filled(args.spans)
    for name, values in time_acquire(core, args.spans, args.batch, args.seconds).items():
        values.sort()
        print(
            f"{name:8s} {args.batch} spans of {args.spans}: best "
            f"{values[0] * 1e3:.3f} ms, median {statistics.median(values) * 1e3:.3f} ms, p99 "
            f"{values[len(values) * 99 // 100] * 1e3:.3f} ms, {len(values)} calls"
        )
    del core
    gc.collect()
    tracemalloc.start()
    core = filled(args.memory_spans)
    gc.collect()
    used, _ = tracemalloc.get_traced_memory()
    print(
        f"memory   {args.memory_spans} spans of one tile: {used / args.memory_spans:.1f} B a span"
    )


if __name__ == "__main__":
    main()
