"""Plans of runs whose tokens are compared by a GPU."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import numpy.typing as npt

from kmesh.codec.assignment import LITERAL, XOR, Assignment, Piece, place, referring
from kmesh.codec.description import SpanDescription
from kmesh.codec.encoder import spell_out
from kmesh.codec.passes import Marks, Passes
from kmesh.codec.planning import RunPlan
from kmesh.codec.records import UNIT, XorCode, aligned
from kmesh.errors import RecipeError


class JudgingPlanner(ABC):
    """Plans the runs of one member, and plans them anew when they did not come back.

    Attributes:
        literal: by run, tokens that did not come back and are written out.
    """

    def __init__(self, member: SpanDescription) -> None:
        self._member = member
        self.literal: dict[int, npt.NDArray[np.intp]] = {}

    @abstractmethod
    def plans(self) -> list[RunPlan]:
        """Of all runs, in order."""

    @abstractmethod
    def plan(self, run: int, literal: npt.NDArray[np.intp]) -> RunPlan:
        """Of one run; the tokens ``literal`` are not referred to."""

    def again(self, plans: list[RunPlan], marks: Marks) -> list[RunPlan]:
        """Other plans in place of those that did not come back.

        Raises:
            RecipeError: literals did not, or nothing says which tokens did not.
        """
        tokens = self._member.tokens
        right = _words(np.ones(tokens, dtype=np.bool_))
        runs = np.flatnonzero((marks.equal != right).any(axis=1)).tolist()
        if not runs:
            raise RecipeError("elements differ, but no token does", field="tokens")
        wrong = {run: np.flatnonzero(~_bits(marks.equal[run], tokens)) for run in runs}
        spell_out(wrong, self.literal)
        plans = list(plans)
        for run in runs:
            plans[run] = self.plan(run, self.literal[run])
        return plans


class ExpectingPlanner(JudgingPlanner):
    """Plans runs as their provenance says; where that did not come back, by what the GPU found of
    it, as ``planning.Planner`` does by its own comparison.

    Args:
        expected: pieces of K and of V, in the order of their tokens.
        passes: whose counts are fetched here if they are needed.
    """

    def __init__(
        self, member: SpanDescription, expected: tuple[list[Piece], list[Piece]], passes: Passes
    ) -> None:
        super().__init__(member)
        self._expected, self._passes = expected, passes
        self._marks: Marks | None = None
        self._near: set[int] = set()
        self._counts: npt.NDArray[np.uint32] | None = None
        self._known: dict[tuple[int, bytes], RunPlan] = {}

    def plans(self) -> list[RunPlan]:
        member = self._member
        both = [
            RunPlan(referring(pieces, member.tokens, member.token_bytes))
            for pieces in self._expected
        ]
        return both * (member.runs // 2)

    def again(self, plans: list[RunPlan], marks: Marks) -> list[RunPlan]:
        if self._marks is not None:
            return super().again(plans, marks)
        for plane, plan in enumerate(plans[:2]):
            self._check_literals(plan, marks.equal[plane::2])
        self._marks = marks
        self._near = set(np.unique(np.nonzero(marks.worth)[0]).tolist())
        self._counts = self._passes.counts() if self._near else None
        if not self._near and (marks.equal[2:] == marks.equal[:-2]).all():
            return [self._judged(0), self._judged(1)] * (self._member.runs // 2)
        return [self._judged(run) for run in range(self._member.runs)]

    def plan(self, run: int, literal: npt.NDArray[np.intp]) -> RunPlan:
        assignment = self._assigned(run)
        assignment.literal(literal)
        return RunPlan(self._ops(assignment, XorCode.DENSE))

    def _check_literals(self, plan: RunPlan, equal: npt.NDArray[np.uint32]) -> None:
        """RecipeError if literals of a plan did not come back in some run.

        They were written a moment before they were compared, and no pass before this one tells
        whether it is the payload that is another now.
        """
        literal = np.repeat(plan.ops["kind"] == LITERAL, plan.ops["tokens"])
        if (_words(literal) & ~equal).any():
            raise RecipeError(
                "literals don't come back: the payload changed while it was encoded",
                field="payload_root",
            )

    def _judged(self, run: int) -> RunPlan:
        """By what the first pass found."""
        assert self._marks is not None
        if run not in self._near:
            # Layers mostly share the same tokens.
            key = run % 2, self._marks.equal[run].tobytes()
            plan = self._known.get(key)
            if plan is None:
                plan = self._known[key] = RunPlan(self._ops(self._assigned(run), XorCode.DENSE))
            return plan
        assignment = self._assigned(run)
        worth = _bits(self._marks.worth[run], self._member.tokens)
        for piece in self._expected[run % 2]:
            assignment.refer(piece, worth[piece.token : piece.token + piece.tokens], XOR)
        ops = self._ops(assignment, XorCode.SPARSE)
        sizes = ops["size"].astype(np.int64)
        for number in np.flatnonzero(ops["kind"] == XOR).tolist():
            first, count = int(ops[number]["token"]), int(ops[number]["tokens"])
            sizes[number] = self._sparse_units(run, first, count)
        place(ops, sizes)
        return RunPlan(ops)

    def _assigned(self, run: int) -> Assignment:
        assert self._marks is not None
        equal = _bits(self._marks.equal[run], self._member.tokens)
        assignment = Assignment(self._member.tokens)
        for piece in self._expected[run % 2]:
            assignment.refer(piece, equal[piece.token : piece.token + piece.tokens])
        return assignment

    def _ops(self, assignment: Assignment, code: XorCode) -> npt.NDArray[np.void]:
        return assignment.ops(self._member.token_bytes, code)

    def _sparse_units(self, run: int, first: int, tokens: int) -> int:
        """What a sparse difference of those tokens takes."""
        assert self._counts is not None
        size = self._member.element_bytes
        elements = tokens * self._member.token_bytes // size
        changed = int(self._counts[run, first : first + tokens].sum())
        return aligned(aligned(-(-elements // 8), 4) + changed * size, UNIT) // UNIT


class AlonePlanner(JudgingPlanner):
    """All of a member literal."""

    def __init__(self, member: SpanDescription) -> None:
        super().__init__(member)
        self._plan = RunPlan(referring((), member.tokens, member.token_bytes))

    def plans(self) -> list[RunPlan]:
        return [self._plan] * self._member.runs

    def plan(self, _run: int, _literal: npt.NDArray[np.intp]) -> RunPlan:
        return self._plan


def _words(which: npt.NDArray[np.bool_]) -> npt.NDArray[np.uint32]:
    """A mask of bits."""
    mask = np.zeros(-(-len(which) // 32), dtype=np.uint32)
    packed = np.packbits(which, bitorder="little")
    mask.view(np.uint8)[: len(packed)] = packed
    return mask


def _bits(words: npt.NDArray[np.uint32], count: int) -> npt.NDArray[np.bool_]:
    """The first ``count`` bits of a mask."""
    return np.unpackbits(words.view(np.uint8), count=count, bitorder="little").view(np.bool_)
