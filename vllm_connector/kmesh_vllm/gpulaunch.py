"""What one step restores on a GPU, and what became of it."""

from __future__ import annotations

import logging
from collections import Counter

import numpy as np

from kmesh import _host
from kmesh.kernels.cuda import Memory, Pending, Request
from kmesh.kernels.cuda_rounds import PendingRound
from kmesh.kernels.rounds import BASE, MEMBER, Round
from kmesh_vllm.counts import Counts
from kmesh_vllm.movers import Piece

logger = logging.getLogger("kmesh_vllm")


def round_of(pieces: list[Piece]) -> Round:
    """All that pieces restore, recipes and dense spans, as one round: members in the pieces' order,
    and each base once."""
    counts = [len(piece.records) for piece in pieces]
    members = np.zeros(sum(counts), MEMBER)
    members["part"] = np.concatenate([piece.records for piece in pieces])
    members["request"] = np.repeat(np.arange(len(pieces)), counts)
    # As ``kmesh.kernels.rounds`` has it: what is in host memory is read first.
    members["order"] = np.concatenate([piece.on_gpu for piece in pieces])
    found: dict[bytes, None] = {}
    begin = 0
    for piece, count in zip(pieces, counts, strict=True):
        if piece.recipes is not None:
            members["tables"][begin : begin + count] = piece.recipes.tables
            packed = piece.recipes.bases.tobytes()
            found |= dict.fromkeys(
                packed[at : at + BASE.itemsize] for at in range(0, len(packed), BASE.itemsize)
            )
        begin += count
    bases = np.frombuffer(bytearray(b"".join(found)), BASE)
    kept = tuple(piece.recipes.kept for piece in pieces if piece.recipes is not None)
    return Round(bases, members, [Request(piece.pages) for piece in pieces], kept)


class Launched:
    """What one step restores: a launch for each memory that it comes from, or one for all of it.

    Attributes:
        error: why not everything was started. What was is waited for all the same.
        read_bytes: see ``movers.Moving``; of recipes and their bases what the kernel read.
    """

    def __init__(self, pieces: list[Piece], row_bytes: int, counts: Counts) -> None:
        self._results = [bytes(len(piece.records)) for piece in pieces]
        self._pieces = pieces
        self._row_bytes = row_bytes
        self._counts = counts
        self._launches: list[tuple[Pending, Memory, list[list[int]]]] = []
        self._round: PendingRound | None = None
        #: Bytes of pages that were written, by the way that they came.
        self._moved: Counter[str] = Counter()
        self.error: Exception | None = None
        self.read_bytes = 0

    def add(self, pending: Pending, memory: Memory, owners: list[list[int]]) -> None:
        """A launch; ``owners`` has the piece's number for each load, for each request."""
        self._launches.append((pending, memory, owners))

    def add_round(self, pending: PendingRound) -> None:
        """The launch of all pieces, as ``round_of`` puts them together."""
        self._round = pending

    def done(self) -> bool:
        round = self._round
        return all(p.done() for p, _, _ in self._launches) and (round is None or round.done())

    def statuses(self) -> list[bytes]:
        for pending, memory, owners in self._launches:
            try:
                found = pending.wait()
            except Exception as wrong:
                self.error = self.error or wrong
                continue
            self.read_bytes += pending.read_bytes
            route = "gpu" if memory is Memory.GPU else pending.route.value
            for load, numbers in zip(found, owners, strict=True):
                for status, number in zip(load, numbers, strict=True):
                    self._take(number, memory, status, route)
        self._launches.clear()
        if self._round is not None:
            pending_round, self._round = self._round, None
            self._take_round(pending_round)
        for route, amount in self._moved.items():
            self._counts.add(f"restored_bytes_{route}", amount)
        self._moved.clear()
        if self.error is not None:
            raise self.error
        return self._results

    def _take_round(self, pending: PendingRound) -> None:
        try:
            found = pending.wait()
        except Exception as wrong:
            self.error = self.error or wrong
            return
        self.read_bytes += pending.read_bytes
        codes, begin = np.frombuffer(found.members, np.uint8), 0
        for number, piece in enumerate(self._pieces):
            own = codes[begin : begin + len(piece.records)]
            begin += len(own)
            for memory, here in ((Memory.HOST, ~piece.on_gpu), (Memory.GPU, piece.on_gpu)):
                route = "gpu" if memory is Memory.GPU else pending.route.value
                self._take(number, memory, own[here].tobytes(), route)
        if bad := sum(map(bool, found.bases)):
            logger.warning(
                "%d spans that recipes refer to: their bytes do not match their sums", bad
            )

    def _take(self, number: int, memory: Memory, status: bytes, route: str) -> None:
        piece = self._pieces[number]
        on_gpu = memory is Memory.GPU
        records = piece.part(on_gpu)
        if records is piece.records:
            self._results[number] = status
        else:
            result = np.frombuffer(bytearray(self._results[number]), np.uint8)
            result[piece.on_gpu == on_gpu] = np.frombuffer(status, np.uint8)
            self._results[number] = result.tobytes()
        self._moved[route] += _host.moved_bytes(records, status, self._row_bytes)
