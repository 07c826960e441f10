"""Paged KV and stored spans for tests, with a slow reference of what moving them means."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.lib.stride_tricks import as_strided

from kmesh import _host
from kmesh.kernels.host import PagedLayout, SpanPart
from kmesh.layout import tiles

Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]


def numbers(seed: int, size: int) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


def summed(payload: Bytes) -> tuple[int, np.ndarray]:
    """(root, sums) by the native code."""
    sums = np.zeros(tiles(len(payload)), dtype=np.uint64)
    return _host.tile_sums(payload.ctypes.data, len(payload), sums.ctypes.data), sums


FILLER = 0xEE


@dataclass
class Engine:
    """Paged KV of an engine in a physical order, and numpy views of it.

    ``views[layer][plane]`` is [block, head, slot, byte].
    """

    buffers: list[Bytes]
    layout: PagedLayout
    views: list[list[np.ndarray]]

    @classmethod
    def make(
        cls, order: str, layers: int, blocks: int, heads: int, slots: int, row: int, gap: int
    ) -> Engine:
        cell = {"HND": 2 * row, "NHD": 2 * row, "planes": row}[order] + gap
        if order == "HND":
            token, head = cell, cell * slots
        else:
            token, head = cell * heads, cell
        block = cell * heads * slots + gap
        plane = blocks * block if order == "planes" else row
        size = blocks * block * (2 if order == "planes" else 1)
        margin = 64
        buffers, views, bases = [], [], []
        for _ in range(layers):
            buffer = np.full(size + 2 * margin, FILLER, dtype=np.uint8)
            buffers.append(buffer)
            shape, strides = (blocks, heads, slots, row), (block, head, token, 1)
            views.append([as_strided(buffer[margin + p * plane :], shape, strides) for p in (0, 1)])
            bases.append(buffer.ctypes.data + margin)
        layout = PagedLayout(
            k_base=tuple(bases),
            v_base=tuple(base + plane for base in bases),
            block_stride=block,
            head_stride=head,
            token_stride=token,
            block_tokens=slots,
            num_blocks=blocks,
            heads=heads,
            row_bytes=row,
        )
        return cls(buffers, layout, views)

    def image(self) -> bytes:
        return b"".join(buffer.tobytes() for buffer in self.buffers)


@dataclass
class Stored:
    """A span's payload with sums; ``array`` is [layer, plane, head, token, byte]."""

    array: np.ndarray
    sums: np.ndarray
    root: int

    @classmethod
    def make(cls, seed: int, layers: int, heads: int, tokens: int, row: int) -> Stored:
        payload = numbers(seed, layers * 2 * heads * tokens * row)
        root, sums = summed(payload)
        return cls(payload.reshape(layers, 2, heads, tokens, row), sums, root)

    def part(self, **changes: int) -> SpanPart:
        layers, _, heads, tokens, _ = self.array.shape
        part = SpanPart(
            address=self.array.ctypes.data,
            sums_address=self.sums.ctypes.data,
            root=self.root,
            length=self.array.nbytes,
            tokens=tokens,
            token_begin=0,
            token_end=tokens,
            position=0,
            src_heads=heads,
            src_head_begin=0,
            dst_head_begin=0,
            heads=heads,
            src_layers=layers,
            src_layer_begin=0,
            dst_layer_begin=0,
            layers=layers,
        )
        return replace(part, **changes)


def slow_move(engine: Engine, stored: Stored, part: SpanPart, blocks: list[int], out: bool) -> None:
    slots = engine.layout.block_tokens
    for layer in range(part.layers):
        for plane in (0, 1):
            for head in range(part.heads):
                for token in range(part.token_begin, part.token_end):
                    at = part.position + token
                    payload = stored.array[
                        part.src_layer_begin + layer, plane, part.src_head_begin + head, token
                    ]
                    page = engine.views[part.dst_layer_begin + layer][plane][
                        blocks[at // slots], part.dst_head_begin + head, at % slots
                    ]
                    if out:
                        payload[:] = page
                    else:
                        page[:] = payload
