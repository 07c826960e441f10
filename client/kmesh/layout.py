"""How a span's bytes lie, and how they are summed. See ``docs/layout.md``.

The payload of a span of T tokens, for one shard, is one dense array

    [layer][plane][head][token][dim]      plane 0 = K, plane 1 = V

so every (layer, plane) is one run of bytes, and the heads of a tensor-parallel
rank are contiguous inside it.

A slab is cut into tiles of 64 KiB. Spans start on a tile. The tile sums of all
spans of a slab lie behind its payload area, one u64 for each tile of the slab.
"""

from __future__ import annotations

from dataclasses import dataclass

LAYOUT_VERSION = 1
PROTOCOL_VERSION = 1

TILE_BYTES = 64 * 1024
PAGE_BYTES = 4096
SPAN_TOKENS = 64
SUB_TOKENS = 16
#: Payloads begin at multiples of this many bytes in a session's staging.
STAGING_ALIGN = 64

#: Bytes of one KV element, by the name that the namespace uses.
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of a model that a span holds: half-open ranges of layers and KV heads."""

    layer_begin: int
    layer_end: int
    head_begin: int
    head_end: int

    def __post_init__(self) -> None:
        if not (0 <= self.layer_begin < self.layer_end <= 0xFFFF):
            raise ValueError(f"layer range {self.layer_begin}:{self.layer_end} is not one")
        if not (0 <= self.head_begin < self.head_end <= 0xFFFF):
            raise ValueError(f"head range {self.head_begin}:{self.head_end} is not one")

    @property
    def layers(self) -> int:
        return self.layer_end - self.layer_begin

    @property
    def heads(self) -> int:
        return self.head_end - self.head_begin

    def code(self) -> int:
        """The shard as one u64, as catalog and index store it."""
        return self.layer_begin | self.layer_end << 16 | self.head_begin << 32 | self.head_end << 48

    @classmethod
    def from_code(cls, code: int) -> Shard:
        """Inverse of ``code``; ValueError if the ranges are empty."""
        return cls(code & 0xFFFF, code >> 16 & 0xFFFF, code >> 32 & 0xFFFF, code >> 48 & 0xFFFF)


@dataclass(frozen=True, slots=True)
class SpanGeometry:
    """Sizes of the payload of one shard.

    Attributes:
        layers, heads: of the shard.
        head_dim: elements of one head's K (and of its V).
        element_bytes: bytes of one element.
    """

    layers: int
    heads: int
    head_dim: int
    element_bytes: int

    @property
    def row_bytes(self) -> int:
        """One token of one head, K or V."""
        return self.head_dim * self.element_bytes

    @property
    def token_bytes(self) -> int:
        """One token, all of the shard."""
        return self.layers * 2 * self.heads * self.row_bytes

    def payload_bytes(self, tokens: int) -> int:
        """Bytes of a span of that many tokens."""
        return tokens * self.token_bytes


def tiles(length: int) -> int:
    """Tiles that a payload of ``length`` bytes takes."""
    return -(-length // TILE_BYTES)


def whole_pages(size: int) -> int:
    """``size`` bytes rounded up to pages of ``PAGE_BYTES``."""
    return -(-size // PAGE_BYTES) * PAGE_BYTES


def sums_bytes(slab_size: int) -> int:
    """Bytes of the sums area at the end of a slab, in whole pages."""
    return whole_pages(slab_size // TILE_BYTES * 8)


def slab_capacity(slab_size: int) -> int:
    """Bytes for payloads in a slab: whole tiles before the sums area."""
    return (slab_size - sums_bytes(slab_size)) // TILE_BYTES * TILE_BYTES


def sums_offset(slab_size: int) -> int:
    """Where the sums area starts: the slab's last pages."""
    return slab_size - sums_bytes(slab_size)
