"""Traces of requests, and the optimum that no order of eviction beats."""

from __future__ import annotations

import random
from itertools import combinations
from pathlib import Path

import pytest

from benchmarks import bench_eviction, bench_tiers, check, traces
from benchmarks.bench_eviction import by_core, by_lru, by_optimum, leading, next_uses
from benchmarks.traces import Weighted
from kmesh_spand.core.policies import POLICIES


def blocks(seed: int, requests: int = 150) -> list[list[int]]:
    """Chains that share beginnings: block ids as in a trace."""
    rng = random.Random(seed)
    known: list[list[int]] = [[]]
    fresh = iter(range(10**6))
    trace = []
    for _ in range(requests):
        parent = rng.choice(known[-20:])
        chain = parent[: rng.randint(0, len(parent))] + [
            next(fresh) for _ in range(rng.randint(1, 4))
        ]
        known.append(chain)
        trace.append(chain)
    return trace


@pytest.mark.parametrize("seed", range(5))
def test_nobody_beats_the_optimum(seed: int) -> None:
    trace = blocks(seed)
    for room in (8, 20, 60):
        best = by_optimum(trace, room)
        assert by_lru(trace, room) <= best
        assert by_core(trace, room) <= best


def by_trying(trace: list[list[int]], room: int) -> int:
    """Most hits of all who may choose freely what they keep after each request."""
    best = {frozenset[int](): 0}
    for ids in trace:
        after: dict[frozenset[int], int] = {}
        for held, hits in best.items():
            total = hits + leading(ids, dict.fromkeys(held, (0, 0)))
            known = sorted(held | set(ids))
            for kept in combinations(known, min(room, len(known))):
                now = frozenset(kept)
                after[now] = max(after.get(now, 0), total)
        best = after
    return max(best.values())


@pytest.mark.parametrize("seed", range(12))
def test_the_optimum_is_exact(seed: int) -> None:
    """Chains over a tree of ten blocks: a block's parent has a smaller number."""
    rng = random.Random(seed)
    parents = {number: rng.randint(0, number - 1) for number in range(1, 11)}
    trace = []
    for _ in range(14):
        chain, number = list[int](), rng.randint(1, 10)
        while number:
            chain.insert(0, number)
            number = parents[number]
        trace.append(chain)
    for room in (2, 3, 4):
        assert by_optimum(trace, room) == by_trying(trace, room)


@pytest.mark.parametrize("policy", POLICIES)
def test_memory_and_disk_never_beat_the_optimum(policy: str) -> None:
    requests = blocks(1)
    trace = Weighted("", requests, [100] * len(requests))
    for host, disk in ((4, 8), (20, 40)):
        counts = bench_tiers.by_core(trace, host, disk, policy)
        best = bench_tiers.by_optimum(trace, host + disk)
        assert 0 < counts.from_memory < counts.blocks <= best.blocks
        # Each request ends with a block of its own, so that none is hit whole.
        assert counts.tokens == 512 * counts.blocks


def test_a_disk_with_room_for_all_loses_nothing() -> None:
    requests = blocks(3)
    trace = Weighted("", requests, [512] * len(requests))
    everything = len({number for ids in requests for number in ids})
    for policy in POLICIES:
        counts = bench_tiers.by_core(trace, 30, everything, policy)
        assert counts.blocks == by_optimum(requests, everything)
        assert counts.tokens == 512 * counts.blocks


def test_the_last_block_of_a_request_has_fewer_tokens() -> None:
    trace = Weighted("", [[1, 2, 3]], [100])
    assert [trace.tokens(0, count) for count in range(4)] == [0, 512, 1024, 1124]


@pytest.mark.parametrize("name", traces.MADE)
def test_made_traces_are_chains_and_the_same_each_time(name: str) -> None:
    trace = traces.make(name)
    assert trace == traces.make(name)
    assert len(trace.requests) == 3000
    before: dict[int, int] = {}
    for ids in trace.requests:
        assert len(ids) == len(set(ids))
        for parent, number in zip([-1, *ids], ids, strict=False):
            assert before.setdefault(number, parent) == parent


def test_with_room_for_all_everybody_hits_what_was_seen_before() -> None:
    trace = blocks(7)
    seen: set[int] = set()
    repeated = 0
    for ids in trace:
        repeated += sum(number in seen for number in ids)
        seen.update(ids)
    room = len(seen)
    assert by_lru(trace, room) == by_optimum(trace, room) == by_core(trace, room) == repeated


def test_without_the_trace_each_target_is_judged_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KMESH_TRACE", str(tmp_path))
    rows = {row.name: row.to_json() for row in bench_eviction.run(quick=True)}
    every = check.read_targets(Path(check.__file__).with_name("targets.toml"))
    targets = [target for target in every if target.row.startswith("eviction_")]
    assert rows.keys() == {target.row for target in targets}
    for target in targets:
        line = check.judge(target, rows[target.row], tmp_path)
        assert line.verdict.fails != target.shown_only
        assert "set KMESH_TRACE to mooncake_conversation.jsonl.gz" in str(line)


def test_hits_end_at_the_first_block_that_is_not_there() -> None:
    assert leading([1, 2, 3, 4], {1: (0, 0), 2: (0, 0), 4: (0, 0)}) == 2
    assert leading([5], {}) == 0


def test_next_uses_look_forward() -> None:
    assert next_uses([[1, 2], [1], [2, 1]]) == [[1, 2], [2], [3, 3]]
