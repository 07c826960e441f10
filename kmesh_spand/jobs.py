"""What the store worker and the device workers have in common: jobs of control, for some memory."""

from __future__ import annotations

import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, NoReturn, Protocol, TypeAlias

from kmesh.dmabuf import NotExported
from kmesh.mapping import Mapping
from kmesh_spand import ipc, jobmessages, logs, messages
from kmesh_spand.recipes import Recipes, Unloadable
from kmesh_spand.throttle import Throttle, be_nice

logger = logging.getLogger(__name__)

#: Runs a job with its message.
Submit: TypeAlias = Callable[..., object]

Recode: TypeAlias = jobmessages.Encode | jobmessages.KeepRecipe | jobmessages.Densify
Job: TypeAlias = jobmessages.Copy | jobmessages.Verify | jobmessages.Wipe | Recode


class Copier(Protocol):
    """Slabs that this process writes. A range that no span can have is a ValueError."""

    def copy(self, slab: int, offset: int, staging: Mapping, begin: int, length: int) -> int:
        """A payload from staging into a slab, with its sums; returns their root.

        Args:
            begin: where the payload lies in the staging.
        """


class Store(Copier, Protocol):
    """What else is done with them."""

    def verify(self, slab: int, offset: int, length: int, root: int) -> bool:
        """Whether a payload has its sums, and they fold to the root."""

    def wipe(self, slab: int) -> None:
        """Zeros everywhere, sums too."""

    def export(self, slab: int, offset: int, length: int) -> int:
        """A DMA-BUF of whole pages; the caller owns it.

        Raises:
            NotExported: there is none to be had.
        """


class NoStaging(Exception):
    """A copy's source is not there: it could not be mapped, which was said, or is gone."""


class Crews(NamedTuple):
    """Who runs a job, now or later. Copies never queue behind the others."""

    copy: Submit
    check: Submit
    export: Submit
    recode: Submit

    @classmethod
    def hired(cls, copy_threads: int) -> Crews:
        """Threads that are there.

        Raises:
            RuntimeError: there can't be as many.
        """
        sizes = {"copy": copy_threads, "verify": 1, "export": 1, "recode": 1}
        return cls(*(pool(threads, name).submit for name, threads in sizes.items()))


def pool(threads: int, name: str) -> ThreadPoolExecutor:
    """A pool whose threads are there: one that is missed later would leave its job behind."""
    made = ThreadPoolExecutor(threads, name)
    together = threading.Barrier(threads)
    for _ in range(threads):
        made.submit(together.wait)
    return made


