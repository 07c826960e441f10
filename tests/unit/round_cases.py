"""Rounds for tests: bases, members that the real encoder made recipes of, dense ones, and pages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from codec.codec_cases import Geometry, turned
from hypothesis import strategies as st
from paged_reference import Engine, summed

from kmesh.codec import Base, Encoder, Op, Provenance, RecipeTables, Segment, SpanDescription
from kmesh.kernels.host import SpanPart
from kmesh.kernels.plan import Memory, Request
from kmesh.kernels.rotary import Rotary
from kmesh.kernels.rounds import BaseSpan, Member, Place, Round

Put = Callable[[np.ndarray, Memory], int]


class Blob:
    """Bytes with their tile sums: a payload, or a recipe's file."""

    def __init__(self, data: Any, memory: Memory = Memory.HOST) -> None:
        self.data = np.frombuffer(bytearray(memoryview(data).cast("B")), dtype=np.uint8)
        self.root, self.sums = summed(self.data)
        self.memory = memory

    def place(self, put: Put) -> Place:
        return Place(
            put(self.data, self.memory), put(self.sums, self.memory), self.root, self.memory
        )


def here(data: np.ndarray, memory: Memory) -> int:
    return int(data.ctypes.data)


@dataclass
class Wanted:
    """A member before it has an address. ``dense``: the payload is its blob, or that of a base."""

    what: SpanDescription
    blob: Blob
    request: int
    position: int
    tables: RecipeTables | None = None
    changes: dict[str, int] = field(default_factory=dict)


@dataclass
class RoundCase:
    """Sizes of an engine, and a round, in whichever memory."""

    sizes: dict[str, Any]
    blocks: int
    bases: list[tuple[SpanDescription, Blob, bytes | None]]
    members: list[Wanted]
    requests: list[Request]

    def engine(self) -> Engine:
        return Engine.make(**self.sizes, blocks=self.blocks)

    def built(self, put: Put = here) -> tuple[list[BaseSpan], list[Member], list[Request]]:
        places: dict[int, Place] = {}

        def place(blob: Blob) -> Place:
            if id(blob) not in places:
                places[id(blob)] = blob.place(put)
            return places[id(blob)]

        bases = [BaseSpan(place(blob), what, digest) for what, blob, digest in self.bases]
        members = []
        for one in self.members:
            at = place(one.blob)
            if one.tables is not None:
                members.append(
                    Member.mirror(one.tables, at, one.request, one.position, **one.changes)
                )
                continue
            part = whole(one.what, at, one.position)
            members.append(Member(replace(part, **one.changes), one.request, memory=at.memory))
        return bases, members, self.requests

    def round(self, put: Put = here) -> Round:
        return Round.of(*self.built(put))


def whole(what: SpanDescription, place: Place, position: int) -> SpanPart:
    """All of a dense payload."""
    heads, layers = what.shard.heads, what.shard.layers
    return SpanPart(
        address=place.address, sums_address=place.sums_address, root=place.root,
        length=what.payload_bytes, tokens=what.tokens, token_begin=0, token_end=what.tokens,
        position=position, src_heads=heads, src_head_begin=0, dst_head_begin=0, heads=heads,
        src_layers=layers, src_layer_begin=0, dst_layer_begin=0, layers=layers,
    )  # fmt: skip


@dataclass
class Sibling:
    """A member's payload, and the recipe that the encoder made of it."""

    what: SpanDescription
    payload: np.ndarray
    data: bytes


