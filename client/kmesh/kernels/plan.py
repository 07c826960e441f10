"""What one launch does, written down for the kernels: see ``docs/kernels.md``.

A job is one block of bytes that is uploaded as it is. Nothing here knows a GPU: the tests run
jobs on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from kmesh import _host
from kmesh.errors import UnsupportedError
from kmesh.kernels.host import PagedLayout, SpanPart, Status
from kmesh.kernels.rotary import ELEMENTS, Rotary, turns
from kmesh.layout import TILE_BYTES

Bytes = npt.NDArray[np.uint8]

STAGE_BYTES = 16384
#: Requests that one read of a payload can serve; more are served by reading it again.
SHARED_BY = 32
#: Rows of a payload, tokens of a request and page ids are below this.
LIMIT = 2**31

_NONE = 2**32 - 1
_DIVISOR = np.dtype([("value", "<u4"), ("factor", "<u4"), ("shift", "<u4")])
_FIELDS = (
    "address", "sums_address", "root", "length", "tokens", "token_begin", "token_end", "position",
    "src_heads", "src_head_begin", "dst_head_begin", "heads",
    "src_layers", "src_layer_begin", "dst_layer_begin", "layers",
)  # fmt: skip
#: A ``SpanPart`` as it is packed.
RECORD = np.dtype([(name, "<u8") for name in _FIELDS])
_PART = np.dtype(
    [
        ("record", RECORD), ("item_begin", "<u4"), ("first_item", "<u4"), ("tile_begin", "<u4"),
        ("first_tile", "<u4"), ("end_tile", "<u4"), ("request_begin", "<u4"), ("requests", "<u4"),
        ("dense", "<u4"), ("by_tokens", _DIVISOR), ("by_heads", _DIVISOR), ("spare", "<u4", 2),
    ]
)  # fmt: skip
_REQUEST = np.dtype(
    [("pages", "<u8"), ("shift", "<u4"), ("by_slot", "<u4"), ("turns", "<u4"), ("spare", "<u4")]
)
_OFFSETS = ("bases", "parts", "requests", "turns", "expected", "sums", "folded", "counters")
_JOB = np.dtype(
    [(name, "<u8") for name in ("block_stride", "head_stride", "token_stride", *_OFFSETS)]
    + [(name, "<u4") for name in ("layers", "row_bytes", "item_rows", "item_bytes")]
    + [(name, "<u4") for name in ("parts_count", "items_count", "tiles_count", "stages")]
    + [("by_vectors", _DIVISOR), ("by_block", _DIVISOR)]  # type: ignore[list-item]
    + [(name, "<u4") for name in ("rotary_dim", "interleaved", "element", "spare")]
)


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """Pages of one request, by block or by slot.

    Attributes:
        pages: int64 ids. By block: of the block of each ``block_tokens`` positions. By slot: of
            the slot of each position, block · block_tokens + slot in it. Ids of positions that no
            part wants may be anything.
        by_slot: which of the two.
        shift: added to every part's position, in tokens.
        delta: positions by which keys are turned further; needs a rotation.
    """

    pages: npt.NDArray[np.int64]
    by_slot: bool = False
    shift: int = 0
    delta: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Load:
    """Parts of spans, each read once, for all of some requests.

    Attributes:
        records: packed ``SpanPart``s, as an array of ``RECORD``.
        requests: that get them all.
    """

    records: npt.NDArray[np.void]
    requests: Sequence[Request]

    @classmethod
    def of(cls, parts: Sequence[SpanPart], requests: Sequence[Request]) -> Load:
        """From parts one by one."""
        return cls(pack(parts), requests)


def pack(parts: Sequence[SpanPart]) -> npt.NDArray[np.void]:
    """Parts as an array of ``RECORD``."""
    return np.frombuffer(b"".join([part.pack() for part in parts]), dtype=RECORD)


def merged(loads: Sequence[Load]) -> list[Load]:
    """The same loads, those with equal parts as one: what one step restores for siblings."""
    found: dict[bytes, list[Load]] = {}
    for load in loads:
        found.setdefault(load.records.tobytes(), []).append(load)
    return [
        same[0] if len(same) == 1 else Load(same[0].records, [r for x in same for r in x.requests])
        for same in found.values()
    ]


def check(
    layout: PagedLayout, records: npt.NDArray[np.void], request: Request
) -> npt.NDArray[np.uint8]:
    """``Status`` of each part before anything is read: DONE, BAD_BLOCK or BAD_RECORD."""
    if request.by_slot:
        layout = replace(
            layout,
            num_blocks=layout.num_blocks * layout.block_tokens,
            block_stride=layout.token_stride,
            block_tokens=1,
        )
    if request.shift:
        records = records.copy()
        # A position before 0 becomes one behind all pages, and is refused as such.
        records["position"] += np.uint64(request.shift % 2**64)
    status = np.zeros(len(records), dtype=np.uint8)
    pages = np.ascontiguousarray(request.pages, dtype=np.int64)
    if len(pages) * layout.block_tokens >= LIMIT or layout.num_blocks >= LIMIT:
        raise UnsupportedError(f"{LIMIT} tokens of a request, or pages, and more are not served")
    _host.check(layout.packed, records.tobytes(), pages, status)
    return status


@dataclass(slots=True)
class Job:
    """A job that was written, and what its results mean.

    Attributes:
        memory: the job; its first ``upload_bytes`` bytes are to be uploaded.
        vector: bytes of the vectors that it is for, 16 or 4.
        turns: whether any key is turned.
        items, parts, tiles: counts.
        payload_bytes: that are read (or, of a store, written).
    """

    memory: Bytes
    upload_bytes: int
    vector: int
    turns: bool
    items: int
    parts: int
    tiles: int
    payload_bytes: int
    _checked: list[tuple[int, int, npt.NDArray[np.uint8]]] = field(default_factory=list)
    _tile_begin: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))

    def statuses(self, results: npt.NDArray[np.uint32]) -> list[list[bytes]]:
        """For each load, for each of its requests: a ``Status`` for each part.

        Args:
            results: of the kernel, one for each part of the job.
        """
        found: list[list[bytes]] = []
        for load, begin, status in self._checked:
            if load == len(found):
                found.append([])
            moved = results[begin : begin + len(status)]
            found[load].append(np.where(status != 0, status, moved).astype(np.uint8).tobytes())
        return found

    def sums(self, results: npt.NDArray[np.uint64]) -> list[npt.NDArray[np.uint64]]:
        """Of a store: each part's sums of its tiles, those without a moved byte left out."""
        return np.split(results, self._tile_begin[1:])


