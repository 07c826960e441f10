"""Families for the tests of recipes: small ones, of any geometry, with any bits in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from experiments.tokendance import decoder as second
from kmesh.codec import Base, Provenance, Segment, SpanDescription
from kmesh.kernels.reference import turn
from kmesh.kernels.rotary import ELEMENTS, Rotary
from kmesh.layout import DTYPE_BYTES, Shard

NAMESPACE = b"n" * 32

#: Bits that arithmetic would change: nan with a payload, infinities, -0, subnormal numbers.
ODD = {
    "bfloat16": [0x7FC1, 0xFF81, 0x7F80, 0xFF80, 0x8000, 0x0000, 0x0001, 0x807F, 0x7F7F],
    "float16": [0x7E01, 0xFC01, 0x7C00, 0xFC00, 0x8000, 0x0000, 0x0001, 0x83FF, 0x7BFF],
    "float32": [0x7FC00001, 0xFF800001, 0x7F800000, 0xFF800000, 0x80000000, 0, 1, 0x807FFFFF],
}

Payload = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Geometry:
    """Of all spans of a family."""

    dtype: str = "bfloat16"
    layers: int = 2
    heads: int = 2
    head_dim: int = 8

    @property
    def words(self) -> str:
        return f"<u{DTYPE_BYTES[self.dtype]}"

    def describe(self, key: bytes, tokens: int, position: int = 0, **more: Any) -> SpanDescription:
        return SpanDescription(
            key=key.ljust(32, b"\0"),
            namespace=more.pop("namespace", NAMESPACE),
            dtype=self.dtype,
            shard=Shard(3, 3 + self.layers, 1, 1 + self.heads),
            head_dim=self.head_dim,
            tokens=tokens,
            position=position,
            generation=more.pop("generation", 5),
        )

    def draw(self, rng: np.random.Generator, tokens: int, odd: float = 0.1) -> npt.NDArray[Any]:
        """State [layer, plane, head, token, dim], as bits: numbers, and some odd ones."""
        shape = (self.layers, 2, self.heads, tokens, self.head_dim)
        values = rng.standard_normal(shape).astype(np.float32)
        if self.dtype == "float32":
            bits = values.view(np.uint32)
        elif self.dtype == "float16":
            bits = values.astype(np.float16).view(np.uint16)
        else:
            bits = (values.view(np.uint32) >> 16).astype(np.uint16)
        which = rng.random(shape) < odd
        bits[which] = rng.choice(np.array(ODD[self.dtype], dtype=bits.dtype), int(which.sum()))
        return bits

    def rotary(self, *, interleaved: bool = False, pairs: int = 0) -> Rotary:
        """All pairs of a head are turned, or so many."""
        pairs = pairs or self.head_dim // 2
        return Rotary(tuple(100 ** (-i / pairs) for i in range(pairs)), interleaved, self.dtype)


@dataclass(frozen=True)
class Family:
    """A base and one member that was recovered from it."""

    geometry: Geometry
    base: Base
    rotary: Rotary
    member: SpanDescription
    state: npt.NDArray[Any]
    provenance: tuple[Provenance, ...]

    @property
    def second_base(self) -> dict[bytes, second.Segment]:
        """The base as the second decoder takes it."""
        return second_base(self.base)


def second_base(base: Base) -> dict[bytes, second.Segment]:
    return {
        one.description.key: second.Segment(
            key=one.description.key,
            namespace=one.description.namespace,
            dtype=ELEMENTS[one.description.dtype],
            layers=(one.description.shard.layer_begin, one.description.shard.layer_end),
            heads=(one.description.shard.head_begin, one.description.shard.head_end),
            head_dim=one.description.head_dim,
            tokens=one.description.tokens,
            position=one.description.position,
            generation=one.description.generation,
            payload=one.rows.tobytes(),
        )
        for one in base
    }


def recovered(
    geometry: Geometry,
    seed: int,
    *,
    segments: Sequence[int] = (40,),
    own: Sequence[int] = (5, 9),
    anew: float = 0.0,
    position: int = 100,
    rotary: Rotary | None = None,
) -> Family:
    """A member of ``own`` tokens around the segments, a share of whose tokens is computed anew."""
    rng = np.random.default_rng(seed)
    rotary = rotary or geometry.rotary()
    states = [geometry.draw(rng, count) for count in segments]
    base = Base(
        Segment(geometry.describe(b"segment %d" % number, count, 7 + 50 * number), state)
        for number, (count, state) in enumerate(zip(segments, states, strict=True))
    )
    tokens = sum(segments) + sum(own)
    state = geometry.draw(rng, tokens)
    provenance, at = [], 0
    for before, segment, source in zip(own, base, states, strict=False):
        at += before
        frame = segment.description
        delta = position + at - frame.position
        part = state[:, :, :, at : at + frame.tokens]
        kept = np.flatnonzero(rng.random(frame.tokens) >= anew)
        part[:, 1][..., kept, :] = source[:, 1][..., kept, :]
        part[:, 0][..., kept, :] = turned(source[:, 0], rotary, delta)[..., kept, :]
        provenance.append(Provenance(at, frame.tokens, frame.key, 0, delta))
        at += frame.tokens
    member = geometry.describe(b"member", tokens, position)
    return Family(geometry, base, rotary, member, state, tuple(provenance))


def turned(keys: npt.NDArray[Any], rotary: Rotary, delta: int) -> npt.NDArray[Any]:
    """Keys [..., dim] as bits, turned by the reference."""
    if not delta:
        return keys
    flat = np.ascontiguousarray(keys)
    rows = flat.view(np.uint8).reshape(-1, flat.shape[-1] * flat.itemsize)
    return turn(rows, rotary, delta).reshape(-1).view(flat.dtype).reshape(keys.shape)


def geometries() -> st.SearchStrategy[Geometry]:
    return st.builds(
        Geometry,
        dtype=st.sampled_from(sorted(DTYPE_BYTES)),
        layers=st.integers(1, 3),
        heads=st.integers(1, 3),
        head_dim=st.integers(2, 17),
    )
