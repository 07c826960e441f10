"""What a round means, in numpy, for memory that the CPU can address. Slow and plain."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kmesh.kernels import reference
from kmesh.kernels.host import PagedLayout, Status
from kmesh.kernels.plan import RECORD, Request, check
from kmesh.kernels.rounds import BaseSpan, Member, Place, RoundStatuses
from kmesh.layout import TILE_BYTES, tiles

if TYPE_CHECKING:
    from kmesh.codec.recipe import RecipeTables

Bytes = npt.NDArray[np.uint8]

_LITERAL = 1


class _Source:
    """A payload or a recipe's file, which of its bytes are wanted, and by whom."""

    def __init__(self, place: Place, length: int) -> None:
        self.data = reference.at(place.address, length)
        self._sums = reference.at(place.sums_address, 8 * tiles(length)).view(np.uint64)
        self._root = place.root
        self.wanted = np.zeros(length, dtype=bool)

    def status(self) -> Status:
        """By the sums of its wanted tiles."""
        if not self.wanted.any():
            return Status.DONE
        if reference.fold(self._sums.tolist()) != self._root:
            return Status.BAD_ROOT
        wanted = np.add.reduceat(self.wanted, np.arange(0, len(self.data), TILE_BYTES), dtype=int)
        bad = (wanted > 0) & (reference.tile_sums(self.data) != self._sums)
        return Status.BAD_TILE if bad.any() else Status.DONE


@dataclass
class _Move:
    """Rows of a source, at byte ``at`` with ``row`` bytes each, for tokens of a run and head."""

    source: _Source
    at: int
    run: int
    head: int
    token: int
    tokens: int
    turn: tuple[bool, npt.NDArray[np.float32]] | None = None


def restore(
    layout: PagedLayout,
    bases: Sequence[BaseSpan],
    members: Sequence[Member],
    requests: Sequence[Request],
) -> RoundStatuses:
    """Writes what members want to their pages, those left out that are bad."""
    sources: dict[Any, _Source] = {}
    codes, moves = [], []
    for member in members:
        code, own = _planned(layout, bases, member, requests[member.request], sources)
        codes.append(code)
        moves.append(own)
    for own in moves:
        for move in own:
            move.source.wanted[move.at : move.at + move.tokens * layout.row_bytes] = True
    verdicts = {id(source): source.status() for source in sources.values()}
    for number, own in enumerate(moves):
        worst = max((verdicts[id(move.source)] for move in own), default=Status.DONE)
        codes[number] = codes[number] or worst
        if codes[number] == Status.DONE:
            _carry_out(layout, members[number], requests[members[number].request], own)
    of_bases = [
        max((verdicts[id(s)] for key, s in sources.items() if key[0] == number), default=0)
        for number in range(len(bases))
    ]
    return RoundStatuses(bytes(codes), bytes(of_bases))


