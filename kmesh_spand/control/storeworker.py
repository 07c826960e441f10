"""A worker as control sees it: jobs on their way, and staging it must know."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable

from kmesh import errors
from kmesh_spand import ipc, jobmessages, logs, messages
from kmesh_spand.control.diskjobs import DiskJobs
from kmesh_spand.control.exports import Exports, Made
from kmesh_spand.control.growth import Growth
from kmesh_spand.control.heartbeat import Heartbeat
from kmesh_spand.control.knownstaging import KnownStaging
from kmesh_spand.control.link import Link
from kmesh_spand.control.observer import CopyMark, Observer
from kmesh_spand.control.recodes import Recode, Recodes
from kmesh_spand.control.verifications import Verifications
from kmesh_spand.core import effects, events

logger = logging.getLogger(__name__)

#: A worker is not ended for less silence than this.
_SILENT_SECONDS = 15.0
#: Workers in a row that are ended since they could not load the codec. Each end fails copies.
_MAX_UNLOADABLE = 3


class StoreWorker:
    """Sends jobs, turns answers into events, and loses no job when the worker dies.

    A worker is told nothing but a heartbeat before it has answered one: until then it starts,
    which may take longer than any job. Jobs wait, and copies fail when they have waited as long
    as one may take. Verifications and wipes outlive the worker: the next one does them.

    Args:
        name: as people call it.
        timeout: seconds in which one of the jobs that are owed must be answered.
        start_seconds: until a worker that has not answered at all is given up; None: somebody
            else watches that.
        growth: takes what it tells of its memory; None: that does not grow.
        disk: takes what it tells of files; None: it has none.
        fell_back: told of spans that were encoded in a lesser way; None: it has but one.
        event: where events for the core go.
        restart: asks the supervisor for a new worker, with a reason.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        name: str,
        *,
        timeout: float,
        start_seconds: float | None,
        verify_rate: int,
        growth: Growth | None,
        event: Callable[[events.Event], None],
        restart: Callable[[str], None],
        observer: Observer,
        disk: DiskJobs | None = None,
        fell_back: Callable[[messages.Fallback], None] | None = None,
    ) -> None:
        self.restarts = 0
        self.pid = 0
        self._name = name
        self._growth = growth
        self._disk = disk
        self._fell_back = fell_back
        self._observer = observer
        self._loop = loop
        self._timeout = timeout
        self._start_seconds = start_seconds
        self._verify_rate = verify_rate
        self._event = event
        self._restart = restart
        self._link: Link | None = None
        self._started = False
        self._staging = KnownStaging()
        self._copies: dict[int, CopyMark] = {}
        self._checks = Verifications(event)
        self._replaced: list[messages.Replaced] = []
        self._wipes: dict[int, effects.Wipe] = {}
        self._recodes = Recodes(event)
        self._exports = Exports(name)
        self._held: list[tuple[float, jobmessages.Copy | jobmessages.Export]] = []
        self._attached_at = self._heard_at = loop.time()
        self._given_up = False
        self._unloadable = 0
        self._heartbeat = Heartbeat(loop)

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
        return len(self._checks)

    @property
    def silent_seconds(self) -> float:
        """How long the worker has owed a heartbeat; 0 if it owes none."""
        return self._heartbeat.silent_seconds

    @property
    def owed_seconds(self) -> float:
        """How long no copy was answered, while some were owed."""
        return self._loop.time() - self._heard_at if self._copies else 0.0

    def attach(self, fd: int, restarts: int, pid: int, killed_by: int = 0) -> None:
        """A worker was started; takes ``fd``, the way to it.

        Args:
            killed_by: the signal by which the one before died, or 0.
        """
        self.restarts = restarts
        self.pid = pid
        self._detach()
        self._given_up = self._started = False
        self._heartbeat.begin()
        self._attached_at = self._heard_at = self._loop.time()
        self._link = Link(self._loop, socket.socket(fileno=fd), self._heard, self._detach)
        self._checks.killed(killed_by)
        if self._owes:
            self._beat()

    def attach_failed(self, restarts: int, pid: int) -> None:
        """A worker was started, but no file descriptor was left for the way to it."""
        self.restarts = restarts
        self.pid = pid
        self._detach()
        self._restart("control had no file descriptor left for it")

    def close(self) -> None:
        """Ends the link and closes all staging; no event comes any more."""
        if self._link is not None:
            self._link.close()
            self._link = None
        self._staging.close()

    def add_staging(self, session: int, fd: int, size: int) -> None:
        """Takes ``fd`` and lets the worker read from it.

        Raises:
            OSError: no file descriptor is left; ``fd`` stays the caller's.
        """
        self._staging.add(session, fd, size, self._link if self._started else None)
        if not self._started:
            # It fills its memory from the first word on.
            self._beat()

    def drop_staging(self, session: int) -> int:
        """Destroys a session's staging, if it has one; returns the bytes that are free now."""
        return self._staging.drop(session, self._link if self._started else None)

    def staging_size(self, session: int) -> int:
        """Bytes of a session's staging, 0 if it has none."""
        return self._staging.size(session)

    def staging_fd(self, session: int) -> int:
        """Of a session that has staging; it stays ours."""
        return self._staging.fd(session)

    def copy(self, job: effects.Copy) -> None:
        """Starts a copy; CopyDone or CopyFailed follows, never before this returns."""
        if self._link is None:
            self._loop.call_soon(self._event, events.CopyFailed(job.job))
            return
        self._wakes()
        mark = self._copies[job.job] = self._observer.copy_begins(job.job, job.length)
        self._send(
            jobmessages.Copy(
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
        """Starts a verification; VerifyDone follows, from this worker or a later one.

        That there is no worker, or that it died, says nothing about the bytes.
        """
        self._wakes()
        self._checks.begin(job, self._taken)
        if not self._started:
            self._beat()

    def wipe(self, job: effects.Wipe) -> None:
        """Starts a wipe; WipeDone follows, from this worker or a later one."""
        self._wakes()
        self._wipes[job.job] = job
        if (send := self._taken) is not None:
            send(jobmessages.Wipe(job.job, job.slab))
        else:
            self._beat()

    def replaced(self, message: messages.Replaced) -> None:
        """One slab is there instead of another: each worker is told that."""
        self._replaced.append(message)
        if self._link is not None and self._started:
            self._link.send(message)

    def recode(self, job: Recode) -> None:
        """Starts an encoding, the keeping of a recipe, or a decoding; the core's events follow."""
        self._wakes()
        self._recodes.begin(job, self._taken)
        if not self._started:
            self._beat()

    def forget_recipe(self, job: int) -> None:
        """What was encoded is not wanted."""
        self._recodes.forget(job, self._taken)

    def export(self, slab: int, offset: int, length: int, made: Made) -> None:
        """Has a DMA-BUF made of whole pages; ``made`` is told later, once."""
        if self._link is None:
            gone = errors.Exhausted(f"there is no {self._name} just now")
            self._loop.call_soon(made, -1, gone)
            return
        self._wakes()
        self._send(self._exports.begin(slab, offset, length, made))

    @property
    def _taken(self) -> Callable[[ipc.AnyMessage], None] | None:
        """The way to a worker that takes jobs; None: there is none."""
        return self._link.send if self._link is not None and self._started else None

    def _send(self, message: jobmessages.Copy | jobmessages.Export) -> None:
        assert self._link is not None
        if self._started:
            self._link.send(message)
            return
        self._held.append((self._loop.time(), message))
        self._beat()

    def check(self) -> None:
        """Called now and then: a worker that owes answers for too long is given up."""
        self._beat()
        if not self.up:
            return
        now = self._loop.time()
        if not self._started:
            while self._held and now - self._held[0][0] > self._timeout:
                self._refuse(self._held.pop(0)[1])
            patience = self._start_seconds
            if patience is not None and now - self._attached_at > max(patience, self._timeout):
                self._give_up(f"it has not started in {patience:.1f} s")
            return
        allowed = self._timeout
        if not self._copies and self._checks and self._verify_rate:
            allowed += self._checks.bytes / self._verify_rate
        if not self._copies:
            allowed += self._recodes.seconds
        if self._owes and now - self._heard_at > allowed:
            self._give_up(f"no answer for {allowed:.1f} s")
            return
        patience = max(self._timeout, _SILENT_SECONDS)
        if self.silent_seconds > patience:
            self._give_up(f"no heartbeat for {patience:.1f} s")

    def _give_up(self, reason: str) -> None:
        self._given_up = True
        self._restart(reason)

    def _refuse(self, message: jobmessages.Copy | jobmessages.Export) -> None:
        """Of what the worker was not told yet."""
        if isinstance(message, jobmessages.Copy):
            self._copy_failed(message.job, self._copies.pop(message.job))
        else:
            self._exports.not_started(message.job)

    def _beat(self) -> None:
        if self._link is not None:
            self._heartbeat.ask(self._link.send)

    @property
    def _owes(self) -> bool:
        return bool(self._copies or self._checks or self._wipes or self._exports or self._recodes)

    def _wakes(self) -> None:
        if not self._owes:
            self._heard_at = self._loop.time()

    def _begin(self) -> None:
        """The worker has answered: it gets all that waits for it."""
        assert self._link is not None
        self._started = True
        self._heard_at = self._loop.time()
        for replaced in self._replaced:
            self._link.send(replaced)
        self._staging.started(self._link)
        self._checks.started(self._link.send)
        for wipe in self._wipes.values():
            self._link.send(jobmessages.Wipe(wipe.job, wipe.slab))
        self._recodes.started(self._link.send)
        held, self._held = self._held, []
        for _, message in held:
            self._link.send(message)
        if self._disk is not None:
            self._disk.begin(self._link.send)

    def _detach(self) -> None:
        """The worker is gone: it writes no more, so copies that it owed have failed."""
        if self._link is not None:
            self._link.close()
            self._link = None
        if self._growth is not None:
            self._growth.paused = ""
        if self._disk is not None:
            self._disk.gone()
        if self._started:
            others = self._copies or self._wipes or self._recodes.told
            self._checks.gone(alone=not others)
        self._started = False
        self._heartbeat.gone()
        self._held.clear()
        copies, self._copies = self._copies, {}
        self._exports.gone()
        for job, mark in copies.items():
            self._copy_failed(job, mark)
        self._recodes.gone()

    def _heard(self, message: ipc.AnyMessage, fd: int | None) -> None:
        if isinstance(message, messages.Beat):
            self._heartbeat.hear(message)
            if not self._started:
                self._begin()
            return
        if self._disk is not None and self._disk.hear(message):
            return
        self._heard_at = self._loop.time()
        if self._growth is not None and self._growth.hear(message):
            return
        if self._recodes.hear(message):
            self._unloadable = 0
            return
        if self._exports.hear(message, fd):
            return
        match message:
            case jobmessages.CopyDone():
                mark = self._copies.pop(message.job, None)
                if mark is None:
                    return
                self._observer.copy_ends(mark, message.seconds)
                with logs.about(mark.session, mark.request):
                    self._event(events.CopyDone(message.job, message.root))
            case jobmessages.Verified():
                if message.bases:
                    self._unloadable = 0
                self._checks.hear(message)
            case jobmessages.Wiped():
                if self._wipes.pop(message.job, None) is not None:
                    self._event(events.WipeDone(message.job, True))
            case jobmessages.Failed():
                self._fail(message)
            case messages.Fallback() if self._fell_back is not None:
                self._fell_back(message)
            case _:
                logger.error("unexpected message %s", type(message).__name__)

    def _copy_failed(self, job: int, mark: CopyMark) -> None:
        self._observer.copy_ends(mark, None)
        with logs.about(mark.session, mark.request):
            self._event(events.CopyFailed(job))

    def _fail(self, message: jobmessages.Failed) -> None:
        mark = self._copies.pop(message.job, None)
        extra = {"job": message.job}
        if mark is not None:
            extra |= {"session": mark.session, "request": mark.request}
        logger.error("the %s: %s", self._name, message.error, extra=extra)
        if message.unloadable and self._unloadable < _MAX_UNLOADABLE:
            # What is half loaded stays so; the next process, which follows when this one sees its
            # link end, loads it anew. Jobs that are tried again are for that one.
            self._unloadable += 1
            logger.error("another %s is started", self._name)
            self._detach()
        if mark is not None:
            self._copy_failed(message.job, mark)
        elif self._wipes.pop(message.job, None) is not None:
            self._event(events.WipeDone(message.job, False))
        elif not self._recodes.failed(message.job):
            self._checks.failed(message.job)
