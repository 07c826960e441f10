"""The store worker: the only process that writes slabs.

It copies staged bytes into slabs and sums them, verifies stored payloads, and puts pages behind
the slabs while the daemon already serves. It knows neither keys nor sessions' rights: control
has checked every range, and this process checks them again against its own mappings.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NoReturn, TypeAlias

from kmesh import _host, dmabuf, layout, numa
from kmesh.handles import HandleRefusal
from kmesh.mapping import Mapping
from kmesh_spand import ipc, logs, memory
from kmesh_spand.budget import Gate, shortage
from kmesh_spand.settings import Settings
from kmesh_spand.throttle import Throttle

logger = logging.getLogger(__name__)

#: Runs a job with its message.
Submit: TypeAlias = Callable[..., object]

_WIPE_BYTES = 32 << 20
#: Until memory that could not be had is asked for again.
_RETRY_SECONDS = 2.0


class Slab:
    """A slab mapped writable: payload tiles, then their sums."""

    __slots__ = ("capacity", "fd", "mapping", "sums")

    def __init__(self, fd: int, size: int, mapping: Mapping | None) -> None:
        self.fd = fd
        self.mapping = mapping or Mapping(fd, size, writable=True)
        self.capacity = layout.slab_capacity(size)
        self.sums = layout.sums_offset(size)

    def place(self, offset: int, length: int) -> tuple[int, int]:
        """Addresses of a payload and of its first tile sum.

        Raises:
            ValueError: that range is no span of this slab.
        """
        if offset < 0 or offset % layout.TILE_BYTES or length < 1:
            raise ValueError(f"{length} bytes at {offset} are no span")
        if offset + length > self.capacity:
            raise ValueError(f"{length} bytes at {offset} end outside the slab")
        base = self.mapping.address
        return base + offset, base + self.sums + offset // layout.TILE_BYTES * 8

    def missing(self) -> int:
        """Bytes that have no pages yet."""
        return max(0, self.mapping.size - os.fstat(self.fd).st_blocks * 512)

    def populated(self) -> bool:
        """Whether all of it has pages."""
        return not self.missing()

    def wipe(self) -> None:
        """Zeros wherever something was written; pages stay."""
        base, end = self.mapping.address, 0
        while True:
            try:
                begin = os.lseek(self.fd, end, os.SEEK_DATA)
            except OSError as nothing:
                if nothing.errno == errno.ENXIO:
                    return
                raise
            end = os.lseek(self.fd, begin, os.SEEK_HOLE)
            for at in range(begin, end, _WIPE_BYTES):
                ctypes.memset(base + at, 0, min(_WIPE_BYTES, end - at))


class NoStaging(Exception):
    """A copy's source is not there: it could not be mapped, which was said, or is gone."""


def _pool(threads: int, name: str) -> ThreadPoolExecutor:
    """A pool whose threads are there: one that is missed later would leave its job behind.

    Raises:
        RuntimeError: there can't be as many threads.
    """
    pool = ThreadPoolExecutor(threads, name)
    together = threading.Barrier(threads)
    for _ in range(threads):
        pool.submit(together.wait)
    return pool


