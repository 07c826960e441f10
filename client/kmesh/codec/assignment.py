"""Where each token of one run comes from, and the ops that say so."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kmesh.codec.records import OP, UNIT, Op, XorCode, aligned

#: As plain numbers: members of an enum are slow to look up.
LITERAL, REF, REF_ROT, XOR = (int(op) for op in (Op.LITERAL, Op.REF, Op.REF_ROT, Op.XOR))


#: A record of ``OP``.
_OP = struct.Struct("<2BH7I")


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens [token, token + tokens) are said to be those of a segment, from ``source`` on.

    Attributes:
        segment: number in the base.
        turn: number of the turn by which keys got here, 0 for none.
    """

    token: int
    tokens: int
    segment: int
    source: int
    turn: int = 0


class Assignment:
    """One entry for each token; all are literal at first."""

    def __init__(self, tokens: int) -> None:
        self.kind = np.full(tokens, LITERAL, dtype=np.uint8)
        self.segment = np.zeros(tokens, dtype=np.uint32)
        self.shift = np.zeros(tokens, dtype=np.int64)
        self.turn = np.zeros(tokens, dtype=np.uint16)

    def refer(self, piece: Piece, which: npt.NDArray[np.bool_], kind: int | None = None) -> None:
        """Those tokens of a piece are made from its segment: as they are, unless ``kind`` says."""
        at = piece.token + np.flatnonzero(which)
        self.kind[at] = kind or (REF_ROT if piece.turn else REF)
        self.segment[at] = piece.segment
        self.shift[at] = piece.source - piece.token
        self.turn[at] = piece.turn

    def literal(self, at: npt.NDArray[np.intp]) -> None:
        """Those tokens are written out."""
        self.kind[at] = LITERAL
        for column in (self.segment, self.shift, self.turn):
            column[at] = 0

    def gaps(self) -> list[tuple[int, int]]:
        """Ranges of literal tokens."""
        literal = np.concatenate(([False], self.kind == LITERAL, [False]))
        edges = np.flatnonzero(literal[1:] != literal[:-1]).tolist()
        return list(zip(edges[::2], edges[1::2], strict=True))

    def identity(self) -> bytes:
        """The same for assignments that are the same."""
        columns = (self.kind, self.segment, self.shift, self.turn)
        return b"".join(column.tobytes() for column in columns)

    def ops(self, token_bytes: int, code: XorCode) -> npt.NDArray[np.void]:
        """As few records as say it; data is where it is if nothing is sparse."""
        columns = (self.kind, self.segment, self.shift, self.turn)
        change = np.zeros(len(self.kind) - 1, dtype=np.bool_)
        for column in columns:
            change |= column[1:] != column[:-1]
        first = np.concatenate(([0], np.flatnonzero(change) + 1))
        ops = np.zeros(len(first), dtype=OP)
        ops["kind"], ops["segment"] = self.kind[first], self.segment[first]
        ops["turn"], ops["token"] = self.turn[first], first
        ops["tokens"] = np.diff(first, append=len(self.kind))
        referring = ops["kind"] != LITERAL
        ops["source"] = np.where(referring, first + self.shift[first], 0)
        ops["code"][ops["kind"] == XOR] = code
        holds = (ops["kind"] == LITERAL) | (ops["kind"] == XOR)
        place(ops, np.where(holds, units(ops["tokens"], token_bytes), 0))
        return ops


def referring(pieces: Sequence[Piece], tokens: int, token_bytes: int) -> npt.NDArray[np.void]:
    """The ops of ``Assignment`` if every token of every piece is what it is said to be.

    Args:
        pieces: in the order of their tokens, of which each is in one at most.
    """
    ops: list[list[int]] = []
    data = end = 0

    def literal(until: int) -> None:
        nonlocal data
        if until > end:
            size = -(-(until - end) * token_bytes // UNIT)
            ops.append([LITERAL, 0, 0, 0, end, until - end, 0, data, size, 0])
            data += size

    before: tuple[int, ...] = ()
    for piece in pieces:
        literal(piece.token)
        same = piece.segment, piece.turn, piece.source - piece.token
        if piece.token == end and same == before:
            ops[-1][5] += piece.tokens
        else:
            kind = REF_ROT if piece.turn else REF
            given = (piece.segment, piece.token, piece.tokens, piece.source)
            ops.append([kind, 0, piece.turn, *given, data, 0, 0])
        before, end = same, piece.token + piece.tokens
    literal(tokens)
    packed = b"".join([_OP.pack(*op) for op in ops])
    return np.frombuffer(bytearray(packed), dtype=OP)


def units(tokens: npt.NDArray[np.uint32], token_bytes: int) -> npt.NDArray[np.int64]:
    """Of the data of so many tokens, written out."""
    return (tokens.astype(np.int64) * token_bytes + UNIT - 1) // UNIT


def place(ops: npt.NDArray[np.void], sizes: npt.NDArray[np.int64]) -> None:
    """Gives each op its units of data, one behind the other."""
    ops["size"] = sizes
    ops["data"] = np.cumsum(sizes) - sizes


def sparse(difference: npt.NDArray[np.uint8], element_bytes: int) -> bytes:
    """A difference as a bitmap of its elements and those that are not zero, filled to units."""
    elements = difference.reshape(-1, element_bytes)
    there = elements.any(axis=1)
    bitmap = np.packbits(there, bitorder="little").tobytes()
    data = bitmap.ljust(aligned(len(bitmap), 4), b"\0") + elements[there].tobytes()
    return data.ljust(aligned(len(data), UNIT), b"\0")
