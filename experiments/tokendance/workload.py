"""Prompts that hold the same content at different positions, and state for them, from a seed.

No model runs: values are drawn, so this says something about bytes and nothing about answers.
Siblings are recovered as an engine would: shared keys turned from where they were computed by
``kmesh.kernels.reference.turn``, values kept, own tokens and a share of the others computed anew.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kmesh.codec import Provenance, SpanDescription
from kmesh.kernels.reference import turn
from kmesh.kernels.rotary import Rotary
from kmesh.keys import Namespace
from kmesh.layout import Shard

VOCABULARY = 49152
#: Prefix reuse is by blocks of a prompt that begin at multiples of these.
BLOCKS = (16, 32, 64)

State = npt.NDArray[np.uint16]


@dataclass(frozen=True)
class Shape:
    """Of all state of a workload.

    Attributes:
        layers, heads, head_dim: as ``docs/layout.md`` has them; elements are bfloat16.
        theta: of the rotary embedding.
    """

    layers: int
    heads: int
    head_dim: int
    theta: float

    @property
    def rotary(self) -> Rotary:
        return Rotary.from_parameters(
            {"rope_theta": self.theta},
            head_dim=self.head_dim,
            interleaved=False,
            dtype="bfloat16",
        )

    @property
    def namespace(self) -> bytes:
        return Namespace(
            "generated",
            "none",
            "bfloat16",
            layers=self.layers,
            kv_heads=self.heads,
            head_dim=self.head_dim,
            rope=json.dumps({"rope_theta": self.theta}),
        ).digest()


class Shaped(Protocol):
    """What is asked of a ``Shape``, of generated state or of a checkpoint's."""

    @property
    def layers(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def namespace(self) -> bytes: ...


def describe(
    shape: Shaped, tokens: npt.NDArray[np.uint32], position: int, what: str
) -> SpanDescription:
    """Of the state of these tokens, the first of which is at ``position``."""
    return SpanDescription(
        key=hashlib.sha256(what.encode() + tokens.astype("<u4").tobytes()).digest(),
        namespace=shape.namespace,
        dtype="bfloat16",
        shard=Shard(0, shape.layers, 0, shape.heads),
        head_dim=shape.head_dim,
        tokens=len(tokens),
        position=position,
        generation=1,
    )


@dataclass(frozen=True)
class Prompt:
    """Token ids, and where the shared segments begin in them.

    Attributes:
        starts: of each segment, by its number.
    """

    tokens: npt.NDArray[np.uint32]
    starts: tuple[int, ...]


@dataclass(frozen=True)
class Member:
    """One prompt's state.

    Attributes:
        state: [layer, plane, head, token, dim], bits of bfloat16.
        provenance: what its recovery wrote down; empty for the one that primed.
        computed: tokens that were computed, own ones included.
        seen: what else was seen of it, for ``codec.json``.
    """

    name: str
    description: SpanDescription
    state: State
    provenance: tuple[Provenance, ...]
    computed: int
    seen: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class SegmentState:
    """A shared segment as the priming prompt computed it."""

    name: str
    description: SpanDescription
    state: State

    def state_digest(self) -> str:
        """SHA-256 of the state."""
        return hashlib.sha256(self.state.tobytes()).hexdigest()


class Workload:
    """Prompts with shared segments, each in an order and at positions of its own.

    Args:
        shape: of the state.
        segments: tokens of each shared segment.
        own: tokens of each prompt that it shares with nobody.
        prompts: how many; the first one primes.
        seed: of everything.

    Raises:
        ValueError: two prompts have an aligned block in common, so that prefix reuse could
            explain what is shared.
    """

    def __init__(
        self, shape: Shape, segments: Sequence[int], own: int, prompts: int, seed: int
    ) -> None:
        self.shape, self.own, self.seed = shape, own, seed
        self._rng = np.random.default_rng(seed)
        self.segment_tokens = [self._draw_tokens(count) for count in segments]
        self.prompts = [self._prompt(number) for number in range(prompts)]
        check_unaligned(self.prompts)
        primer = self.prompts[0]
        self.segments = [
            SegmentState(
                f"segment-{number}",
                describe(self.shape, tokens, primer.starts[number], "segment"),
                self._compute(len(tokens)),
            )
            for number, tokens in enumerate(self.segment_tokens)
        ]

    def primer(self) -> Member:
        """The first prompt: its own tokens, and the segments as it computed them."""
        member = self._recover(0, np.random.default_rng((self.seed, 0)), 0)
        return replace(member, provenance=())

    def siblings(self, percent: int) -> Iterator[Member]:
        """The others, each recovered with that share of its shared tokens computed anew."""
        for number in range(1, len(self.prompts)):
            yield self._recover(
                number, np.random.default_rng((self.seed, number, percent)), percent
            )

    def _prompt(self, number: int) -> Prompt:
        """Own tokens before, between and behind the segments; order and places are its own.

        All segments of prompt n begin at positions that are n modulo the least block, so that
        blocks of two prompts never cut them alike.
        """
        order = np.roll(np.arange(len(self.segment_tokens)), number).tolist()
        between = (self.own - BLOCKS[0] * (number + 2)) // len(order)
        pieces, starts, at = [], [0] * len(order), 0
        for place, segment in enumerate(order):
            part = between if place else BLOCKS[0] * (number + 1)
            part += (number - at - part) % BLOCKS[0]
            pieces += [self._draw_tokens(part), self.segment_tokens[segment]]
            starts[segment] = at + part
            at += part + len(self.segment_tokens[segment])
        own = sum(len(piece) for piece in pieces[::2])
        if own > self.own:
            raise ValueError(f"{self.own} own tokens are too few for prompt {number}")
        pieces.append(self._draw_tokens(self.own - own))
        return Prompt(np.concatenate(pieces), tuple(starts))

    def _recover(self, number: int, rng: np.random.Generator, percent: int) -> Member:
        prompt = self.prompts[number]
        state = self._compute(len(prompt.tokens), rng)
        provenance, computed = [], self.own
        for segment, start in zip(self.segments, prompt.starts, strict=True):
            frame, count = segment.description, segment.description.tokens
            delta = start - frame.position
            part = state[:, :, :, start : start + count]
            part[:, 1] = segment.state[:, 1]
            keys = np.ascontiguousarray(segment.state[:, 0])
            part[:, 0] = turned(keys, self.shape.rotary, delta)
            anew = rng.choice(count, count * percent // 100, replace=False)
            part[..., anew, :] = _moved(part[..., anew, :], rng)
            computed += len(anew)
            provenance.append(Provenance(start, count, frame.key, 0, delta))
        description = describe(self.shape, prompt.tokens, 0, "member")
        return Member(f"member-{number}", description, state, tuple(provenance), computed)

    def _draw_tokens(self, count: int) -> npt.NDArray[np.uint32]:
        return self._rng.integers(0, VOCABULARY, count, dtype=np.uint32)

    def _compute(self, tokens: int, rng: np.random.Generator | None = None) -> State:
        """State of tokens: normal, with a scale for each element of a head, as models have."""
        shape = self.shape
        scales = np.random.default_rng((self.seed, 2**32)).lognormal(
            0, 1, (shape.layers, 2, shape.heads, 1, shape.head_dim)
        )
        size = (shape.layers, 2, shape.heads, tokens, shape.head_dim)
        values = (rng or self._rng).standard_normal(size, dtype=np.float32)
        return to_bfloat16(values * scales.astype(np.float32))


def digest(prompts: Sequence[Prompt]) -> str:
    """SHA-256 of all token ids, prompt by prompt."""
    tokens = b"".join(prompt.tokens.astype("<u4").tobytes() for prompt in prompts)
    return hashlib.sha256(tokens).hexdigest()


def turned(keys: State, rotary: Rotary, delta: int) -> State:
    """Keys [..., dim] as the reference of the kernels turns them."""
    if not delta:
        return keys
    rows = np.ascontiguousarray(keys).view(np.uint8).reshape(-1, 2 * keys.shape[-1])
    return turn(rows, rotary, delta).view(np.uint16).reshape(keys.shape)


def check_unaligned(prompts: Sequence[Prompt]) -> dict[str, Any]:
    """How many aligned blocks were compared, by their size.

    Raises:
        ValueError: two prompts have one in common, wherever it is in them.
    """
    compared = {}
    for size in BLOCKS:
        seen: dict[bytes, int] = {}
        for number, prompt in enumerate(prompts):
            for begin in range(0, len(prompt.tokens) - size + 1, size):
                block = prompt.tokens[begin : begin + size].tobytes()
                if seen.setdefault(block, number) != number:
                    raise ValueError(f"prompts {seen[block]} and {number} share a block of {size}")
        compared[str(size)] = len(seen)
    return compared


def to_bfloat16(values: npt.NDArray[np.float32]) -> State:
    """Rounded to nearest even; the values are finite."""
    wide = values.view(np.uint32)
    return ((wide + np.uint32(0x7FFF) + (wide >> 16 & 1)) >> 16).astype(np.uint16)


def _moved(state: State, rng: np.random.Generator) -> State:
    """What computing anew gives instead: near, but hardly anywhere the same bits."""
    values = (state.astype(np.uint32) << 16).view(np.float32)
    noise = rng.standard_normal(values.shape, dtype=np.float32)
    return to_bfloat16(values * (1 + np.float32(0.1) * noise))