def sibling(
    geometry: Geometry,
    rotary: Rotary,
    base: Base,
    pieces: Sequence[tuple[int, int, int]],
    rng: np.random.Generator,
    *,
    position: int = 0,
    anew: float = 0.0,
    key: bytes = b"sibling",
) -> Sibling:
    """A member of pieces (segment, or -1 for tokens of its own; first token; how many).

    A share ``anew`` of what was taken is computed anew, the same tokens in all layers but one.
    """
    tokens = sum(count for _, _, count in pieces)
    state = geometry.draw(rng, tokens)
    provenance, at = [], 0
    for segment, source, count in pieces:
        if segment >= 0:
            frame = base.segments[segment].description
            rows = base.segments[segment].rows.view(geometry.words)
            rows = rows.reshape(geometry.layers, 2, geometry.heads, frame.tokens, -1)
            taken = rows[:, :, :, source : source + count]
            delta = position + at - frame.position - source
            part = state[:, :, :, at : at + count]
            part[:, 1] = taken[:, 1]
            part[:, 0] = turned(taken[:, 0], rotary, delta)
            # Every element of a token that is computed anew is another one: such tokens are
            # written out, not as differences.
            part[..., np.flatnonzero(rng.random(count) < anew), :] ^= 0x1111
            if anew and geometry.layers > 1:
                part[-1, 0] ^= 0x0101
            provenance.append(Provenance(at, count, frame.key, source, delta))
        at += count
    what = geometry.describe(key, tokens, position)
    encoded = Encoder(base, rotary).encode(what, state, provenance)
    return Sibling(what, state, encoded.data)


def segments_of(geometry: Geometry, sizes: Sequence[int], rng: np.random.Generator) -> Base:
    return Base(
        Segment(geometry.describe(b"base %d" % i, tokens, 11 + 90 * i), geometry.draw(rng, tokens))
        for i, tokens in enumerate(sizes)
    )


def tables_of(data: bytes) -> RecipeTables:
    return RecipeTables(data)


GEOMETRY = Geometry(layers=3, heads=4, head_dim=128)
SLOTS = 16


