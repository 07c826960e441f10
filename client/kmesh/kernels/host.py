"""Spans to and from paged KV in host memory, in one native call for a whole request."""

from __future__ import annotations

import enum
import struct
from array import array
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from kmesh import _host

if TYPE_CHECKING:
    from typing_extensions import Buffer

_LAYOUT = struct.Struct("<8Q")
_ORDER = struct.Struct("<6Q")
_PART = struct.Struct("<16Q")


class Status(enum.IntEnum):
    """What became of one part. After ``BAD_TILE`` some of its pages may be written."""

    DONE = 0
    BAD_ROOT = 1
    BAD_TILE = 2
    BAD_BLOCK = 3
    BAD_RECORD = 4


@dataclass(frozen=True, slots=True)
class PlaneOrder:
    """Where K (or V) of one head lies in a block in which tokens are not rows. Strides are bytes.

    A block is cut into tiles of tokens, a token's row into atoms, and those into groups. The same
    atoms of the tokens of a tile are neighbours: atom a of token t, counted in the block, is at

        t // tile_tokens * tile_stride + t % tile_tokens * atom_bytes
        + a // group_atoms * group_stride + a % group_atoms * atom_stride

    Attributes:
        atom_bytes: 2 or 4; a row is some.
        tile_tokens: a block is some tiles.
        group_atoms: a row is some groups.
    """

    atom_bytes: int
    tile_tokens: int
    tile_stride: int
    group_atoms: int
    group_stride: int
    atom_stride: int


#: Tokens are rows.
_ROWS = PlaneOrder(0, 0, 0, 0, 0, 0)


@dataclass(frozen=True)
class PagedLayout:
    """Where an engine's KV pages lie. All sizes and strides are bytes.

    Attributes:
        k_base, v_base: for each layer, the address of K (V) of block 0, head 0, token 0.
        block_stride, head_stride, token_stride: all layers alike.
        block_tokens: tokens of a block.
        num_blocks: of each layer.
        heads: KV heads of this rank.
        row_bytes: one token of one head, K or V; contiguous, unless there is an order.
        k_order, v_order: None: the tokens of a block are ``token_stride`` apart. Only pages in host
            memory may have an order.
    """

    k_base: tuple[int, ...]
    v_base: tuple[int, ...]
    block_stride: int
    head_stride: int
    token_stride: int
    block_tokens: int
    num_blocks: int
    heads: int
    row_bytes: int
    k_order: PlaneOrder | None = None
    v_order: PlaneOrder | None = None

    def __post_init__(self) -> None:
        if len(self.k_base) != len(self.v_base):
            raise ValueError(f"{len(self.k_base)} K bases, {len(self.v_base)} V bases")

    @cached_property
    def packed(self) -> bytes:
        """As ``_host`` reads it."""
        head = _LAYOUT.pack(
            len(self.k_base),
            self.heads,
            self.row_bytes,
            self.block_tokens,
            self.num_blocks,
            self.block_stride,
            self.head_stride,
            self.token_stride,
        )
        orders = (_ORDER.pack(*astuple(o or _ROWS)) for o in (self.k_order, self.v_order))
        return head + b"".join(orders) + array("Q", self.k_base + self.v_base).tobytes()


@dataclass(slots=True)
class SpanPart:
    """A part of one span's payload: a range of its tokens, heads and layers.

    Attributes:
        address: of the payload's first byte.
        sums_address: of its first tile sum (scatter only).
        root: that its tile sums must fold to (scatter only).
        length: bytes of the whole payload.
        tokens: that the payload holds.
        token_begin, token_end: those to move, counted in the span.
        position: of the span's token 0 in the request. Token t belongs to
            ``blocks[(position + t) // block_tokens]``, slot ``(position + t) % block_tokens``.
        src_heads, src_layers: that the payload holds.
        src_head_begin, src_layer_begin: where the part begins in the payload.
        dst_head_begin, dst_layer_begin: where it begins in the engine's pages.
        heads, layers: how many of each to move.
    """

    address: int
    sums_address: int
    root: int
    length: int
    tokens: int
    token_begin: int
    token_end: int
    position: int
    src_heads: int
    src_head_begin: int
    dst_head_begin: int
    heads: int
    src_layers: int
    src_layer_begin: int
    dst_layer_begin: int
    layers: int

    def pack(self) -> bytes:
        """As ``_host`` reads it; struct.error when a field is negative or too large."""
        return _PART.pack(
            self.address,
            self.sums_address,
            self.root,
            self.length,
            self.tokens,
            self.token_begin,
            self.token_end,
            self.position,
            self.src_heads,
            self.src_head_begin,
            self.dst_head_begin,
            self.heads,
            self.src_layers,
            self.src_layer_begin,
            self.dst_layer_begin,
            self.layers,
        )


def scatter(layout: PagedLayout, parts: Sequence[SpanPart], blocks: Sequence[int]) -> bytes:
    """Restores parts of spans into the pages ``blocks`` of a request.

    Every tile that holds a wanted byte is verified before a byte of it is copied.

    Returns:
        A ``Status`` for each part, one byte each.
    """
    return scatter_packed(layout, b"".join([part.pack() for part in parts]), array("q", blocks))


def gather(layout: PagedLayout, parts: Sequence[SpanPart], blocks: Sequence[int]) -> bytes:
    """Copies pages of a request into payloads: the inverse of ``scatter``, without sums.

    Returns:
        A ``Status`` for each part, one byte each.
    """
    return gather_packed(layout, b"".join([part.pack() for part in parts]), array("q", blocks))


def scatter_packed(layout: PagedLayout, records: bytes, blocks: Buffer) -> bytes:
    """As ``scatter``, of parts that are packed one behind the other, and int64 block ids."""
    status = bytearray(len(records) // _PART.size)
    _host.scatter(layout.packed, records, blocks, status)
    return bytes(status)


def gather_packed(layout: PagedLayout, records: bytes, blocks: Buffer) -> bytes:
    """As ``gather``, of parts that are packed one behind the other, and int64 block ids."""
    status = bytearray(len(records) // _PART.size)
    _host.gather(layout.packed, records, blocks, status)
    return bytes(status)


def part_reads(records: Buffer, row_bytes: int) -> array[int]:
    """Bytes that a restore of each packed part reads of its payload: each tile that holds a wanted
    byte, whole, since it is verified; 0 of a part that contradicts itself."""
    reads = array("Q", bytes(8 * (len(memoryview(records).cast("B")) // _PART.size)))
    _host.part_reads(records, row_bytes, reads)
    return reads
