"""Pages in which a token's row is not contiguous: payloads have the documented order still."""

from __future__ import annotations

from dataclasses import astuple, dataclass, replace
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_reference import FILLER, Bytes, Stored, numbers

from kmesh.errors import UnsupportedError
from kmesh.kernels import plan, reference
from kmesh.kernels.host import PagedLayout, PlaneOrder, SpanPart, Status, gather, scatter
from kmesh.layout import TILE_BYTES

MARGIN = 64


def bytes_of(order: PlaneOrder | None, slots: int, row: int) -> np.ndarray:
    """[slot, byte]: where each byte of a head's rows lies in a block, as ``PlaneOrder`` says."""
    if order is None:
        return np.arange(slots)[:, None] * row + np.arange(row)
    slot, byte = np.arange(slots)[:, None], np.arange(row)
    atom, rest = byte // order.atom_bytes, byte % order.atom_bytes
    return (
        slot // order.tile_tokens * order.tile_stride
        + slot % order.tile_tokens * order.atom_bytes
        + atom // order.group_atoms * order.group_stride
        + atom % order.group_atoms * order.atom_stride
        + rest
    )


@dataclass
class Ordered:
    """Pages of some layers, and where their bytes are: ``places[plane]`` is [slot, byte]."""

    buffers: list[Bytes]
    places: tuple[np.ndarray, np.ndarray]
    layout: PagedLayout

    @classmethod
    def make(
        cls,
        orders: tuple[PlaneOrder | None, PlaneOrder | None],
        *,
        layers: int,
        blocks: int,
        heads: int,
        slots: int,
        row: int,
        gap: int = 0,
    ) -> Ordered:
        places = [bytes_of(order, slots, row) for order in orders]
        plane = int(places[0].max()) + 1 + gap
        head = plane + int(places[1].max()) + 1 + gap
        size = 2 * MARGIN + blocks * heads * head
        buffers = [np.full(size, FILLER, dtype=np.uint8) for _ in range(layers)]
        bases = tuple(buffer.ctypes.data + MARGIN for buffer in buffers)
        layout = PagedLayout(
            k_base=bases,
            v_base=tuple(base + plane for base in bases),
            block_stride=head * heads,
            head_stride=head,
            token_stride=row,
            block_tokens=slots,
            num_blocks=blocks,
            heads=heads,
            row_bytes=row,
            k_order=orders[0],
            v_order=orders[1],
        )
        return cls(buffers, (places[0] + MARGIN, places[1] + MARGIN + plane), layout)

    def row(self, layer: int, plane: int, block: int, head: int, slot: int) -> np.ndarray:
        """Where a token's bytes lie in the layer's buffer."""
        base = block * self.layout.block_stride + head * self.layout.head_stride
        found: np.ndarray = self.places[plane][slot] + base
        return found

    def image(self) -> bytes:
        return b"".join(buffer.tobytes() for buffer in self.buffers)


