"""Hit rates of the core's eviction on a public trace, against LRU and the offline optimum.

The trace is Mooncake's (FAST'25, Apache-2.0): one request a line, ``hash_ids`` are its 512-token
blocks, equal ids share a prefix. A request hits the blocks before the first one that is not there;
then all of its blocks are stored. Output and concurrency are left out.
"""

from __future__ import annotations

import functools
import heapq
import os
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor

from blake3 import blake3

from benchmarks.results import Row, unavailable
from benchmarks.traces import NAME, Trace, read_trace, trace_path
from kmesh.layout import TILE_BYTES, Shard
from kmesh_spand.control.native import NativeBatch
from kmesh_spand.core import events as ev
from kmesh_spand.core import requests as rq
from kmesh_spand.core.config import CoreConfig
from kmesh_spand.core.core import Core
from kmesh_spand.core.effects import Copy, Reply
from kmesh_spand.core.results import AcquireResult, ReserveResult, Result

PERCENT = (5, 10, 20)
SHARD = Shard(0, 32, 0, 8).code()


def by_core(trace: Trace, room: int) -> int:
    """Blocks hit with the daemon's own core and policy, one span of one tile for each block."""
    replay = Replay(room)
    return sum(replay.request(now * 1000, ids) for now, ids in enumerate(trace))


class Replay:
    """A core that holds ``room`` spans, and one session that reads and stores."""

    def __init__(self, room: int) -> None:
        self._core = Core(CoreConfig(max_spans=room), batch=NativeBatch())
        self._core.handle(ev.SlabAdded(0, room * TILE_BYTES), 0)
        self._core.handle(ev.Populated(0, room * TILE_BYTES), 0)
        self._core.handle(ev.SessionOpened(1, 0, "engine", 1), 0)
        # The core waits with eviction while a slab may still grow.
        self._after = CoreConfig(max_spans=room).patience_ms + 1

    def request(self, now_ms: int, ids: Sequence[int]) -> int:
        """Blocks hit by one request; what it missed is stored then, and its lease given back."""
        core, now = self._core, now_ms + self._after
        keys = b"".join(map(key, ids))
        leased = _result(core.handle(rq.Acquire(1, 1, keys, [SHARD], True), now))
        assert isinstance(leased, AcquireResult)
        hits = next((i for i, reason in enumerate(leased.reason) if reason), len(ids))
        if hits < len(ids):
            count = len(ids) - hits
            start = [512 * i for i in range(hits, len(ids))]
            batch = (keys[hits * 32 :], [64] * count, start, [TILE_BYTES] * count)
            reserved = _result(core.handle(rq.Reserve(1, 1, bytes(32), SHARD, *batch), now))
            assert isinstance(reserved, ReserveResult)
            taken = [number for number in reserved.reservation if number]
            if taken:
                commit = rq.Commit(1, 1, taken, [0] * len(taken), TILE_BYTES)
                for effect in core.handle(commit, now):
                    if isinstance(effect, Copy):
                        core.handle(ev.CopyDone(effect.job, effect.job), now)
        if leased.lease:
            core.handle(rq.Release(1, 1, [leased.lease]), now)
        return hits


@functools.cache
def key(block: int) -> bytes:
    """A block's key: spread evenly, as hashes are."""
    return blake3(block.to_bytes(8, "little")).digest()


def _result(effects: Sequence[object]) -> Result:
    return next(effect.result for effect in effects if isinstance(effect, Reply))


def by_lru(trace: Trace, room: int) -> int:
    """Blocks hit where the block whose last use is longest ago goes first."""
    held: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for ids in trace:
        hits += leading(ids, held)
        for number in ids:
            held[number] = None
            held.move_to_end(number)
            if len(held) > room:
                held.popitem(last=False)
    return hits


def by_optimum(trace: Trace, room: int) -> int:
    """Blocks hit by one who knows the future."""
    return sum(hits_of_optimum(trace, room))


def hits_of_optimum(trace: Trace, room: int) -> list[int]:
    """Blocks of each request that are hit where the block used last, or never, goes first (Belady).

    A block may be passed over when it is the one that should go. Within a request, the end of the
    chain goes before its beginning, without which it could not be hit.
    """
    following = next_uses(trace)
    held: dict[int, tuple[int, int]] = {}
    heap: list[tuple[int, int, int]] = []
    hits: list[int] = []
    for ids, uses in zip(trace, following, strict=True):
        hits.append(leading(ids, held))
        for depth, (number, use) in enumerate(zip(ids, uses, strict=True)):
            held[number] = (use, depth)
            heapq.heappush(heap, (-use, -depth, number))
        while len(held) > room:
            use, depth, number = heapq.heappop(heap)
            if held.get(number) == (-use, -depth):
                del held[number]
    return hits


def next_uses(trace: Trace) -> list[list[int]]:
    """For each block of each request, the number of the next request that has it."""
    never = len(trace)
    seen: dict[int, int] = {}
    uses: list[list[int]] = []
    for number in range(len(trace) - 1, -1, -1):
        uses.append([seen.get(block, never) for block in trace[number]])
        seen.update(dict.fromkeys(trace[number], number))
    uses.reverse()
    return uses


def leading(ids: Sequence[int], held: OrderedDict[int, None] | dict[int, tuple[int, int]]) -> int:
    """Blocks before the first one that is not held."""
    return next((i for i, number in enumerate(ids) if number not in held), len(ids))


def replayed(trace: Trace, room: int) -> dict[str, int]:
    """Hits of all three with room for so many blocks."""
    return {
        "core": by_core(trace, room),
        "lru": by_lru(trace, room),
        "optimum": by_optimum(trace, room),
    }


def run(quick: bool) -> list[Row]:
    """Rows of this file."""
    path = trace_path()
    if path is None:
        why = f"no trace: set KMESH_TRACE to {NAME}"
        names = (_names(percent) for percent in PERCENT)
        return [unavailable(name, "ratio", why) for pair in names for name in pair]
    trace = read_trace(path)[: 2000 if quick else None]
    asked = sum(map(len, trace))
    footprint = len({number for ids in trace for number in ids})
    rooms = [footprint * percent // 100 for percent in PERCENT]
    rows = []
    # Hits are counted, not seconds: the replays may share the machine.
    with ProcessPoolExecutor(min(len(rooms), len(os.sched_getaffinity(0)))) as pool:
        found = list(pool.map(functools.partial(replayed, trace), rooms))
    for percent, room, counts in zip(PERCENT, rooms, found, strict=True):
        rates = ", ".join(f"{name} {hits / asked:.2%}" for name, hits in counts.items())
        more = counts["core"] - counts["lru"]
        what = (
            f"{room:,} of {footprint:,} blocks, {len(trace):,} requests; hit rates: {rates};"
            f" {more:+,} hits against LRU"
        )
        samples = {name: [float(hits)] for name, hits in counts.items()}
        lru, optimum = _names(percent)
        rows.append(Row(lru, "ratio", "sum a / sum b", samples, what))
        best = {name: samples[name] for name in ("core", "optimum")}
        rows.append(Row(optimum, "ratio", "sum a / sum b", best, "of the optimum's hits"))
    return rows


def _names(percent: int) -> tuple[str, str]:
    """Of the rows that compare with LRU and with the optimum."""
    return f"eviction_{percent}", f"eviction_{percent}_optimum"
