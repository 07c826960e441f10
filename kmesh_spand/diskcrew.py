"""Threads of the store worker that do what is asked of the disk, apart from all its other jobs."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from kmesh_spand import diskmessages, ipc
from kmesh_spand.core.codes import Trouble
from kmesh_spand.diskstore import DiskStore, DiskTrouble, Found
from kmesh_spand.jobs import pool

logger = logging.getLogger(__name__)

_WRITERS = 2
_AWAY = "another daemon uses its directory"
#: Bytes of keys and names in one message of files that were found.
_BATCH_BYTES = 8192
_FOUND_BYTES = 320
#: Files that are named in the log when they are removed; how many there are is counted.
_TOLD = 10


class NoDisk:
    """In a crew's place while another daemon has the directory: nothing of it is touched."""

    def __init__(self, send: Callable[[ipc.AnyMessage], None]) -> None:
        self._send = send

    def take(self, message: ipc.AnyMessage) -> bool:
        """As of ``DiskCrew``; all that is asked for is refused."""
        match message:
            case diskmessages.DiskScan():
                self._send(diskmessages.DiskScanned(0, False, _AWAY))
            case diskmessages.DiskWrite() | diskmessages.DiskRead():
                self._send(diskmessages.DiskFailed(message.job, Trouble.LOST, _AWAY))
            case diskmessages.DiskRemove():
                self._send(diskmessages.DiskRemoved(message.job, False))
            case _:
                return False
        return True


class DiskCrew:
    """Reads never queue behind writes, and neither behind the scan.

    Args:
        send: to control, from any thread.

    Raises:
        RuntimeError: there can't be as many threads.
    """

    def __init__(
        self, store: DiskStore, readers: int, send: Callable[[ipc.AnyMessage], None]
    ) -> None:
        self._store = store
        self._send = send
        self._reads = pool(readers, "disk-read")
        self._writes = pool(_WRITERS, "disk-write")
        self._scans = pool(1, "disk-scan")

    def take(self, message: ipc.AnyMessage) -> bool:
        """Does what a message says, soon; False if it is about something else."""
        match message:
            case diskmessages.DiskScan():
                self._scans.submit(self._scan)
            case diskmessages.DiskWrite():
                self._writes.submit(self._do, self._write, message)
            case diskmessages.DiskRead():
                self._reads.submit(self._do, self._read, message)
            case diskmessages.DiskRemove():
                self._writes.submit(self._remove, message)
            case _:
                return False
        return True

    def _scan(self) -> None:
        removed, error = 0, ""
        batch: list[Found] = []
        try:
            self._store.prepare()
            size = 0
            for found in self._store.scan():
                if isinstance(found, str):
                    removed += 1
                    if removed <= _TOLD:
                        logger.warning("a file of the disk tier was removed: %s", found)
                    continue
                batch.append(found)
                size += _FOUND_BYTES + 48 * len(found.span.names)
                if size >= _BATCH_BYTES:
                    self._tell(batch)
                    size = 0
        except DiskTrouble as trouble:
            error = str(trouble)
        except Exception as failed:
            logger.exception("the scan of the disk tier failed")
            error = f"{type(failed).__name__}: {failed}"
        self._tell(batch)
        self._send(diskmessages.DiskScanned(removed, self._store.direct, error))

    def _tell(self, batch: list[Found]) -> None:
        if batch:
            self._send(diskmessages.DiskFound(tuple((found.name, found.span) for found in batch)))
            batch.clear()

    def _do(
        self,
        how: Callable[[diskmessages.DiskWrite | diskmessages.DiskRead], ipc.AnyMessage],
        job: diskmessages.DiskWrite | diskmessages.DiskRead,
    ) -> None:
        answer: ipc.AnyMessage
        try:
            answer = how(job)
        except DiskTrouble as trouble:
            answer = diskmessages.DiskFailed(job.job, trouble.kind, str(trouble))
        except Exception as failed:
            logger.exception("a job of the disk failed", extra={"job": job.job})
            answer = diskmessages.DiskFailed(
                job.job, Trouble.IO, f"{type(failed).__name__}: {failed}"
            )
        self._send(answer)

    def _write(self, job: diskmessages.DiskWrite | diskmessages.DiskRead) -> ipc.AnyMessage:
        began = time.perf_counter()
        name = self._store.write(job.slab, job.offset, job.span)
        return diskmessages.DiskWritten(job.job, name, time.perf_counter() - began)

    def _read(self, job: diskmessages.DiskWrite | diskmessages.DiskRead) -> ipc.AnyMessage:
        assert isinstance(job, diskmessages.DiskRead)
        began = time.perf_counter()
        self._store.read(job.name, job.slab, job.offset, job.span)
        return diskmessages.DiskTaken(job.job, time.perf_counter() - began)

    def _remove(self, job: diskmessages.DiskRemove) -> None:
        ok = True
        try:
            self._store.remove(job.name)
        except DiskTrouble as trouble:
            logger.error("the disk tier: %s", trouble)
            ok = False
        self._send(diskmessages.DiskRemoved(job.job, ok))
