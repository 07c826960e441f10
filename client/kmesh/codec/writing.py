"""Recipes as bytes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kmesh.codec import records
from kmesh.codec.cold import freeze
from kmesh.codec.description import SpanDescription
from kmesh.codec.memory import root_of
from kmesh.codec.planning import RunPlan
from kmesh.codec.records import Form
from kmesh.codec.segments import Base
from kmesh.codec.turning import Turns
from kmesh.kernels.rotary import ELEMENTS


def write(
    member: SpanDescription,
    rows: npt.NDArray[np.uint8],
    plans: Sequence[RunPlan],
    base: Base,
    turns: Turns,
    form: Form,
    block_tokens: int,
) -> bytes:
    """A member's recipe; only the segments and turns that it uses are in it."""
    lists, ops, numbers = _lists(plans)
    segments = _renumber(ops, "segment", ops["kind"] != records.Op.LITERAL)
    used = _renumber(ops, "turn", ops["turn"] != 0, first=1)
    table = turns.records(used) if len(used) else np.empty(0, records.turn_record(0))
    runs = np.zeros(len(plans), dtype=records.RUN)
    runs["list"], runs["length"] = numbers, [plan.length for plan in plans]
    spans = (runs["length"].astype(np.int64) + records.RUN_ALIGN - 1) // records.RUN_ALIGN
    runs["offset"] = (np.cumsum(spans) - spans) * records.RUN_ALIGN
    literal_bytes = int(runs["offset"][-1]) + int(runs["length"][-1])
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
    tables = b"".join(
        one.tobytes() for one in (_segments(base, segments), table, lists, ops, runs, chunks)
    )
    size = records.HEAD.size + len(tables)
    tables = tables.ljust(records.aligned(size, records.RUN_ALIGN) - records.HEAD.size, b"\0")
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
        "segments": len(segments),
        "turns": len(used),
        "pairs": table.dtype["table"].shape[0] if len(used) else 0,
        "ops": len(ops),
        "lists": len(lists),
        "chunks": len(chunks),
        "literal_bytes": literal_bytes,
        "stored_bytes": len(stored),
        "file_bytes": records.HEAD.size + len(tables) + len(stored),
        "generation": member.generation,
        "namespace": member.namespace,
        "key": member.key,
        "payload_root": root_of(rows),
        "tables_root": root_of(tables),
        "stored_root": root_of(stored),
    }
    return b"".join((head_bytes(fields), tables, stored.data))


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
    numbers = [known.setdefault(plan.ops.tobytes(), len(known)) for plan in plans]
    ops = np.frombuffer(bytearray(b"".join(known)), dtype=records.OP)
    lists = np.zeros(len(known), dtype=records.LIST)
    lists["count"] = [len(one) // records.OP.itemsize for one in known]
    lists["first"] = np.cumsum(lists["count"]) - lists["count"]
    return lists, ops, numbers


def _renumber(
    ops: npt.NDArray[np.void], name: str, which: npt.NDArray[np.bool_], first: int = 0
) -> npt.NDArray[np.uint16]:
    """Numbers what ops use from ``first`` on, in the old order; returns the old numbers."""
    used, numbers = np.unique(ops[name][which], return_inverse=True)
    ops[name][which] = numbers + first
    return used


def _segments(base: Base, used: npt.NDArray[np.uint16]) -> npt.NDArray[np.void]:
    table = np.zeros(len(used), dtype=records.SEGMENT)
    for record, number in zip(table, used, strict=True):
        segment = base.segments[number]
        record["key"], record["digest"] = segment.description.key, segment.digest
        record["root"] = segment.root
        for name in ("generation", "tokens", "position"):
            record[name] = getattr(segment.description, name)
    return table
