"""Host kernels against what they could be replaced by, in one thread each.

copy_with_sums and verify against numpy's copyto (memcpy); scatter (which verifies) and gather
against torch's index_copy_ and index_select of the same bytes, whole blocks at a time; and pages in
which keys are transposed, as in blocks of vLLM's CPU backend, against pages of rows.
"""

from __future__ import annotations

import mmap
import random
from collections.abc import Iterator

import numpy as np
import torch

from benchmarks.results import Row
from benchmarks.timing import in_turn
from kmesh import _host
from kmesh.kernels.host import PagedLayout, PlaneOrder, SpanPart, gather, scatter
from kmesh.layout import SPAN_TOKENS, SpanGeometry, tiles

#: Of a 7B model with grouped heads, in 16 bits: 56 KiB a token.
LAYERS, HEADS, HEAD_DIM, ELEMENT = 28, 4, 128, 2
TOKENS = 4096
#: torch copies wide elements faster than bytes.
PEER_DTYPE = torch.int64


def aligned(size: int) -> np.ndarray:
    """Zeroed bytes that begin on a page, as slabs, staging and KV pages do."""
    return np.frombuffer(mmap.mmap(-1, size), dtype=np.uint8)


class Paged:
    """Spans in a slab, and pages of an engine.

    K and V of a token lie together, heads before tokens ("HND") or behind them ("NHD"); or each
    head's part of a block is K, transposed, and V behind it ("CPU").
    """

    def __init__(self, tokens: int, order: str, block_tokens: int) -> None:
        geometry = SpanGeometry(LAYERS, HEADS, HEAD_DIM, ELEMENT)
        length = geometry.payload_bytes(SPAN_TOKENS)
        row = geometry.row_bytes
        spans = tokens // SPAN_TOKENS
        self.size = spans * length
        self.slab = aligned(self.size)
        self.slab[:] = np.random.default_rng(1).integers(0, 256, self.size, dtype=np.uint8)
        self.sums = np.zeros((spans, tiles(length)), dtype=np.uint64)
        count = tokens // block_tokens
        blocks = list(range(count * 3 // 2))
        random.Random(2).shuffle(blocks)
        self.blocks = blocks[:count]
        block_bytes = HEADS * block_tokens * 2 * row
        self.pages = [
            torch.from_numpy(aligned(len(blocks) * block_bytes))
            .view(PEER_DTYPE)
            .view(len(blocks), -1)
            for _ in range(LAYERS)
        ]
        bases = tuple(page.data_ptr() for page in self.pages)
        transposed = order == "CPU"
        cell = row if transposed else 2 * row
        self.layout = PagedLayout(
            k_base=bases,
            v_base=tuple(base + row * (block_tokens if transposed else 1) for base in bases),
            block_stride=block_bytes,
            head_stride=2 * row * (1 if order == "NHD" else block_tokens),
            token_stride=cell * (HEADS if order == "NHD" else 1),
            block_tokens=block_tokens,
            num_blocks=len(blocks),
            heads=HEADS,
            row_bytes=row,
            k_order=PlaneOrder(ELEMENT, block_tokens, 0, HEAD_DIM, 0, block_tokens * ELEMENT)
            if transposed
            else None,
        )
        self.parts = []
        for i in range(spans):
            address = self.slab.ctypes.data + i * length
            sums = self.sums[i].ctypes.data
            self.parts.append(
                SpanPart(
                    address=address,
                    sums_address=sums,
                    root=_host.tile_sums(address, length, sums),
                    length=length,
                    tokens=SPAN_TOKENS,
                    token_begin=0,
                    token_end=SPAN_TOKENS,
                    position=i * SPAN_TOKENS,
                    src_heads=HEADS,
                    src_head_begin=0,
                    dst_head_begin=0,
                    heads=HEADS,
                    src_layers=LAYERS,
                    src_layer_begin=0,
                    dst_layer_begin=0,
                    layers=LAYERS,
                )
            )
        self.length = length
        self.index = torch.tensor(self.blocks)
        self.dense = torch.from_numpy(self.slab).view(PEER_DTYPE).view(LAYERS, count, -1)

    def scatter(self) -> None:
        if any(scatter(self.layout, self.parts, self.blocks)):
            raise RuntimeError("scatter failed")

    def gather(self) -> None:
        if any(gather(self.layout, self.parts, self.blocks)):
            raise RuntimeError("gather failed")

    def index_copy(self) -> None:
        for page, source in zip(self.pages, self.dense, strict=True):
            page.index_copy_(0, self.index, source)

    def index_select(self) -> None:
        for page, target in zip(self.pages, self.dense, strict=True):
            torch.index_select(page, 0, self.index, out=target)


def run(quick: bool) -> Iterator[Row]:
    """Rows of this file."""
    torch.set_num_threads(1)
    rounds = 5 if quick else 25
    for order, block_tokens in (("HND", 32), ("NHD", 16)):
        yield from paged_rows(order, block_tokens, rounds)
    yield from transposed_rows(32, rounds)
    yield from sum_rows(rounds)


def paged_rows(order: str, block_tokens: int, rounds: int) -> Iterator[Row]:
    """Scatter and gather, with pages in one physical layout."""
    paged = Paged(TOKENS, order, block_tokens)
    flat = aligned(paged.size)
    taken = in_turn(
        {
            "scatter": paged.scatter,
            "index_copy": paged.index_copy,
            "copy": lambda: np.copyto(flat, paged.slab),
        },
        rounds,
    )
    # These write the slab, whose sums do not hold any more then.
    taken |= in_turn({"gather": paged.gather, "index_select": paged.index_select}, rounds)
    name = order.lower()
    rate = paged.size / sorted(taken["scatter"])[rounds // 2] / 1e9
    size = f"{paged.size / 1e6:.0f} MB"
    what = f"{size} into {order} blocks of {block_tokens}, verified; {rate:.1f} GB/s"
    for row, ours, peer, note in (
        (f"restore_{name}", "scatter", "index_copy", what),
        (f"restore_{name}_vs_copy", "scatter", "copy", "the same, against one contiguous copy"),
        (f"gather_{name}", "gather", "index_select", "out of pages, for a store"),
    ):
        # Times of the peer over ours: rates of ours over the peer's.
        samples = {peer: taken[peer], ours: taken[ours]}
        yield Row(row, "ratio", "median of a/b", samples, note)


def transposed_rows(block_tokens: int, rounds: int) -> Iterator[Row]:
    """Pages with transposed keys against pages of rows, by the same code."""
    rows, transposed = (Paged(TOKENS, order, block_tokens) for order in ("HND", "CPU"))
    for name, ways in (
        ("restore", {"rows": rows.scatter, "transposed": transposed.scatter}),
        ("gather", {"rows": rows.gather, "transposed": transposed.gather}),
    ):
        taken = in_turn(ways, rounds)
        rate = rows.size / sorted(taken["transposed"])[rounds // 2] / 1e9
        note = (
            f"{rows.size / 1e6:.0f} MB, 16-bit elements, blocks of {block_tokens}; {rate:.1f} GB/s"
        )
        yield Row(f"{name}_transposed", "ratio", "median of a/b", taken, note)


def sum_rows(rounds: int) -> Iterator[Row]:
    """What sums cost where bytes are copied or only read."""
    size = 128 << 20
    source, target = aligned(size), aligned(size)
    source[:] = np.random.default_rng(1).integers(0, 256, size, dtype=np.uint8)
    sums = np.zeros(tiles(size), dtype=np.uint64)
    root = _host.tile_sums(source.ctypes.data, size, sums.ctypes.data)

    def copy() -> None:
        _host.copy_with_sums(target.ctypes.data, source.ctypes.data, size, sums.ctypes.data)

    def verify() -> None:
        if not _host.verify(source.ctypes.data, size, sums.ctypes.data, root):
            raise RuntimeError("verify failed")

    taken = in_turn(
        {"copyto": lambda: np.copyto(target, source), "copy": copy, "verify": verify}, rounds
    )
    for row, ours, note in (
        ("copy_with_sums", "copy", f"{size >> 20} MiB, memcpy's time over ours"),
        ("verify", "verify", f"{size >> 20} MiB only read, against memcpy"),
    ):
        samples = {"copyto": taken["copyto"], ours: taken[ours]}
        yield Row(row, "ratio", "median of a/b", samples, note)