def write(
    layout: PagedLayout,
    loads: Sequence[Load],
    *,
    rotary: Rotary | None = None,
    stages: int = 4,
    allocate: Callable[[int], Bytes] = lambda size: np.empty(size, dtype=np.uint8),
) -> Job:
    """Writes a job.

    Args:
        layout: with addresses that the device can write.
        loads: with payload addresses that the device can read.
        rotary: how keys are turned, where a request asks for it.
        stages: of shared memory, ``STAGE_BYTES`` each.
        allocate: gives the memory for a job of that many bytes, aligned to 16.

    Raises:
        UnsupportedError: sizes or alignments that the kernels do not serve; says which.
        ValueError: keys are to be turned, and nothing says how.
    """
    row = layout.row_bytes
    if not 4 <= row <= STAGE_BYTES or row % 4:
        raise UnsupportedError(f"rows of {row} bytes are not served: 4 to {STAGE_BYTES}, by fours")
    groups = [
        (number, load.records, load.requests[begin : begin + SHARED_BY])
        for number, load in enumerate(loads)
        for begin in range(0, len(load.requests), SHARED_BY)
    ]
    records = (
        np.concatenate([r for _, r, _ in groups]) if groups else np.zeros(0, dtype=RECORD)
    )
    requests = [request for _, _, some in groups for request in some]
    count = len(records)
    mask = np.zeros(count, dtype=np.uint32)
    request_begin = np.zeros(count, dtype=np.uint32)
    checked = []
    begin = first = 0
    for number, some, wanting in groups:
        here = slice(begin, begin + len(some))
        request_begin[here] = first
        for bit, request in enumerate(wanting):
            status = check(layout, some, request)
            mask[here] |= (status == Status.DONE).astype(np.uint32) << np.uint32(bit)
            checked.append((number, begin, status))
        begin, first = begin + len(some), first + len(wanting)
    spans = _extents(records, row)
    mask[~spans.moves] = 0
    moved = mask != 0
    vector = _vector(layout, records[moved]["address"])
    items = np.where(moved, spans.items, 0)
    tiles = np.where(moved, spans.tiles, 0)

    tables, table_at, angles, angle_at = _tables(requests, rotary)
    sizes = {
        "bases": 16 * len(layout.k_base),
        "parts": count * _PART.itemsize,
        "requests": len(requests) * _REQUEST.itemsize,
        "turns": len(angles),
        "tables": tables.nbytes,
        "sums": 8 * int(tiles.sum()),
        "folded": 8 * count,
        "counters": 16,
        "expected": 8 * int(tiles.sum()),
    }
    at, end = {}, _JOB.itemsize
    for name, size in sizes.items():
        at[name] = end
        end += -(-size // 16) * 16
    memory = allocate(end)[:end]
    memory[at["sums"] : at["expected"]] = 0

    head = memory[: _JOB.itemsize].view(_JOB)[0]
    for name in _OFFSETS:
        head[name] = at[name]
    for name in ("block_stride", "head_stride", "token_stride", "row_bytes"):
        head[name] = getattr(layout, name)
    head["layers"] = len(layout.k_base)
    head["item_rows"] = STAGE_BYTES // row
    head["item_bytes"] = STAGE_BYTES // row * row
    head["parts_count"], head["items_count"] = count, items.sum()
    head["tiles_count"], head["stages"] = tiles.sum(), stages
    head["by_vectors"], head["by_block"] = divisor(row // vector), divisor(layout.block_tokens)
    turning = any(request.delta for request in requests)
    head["rotary_dim"] = rotary.dim if rotary else 0
    head["interleaved"] = bool(rotary and rotary.interleaved)
    head["element"] = ELEMENTS[rotary.dtype] if rotary else 0
    if turning and rotary and rotary.dim * (4 if rotary.dtype == "float32" else 2) > row:
        raise UnsupportedError(f"{rotary.dim} rotated elements do not fit rows of {row} bytes")
    _put(memory, at["bases"], np.array(layout.k_base + layout.v_base, dtype=np.uint64))
    _put(memory, at["turns"], np.frombuffer(angles, dtype=np.uint8))
    _put(memory, at["tables"], tables)

    wanting_ = memory[at["requests"] :][: sizes["requests"]].view(_REQUEST)
    for i, request in enumerate(requests):
        wanting_[i] = (
            at["tables"] + 4 * table_at[i],
            request.shift % 2**32,
            request.by_slot,
            angle_at[i],
            0,
        )
    parts = memory[at["parts"] :][: sizes["parts"]].view(_PART)
    parts["record"] = records
    parts["item_begin"] = np.cumsum(items) - items
    parts["tile_begin"] = tile_begin = np.cumsum(tiles) - tiles
    parts["first_item"], parts["first_tile"] = spans.first_item, spans.first_tile
    parts["end_tile"] = np.where(moved, spans.first_tile + spans.tiles, spans.first_tile)
    parts["request_begin"], parts["requests"] = request_begin, mask
    parts["dense"] = spans.dense
    parts["by_tokens"] = _divisors(records["tokens"])
    parts["by_heads"] = _divisors(records["src_heads"])
    return Job(
        memory=memory,
        upload_bytes=at["expected"],
        vector=vector,
        turns=turning,
        items=int(items.sum()),
        parts=count,
        tiles=int(tiles.sum()),
        payload_bytes=int((spans.tiles[moved] * TILE_BYTES).sum()),
        _checked=checked,
        _tile_begin=tile_begin.astype(np.int64),
    )


@dataclass(slots=True)
class _Extents:
    """Which items and tiles of its payload each part touches, if it moves anything."""

    moves: npt.NDArray[np.bool_]
    first_item: npt.NDArray[np.int64]
    items: npt.NDArray[np.int64]
    first_tile: npt.NDArray[np.int64]
    tiles: npt.NDArray[np.int64]
    dense: npt.NDArray[np.bool_]


def _extents(records: npt.NDArray[np.void], row: int) -> _Extents:
    # What contradicts itself wraps here and is masked out by its status.
    r: Any = {name: records[name].astype(np.int64) for name in _FIELDS[3:]}
    item = STAGE_BYTES // row * row
    moves = (r["token_begin"] < r["token_end"]) & (r["heads"] > 0) & (r["layers"] > 0)
    moves &= (r["length"] > 0) & (r["length"] // row < LIMIT)
    first = (r["src_layer_begin"] * 2 * r["src_heads"] + r["src_head_begin"]) * r["tokens"]
    first += r["token_begin"]
    planes = (r["src_layer_begin"] + r["layers"]) * 2 - 1
    heads = planes * r["src_heads"] + r["src_head_begin"] + r["heads"] - 1
    last = heads * r["tokens"] + r["token_end"] - 1
    first_tile = first * row // TILE_BYTES
    end_tile = -(-(last + 1) * row // TILE_BYTES)
    first_item = first_tile * TILE_BYTES // item
    end_item = -(-np.minimum(end_tile * TILE_BYTES, r["length"]) // item)
    whole = (r["token_begin"] == 0) & (r["token_end"] == r["tokens"])
    return _Extents(
        moves,
        first_item,
        end_item - first_item,
        first_tile,
        end_tile - first_tile,
        whole & (r["heads"] == r["src_heads"]),
    )


def _vector(layout: PagedLayout, addresses: npt.NDArray[np.uint64]) -> int:
    """The widest vectors that all addresses and strides allow."""
    of_layout = (layout.block_stride, layout.head_stride, layout.token_stride, layout.row_bytes)
    bits = 0
    for number in (*of_layout, *layout.k_base, *layout.v_base):
        bits |= number
    bits |= int(np.bitwise_or.reduce(addresses, initial=0))
    if bits % 4:
        raise UnsupportedError("payloads, pages and their strides must be multiples of 4 bytes")
    return 4 if bits % 16 else 16


def _tables(
    requests: Sequence[Request], rotary: Rotary | None
) -> tuple[npt.NDArray[np.uint32], list[int], bytes, list[int]]:
    """Page ids of all requests, where each one's begin; angles, where each one's begin."""
    table_at, angle_at, end = [], [], 0
    angles: dict[int, int] = {}
    for request in requests:
        table_at.append(end)
        end += len(request.pages)
        if request.delta == 0:
            angle_at.append(_NONE)
            continue
        if rotary is None:
            raise ValueError("keys are to be turned, but nothing says how")
        angle_at.append(angles.setdefault(request.delta, len(angles) * (rotary.dim // 2)))
    tables = (
        np.concatenate([r.pages for r in requests]).astype(np.uint32)
        if requests
        else np.zeros(0, dtype=np.uint32)
    )
    packed = b"".join(turns(rotary, delta) for delta in angles) if rotary else b""
    return tables, table_at, packed, angle_at


@lru_cache(maxsize=4096)
def divisor(value: int) -> tuple[int, int, int]:
    """(value, factor, shift) with n // value = n · factor >> (32 + shift) for n < 2³¹."""
    if value <= 1:
        return value, 0, 0
    bits = (value - 1).bit_length()
    return value, -(-(1 << (31 + bits)) // value), bits - 1


def _divisors(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.void]:
    # Sizes that the kernels serve are below LIMIT; the others are masked out.
    numbers = np.minimum(values, LIMIT - 1).tolist()
    return np.array([divisor(n) for n in numbers], dtype=_DIVISOR)


def _put(memory: Bytes, offset: int, values: npt.NDArray[Any]) -> None:
    memory[offset : offset + values.nbytes] = values.view(np.uint8)