class Worker:
    """Takes jobs from control until it is gone."""

    def __init__(
        self,
        settings: Settings,
        channel: socket.socket,
        slabs: Sequence[tuple[int, int]],
        writable: Sequence[Mapping] | None,
    ) -> None:
        self._settings = settings
        self._channel = channel
        mappings: Sequence[Mapping | None] = writable or [None] * len(slabs)
        self._slabs = [Slab(*slab, mapping) for slab, mapping in zip(slabs, mappings, strict=True)]
        self._gate = Gate(settings.memory_headroom, self._paused)
        self._staging: dict[int, Mapping] = {}
        self._throttle = Throttle(settings.verify_rate)
        self._sending = threading.Lock()

    def run(self) -> int:
        """The process's life; returns its exit status."""
        filler = threading.Thread(target=self._populate, name="populate", daemon=True)
        try:
            copies = _pool(self._settings.copy_threads, "copy")
            # Copies never queue behind verifications.
            checks = _pool(1, "verify")
            exports = _pool(1, "export")
        except RuntimeError as lacking:
            self._lacks(lacking)
        while True:
            try:
                message, fd = ipc.receive(self._channel)
            except (EOFError, ConnectionError):
                # Whatever still runs is for nobody: don't wait for it.
                os._exit(0)
            except OSError as failed:
                logger.error("the way to control: %s", failed)
                os._exit(1)
            if filler.ident is None:
                # Control serves. Before, it needs the processors more than the pool does.
                try:
                    filler.start()
                except RuntimeError as lacking:
                    self._lacks(lacking)
            self.take(message, fd, copies.submit, checks.submit, exports.submit)

    @staticmethod
    def _lacks(lacking: RuntimeError) -> NoReturn:
        logger.error("the store worker has not what it needs: %s", lacking)
        os._exit(1)

    def take(
        self,
        message: ipc.AnyMessage,
        fd: int | None,
        copy: Submit,
        check: Submit,
        export: Submit,
    ) -> None:
        """Does what a message says, and owns its fd.

        Args:
            copy, check, export: run a job, now or later.
        """
        match message:
            case ipc.Copy():
                copy(self._job, message)
            case ipc.Verify() | ipc.Wipe():
                check(self._job, message)
            case ipc.Export():
                export(self._export, message)
            case ipc.Beat():
                self._send(message)
            case ipc.Staging() if fd is not None:
                self._map_staging(message, fd)
            case ipc.DropStaging():
                dropped = self._staging.pop(message.session, None)
                if dropped is not None:
                    dropped.close()
            case _:
                logger.error("unexpected message %s", type(message).__name__)

    def _map_staging(self, message: ipc.Staging, fd: int) -> None:
        try:
            self._staging[message.session] = Mapping(fd, message.size)
        except OSError as failed:
            # Its copies will say that there is no staging.
            logger.error("staging: %s", failed, extra={"session": message.session})
        finally:
            os.close(fd)

    def _job(self, job: ipc.Copy | ipc.Verify | ipc.Wipe) -> None:
        answer: ipc.AnyMessage
        about = (job.session, job.request) if isinstance(job, ipc.Copy) else (0, 0)
        with logs.about(*about):
            try:
                match job:
                    case ipc.Copy():
                        answer = self._copy(job)
                    case ipc.Verify():
                        answer = self._verify(job)
                    case ipc.Wipe():
                        self._slab(job.slab).wipe()
                        answer = ipc.Wiped(job.job)
            except NoStaging as lacking:
                answer = ipc.Failed(job.job, str(lacking))
            except Exception as failed:
                logger.exception("a job failed", extra={"job": job.job})
                answer = ipc.Failed(job.job, f"{type(failed).__name__}: {failed}")
        self._send(answer)

    def _copy(self, job: ipc.Copy) -> ipc.AnyMessage:
        staging = self._staging.get(job.session)
        if staging is None:
            raise NoStaging("the session has no staging")
        end = job.staging_offset + job.length
        if job.staging_offset < 0 or end > staging.size:
            raise ValueError(f"the source ends at {end}, outside of {staging.size} bytes")
        # The view keeps the staging mapped should it be dropped meanwhile.
        view = staging.view(job.staging_offset, job.length)
        payload, sums = self._slab(job.slab).place(job.offset, job.length)
        began = time.perf_counter()
        root = _host.copy_with_sums(payload, _host.address(view), job.length, sums)
        return ipc.CopyDone(job.job, root, time.perf_counter() - began)

    def _verify(self, job: ipc.Verify) -> ipc.AnyMessage:
        self._throttle.wait(job.length)
        payload, sums = self._slab(job.slab).place(job.offset, job.length)
        return ipc.Verified(job.job, _host.verify(payload, job.length, sums, job.root))

    def _export(self, job: ipc.Export) -> None:
        """Makes a DMA-BUF. Pages that it would have to make are not for it to take."""
        fd = -1
        answer: ipc.AnyMessage = ipc.Exported(job.job)
        try:
            slab = self._slab(job.slab)
            need = min(job.length, slab.missing())
            if need and (short := shortage(need, self._settings.memory_headroom)):
                raise dmabuf.NotExported(HandleRefusal.NO_MEMORY, short)
            fd = dmabuf.create(slab.fd, [(job.offset, job.length)])
        except dmabuf.NotExported as failed:
            answer = ipc.NotExported(job.job, failed.refusal, str(failed))
        except Exception as failed:
            logger.exception("an export failed", extra={"job": job.job})
            answer = ipc.NotExported(job.job, 0, f"{type(failed).__name__}: {failed}")
        try:
            self._send(answer, fd if fd >= 0 else None)
        finally:
            if fd >= 0:
                os.close(fd)

    def _slab(self, number: int) -> Slab:
        if not 0 <= number < len(self._slabs):
            raise ValueError(f"there is no slab {number}")
        return self._slabs[number]

    def _populate(self) -> None:
        huge = self._settings.hugepages and memory.hugepages_allowed()
        started = time.monotonic()
        waiting = dict(enumerate(self._slabs))
        while waiting:
            for number, slab in list(waiting.items()):
                try:
                    granted = self._populate_slab(number, slab, huge)
                except OSError as failed:
                    self._send(ipc.PopulateFailed(number, str(failed.strerror)))
                    continue
                del waiting[number]
                if self._settings.hugepages and not granted:
                    self._send(ipc.Fallback("hugepages", number))
                self._send(ipc.Populated(number, slab.capacity, granted))
            if waiting:
                # What is missing now may be there later.
                time.sleep(_RETRY_SECONDS)
        logger.info("memory is populated", extra={"seconds": round(time.monotonic() - started, 3)})

    def _populate_slab(self, number: int, slab: Slab, huge: bool) -> bool:
        base, size = slab.mapping.address, slab.mapping.size
        if self._settings.numa_node >= 0:
            numa.bind(base, size, self._settings.numa_node)
        asked = huge and memory.advise_hugepages(base, size)
        sums = (slab.sums, size - slab.sums)

        def report(filled: int) -> None:
            done = min(filled - sums[1], slab.capacity) // layout.TILE_BYTES * layout.TILE_BYTES
            if 0 < done < slab.capacity:
                self._send(ipc.Populated(number, done, False))

        # The sums first: a payload is of no use without them.
        ranges = (sums, (0, slab.sums))
        # Pages that an earlier worker made need no room.
        gate = None if slab.populated() else self._gate
        filler = memory.Populator(slab.fd, base, ranges, huge=asked, done=report, gate=gate)
        filler.run(self._settings.populate_threads)
        if filler.fell_back:
            self._send(ipc.Fallback("populate", number))
        return asked and memory.hugepages_granted(base)

    def _paused(self, reason: str | None) -> None:
        if reason is None:
            logger.info("memory grows again")
        else:
            logger.warning("memory does not grow for now: %s", reason)
        self._send(ipc.PopulatePaused(reason or ""))

    def _send(self, message: ipc.AnyMessage, fd: int | None = None) -> None:
        with self._sending:
            try:
                ipc.send(self._channel, message, fd)
            except OSError:
                os._exit(0)


def run(
    settings: Settings,
    channel: socket.socket,
    slabs: Sequence[tuple[int, int]],
    writable: Sequence[Mapping] | None,
) -> int:
    """Entry of the process.

    Args:
        slabs: fd and size of each.
        writable: their mappings, inherited, where new ones would be refused.
    """
    try:
        worker = Worker(settings, channel, slabs, writable)
    except OSError as failed:
        logger.error("slabs can't be mapped: %s", failed.strerror)
        return 1
    return worker.run()
