"""Loads of one worker: from slabs into KV pages, without holding up the engine's thread."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from kmesh import _host
from kmesh.errors import UnsupportedError
from kmesh.layout import Shard
from kmesh.session import Session
from kmesh_vllm.config import Settings
from kmesh_vllm.counts import Counts
from kmesh_vllm.identity import Identity
from kmesh_vllm.loadjob import Clerk, LoadJob, State
from kmesh_vllm.loadstates import LoadStates, log
from kmesh_vllm.metadata import LoadPlan, LoadReport
from kmesh_vllm.movers import Mover, Moving
from kmesh_vllm.paged import PagedCache
from kmesh_vllm.preparing import Preparer

logger = logging.getLogger("kmesh_vllm")

#: Nanoseconds between two questions whether a GPU has ended something.
_POLL = 15_000
#: Seconds of such questions after which is looked for all else.
_WATCH = 0.001
#: Seconds that closing waits for a GPU to end what was started.
_DRAIN = 30.0


class Loader:
    """Runs load plans, and says of each how it ended.

    Every plan ends: one that has not begun to move when its time is over has failed, and its
    blocks are not touched from then on. One that has begun can't be called back, so it is waited
    for as long as it takes: until it ends its blocks are written, and belong to nobody else.

    Where a mover only starts things, the engine's thread starts them, at once if all memory is
    attached: a thread of ours would wait for the interpreter while an engine with nothing else to
    do spins in it. Loads of one step are started together.

    Args:
        mover: moves bytes between slabs and the pages of ``cache``.
        mine: the heads that this rank holds.
        current: the worker's live session, or None.
    """

    def __init__(
        self,
        mover: Mover,
        cache: PagedCache,
        identity: Identity,
        mine: Shard,
        current: Callable[[], Session | None],
        settings: Settings,
        counts: Counts,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._mover = mover
        self._identity = identity
        self._clerk = Clerk(mover, cache, identity, mine, counts)
        self._timeout = settings.load_timeout_ms / 1000
        self._counts = counts
        self._clock = clock
        self._states = LoadStates(counts, mover.end)
        self._preparer = Preparer(
            mover, self._clerk, self._states, current, self._move_here, self._timeout, clock
        )
        self._jobs: dict[str, LoadJob] = {}
        self._moving: list[tuple[Moving, list[LoadJob]]] = []
        #: Loads that have ended, but whose memory is still to be given back by a thread of ours.
        self._lending: list[LoadJob] = []

    def changed(self, session: Session | None) -> None:
        """A session is new, or was lost. Never waits."""
        self._preparer.changed(session)

    def start(self, plans: Sequence[LoadPlan]) -> None:
        """Begins the loads of a step; ``finished`` says when each has ended."""
        written: LoadJob | None = None
        later: list[LoadJob] = []
        for plan in plans:
            job = LoadJob(plan, self._clock() + self._timeout, number=self._mover.begin())
            self._jobs[plan.request] = job
            if not (self._mover.starts_only and self._preparer.at_once(job, written)):
                later.append(job)
            elif job.state is State.READY:
                written = job
        self._preparer.submit_all(later)
        self._start_ready()

    def finished(self, patience: float = 0.0) -> tuple[set[str], set[int], LoadReport]:
        """Loads that ended since the last call: requests, ids of bad blocks, what went wrong.

        Args:
            patience: seconds to wait for an end, where there is none yet.
        """
        requests: set[str] = set()
        bad_blocks: set[int] = set()
        report = LoadReport()
        if not self._jobs:
            return requests, bad_blocks, report
        self._lending = [job for job in self._lending if job.lends]
        until = time.monotonic() + patience
        while not self._any_ended():
            left = until - time.monotonic()
            if left <= 0:
                break
            if self._moving:
                self._watch(until)
            else:
                self._states.news.wait(left)
        for request, job in list(self._jobs.items()):
            if job.state is not State.DONE:
                continue
            del self._jobs[request]
            self._states.leave(job)
            if job.lends:
                self._lending.append(job)
                self._preparer.give_back(job)
            requests.add(request)
            if job.bad:
                bad_blocks |= self._clerk.bad_blocks(job)
                first = min(begin for begin, _ in job.bad)
                block = self._identity.block_tokens
                report.failed[request] = max(first // block * block, job.plan.begin)
            if job.corrupt:
                report.corrupt[request] = job.corrupt
        return requests, bad_blocks, report

    def close(self) -> None:
        """Waits for moves under way and forgets the rest."""
        self._states.closing = True
        for job in self._jobs.values():
            self._states.fail(job, (State.WAITING, State.READY), "load_failed_lost")
        self._preparer.close()
        until = time.monotonic() + _DRAIN
        while self._moving and time.monotonic() < until:
            self._settle()
            time.sleep(0.001)
        if self._moving:
            logger.error("%d loads are still being written", len(self._moving))
        for job in (*self._lending, *self._jobs.values()):
            if job.state is State.DONE:
                job.close()
        self._lending.clear()
        self._jobs.clear()

    def _watch(self, until: float) -> None:
        """Returns when something that moves is done, when there is news, or at that time.

        Soon in any case: loads that have not begun may be late.
        """
        until = min(until, time.monotonic() + _WATCH)
        while not self._states.news.is_set() and time.monotonic() < until:
            _host.nap(_POLL)
            if any([moving.done() for moving, _ in self._moving]):
                return

    def _any_ended(self) -> bool:
        """Moves all loads on as far as they go now; whether one has ended."""
        self._states.news.clear()
        now = self._clock()
        for job in self._jobs.values():
            if now >= job.deadline:
                self._states.fail(job, (State.WAITING, State.READY), "load_failed_late")
        self._start_ready()
        self._settle()
        return any(job.state is State.DONE for job in self._jobs.values())

    def _start_ready(self) -> None:
        """Starts all that is ready, together. In the engine's thread."""
        ready = self._states.take_ready(self._jobs.values())
        if ready:
            self._move(ready)

    def _move(self, jobs: list[LoadJob]) -> None:
        """Starts jobs that are moving from here on."""
        try:
            self._moving.append((_start(self._mover, jobs), jobs))
        except UnsupportedError as wrong:
            self._refused(jobs, wrong)

    def _refused(self, jobs: list[LoadJob], wrong: UnsupportedError) -> None:
        """Has recipes decoded that the mover does not move, and starts the others without them."""
        if self._states.closing:
            for job in jobs:
                self._states.fail(job, (State.MOVING,), "load_failed_lost")
            return
        mirrored = _mirrored(jobs)
        self._states.decode(mirrored, str(wrong))
        for job in mirrored:
            self._preparer.submit(job)
        if dense := [job for job in jobs if job.state is State.MOVING]:
            self._move(dense)

    def _move_here(self, job: LoadJob) -> None:
        """Moves a job in a thread of ours, which waits for its end."""
        self._end(_start(self._mover, [job]), [job])

    def _settle(self) -> None:
        """Ends what was started and is done."""
        for entry in list(self._moving):
            moving, jobs = entry
            if moving.done():
                self._moving.remove(entry)
                self._end(moving, jobs)

    def _end(self, moving: Moving, jobs: list[LoadJob]) -> None:
        try:
            statuses = moving.statuses()
            self._counts.add("restore_read_bytes", moving.read_bytes)
            for job, status in zip(jobs, statuses, strict=True):
                self._clerk.judge(job, status)
                self._states.done(job)
        except Exception as wrong:
            if isinstance(wrong, UnsupportedError) and _mirrored(jobs):
                self._refused(jobs, wrong)
                return
            log(wrong)
            for job in jobs:
                self._states.fail(job, (State.MOVING,), "load_failed_error")


def _mirrored(jobs: list[LoadJob]) -> list[LoadJob]:
    """Those with recipes that are moved as they lie."""
    return [job for job in jobs if job.piece and job.piece.recipes]


class _Refused:
    """What could not be started at all."""

    read_bytes = 0

    def __init__(self, error: Exception) -> None:
        self._error = error

    def done(self) -> bool:
        return True

    def statuses(self) -> list[bytes]:
        raise self._error


def _start(mover: Mover, jobs: list[LoadJob]) -> Moving:
    """What was started of jobs, if anything.

    Raises:
        UnsupportedError: nothing was, since their recipes have to be decoded.
    """
    pieces = [job.piece for job in jobs if job.piece is not None]
    try:
        return mover.restore(pieces)
    except Exception as wrong:
        if isinstance(wrong, UnsupportedError) and any(piece.recipes for piece in pieces):
            raise
        return _Refused(wrong)
