"""The native part of KMesh for host memory (C, ``_host.c``); every call releases the GIL.

Addresses are integers; their owner must keep the memory alive during the call.
"""

from collections.abc import Buffer

TILE_BYTES: int

def address(buffer: Buffer, /) -> int:
    """Address of a contiguous buffer's first byte (read-only buffers too)."""

def tile_sums(src: int, length: int, sums: int, /) -> int:
    """Writes the sums of ceil(length / TILE_BYTES) tiles at ``sums``; returns their fold (root)."""

def copy_with_sums(dst: int, src: int, length: int, sums: int, /) -> int:
    """memcpy and ``tile_sums`` of what was *written to dst*, in one pass; returns the root."""

def fold(sums: int, tiles: int, /) -> int:
    """The root of stored tile sums."""

def verify(src: int, length: int, sums: int, root: int, /) -> bool:
    """Whether the tile sums at ``sums`` fold to ``root`` and the payload has those sums."""

def scatter(layout: Buffer, spans: Buffer, blocks: Buffer, status: Buffer, /) -> int:
    """Restores spans into paged KV, verifying each tile that is read.

    layout: a packed ``kmesh.kernels.host.PagedLayout``. spans: packed records of 'ranges to
    restore'. blocks: int64 block ids of the request. status: one byte for each record, written:
    0 done, 1 sums do not fold to the root, 2 a tile's sum differs, 3 a block id is out of range.
    Returns the number of records whose status is not 0.
    """

def gather(layout: Buffer, spans: Buffer, blocks: Buffer, status: Buffer, /) -> int:
    """Copies paged KV into payloads (the inverse of scatter, no sums)."""

def index_probe(index: int, keys: Buffer, mixes: Buffer, slots: Buffer, prefix: bool, /) -> int:
    """Looks up keys (32 bytes each) × shard mixes (u64 each) in an index; see kmesh.index.

    Writes slot + 1, or 0 for a miss, as u32 for each pair. With ``prefix``, stops at the first
    key of which a shard is missing and returns the number of leading keys found; without, the
    number of keys of which all shards were found.
    """

def index_insert(index: int, tag: int, slot: int, /) -> bool:
    """Writer only. False when no place was found within the probe limit."""

def index_remove(index: int, tag: int, slot: int, /) -> bool:
    """Writer only. False when the entry is not there."""