def _planned(
    layout: PagedLayout,
    bases: Sequence[BaseSpan],
    member: Member,
    request: Request,
    sources: dict[Any, _Source],
) -> tuple[int, list[_Move]]:
    """(status before anything is read, what is moved)."""
    part, recipe = member.part, member.tables
    rows = 2 * part.src_layers * part.src_heads * part.tokens
    dense = part if recipe is None else replace(part, length=rows * layout.row_bytes)
    packed = np.frombuffer(dense.pack(), dtype=RECORD)
    code = int(check(layout, packed, request)[0])
    if code or part.token_begin == part.token_end or not part.heads or not part.layers:
        return code, []
    place = Place(part.address, part.sums_address, part.root, member.memory)
    rectangle = (
        part.src_head_begin, part.dst_head_begin, part.heads,
        part.src_layer_begin, part.dst_layer_begin, part.layers,
    )  # fmt: skip

    def source(owner: int, place: Place, length: int) -> _Source:
        # A base that is a dense member's payload too is one source, whoever names it.
        for key, one in sources.items():
            if key[1:] == (place, length, rectangle):
                if key[0] == -1 and owner >= 0:
                    sources[(owner, *key[1:])] = one
                return one
        return sources.setdefault((owner, place, length, rectangle), _Source(place, length))

    runs = range(2 * part.src_layer_begin, 2 * (part.src_layer_begin + part.layers))
    heads = range(part.src_head_begin, part.src_head_begin + part.heads)
    row = layout.row_bytes
    if recipe is None:
        of = source(-1, place, part.length)
        return 0, [
            _Move(
                of, ((run * part.src_heads + head) * part.tokens + part.token_begin) * row,
                run, head, part.token_begin, part.token_end - part.token_begin,
            )
            for run in runs for head in heads
        ]  # fmt: skip
    what = recipe.description
    if (what.row_bytes, what.tokens) != (row, part.tokens) or (
        what.shard.heads, what.shard.layers, recipe.head["file_bytes"],
    ) != (part.src_heads, part.src_layers, part.length):  # fmt: skip
        return Status.BAD_RECORD, []
    found = [_base_of(recipe, number, bases) for number in range(len(recipe.segments))]
    if None in found:
        return Status.BAD_RECORD, []
    moves = []
    for run in runs:
        for op, begin, count in _ops(recipe, run, part.token_begin, part.token_end):
            for head in heads:
                token = int(op["token"]) + begin
                if op["kind"] == _LITERAL:
                    of = source(-1, place, part.length)
                    first = recipe.literals_at + int(recipe.runs[run]["offset"])
                    first += 16 * int(op["data"])
                    at = first + (head * int(op["tokens"]) + begin) * row
                    moves.append(_Move(of, at, run, head, token, count))
                    continue
                number = found[int(op["segment"])]
                assert number is not None
                base = bases[number]
                tokens = base.description.tokens
                of = source(number, base.place, base.description.payload_bytes)
                at = ((run * part.src_heads + head) * tokens + int(op["source"]) + begin) * row
                moves.append(_Move(of, at, run, head, token, count, _turn(recipe, op)))
    return 0, moves


def _ops(
    recipe: RecipeTables, run: int, begin: int, end: int
) -> Iterator[tuple[np.void, int, int]]:
    """(op, first token of it, how many) of a run, for member tokens [begin, end)."""
    listed = recipe.lists[int(recipe.runs[run]["list"])]
    for op in recipe.ops[int(listed["first"]) : int(listed["first"]) + int(listed["count"])]:
        first, behind = int(op["token"]), int(op["token"]) + int(op["tokens"])
        low, high = max(first, begin), min(behind, end)
        if low < high:
            yield op, low - first, high - low


def _turn(recipe: RecipeTables, op: np.void) -> tuple[bool, npt.NDArray[np.float32]] | None:
    if not op["turn"]:
        return None
    turn = recipe.turns[int(op["turn"]) - 1]
    return bool(turn["interleaved"]), turn["table"]


def _base_of(recipe: RecipeTables, number: int, bases: Sequence[BaseSpan]) -> int | None:
    """Which base a recipe's segment is."""
    named, like = recipe.segments[number], recipe.description
    for at, base in enumerate(bases):
        what = base.description
        same = (what.key, base.place.root, what.generation, what.tokens, what.position) == (
            named["key"].tobytes(), *(int(named[n]) for n in ("root", "generation", "tokens")),
            int(named["position"]),
        )  # fmt: skip
        family = not what.differing(like, "namespace", "dtype", "shard", "head_dim")
        if same and family and base.digest in (None, named["digest"].tobytes()):
            return at
    return None


def _carry_out(
    layout: PagedLayout, member: Member, request: Request, moves: Sequence[_Move]
) -> None:
    part, row = member.part, layout.row_bytes
    for move in moves:
        size = move.tokens * row
        rows = np.array(move.source.data[move.at : move.at + size]).reshape(-1, row)
        if move.turn is not None:
            assert member.tables is not None
            rows = reference.turn_by(rows, move.turn[1], *_how(member.tables, move.turn[0]))
        at = np.arange(move.token, move.token + move.tokens) + part.position + request.shift
        if request.by_slot:
            blocks, slots = np.divmod(np.asarray(request.pages)[at], layout.block_tokens)
        else:
            blocks = np.asarray(request.pages)[at // layout.block_tokens]
            slots = at % layout.block_tokens
        layer = move.run // 2 - part.src_layer_begin + part.dst_layer_begin
        head = move.head - part.src_head_begin + part.dst_head_begin
        reference.plane(layout, layer, move.run % 2)[blocks, head, slots] = rows


def _how(recipe: RecipeTables, interleaved: bool) -> tuple[bool, str]:
    return interleaved, recipe.description.dtype