def slow_move(pages: Ordered, stored: Stored, part: SpanPart, blocks: list[int], out: bool) -> None:
    slots = pages.layout.block_tokens
    for layer in range(part.layers):
        buffer = pages.buffers[part.dst_layer_begin + layer]
        for plane in (0, 1):
            for head in range(part.heads):
                for token in range(part.token_begin, part.token_end):
                    at = part.position + token
                    payload = stored.array[
                        part.src_layer_begin + layer, plane, part.src_head_begin + head, token
                    ]
                    places = pages.row(
                        part.dst_layer_begin + layer,
                        plane,
                        blocks[at // slots],
                        part.dst_head_begin + head,
                        at % slots,
                    )
                    if out:
                        payload[:] = buffer[places]
                    else:
                        buffer[places] = payload


def nested(
    atom: int, tile: int, tiles: int, group: int, groups: int, outer: tuple[str, ...], gap: int
) -> PlaneOrder:
    """An order whose loops are nested like that, from the outermost to the innermost."""
    counts = {"tile": tiles, "group": groups, "atom": group}
    strides, step = {}, tile * atom + gap
    for name in reversed(outer):
        strides[name] = step
        step *= counts[name]
    return PlaneOrder(atom, tile, strides["tile"], group, strides["group"], strides["atom"])


@st.composite
def orders(draw: st.DrawFn, slots: int, row: int) -> PlaneOrder | None:
    """Rows, or any order that has room for all of a head's bytes."""
    if draw(st.integers(0, 3)) == 0:
        return None
    atom = draw(st.sampled_from([a for a in (2, 4) if row % a == 0]))
    tile = draw(st.sampled_from([t for t in (1, 2, 3, 16, slots) if slots % t == 0]))
    atoms = row // atom
    group = draw(st.sampled_from([g for g in (1, 5, 16, atoms) if atoms % g == 0]))
    outer = draw(st.sampled_from(list(permutations(("tile", "group", "atom")))))
    gap = draw(st.sampled_from([0, 0, 2]))
    return nested(atom, tile, slots // tile, group, atoms // group, outer, gap)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_payloads_have_the_documented_order(data: st.DataObject) -> None:
    draw = data.draw
    row = draw(st.sampled_from([2, 4, 32, 80, 160, 256, 640]))
    slots = draw(st.sampled_from([1, 6, 16, 32, 48]))
    both = (draw(orders(slots, row)), draw(orders(slots, row)))
    layers, heads = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    tokens, position = draw(st.sampled_from([1, 16, 48, 64])), draw(st.integers(0, 70))
    begin = draw(st.integers(0, tokens - 1))
    needed = -(-(position + tokens) // slots)
    ids = draw(st.permutations(range(needed + 2)))
    sizes = {"layers": layers, "blocks": len(ids), "heads": heads, "slots": slots, "row": row}
    gap = draw(st.sampled_from([0, 0, 64]))
    pages, expected = (Ordered.make(both, **sizes, gap=gap) for _ in range(2))
    span = Stored.make(draw(st.integers(0, 1000)), layers, heads, tokens, row)
    part = span.part(
        token_begin=begin, token_end=draw(st.integers(begin + 1, tokens)), position=position
    )

    assert scatter(pages.layout, [part], ids) == b"\0"
    slow_move(expected, span, part, ids, out=False)
    assert pages.image() == expected.image()

    target, wanted = (Stored(np.full_like(span.array, FILLER), span.sums, 0) for _ in range(2))
    back = replace(part, address=target.array.ctypes.data)
    assert gather(pages.layout, [back], ids) == b"\0"
    slow_move(pages, wanted, back, ids, out=True)
    assert (target.array == wanted.array).all()
    assert pages.image() == expected.image()


#: As vLLM's CPU kernels have them, in bfloat16: of a head size of 128 and blocks of 32 or 512.
VECTOR = PlaneOrder(2, 32, 0, 128, 0, 64)
LONG = PlaneOrder(2, 512, 0, 128, 0, 1024)
TILE_K = PlaneOrder(4, 16, 16 * 256, 64, 0, 64)
TILE_V = PlaneOrder(2, 2, 64, 16, 16 * 32 * 2, 4)


@pytest.mark.parametrize(
    ("both", "slots"), [((VECTOR, None), 32), ((TILE_K, TILE_V), 32), ((LONG, None), 512)]
)
@pytest.mark.parametrize("gap", [0, 2])
def test_orders_of_known_kernels(
    both: tuple[PlaneOrder | None, PlaneOrder | None], slots: int, gap: int
) -> None:
    """Whole blocks, beside lines that are whole and those that are not."""
    blocks = [2, 0, 3, 1] if slots == 32 else [1]
    sizes = {"layers": 2, "blocks": 4, "heads": 2, "slots": slots, "row": 256}
    pages, expected = (Ordered.make(both, **sizes, gap=gap) for _ in range(2))
    span = Stored.make(5, 2, 2, 512 if slots == 512 else 128, 256)
    assert scatter(pages.layout, [span.part()], blocks) == b"\0"
    slow_move(expected, span, span.part(), blocks, out=False)
    assert pages.image() == expected.image()
    back = Stored(np.zeros_like(span.array), span.sums, 0)
    assert gather(pages.layout, [back.part()], blocks) == b"\0"
    assert (back.array == span.array).all()


def test_no_byte_of_a_corrupt_tile_reaches_ordered_pages() -> None:
    pages = Ordered.make((VECTOR, None), layers=2, blocks=4, heads=2, slots=32, row=256)
    span = Stored.make(9, 2, 2, 128, 256)
    flat = span.array.reshape(-1)
    flat[TILE_BYTES + 17] ^= 4
    assert scatter(pages.layout, [span.part()], [0, 1, 2, 3]) == bytes([Status.BAD_TILE])
    # K and V of the first layer are a tile each.
    assert all((pages.buffers[1] == FILLER).tolist())
    values = pages.buffers[0][pages.row(0, 1, 0, 0, 0)]
    assert (values == FILLER).all()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"atom_bytes": 8}, "atoms"),
        ({"atom_bytes": 1}, "atoms"),
        ({"tile_tokens": 0}, "tiles"),
        ({"tile_tokens": 5}, "tiles"),
        ({"group_atoms": 0}, "groups"),
        ({"group_atoms": 3}, "groups"),
        ({"tile_tokens": 16, "tile_stride": 2**63}, "too large"),
        ({"group_atoms": 2, "group_stride": 2**60}, "too large"),
        ({"atom_stride": 2**62}, "too large"),
    ],
)
@pytest.mark.parametrize("plane", ["k_order", "v_order"])
def test_orders_that_contradict_the_layout(
    changes: dict[str, int], reason: str, plane: str
) -> None:
    pages = Ordered.make((VECTOR, VECTOR), layers=1, blocks=1, heads=1, slots=32, row=256)
    layout = replace(pages.layout, **{plane: replace(VECTOR, **changes)})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=reason):
        scatter(layout, [Stored.make(1, 1, 1, 32, 256).part()], [0])
    assert (pages.buffers[0] == FILLER).all()


def test_kernels_of_gpus_and_their_reference_refuse_them() -> None:
    pages = Ordered.make((VECTOR, None), layers=1, blocks=1, heads=1, slots=32, row=256)
    span = Stored(numbers(1, 2 * 32 * 256).reshape(1, 2, 1, 32, 256), np.zeros(1, np.uint64), 0)
    ids = np.zeros(1, dtype=np.int64)
    load = plan.Load.of([span.part()], [plan.Request(ids)])
    with pytest.raises(UnsupportedError, match="contiguous"):
        plan.write(pages.layout, [load])
    with pytest.raises(UnsupportedError, match="contiguous"):
        reference.store(pages.layout, load.records, load.requests[0])


def test_an_order_is_packed_as_it_is_written() -> None:
    pages = Ordered.make((TILE_K, None), layers=1, blocks=1, heads=1, slots=32, row=256)
    words = np.frombuffer(pages.layout.packed, dtype="<u8")
    assert tuple(words[8:14]) == astuple(TILE_K)
    assert not words[14:20].any()
