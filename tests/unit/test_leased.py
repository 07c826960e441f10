"""Leased spans become records and parts in native calls: against numpy, column by column."""

from __future__ import annotations

import ctypes
from array import array

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kmesh import _host
from kmesh.kernels.plan import LEASED, RECORD
from kmesh.layout import TILE_BYTES

U64 = st.integers(0, 2**64 - 1)
U32 = st.integers(0, 2**32 - 1)
#: First head there, first head here, heads; the second part of a sharding gives nothing.
HEADS = np.array([[1, 0, 2], [0, 0, 0], [0, 2, 1]], np.uint64)
#: Number, address, address of its sums, whether it is GPU memory.
SLABS = np.array([[7, 1 << 40, 1 << 44, 0], [9, 1 << 41, 1 << 45, 1]], np.uint64)


@given(st.lists(st.tuples(U32, U64, U64, U64, U32), max_size=9), st.integers(1, 3), st.data())
def test_entries_of_a_lease_become_records(rows, shards, data) -> None:  # type: ignore[no-untyped-def]
    kinds = "IQQQI"
    columns = [array(kind, [row[i] for row in rows]) for i, kind in enumerate(kinds)]
    count = data.draw(st.integers(0, len(rows)))
    packed = _host.leased_spans(*columns, count, shards, 5, 64)
    records = np.frombuffer(packed, LEASED)
    wanted = np.zeros(count, LEASED)
    for name, column in zip(("slab", "offset", "length", "root", "tokens"), columns, strict=True):
        wanted[name] = column[:count]
    entries = np.arange(count)
    wanted["entry"], wanted["part"] = entries, entries % shards
    wanted["start"] = (5 + entries // shards) * 64
    assert records.tobytes() == wanted.tobytes()


def test_columns_without_enough_entries_are_refused() -> None:
    full = [array(kind, [1, 2]) for kind in "IQQQI"]
    for i, kind in enumerate("IQQQI"):
        short = [*full[:i], array(kind, [1]), *full[i + 1 :]]
        with pytest.raises(ValueError, match="fewer"):
            _host.leased_spans(*short, 2, 1, 0, 64)
    with pytest.raises(ValueError, match="shards"):
        _host.leased_spans(*full, 2, 0, 0, 64)


spans = st.lists(
    st.tuples(
        st.sampled_from([7, 9]),
        st.integers(0, 2),
        st.integers(0, 40),
        st.integers(1, 3 * TILE_BYTES),
        U64,
        st.integers(1, 64),
        U32,
        st.integers(0, 9),
    ),
    max_size=12,
)


def made(rows: list[tuple[int, ...]]) -> np.ndarray:
    records = np.array(rows, LEASED)
    records["offset"] *= TILE_BYTES
    records["start"] *= 16
    return records


@given(spans, st.integers(0, 200), st.integers(0, 200), st.sampled_from([1, 16, 48]))
def test_records_become_parts(
    rows: list[tuple[int, ...]], begin: int, end: int, block: int
) -> None:
    records = made(rows)
    found = _host.leased_parts(
        records.tobytes(), HEADS.tobytes(), SLABS.tobytes(), begin, end, block, 3, 28
    )
    parts, on_gpu, entries, base, reach = found
    first = min([begin, *records["start"].tolist()])
    assert base == first // block * block
    kept = records[HEADS[records["part"], 2] > 0]
    wanted = np.zeros(len(kept), RECORD)
    slabs = SLABS[(kept["slab"] == 9).astype(int)]
    wanted["address"] = slabs[:, 1] + kept["offset"]
    wanted["sums_address"] = slabs[:, 2] + kept["offset"] // TILE_BYTES * 8
    for name in ("root", "length", "tokens"):
        wanted[name] = kept[name]
    start = kept["start"].astype(np.int64)
    # Of a span before or behind what is wanted nothing is.
    ends = np.maximum(np.minimum(end - start, kept["tokens"].astype(np.int64)), 0)
    wanted["token_begin"] = np.minimum(np.maximum(begin - start, 0), ends)
    wanted["token_end"] = ends
    wanted["position"] = start - base
    wanted["src_head_begin"], wanted["dst_head_begin"], wanted["heads"] = HEADS[kept["part"]].T
    wanted["src_heads"], wanted["src_layers"], wanted["layers"] = 3, 28, 28
    assert np.frombuffer(parts, RECORD).tobytes() == wanted.tobytes()
    assert list(on_gpu) == slabs[:, 3].tolist()
    assert np.frombuffer(entries, np.uint32).tolist() == kept["entry"].tolist()
    assert reach == int((start + ends).max(initial=0))


@given(spans)
def test_extents_are_the_largest_of_each_slab(rows: list[tuple[int, ...]]) -> None:
    records = made(rows)
    packed = _host.leased_extents(records.tobytes(), HEADS.tobytes())
    found = {int(row[0]): row[1:].tolist() for row in np.frombuffer(packed, "<u8").reshape(-1, 4)}
    kept = records[HEADS[records["part"], 2] > 0]
    wanted = {}
    for slab in set(kept["slab"].tolist()):
        here = kept[kept["slab"] == slab]
        offset, length = here["offset"], here["length"]
        wanted[slab] = [int(x.max()) for x in (offset, length, offset + length)]
    assert found == wanted


def test_an_end_that_overflows_is_no_small_one() -> None:
    records = made([(7, 0, 2**48 - 1, 2**40, 0, 64, 0, 0)])
    extents = np.frombuffer(_host.leased_extents(records.tobytes(), HEADS.tobytes()), "<u8")
    assert extents[3] == 2**64 - 1


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"part": 3}, "part"),
        ({"slab": 8}, "slabs"),
        ({"start": 1 << 30}, "far away"),
        ({"start": 2**64 - 1}, "far away"),
    ],
)
def test_spans_that_make_no_sense_are_refused(change: dict[str, int], says: str) -> None:
    records = made([(7, 0, 1, 64, 0, 64, 0, 0)])
    for name, value in change.items():
        records[name] = value
    with pytest.raises(ValueError, match=says):
        _host.leased_parts(records.tobytes(), HEADS.tobytes(), SLABS.tobytes(), 0, 64, 16, 3, 28)
    if "part" in change:
        with pytest.raises(ValueError, match=says):
            _host.leased_extents(records.tobytes(), HEADS.tobytes())


