"""One load of one rank: from a plan to records for the kernels, and from statuses to blocks."""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kmesh.errors import ProtocolError
from kmesh.kernels.host import Status
from kmesh.layout import TILE_BYTES, Shard
from kmesh_vllm.counts import Counts
from kmesh_vllm.decoding import Payload, decode_mirrors
from kmesh_vllm.identity import Identity
from kmesh_vllm.metadata import LoadPlan
from kmesh_vllm.movers import Ids, Piece, Records, Slab, empty_records
from kmesh_vllm.paged import PagedCache
from kmesh_vllm.sharding import Sharding, overlaps

logger = logging.getLogger("kmesh_vllm")


class State(enum.Enum):
    """Where a load is.

    ::

        WAITING ──memory is there──▶ READY ──started──▶ MOVING ──ended──▶ DONE
           └──────late, failed─────────┴──late──▶ DONE
    """

    WAITING = enum.auto()
    READY = enum.auto()
    MOVING = enum.auto()
    DONE = enum.auto()


@dataclass(eq=False, slots=True)
class LoadJob:
    """A load on its way.

    Attributes:
        deadline: by which it must have begun to move.
        piece: what to move, from READY on.
        base: position from which the piece counts.
        entries: of the lease, behind each record.
        reach: position up to which the records go.
        bad: ranges of positions whose pages are not what they should be.
        corrupt: entries of the lease whose bytes were wrong.
        slabs: memory that it reads. payloads: the same, of what was decoded for it.
    """

    plan: LoadPlan
    deadline: float
    state: State = State.WAITING
    piece: Piece | None = None
    base: int = 0
    entries: npt.NDArray[np.uint32] = field(default_factory=lambda: np.zeros(0, np.uint32))
    reach: int = 0
    bad: list[tuple[int, int]] = field(default_factory=list)
    corrupt: list[int] = field(default_factory=list)
    slabs: list[Slab] = field(default_factory=list)
    payloads: list[Payload] = field(default_factory=list)


