"""What a recovery wrote down: which tokens of a member it took from where."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kmesh.codec.assignment import Piece
from kmesh.codec.description import SpanDescription
from kmesh.codec.records import TURN_KERNEL
from kmesh.codec.segments import Base
from kmesh.errors import RecipeError


@dataclass(frozen=True, slots=True)
class Provenance:
    """Tokens [token, token + tokens) of a member were recovered from a segment.

    Some of them may have been recomputed since: the encoder compares.

    Attributes:
        segment: key of the segment.
        source: token of the segment from which ``token`` was recovered.
        delta: positions by which its keys were turned.
        kernel: version of the arithmetic that turned them.
    """

    token: int
    tokens: int
    segment: bytes
    source: int
    delta: int
    kernel: int = TURN_KERNEL


def locate(
    provenance: Sequence[Provenance], member: SpanDescription, base: Base
) -> list[tuple[Piece, Provenance]]:
    """Provenance in the order of a member's tokens, with numbers of segments for their keys.

    Raises:
        RecipeError: tokens are not the member's or not the segment's, two entries have a token in
            common, or the distance is not the one between the two frames.
    """
    located, end = [], 0
    for given in sorted(provenance, key=lambda one: one.token):
        number = base.number(given.segment)
        if number is None:
            raise RecipeError("is not in the base", field="provenance.segment")
        segment = base.segments[number].description
        if given.token < end or given.tokens < 1 or given.token + given.tokens > member.tokens:
            raise RecipeError(
                f"tokens {given.token}:{given.token + given.tokens} overlap others or are not"
                f" those of a member of {member.tokens}",
                field="provenance.token",
            )
        if given.source < 0 or given.source + given.tokens > segment.tokens:
            raise RecipeError(
                f"tokens {given.source}:{given.source + given.tokens} are not those of a segment"
                f" of {segment.tokens}",
                field="provenance.source",
            )
        distance = member.position + given.token - segment.position - given.source
        if given.delta != distance:
            raise RecipeError(
                f"{given.delta} is not the distance, {distance}", field="provenance.delta"
            )
        end = given.token + given.tokens
        located.append((Piece(given.token, given.tokens, number, given.source), given))
    return located