def test_buffers_of_wrong_lengths_are_refused() -> None:
    good = made([(7, 0, 1, 64, 0, 64, 0, 0)]).tobytes(), HEADS.tobytes(), SLABS.tobytes()
    for i, says in enumerate(("spans", "heads", "slabs")):
        given_ = [*good[:i], good[i][:-1], *good[i + 1 :]]
        with pytest.raises(ValueError, match=says):
            _host.leased_parts(*given_, 0, 64, 16, 3, 28)
        if i < 2:
            with pytest.raises(ValueError, match=says):
                _host.leased_extents(*given_[:2])
    for begin, end, block in ((-1, 64, 16), (0, -1, 16), (0, 1 << 30, 16), (0, 64, 0)):
        with pytest.raises(ValueError, match="begin, end, block"):
            _host.leased_parts(*good, begin, end, block, 3, 28)
    odd = made([(7, 0, 1, 64, 0, 64, 0, 0)])
    odd["offset"] += 1
    with pytest.raises(ValueError, match="tile"):
        _host.leased_extents(odd.tobytes(), HEADS.tobytes())


def test_bytes_of_pages_are_those_of_parts_that_are_done() -> None:
    records = np.zeros(3, RECORD)
    records["layers"], records["heads"] = 28, [1, 2, 3]
    records["token_begin"], records["token_end"] = [0, 16, 0], [64, 64, 5]
    rows = [2 * 28 * heads * tokens for heads, tokens in ((1, 64), (2, 48), (3, 5))]
    assert _host.moved_bytes(records, bytes(3), 256) == sum(rows) * 256
    assert _host.moved_bytes(records, b"\0\2\0", 256) == (rows[0] + rows[2]) * 256
    with pytest.raises(ValueError, match="status"):
        _host.moved_bytes(records, bytes(2), 256)


def test_a_nap_leaves_the_threads_timer_slack_as_it_was() -> None:
    get, keep = 30, ctypes.CDLL(None).prctl
    before = keep(get, 0, 0, 0, 0)
    _host.nap(1000)
    assert keep(get, 0, 0, 0, 0) == before
    with pytest.raises(ValueError, match="second"):
        _host.nap(1_000_000_000)
