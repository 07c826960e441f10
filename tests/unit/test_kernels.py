"""The GPU kernels' code, run by one CPU thread, against the reference and the host's kernels."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from typing import Any

import numpy as np
import one_thread
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import Case, cases, rotary
from paged_reference import Engine, Stored

from kmesh import _host
from kmesh.errors import UnsupportedError
from kmesh.kernels import host, plan, reference
from kmesh.kernels.host import Status
from kmesh.kernels.plan import Load, Request, merged
from kmesh.layout import TILE_BYTES


def all_done(case: Case) -> list[list[bytes]]:
    return [[bytes(len(load.records))] * len(load.requests) for load in case.loads]


@settings(max_examples=150, deadline=None)
@given(case=cases(), blocks=st.integers(1, 5), stages=st.integers(1, 4), units=st.integers(0, 3))
def test_restores_move_what_the_reference_moves(
    kernels: ctypes.CDLL, case: Case, blocks: int, stages: int, units: int
) -> None:
    engine, expected = case.engine(), case.engine()
    done = one_thread.restore(
        kernels, engine.layout, case.loads, blocks=blocks, stages=stages, unit_stages=units,
        burst=units,
    )  # fmt: skip
    assert done == all_done(case)
    assert reference.restore(expected.layout, case.loads) == done
    assert engine.image() == expected.image()


UNITS = {"unit_stages": st.integers(1, 6), "burst": st.integers(1, 7)}
ALIGNED = [16, 32, 80, 128, 256, 512, 4096]


@settings(max_examples=150, deadline=None)
@given(case=cases(whole=True, rows=ALIGNED), blocks=st.integers(1, 5), **UNITS)
def test_whole_pages_are_what_the_reference_moves(
    kernels: ctypes.CDLL, case: Case, blocks: int, unit_stages: int, burst: int
) -> None:
    engine, expected = case.engine(), case.engine()
    done = one_thread.restore(
        kernels, engine.layout, case.loads, blocks=blocks, unit_stages=unit_stages, burst=burst
    )
    assert done == all_done(case)
    assert reference.restore(expected.layout, case.loads) == done
    assert engine.image() == expected.image()


@settings(max_examples=60, deadline=None)
@given(case=cases())
def test_the_reference_moves_what_the_host_moves(case: Case) -> None:
    engine, expected = case.engine(), case.engine()
    assert reference.restore(engine.layout, case.loads) == all_done(case)
    for load in case.loads:
        for request in load.requests:
            records, layout = load.records.copy(), expected.layout
            records["position"] += np.uint64(request.shift % 2**64)
            if request.by_slot:
                one = {"block_tokens": 1, "block_stride": layout.token_stride}
                dense = layout.block_stride == layout.token_stride * layout.block_tokens
                if not dense:
                    continue
                layout = replace(layout, **one, num_blocks=layout.num_blocks * layout.block_tokens)
            parts = [host.SpanPart(*map(int, record)) for record in records]
            assert not any(host.scatter(layout, parts, request.pages.tolist()))
    if all(
        not request.by_slot
        or expected.layout.block_stride
        == expected.layout.token_stride * expected.layout.block_tokens
        for load in case.loads
        for request in load.requests
    ):
        assert engine.image() == expected.image()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("interleaved", [False, True])
@settings(max_examples=25, deadline=None)
@given(case=cases(deltas=True, rows=[32, 80, 128, 160, 256]), part=st.sampled_from([1.0, 0.5, 0.3]))
def test_keys_are_turned_as_the_reference_turns_them(
    kernels: ctypes.CDLL, dtype: str, interleaved: bool, case: Case, part: float
) -> None:
    how = rotary(dtype, case.sizes["row"], interleaved=interleaved, part=part)
    engine, expected = case.engine(), case.engine()
    done = one_thread.restore(kernels, engine.layout, case.loads, rotary=how)
    assert done == all_done(case)
    assert reference.restore(expected.layout, case.loads, how) == done
    assert engine.image() == expected.image()


@settings(max_examples=60, deadline=None)
@given(case=cases(), blocks=st.integers(1, 5))
def test_stores_give_what_was_restored_with_its_sums(
    kernels: ctypes.CDLL, case: Case, blocks: int
) -> None:
    engine = case.engine()
    reference.restore(engine.layout, case.loads)
    for load in case.loads:
        for request in load.requests:
            status, sums = {}, {}
            payloads = {}
            for name, store in (
                ("kernel", lambda *a: one_thread.store(kernels, *a, blocks=blocks)),
                ("reference", reference.store),
            ):
                records = load.records.copy()
                kept = [np.full(int(n), 0x5A, dtype=np.uint8) for n in records["length"]]
                records["address"] = [one.ctypes.data for one in kept]
                status[name], sums[name] = store(engine.layout, records, request)
                payloads[name] = [one.tobytes() for one in kept]
            assert status["kernel"] == status["reference"] == bytes(len(load.records))
            assert payloads["kernel"] == payloads["reference"]
            for mine, all_, record in zip(
                sums["kernel"], sums["reference"], load.records, strict=True
            ):
                # Those of tiles of which nothing was moved are left out, at both ends.
                whole = record["heads"] == record["src_heads"]
                whole &= record["layers"] == record["src_layers"]
                whole &= record["token_begin"] == 0 and record["token_end"] == record["tokens"]
                if whole:
                    assert mine.tolist() == all_.tolist()
                else:
                    assert len(mine)
                    assert any(
                        all_[i : i + len(mine)].tolist() == mine.tolist()
                        for i in range(len(all_) - len(mine) + 1)
                    )


SIZES = {"order": "HND", "layers": 3, "heads": 4, "slots": 16, "row": 256, "gap": 0}


def written(engine: Engine, loads: list[Load], **more: Any) -> plan.Job:
    return plan.write(engine.layout, loads, unit_stages=3, allocate=one_thread.aligned, **more)


@pytest.mark.parametrize("order", ["HND", "NHD", "planes"])
@pytest.mark.parametrize(
    ("change", "units"),
    [
        ({}, 3 * 4), ({"position": 32}, 3 * 4), ({"position": 8}, 0), ({"token_end": 63}, 0),
        ({"token_begin": 16}, 0), ({"src_layer_begin": 1, "layers": 2}, 2 * 4),
        ({"heads": 3}, 0), ({"address": 4}, 0),
    ],
)  # fmt: skip
def test_what_is_moved_in_units(order: str, change: dict[str, int], units: int) -> None:
    span = Stored.make(9, 3, 4, 64, 256)
    engine = Engine.make(**{**SIZES, "order": order}, blocks=8)
    part = span.part(**{k: v for k, v in change.items() if k != "address"})
    part.address += change.get("address", 0)
    load = Load.of([part], [Request(np.arange(8)), Request(np.arange(8), shift=16)])
    job = written(engine, [load])
    assert job.units == units
    assert bool(job.items) == (not units)
    # One request whose pages begin elsewhere, or that names slots, is enough to part them.
    for other in (Request(np.arange(8), shift=4), Request(np.arange(128), by_slot=True)):
        assert not written(engine, [Load.of([part], [*load.requests, other])]).units


@pytest.mark.parametrize(
    ("heads", "slots", "row", "tokens", "units"),
    [
        (4, 16, 256, 64, 4), (2, 16, 128, 64, 1), (8, 16, 256, 64, 8), (1, 128, 256, 64, 1),
        (64, 16, 256, 32, 32), (65, 16, 256, 32, 0), (1, 1, 16, 64, 1), (8, 16, 256, 48, 6),
    ],
)  # fmt: skip
def test_units_are_pages_parts_of_one_or_several(
    kernels: ctypes.CDLL, heads: int, slots: int, row: int, tokens: int, units: int
) -> None:
    sizes = {"order": "NHD", "layers": 1, "heads": heads, "slots": slots, "row": row, "gap": 0}
    blocks = max(tokens // slots, 1)
    span = Stored.make(4, 1, heads, tokens, row)
    load = Load.of([span.part()], [Request(np.arange(blocks)[::-1].copy())])
    engine, expected = Engine.make(**sizes, blocks=blocks), Engine.make(**sizes, blocks=blocks)
    assert written(engine, [load]).units == units
    assert one_thread.restore(kernels, engine.layout, [load], unit_stages=2, burst=2) == [[b"\0"]]
    reference.restore(expected.layout, [load])
    assert engine.image() == expected.image()


def two_requests() -> tuple[Engine, Stored, Load]:
    span = Stored.make(9, 3, 4, 64, 256)
    pages = [np.array([4, 0, 5, 2]), np.array([1, 3, 6, 7])]
    return (
        Engine.make(**SIZES, blocks=8),
        span,
        Load.of([span.part()], [Request(one) for one in pages]),
    )


@pytest.mark.parametrize("at", [0, 17, TILE_BYTES - 1, 3 * TILE_BYTES + 5, 6 * TILE_BYTES - 1])
@pytest.mark.parametrize("bit", [0, 7])
@pytest.mark.parametrize("units", [0, 3])
def test_a_flipped_bit_is_reported_for_exactly_its_part(
    kernels: ctypes.CDLL, at: int, bit: int, units: int
) -> None:
    engine, span, load = two_requests()
    good = Stored.make(10, 3, 4, 64, 256)
    other = Load.of([good.part()], [Request(load.requests[0].pages + 8)])
    engine = Engine.make(**SIZES, blocks=16)
    span.array.reshape(-1)[at] ^= 1 << bit
    assert bool(written(engine, [load, other]).units)
    done = one_thread.restore(kernels, engine.layout, [load, other], unit_stages=units)
    assert done == [[bytes([Status.BAD_TILE])] * 2, [bytes([Status.DONE])]]


def test_a_tile_of_which_nothing_is_wanted_is_not_looked_at(kernels: ctypes.CDLL) -> None:
    engine, span, load = two_requests()
    span.array[1] ^= 1
    for layer, code in ((0, Status.DONE), (1, Status.BAD_TILE), (2, Status.DONE)):
        part = span.part(src_layer_begin=layer, layers=1)
        done = one_thread.restore(kernels, engine.layout, [Load.of([part], load.requests)])
        assert done == [[bytes([code])] * 2]


def test_heads_between_which_whole_tiles_are_not_wanted(kernels: ctypes.CDLL) -> None:
    """A rank's heads: 64 KiB of each 128 KiB, and a bad tile among the others'."""
    span = Stored.make(3, 2, 4, 128, 256)
    span.array[:, :, 2:] ^= 1
    engine = Engine.make(**{**SIZES, "heads": 2}, blocks=8)
    expected = Engine.make(**{**SIZES, "heads": 2}, blocks=8)
    for begin, code in ((0, Status.DONE), (2, Status.BAD_TILE)):
        part = span.part(src_head_begin=begin, heads=2, layers=2)
        load = Load.of([part], [Request(np.arange(8))])
        done = one_thread.restore(kernels, engine.layout, [load])
        assert done == [[bytes([code])]] == reference.restore(expected.layout, [load])
        if code == Status.DONE:
            assert engine.image() == expected.image()


@pytest.mark.parametrize("what", ["root", "sums"])
def test_sums_that_do_not_fold_to_the_root(kernels: ctypes.CDLL, what: str) -> None:
    engine, span, load = two_requests()
    if what == "sums":
        span.sums[5] += 1
    part = span.part(root=span.root ^ (what == "root"), layers=1)
    done = one_thread.restore(kernels, engine.layout, [Load.of([part], load.requests)])
    assert done == [[bytes([Status.BAD_ROOT])] * 2]


def test_a_request_with_bad_pages_does_not_stop_its_siblings(kernels: ctypes.CDLL) -> None:
    engine, span, load = two_requests()
    expected = Engine.make(**SIZES, blocks=8)
    bad = Request(np.array([4, 0, 8, 2]))
    mixed = Load(load.records, [bad, load.requests[1], Request(load.requests[0].pages[:3])])
    wrong = span.part(heads=5)
    done = one_thread.restore(kernels, engine.layout, [mixed, Load.of([wrong], load.requests)])
    assert done[0] == [bytes([c]) for c in (Status.BAD_BLOCK, Status.DONE, Status.BAD_BLOCK)]
    assert done[1] == [bytes([Status.BAD_RECORD])] * 2
    reference.restore(expected.layout, [Load(load.records, load.requests[1:])])
    assert engine.image() == expected.image()


def test_more_requests_than_one_read_serves(kernels: ctypes.CDLL) -> None:
    sizes = {**SIZES, "layers": 1, "heads": 1}
    expected = Engine.make(**sizes, blocks=160)
    span = Stored.make(5, 1, 1, 64, 256)
    requests = [Request(np.arange(4) + 4 * i) for i in range(plan.SHARED_BY + 5)]
    loads = [Load.of([span.part()], [one]) for one in requests]
    assert len(merged(loads)) == 1
    reference.restore(expected.layout, loads)
    for units in (0, 2):
        engine = Engine.make(**sizes, blocks=160)
        done = one_thread.restore(kernels, engine.layout, merged(loads), unit_stages=units)
        assert done == [[b"\0"] * len(requests)]
        assert engine.image() == expected.image()


def test_loads_of_other_parts_stay_apart() -> None:
    _, span, load = two_requests()
    other = Load.of([span.part(token_end=63)], load.requests)
    again = Load(load.records.copy(), load.requests[:1])
    found = merged([load, other, again])
    assert [len(one.requests) for one in found] == [3, 2]
    assert found[1] is other


HUGE = st.sampled_from([0, 1, 2, 3, 63, 64, 65, 2**31, 2**32, 2**56, 2**63 - 1, 2**63, 2**64 - 1])


@settings(max_examples=300, deadline=None)
@given(
    changes=st.dictionaries(
        st.sampled_from([n for n in plan.RECORD.names if n not in ("address", "sums_address")]),
        HUGE,
        min_size=1,
    ),
    pages=st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(-1, 7), max_size=6),
    by_slot=st.booleans(),
    shift=st.integers(-70, 70) | st.sampled_from([-(2**63), 2**63 - 1]),
)
def test_contradictory_records_stay_inside_what_was_named(
    kernels: ctypes.CDLL, changes: dict[str, int], pages: list[int], by_slot: bool, shift: int
) -> None:
    engine, span, _ = two_requests()
    request = Request(np.array(pages, dtype=np.int64), by_slot, shift)
    part = span.part(**changes)
    done = one_thread.restore(kernels, engine.layout, [Load.of([part], [request])])
    assert done[0][0][0] in list(Status)
    if not shift and not by_slot:
        other = Engine.make(**SIZES, blocks=8)
        assert host.scatter(other.layout, [part], pages) == done[0][0]
    for buffer in engine.buffers:
        assert (buffer[:64] == 0xEE).all()
        assert (buffer[-64:] == 0xEE).all()


def test_nothing_to_do(kernels: ctypes.CDLL) -> None:
    engine, span, load = two_requests()
    assert one_thread.restore(kernels, engine.layout, []) == []
    assert one_thread.restore(kernels, engine.layout, [Load(load.records, [])]) == [[]]
    empty = span.part(token_end=0, address=0, sums_address=0, root=1)
    assert one_thread.restore(kernels, engine.layout, [Load.of([empty], load.requests)]) == [
        [b"\0"] * 2
    ]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"row_bytes": 6}, "by fours"),
        ({"row_bytes": 32768}, "4 to 16384"),
        ({"head_stride": 4098}, "multiples of 4"),
        ({"num_blocks": 2**31}, "pages"),
        ({"row_bytes": 0}, "zero"),
    ],
)
def test_layouts_that_are_not_served_say_so(change: dict[str, int], said: str) -> None:
    engine, _, load = two_requests()
    with pytest.raises(UnsupportedError, match=said):
        plan.write(replace(engine.layout, **change), [load])


def test_turned_keys_are_not_moved_in_units() -> None:
    engine, _, load = two_requests()
    turned = Load(load.records, [replace(load.requests[0], delta=1), load.requests[1]])
    job = written(engine, [turned], rotary=rotary("bfloat16", 256))
    assert job.turns
    assert job.items
    assert not job.units


def test_turning_keys_needs_a_rotation() -> None:
    engine, _, load = two_requests()
    turned = [Load(load.records, [replace(load.requests[0], delta=1)])]
    with pytest.raises(ValueError, match="nothing says how"):
        plan.write(engine.layout, turned)
    with pytest.raises(UnsupportedError, match="do not fit"):
        plan.write(engine.layout, turned, rotary=rotary("bfloat16", 512))


def test_buffers_of_a_job_that_do_not_fit_are_refused() -> None:
    engine, _, load = two_requests()
    wanted = b"".join(
        plan._WANTED.pack(r.pages.ctypes.data, len(r.pages), 0, 0, 2**32 - 1) for r in load.requests
    )
    memory = one_thread.aligned(1 << 16)
    options = plan._OPTIONS.pack(1 << 17, 4, 1 << 17, 0, 1, 0, 0, 0)
    good = [
        engine.layout.packed, load.records.tobytes(), plan._GROUP.pack(1, 2), wanted, b"", options,
        memory.data, bytearray(2),
    ]  # fmt: skip
    size, *_ = _host.job(*good)
    assert 0 < size <= len(memory)
    # Too little memory: said, and nothing written behind it.
    short = memory[: size - 16]
    before = memory[size - 16 :].tobytes()
    assert _host.job(*good[:6], short.data, bytearray(2))[0] == size
    assert memory[size - 16 :].tobytes() == before
    wrong = [
        (0, engine.layout.packed[:-8]), (0, b""), (1, load.records.tobytes()[:-1]),
        (2, plan._GROUP.pack(2, 2)), (2, plan._GROUP.pack(1, 33)), (2, b"1234567"),
        (3, wanted[:-1]), (5, options[:-4]), (6, memory[1:].data), (7, bytearray(1)),
        (5, plan._OPTIONS.pack(1000, 4, 0, 0, 1, 0, 0, 0)),
    ]  # fmt: skip
    for place, other in wrong:
        given = [*good]
        given[place] = other
        with pytest.raises(ValueError, match=r"."):
            _host.job(*given)
