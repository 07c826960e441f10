"""Decides for each run of a member where its tokens come from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from kmesh.codec.assignment import LITERAL, REF, XOR, Assignment, Piece, place, sparse
from kmesh.codec.cold import freeze
from kmesh.codec.description import SpanDescription
from kmesh.codec.provenance import Provenance, locate
from kmesh.codec.records import TURN_KERNEL, UNIT, Form, XorCode
from kmesh.codec.segments import Base
from kmesh.codec.sharing import Finder, Match, equal_tokens
from kmesh.codec.turning import Turns


@dataclass(frozen=True)
class RunPlan:
    """The ops of one run, and the data of those that are differences, by number of the op.

    ``ops`` name segments of the base and turns of the member, not of the recipe.
    """

    ops: npt.NDArray[np.void]
    differences: dict[int, bytes] = field(default_factory=dict)

    def write(self, rows: npt.NDArray[np.uint8], out: npt.NDArray[np.uint8]) -> None:
        """The run's data, of rows [head, token, row_bytes], to ``out``, which holds zeros."""
        heads, _, row_bytes = rows.shape
        for number, at, token, tokens, literal in self._written:
            if literal:
                size = heads * tokens * row_bytes
                into = out[at : at + size].reshape(heads, tokens, row_bytes)
                into[...] = rows[:, token : token + tokens]
            else:
                data = self.differences[number]
                out[at : at + len(data)] = np.frombuffer(data, dtype=np.uint8)

    @cached_property
    def _written(self) -> list[tuple[int, int, int, int, bool]]:
        """Ops that hold data: number, first byte, first token, tokens, whether literal."""
        numbers = np.flatnonzero(self.ops["size"])
        ops = self.ops[numbers]
        at = ops["data"].astype(np.int64) * UNIT
        literal = ops["kind"] == LITERAL
        columns = (numbers, at, ops["token"], ops["tokens"], literal)
        return list(zip(*(column.tolist() for column in columns), strict=True))

    @cached_property
    def length(self) -> int:
        """Bytes of its data."""
        last = self.ops[-1]
        return (int(last["data"]) + int(last["size"])) * UNIT

    @cached_property
    def pieces(self) -> list[Piece]:
        """What it refers to as it is."""
        return [
            Piece(*(int(op[name]) for name in ("token", "tokens", "segment", "source")))
            for op in self.ops
            if op["kind"] == REF
        ]


def expected_pieces(
    provenance: Sequence[Provenance], member: SpanDescription, base: Base, turns: Turns
) -> tuple[list[Piece], list[Piece]]:
    """What runs of K, and what runs of V are said to be made from; turns are added as needed.

    Raises:
        RecipeError: as ``provenance.locate``; or keys are turned, and nothing says how.
    """
    keys: list[Piece] = []
    values: list[Piece] = []
    for piece, given in locate(provenance, member, base):
        values.append(piece)
        if not given.delta:
            keys.append(piece)
        elif given.kernel == TURN_KERNEL:
            given_by = (piece.token, piece.tokens, piece.segment, piece.source)
            keys.append(Piece(*given_by, turns.number(given.delta)))
    return keys, values


