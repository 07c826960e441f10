"""What the kernels mean, in numpy, for memory that the CPU can address. Slow and plain."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import as_strided

from kmesh.errors import UnsupportedError
from kmesh.kernels.host import PagedLayout, Status
from kmesh.kernels.plan import Load, Request, check
from kmesh.kernels.rotary import Rotary, turns
from kmesh.layout import TILE_BYTES, tiles

_GOLDEN = 0x9E3779B97F4A7C15
_U64 = 2**64 - 1


def restore(
    layout: PagedLayout, loads: Sequence[Load], rotary: Rotary | None = None
) -> list[list[bytes]]:
    """Payloads to pages. Parts whose sums are wrong are not written.

    Returns:
        For each load, for each of its requests, a ``Status`` for each part.
    """
    return [
        [_restore_one(layout, load.records, request, rotary) for request in load.requests]
        for load in loads
    ]


def store(
    layout: PagedLayout, records: npt.NDArray[np.void], request: Request
) -> tuple[bytes, list[npt.NDArray[np.uint64]]]:
    """Pages to payloads: statuses, and each payload's tile sums, bytes not moved taken as zero."""
    status = check(layout, records, request)
    sums = []
    for record, code in zip(records, status, strict=True):
        moved = np.zeros(int(record["length"]), dtype=np.uint8)
        if code == Status.DONE and _moves(record):
            payload, mask = _payload(record), _shaped(record, moved)
            for inside, pages in _rows(layout, record, request):
                payload[inside] = pages.get()
                mask[inside] = payload[inside]
        sums.append(tile_sums(moved))
    return status.tobytes(), sums


