"""Loads of one worker: from mapped slabs into KV pages, off the engine's thread."""

from __future__ import annotations

import enum
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from kmesh.errors import ConnectionClosed, KMeshError, ProtocolError
from kmesh.kernels.host import SpanPart, Status, scatter
from kmesh.layout import Shard
from kmesh.memory import SlabMapping
from kmesh.session import Session
from kmesh_vllm.config import Settings
from kmesh_vllm.counts import Counts
from kmesh_vllm.identity import Identity
from kmesh_vllm.metadata import LoadPlan, LoadReport
from kmesh_vllm.paged import PagedCache
from kmesh_vllm.sharding import Sharding, overlaps

logger = logging.getLogger("kmesh_vllm")

_THREADS = 2
_CATCH_UP = 1.0


class _State(enum.Enum):
    WAITING = enum.auto()
    COPYING = enum.auto()
    DONE = enum.auto()


@dataclass(eq=False, slots=True)
class _Job:
    plan: LoadPlan
    deadline: float
    state: _State = _State.WAITING
    bad: list[tuple[int, int]] = field(default_factory=list)  # ranges of positions
    corrupt: list[int] = field(default_factory=list)  # entries of the lease
    slabs: set[SlabMapping] = field(default_factory=set)  # mapped while this lives


class Loader:
    """Runs load plans, and says of each how it ended.

    Every plan ends: one that has not begun to copy when its time is over has failed, and its
    blocks are not touched from then on; the copy itself waits for nobody.

    Args:
        cache: the pages.
        mine: the heads that this rank holds.
        current: the worker's live session, or None.
    """

    def __init__(
        self,
        cache: PagedCache,
        identity: Identity,
        mine: Shard,
        current: Callable[[], Session | None],
        settings: Settings,
        counts: Counts,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cache = cache
        self._identity = identity
        self._mine = mine
        self._current = current
        self._timeout = settings.load_timeout_ms / 1000
        self._counts = counts
        self._clock = clock
        self._lock = threading.Lock()
        self._jobs: dict[str, _Job] = {}
        self._epoch = 0
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="kmesh-load")

    def start(self, plan: LoadPlan) -> None:
        """Begins a load; ``finished`` says when it has ended."""
        job = _Job(plan, self._clock() + self._timeout)
        self._jobs[plan.request] = job
        self._threads.submit(self._run, job)

    def finished(self) -> tuple[set[str], set[int], LoadReport]:
        """Loads that ended since the last call: requests, ids of bad blocks, what went wrong."""
        requests: set[str] = set()
        bad_blocks: set[int] = set()
        report = LoadReport()
        now = self._clock()
        for request, job in list(self._jobs.items()):
            if job.state is _State.WAITING and now >= job.deadline:
                self._end(job, _State.WAITING, "load_failed_late")
            if job.state is not _State.DONE:
                continue
            del self._jobs[request]
            requests.add(request)
            bad_blocks |= self._bad_blocks(job)
            if job.bad:
                first = min(begin for begin, _ in job.bad)
                block = self._identity.block_tokens
                report.failed[request] = max(first // block * block, job.plan.begin)
            if job.corrupt:
                report.corrupt[request] = job.corrupt
        return requests, bad_blocks, report

    def close(self) -> None:
        """Waits for copies under way and forgets the rest."""
        for job in self._jobs.values():
            self._end(job, _State.WAITING, "load_failed_lost")
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._jobs.clear()

    def _run(self, job: _Job) -> None:
        try:
            parts, entries = self._parts(job)
            reach = max((p.position + p.token_end for p in parts), default=0) + self._base(job.plan)
        except ConnectionClosed:
            self._end(job, _State.WAITING, "load_failed_lost")
            return
        except Exception as wrong:
            if not isinstance(wrong, KMeshError | OSError):
                logger.exception("a load failed")
            else:
                logger.warning("a load failed: %s", str(wrong))
            self._end(job, _State.WAITING, "load_failed_error")
            return
        with self._lock:
            if job.state is not _State.WAITING:
                return
            job.state = _State.COPYING
        try:
            self._copy(job, parts, entries, reach)
        except Exception:
            logger.exception("a load failed")
            self._end(job, _State.COPYING, "load_failed_error")

    def _copy(self, job: _Job, parts: list[SpanPart], entries: list[int], reach: int) -> None:
        plan = job.plan
        ids = plan.block_ids()
        block = self._identity.block_tokens
        # Blocks before the load are not ours to write: no id stands for them.
        before = (plan.begin - self._base(plan)) // block
        padded = [-1] * before + ids.tolist()
        status = scatter(self._cache.layout, parts, self._cache.expand(padded))
        base = self._base(plan)
        for part, entry, code in zip(parts, entries, status, strict=True):
            if code == Status.DONE:
                continue
            begin = base + part.position
            job.bad.append((begin + part.token_begin, begin + part.token_end))
            if code in (Status.BAD_ROOT, Status.BAD_TILE):
                job.corrupt.append(entry)
                self._counts.add("load_failed_corrupt")
            else:
                logger.error("a load was refused by the kernel: %s", Status(code).name)
                self._counts.add("load_failed_error")
        if reach < plan.end:
            job.bad.append((max(reach, plan.begin), plan.end))
            self._counts.add("load_failed_error")
        self._counts.add("restored_bytes", self._bytes(parts, status))
        with self._lock:
            job.state = _State.DONE

    def _parts(self, job: _Job) -> tuple[list[SpanPart], list[int]]:
        """What to copy, and the lease entry behind each part. The job holds the memory.

        Raises:
            ConnectionClosed: the daemon that gave the lease is gone.
        """
        plan = job.plan
        session = self._session_of(plan.epoch)
        names = self._identity.namespace
        stored = Sharding(names.layers, names.kv_heads, plan.tp)
        given = {o.part: o for o in overlaps(stored, self._mine)}
        base = self._base(plan)
        parts, entries = [], []
        for record in plan.records():
            overlap = given.get(int(record["part"]))
            if overlap is None:
                continue
            offset, length = int(record["offset"]), int(record["length"])
            slab = session.slab(int(record["slab"]), self._timeout)
            job.slabs.add(slab)
            if not slab.contains(offset, length):
                raise ProtocolError(f"a lease names bytes outside slab {slab.slab}")
            start, tokens = int(record["start"]), int(record["tokens"])
            parts.append(
                SpanPart(
                    address=slab.address + offset,
                    sums_address=slab.sums_address(offset),
                    root=int(record["root"]),
                    length=length,
                    tokens=tokens,
                    token_begin=max(plan.begin - start, 0),
                    token_end=min(plan.end - start, tokens),
                    position=start - base,
                    src_heads=stored.part_heads,
                    src_head_begin=overlap.src_head_begin,
                    dst_head_begin=overlap.dst_head_begin,
                    heads=overlap.heads,
                    src_layers=names.layers,
                    src_layer_begin=0,
                    dst_layer_begin=0,
                    layers=names.layers,
                )
            )
            entries.append(int(record["entry"]))
        return parts, entries

    def _session_of(self, epoch: int) -> Session:
        """The live session, if it is of this epoch.

        The scheduler's session may be a moment ahead of this worker's, so that is waited for.

        Raises:
            ConnectionClosed: the daemon that gave the lease is gone, and its memory with it.
        """
        until = time.monotonic() + min(_CATCH_UP, self._timeout / 2)
        while True:
            session = self._current()
            if session is not None:
                self._epoch = session.epoch
                if session.epoch == epoch:
                    return session
            elif self._epoch == epoch:
                raise ConnectionClosed("the daemon that gave the lease is gone")
            if time.monotonic() >= until:
                raise ConnectionClosed("no session with the daemon that gave the lease")
            time.sleep(0.02)

    def _base(self, plan: LoadPlan) -> int:
        """Position from which blocks are counted: a block's first token, at or before all spans."""
        records = plan.records()
        first = min(int(records["start"].min()), plan.begin) if len(records) else plan.begin
        block = self._identity.block_tokens
        return first // block * block

    def _bad_blocks(self, job: _Job) -> set[int]:
        plan, block = job.plan, self._identity.block_tokens
        ids = plan.block_ids()
        bad: set[int] = set()
        for begin, end in job.bad:
            first = (max(begin, plan.begin) - plan.begin) // block
            last = -(-(min(end, plan.end) - plan.begin) // block)
            bad.update(ids[first:last].tolist())
        return bad

    def _bytes(self, parts: list[SpanPart], status: bytes) -> int:
        row = self._cache.layout.row_bytes
        return sum(
            2 * part.layers * part.heads * (part.token_end - part.token_begin) * row
            for part, code in zip(parts, status, strict=True)
            if code == Status.DONE
        )

    def _end(self, job: _Job, expected: _State, count: str) -> None:
        """Fails a whole load, if it is still in the state that the caller saw."""
        with self._lock:
            if job.state is not expected:
                return
            job.bad = [(job.plan.begin, job.plan.end)]
            job.state = _State.DONE
        self._counts.add(count)
