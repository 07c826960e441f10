"""A round to measure: a base of spans, and members that take most of it and have own tokens.

Knows no GPU, so that the tests can run a small one.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kmesh import _host
from kmesh.codec import Base, Encoder, Provenance, RecipeTables, Segment, SpanDescription
from kmesh.kernels.host import SpanPart
from kmesh.kernels.plan import Load, Memory, Request
from kmesh.kernels.rotary import ELEMENTS, Rotary, turns
from kmesh.kernels.rounds import BaseSpan, Member, Place, Round
from kmesh.layout import TILE_BYTES, Shard, sums_offset, tiles

_DTYPE = "bfloat16"
#: Positions between where a base was computed and where its members have it, one more for each.
_APART = 100


@dataclass(frozen=True)
class Sizes:
    """Of each member (and of the base): spans of tokens, of which ``own`` are each member's own."""

    layers: int
    heads: int
    head_dim: int
    spans: int
    span_tokens: int
    own: int
    members: int

    def describe(self, key: bytes, position: int) -> SpanDescription:
        return SpanDescription(
            key=key.ljust(32, b"\0"),
            namespace=b"n" * 32,
            dtype=_DTYPE,
            shard=Shard(0, self.layers, 0, self.heads),
            head_dim=self.head_dim,
            tokens=self.span_tokens,
            position=position,
        )

    @property
    def span_bytes(self) -> int:
        return self.layers * 2 * self.heads * self.span_tokens * self.head_dim * 2