class Clerk:
    """Writes pieces for one rank, and reads what became of them.

    Args:
        cache: the rank's pages.
        mine: the heads that it holds.
        reads_gpu: whether a slab is GPU memory.
    """

    def __init__(
        self,
        cache: PagedCache,
        identity: Identity,
        mine: Shard,
        counts: Counts,
        reads_gpu: Callable[[Slab], bool],
    ) -> None:
        self._cache = cache
        self._identity = identity
        self._mine = mine
        self._counts = counts
        self._reads_gpu = reads_gpu
        self._heads: dict[int, tuple[Sharding, np.ndarray]] = {}

    def write(
        self,
        job: LoadJob,
        slab_of: Callable[[int], Slab | None],
        sibling: LoadJob | None = None,
    ) -> bool:
        """Fills in the job's piece; False if ``slab_of`` had none of its slabs.

        Args:
            sibling: a job of the same step, written before; what both need is taken from there.

        Raises:
            ProtocolError: the plan names bytes that no slab can have.
        """
        plan, names = job.plan, self._identity.namespace
        if sibling is not None and sibling.piece is not None and plan.reads_as(sibling.plan):
            job.base, job.entries, job.reach = sibling.base, sibling.entries, sibling.reach
            job.slabs = sibling.slabs
            shared = sibling.piece
            job.piece = Piece(shared.records, shared.on_gpu, self._pages(plan, job.base))
            return True
        spans = plan.records()
        base = job.base = self._base(plan, spans)
        stored, table = self._overlaps(plan.tp)
        heads = table[spans["part"]]
        wanted = heads[:, 2] > 0
        decoded = decode_mirrors(plan, wanted, slab_of) if plan.mirrors else {}
        numbered = np.flatnonzero(wanted)
        if not wanted.all():
            spans, heads = spans[wanted], heads[wanted]
        records = empty_records(len(spans))
        on_gpu = np.zeros(len(spans), np.bool_)
        numbers, offsets, lengths = spans["slab"], spans["offset"], spans["length"]
        if (offsets % TILE_BYTES).any():
            raise ProtocolError("a lease names bytes that begin no tile")
        sums = offsets // TILE_BYTES * 8
        slabs = []
        for number in set(numbers.tolist()):
            slab = slab_of(number)
            if slab is None:
                return False
            slabs.append(slab)
            here = numbers == number
            offset, length = offsets[here], lengths[here]
            # Apart, then together, so that no sum can overflow.
            largest = int(offset.max()), int(length.max())
            if not all(slab.contains(0, n) for n in largest) or not slab.contains(
                0, int((offset + length).max())
            ):
                raise ProtocolError(f"a lease names bytes outside slab {slab.slab}")
            records["address"][here] = offset + np.uint64(slab.address)
            records["sums_address"][here] = sums[here] + np.uint64(slab.sums_address(0))
            on_gpu[here] = self._reads_gpu(slab)
        start, tokens = spans["start"].astype(np.int64), spans["tokens"].astype(np.int64)
        end = np.minimum(plan.end - start, tokens)
        records["root"], records["length"], records["tokens"] = spans["root"], lengths, tokens
        for number, payload in decoded.items():
            record = records[np.searchsorted(numbered, number)]
            record["address"], record["length"] = payload.data.ctypes.data, payload.data.size
            record["sums_address"], record["root"] = payload.sums.ctypes.data, payload.root
        job.payloads = list(decoded.values())
        records["token_begin"], records["token_end"] = np.maximum(plan.begin - start, 0), end
        records["position"] = start - base
        records["src_heads"] = stored.part_heads
        records["src_head_begin"], records["dst_head_begin"], records["heads"] = heads.T
        records["src_layers"] = records["layers"] = names.layers
        job.piece = Piece(records, on_gpu, self._pages(plan, base))
        job.entries = spans["entry"]
        job.reach = int((start + end).max(initial=0))
        job.slabs = slabs
        return True

    def judge(self, job: LoadJob, status: bytes) -> None:
        """Takes down which pages of a job that was moved are bad, and counts."""
        plan, piece = job.plan, job.piece
        assert piece is not None
        if any(status):
            entries = job.entries.tolist()
            for record, entry, code in zip(piece.records, entries, status, strict=True):
                if code == Status.DONE:
                    continue
                begin = job.base + int(record["position"])
                job.bad.append(
                    (begin + int(record["token_begin"]), begin + int(record["token_end"]))
                )
                if code in (Status.BAD_ROOT, Status.BAD_TILE):
                    job.corrupt.append(entry)
                    self._counts.add("load_failed_corrupt")
                else:
                    logger.error("a load was refused by the kernel: %s", code)
                    self._counts.add("load_failed_error")
        if job.reach < plan.end:
            job.bad.append((max(job.reach, plan.begin), plan.end))
            self._counts.add("load_failed_error")
        self._counts.add(
            "restored_bytes", moved_bytes(piece.records, status, self._cache.layout.row_bytes)
        )

    def bad_blocks(self, job: LoadJob) -> set[int]:
        """Ids of the scheduler's blocks that a job left bad."""
        plan, block = job.plan, self._identity.block_tokens
        ids = plan.block_ids()
        bad: set[int] = set()
        for begin, end in job.bad:
            first = (max(begin, plan.begin) - plan.begin) // block
            last = -(-(min(end, plan.end) - plan.begin) // block)
            bad.update(ids[first:last].tolist())
        return bad

    def _overlaps(self, tp: int) -> tuple[Sharding, np.ndarray]:
        """A sharding, and for each of its shards what it gives us: source, target, heads."""
        found = self._heads.get(tp)
        if found is None:
            names = self._identity.namespace
            stored = Sharding(names.layers, names.kv_heads, tp)
            table = np.zeros((stored.parts, 3), np.uint64)
            for one in overlaps(stored, self._mine):
                table[one.part] = one.src_head_begin, one.dst_head_begin, one.heads
            found = self._heads[tp] = stored, table
        return found

    def _pages(self, plan: LoadPlan, base: int) -> Ids:
        # Blocks before the load are not ours to write: no id stands for them.
        before = (plan.begin - base) // self._identity.block_tokens
        ids = np.concatenate([np.full(before, -1, np.int64), plan.block_ids()])
        return self._cache.expand(ids)

    def _base(self, plan: LoadPlan, spans: Records) -> int:
        """Position from which blocks are counted: a block's first token, at or before all spans."""
        first = min(int(spans["start"].min()), plan.begin) if len(spans) else plan.begin
        block = self._identity.block_tokens
        return first // block * block


def moved_bytes(records: Records, status: bytes, row_bytes: int) -> int:
    """Bytes of pages that were written by the parts that are done."""
    done = np.frombuffer(status, np.uint8) == Status.DONE
    tokens = records["token_end"] - records["token_begin"]
    rows = 2 * records["layers"] * records["heads"] * tokens
    return int(rows[done].sum()) * row_bytes