def siblings(
    count: int = 3,
    *,
    memory: Memory = Memory.HOST,
    literals: Memory = Memory.HOST,
    own: int = 12,
    tokens: int = 64,
    seed: int = 7,
    frames: int = 3,
) -> tuple[RoundCase, list[np.ndarray]]:
    """Members that take most of a base and have ``own`` tokens each, and their payloads.

    A second base, of which nobody takes anything, is there too. Recipes are of so many lengths as
    there are ``frames``.
    """
    rng = np.random.default_rng(seed)
    base = segments_of(GEOMETRY, [tokens, 16], rng)
    members, requests, payloads = [], [], []
    blocks = -(-tokens // SLOTS)
    for number in range(count):
        begin = number % frames
        made = sibling(
            GEOMETRY, GEOMETRY.rotary(), base,
            [(-1, 0, own // 2), (0, begin, tokens - own - begin), (-1, 0, own - own // 2 + begin)],
            rng, position=500 + 40 * number, key=b"sibling %d" % number,
        )  # fmt: skip
        members.append(
            Wanted(made.what, Blob(made.data, literals), number, 0, tables_of(made.data))
        )
        requests.append(Request(rng.permutation(blocks) + blocks * number))
        payloads.append(made.payload)
    bases = [(one.description, Blob(one.rows, memory), one.digest) for one in base]
    sizes = {"order": "NHD", "layers": 3, "heads": 4, "slots": SLOTS, "row": 256, "gap": 0}
    return RoundCase(sizes, blocks * count, bases, members, requests), payloads


@st.composite
def rounds(draw: st.DrawFn) -> RoundCase:
    """Up to two bases and four members in up to four requests, ragged, each maybe in part."""
    large = draw(st.integers(0, 4)) == 0
    geometry = Geometry(
        dtype=draw(st.sampled_from(["bfloat16", "float16", "float32"])),
        layers=draw(st.integers(1, 3)),
        heads=draw(st.sampled_from([1, 2, 3, 4])),
        head_dim=draw(st.sampled_from([64, 128] if large else [2, 6, 8, 24, 40])),
    )
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    sizes = [draw(st.sampled_from([70, 150] if large else [3, 16, 40])) for _ in range(2)]
    base = segments_of(geometry, sizes, rng)
    rotary = geometry.rotary(
        interleaved=draw(st.booleans()),
        pairs=draw(st.integers(1, geometry.head_dim // 2)),
    )
    memories = st.sampled_from(list(Memory))
    blobs = [Blob(segment.rows, draw(memories)) for segment in base]
    bases = [
        (one.description, blob, one.digest if draw(st.booleans()) else None)
        for one, blob in zip(base, blobs, strict=True)
    ]
    slots, members, requests, used = draw(st.sampled_from([1, 3, 16, 32])), [], [], 0
    own = geometry.layers + draw(st.integers(0, 1)), geometry.heads + draw(st.integers(0, 1))
    for number in range(draw(st.integers(1, 4))):
        position = draw(st.integers(0, 20))
        changes = rectangle(draw, geometry, own)
        kind = draw(st.sampled_from(["recipe", "recipe", "recipe", "dense", "master"]))
        if kind == "recipe":
            made = sibling(
                geometry, rotary, base, _pieces(draw, sizes), rng,
                position=draw(st.integers(0, 300)), anew=draw(st.sampled_from([0.0, 0.0, 0.2])),
                key=b"sibling %d" % number,
            )  # fmt: skip
            tables = tables_of(made.data)
            assert not (tables.ops["kind"] == Op.XOR).any()
            wanted = Wanted(made.what, Blob(made.data, draw(memories)), 0, position, tables)
        elif kind == "dense":
            what = geometry.describe(b"dense %d" % number, draw(st.integers(1, 50)))
            wanted = Wanted(
                what, Blob(geometry.draw(rng, what.tokens), draw(memories)), 0, position
            )
        else:
            at = draw(st.integers(0, 1))
            wanted = Wanted(base.segments[at].description, blobs[at], 0, position)
        wanted.changes = dict(changes)
        if draw(st.booleans()):
            begin = draw(st.integers(0, wanted.what.tokens))
            end = draw(st.integers(begin, wanted.what.tokens))
            wanted.changes |= {"token_begin": begin, "token_end": end}
        # Some want what another one wants, and have pages of their own.
        for _ in range(draw(st.sampled_from([1, 1, 1, 2]))):
            shift = draw(st.sampled_from([0, 0, 5, -position]))
            blocks = -(-(position + max(shift, 0) + wanted.what.tokens) // slots)
            ids = rng.permutation(blocks) + used
            used += blocks
            by_slot = draw(st.booleans())
            if by_slot:
                at = np.arange(blocks * slots)
                ids = ids[at // slots] * slots + at % slots
            members.append(replace(wanted, request=len(requests)))
            requests.append(Request(ids.astype(np.int64), by_slot, shift))
    engine = {
        "order": draw(st.sampled_from(["HND", "NHD", "planes"])),
        "layers": own[0], "heads": own[1], "slots": slots,
        "row": geometry.describe(b"", 1).row_bytes, "gap": draw(st.sampled_from([0, 0, 4, 16])),
    }  # fmt: skip
    return RoundCase(engine, used + draw(st.integers(0, 2)), bases, members, requests)


def rectangle(draw: st.DrawFn, geometry: Geometry, own: tuple[int, int]) -> dict[str, int]:
    """A rectangle of layers and heads."""
    changes = {}
    for kind, stored, room in (
        ("layer", geometry.layers, own[0]), ("head", geometry.heads, own[1])
    ):  # fmt: skip
        begin, end = 0, stored
        if draw(st.integers(0, 3)) == 0:
            begin = draw(st.integers(0, stored - 1))
            end = draw(st.integers(begin + 1, stored))
        changes[f"src_{kind}_begin"], changes[f"{kind}s"] = begin, end - begin
        changes[f"dst_{kind}_begin"] = draw(st.integers(0, room - (end - begin)))
    return changes


def _pieces(draw: st.DrawFn, sizes: Sequence[int]) -> list[tuple[int, int, int]]:
    pieces = []
    for _ in range(draw(st.integers(1, 5))):
        segment = draw(st.integers(-1, len(sizes) - 1))
        if segment < 0:
            pieces.append((-1, 0, draw(st.integers(1, 20))))
            continue
        source = draw(st.integers(0, sizes[segment] - 1))
        pieces.append((segment, source, draw(st.integers(1, sizes[segment] - source))))
    return pieces
