"""What the disk tier's core wants done, and what the store worker says of it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from kmesh_spand import diskmessages, ipc
from kmesh_spand.control.histogram import SECONDS, Histogram
from kmesh_spand.core import effects, events
from kmesh_spand.core.codes import Trouble

logger = logging.getLogger(__name__)


class DiskJobs:
    """Jobs on their way to a store worker, over its lives.

    When it dies, writes have failed and reads too; what is to be removed is removed by the next
    one, which also looks through the directory again.

    Attributes:
        direct: the worker reads and writes past the page cache. ready: it knows the directory.
        removed: files that were none. read_seconds, write_seconds: what jobs took in the worker.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, event: Callable[[events.Event], None]
    ) -> None:
        self.direct = self.ready = False
        self.removed = 0
        self.error = ""
        self.read_seconds = Histogram(SECONDS)
        self.write_seconds = Histogram(SECONDS)
        self._loop = loop
        self._event = event
        self._send: Callable[[ipc.AnyMessage], None] | None = None
        self._writes: dict[int, float] = {}
        self._reads: dict[int, effects.Fetch] = {}
        self._since: dict[int, float] = {}
        self._removals: dict[int, effects.Unlink] = {}
        self._told_direct = False

    @property
    def owed_seconds(self) -> float:
        """How long the oldest job has not been answered; 0 if none is owed."""
        return self._loop.time() - min(self._since.values()) if self._since else 0.0

    # From the core

    def write(self, job: effects.Spill) -> None:
        if self._send is None:
            self._loop.call_soon(self._event, events.SpillFailed(job.job, Trouble.LOST))
            return
        self._writes[job.job] = self._since[job.job] = self._loop.time()
        self._send(diskmessages.DiskWrite(job.job, job.slab, job.offset, job.span))

    def read(self, job: effects.Fetch) -> None:
        """Now, or when there is a worker."""
        self._reads[job.job] = job
        self._since[job.job] = self._loop.time()
        if self._send is not None:
            self._send(_read(job))

    def remove(self, job: effects.Unlink) -> None:
        self._removals[job.job] = job
        self._since[job.job] = self._loop.time()
        if self._send is not None:
            self._send(diskmessages.DiskRemove(job.job, job.name))

    def outage(self, *, away: bool) -> None:
        """The core treats the disk as not there, or does so no more."""
        if away:
            logger.error(
                "the disk tier does not answer: it is treated as not there, and tried again"
            )
        else:
            logger.info("the disk tier answers again")

    # From the worker

    def begin(self, send: Callable[[ipc.AnyMessage], None]) -> None:
        """A worker has started: it looks through the directory, and gets what waits."""
        self._send = send
        send(diskmessages.DiskScan())
        for removal in self._removals.values():
            send(diskmessages.DiskRemove(removal.job, removal.name))
        for job in self._reads.values():
            send(_read(job))

    def gone(self) -> None:
        """The worker is no more: it reads and writes nothing."""
        if self._send is None:
            return
        self._send, self.ready = None, False
        self._event(events.DiskGone())
        writes, self._writes = self._writes, {}
        reads, self._reads = self._reads, {}
        self._since = {job: since for job, since in self._since.items() if job in self._removals}
        for number in writes:
            self._event(events.SpillFailed(number, Trouble.LOST))
        for number in reads:
            self._event(events.FetchFailed(number, Trouble.LOST))

    def hear(self, message: ipc.AnyMessage) -> bool:
        """Takes a message of the worker; False if it is about something else."""
        match message:
            case diskmessages.DiskFound():
                self._event(events.DiskFound(message.files))
            case diskmessages.DiskScanned():
                self._scanned(message)
            case diskmessages.DiskWritten():
                if self._ends(self._writes, message.job):
                    self.write_seconds.observe(message.seconds)
                    self._event(events.Spilled(message.job, message.name))
            case diskmessages.DiskTaken():
                if self._ends(self._reads, message.job):
                    self.read_seconds.observe(message.seconds)
                    self._event(events.Fetched(message.job))
            case diskmessages.DiskRemoved():
                if self._ends(self._removals, message.job):
                    self._event(events.Unlinked(message.job, message.ok))
            case diskmessages.DiskFailed():
                self._fail(message)
            case _:
                return False
        return True

    def _ends(self, jobs: dict[int, Any], job: int) -> bool:
        if jobs.pop(job, None) is None:
            return False
        del self._since[job]
        return True

    def _scanned(self, message: diskmessages.DiskScanned) -> None:
        self.removed += message.removed
        self.error = message.error
        if message.error:
            # Nothing is written; what was found is read, if it can be.
            logger.error("the disk tier: %s", message.error)
            return
        self.direct, self.ready = message.direct, True
        if not self._told_direct:
            self._told_direct = True
            how = (
                "past the page cache"
                if message.direct
                else ("through the page cache: the file system has no direct I/O")
            )
            logger.info("the disk tier is read and written %s", how)
        self._event(events.DiskReady())

    def _fail(self, message: diskmessages.DiskFailed) -> None:
        writes = self._ends(self._writes, message.job)
        if not writes and not self._ends(self._reads, message.job):
            return
        if message.trouble != Trouble.LOST:
            logger.error("the disk tier: %s", message.error, extra={"job": message.job})
        kind = events.SpillFailed if writes else events.FetchFailed
        self._event(kind(message.job, message.trouble))


def _read(job: effects.Fetch) -> diskmessages.DiskRead:
    return diskmessages.DiskRead(job.job, job.name, job.slab, job.offset, job.span)
