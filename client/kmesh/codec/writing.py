"""Recipes as bytes."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from kmesh.codec import records
from kmesh.codec.assignment import LITERAL, REF, REF_ROT
from kmesh.codec.cold import freeze
from kmesh.codec.description import SpanDescription
from kmesh.codec.memory import root_of
from kmesh.codec.planning import RunPlan
from kmesh.codec.records import Form
from kmesh.codec.segments import Base
from kmesh.codec.turning import Turns
from kmesh.kernels.rotary import ELEMENTS

#: A record of ``records.SEGMENT``.
_SEGMENT = struct.Struct("<32s32s2Q2I8x")


@dataclass(frozen=True)
class Tables:
    """What is in front of a recipe's literals, but for its head.

    Attributes:
        segments: records of those of the base that are used.
        used: their numbers in the base.
        turns, lists, ops, runs: as in the file.
    """

    segments: npt.NDArray[np.void]
    used: npt.NDArray[np.uint16]
    turns: npt.NDArray[np.void]
    lists: npt.NDArray[np.void]
    ops: npt.NDArray[np.void]
    runs: npt.NDArray[np.void]

    @cached_property
    def literal_bytes(self) -> int:
        """Of the literal area, as ops see it."""
        return int(self.runs["offset"][-1]) + int(self.runs["length"][-1])

    @cached_property
    def referred(self) -> float:
        """Share of the payload that is not written out in any way."""
        ops, lists = self.ops, self.lists
        plain = (ops["kind"] == REF) | (ops["kind"] == REF_ROT)
        of_list = np.add.reduceat(plain * ops["tokens"].astype(np.int64), lists["first"])
        tokens = int(ops["tokens"][: lists["count"][0]].sum())
        return float(of_list[self.runs["list"]].sum()) / (tokens * len(self.runs))

    @cached_property
    def offsets(self) -> dict[str, int]:
        """Where in the file each table begins, and the literals."""
        found, at = {}, records.HEAD.size
        for name in ("segments", "turns", "lists", "ops", "runs"):
            found[name] = at
            at += getattr(self, name).nbytes
        return {**found, "literals": records.aligned(at, records.RUN_ALIGN)}

    def tobytes(self, chunks: npt.NDArray[np.void]) -> bytes:
        """The file from behind its head to its literals."""
        tables = (self.segments, self.turns, self.lists, self.ops, self.runs, chunks)
        joined = b"".join(one.tobytes() for one in tables)
        size = records.HEAD.size + len(joined)
        return joined.ljust(records.aligned(size, records.RUN_ALIGN) - records.HEAD.size, b"\0")


def lay_out(plans: Sequence[RunPlan], base: Base, turns: Turns) -> Tables:
    """The tables of a member's plans; only the segments and turns that they use are in them."""
    lists, ops, numbers = _lists(plans)
    segments = _renumber(ops, "segment", ops["kind"] != LITERAL)
    used = _renumber(ops, "turn", ops["turn"] != 0, first=1)
    table = turns.records(used) if len(used) else np.empty(0, records.turn_record(0))
    lengths = np.array([plan.length for plan in plans])
    spans = -(-lengths // records.RUN_ALIGN) * records.RUN_ALIGN
    runs = np.zeros(len(plans), dtype=records.RUN)
    runs["list"], runs["length"], runs["offset"] = numbers, lengths, np.cumsum(spans) - spans
    return Tables(_segments(base, segments), segments, table, lists, ops, runs)


def write(
    member: SpanDescription,
    rows: npt.NDArray[np.uint8],
    plans: Sequence[RunPlan],
    tables: Tables,
    form: Form,
    block_tokens: int,
) -> bytes:
    """A member's recipe, by its plans and their tables."""
    runs, literal_bytes = tables.runs, tables.literal_bytes
    literals = np.zeros(literal_bytes, dtype=np.uint8)
    for number, plan in enumerate(plans):
        begin = int(runs["offset"][number])
        plan.write(rows[number], literals[begin : begin + plan.length])
    chunks, stored = np.empty(0, records.CHUNK), literals
    if form is Form.COLD:
        ends = [*runs["offset"][1:].tolist(), literal_bytes]
        parts = [literals[int(a) : b] for a, b in zip(runs["offset"], ends, strict=True)]
        chunks, packed = freeze(parts, member.element_bytes)
        stored = np.frombuffer(packed, dtype=np.uint8) if packed else literals
    middle = tables.tobytes(chunks)
    given = (len(chunks), len(stored), root_of(rows), root_of(middle), root_of(stored))
    head = head_of(member, tables, form, block_tokens, len(middle), *given)
    return b"".join((head, middle, stored.data))


def head_of(
    member: SpanDescription,
    tables: Tables,
    form: Form,
    block_tokens: int,
    tables_bytes: int,
    chunks: int,
    stored_bytes: int,
    payload_root: int,
    tables_root: int,
    stored_root: int,
) -> bytes:
    """The head of a recipe of which all else is known."""
    fields = {
        "magic": records.MAGIC,
        "version": records.VERSION,
        "form": form,
        "dtype": ELEMENTS[member.dtype],
        "block_tokens": block_tokens,
        "tokens": member.tokens,
        "position": member.position,
        "layer_begin": member.shard.layer_begin,
        "layer_end": member.shard.layer_end,
        "head_begin": member.shard.head_begin,
        "head_end": member.shard.head_end,
        "head_dim": member.head_dim,
        "segments": len(tables.segments),
        "turns": len(tables.turns),
        "pairs": tables.turns.dtype["table"].shape[0] if len(tables.turns) else 0,
        "ops": len(tables.ops),
        "lists": len(tables.lists),
        "chunks": chunks,
        "literal_bytes": tables.literal_bytes,
        "stored_bytes": stored_bytes,
        "file_bytes": records.HEAD.size + tables_bytes + stored_bytes,
        "generation": member.generation,
        "namespace": member.namespace,
        "key": member.key,
        "payload_root": payload_root,
        "tables_root": tables_root,
        "stored_root": stored_root,
    }
    return head_bytes(fields)


def head_bytes(fields: dict[str, bytes | int]) -> bytes:
    """A head with its own root; fields that are not given are 0."""
    values = [fields.get(name, 0) for name in records.HEAD_FIELDS]
    summed = records.HEAD.pack(*values)[: records.HEAD_SUMMED]
    return summed + root_of(summed).to_bytes(8, "little")


def _lists(
    plans: Sequence[RunPlan],
) -> tuple[npt.NDArray[np.void], npt.NDArray[np.void], list[int]]:
    """Lists that are different, their ops, and for each run the number of its list."""
    known: dict[bytes, int] = {}
    # Most runs have a plan in common.
    each = {id(plan): plan for plan in plans}
    of_plan = {at: known.setdefault(plan.ops.tobytes(), len(known)) for at, plan in each.items()}
    ops = np.frombuffer(bytearray(b"".join(known)), dtype=records.OP)
    counts = np.array([len(one) // records.OP.itemsize for one in known])
    lists = np.zeros(len(known), dtype=records.LIST)
    lists["count"], lists["first"] = counts, np.cumsum(counts) - counts
    return lists, ops, [of_plan[id(plan)] for plan in plans]


def _renumber(
    ops: npt.NDArray[np.void], name: str, which: npt.NDArray[np.bool_], first: int = 0
) -> npt.NDArray[np.uint16]:
    """Numbers what ops use from ``first`` on, in the old order; returns the old numbers."""
    old = ops[name][which]
    used = np.array(sorted(set(old.tolist())), dtype=old.dtype)
    ops[name][which] = np.searchsorted(used, old) + first
    return used


def _segments(base: Base, used: npt.NDArray[np.uint16]) -> npt.NDArray[np.void]:
    written = []
    for number in used.tolist():
        segment = base.segments[number]
        is_ = segment.description
        given = (segment.digest, segment.root, is_.generation, is_.tokens, is_.position)
        written.append(_SEGMENT.pack(is_.key, *given))
    return np.frombuffer(b"".join(written), dtype=records.SEGMENT)
