"""The supervisor's part in the store worker: it keeps one alive while there is a control."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable

from kmesh_spand import child, ipc, logs, messages
from kmesh_spand.backoff import Backoff
from kmesh_spand.diskdir import Directory
from kmesh_spand.settings import Settings
from kmesh_spand.storage import Storage

logger = logging.getLogger(__name__)

#: One that was killed and is stuck in the kernel, as in a disk that hangs, ends when that lets it
#: go. It is said after this.
_END_SECONDS = 10.0
#: At the daemon's own end it is not waited for longer.
_CLOSE_SECONDS = 5.0
#: How often one that was killed is looked at: at first, and after long.
_LOOK_SECONDS, _RARE_LOOK_SECONDS = 0.01, 1.0


class WorkerKeeper:
    """The store worker, over all of its lives.

    Args:
        tell: where control is told of each that is started; a file descriptor stays ours.

    One that was killed is over when it has left its memory, so that nothing it does can matter to
    the next one. Unmapping a large pool goes on for seconds after that.

    Attributes:
        pid: of the one that runs, or was killed and may write yet, or 0.
        start_at: when the next one is due, by the monotonic clock; None: none is.
        ending: it works for nobody any more, and is not over yet.
        late_at: when that is said to take long.
    """

    def __init__(
        self, settings: Settings, tell: Callable[[ipc.AnyMessage, int | None], None]
    ) -> None:
        self.pid = 0
        self.start_at: float | None = None
        self.ending = False
        self.late_at: float | None = None
        self._settings = settings
        self._tell = tell
        self._restarts = -1
        self._backoff = Backoff()
        self._killed_by = 0
        self._killed_at: float | None = None
        self._leaving: set[int] = set()

    def start_due(self, now: float, storage: Storage, life: int, disk: Directory | None) -> None:
        """Starts one if it is time. Arguments as of ``start``."""
        if self.start_at is None or now < self.start_at:
            return
        self.start_at = None
        try:
            self.start(now, storage, life, disk)
        except OSError as failed:
            logger.error("the store worker could not be started: %s", failed)
            self.start_at = self._backoff.died(now)

    def start(self, now: float, storage: Storage, life: int, disk: Directory | None) -> None:
        """Starts one; there is none.

        Args:
            storage: what it works on.
            life: file descriptor of the lock that it holds as long as it lives.
            disk: where files are; None: there are none, or another daemon has them.

        Raises:
            OSError: there is no process or no file descriptor for it.
        """
        assert not self.pid
        self._restarts += 1
        ours, theirs = ipc.pair()
        settings = self._settings

        def main() -> int:
            logs.configure("worker", level=settings.log_level, form=settings.log_format)
            from kmesh_spand import worker

            return worker.run(settings, theirs, worker.Ground.of(storage), disk)

        keep = [*(slab.fd for slab in storage.shared.slabs.values()), theirs.fileno(), life]
        if disk is not None:
            # The lock too: no other daemon may use it while this process still writes.
            keep += [disk.fd, disk.lock]
        with theirs:
            self.pid = child.fork_or_close(ours, "worker", keep, main)
        self._tell(messages.NewWorker(self._restarts, self.pid, self._killed_by), ours.fileno())
        ours.close()
        self._backoff.started(now)

    def kill(self) -> None:
        """Ends the one that runs, if any; the next one follows when it is over."""
        if self.pid:
            self._kill()

    def _kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        if self._killed_at is None:
            self._killed_at = time.monotonic()

    def end(self) -> None:
        """Ends the one that runs, if any; none follows. It is not waited for."""
        if self.pid and not self.ending:
            self.ending = True
            self.late_at = time.monotonic() + _END_SECONDS
            self._kill()
        self.start_at = None

    def say_late(self, now: float) -> None:
        """Says once that one that was ended takes long to be gone."""
        if self.late_at is not None and now >= self.late_at:
            self.late_at = None
            logger.error(
                "the store worker was killed, and has not ended: the kernel holds it (process %d); "
                "control starts when it has left its memory",
                self.pid,
            )

    @property
    def look_at(self) -> float | None:
        """When to try again to ``let_go``; None: it was not killed."""
        if self._killed_at is None:
            return None
        now = time.monotonic()
        return now + min(max(_LOOK_SECONDS, (now - self._killed_at) / 8), _RARE_LOOK_SECONDS)

    def let_go(self) -> bool:
        """Whether it was killed and has left its memory. ``died`` follows; it is reaped later."""
        if self._killed_at is None or not child.has_left_memory(self.pid):
            return False
        self._leaving.add(self.pid)
        return True

    def reap(self) -> None:
        """Of those that were let go, the ones that are gone."""
        self._leaving -= {pid for pid in self._leaving if os.waitpid(pid, os.WNOHANG)[0]}

    def died(self, status: int, now: float) -> None:
        """It was reaped or let go, with this exit status, or minus the signal that killed it."""
        self.pid, self._killed_at = 0, None
        if self.ending:
            self.ending, self.late_at, self._killed_by = False, None, 0
            return
        self._killed_by = max(0, -status)
        self.start_at = self._backoff.died(now)

    def close(self) -> None:
        """Ends the one that runs, if any, for good.

        One that the kernel holds is left to the system: it has been killed.
        """
        self.end()
        child.wait({self.pid, *self._leaving} - {0}, _CLOSE_SECONDS)
        self.pid, self._killed_at = 0, None
        self._leaving.clear()
