"""Loads of one worker: from slabs into KV pages, without holding up the engine's thread."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from kmesh import _host
from kmesh.errors import ConnectionClosed, KMeshError, UnsupportedError
from kmesh.layout import Shard
from kmesh.session import Session
from kmesh_vllm.config import Settings
from kmesh_vllm.counts import Counts
from kmesh_vllm.epochs import Epochs
from kmesh_vllm.identity import Identity
from kmesh_vllm.loadjob import Clerk, LoadJob, State
from kmesh_vllm.metadata import LoadPlan, LoadReport
from kmesh_vllm.movers import Mover, Moving, Slab
from kmesh_vllm.paged import PagedCache

logger = logging.getLogger("kmesh_vllm")

_THREADS = 2
_CATCH_UP = 1.0
#: Nanoseconds between two questions whether a GPU has ended something.
_POLL = 15_000
#: Seconds of such questions after which is looked for all else.
_WATCH = 0.001
#: Seconds that closing waits for a GPU to end what was started.
_DRAIN = 30.0


class _Lacking(Exception):
    """Something has to be waited for."""


class Loader:
    """Runs load plans, and says of each how it ended.

    Every plan ends: one that has not begun to move when its time is over has failed, and its
    blocks are not touched from then on. One that has begun can't be called back, so it is waited
    for as long as it takes: until it ends its blocks are written, and belong to nobody else.

    Where a mover only starts things, the engine's thread starts them, at once if all memory is
    attached: a thread of ours would wait for the interpreter while an engine with nothing else to
    do spins in it. Loads of one step are started together.

    A load that lacks something, as memory that is not attached, goes to threads that only such
    loads keep: the others do not queue behind them.

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
        self._epochs = Epochs(current)
        self._timeout = settings.load_timeout_ms / 1000
        self._counts = counts
        self._clock = clock
        self._lock = threading.Lock()
        self._jobs: dict[str, LoadJob] = {}
        self._moving: list[tuple[Moving, list[LoadJob]]] = []
        #: Loads that have ended, but whose memory is still to be given back by a thread of ours.
        self._lending: list[LoadJob] = []
        self._closing = False
        #: A thread of ours has made a load ready, or has ended one.
        self._news = threading.Event()
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="kmesh-load")
        self._waiters = ThreadPoolExecutor(_THREADS, thread_name_prefix="kmesh-wait")

    def changed(self, session: Session | None) -> None:
        """A session is new, or was lost. Never waits."""
        self._epochs.changed(session)

    def start(self, plans: Sequence[LoadPlan]) -> None:
        """Begins the loads of a step; ``finished`` says when each has ended."""
        written: LoadJob | None = None
        later: list[LoadJob] = []
        for plan in plans:
            job = LoadJob(plan, self._clock() + self._timeout, number=self._mover.begin())
            self._jobs[plan.request] = job
            if not (self._mover.starts_only and self._at_once(job, written)):
                later.append(job)
            elif job.state is State.READY:
                written = job
        self._submit_all(later)
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
                self._news.wait(left)
        for request, job in list(self._jobs.items()):
            if job.state is not State.DONE:
                continue
            del self._jobs[request]
            self._leave(job)
            if job.lends:
                self._lending.append(job)
                # For want of a thread it is done by the next one, or at the end.
                with contextlib.suppress(RuntimeError):
                    self._threads.submit(job.close)
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
        self._closing = True
        for job in self._jobs.values():
            self._fail(job, (State.WAITING, State.READY), "load_failed_lost")
        # In this order: the first pass loads on to the second.
        for pool in (self._threads, self._waiters):
            pool.shutdown(wait=True, cancel_futures=True)
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
        while not self._news.is_set() and time.monotonic() < until:
            _host.nap(_POLL)
            if any([moving.done() for moving, _ in self._moving]):
                return

    def _any_ended(self) -> bool:
        """Moves all loads on as far as they go now; whether one has ended."""
        self._news.clear()
        now = self._clock()
        for job in self._jobs.values():
            if now >= job.deadline:
                self._fail(job, (State.WAITING, State.READY), "load_failed_late")
        self._start_ready()
        self._settle()
        return any(job.state is State.DONE for job in self._jobs.values())

    def _at_once(self, job: LoadJob, sibling: LoadJob | None) -> bool:
        """Makes a job ready if nothing has to be waited for."""
        try:
            session = self._epochs.session_of(job.plan.epoch)
            if session is None:
                return False
            if not self._clerk.write(job, lambda n: self._mover.attached(session, n), sibling):
                return False
        except Exception as wrong:
            self._failed(job, wrong)
            return True
        job.state = State.READY
        return True

    def _submit_all(self, jobs: Sequence[LoadJob]) -> None:
        """Has threads of ours make a step's jobs ready.

        Recipes that have only to be brought here are one thread's, so that they are started
        together and what they refer to is read once.
        """
        together = [job for job in jobs if job.far and self._mover.takes_recipes(0)]
        if together:
            self._submit(*together)
        for job in jobs:
            if job not in together:
                self._submit(job)

    def _submit(self, *jobs: LoadJob) -> None:
        """Has a thread of ours make jobs ready, all at the same time."""
        with self._lock:
            for job in jobs:
                job.users += 1
        self._hand(self._threads, jobs, waits=False)

    def _hand(self, pool: ThreadPoolExecutor, jobs: Sequence[LoadJob], *, waits: bool) -> None:
        """Has a thread of a pool make jobs ready; those for which there is none fail."""
        try:
            pool.submit(self._run, jobs, waits=waits)
        except RuntimeError as lacking:
            for job in jobs:
                self._failed(job, OSError(str(lacking)))
                # A pool that lacks a thread has taken them all the same, and leaves them later.
                if self._closing:
                    self._leave(job)

    def _run(self, jobs: Sequence[LoadJob], *, waits: bool) -> None:
        written: list[LoadJob] = []
        lacking: list[LoadJob] = []
        for job in jobs:
            try:
                if self._prepare(job, waits):
                    written.append(job)
            except _Lacking:
                lacking.append(job)
            except Exception as wrong:
                self._failed(job, wrong)
        try:
            self._ready(written)
        except Exception as wrong:
            for job in written:
                self._failed(job, wrong)
        for job in jobs:
            # Each by itself: what one lacks is not the others' to wait for.
            if job in lacking:
                self._hand(self._waiters, (job,), waits=True)
            else:
                self._leave(job)

    def _leave(self, job: LoadJob) -> None:
        """One reads a job's memory no longer."""
        with self._lock:
            job.users -= 1
            last = not job.users
        if last:
            self._mover.end(job.number)

    def _prepare(self, job: LoadJob, waits: bool) -> bool:
        """Writes a job, in a thread that may be kept; whether it did.

        Args:
            waits: for what is lacking.

        Raises:
            _Lacking: something is, and it may not wait.
            Exception: it can't be written.
        """
        if job.state is not State.WAITING:
            return False
        session = self._session_of(job, waits)
        if job.plan.mirrors and not job.decoded:
            # Of a load that has waited for this thread, less is left: decoding takes time too.
            left = job.deadline - self._timeout / 2 - self._clock() if waits else 0.0
            taken = self._mover.takes_recipes(max(left, 0.0))
            if job.state is not State.WAITING:
                return False
            if self._mover.moves_recipes and not (taken or waits):
                raise _Lacking
        self._clerk.write(job, lambda n: self._slab(session, n, waits), decodes=True)
        return True

    def _ready(self, jobs: Sequence[LoadJob]) -> None:
        """Makes jobs that were written ready at the same time; moves them if the mover may."""
        late: list[LoadJob] = []
        with self._lock:
            for job in jobs:
                if job.state is not State.WAITING:
                    late.append(job)
                else:
                    job.state = State.READY if self._mover.starts_only else State.MOVING
        for job in jobs:
            if job in late:
                job.close()
            elif not self._mover.starts_only:
                self._end(_start(self._mover, [job]), [job])
        if len(late) < len(jobs):
            self._news.set()

    def _slab(self, session: Session, number: int, waits: bool) -> Slab:
        """A slab that is attached, or is waited for."""
        if waits:
            return self._mover.attach(session, number, self._timeout)
        slab = self._mover.attached(session, number)
        if slab is None:
            raise _Lacking
        return slab

    def _start_ready(self) -> None:
        """Starts all that is ready, together. In the engine's thread."""
        ready = []
        with self._lock:
            for job in self._jobs.values():
                if job.state is State.READY:
                    job.state = State.MOVING
                    ready.append(job)
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
        if self._closing:
            for job in jobs:
                self._fail(job, (State.MOVING,), "load_failed_lost")
            return
        mirrored = _mirrored(jobs)
        with self._lock:
            for job in mirrored:
                job.decoded, job.state = str(wrong), State.WAITING
        for job in mirrored:
            self._submit(job)
        if dense := [job for job in jobs if job.state is State.MOVING]:
            self._move(dense)

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
                with self._lock:
                    job.state = State.DONE
        except Exception as wrong:
            if isinstance(wrong, UnsupportedError) and _mirrored(jobs):
                self._refused(jobs, wrong)
                return
            _log(wrong)
            for job in jobs:
                self._fail(job, (State.MOVING,), "load_failed_error")

    def _session_of(self, job: LoadJob, waits: bool) -> Session:
        """The live session, if it is of the load's epoch.

        The scheduler's session may be a moment ahead of this worker's, so that is waited for, from
        the load's beginning on: those that queue behind others do not wait again.

        Raises:
            _Lacking: there is none just now, and it may not be waited for.
            ConnectionClosed: the daemon that gave the lease is gone, and its memory with it.
        """
        until = job.deadline - self._timeout + min(_CATCH_UP, self._timeout / 2)
        while True:
            session = self._epochs.session_of(job.plan.epoch)
            if session is not None:
                return session
            if not waits:
                raise _Lacking
            if self._closing or self._clock() >= until:
                raise ConnectionClosed("no session with the daemon that gave the lease")
            time.sleep(0.02)

    def _failed(self, job: LoadJob, wrong: Exception) -> None:
        """A job could not be made ready."""
        if isinstance(wrong, ConnectionClosed):
            self._fail(job, (State.WAITING,), "load_failed_lost")
        else:
            _log(wrong)
            self._fail(job, (State.WAITING,), "load_failed_error")
        self._news.set()

    def _fail(self, job: LoadJob, expected: tuple[State, ...], count: str) -> None:
        """Fails a whole load, if it is still in a state that the caller expects."""
        with self._lock:
            if job.state not in expected:
                return
            job.bad = [(job.plan.begin, job.plan.end)]
            job.state = State.DONE
        self._counts.add(count)


def _mirrored(jobs: list[LoadJob]) -> list[LoadJob]:
    """Those with recipes that are moved as they lie."""
    return [job for job in jobs if job.piece and job.piece.recipes]


def _log(wrong: Exception) -> None:
    if isinstance(wrong, KMeshError | OSError):
        logger.warning("a load failed: %s", str(wrong))
    else:
        logger.error("a load failed", exc_info=wrong)


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
