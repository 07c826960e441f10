"""Verifications that a worker owes. They outlive it: the next one does them."""

from __future__ import annotations

import signal
from collections.abc import Callable

from kmesh_spand import ipc, jobmessages
from kmesh_spand.control.recodes import facts
from kmesh_spand.core import effects, events

#: A worker that reads memory which is broken, or not there, dies of these.
_DEATHS_BY_READING = (signal.SIGBUS, signal.SIGSEGV)


class Verifications:
    """Tells each to worker after worker, until one has judged it, or died at it.

    Args:
        event: where events for the core go.
    """

    def __init__(self, event: Callable[[events.Event], None]) -> None:
        self._event = event
        self._jobs: dict[int, effects.Verify] = {}
        # What the worker before was reading when it ended.
        self._read_last: int | None = None

    def __len__(self) -> int:
        """Those that were not answered yet, or wait for a worker."""
        return len(self._jobs)

    @property
    def bytes(self) -> int:
        """What they read, all together."""
        return sum(job.length for job in self._jobs.values())

    def begin(self, job: effects.Verify, send: Callable[[ipc.AnyMessage], None] | None) -> None:
        """A job of the core's; ``send`` is None while there is no worker that takes it."""
        self._jobs[job.job] = job
        if send is not None:
            send(_message(job))

    def started(self, send: Callable[[ipc.AnyMessage], None]) -> None:
        """A worker takes jobs: it gets all of them."""
        for job in self._jobs.values():
            send(_message(job))

    def hear(self, message: jobmessages.Verified) -> None:
        """A payload was judged."""
        if self._jobs.pop(message.job, None) is not None:
            self._event(events.VerifyDone(message.job, message.good, facts(message)))

    def failed(self, job: int) -> None:
        """A payload can't be read, although the worker is well."""
        if self._jobs.pop(job, None) is not None:
            self._event(events.VerifyDone(job, None))

    def gone(self, *, alone: bool) -> None:
        """The worker, which had been told of them, is gone; ``alone``: it had no other jobs."""
        if not self._jobs:
            return
        # They are done one after another, so it was at the first of them. The next worker does
        # the others before.
        first = next(iter(self._jobs))
        self._jobs[first] = self._jobs.pop(first)
        # With another job on its way nobody knows what the worker died of.
        self._read_last = first if alone else None

    def killed(self, signal_number: int) -> None:
        """The signal by which the worker before died is known now, or that it was none (0)."""
        if signal_number in _DEATHS_BY_READING and self._read_last is not None:
            self.failed(self._read_last)
        self._read_last = None


def _message(job: effects.Verify) -> jobmessages.Verify:
    return jobmessages.Verify(job.job, job.slab, job.offset, job.length, job.root, job.recipe)
