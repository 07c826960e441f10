"""The store worker as control sees it: jobs on their way, and staging it must know."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass

from kmesh import errors
from kmesh.handles import HandleRefusal
from kmesh_spand import ipc, logs
from kmesh_spand.control.link import Link
from kmesh_spand.control.observer import CopyMark, Observer
from kmesh_spand.core import effects, events

logger = logging.getLogger(__name__)

#: Told a DMA-BUF's fd, which it owns, or what went wrong.
Made = Callable[[int, errors.RequestError | None], None]

_BEAT_SECONDS = 1.0
#: A worker is not ended for less silence than this.
_SILENT_SECONDS = 15.0


@dataclass(slots=True)
class SlabState:
    """What the worker said of a slab.

    Attributes:
        populated: payload bytes with pages.
        hugepages, small_pages: huge pages were granted, or asked for and not granted.
        failed: why the rest could not be populated, until it could.
    """

    size: int
    capacity: int
    populated: int = 0
    hugepages: bool = False
    small_pages: bool = False
    failed: str = ""


class StoreWorker:
    """Sends jobs, turns answers into events, and loses no job when the worker dies.

    Attributes:
        paused: why slabs do not grow now, or empty. pauses: how often they stopped growing.

    Args:
        event: where events for the core go.
        restart: asks the supervisor for a new worker, with a reason.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        slabs: list[SlabState],
        *,
        timeout: float,
        verify_rate: int,
        event: Callable[[events.Event], None],
        restart: Callable[[str], None],
        observer: Observer,
    ) -> None:
        self.slabs = slabs
        self.restarts = 0
        self.paused = ""
        self.pauses = 0
        self.pid = 0
        self.counters = {f"fallback_{kind}": 0 for kind in ipc.FALLBACKS} | {"populate_failed": 0}
        self._observer = observer
        self._loop = loop
        self._timeout = timeout
        self._verify_rate = verify_rate
        self._event = event
        self._restart = restart
        self._link: Link | None = None
        self._staging: dict[int, tuple[int, int]] = {}
        self._copies: dict[int, CopyMark] = {}
        self._checks: dict[int, int] = {}
        self._wipes: dict[int, effects.Wipe] = {}
        self._waiting: list[effects.Verify] = []
        self._exports: dict[int, Made] = {}
        self._export_number = 0
        self._heard_at = loop.time()
        self._given_up = False
        self._beats = 0
        self._beat_at: float | None = None
        self._next_beat = 0.0

    @property
    def up(self) -> bool:
        """Whether jobs go anywhere."""
        return self._link is not None and not self._given_up

    @property
    def copies(self) -> int:
        """Copies that were not answered yet."""
        return len(self._copies)

    @property
    def checks(self) -> int:
        """Verifications that were not answered yet, or wait for a worker."""
        return len(self._checks) + len(self._waiting)

    @property
    def silent_seconds(self) -> float:
        """How long the worker has owed a heartbeat; 0 if it owes none."""
        return 0.0 if self._beat_at is None else self._loop.time() - self._beat_at

    @property
    def owed_seconds(self) -> float:
        """How long no copy was answered, while some were owed."""
        return self._loop.time() - self._heard_at if self._copies else 0.0

    def attach(self, fd: int, restarts: int, pid: int) -> None:
        """A worker was started; takes ``fd``, the way to it."""
        self.restarts = restarts
        self.pid = pid
        self._detach()
        self._given_up = False
        self._beats = 0
        self._beat_at = None
        self._heard_at = self._loop.time()
        self._link = Link(self._loop, socket.socket(fileno=fd), self._heard, self._detach)
        for session, (staging, size) in self._staging.items():
            try:
                self._link.send(ipc.Staging(session, size), staging)
            except OSError as failed:
                # Its copies will say that there is no staging.
                logger.error("staging: %s", failed.strerror, extra={"session": session})
        waiting, self._waiting = self._waiting, []
        for job in waiting:
            self.verify(job)
        for wipe in self._wipes.values():
            self._link.send(ipc.Wipe(wipe.job, wipe.slab))

    def close(self) -> None:
        """Ends the link and closes all staging; no event comes any more."""
        if self._link is not None:
            self._link.close()
            self._link = None
        for fd, _ in self._staging.values():
            os.close(fd)
        self._staging.clear()

    def add_staging(self, session: int, fd: int, size: int) -> None:
        """Takes ``fd`` and lets the worker read from it.

        Raises:
            OSError: no file descriptor is left; ``fd`` stays the caller's.
        """
        if self._link is not None:
            self._link.send(ipc.Staging(session, size), fd)
        self._staging[session] = (fd, size)

    def drop_staging(self, session: int) -> int:
        """Destroys a session's staging, if it has one; returns the bytes that are free now."""
        fd, size = self._staging.pop(session, (-1, 0))
        if size:
            os.close(fd)
            if self._link is not None:
                self._link.send(ipc.DropStaging(session))
        return size

    def staging_size(self, session: int) -> int:
        """Bytes of a session's staging, 0 if it has none."""
        return self._staging.get(session, (-1, 0))[1]

    def copy(self, job: effects.Copy) -> None:
        """Starts a copy; CopyDone or CopyFailed follows, never before this returns."""
        if self._link is None:
            self._loop.call_soon(self._event, events.CopyFailed(job.job))
            return
        self._wakes()
        mark = self._copies[job.job] = self._observer.copy_begins(job.job, job.length)
        self._link.send(
            ipc.Copy(
                job.job,
                job.session,
                job.staging_offset,
                job.slab,
                job.offset,
                job.length,
                mark.request,
            )
        )

    def verify(self, job: effects.Verify) -> None:
        """Starts a verification; VerifyDone follows, never before this returns."""
        if self._link is None:
            # It waits: that there is no worker says nothing about the bytes.
            self._waiting.append(job)
            return
        self._wakes()
        self._checks[job.job] = job.length
        self._link.send(ipc.Verify(job.job, job.slab, job.offset, job.length, job.root))

    def wipe(self, job: effects.Wipe) -> None:
        """Starts a wipe; WipeDone follows, from this worker or a later one."""
        self._wakes()
        self._wipes[job.job] = job
        if self._link is not None:
            self._link.send(ipc.Wipe(job.job, job.slab))

    def export(self, slab: int, offset: int, length: int, made: Made) -> None:
        """Has a DMA-BUF made of whole pages; ``made`` is told later, once."""
        if self._link is None:
            gone = errors.Exhausted("there is no store worker just now")
            self._loop.call_soon(made, -1, gone)
            return
        self._wakes()
        self._export_number += 1
        self._exports[self._export_number] = made
        self._link.send(ipc.Export(self._export_number, slab, offset, length))

    def check(self) -> None:
        """Called now and then: a worker that owes answers for too long is given up."""
        self._beat()
        allowed = self._timeout
        if not self._copies and self._checks and self._verify_rate:
            allowed += sum(self._checks.values()) / self._verify_rate
        owes = bool(self._copies or self._checks or self._wipes or self._exports)
        if self.up and owes and self._loop.time() - self._heard_at > allowed:
            self._given_up = True
            self._restart(f"no answer for {allowed:.1f} s")
        # One that has never answered may be slow to start.
        patience = max(self._timeout, _SILENT_SECONDS)
        if self.up and self._beats > 1 and self.silent_seconds > patience:
            self._given_up = True
            self._restart(f"no heartbeat for {patience:.1f} s")

    def _beat(self) -> None:
        now = self._loop.time()
        if self._link is not None and self._beat_at is None and now >= self._next_beat:
            self._beats += 1
            self._beat_at = now
            self._next_beat = now + _BEAT_SECONDS
            self._link.send(ipc.Beat(self._beats))

    def _wakes(self) -> None:
        if not (self._copies or self._checks or self._wipes or self._exports):
            self._heard_at = self._loop.time()

    def _detach(self) -> None:
        """The worker is gone: it writes no more, so what it owed has failed."""
        if self._link is not None:
            self._link.close()
            self._link = None
        self.paused = ""
        self._beat_at = None
        copies, self._copies = self._copies, {}
        checks, self._checks = self._checks, {}
        exports, self._exports = self._exports, {}
        for made in exports.values():
            made(-1, errors.Exhausted("the store worker died"))
        for job, mark in copies.items():
            self._copy_failed(job, mark)
        for job in checks:
            self._event(events.VerifyDone(job, None))

    def _heard(self, message: ipc.AnyMessage, fd: int | None) -> None:
        if isinstance(message, ipc.Beat):
            if message.number == self._beats:
                self._beat_at = None
            return
        self._heard_at = self._loop.time()
        match message:
            case ipc.CopyDone():
                mark = self._copies.pop(message.job, None)
                if mark is None:
                    return
                self._observer.copy_ends(mark, message.seconds)
                with logs.about(mark.session, mark.request):
                    self._event(events.CopyDone(message.job, message.root))
            case ipc.Verified():
                self._checks.pop(message.job, None)
                self._event(events.VerifyDone(message.job, message.good))
            case ipc.Wiped():
                self._wipes.pop(message.job, None)
                self._event(events.WipeDone(message.job, True))
            case ipc.Exported():
                self._exported(message.job, -1 if fd is None else fd, None)
            case ipc.NotExported():
                self._exported(message.job, -1, _export_error(message))
            case ipc.PopulatePaused():
                self.paused = message.reason
                self.pauses += bool(message.reason)
            case ipc.Failed():
                self._fail(message)
            case ipc.Populated():
                slab = self.slabs[message.slab]
                slab.hugepages = slab.hugepages or message.hugepages
                # A restarted worker begins again; pages that are there stay there.
                if message.capacity == slab.capacity:
                    slab.failed = ""
                if message.capacity > slab.populated:
                    slab.populated = message.capacity
                    self._event(events.Populated(message.slab, message.capacity))
            case ipc.PopulateFailed():
                self.counters["populate_failed"] += 1
                slab = self.slabs[message.slab]
                if not slab.failed:
                    logger.error(
                        "a slab stays smaller: %s", message.error, extra={"slab": message.slab}
                    )
                slab.failed = message.error
            case ipc.Fallback():
                self._fell_back(message)
            case _:
                logger.error("unexpected message %s", type(message).__name__)

    def _exported(self, job: int, fd: int, failed: errors.RequestError | None) -> None:
        made = self._exports.pop(job, None)
        if made is not None:
            made(fd, failed)
        elif fd >= 0:
            os.close(fd)

    def _fell_back(self, message: ipc.Fallback) -> None:
        if message.kind == "hugepages":
            self.slabs[message.slab].small_pages = True
        name = f"fallback_{message.kind}"
        if not self.counters[name]:
            logger.info(ipc.FALLBACKS[message.kind], extra={"slab": message.slab})
        self.counters[name] += 1

    def _copy_failed(self, job: int, mark: CopyMark) -> None:
        self._observer.copy_ends(mark, None)
        with logs.about(mark.session, mark.request):
            self._event(events.CopyFailed(job))

    def _fail(self, message: ipc.Failed) -> None:
        mark = self._copies.pop(message.job, None)
        extra = {"job": message.job}
        if mark is not None:
            extra |= {"session": mark.session, "request": mark.request}
        logger.error("the store worker: %s", message.error, extra=extra)
        if mark is not None:
            self._copy_failed(message.job, mark)
        elif self._wipes.pop(message.job, None) is not None:
            self._event(events.WipeDone(message.job, False))
        elif self._checks.pop(message.job, None) is not None:
            self._event(events.VerifyDone(message.job, None))


def _export_error(message: ipc.NotExported) -> errors.RequestError:
    if message.refusal == HandleRefusal.SIZE_LIMIT:
        return errors.TooLarge(message.error)
    if message.refusal:
        return errors.Exhausted(message.error)
    return errors.InternalError("a bug in the daemon, see its log")
