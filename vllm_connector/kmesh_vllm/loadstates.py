"""States of loads, which the engine's thread and threads of ours change at the same time."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence

from kmesh.errors import ConnectionClosed, KMeshError
from kmesh_vllm.counts import Counts
from kmesh_vllm.loadjob import LoadJob, State

logger = logging.getLogger("kmesh_vllm")


class LoadStates:
    """Changes states of one worker's loads, and knows who still reads their memory. Thread-safe.

    Args:
        end: told the number of a load whose memory nobody reads any more.

    Attributes:
        news: a thread of ours has made a load ready, or has ended one.
        closing: nothing is begun any more.
    """

    def __init__(self, counts: Counts, end: Callable[[int], None]) -> None:
        self._counts = counts
        self._end = end
        self._lock = threading.Lock()
        self.news = threading.Event()
        self.closing = False

    def join(self, jobs: Sequence[LoadJob]) -> None:
        """One more reads their memory."""
        with self._lock:
            for job in jobs:
                job.users += 1

    def leave(self, job: LoadJob) -> None:
        """One reads a job's memory no longer."""
        with self._lock:
            job.users -= 1
            last = not job.users
        if last:
            self._end(job.number)

    def written(self, jobs: Sequence[LoadJob], then: State) -> list[LoadJob]:
        """Jobs that wait are in this state from here on, all at the same time; the others."""
        late: list[LoadJob] = []
        with self._lock:
            for job in jobs:
                if job.state is not State.WAITING:
                    late.append(job)
                else:
                    job.state = then
        return late

    def take_ready(self, jobs: Iterable[LoadJob]) -> list[LoadJob]:
        """Those that are ready: they move from here on."""
        ready = []
        with self._lock:
            for job in jobs:
                if job.state is State.READY:
                    job.state = State.MOVING
                    ready.append(job)
        return ready

    def decode(self, jobs: Sequence[LoadJob], why: str) -> None:
        """They wait again, until their recipes were decoded."""
        with self._lock:
            for job in jobs:
                job.decoded, job.state = why, State.WAITING

    def done(self, job: LoadJob) -> None:
        """It has moved."""
        with self._lock:
            job.state = State.DONE

    def failed(self, job: LoadJob, wrong: Exception) -> None:
        """It could not be made ready."""
        if isinstance(wrong, ConnectionClosed):
            self.fail(job, (State.WAITING,), "load_failed_lost")
        else:
            log(wrong)
            self.fail(job, (State.WAITING,), "load_failed_error")
        self.news.set()

    def fail(self, job: LoadJob, expected: tuple[State, ...], count: str) -> None:
        """Fails a whole load, if it is still in a state that the caller expects."""
        with self._lock:
            if job.state not in expected:
                return
            job.bad = [(job.plan.begin, job.plan.end)]
            job.state = State.DONE
        self._counts.add(count)


def log(wrong: Exception) -> None:
    """Why a load failed."""
    if isinstance(wrong, KMeshError | OSError):
        logger.warning("a load failed: %s", str(wrong))
    else:
        logger.error("a load failed", exc_info=wrong)
