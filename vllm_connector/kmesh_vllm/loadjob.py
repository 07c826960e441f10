"""One load of one rank: from a plan to records for the kernels, and from statuses to blocks."""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kmesh import _host
from kmesh.kernels.host import Status
from kmesh.kernels.plan import RECORD
from kmesh.layout import Shard
from kmesh_vllm.counts import Counts
from kmesh_vllm.identity import Identity
from kmesh_vllm.lending import Lent
from kmesh_vllm.locating import Locator
from kmesh_vllm.metadata import LoadPlan
from kmesh_vllm.mirroring import MirrorClerk
from kmesh_vllm.movers import Ids, Mover, Piece, Records, Slab
from kmesh_vllm.paged import PagedCache
from kmesh_vllm.sharding import Sharding, overlaps

logger = logging.getLogger("kmesh_vllm")

_CORRUPT = (Status.BAD_ROOT, Status.BAD_TILE)


class State(enum.Enum):
    """Where a load is.

    ::

        WAITING ──memory is there──▶ READY ──started──▶ MOVING ──ended──▶ DONE
           ▲└──────late, failed─────────┼──late──▶ DONE
           └────recipes are refused─────┘
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
        number: of the load, as the mover counts.
        decoded: why its recipes are decoded, if the mover refused them.
        piece: what to move, from READY on.
        base: position from which the piece counts.
        entries: of the lease, behind each record.
        mirrored: of each record, whether the daemon keeps it as a recipe.
        far: some of its recipes lie where this process can't read them.
        reach: position up to which the records go.
        spoiled: (begin, end, entry) of recipes of which nothing is moved: they are wrong.
        bad: ranges of positions whose pages are not what they should be.
        corrupt: entries of the lease whose bytes were wrong.
        counted: of its spans, those that were counted as decoded.
        users: who may still read its memory: the engine's thread until it has said that the job has
            ended, and each thread of ours that makes it ready, which may come late.
        slabs: memory that it reads. lent: the same, of what was decoded for it.
    """

    plan: LoadPlan
    deadline: float
    number: int = 0
    state: State = State.WAITING
    decoded: str = ""
    piece: Piece | None = None
    base: int = 0
    entries: npt.NDArray[np.uint32] = field(default_factory=lambda: np.zeros(0, np.uint32))
    mirrored: npt.NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, np.bool_))
    far: bool = False
    reach: int = 0
    spoiled: list[tuple[int, int, int]] = field(default_factory=list)
    bad: list[tuple[int, int]] = field(default_factory=list)
    corrupt: list[int] = field(default_factory=list)
    counted: int = 0
    users: int = 1
    slabs: list[Slab] = field(default_factory=list)
    lent: Lent | None = None

    @property
    def lends(self) -> bool:
        """Whether it still has memory that was decoded for it."""
        lent = self.lent
        return lent is not None and not lent.closed

    def close(self) -> None:
        """Nothing reads its memory any more. May be called again, in any thread."""
        self.slabs = []
        # A thread that writes the job again takes it away meanwhile.
        lent = self.lent
        if lent is not None:
            lent.close()