class JobWorker:
    """Takes jobs from control until it is gone. It is one process, and ends as such.

    It knows neither keys nor sessions' rights: control has checked every range, and the store
    checks them again.

    Args:
        control: the way to it.
        verify_rate: bytes that are verified in a second; 0: as many as there are.
    """

    def __init__(self, control: socket.socket, verify_rate: int) -> None:
        self._control = control
        self._staging: dict[int, Mapping] = {}
        self._throttle = Throttle(verify_rate)
        self._sending = threading.Lock()

    def serve(
        self,
        crews: Crews,
        watched: socket.socket | None = None,
        turn: Callable[[], float | None] = lambda: None,
    ) -> NoReturn:
        """The process's life once its memory is there.

        Args:
            watched: says nothing; the process ends when that ends.
            turn: called before each wait; returns how many seconds it may last.
        """
        poll = select.poll()
        for channel in (self._control, watched):
            if channel is not None:
                poll.register(channel, select.POLLIN)
        while True:
            seconds = turn()
            ready = poll.poll(None if seconds is None else max(1, int(seconds * 1000)))
            for fd, _ in ready:
                if fd != self._control.fileno():
                    os._exit(0)
                try:
                    message, received = ipc.receive(self._control)
                except (EOFError, ConnectionError):
                    # Whatever still runs is for nobody: don't wait for it.
                    os._exit(0)
                except OSError as failed:
                    logger.error("the way to control: %s", failed)
                    os._exit(1)
                self.heard()
                self.take(message, received, crews)

    def heard(self) -> None:
        """Control serves: called before each message."""

    def stores(self) -> tuple[Copier, Store]:
        """What copies are made with, and what the other jobs are done with."""
        raise NotImplementedError

    def recipes(self) -> Recipes:
        """What encodes and decodes."""
        raise NotImplementedError

    def ends_by(self, job: Job | jobmessages.Export, failed: Exception) -> None:
        """What a job met may end the process; otherwise control is told of it."""

    def take(self, message: ipc.AnyMessage, fd: int | None, crews: Crews) -> None:
        """Does what a message says, and owns its fd."""
        match message:
            case jobmessages.Copy():
                crews.copy(self._job, message)
            case jobmessages.Verify() | jobmessages.Wipe():
                crews.check(self._job, message)
            case jobmessages.Encode() | jobmessages.KeepRecipe() | jobmessages.Densify():
                crews.recode(self._job, message)
            case jobmessages.ForgetRecipe():
                # Behind what made it.
                crews.recode(self.recipes().forget, message.job)
            case jobmessages.Export():
                crews.export(self._export, message)
            case messages.Beat():
                self._send(message)
            case jobmessages.Staging():
                self._map_staging(message, fd)
            case jobmessages.DropStaging():
                dropped = self._staging.pop(message.session, None)
                if dropped is not None:
                    dropped.close()
            case _:
                logger.error("unexpected message %s", type(message).__name__)

    def _map_staging(self, message: jobmessages.Staging, fd: int | None) -> None:
        about = {"session": message.session}
        # Its copies will say that there is no staging.
        if fd is None:
            logger.error("staging: no file descriptor is left for it", extra=about)
            return
        try:
            self._staging[message.session] = Mapping(fd, message.size)
        except OSError as failed:
            logger.error("staging: %s", failed, extra=about)
        finally:
            os.close(fd)

    def _job(self, job: Job) -> None:
        answer: ipc.AnyMessage
        about = (job.session, job.request) if isinstance(job, jobmessages.Copy) else (0, 0)
        with logs.about(*about):
            try:
                answer = self.done(job)
            except NoStaging as lacking:
                answer = jobmessages.Failed(job.job, str(lacking))
            except Unloadable as lacking:
                answer = jobmessages.Failed(job.job, str(lacking), unloadable=True)
            except Exception as failed:
                self.ends_by(job, failed)
                logger.exception("a job failed", extra={"job": job.job})
                answer = jobmessages.Failed(job.job, f"{type(failed).__name__}: {failed}")
        self._send(answer)

    def done(self, job: Job) -> ipc.AnyMessage:
        """Does a job; its answer."""
        copies, checks = self.stores()
        match job:
            case jobmessages.Copy():
                staging = self._staging.get(job.session)
                if staging is None:
                    raise NoStaging("the session has no staging")
                began = time.perf_counter()
                root = copies.copy(job.slab, job.offset, staging, job.staging_offset, job.length)
                return jobmessages.CopyDone(job.job, root, time.perf_counter() - began)
            case jobmessages.Verify():
                self._throttle.wait(job.length)
                good = checks.verify(job.slab, job.offset, job.length, job.root)
                return (
                    self.recipes().facts(job)
                    if good and job.recipe
                    else jobmessages.Verified(job.job, good)
                )
            case jobmessages.Wipe():
                checks.wipe(job.slab)
                return jobmessages.Wiped(job.job)
            case jobmessages.Encode():
                be_nice()
                return self.recipes().encode(job)
            case jobmessages.KeepRecipe():
                return self.recipes().keep(job)
            case jobmessages.Densify():
                return self.recipes().densify(job)

    def _export(self, job: jobmessages.Export) -> None:
        fd = -1
        answer: ipc.AnyMessage = jobmessages.Exported(job.job)
        try:
            fd = self.stores()[1].export(job.slab, job.offset, job.length)
        except NotExported as failed:
            answer = jobmessages.NotExported(job.job, failed.refusal, str(failed))
        except Exception as failed:
            self.ends_by(job, failed)
            logger.exception("an export failed", extra={"job": job.job})
            answer = jobmessages.NotExported(job.job, 0, f"{type(failed).__name__}: {failed}")
        try:
            self._send(answer, fd if fd >= 0 else None)
        finally:
            if fd >= 0:
                os.close(fd)

    def _send(self, message: ipc.AnyMessage, fd: int | None = None) -> None:
        with self._sending:
            try:
                ipc.send(self._control, message, fd)
            except OSError:
                # Control is gone, and whatever this was about with it.
                os._exit(0)