class Planner:
    """Plans the runs of one member, in order.

    Args:
        base, member: of one family.
        rows: the member's payload [run, head, token, row_bytes].
        provenance: where tokens were recovered from; without any, sharing is looked for.
        turns: of the member; those that are needed are added.
        finder: of the base.
        form: what differences are written for.
    """

    def __init__(
        self,
        base: Base,
        member: SpanDescription,
        rows: npt.NDArray[np.uint8],
        provenance: Sequence[Provenance],
        turns: Turns,
        finder: Finder,
        form: Form,
    ) -> None:
        self._base, self._member, self._rows = base, member, rows
        self._turns, self._finder, self._form = turns, finder, form
        self._given = bool(provenance)
        self._expected = expected_pieces(provenance, member, base, turns)
        # Most runs of a member share the same tokens, so they have the same ops.
        self._known: dict[bytes, RunPlan] = {}
        # Where predicted rows differ from the member's, and what keys become when turned.
        self._predicted = np.empty(rows.shape[1:], dtype=np.uint8)

    def plan(self, run: int, literal: npt.NDArray[np.intp] | None = None) -> RunPlan:
        """Of one run; the tokens ``literal`` are not to be referred to, whatever they hold."""
        expected, rows = self._expected[run % 2], self._rows[run]
        equal = [self._compare(run, piece) for piece in expected]
        assignment = Assignment(self._member.tokens)
        for piece, which in zip(expected, equal, strict=True):
            assignment.refer(piece, which)
        if literal is not None:
            assignment.literal(literal)
        elif not self._given:
            self._search(run, rows, assignment)
        elif not all(bool(which.all()) for which in equal):
            differing = self._differences(run, rows, expected, equal, assignment)
            if differing is not None:
                return differing
        return self._plan_of(assignment)

    def _plan_of(self, assignment: Assignment) -> RunPlan:
        """A plan without differences."""
        identity = assignment.identity()
        plan = self._known.get(identity)
        if plan is None:
            plan = RunPlan(assignment.ops(self._member.token_bytes, XorCode.DENSE))
            self._known[identity] = plan
        return plan

    def _compare(self, run: int, piece: Piece) -> npt.NDArray[np.bool_]:
        """Which tokens of a piece are what it says."""
        source = self._base.segments[piece.segment].rows[run]
        match = Match(piece.token, piece.tokens, piece.segment, piece.source)
        if not piece.turn:
            return equal_tokens(source, self._rows[run], match)
        self._predict(source, piece)
        return equal_tokens(self._predicted, self._rows[run], replace(match, source=piece.token))

    def _predict(self, source: npt.NDArray[np.uint8], piece: Piece) -> None:
        """Writes what a piece says its tokens are to their place in ``_predicted``."""
        for head in range(len(source)):
            rows = source[head, piece.source : piece.source + piece.tokens]
            out = self._predicted[head, piece.token : piece.token + piece.tokens]
            if piece.turn:
                self._turns.turn(piece.turn, rows, out)
            else:
                out[...] = rows

    def _search(self, run: int, rows: npt.NDArray[np.uint8], assignment: Assignment) -> None:
        """Looks for what is not accounted for; the next layer is expected to share it likewise."""
        for begin, end in assignment.gaps():
            for match in self._finder.find(run, rows, begin, end):
                piece = Piece(match.token, match.tokens, match.segment, match.source)
                assignment.refer(piece, np.ones(match.tokens, dtype=np.bool_))
        self._expected[run % 2][:] = self._plan_of(assignment).pieces

    # ---- differences ------------------------------------------------------------

    def _differences(
        self,
        run: int,
        rows: npt.NDArray[np.uint8],
        expected: list[Piece],
        equal: list[npt.NDArray[np.bool_]],
        assignment: Assignment,
    ) -> RunPlan | None:
        """The run's plan with differences for tokens that are nearly what is expected, if any."""
        for piece in expected:
            if not piece.turn:
                self._predict(self._base.segments[piece.segment].rows[run], piece)
        other = [~one for one in equal]
        at = np.concatenate(
            [piece.token + np.flatnonzero(one) for piece, one in zip(expected, other, strict=True)]
        )
        difference = self._predicted[:, at] ^ rows[:, at]
        code = XorCode.SPARSE if self._form is Form.ADDRESSABLE else XorCode.DENSE
        worth = self._worth(difference, rows[:, at], code)
        if not worth.any():
            return None
        done = 0
        for piece, one in zip(expected, other, strict=True):
            count = int(one.sum())
            which = one.copy()
            which[np.flatnonzero(one)] = worth[done : done + count]
            assignment.refer(piece, which, XOR)
            done += count
        ops = assignment.ops(self._member.token_bytes, code)
        data: dict[int, bytes] = {}
        for number in np.flatnonzero(ops["kind"] == XOR).tolist():
            first, count = int(ops[number]["token"]), int(ops[number]["tokens"])
            begin = int(np.searchsorted(at, first))
            part = difference[:, begin : begin + count]
            data[number] = self._written_out(part, code)
        sizes = ops["size"].astype(np.int64)
        if code is XorCode.SPARSE:
            for number, written in data.items():
                sizes[number] = len(written) // UNIT
        place(ops, sizes)
        return RunPlan(ops, data)

    def _written_out(self, difference: npt.NDArray[np.uint8], code: XorCode) -> bytes:
        part = np.ascontiguousarray(difference)
        sparsely = code is XorCode.SPARSE
        return sparse(part, self._member.element_bytes) if sparsely else part.tobytes()

    def _worth(
        self, difference: npt.NDArray[np.uint8], rows: npt.NDArray[np.uint8], code: XorCode
    ) -> npt.NDArray[np.bool_]:
        """For which tokens the difference takes clearly less than the token."""
        size, tokens = self._member.element_bytes, difference.shape[1]
        if code is XorCode.SPARSE:
            elements = difference.reshape(*difference.shape[:2], -1, size)
            changed = elements.any(axis=3).sum(axis=(0, 2))
            total = elements.shape[0] * elements.shape[2]
            worth: npt.NDArray[np.bool_] = changed * size + total / 8 <= total * size * 7 / 8
            return worth
        packed = [len(freeze([np.ravel(one)], size)[1]) for one in (difference, rows)]
        return np.full(tokens, packed[0] < packed[1], dtype=np.bool_)
