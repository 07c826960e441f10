"""Recipes out of members: exact, or not at all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kmesh.codec.decoder import DecodePlan
from kmesh.codec.description import SpanDescription
from kmesh.codec.memory import Bytes
from kmesh.codec.planning import Planner
from kmesh.codec.provenance import Provenance
from kmesh.codec.recipe import Recipe
from kmesh.codec.records import BLOCK_TOKENS, Form
from kmesh.codec.segments import Base, check_shared, rows_of
from kmesh.codec.sharing import Finder, Match, equal_tokens
from kmesh.codec.turning import Turns
from kmesh.codec.writing import Tables, lay_out, write
from kmesh.errors import RecipeError
from kmesh.kernels.rotary import Rotary

#: A recipe that refers to less than this share of its payload is compared with one without base.
CLEARLY_SHARED = 1 / 16
#: ... and must be smaller than that by this factor to be worth depending on a base.
WORTH = 0.95


@dataclass(frozen=True, slots=True)
class Encoded:
    """A recipe that gave its member back, bit for bit.

    Attributes:
        data: the recipe's bytes.
        recipe: the same, parsed.
        refused: runs with tokens that did not come back at first, and are literal now.
    """

    data: bytes
    recipe: Recipe
    refused: int

    @property
    def depends(self) -> bool:
        """Whether a base is needed: if not, nothing that was worth it was shared."""
        return len(self.recipe.segments) > 0


class Encoder:
    """Encodes members of one family against its base.

    Args:
        base: segments, dense and in the frame in which they were computed.
        rotary: how the model turns its keys; without it, keys are never turned.
        block_tokens: 16, 32 or 64; what must be the same in a row to count as shared where
            there is no provenance.
        form: of the recipes.

    Raises:
        RecipeError: block_tokens is none of these, or the rotary is not of the base's elements.
    """

    def __init__(
        self,
        base: Base,
        rotary: Rotary | None = None,
        *,
        block_tokens: int = BLOCK_TOKENS[0],
        form: Form = Form.ADDRESSABLE,
    ) -> None:
        check_family(base, rotary, block_tokens)
        self._base, self._rotary = base, rotary
        self._block, self._form = block_tokens, form
        self._finder = Finder(base, block_tokens)

    def encode(
        self, member: SpanDescription, payload: Bytes, provenance: Sequence[Provenance] = ()
    ) -> Encoded:
        """A recipe from which the decoder made exactly this payload.

        Args:
            member: what the payload is.
            payload: dense, as ``docs/layout.md`` orders it.
            provenance: what its recovery wrote down. Without any, runs of equal tokens are
                looked for, wherever they are in the base.

        Raises:
            RecipeError: the payload or the provenance contradicts the description.
            RecipeMismatch: the member can't be of this family; names the field.
        """
        rows = rows_of(member, payload)
        check_member(member, self._base)
        encoded, tables = self._attempt(member, rows, provenance, self._base)
        if encoded.depends and tables.referred < CLEARLY_SHARED:
            alone, _ = self._attempt(member, rows, (), Base())
            if len(encoded.data) > WORTH * len(alone.data):
                return alone
        return encoded

    def _attempt(
        self,
        member: SpanDescription,
        rows: npt.NDArray[np.uint8],
        provenance: Sequence[Provenance],
        base: Base,
    ) -> tuple[Encoded, Tables]:
        turns = Turns(self._rotary)
        planner = Planner(base, member, rows, provenance, turns, self._finder_of(base), self._form)
        plans = [planner.plan(run) for run in range(member.runs)]
        literal: dict[int, npt.NDArray[np.intp]] = {}
        while True:
            tables = lay_out(plans, base, turns)
            data = write(member, rows, plans, tables, self._form, self._block)
            recipe = Recipe(data)
            wrong = _wrong_tokens(recipe, rows, base)
            if not wrong:
                return Encoded(data, recipe, len(literal)), tables
            spell_out(wrong, literal)
            for run in wrong:
                plans[run] = planner.plan(run, literal[run])

    def _finder_of(self, base: Base) -> Finder:
        return self._finder if base is self._base else Finder(base, self._block)


def spell_out(
    wrong: Mapping[int, npt.NDArray[np.intp]], literal: dict[int, npt.NDArray[np.intp]]
) -> None:
    """Adds, by run, tokens that did not come back to those that are literal.

    Raises:
        RecipeError: all of a run's were literal already.
    """
    for run, tokens in wrong.items():
        tokens = np.union1d(tokens, literal.get(run, tokens))
        if run in literal and len(tokens) == len(literal[run]):
            raise RecipeError("literals don't come back", field="payload_root")
        literal[run] = tokens


def check_family(base: Base, rotary: Rotary | None, block_tokens: int) -> None:
    """RecipeError if an encoder can't be made of these; see ``Encoder``."""
    if block_tokens not in BLOCK_TOKENS:
        raise RecipeError(f"{block_tokens} is none of {BLOCK_TOKENS}", field="block_tokens")
    if rotary is None:
        return
    for segment in base:
        if segment.description.dtype != rotary.dtype:
            raise RecipeError(f"keys of {rotary.dtype} are turned", field="dtype")
        if segment.description.head_dim < rotary.dim:
            raise RecipeError(f"{rotary.dim} elements are turned", field="pairs")


def check_member(member: SpanDescription, base: Base) -> None:
    """RecipeMismatch or RecipeError if a member can't be of this family; names the field."""
    # A base's segments have the same in common.
    for segment in base.segments[:1]:
        check_shared(member, segment.description)
    if base.find(member.key) is not None:
        raise RecipeError("a segment of the base has it too", field="key")


def _wrong_tokens(
    recipe: Recipe, rows: npt.NDArray[np.uint8], base: Base
) -> dict[int, npt.NDArray[np.intp]]:
    """Decodes, and says for each run which tokens are not the member's."""
    runs, heads, tokens, row_bytes = rows.shape
    # All of it is there already, so there is no bomb to fear.
    plan = DecodePlan(recipe, base, max_bytes=2**63)
    out = np.empty((heads, tokens, row_bytes), dtype=np.uint8)
    wrong = {}
    for run in range(runs):
        plan.run(run, run + 1, out)
        equal = equal_tokens(out, rows[run], Match(0, tokens, 0, 0))
        if not equal.all():
            wrong[run] = np.flatnonzero(~equal)
    return wrong
