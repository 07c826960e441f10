"""Spans to and from paged KV: exactly what is wanted moves, and what is wrong is noticed."""

from __future__ import annotations

import random
from array import array
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_reference import FILLER, Engine, Stored, slow_move, summed

from kmesh import _host
from kmesh.kernels.host import PagedLayout, SpanPart, Status, gather, scatter
from kmesh.layout import TILE_BYTES

U64 = 2**64 - 1


def subrange(draw: st.DrawFn, size: int, least: int = 1) -> tuple[int, int]:
    begin = draw(st.integers(0, size - least))
    return begin, draw(st.integers(begin + least, size))


@st.composite
def cases(draw: st.DrawFn) -> tuple[dict[str, int | str], list[dict[str, int]], list[int], int]:
    """An engine, parts of spans with what they want, block ids and a seed."""
    row = draw(st.sampled_from([1, 2, 6, 32, 64, 80, 128, 160, 256, 512]))
    slots = draw(st.sampled_from([1, 3, 8, 16, 32]))
    engine: dict[str, int | str] = {
        "order": draw(st.sampled_from(["HND", "NHD", "planes"])),
        "layers": draw(st.integers(1, 3)),
        "heads": draw(st.integers(1, 4)),
        "slots": slots,
        "row": row,
        "gap": draw(st.sampled_from([0, 0, 0, 2, 64])),
    }
    parts, position = [], draw(st.integers(0, 40))
    for _ in range(draw(st.integers(1, 3))):
        tokens = draw(st.sampled_from([1, 5, 16, 48, 64]))
        span = {"tokens": tokens, "position": position}
        span["token_begin"], span["token_end"] = subrange(draw, tokens)
        for kind in ("head", "layer"):
            own = int(engine[kind + "s"])
            span[f"src_{kind}s"] = draw(st.integers(1, 4))
            begin, end = subrange(draw, span[f"src_{kind}s"])
            count = min(end - begin, own)
            span[f"src_{kind}_begin"], span[kind + "s"] = begin, count
            span[f"dst_{kind}_begin"] = draw(st.integers(0, own - count))
        parts.append(span)
        position += tokens
    needed = -(-position // slots)
    ids = list(range(needed + draw(st.integers(0, 5))))
    draw(st.randoms(use_true_random=False)).shuffle(ids)
    return engine, parts, ids, draw(st.integers(0, 1000))


@settings(max_examples=150, deadline=None)
@given(cases())
def test_scatter_and_gather_move_exactly_what_is_wanted(case) -> None:
    sizes, wants, ids, seed = case
    blocks = ids[: -(-(wants[-1]["position"] + wants[-1]["tokens"]) // sizes["slots"])]
    row = sizes["row"]
    engine = Engine.make(**sizes, blocks=len(ids))
    expected = Engine.make(**sizes, blocks=len(ids))
    spans = [
        Stored.make(seed + i, want["src_layers"], want["src_heads"], want["tokens"], row)
        for i, want in enumerate(wants)
    ]
    parts = [span.part(**want) for span, want in zip(spans, wants, strict=True)]

    assert scatter(engine.layout, parts, blocks) == bytes(len(parts))
    for span, part in zip(spans, parts, strict=True):
        slow_move(expected, span, part, blocks, out=False)
    assert engine.image() == expected.image()

    empty = [Stored(np.full_like(span.array, FILLER), span.sums, 0) for span in spans]
    wanted = [Stored(np.full_like(span.array, FILLER), span.sums, 0) for span in spans]
    back = [e.part(**want) for e, want in zip(empty, wants, strict=True)]
    assert gather(engine.layout, back, blocks) == bytes(len(parts))
    for span, target, part in zip(wanted, empty, back, strict=True):
        slow_move(engine, span, part, blocks, out=True)
        assert (target.array == span.array).all()
    assert engine.image() == expected.image()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("order", ["HND", "NHD"])
def test_pages_of_torch_tensors(dtype: torch.dtype, order: str) -> None:
    """As vLLM holds them: [block, head, slot, 2·dim], K and V packed, and two ranks."""
    blocks, heads, slots, dim, layers, tokens = 12, 2, 32, 32, 2, 64
    generator = torch.Generator().manual_seed(1)
    span = torch.randn(layers, 2, 2 * heads, tokens, dim, generator=generator).to(dtype)
    payload = span.view(torch.uint8).numpy().reshape(-1)
    root, sums = summed(payload)
    pages = []
    for _ in range(layers):
        if order == "HND":
            pages.append(torch.zeros(blocks, heads, slots, 2 * dim, dtype=dtype))
        else:
            pages.append(torch.zeros(blocks, slots, heads, 2 * dim, dtype=dtype).transpose(1, 2))
    size = span.element_size()
    block, head, token, _ = (stride * size for stride in pages[0].stride())
    row = dim * size
    layout = PagedLayout(
        k_base=tuple(page.data_ptr() for page in pages),
        v_base=tuple(page.data_ptr() + row for page in pages),
        block_stride=block,
        head_stride=head,
        token_stride=token,
        block_tokens=slots,
        num_blocks=blocks,
        heads=heads,
        row_bytes=row,
    )
    for rank in (0, 1):
        part = SpanPart(
            address=payload.ctypes.data,
            sums_address=sums.ctypes.data,
            root=root,
            length=payload.nbytes,
            tokens=tokens,
            token_begin=0,
            token_end=tokens,
            position=32,
            src_heads=2 * heads,
            src_head_begin=rank * heads,
            dst_head_begin=0,
            heads=heads,
            src_layers=layers,
            src_layer_begin=0,
            dst_layer_begin=0,
            layers=layers,
        )
        assert scatter(layout, [part], [3, 11, 5]) == b"\0"
        for layer, page in enumerate(pages):
            both = torch.cat([page[11], page[5]], dim=1)
            mine = span[layer, :, rank * heads : (rank + 1) * heads]
            assert torch.equal(both[..., :dim], mine[0])
            assert torch.equal(both[..., dim:], mine[1])


# ---- what must be noticed -----------------------------------------------------------------

SIZES = {"order": "HND", "layers": 3, "heads": 4, "slots": 16, "row": 256, "gap": 0}


def engine_and_span() -> tuple[Engine, Stored, list[int]]:
    """A span of 6 tiles (3 layers, 4 heads, 64 tokens, 256-byte rows) and pages for it."""
    engine = Engine.make(**SIZES, blocks=6)
    return engine, Stored.make(9, 3, 4, 64, 256), [4, 0, 5, 2]


def tiles_of(part: SpanPart, row: int) -> set[int]:
    """Tiles that hold a wanted byte, byte by byte of each row's ends."""
    wanted = set()
    for layer in range(part.src_layer_begin, part.src_layer_begin + part.layers):
        for plane in (0, 1):
            for head in range(part.src_head_begin, part.src_head_begin + part.heads):
                for token in range(part.token_begin, part.token_end):
                    index = ((layer * 2 + plane) * part.src_heads + head) * part.tokens + token
                    wanted |= {index * row // TILE_BYTES, (index * row + row - 1) // TILE_BYTES}
    return wanted


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_corrupt_tile_is_noticed_exactly_when_it_is_read(data: st.DataObject) -> None:
    engine, span, blocks = engine_and_span()
    head, head_end = subrange(data.draw, 4)
    layer, layer_end = subrange(data.draw, 3)
    begin, end = subrange(data.draw, 64)
    part = span.part(
        src_head_begin=head,
        heads=head_end - head,
        src_layer_begin=layer,
        layers=layer_end - layer,
        token_begin=begin,
        token_end=end,
    )
    bit = data.draw(st.integers(0, 8 * span.array.nbytes - 1))
    span.array.reshape(-1)[bit // 8] ^= 1 << bit % 8
    read = bit // 8 // TILE_BYTES in tiles_of(part, 256)
    status = scatter(engine.layout, [part], blocks)
    assert status == bytes([Status.BAD_TILE if read else Status.DONE])


def test_no_byte_of_a_corrupt_tile_reaches_the_pages() -> None:
    engine, span, blocks = engine_and_span()
    span.array.reshape(-1)[3 * TILE_BYTES + 17] ^= 4
    assert scatter(engine.layout, [span.part()], blocks) == bytes([Status.BAD_TILE])
    kept = span.array.reshape(-1)[: 3 * TILE_BYTES].reshape(-1, 256)
    written = {
        view[b, h, s].tobytes()
        for planes in engine.views
        for view in planes
        for b in blocks
        for h in range(4)
        for s in range(16)
    } - {bytes([FILLER]) * 256}
    assert written == {row.tobytes() for row in kept}


def test_one_bad_part_does_not_stop_the_others() -> None:
    engine, span, _ = engine_and_span()
    bad = Stored.make(10, 3, 4, 64, 256)
    bad.array.reshape(-1)[-1] ^= 1
    parts = [
        bad.part(position=0),
        span.part(position=64),
        span.part(position=64, root=span.root ^ 1),
    ]
    parts.append(span.part(position=128))
    parts.append(span.part(position=64, heads=5))
    engine = Engine.make(**SIZES, blocks=8)
    blocks = [0, 1, 2, 3, 4, 5, 6, 7]
    assert list(scatter(engine.layout, parts, blocks)) == [
        Status.BAD_TILE,
        Status.DONE,
        Status.BAD_ROOT,
        Status.BAD_BLOCK,
        Status.BAD_RECORD,
    ]
    expected = Engine.make(**SIZES, blocks=8)
    slow_move(expected, span, span.part(position=64), blocks, out=False)
    for mine, theirs in zip(engine.views, expected.views, strict=True):
        assert (mine[0][4:] == theirs[0][4:]).all()
        assert (mine[1][4:] == theirs[1][4:]).all()


@pytest.mark.parametrize("what", ["root", "sums"])
def test_sums_that_do_not_fold_to_the_root_write_nothing(what: str) -> None:
    engine, span, blocks = engine_and_span()
    before = engine.image()
    if what == "sums":
        # A tile that is not wanted, too: the sums were tampered with or are another span's.
        span.sums[5] += 1
    part = span.part(root=span.root ^ (what == "root"), layers=1)
    assert scatter(engine.layout, [part], blocks) == bytes([Status.BAD_ROOT])
    assert engine.image() == before


@pytest.mark.parametrize(
    "blocks",
    [[4, 0, 5], [4, 0, 5, 6], [4, 0, 5, -1], [4, 0, 5, 2**62], [4, -(2**63), 5, 2], []],
)
@pytest.mark.parametrize("call", [scatter, gather])
def test_a_block_that_is_not_there_moves_nothing(call, blocks: list[int]) -> None:
    engine, span, _ = engine_and_span()
    before = engine.image(), span.array.tobytes()
    assert call(engine.layout, [span.part()], blocks) == bytes([Status.BAD_BLOCK])
    assert (engine.image(), span.array.tobytes()) == before


@pytest.mark.parametrize("blocks", [[6, 0, 5, 2], [4, 6, 5, 2]])
@pytest.mark.parametrize("call", [scatter, gather])
def test_the_first_and_last_wanted_tokens_need_their_blocks(call, blocks: list[int]) -> None:
    engine, span, _ = engine_and_span()
    part = span.part(token_begin=15, token_end=17)
    assert call(engine.layout, [part], blocks) == bytes([Status.BAD_BLOCK])


def test_a_bad_block_outside_the_wanted_tokens_does_not_matter() -> None:
    engine, span, _ = engine_and_span()
    part = span.part(token_begin=16, token_end=48)
    assert scatter(engine.layout, [part], [99, 0, 5, -7]) == b"\0"


HUGE = st.sampled_from([0, 1, 2, 3, 63, 64, 65, 2**31, 2**32, 2**56, 2**63 - 1, 2**63, U64])
FREE = [
    "tokens",
    "token_begin",
    "token_end",
    "position",
    "src_heads",
    "src_head_begin",
    "dst_head_begin",
    "heads",
    "src_layers",
    "src_layer_begin",
    "dst_layer_begin",
    "layers",
    "root",
]


@settings(max_examples=500, deadline=None)
@given(
    changes=st.dictionaries(st.sampled_from(FREE), HUGE, min_size=1),
    blocks=st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(-1, 7), max_size=6),
)
def test_contradictory_records_stay_inside_what_was_named(
    changes: dict[str, int], blocks: list[int]
) -> None:
    engine, span, _ = engine_and_span()
    edge = 64
    for call in (scatter, gather):
        status = call(engine.layout, [span.part(**changes)], blocks)
        assert status[0] in list(Status)
        for buffer in engine.buffers:
            assert (buffer[:edge] == FILLER).all()
            assert (buffer[-edge:] == FILLER).all()


@pytest.mark.parametrize(
    "changes",
    [
        {"token_end": 65}, {"token_begin": 3, "token_end": 2}, {"heads": 5},
        {"src_head_begin": 1}, {"src_head_begin": U64, "heads": 2}, {"dst_head_begin": 1},
        {"layers": 4}, {"src_layer_begin": 1}, {"dst_layer_begin": U64, "layers": 1},
        {"length": 3 * 2 * 4 * 64 * 256 - 1}, {"tokens": 65}, {"src_heads": 5},
        {"src_layers": 2**62}, {"tokens": 2**63, "src_heads": 8},
    ],
)  # fmt: skip
@pytest.mark.parametrize("call", [scatter, gather])
def test_records_that_contradict_themselves(call, changes: dict[str, int]) -> None:
    engine, span, blocks = engine_and_span()
    before = engine.image()
    assert call(engine.layout, [span.part(**changes)], blocks) == bytes([Status.BAD_RECORD])
    assert engine.image() == before


@pytest.mark.parametrize("changes", [{"heads": 0}, {"layers": 0}, {"token_end": 0}])
def test_an_empty_part_is_done_and_reads_nothing(changes: dict[str, int]) -> None:
    engine, span, blocks = engine_and_span()
    part = span.part(address=0, sums_address=0, root=1, **changes)
    assert scatter(engine.layout, [part], blocks) == b"\0"
    assert gather(engine.layout, [part], blocks) == b"\0"


@settings(max_examples=200)
@given(st.binary(max_size=200))
def test_layouts_of_random_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="layout"):
        _host.scatter(data, b"", b"", bytearray())


@pytest.mark.parametrize(
    "changes",
    [
        {"num_blocks": 0}, {"heads": 0}, {"row_bytes": 0}, {"block_tokens": 0},
        {"num_blocks": 2**63}, {"block_stride": 2**62}, {"head_stride": U64}, {"row_bytes": U64},
        {"token_stride": 2**60},
    ],
)  # fmt: skip
def test_impossible_layouts_are_refused(changes: dict[str, int]) -> None:
    engine, span, blocks = engine_and_span()
    with pytest.raises(ValueError, match="layout"):
        scatter(replace(engine.layout, **changes), [span.part()], blocks)


def test_buffers_of_the_wrong_length_are_refused() -> None:
    engine, span, blocks = engine_and_span()
    layout, part = engine.layout.packed, span.part().pack()
    ids = array("q", blocks)
    for spans, blocks_, status, message in (
        (part[:-1], ids, bytearray(1), "spans"),
        (part, ids.tobytes()[:-1], bytearray(1), "blocks"),
        (part, ids, bytearray(0), "status"),
        (part, ids, bytearray(2), "status"),
    ):
        with pytest.raises(ValueError, match=message):
            _host.scatter(layout, spans, blocks_, status)
    with pytest.raises(ValueError, match="layout"):
        _host.scatter(layout + bytes(8), part, ids, bytearray(1))
    with pytest.raises((TypeError, BufferError)):
        _host.scatter(layout, part, ids, bytes(1))
    with pytest.raises(ValueError, match="K bases"):
        replace(engine.layout, k_base=(1,))


def test_a_request_of_many_parts_is_one_call() -> None:
    """4,096 tokens of 64 spans in shuffled blocks, each token where it belongs."""
    sizes = {**SIZES, "layers": 1, "heads": 1, "row": 64}
    engine = Engine.make(**sizes, blocks=300)
    blocks = list(range(300))
    random.Random(5).shuffle(blocks)
    spans = [Stored.make(i, 1, 1, 64, 64) for i in range(64)]
    parts = [span.part(position=64 * i) for i, span in enumerate(spans)]
    assert not any(scatter(engine.layout, parts, blocks[:256]))
    for i, span in enumerate(spans):
        for plane in (0, 1):
            pages = engine.views[0][plane][blocks[4 * i : 4 * i + 4], 0]
            assert (pages.reshape(64, 64) == span.array[0, plane, 0]).all()


def test_a_range_that_is_reused_while_it_is_copied_is_noticed() -> None:
    row = 64
    payload = np.arange(2 * row, dtype=np.uint8)
    sums = np.zeros(8, np.uint64)
    root = _host.tile_sums(payload.ctypes.data, payload.nbytes, sums.ctypes.data)
    page, other = np.zeros(row, np.uint8), np.zeros(row, np.uint8)
    part = SpanPart(
        address=payload.ctypes.data,
        sums_address=sums.ctypes.data,
        root=root,
        length=payload.nbytes,
        tokens=1,
        token_begin=0,
        token_end=1,
        position=0,
        src_heads=1,
        src_head_begin=0,
        dst_head_begin=0,
        heads=1,
        src_layers=1,
        src_layer_begin=0,
        dst_layer_begin=0,
        layers=1,
    )

    def read(v_page: int) -> bytes:
        layout = PagedLayout((page.ctypes.data,), (v_page,), row, row, row, 1, 1, 1, row)
        return scatter(layout, [part], [0])

    assert read(other.ctypes.data) == bytes([Status.DONE])
    # The copy itself changes the sums, as a worker would from another process.
    assert read(sums.ctypes.data) == bytes([Status.BAD_TILE])
