"""The connector's small parts: settings, versions, shardings, staging, quarantine, reports."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kmesh.errors import ConfigError, UnsupportedError
from kmesh.layout import Shard
from kmesh_vllm import compat
from kmesh_vllm.config import Settings
from kmesh_vllm.counts import NAMES, Counts
from kmesh_vllm.metadata import LoadReport
from kmesh_vllm.quarantine import Quarantine
from kmesh_vllm.sharding import Sharding, overlaps
from kmesh_vllm.staging import StagingRing


def test_settings_have_defaults() -> None:
    settings = Settings.read({"socket_dir": "/run/kmesh", "load_timeout_ms": 5})
    assert dataclasses.asdict(settings) == {
        "socket_dir": "/run/kmesh",
        "load": True,
        "store": True,
        "tier": "host",
        "staging_bytes": 0,
        "store_buffer_bytes": 0,
        "max_ctas": 0,
        "calibrate": True,
        "gpu_recipes": False,
        "weights_digest": "",
        "min_restore_tokens": 64,
        "acquire_timeout_ms": 1000,
        "load_timeout_ms": 5,
        "reserve_timeout_ms": 1000,
        "retry_after_ms": 30000,
        "min_flight_tokens": 512,
        "flight_patience": 3,
        "flight_wait_ms": 60000,
        "segment_separators": (),
        "store_segments": True,
    }


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ({}, "socket_dir is missing"),
        ({"socket_dir": ""}, "socket_dir is missing"),
        ({"socket_dir": "/d", "sotre": True}, "sotre is none of"),
        ({"socket_dir": 7}, "socket_dir is int, not str"),
        ({"socket_dir": "/d", "load": 1}, "load is int, not bool"),
        ({"socket_dir": "/d", "staging_bytes": True}, "staging_bytes is bool, not int"),
        ({"socket_dir": "/d", "staging_bytes": "1GiB"}, "staging_bytes is str, not int"),
        ({"socket_dir": "/d", "tier": "disk"}, "tier is 'disk', none of"),
        ({"socket_dir": "/d", "load_timeout_ms": 0}, "load_timeout_ms is 0, too small"),
        ({"socket_dir": "/d", "min_restore_tokens": -1}, "min_restore_tokens is -1, too small"),
    ],
)
def test_wrong_settings_are_named(extra: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        Settings.read(extra)


@pytest.mark.parametrize("version", ["0.26.0", "0.27.1", "0.32.0", "0.33.0", "0.33.1.dev3+gabc"])
def test_versions_that_are_served(version: str) -> None:
    compat.check_version(version)


@pytest.mark.parametrize("version", ["0.25.1", "0.34.0", "1.0.0", "dev", ""])
def test_versions_that_are_refused(version: str) -> None:
    with pytest.raises(UnsupportedError, match=r"0\.26 to 0\.33"):
        compat.check_version(version)


@pytest.mark.parametrize(
    ("heads", "tp", "shards", "parts", "stores"),
    [
        (8, 1, 1, [0], [True]),
        (8, 2, 2, [0, 1], [True, True]),
        (2, 4, 2, [0, 0, 1, 1], [True, False, True, False]),
        (1, 2, 1, [0, 0], [True, False]),
        (6, 3, 3, [0, 1, 2], [True] * 3),
    ],
)
def test_heads_are_cut_as_vllm_cuts_them(
    heads: int, tp: int, shards: int, parts: list[int], stores: list[bool]
) -> None:
    sharding = Sharding(5, heads, tp)
    assert len(sharding.shards) == shards
    assert [sharding.part(rank) for rank in range(tp)] == parts
    assert [sharding.stores(rank) for rank in range(tp)] == stores


def test_heads_that_cannot_be_cut() -> None:
    with pytest.raises(ValueError, match="6 KV heads cannot be cut for 4 ranks"):
        Sharding(5, 6, 4)


def test_other_shardings_are_looked_for_after_the_own_one() -> None:
    assert [s.tp for s in Sharding(1, 8, 2).alternatives()] == [2, 1, 4, 8]
    # Four ranks that share two heads store what two ranks store.
    assert [s.tp for s in Sharding(1, 2, 4).alternatives()] == [4, 1]
    assert [s.tp for s in Sharding(1, 6, 3).alternatives()] == [3, 1, 2]


@given(st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4, 8, 16]), st.data())
def test_stored_shards_cover_each_head_of_a_rank_once(
    stored: int, mine: int, data: st.DataObject
) -> None:
    there, here = Sharding(2, 8, stored), Sharding(2, 8, mine)
    rank = data.draw(st.integers(0, mine - 1))
    shard = here.shard(rank)
    found: list[int] = []
    for overlap in overlaps(there, shard):
        source = there.shards[overlap.part]
        for i in range(overlap.heads):
            head = source.head_begin + overlap.src_head_begin + i
            assert head == shard.head_begin + overlap.dst_head_begin + i
            found.append(head)
    assert sorted(found) == list(range(shard.head_begin, shard.head_end))
    assert len(set(found)) == len(found)


@given(
    st.integers(64, 2000),
    st.lists(st.one_of(st.integers(1, 700), st.integers(-20, -1)), max_size=60),
)
def test_staging_never_hands_out_a_byte_twice(size: int, actions: list[int]) -> None:
    ring = StagingRing(size, align=16)
    held: list[tuple[int, int]] = []
    for action in actions:
        if action > 0:
            fits = ring.fits(action)
            offset = ring.allocate(action)
            assert fits == (offset is not None)
            if offset is None:
                continue
            assert offset % 16 == 0
            assert offset + action <= size
            assert all(offset >= o + n or offset + action <= o for o, n in held)
            held.append((offset, action))
        elif held:
            offset, _ = held.pop(-action % len(held))
            ring.free(offset)
    for offset, _ in held:
        ring.free(offset)
    assert ring.used == 0
    assert ring.allocate(size // 16 * 16) == 0


def test_staging_refuses_what_it_does_not_know() -> None:
    ring = StagingRing(1024)
    offset = ring.allocate(10)
    assert offset == 0
    ring.allocate(10)
    ring.free(0)
    with pytest.raises(ValueError, match="begins at 0"):
        ring.free(0)


def test_quarantine_waits_twice_as_long_each_time() -> None:
    now = [0.0]
    quarantine = Quarantine(10, clock=lambda: now[0])
    assert b"k" not in quarantine
    quarantine.add(b"k")
    assert b"k" in quarantine
    assert b"other" not in quarantine
    now[0] = 10.5
    assert b"k" not in quarantine
    quarantine.add(b"k")
    now[0] = 30
    assert b"k" in quarantine
    now[0] = 31
    assert b"k" not in quarantine
    # Left alone for long enough, it is forgotten.
    now[0] = 100
    quarantine.add(b"other")
    assert len(quarantine) == 1
    assert quarantine.generation == 3


def test_counts_are_taken_once() -> None:
    counts = Counts()
    counts.add("restores")
    counts.add("restored_tokens", 64)
    counts.add("restored_tokens", 64)
    counts.add("stored_spans", 0)
    assert counts.take() == {"restores": 1, "restored_tokens": 128}
    assert counts.take() == {}
    with pytest.raises(KeyError):
        counts.add("restors")
    assert all(name.isidentifier() for name in NAMES)


def test_reports_of_ranks_are_merged() -> None:
    report = LoadReport({"r": [1, 2]}, {"r": 64, "s": 32})
    report.merge(LoadReport({"r": [2, 3], "t": [0]}, {"r": 32, "s": 128}))
    assert report == LoadReport({"r": [1, 2, 3], "t": [0]}, {"r": 32, "s": 32})
    assert not LoadReport()


def test_shards_have_codes_of_their_own() -> None:
    codes = {code for tp in (1, 2, 4, 8) for code in Sharding(3, 8, tp).codes}
    assert len(codes) == 15
    assert Shard.from_code(Sharding(3, 8, 4).codes[1]) == Shard(0, 3, 2, 4)
