"""Plans of runs whose tokens were compared by a GPU."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kmesh.codec.assignment import XOR, Assignment, Piece, place
from kmesh.codec.description import SpanDescription
from kmesh.codec.passes import Found, Passes
from kmesh.codec.planning import RunPlan
from kmesh.codec.records import UNIT, XorCode, aligned


class JudgedPlanner:
    """Plans runs by what the GPU found, as ``planning.Planner`` does by its own comparison.

    Args:
        expected: pieces of K and of V.
        found: of the pass that compared; its counts are fetched here if they are needed.
    """

    def __init__(
        self,
        member: SpanDescription,
        expected: tuple[list[Piece], list[Piece]],
        found: Found,
        passes: Passes,
    ) -> None:
        self._member, self._expected, self._found = member, expected, found
        self._near = set(np.unique(np.nonzero(found.worth)[0]).tolist())
        self._counts = passes.counts() if self._near else None
        self._known: dict[tuple[int, bytes], RunPlan] = {}

    def plans(self) -> list[RunPlan]:
        """Of all runs, in order."""
        equal, runs = self._found.equal, self._member.runs
        if not self._near and (equal[2:] == equal[:-2]).all():
            return [self.plan(0), self.plan(1)] * (runs // 2)
        return [self.plan(run) for run in range(runs)]

    def plan(self, run: int, literal: npt.NDArray[np.intp] | None = None) -> RunPlan:
        """Of one run; the tokens ``literal`` are not referred to."""
        if literal is None and run not in self._near:
            # Layers mostly share the same tokens.
            key = run % 2, self._found.equal[run].tobytes()
            plan = self._known.get(key)
            if plan is None:
                plan = self._known[key] = RunPlan(self._ops(self._assigned(run), XorCode.DENSE))
            return plan
        assignment = self._assigned(run)
        if literal is not None:
            assignment.literal(literal)
            return RunPlan(self._ops(assignment, XorCode.DENSE))
        worth = bits(self._found.worth[run], self._member.tokens)
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
        equal = bits(self._found.equal[run], self._member.tokens)
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


class AlonePlanner:
    """All of a member literal."""

    def __init__(self, member: SpanDescription) -> None:
        ops = Assignment(member.tokens).ops(member.token_bytes, XorCode.DENSE)
        self._plan, self._runs = RunPlan(ops), member.runs

    def plans(self) -> list[RunPlan]:
        return [self._plan] * self._runs

    def plan(self, _run: int, _literal: npt.NDArray[np.intp] | None = None) -> RunPlan:
        return self._plan


def bits(words: npt.NDArray[np.uint32], count: int) -> npt.NDArray[np.bool_]:
    """The first ``count`` bits of a mask."""
    return np.unpackbits(words.view(np.uint8), count=count, bitorder="little").view(np.bool_)
