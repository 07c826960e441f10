"""A second decoder of recipes, written from docs/recipe-format.md alone: numpy and zstandard.

It shares no code with KMesh, is slow, and refuses what the page calls wrong.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import zstandard

_HEAD = struct.Struct("<8sHBBHHIIHHHHIIIIIIIIQQQQ32s32sQQQ64sQ")
_NAMES = (
    *("magic", "version", "form", "dtype", "block_tokens", "reserved_a", "tokens", "position"),
    *("layer_begin", "layer_end", "head_begin", "head_end", "head_dim", "segments", "turns"),
    *("pairs", "ops", "lists", "chunks", "reserved_b", "literal_bytes", "stored_bytes"),
    *("file_bytes", "generation", "namespace", "key", "payload_root", "tables_root"),
    *("stored_root", "reserved_c", "head_root"),
)
_SEGMENT = struct.Struct("<32s32sQQIIQ")
_OP = struct.Struct("<BBHIIIIIII")
_RUN = struct.Struct("<IIQQ")
_CHUNK = struct.Struct("<IIIIII")
_ELEMENT_BYTES = {1: 2, 2: 2, 3: 4}
LITERAL, REF, REF_ROT, XOR = 1, 2, 3, 4
POSITIONS = 2**31 - 1
_U64 = 2**64 - 1

Rows = npt.NDArray[np.uint8]


class Refused(Exception):
    """What was given is wrong; ``field`` says where."""

    def __init__(self, field: str, why: str = "") -> None:
        super().__init__(f"{field}: {why}" if why else field)
        self.field = field


@dataclass(frozen=True)
class Segment:
    """One segment of a base, as whoever keeps it describes it; ``payload`` is dense."""

    key: bytes
    namespace: bytes
    dtype: int
    layers: tuple[int, int]
    heads: tuple[int, int]
    head_dim: int
    tokens: int
    position: int
    generation: int
    payload: bytes


def root(data: bytes | Rows) -> int:
    """The page's root of bytes."""
    view = np.frombuffer(data, dtype=np.uint8) if isinstance(data, bytes) else data.reshape(-1)
    total = 0
    for number, begin in enumerate(range(0, len(view), 65536), 1):
        tile = view[begin : begin + 65536]
        filled = np.zeros(-(-len(tile) // 4) * 4, dtype=np.uint8)
        filled[: len(tile)] = tile
        words = filled.view("<i4").astype(np.int64)
        weights = 2 * np.arange(len(words), dtype=np.int64) + 1
        x = (int((words * weights).sum()) + number * 0x9E3779B97F4A7C15) & _U64
        x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) & _U64
        x = ((x ^ x >> 27) * 0x94D049BB133111EB) & _U64
        total = (total + (x ^ x >> 31)) & _U64
    return total


class Reader:
    """One recipe, its tables taken apart and checked."""

    def __init__(self, file: bytes) -> None:
        self.file = file
        _require(len(file) >= 256, "file_bytes")
        self.head: dict[str, Any] = dict(zip(_NAMES, _HEAD.unpack_from(file), strict=True))
        self._check_head()
        head, at = self.head, 256
        segments, at = self._cut(at, head["segments"], _SEGMENT.size)
        turns, at = self._cut(at, head["turns"], 8 + 8 * head["pairs"])
        lists, at = self._cut(at, head["lists"], 8)
        ops, at = self._cut(at, head["ops"], _OP.size)
        runs, at = self._cut(at, 2 * self.layers, _RUN.size)
        chunks, at = self._cut(at, head["chunks"], _CHUNK.size)
        begin = -(-at // 64) * 64
        _require(begin + head["stored_bytes"] == len(file), "stored_bytes")
        _require(not any(file[at:begin]), "reserved")
        self.stored = file[begin:]
        _require(root(file[256:begin]) == head["tables_root"], "tables_root")
        _require(root(self.stored) == head["stored_root"], "stored_root")
        self.segments = [_SEGMENT.unpack(one) for one in segments]
        self.turns = [(*struct.unpack("<iHBB", one[:8]), one[8:]) for one in turns]
        self.lists = [struct.unpack("<II", one) for one in lists]
        self.ops = [_OP.unpack(one) for one in ops]
        self.runs = [_RUN.unpack(one) for one in runs]
        self.chunks = [_CHUNK.unpack(one) for one in chunks]
        self._check_small_tables()
        self._check_runs([self._check_list(number) for number in range(len(self.lists))])

    # ---- sizes ----------------------------------------------------------------------

    @property
    def layers(self) -> int:
        return int(self.head["layer_end"] - self.head["layer_begin"])

    @property
    def heads(self) -> int:
        return int(self.head["head_end"] - self.head["head_begin"])

    @property
    def element_bytes(self) -> int:
        return _ELEMENT_BYTES[self.head["dtype"]]

    @property
    def row_bytes(self) -> int:
        return int(self.head["head_dim"]) * self.element_bytes

    @property
    def token_bytes(self) -> int:
        return self.heads * self.row_bytes

    @property
    def payload_bytes(self) -> int:
        return 2 * self.layers * int(self.head["tokens"]) * self.token_bytes

    # ---- checks ---------------------------------------------------------------------

    def _cut(self, at: int, count: int, size: int) -> tuple[list[bytes], int]:
        end = at + count * size
        _require(end <= len(self.file), "file_bytes")
        return [self.file[i : i + size] for i in range(at, end, size)] if count else [], end

    def _check_head(self) -> None:
        head = self.head
        _require(head["magic"] == b"KMRECIPE", "magic")
        _require(head["version"] == 1, "version")
        _require(root(self.file[:248]) == head["head_root"], "head_root")
        _require(head["file_bytes"] == len(self.file), "file_bytes")
        _require(head["form"] in (1, 2), "form")
        _require(head["dtype"] in _ELEMENT_BYTES, "dtype")
        _require(head["block_tokens"] in (16, 32, 64), "block_tokens")
        _require(1 <= head["tokens"] <= POSITIONS, "tokens")
        _require(head["position"] + head["tokens"] <= POSITIONS, "position")
        _require(head["layer_begin"] < head["layer_end"], "layer_end")
        _require(head["head_begin"] < head["head_end"], "head_end")
        _require(1 <= head["head_dim"] <= 8192, "head_dim")
        _require(head["segments"] <= 65535, "segments")
        _require(head["turns"] <= 65535, "turns")
        wanted = range(1, head["head_dim"] // 2 + 1) if head["turns"] else (0,)
        _require(head["pairs"] in wanted, "pairs")
        _require(1 <= head["lists"] <= head["ops"], "lists")
        _require(head["form"] == 2 or not head["chunks"], "chunks")
        _require(
            not head["reserved_a"] and not head["reserved_b"] and not any(head["reserved_c"]),
            "reserved",
        )

    def _check_small_tables(self) -> None:
        for key, _, _, _, tokens, position, reserved in self.segments:
            _require(key != self.head["key"], "segments.key")
            _require(tokens >= 1, "segments.tokens")
            _require(position + tokens <= POSITIONS, "segments.position")
            _require(not reserved, "segments.reserved")
        for delta, kernel, interleaved, reserved, _ in self.turns:
            _require(delta != 0, "turns.delta")
            _require(kernel == 1, "turns.kernel", f"version {kernel}")
            _require(interleaved in (0, 1), "turns.interleaved")
            _require(not reserved, "turns.reserved")

    def _check_list(self, number: int) -> tuple[int, bool]:
        """Units of data, and whether it turns."""
        first, count = self.lists[number]
        expected = sum(self.lists[number - 1]) if number else 0
        _require(first == expected, "lists.first")
        _require(count >= 1 and first + count <= len(self.ops), "lists.count")
        token = data = 0
        turns = False
        for op in self.ops[first : first + count]:
            self._check_op(op, token, data)
            token, data, turns = token + op[5], data + op[8], turns or op[2] != 0
        _require(token == self.head["tokens"], "lists.count")
        if number == len(self.lists) - 1:
            _require(first + count == len(self.ops), "ops")
        return data, turns

    def _check_op(self, op: tuple[int, ...], at: int, data_at: int) -> None:
        kind, code, turn, segment, token, tokens, source, data, size, reserved = op
        _require(kind in (LITERAL, REF, REF_ROT, XOR), "ops.kind", str(kind))
        _require(code == 0 or (kind == XOR and code == 1), "ops.code")
        _require(token == at, "ops.token")
        _require(1 <= tokens <= self.head["tokens"] - at, "ops.tokens")
        _require(not reserved, "ops.reserved")
        dense = -(-tokens * self.token_bytes // 16)
        if kind == LITERAL:
            _require(segment == 0, "ops.segment")
            _require(source == 0, "ops.source")
        else:
            _require(segment < len(self.segments), "ops.segment")
            _require(source + tokens <= self.segments[segment][4], "ops.source")
        least = 1 if kind == REF_ROT else 0
        most = len(self.turns) if kind in (REF_ROT, XOR) else 0
        _require(least <= turn <= most, "ops.turn")
        if turn:
            here = self.segments[segment][5] + source
            distance = self.head["position"] + token - here
            _require(self.turns[turn - 1][0] == distance, "turns.delta")
        _require(data == data_at, "ops.data")
        if kind in (REF, REF_ROT):
            _require(size == 0, "ops.size")
        else:
            _require(1 <= size <= dense if code == 1 else size == dense, "ops.size")

    def _check_runs(self, lists: list[tuple[int, bool]]) -> None:
        end = 0
        for number, (which, reserved, offset, length) in enumerate(self.runs):
            _require(which < len(lists), "runs.list")
            units, turns = lists[which]
            _require(not (turns and number % 2), "runs.list", "V is turned")
            _require(not reserved, "runs.reserved")
            _require(offset == -(-end // 64) * 64, "runs.offset")
            _require(length == units * 16, "runs.length")
            end = offset + length
        _require(end == self.head["literal_bytes"], "literal_bytes")
        for raw, *stored, reserved in self.chunks:
            _require(16 <= raw <= 2**20 and raw % 16 == 0, "chunks.raw")
            for plane, size in enumerate(stored):
                most = raw // self.element_bytes if plane < self.element_bytes else 0
                _require((1 if most else 0) <= size <= most, "chunks.stored")
            _require(not reserved, "chunks.reserved")
        if self.head["form"] == 2:
            _require(sum(one[0] for one in self.chunks) == end, "literal_bytes")
            stored_bytes = sum(sum(one[1:5]) for one in self.chunks)
            _require(stored_bytes == len(self.stored), "stored_bytes")
        else:
            _require(end == len(self.stored), "stored_bytes")

    # ---- literals -------------------------------------------------------------------

    def literals(self) -> bytes:
        """The literal area."""
        if self.head["form"] == 1:
            return self.stored
        area = np.zeros(self.head["literal_bytes"], dtype=np.uint8)
        at = begin = 0
        for raw, *stored, _ in self.chunks:
            for plane in range(self.element_bytes):
                data = self.stored[at : at + stored[plane]]
                if len(data) < raw // self.element_bytes:
                    data = _unpack(data, raw // self.element_bytes)
                area[begin + plane : begin + raw : self.element_bytes] = np.frombuffer(data, "u1")
                at += stored[plane]
            begin += raw
        bits = 8 * self.element_bytes
        words = area.view(f"<u{self.element_bytes}")
        return (words >> 1 | words << (bits - 1)).tobytes()


def decode(
    file: bytes, base: Mapping[bytes, Segment], *, max_bytes: int = 2**32
) -> tuple[Reader, bytes]:
    """The recipe and its member's payload; ``Refused`` if anything is not as the page says."""
    recipe = Reader(file)
    _require(recipe.payload_bytes <= max_bytes, "tokens")
    _require(recipe.head["literal_bytes"] <= max_bytes, "literal_bytes")
    heads, row = recipe.heads, recipe.row_bytes
    segments = [
        np.frombuffer(_find(recipe, one, base).payload, dtype=np.uint8).reshape(
            -1, heads, one[4], row
        )
        for one in recipe.segments
    ]
    literals = recipe.literals()
    member = np.empty((2 * recipe.layers, heads, recipe.head["tokens"], row), dtype=np.uint8)
    for run, (which, _, offset, _) in enumerate(recipe.runs):
        first, count = recipe.lists[which]
        for op in recipe.ops[first : first + count]:
            rows = _carry_out(recipe, op, literals, offset, [one[run] for one in segments])
            member[run, :, op[4] : op[4] + op[5]] = rows
    _require(root(member) == recipe.head["payload_root"], "payload_root")
    return recipe, member.tobytes()


def _find(recipe: Reader, record: tuple[Any, ...], base: Mapping[bytes, Segment]) -> Segment:
    key, digest, wanted_root, generation, tokens, position, _ = record
    segment = base.get(key)
    if segment is None:
        raise Refused("segments.key", "not in the base")
    head = recipe.head
    _require(segment.namespace == head["namespace"], "segments.namespace")
    _require(segment.dtype == head["dtype"], "segments.dtype")
    _require(segment.layers == (head["layer_begin"], head["layer_end"]), "segments.layers")
    _require(segment.heads == (head["head_begin"], head["head_end"]), "segments.heads")
    _require(segment.head_dim == head["head_dim"], "segments.head_dim")
    _require(segment.tokens == tokens, "segments.tokens")
    _require(segment.position == position, "segments.position")
    _require(segment.generation == generation, "segments.generation")
    _require(root(segment.payload) == wanted_root, "segments.root")
    _require(hashlib.sha256(segment.payload).digest() == digest, "segments.digest")
    return segment


def _carry_out(
    recipe: Reader, op: tuple[int, ...], literals: bytes, offset: int, run: list[Rows]
) -> Rows:
    kind, code, turn, segment, _, tokens, source, data, size, _ = op
    shape = (recipe.heads, tokens, recipe.row_bytes)
    bytes_ = recipe.heads * tokens * recipe.row_bytes
    mine = (
        np.frombuffer(literals, "u1", size * 16, offset + data * 16) if size else np.empty(0, "u1")
    )
    if kind == LITERAL:
        return mine[:bytes_].reshape(shape)
    rows = run[segment][:, source : source + tokens]
    if turn:
        rows = _turn(recipe, rows, turn - 1)
    if kind != XOR:
        return rows
    difference = _sparse(mine, bytes_, recipe.element_bytes) if code else mine[:bytes_]
    result: Rows = rows ^ difference.reshape(shape)
    return result


def _sparse(data: Rows, size: int, element_bytes: int) -> Rows:
    elements = size // element_bytes
    bitmap = (elements + 31) // 32 * 4
    _require(bitmap <= len(data), "ops.data")
    bits = np.unpackbits(data[:bitmap], bitorder="little").astype(np.bool_)
    _require(not bits[elements:].any(), "ops.data")
    end = bitmap + int(bits.sum()) * element_bytes
    _require(-(-end // 16) * 16 == len(data) and not data[end:].any(), "ops.data")
    words = data[bitmap:end].reshape(-1, element_bytes)
    _require(bool(words.any(axis=1).all()), "ops.data")
    difference = np.zeros((elements, element_bytes), dtype=np.uint8)
    difference[bits[:elements]] = words
    return difference.ravel()


def _turn(recipe: Reader, rows: Rows, number: int) -> Rows:
    _, _, interleaved, _, data = recipe.turns[number]
    table = np.frombuffer(data, dtype="<f4").reshape(-1, 2)
    cosine, sine, pairs = table[:, 0], table[:, 1], len(table)
    dtype = recipe.head["dtype"]
    flat = np.ascontiguousarray(rows)
    if dtype == 1:
        values = (flat.view("<u2").astype(np.uint32) << 16).view(np.float32)
    else:
        values = flat.view("<f2" if dtype == 2 else "<f4").astype(np.float32)
    one, two = (
        (slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2))
        if interleaved
        else (slice(0, pairs), slice(pairs, 2 * pairs))
    )
    a, b, turned = values[..., one], values[..., two], np.empty_like(values)
    with np.errstate(invalid="ignore", over="ignore"):
        turned[..., one] = a * cosine - b * sine
        turned[..., two] = b * cosine + a * sine
        bits = _round(turned, dtype)
    out = bits.view(np.uint8).reshape(flat.shape)
    kept = 2 * pairs * recipe.element_bytes
    out[..., kept:] = flat[..., kept:]
    return out


def _round(values: npt.NDArray[np.float32], dtype: int) -> npt.NDArray[Any]:
    nothing = np.isnan(values)
    wide = np.ascontiguousarray(values).view(np.uint32)
    if dtype == 3:
        return np.where(nothing, np.uint32(0x7FFFFFFF), wide).astype("<u4")
    if dtype == 2:
        half = values.astype(np.float16).view(np.uint16)
        return np.where(nothing, np.uint16(0x7FFF), half).astype("<u2")
    # To nearest, ties to even, in 64 bits so that nothing wraps.
    rounded = (wide.astype(np.uint64) + 0x7FFF + (wide >> 16 & 1)) >> 16
    return np.where(nothing, np.uint64(0x7FFF), rounded).astype("<u2")


def _unpack(data: bytes, size: int) -> bytes:
    try:
        claimed = zstandard.get_frame_parameters(data).content_size
        _require(claimed == size, "chunks.stored", f"a frame of {claimed} bytes")
        plane = zstandard.ZstdDecompressor().decompress(data, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise Refused("chunks.stored", str(error)) from None
    _require(len(plane) == size, "chunks.stored")
    return bytes(plane)


def _require(holds: bool, field: str, why: str = "") -> None:
    if not holds:
        raise Refused(field, why)
