"""Hit rates of host memory, alone by its policy and with a disk below it by the disk's.

The daemon's own core replays a trace, against the optimum: an Acquire waits for what only the disk
has, what is missing is stored, and each stored span is written to a file. Reads, writes and
removals are done before the next request comes; times are left out.
"""

from __future__ import annotations

import functools
import os
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

from benchmarks import traces
from benchmarks.bench_eviction import SHARD, hits_of_optimum, key
from benchmarks.results import Row
from benchmarks.traces import Weighted
from kmesh.layout import TILE_BYTES
from kmesh_spand.control.native import NativeBatch
from kmesh_spand.core import events as ev
from kmesh_spand.core import requests as rq
from kmesh_spand.core.config import CoreConfig, DiskConfig
from kmesh_spand.core.core import Core
from kmesh_spand.core.diskfile import file_bytes
from kmesh_spand.core.effects import Copy, Effect, Fetch, Reply, Spill, Unlink
from kmesh_spand.core.policies import POLICIES, make_policy
from kmesh_spand.core.results import AcquireResult, ReserveResult, Result

#: Host memory and disk, in per cent of the trace's different blocks.
SIZES = ((5, 10), (5, 20), (10, 40))
#: Host memory alone.
ALONE = (5, 10, 20)
PUBLIC = "mooncake"
_MADE_QUICKLY = 600


@dataclass(frozen=True, slots=True)
class Counts:
    """What a replay found, in blocks and tokens; ``from_memory`` are blocks."""

    blocks: int
    tokens: int
    from_memory: int = 0


class Replay:
    """A core that holds ``host`` spans, and ``disk`` more in files; one session reads and stores.

    Each span is one tile, so that all blocks are of one size, as the optimum needs.

    Args:
        policy: the disk's; memory's where ``disk`` is 0, and there is none.
    """

    def __init__(self, host: int, disk: int, policy: str) -> None:
        config, batch = CoreConfig(max_spans=host), NativeBatch()
        # The core waits with eviction while a slab may still grow.
        self._now = config.patience_ms + 1
        if disk:
            room = disk * file_bytes(TILE_BYTES, 0)
            below = DiskConfig(capacity=room, max_files=disk, policy=policy)
            self._core = Core(config, batch=batch, disk=below)
        else:
            self._core = Core(config, make_policy(policy, host, batch), batch=batch)
        for event in (
            ev.SlabAdded(0, host * TILE_BYTES),
            ev.Populated(0, host * TILE_BYTES),
            ev.SessionOpened(1, 0, "engine", 1),
            *([ev.DiskReady()] if disk else []),
        ):
            self._core.handle(event, 0)
        self._files = 0

    def request(self, ids: Sequence[int]) -> int:
        """Blocks hit by one request; what it missed is stored then, and its lease given back."""
        self._now += 1000
        self._do(ev.Tick())
        keys = b"".join(map(key, ids))
        wait = rq.Acquire(1, 1, keys, [SHARD], True, b"", 0, False, False, True)
        leased = self._do(wait)
        assert isinstance(leased, AcquireResult)
        hits = next((i for i, reason in enumerate(leased.reason) if reason), len(ids))
        if hits < len(ids):
            count = len(ids) - hits
            batch = (keys[hits * 32 :], [64] * count, [0] * count, [TILE_BYTES] * count)
            reserved = self._do(rq.Reserve(1, 1, bytes(32), SHARD, *batch))
            assert isinstance(reserved, ReserveResult)
            taken = [number for number in reserved.reservation if number]
            if taken:
                self._do(rq.Commit(1, 1, taken, [0] * len(taken), TILE_BYTES))
        if leased.lease:
            self._do(rq.Release(1, 1, [leased.lease]))
        return hits

    @property
    def fetched(self) -> int:
        """Files that were read."""
        return self._core.counters["disk_fetched"]

    def _do(self, event: ev.Event) -> Result | None:
        """Carries out an event, and everything that follows from it; its answer, if it has one."""
        todo: deque[Effect] = deque(self._core.handle(event, self._now))
        answer: Result | None = None
        while todo:
            effect = todo.popleft()
            if isinstance(effect, Reply):
                answer = effect.result
            elif isinstance(effect, Copy):
                todo += self._core.handle(ev.CopyDone(effect.job, effect.job), self._now)
            elif isinstance(effect, Fetch):
                todo += self._core.handle(ev.Fetched(effect.job), self._now)
            elif isinstance(effect, Spill):
                self._files += 1
                todo += self._core.handle(ev.Spilled(effect.job, self._files), self._now)
            elif isinstance(effect, Unlink):
                todo += self._core.handle(ev.Unlinked(effect.job, True), self._now)
        return answer