class Clerk:
    """Writes pieces for one rank, and reads what became of them.

    Args:
        mover: for which pieces are.
        cache: the rank's pages.
        mine: the heads that it holds.
    """

    def __init__(
        self,
        mover: Mover,
        cache: PagedCache,
        identity: Identity,
        mine: Shard,
        counts: Counts,
    ) -> None:
        self._mirrors = MirrorClerk(mover, identity)
        self._reads_gpu = mover.reads_gpu
        self._cache = cache
        self._identity = identity
        self._mine = mine
        self._counts = counts
        self._heads: dict[int, tuple[Sharding, bytes]] = {}

    def write(
        self,
        job: LoadJob,
        slab_of: Callable[[int], Slab | None],
        sibling: LoadJob | None = None,
        *,
        decodes: bool = False,
    ) -> bool:
        """Fills in the job's piece; False if ``slab_of`` had none of its slabs.

        Args:
            sibling: a job of the same step, written before; what both need is taken from there.
            decodes: recipes that lie far away are read, and those that the mover does not take
                are decoded, both of which may take long; otherwise they make it False.

        Raises:
            ProtocolError: the plan names bytes that no slab can have.
            CudaError, OSError: there is no memory for what was decoded.
        """
        # What an earlier try came to.
        job.spoiled = []
        if job.lent is not None:
            job.lent.close()
            job.lent = None
        plan, names = job.plan, self._identity.namespace
        if sibling is not None and sibling.piece is not None and plan.reads_as(sibling.plan):
            job.base, job.entries, job.reach = sibling.base, sibling.entries, sibling.reach
            job.mirrored, job.slabs = sibling.mirrored, sibling.slabs
            job.piece = sibling.piece.like(self._pages(plan, job.base))
            return True
        stored, heads = self._overlaps(plan.tp)
        locator = Locator(slab_of, self._reads_gpu)
        slabs = locator.around(plan.spans, heads)
        if slabs is None:
            return False
        numbered = np.zeros(0, np.intp)
        if plan.mirrors:
            gives = np.frombuffer(heads, np.uint64).reshape(-1, 3)[:, 2]
            numbered = np.flatnonzero(gives[plan.records()["part"]])
            job.far = self._mirrors.far(plan, numbered, locator)
            if job.far and not decodes:
                return False
        block = self._identity.block_tokens
        parts, on_gpu, entries, job.base, job.reach = _host.leased_parts(
            plan.spans, heads, slabs, plan.begin, plan.end, block, stored.part_heads, names.layers
        )
        records = np.frombuffer(parts, RECORD)
        job.entries = np.frombuffer(entries, np.uint32)
        job.mirrored = np.zeros(len(records), np.bool_)
        pages = self._pages(plan, job.base)
        job.piece = Piece(records, np.frombuffer(on_gpu, np.bool_), pages)
        if plan.mirrors:
            placed = self._mirrors.place(
                plan, job.piece, numbered, stored, locator, job.decoded, decodes
            )
            if placed is None:
                return False
            job.mirrored, job.lent = placed.mirrored, placed.lent
            # In a second try all are decoded, those of the first one too.
            self._counts.add("recipes_decoded", placed.decoded - job.counted)
            job.counted = placed.decoded
            self._drop(job, placed.wrong)
        job.slabs = list(locator.slabs.values())
        return True

    def _drop(self, job: LoadJob, wrong: npt.NDArray[np.bool_]) -> None:
        """Leaves out of a piece what must not be moved."""
        piece = job.piece
        assert piece is not None
        if not wrong.any():
            return
        entries = job.entries[wrong].tolist()
        ranges = self._ranges(job, piece.records[wrong])
        job.spoiled = [(*span, entry) for span, entry in zip(ranges, entries, strict=True)]
        job.entries, job.mirrored = job.entries[~wrong], job.mirrored[~wrong]
        job.piece = piece.without(wrong)

    def _ranges(self, job: LoadJob, records: Records) -> list[tuple[int, int]]:
        """Positions that records fill."""
        first = records["position"].astype(np.int64) + job.base
        begin, end = (
            first + records[name].astype(np.int64) for name in ("token_begin", "token_end")
        )
        return list(zip(begin.tolist(), end.tolist(), strict=True))

    def judge(self, job: LoadJob, status: bytes) -> None:
        """Takes down which pages of a job that was moved are bad, and counts."""
        plan, piece = job.plan, job.piece
        assert piece is not None
        for begin, end, entry in job.spoiled:
            job.bad.append((begin, end))
            self._corrupt(job, entry)
        if status.count(Status.DONE) != len(status):
            ranges = self._ranges(job, piece.records)
            each = zip(ranges, job.entries.tolist(), job.mirrored.tolist(), status, strict=True)
            for span, entry, mirrored, code in each:
                if code == Status.DONE:
                    continue
                job.bad.append(span)
                # What a recipe names is not what the lease has: it is another's, or was changed.
                if code in _CORRUPT or (mirrored and code == Status.BAD_RECORD):
                    self._corrupt(job, entry)
                else:
                    logger.error("a load was refused by the kernel: %s", code)
                    self._counts.add("load_failed_error")
        if job.reach < plan.end:
            job.bad.append((max(job.reach, plan.begin), plan.end))
            self._counts.add("load_failed_error")
        row = self._cache.layout.row_bytes
        self._counts.add("restored_bytes", _host.moved_bytes(piece.records, status, row))
        if plan.mirrors:
            recipes = np.frombuffer(status, np.uint8)[job.mirrored]
            amount = _host.moved_bytes(piece.records[job.mirrored], recipes.data, row)
            self._counts.add("restored_bytes_recipes", amount)

    def _corrupt(self, job: LoadJob, entry: int) -> None:
        job.corrupt.append(entry)
        self._counts.add("load_failed_corrupt")

    def bad_blocks(self, job: LoadJob) -> set[int]:
        """Ids of the scheduler's blocks that a job left bad."""
        plan, block = job.plan, self._identity.block_tokens
        ids = plan.block_ids()
        bad: set[int] = set()
        for begin, end in job.bad:
            if begin >= end:
                continue
            first = (max(begin, plan.begin) - plan.begin) // block
            last = -(-(min(end, plan.end) - plan.begin) // block)
            bad.update(ids[first:last].tolist())
        return bad

    def _overlaps(self, tp: int) -> tuple[Sharding, bytes]:
        """A sharding, and for each of its shards what it gives us: source, target, heads, as u64
        each."""
        found = self._heads.get(tp)
        if found is None:
            names = self._identity.namespace
            stored = Sharding(names.layers, names.kv_heads, tp)
            table = np.zeros((stored.parts, 3), np.uint64)
            for one in overlaps(stored, self._mine):
                table[one.part] = one.src_head_begin, one.dst_head_begin, one.heads
            found = self._heads[tp] = stored, table.tobytes()
        return found

    def _pages(self, plan: LoadPlan, base: int) -> Ids:
        # Blocks before the load are not ours to write: no id stands for them.
        before = (plan.begin - base) // self._identity.block_tokens
        ids = plan.block_ids()
        if before:
            ids = np.concatenate([np.full(before, -1, np.int64), ids])
        return self._cache.expand(ids)
