"""Sizes of payloads and slabs, as ``docs/layout.md`` says them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kmesh.layout import (
    DTYPE_BYTES,
    PAGE_BYTES,
    SPAN_TOKENS,
    SUB_TOKENS,
    TILE_BYTES,
    Shard,
    SpanGeometry,
    slab_capacity,
    sums_bytes,
    sums_offset,
    tiles,
)


def test_constants_of_version_1() -> None:
    assert (TILE_BYTES, PAGE_BYTES, SPAN_TOKENS, SUB_TOKENS) == (65536, 4096, 64, 16)
    assert DTYPE_BYTES == {"float32": 4, "bfloat16": 2, "float16": 2}


def test_payload_of_a_known_model() -> None:
    """28 layers, 4 KV heads of 128 in bf16: 57,344 bytes a token."""
    geometry = SpanGeometry(layers=28, heads=4, head_dim=128, element_bytes=2)
    assert geometry.row_bytes == 256
    assert geometry.token_bytes == 57_344
    assert geometry.payload_bytes(64) == 3_670_016
    assert tiles(geometry.payload_bytes(64)) == 56


@pytest.mark.parametrize(
    ("length", "count"), [(1, 1), (65535, 1), (65536, 1), (65537, 2), (131072, 2)]
)
def test_tiles(length: int, count: int) -> None:
    assert tiles(length) == count


RANGES = st.tuples(st.integers(0, 0xFFFE), st.integers(1, 0xFFFF)).filter(lambda r: r[0] < r[1])


@given(RANGES, RANGES)
def test_shard_codes_round_trip(layers: tuple[int, int], heads: tuple[int, int]) -> None:
    shard = Shard(*layers, *heads)
    assert Shard.from_code(shard.code()) == shard
    assert 0 <= shard.code() < 2**64
    assert (shard.layers, shard.heads) == (layers[1] - layers[0], heads[1] - heads[0])


@pytest.mark.parametrize(
    "ranges", [(0, 0, 0, 1), (0, 1, 2, 2), (3, 1, 0, 1), (-1, 1, 0, 1), (0, 0x10000, 0, 1)]
)
def test_empty_and_oversized_shards_are_refused(ranges: tuple[int, int, int, int]) -> None:
    with pytest.raises(ValueError, match="range"):
        Shard(*ranges)
    if all(0 <= n <= 0xFFFF for n in ranges):
        code = sum(n << 16 * i for i, n in enumerate(ranges))
        with pytest.raises(ValueError, match="range"):
            Shard.from_code(code)


@given(st.integers(2 * TILE_BYTES, 1 << 45))
def test_the_sums_area_has_a_place_for_every_tile_and_overlaps_none(size: int) -> None:
    capacity, offset = slab_capacity(size), sums_offset(size)
    assert capacity % TILE_BYTES == 0
    assert capacity <= offset
    assert sums_bytes(size) % PAGE_BYTES == 0
    assert offset + capacity // TILE_BYTES * 8 <= size
    # No tile is given away: one more would reach into the sums.
    assert capacity + TILE_BYTES > offset


def test_a_page_aligned_slab_has_page_aligned_sums() -> None:
    assert sums_offset(1 << 30) == (1 << 30) - 131_072
    assert slab_capacity(1 << 30) == (1 << 30) - 131_072
