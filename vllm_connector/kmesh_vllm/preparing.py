"""Makes loads ready to move: the session, the memory and the records that they need."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from kmesh.errors import ConnectionClosed
from kmesh.session import Session
from kmesh_vllm.epochs import Epochs
from kmesh_vllm.loadjob import Clerk, LoadJob, State
from kmesh_vllm.loadstates import LoadStates
from kmesh_vllm.movers import Mover, Slab

_THREADS = 2
_CATCH_UP = 1.0


class _Lacking(Exception):
    """Something has to be waited for."""


class Preparer:
    """Makes loads ready, in threads of ours where that may take long.

    A load that lacks something, as memory that is not attached, goes to threads that only such
    loads keep: the others do not queue behind them.

    Args:
        current: the worker's live session, or None.
        move: moves a load that is written, in the thread that wrote it, where the mover does not
            only start things.
        timeout: seconds that a load has, from its beginning to its deadline.
    """

    def __init__(
        self,
        mover: Mover,
        clerk: Clerk,
        states: LoadStates,
        current: Callable[[], Session | None],
        move: Callable[[LoadJob], None],
        timeout: float,
        clock: Callable[[], float],
    ) -> None:
        self._mover = mover
        self._clerk = clerk
        self._states = states
        self._epochs = Epochs(current)
        self._move = move
        self._timeout = timeout
        self._clock = clock
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="kmesh-load")
        self._waiters = ThreadPoolExecutor(_THREADS, thread_name_prefix="kmesh-wait")

    def changed(self, session: Session | None) -> None:
        """A session is new, or was lost. Never waits."""
        self._epochs.changed(session)

    def at_once(self, job: LoadJob, sibling: LoadJob | None) -> bool:
        """Makes a job ready if nothing has to be waited for.

        Args:
            sibling: as ``Clerk.write`` takes it.
        """
        try:
            session = self._epochs.session_of(job.plan.epoch)
            if session is None:
                return False
            if not self._clerk.write(job, lambda n: self._mover.attached(session, n), sibling):
                return False
        except Exception as wrong:
            self._states.failed(job, wrong)
            return True
        job.state = State.READY
        return True

    def submit_all(self, jobs: Sequence[LoadJob]) -> None:
        """Has threads of ours make a step's jobs ready.

        Recipes that have only to be brought here are one thread's, so that they are started
        together and what they refer to is read once.
        """
        together = [job for job in jobs if job.far and self._mover.takes_recipes(0)]
        if together:
            self.submit(*together)
        for job in jobs:
            if job not in together:
                self.submit(job)

    def submit(self, *jobs: LoadJob) -> None:
        """Has a thread of ours make jobs ready, all at the same time."""
        self._states.join(jobs)
        self._hand(self._threads, jobs, waits=False)

    def give_back(self, job: LoadJob) -> None:
        """Has a thread of ours give back what was decoded for a job that has ended.

        For want of a thread the next one does it, or whoever closes the job.
        """
        with contextlib.suppress(RuntimeError):
            self._threads.submit(job.close)

    def close(self) -> None:
        """Waits for what is under way; of what has not begun nothing is done."""
        # In this order: the first pass loads on to the second.
        for pool in (self._threads, self._waiters):
            pool.shutdown(wait=True, cancel_futures=True)

    def _hand(self, pool: ThreadPoolExecutor, jobs: Sequence[LoadJob], *, waits: bool) -> None:
        """Has a thread of a pool make jobs ready; those for which there is none fail."""
        try:
            pool.submit(self._run, jobs, waits=waits)
        except RuntimeError as lacking:
            for job in jobs:
                self._states.failed(job, OSError(str(lacking)))
                # A pool that lacks a thread has taken them all the same, and leaves them later.
                if self._states.closing:
                    self._states.leave(job)

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
                self._states.failed(job, wrong)
        try:
            self._ready(written)
        except Exception as wrong:
            for job in written:
                self._states.failed(job, wrong)
        for job in jobs:
            # Each by itself: what one lacks is not the others' to wait for.
            if job in lacking:
                self._hand(self._waiters, (job,), waits=True)
            else:
                self._states.leave(job)

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
        starts_only = self._mover.starts_only
        late = self._states.written(jobs, State.READY if starts_only else State.MOVING)
        for job in jobs:
            if job in late:
                job.close()
            elif not starts_only:
                self._move(job)
        if len(late) < len(jobs):
            self._states.news.set()

    def _slab(self, session: Session, number: int, waits: bool) -> Slab:
        """A slab that is attached, or is waited for."""
        if waits:
            return self._mover.attach(session, number, self._timeout)
        slab = self._mover.attached(session, number)
        if slab is None:
            raise _Lacking
        return slab

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
            if self._states.closing or self._clock() >= until:
                raise ConnectionClosed("no session with the daemon that gave the lease")
            time.sleep(0.02)