def by_core(trace: Weighted, host: int, disk: int, policy: str) -> Counts:
    """What the daemon's core finds in memory and on disk; see ``Replay``."""
    replay = Replay(host, disk, policy)
    hits = [replay.request(ids) for ids in trace.requests]
    tokens = sum(map(trace.tokens, range(len(hits)), hits))
    return Counts(sum(hits), tokens, sum(hits) - replay.fetched)


def by_optimum(trace: Weighted, room: int) -> Counts:
    """What one who knows the future finds, with one pool as large as memory and disk together."""
    hits = hits_of_optimum(trace.requests, room)
    return Counts(sum(hits), sum(map(trace.tokens, range(len(hits)), hits)))


def load(name: str, quick: bool) -> Weighted:
    """A trace by its name."""
    if name != PUBLIC:
        found = traces.make(name)
        count = _MADE_QUICKLY if quick else None
    else:
        path = traces.trace_path()
        assert path is not None
        found, count = traces.read_weighted(path), 1000 if quick else None
    return Weighted(found.text, found.requests[:count], found.last[:count])


def replayed(task: tuple[str, int, int, str], quick: bool) -> Counts:
    """One trace with memory and disk of so many per cent, and a policy or ``optimum``."""
    name, host, disk, policy = task
    trace = load(name, quick)
    footprint = len({block for ids in trace.requests for block in ids})
    rooms = footprint * host // 100, footprint * disk // 100
    if policy == "optimum":
        return by_optimum(trace, sum(rooms))
    return by_core(trace, *rooms, policy)


def run(quick: bool) -> list[Row]:
    """Rows of this file; without the public trace only those of the made ones."""
    names = list(traces.MADE)
    if traces.trace_path() is None:
        print(f"no public trace: set KMESH_TRACE to {traces.NAME}")
    else:
        names.insert(0, PUBLIC)
    who = [*POLICIES, "optimum"]
    sizes = [(host, 0) for host in ALONE] + list(SIZES)
    if quick:
        sizes = sizes[::2]
    tasks = [(name, *size, policy) for name in names for size in sizes for policy in who]
    # Hits are counted, not seconds: the replays may share the machine.
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        counted = list(pool.map(functools.partial(replayed, quick=quick), tasks))
    found = dict(zip(tasks, counted, strict=True))
    rows = []
    for name in names:
        trace = load(name, quick)
        asked = sum(map(len, trace.requests))
        tokens = sum(trace.tokens(n, len(ids)) for n, ids in enumerate(trace.requests))
        footprint = len({block for ids in trace.requests for block in ids})
        for host, disk in sizes:
            for policy in who:
                counts = found[name, host, disk, policy]
                who_is = policy.replace("-", "")
                row_name = (
                    f"tiers_{name}_{host}_{disk}_{who_is}"
                    if disk
                    else (f"memory_{name}_{host}_{who_is}")
                )
                below = f" and disk {footprint * disk // 100:,}" if disk else ""
                note = (
                    f"{policy}: memory {footprint * host // 100:,}{below} of {footprint:,} blocks, "
                    f"{len(trace.requests):,} requests ({trace.text})"
                )
                blocks = {"hits": [counts.blocks], "asked": [asked]}
                if disk and policy != "optimum":
                    blocks["from_memory"] = [counts.from_memory]
                sums = {"hits": [counts.tokens], "asked": [tokens]}
                for row, samples in ((row_name, blocks), (f"{row_name}_bytes", sums)):
                    exact = {series: list(map(float, v)) for series, v in samples.items()}
                    rows.append(Row(row, "ratio", "sum a / sum b", exact, note))
    return rows