class Stock:
    """Payloads or recipes as the daemon lays them out: each on a tile, behind all of them sums."""

    def __init__(self, sizes: Sequence[int]) -> None:
        starts = np.cumsum([0, *(tiles(size) * TILE_BYTES for size in sizes)]).tolist()
        self.sizes, self._starts = list(sizes), starts[:-1]
        size = starts[-1] + 2 * TILE_BYTES + starts[-1] // TILE_BYTES * 8
        self.size = -(-size // TILE_BYTES) * TILE_BYTES
        self._fd = os.memfd_create("kmesh-bench")
        os.ftruncate(self._fd, self.size)
        self._writable = mmap.mmap(self._fd, self.size)
        self._region = _host.Region(self._fd, self.size, False)
        self.address, self._sums = self._region.address, sums_offset(self.size)
        self._roots = [0] * len(sizes)

    def put(self, number: int, data: npt.NDArray[np.uint8]) -> None:
        """Writes one of them, and its sums."""
        memory = np.frombuffer(self._writable, dtype=np.uint8)
        begin = self._starts[number]
        memory[begin : begin + len(data)] = data
        base = memory.ctypes.data
        sums = base + self._sums + begin // TILE_BYTES * 8
        self._roots[number] = _host.tile_sums(base + begin, len(data), sums)

    def view(self, number: int) -> npt.NDArray[np.uint8]:
        """One of them, to be read."""
        begin = self._starts[number]
        return np.frombuffer(self._region, dtype=np.uint8)[begin : begin + self.sizes[number]]

    def place(self, number: int, at: int, memory: Memory) -> Place:
        """Where one of them is, of a copy or mapping of all that begins at ``at``."""
        begin = self._starts[number]
        sums = at + self._sums + begin // TILE_BYTES * 8
        return Place(at + begin, sums, self._roots[number], memory)

    def close(self) -> None:
        self._region.close()
        self._writable.close()
        os.close(self._fd)


class Siblings:
    """A base, its members' payloads and their recipes, made by the encoder; bytes follow from the
    sizes.

    Args:
        dense: whether members' payloads are kept.
    """

    def __init__(self, sizes: Sizes, *, dense: bool = True) -> None:
        self.sizes = sizes
        self._rng = np.random.default_rng(9)
        self._rotary = Rotary.from_parameters(
            {"rope_theta": 1e6}, head_dim=sizes.head_dim, interleaved=False, dtype=_DTYPE
        )
        count = sizes.members * sizes.spans
        self.base = Stock([sizes.span_bytes] * sizes.spans)
        self.dense = Stock([sizes.span_bytes] * count)
        self.frames = [
            sizes.describe(b"base %d" % i, i * sizes.span_tokens) for i in range(sizes.spans)
        ]
        files: list[bytes] = [b""] * count
        for i in range(sizes.spans):
            self.base.put(i, self._drawn(sizes.span_tokens).reshape(-1).view(np.uint8))
            segment = Segment(self.frames[i], self.base.view(i))
            encoder = Encoder(Base([segment]), self._rotary)
            for member in range(sizes.members):
                number = member * sizes.spans + i
                payload, what, taken = self._member(member, i, segment)
                if dense:
                    self.dense.put(number, payload)
                files[number] = encoder.encode(what, payload, [taken]).data
        self.recipes = Stock([len(file) for file in files])
        self.tables = [RecipeTables(file) for file in files]
        for number, file in enumerate(files):
            self.recipes.put(number, np.frombuffer(file, dtype=np.uint8))

    @property
    def literal_share(self) -> float:
        """Bytes of recipes over those of their payloads."""
        return sum(self.recipes.sizes) / sum(self.dense.sizes)

    def _drawn(self, tokens: int) -> npt.NDArray[np.uint16]:
        """State [layer, plane, head, token, dim], as bits of numbers of 0.5 to 2 and -0.5 to -2."""
        s = self.sizes
        shape = (s.layers, 2, s.heads, tokens, s.head_dim)
        bits = self._rng.integers(0, 1 << 16, shape, dtype=np.uint16)
        bits &= np.uint16(0x80FF)
        bits |= np.uint16(0x3F00)
        return bits

    def _member(
        self, member: int, span: int, segment: Segment
    ) -> tuple[npt.NDArray[np.uint8], SpanDescription, Provenance]:
        s = self.sizes
        source = member % (s.own + 1)
        begin, count = s.own - source, s.span_tokens - s.own
        position = span * s.span_tokens + _APART * (member + 1)
        delta = position + begin - segment.description.position - source
        rows = segment.rows.view(np.uint16).reshape(s.layers, 2, s.heads, s.span_tokens, -1)
        taken = rows[:, :, :, source : source + count]
        state = self._drawn(s.span_tokens)
        part = state[:, :, :, begin : begin + count]
        part[:, 1] = taken[:, 1]
        keys = np.ascontiguousarray(taken[:, 0])
        turned = np.empty_like(keys)
        _host.turn_rows(
            turned.reshape(-1).view(np.uint8).data, keys.reshape(-1).view(np.uint8).data,
            2 * s.head_dim, turns(self._rotary, delta), False, ELEMENTS[_DTYPE],
        )  # fmt: skip
        part[:, 0] = turned
        what = s.describe(b"member %d span %d" % (member, span), position)
        return (
            state.reshape(-1).view(np.uint8),
            what,
            Provenance(begin, count, segment.description.key, source, delta),
        )

    def round(
        self,
        requests: Sequence[Request],
        base: tuple[int, Memory],
        recipes: tuple[int, Memory],
    ) -> Round:
        """All members, each for a request of its own.

        Args:
            base, recipes: where all of a stock begins, and in which memory.
        """
        s = self.sizes
        bases = [BaseSpan(self.base.place(i, *base), frame) for i, frame in enumerate(self.frames)]
        members = [
            Member.mirror(
                self.tables[number], self.recipes.place(number, *recipes), member,
                (number % s.spans) * s.span_tokens,
            )
            for member in range(s.members)
            for number in range(member * s.spans, (member + 1) * s.spans)
        ]  # fmt: skip
        return Round.of(bases, members, requests)

    def loads(self, requests: Sequence[Request], at: int) -> list[Load]:
        """The same members as dense payloads, all of which begin at ``at``."""
        s = self.sizes
        return [
            Load.of(
                [self._part(m * s.spans + i, i * s.span_tokens, at) for i in range(s.spans)],
                [requests[m]],
            )
            for m in range(s.members)
        ]

    def _part(self, number: int, position: int, at: int) -> SpanPart:
        s, place = self.sizes, self.dense.place(number, at, Memory.HOST)
        return SpanPart(
            address=place.address, sums_address=place.sums_address, root=place.root,
            length=s.span_bytes, tokens=s.span_tokens, token_begin=0, token_end=s.span_tokens,
            position=position, src_heads=s.heads, src_head_begin=0, dst_head_begin=0,
            heads=s.heads, src_layers=s.layers, src_layer_begin=0, dst_layer_begin=0,
            layers=s.layers,
        )  # fmt: skip

    def payload(self, member: int) -> npt.NDArray[np.uint16]:
        """A member's: [span, layer, plane, head, token, dim]."""
        s = self.sizes
        views = [self.dense.view(member * s.spans + i) for i in range(s.spans)]
        return (
            np.stack(views)
            .view(np.uint16)
            .reshape(s.spans, s.layers, 2, s.heads, s.span_tokens, s.head_dim)
        )

    def stocks(self) -> Iterator[Stock]:
        yield from (self.base, self.dense, self.recipes)