def tile_sums(payload: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint64]:
    """The sums of a payload's tiles, as ``docs/layout.md`` defines them."""
    padded = np.zeros(tiles(len(payload)) * TILE_BYTES, dtype=np.uint8)
    padded[: len(payload)] = payload
    words = padded.view("<i4").reshape(-1, TILE_BYTES // 4).astype(np.int64)
    weights = 2 * np.arange(TILE_BYTES // 4, dtype=np.int64) + 1
    sums: npt.NDArray[np.int64] = (words * weights).sum(axis=1)
    return sums.view(np.uint64)


def fold(sums: Sequence[int]) -> int:
    """The root of tile sums."""
    root = 0
    for number, one in enumerate(sums, 1):
        x = (int(one) + number * _GOLDEN) & _U64
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _U64
        x = (x ^ x >> 27) * 0x94D049BB133111EB & _U64
        root += x ^ x >> 31
    return root & _U64


def turn(keys: npt.NDArray[np.uint8], rotary: Rotary, delta: int) -> npt.NDArray[np.uint8]:
    """Keys turned by ``delta`` positions: products and sums in float32, one rounding at the end.

    Args:
        keys: bytes, [..., head_dim · element_bytes].
    """
    table = np.frombuffer(turns(rotary, delta), dtype=np.float32).reshape(-1, 2)
    return turn_by(keys, table, rotary.interleaved, rotary.dtype)


def turn_by(
    keys: npt.NDArray[np.uint8], table: npt.NDArray[np.float32], interleaved: bool, dtype: str
) -> npt.NDArray[np.uint8]:
    """The same by a table: cosine and sine of each pair, [pairs, 2]."""
    values = _widen(keys, dtype)
    pairs = len(table)
    if interleaved:
        one, two = slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2)
    else:
        one, two = slice(0, pairs), slice(pairs, 2 * pairs)
    a, b, cos, sin = values[..., one], values[..., two], table[:, 0], table[:, 1]
    turned = np.empty_like(values)
    with np.errstate(invalid="ignore", over="ignore"):
        turned[..., one] = a * cos - b * sin
        turned[..., two] = b * cos + a * sin
        out = _narrow(turned, dtype)
    # What is not rotated stays as it was, bit by bit.
    turned_bytes = 2 * pairs * (out.shape[-1] // values.shape[-1])
    out[..., turned_bytes:] = keys[..., turned_bytes:]
    return out


def _widen(keys: npt.NDArray[np.uint8], dtype: str) -> npt.NDArray[np.float32]:
    keys = np.ascontiguousarray(keys)
    if dtype == "bfloat16":
        return (keys.view("<u2").astype(np.uint32) << 16).view(np.float32)
    return keys.view("<f2" if dtype == "float16" else "<f4").astype(np.float32)


def _narrow(values: npt.NDArray[np.float32], dtype: str) -> npt.NDArray[np.uint8]:
    none = np.isnan(values)
    if dtype == "float32":
        bits: npt.NDArray[Any] = np.where(none, np.uint32(0x7FFFFFFF), values.view(np.uint32))
    elif dtype == "float16":
        bits = np.where(none, np.uint16(0x7FFF), values.astype(np.float16).view(np.uint16))
    else:
        wide = values.view(np.uint32)
        with np.errstate(over="ignore"):
            rounded = wide + np.uint32(0x7FFF) + (wide >> 16 & 1)
        bits = np.where(none, np.uint32(0x7FFF), rounded >> 16).astype(np.uint16)
    return np.ascontiguousarray(bits).view(np.uint8)


def _restore_one(
    layout: PagedLayout, records: npt.NDArray[np.void], request: Request, rotary: Rotary | None
) -> bytes:
    status = check(layout, records, request)
    for i, record in enumerate(records):
        if status[i] != Status.DONE or not _moves(record):
            continue
        status[i] = _verify(record)
        if status[i] != Status.DONE:
            continue
        payload = _payload(record)
        for inside, pages in _rows(layout, record, request):
            rows = payload[inside]
            if request.delta and inside[1] == 0:
                if rotary is None:
                    raise ValueError("keys are to be turned, but nothing says how")
                rows = turn(rows, rotary, request.delta)
            pages.put(rows)
    return status.tobytes()


def _verify(record: np.void) -> Status:
    stored = at(int(record["sums_address"]), 8 * tiles(int(record["length"]))).view(np.uint64)
    if fold(stored.tolist()) != int(record["root"]):
        return Status.BAD_ROOT
    payload = at(int(record["address"]), int(record["length"]))
    wanted = np.zeros(len(payload), dtype=np.uint8)
    layer, head = int(record["src_layer_begin"]), int(record["src_head_begin"])
    _shaped(record, wanted)[
        layer : layer + int(record["layers"]),
        :,
        head : head + int(record["heads"]),
        int(record["token_begin"]) : int(record["token_end"]),
    ] = 1
    starts = np.arange(0, len(payload), TILE_BYTES)
    bad = (np.add.reduceat(wanted, starts, dtype=np.int64) > 0) & (tile_sums(payload) != stored)
    return Status.BAD_TILE if bad.any() else Status.DONE


def plane(layout: PagedLayout, layer: int, kind: int) -> npt.NDArray[np.uint8]:
    """K (0) or V (1) of a layer's pages: [block, head, slot, byte].

    Raises:
        UnsupportedError: tokens are no rows.
    """
    if layout.k_order is not None or layout.v_order is not None:
        raise UnsupportedError("pages are not served: a token's row must be contiguous")
    shape = (layout.num_blocks, layout.heads, layout.block_tokens, layout.row_bytes)
    strides = (layout.block_stride, layout.head_stride, layout.token_stride, 1)
    reach = sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + 1
    base = (layout.k_base, layout.v_base)[kind][layer]
    return as_strided(at(base, reach), shape, strides)


class _Pages:
    """The rows of some tokens of one head in the pages of one layer, K or V."""

    def __init__(self, view: npt.NDArray[np.uint8], blocks: Any, head: int, slots: Any) -> None:
        self._view, self._at = view, (blocks, head, slots)

    def get(self) -> npt.NDArray[np.uint8]:
        return np.array(self._view[self._at])

    def put(self, rows: npt.NDArray[np.uint8]) -> None:
        self._view[self._at] = rows


def _rows(layout: PagedLayout, record: np.void, request: Request) -> Any:
    """(index into the payload, pages) for each layer, plane and head that is wanted."""
    tokens = np.arange(int(record["token_begin"]), int(record["token_end"]))
    at = tokens + int(record["position"]) + request.shift
    size = layout.block_tokens
    if request.by_slot:
        blocks, slots = np.divmod(np.asarray(request.pages)[at], size)
    else:
        blocks, slots = np.asarray(request.pages)[at // size], at % size
    for layer in range(int(record["layers"])):
        for kind in (0, 1):
            view = plane(layout, int(record["dst_layer_begin"]) + layer, kind)
            for head in range(int(record["heads"])):
                inside = (
                    int(record["src_layer_begin"]) + layer,
                    kind,
                    int(record["src_head_begin"]) + head,
                    slice(int(tokens[0]), int(tokens[-1]) + 1),
                )
                yield inside, _Pages(view, blocks, int(record["dst_head_begin"]) + head, slots)


def _moves(record: np.void) -> bool:
    return bool(
        record["token_begin"] < record["token_end"] and record["heads"] and record["layers"]
    )


def _shaped(record: np.void, payload: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    layers, heads, tokens = (int(record[n]) for n in ("src_layers", "src_heads", "tokens"))
    return payload.reshape(layers, 2, heads, tokens, -1)


def _payload(record: np.void) -> npt.NDArray[np.uint8]:
    return _shaped(record, at(int(record["address"]), int(record["length"])))


def at(address: int, size: int) -> npt.NDArray[np.uint8]:
    """Memory of this process."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))
