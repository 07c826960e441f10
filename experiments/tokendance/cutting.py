"""Members and segments cut into spans, as engines store them and a daemon keeps them."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from experiments.tokendance.workload import Member, SegmentState, Shaped, State
from kmesh.codec import Provenance, SpanDescription
from kmesh.kernels.rotary import Rotary
from kmesh.layout import SPAN_TOKENS, SUB_TOKENS


class Turned(Shaped, Protocol):
    """A shape whose keys are turned."""

    @property
    def rotary(self) -> Rotary: ...


def grid(tokens: int, span: int = SPAN_TOKENS, sub: int = SUB_TOKENS) -> list[tuple[int, int]]:
    """[begin, end) of each span of so many tokens; the last ``tokens % sub`` are in none."""
    end = tokens // sub * sub
    return [(at, min(at + span, end)) for at in range(0, end, span)]


def part(state: State, begin: int, end: int) -> State:
    """State of some tokens, as a span's payload orders it."""
    return np.ascontiguousarray(state[:, :, :, begin:end])


@dataclass(frozen=True)
class Parts:
    """Segments cut into spans.

    Attributes:
        whole: the segments; all of their tokens are in spans.
    """

    shape: Turned
    whole: Sequence[SegmentState]

    @property
    def segments(self) -> list[SegmentState]:
        """The spans of all segments."""
        return [one for segment in self.whole for one in self._cut(segment)]

    def members(self, whole: Iterator[Member]) -> Iterator[Member]:
        """The spans of each member, with what is known of where they come from."""
        for member in whole:
            for number, (begin, end) in enumerate(grid(len_of(member))):
                told = tuple(self._told(member.provenance, begin, end))
                yield Member(
                    f"{member.name}/{number}",
                    _cut(member.description, begin, end),
                    part(member.state, begin, end),
                    told,
                    end - begin - sum(one.tokens for one in told),
                )

    def _cut(self, segment: SegmentState) -> list[SegmentState]:
        spans = grid(segment.description.tokens)
        if spans[-1][1] != segment.description.tokens:
            raise ValueError(f"{segment.name} does not end at a multiple of {SUB_TOKENS} tokens")
        return [
            SegmentState(
                f"{segment.name}.{number}",
                _cut(segment.description, begin, end),
                part(segment.state, begin, end),
            )
            for number, (begin, end) in enumerate(spans)
        ]

    def _told(self, provenance: Sequence[Provenance], begin: int, end: int) -> Iterator[Provenance]:
        """Of tokens [begin, end), counted from the first; one entry for each span they are from."""
        whole = {segment.description.key: segment for segment in self.whole}
        for told in provenance:
            segment = whole[told.segment]
            shift = told.token - told.source
            for one in self._cut(segment):
                at = one.description.position - segment.description.position + shift
                first = max(begin, told.token, at)
                last = min(end, told.token + told.tokens, at + one.description.tokens)
                if first < last:
                    key = one.description.key
                    yield Provenance(first - begin, last - first, key, first - at, told.delta)


def len_of(member: Member) -> int:
    """Tokens of a member."""
    return member.description.tokens


def _cut(described: SpanDescription, begin: int, end: int) -> SpanDescription:
    key = hashlib.sha256(described.key + begin.to_bytes(4, "little")).digest()
    position = described.position + begin
    return dataclasses.replace(described, key=key, tokens=end - begin, position=position)
