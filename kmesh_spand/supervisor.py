"""The supervisor: holds the memory and the listening socket, keeps the other processes alive.

Single-threaded and small. Its fds are the storage: control and worker may die and come back.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import socket
import time

from kmesh.errors import ConfigError
from kmesh_spand import child, logs, messages
from kmesh_spand.controlkeeper import ControlKeeper
from kmesh_spand.diskdir import Custody, open_directory
from kmesh_spand.fdstore import FdStore
from kmesh_spand.gpukeeper import GpuKeeper
from kmesh_spand.handover import Handover
from kmesh_spand.holdings import Holdings
from kmesh_spand.inherit import SEALED, Named
from kmesh_spand.launch import Prepared
from kmesh_spand.notify import notify
from kmesh_spand.settings import Settings
from kmesh_spand.workerkeeper import WorkerKeeper

logger = logging.getLogger(__name__)

#: What a process of the daemon needs beside one fd for each slab, with a few sessions.
_SPARE_FDS = 40
#: Processes that are killed are gone sooner, unless a driver holds them.
_HALT_SECONDS = 10.0
_HALT_POLL_SECONDS = 0.002


class Supervisor:
    """One daemon on one socket directory.

    Args:
        prepared: the first control process, which this object launches or ends.
        upgrade: take over from the daemon that runs there.
    """

    def __init__(
        self, settings: Settings, version: str, prepared: Prepared, *, upgrade: bool = False
    ) -> None:
        self._settings = settings
        self._version = version
        self._ready = False
        self._failed = 0
        self._stop_signal = 0
        self._stop_by: float | None = None
        self._halting = False
        self._upgrade = upgrade
        self._store = FdStore(os.environ)
        self._control = ControlKeeper(settings, version, prepared)
        self._worker = WorkerKeeper(settings, self._control.tell)
        self._gpus = GpuKeeper(settings, self._control.tell, self._store)
        self._holdings: Holdings
        self._handover = Handover(self)
        self._disk = Custody()

    def run(self) -> int:
        """Serves until told to stop. Returns the exit status; re-raises SIGINT."""
        logs.configure("supervisor", level=self._settings.log_level, form=self._settings.log_format)
        try:
            self._open()
        except ConfigError as failed:
            logger.error("%s", failed)
            self._control.end_prepared()
            return 2
        except OSError as failed:
            logger.error("could not start: %s", failed)
            self._control.end_prepared()
            return 1
        except KeyboardInterrupt:
            self._control.end_prepared()
            _interrupt()
        try:
            self._loop()
        finally:
            self._close()
        if self._stop_signal == signal.SIGINT:
            _interrupt()
        return self._failed

    # Start and end.

    def _open(self) -> None:
        settings = self._settings
        hard = child.raise_file_limit()
        # A slab that is exported as DMA-BUF has a second one, on a GPU as well.
        each = 2 if settings.dma_buf == "slabs" else 1
        slabs = settings.slab_numbers() + len(settings.gpu_slabs())
        needed = each * slabs
        needed += len(settings.gpu) + len(settings.tenancy().groups) - 1 + _SPARE_FDS
        if needed > hard:
            raise ConfigError(
                f"slab_size: {slabs} slabs need {needed} file descriptors, "
                f"the limit (ulimit -n) is {hard}; make slabs larger or raise it"
            )
        self._holdings = held = Holdings(
            settings, self._version, self._store, upgrade=self._upgrade
        )
        if settings.disk:
            try:
                self._disk = Custody(open_directory(settings.disk, settings.disk_bytes))
            except BaseException:
                held.close()
                raise
        self._gpus.begin(held.life.held, held.gpu)
        self._handover.begin(held.place, held.manifest, held.life)

    def _close(self) -> None:
        self._control.close()
        self._worker.close()
        self._gpus.close()
        self._control.forget()
        self._handover.close()
        self._holdings.close()
        self._disk.close()
        logger.info("stopped")

    # The loop.

    def _loop(self) -> None:
        wake, waker = socket.socketpair()
        with wake, waker:
            for end in (wake, waker):
                end.setblocking(False)
            signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
            signal.signal(signal.SIGCHLD, lambda *_: None)
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, self._on_stop)
            while not self._done():
                self._start_due()
                self._wait(wake)
                self._reap()
            signal.set_wakeup_fd(-1)

    def _wait(self, wake: socket.socket) -> None:
        """Until a signal, a message from control, or the next moment at which something is due."""
        poll = select.poll()
        poll.register(wake, select.POLLIN)
        control = self._control
        if control.sock is not None:
            wanted = select.POLLOUT if control.blocked else 0
            poll.register(control.sock, select.POLLIN | wanted)
        for channel in (*self._gpus.sockets, *self._handover.sockets):
            poll.register(channel, select.POLLIN)
        for fd, what in poll.poll(self._timeout_ms()):
            if fd == wake.fileno():
                with contextlib.suppress(BlockingIOError):
                    wake.recv(4096)
            elif self._gpus.hear(fd):
                self._announce()
            elif self._handover.hear(fd):
                continue
            elif control.sock is not None and fd == control.sock.fileno():
                if what & select.POLLOUT:
                    control.flush()
                if what & ~select.POLLOUT:
                    self._hear_control()
        self._handover.turn()
        self._store.retry()
        if control.retry_at is not None and time.monotonic() >= control.retry_at:
            control.flush()

    def _done(self) -> bool:
        failure = self._gpus.failure
        if failure is not None and not self._stop_signal:
            logger.error("could not start: %s", failure.error)
            self._failed = 2 if failure.setting else 1
        if self._failed or self._handover.gone:
            return True
        if not self._stop_signal:
            return False
        if self._stop_by is None:
            self._begin_stop()
        assert self._stop_by is not None
        if self._control.pid and time.monotonic() >= self._stop_by:
            logger.warning("not finished in time, ending what still runs")
            return True
        return not self._control.pid

    def _on_stop(self, number: int, _frame: object) -> None:
        if self._stop_signal:
            # Asked twice: don't wait for anything.
            self._stop_by = 0.0
        self._stop_signal = self._stop_signal or number

    def _begin_stop(self) -> None:
        notify("STOPPING=1")
        logger.info("stopping", extra={"signal": signal.Signals(self._stop_signal).name})
        self._stop_by = time.monotonic() + self._settings.shutdown_timeout_ms / 1000
        self._control.tell(messages.Drain())

    def _timeout_ms(self) -> int | None:
        ours = (
            # The end of a process is told by a signal.
            None if self._occupied else self._control.start_at,
            self._worker.late_at,
            self._worker.look_at,
            self._worker.start_at,
            self._stop_by,
            self._control.retry_at,
            self._handover.moment,
            self._store.moment,
            None if self._stop_signal else self._disk.moment,
        )
        moments = [at for at in ours if at is not None]
        if self._control.pid:
            moments += self._gpus.moments
        if not moments:
            return None
        return max(0, int((min(moments) - time.monotonic()) * 1000) + 1)

    # Children.

    def _start_due(self) -> None:
        if self._stop_signal:
            self._control.start_at = self._worker.start_at = None
            self._gpus.stop()
            return
        now = time.monotonic()
        self._worker.say_late(now)
        due = self._control.start_at
        if due is not None and now >= due and not self._occupied:
            self._control.start_at = None
            try:
                self._start_control(now)
                self._worker.start_at = now
            except OSError as failed:
                logger.error("control could not be started: %s", failed)
                self._control.put_off(now)
        if self._control.pid:
            held = self._holdings
            self._worker.start_due(now, held.storage, held.life.held, self._disk.directory)
        if self._disk.came_back(now) and self._worker.pid:
            logger.info("the disk tier's directory is ours again: restarting the store worker")
            self._worker.kill()
        if self._control.pid:
            self._gpus.start_due(now)

    def _start_control(self, now: float) -> None:
        assert not self._occupied
        self._control.start(now, self._holdings)
        for message, fd in self._gpus.known():
            self._control.tell(message, fd)

    def _hear_control(self) -> None:
        message = self._control.hear()
        match message:
            case None:
                pass
            case messages.Ready():
                self._control.ready = self._control.worked = True
                self._announce()
            case messages.Health():
                notify("STATUS=" + (f"not ready: {message.text}" if message.text else "ready"))
            case messages.RestartWorker():
                what = "the store worker" if message.gpu < 0 else f"device worker {message.gpu}"
                logger.error("restarting %s: %s", what, message.reason)
                if message.gpu >= 0:
                    self._gpus.restart(message.gpu)
                else:
                    self._worker.kill()
            case messages.SlabWanted():
                self._gpus.tell(message.slab)
            case messages.GivenUp():
                self._replace(message.slab)
            case messages.Stop():
                self._stop_signal = self._stop_signal or signal.SIGTERM
            case _:
                logger.error("unexpected message %s", type(message).__name__)

    def _replace(self, slab: int) -> None:
        """Gives back a sealed slab that is empty."""
        if slab not in self._holdings.storage.sealed:
            logger.error("slab %d is not sealed, and was given up", slab)
            return
        # The memory that was offered is not all of it any more.
        self._handover.break_off()
        heir = self._holdings.replace(slab)
        self._control.tell(messages.Replaced(slab, heir))

    def _announce(self) -> None:
        """Says once for each control process that all is there."""
        if not self._control.ready or not self._gpus.ready:
            return
        self._control.ready = False
        settings, storage = self._settings, self._holdings.storage
        logger.info(
            "ready: %s, %d MiB in %d slabs",
            settings.socket_dir,
            settings.host_memory + len(settings.gpu) * settings.gpu_memory >> 20,
            len(storage.slabs) + len(self._gpus.slabs),
            extra={"epoch": f"{storage.epoch:016x}", "version": self._version},
        )
        # When told to stop, the daemon before this one had better go on.
        if not self._ready and not self._stop_signal:
            self._ready = True
            self._holdings.serving()
            notify("READY=1")

    @property
    def _pids(self) -> list[int]:
        """All processes that were started and are not over (``WorkerKeeper``), control first."""
        return [pid for pid in (self._control.pid, self._worker.pid, *self._gpus.pids) if pid]

    @property
    def _occupied(self) -> bool:
        """Whether a control or its worker may write yet: not once the next one reads."""
        return bool(self._control.pid or self._worker.pid)

    def _reap(self) -> None:
        self._worker.reap()
        for pid in reversed(self._pids):
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                self._on_death(pid, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
            elif pid == self._worker.pid and self._worker.let_go():
                self._on_death(pid, -signal.SIGKILL)

    def _on_death(self, pid: int, status: int) -> None:
        now = time.monotonic()
        name = "control" if pid == self._control.pid else "worker"
        if pid in self._gpus.pids:
            name = "device worker"
        how = f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit {status}"
        expected = self._gpus.ends(pid) or (pid == self._worker.pid and self._worker.ending)
        if not self._stop_signal and not self._halting and not expected:
            logger.error("a process died: %s", how, extra={"name_of": name, "child": pid})
        if pid in self._gpus.pids:
            self._gpus.died(pid, how)
            return
        if pid == self._worker.pid:
            self._worker.died(status, now)
            return
        self._control.died(now)
        # The indexes that were offered are over.
        self._handover.break_off()
        self._holdings.storage.poison()
        # Its jobs are for nobody.
        self._worker.end()
        self._gpus.end_lives()
        # One that ended by itself would again. One that was killed may have had sessions already.
        if not self._control.worked and status >= 0 and not self._stop_signal:
            logger.error("control could not start")
            self._failed = 1
        if not (self._stop_signal or self._halting or self._failed):
            self._control.prepare(self._holdings)

    # The daemon that follows: ``handover.House``.

    def why_not(self) -> str:
        """Why this daemon can't be taken over."""
        if self._settings.hardened and self._settings.dma_buf == "slabs":
            return SEALED
        if "NOTIFY_SOCKET" in os.environ:
            return "its process is systemd's: restart the service, whose fd store keeps spans"
        if self._stop_signal:
            return "it is stopping"
        return "" if self._ready and self._control.pid else "it is not ready"

    def belongings(self) -> list[Named]:
        """All that another daemon needs."""
        return [*self._holdings.all_named(), *self._gpus.named()]

    def halt(self) -> str:
        """Ends all other processes, as when control died."""
        self._halting = True
        until = time.monotonic() + _HALT_SECONDS
        while pids := self._pids:
            if time.monotonic() >= until:
                # One that the kernel holds may yet hand on what it was given to do.
                self._worker.end()
                self.resume()
                return f"process {pids[0]} was killed, and has not ended"
            self._control.kill()
            self._reap()
            time.sleep(_HALT_POLL_SECONDS)
        self._control.start_at = None
        self._holdings.place.lent = True
        self._disk.release()
        return ""

    def resume(self) -> None:
        """Serves again, once what was ended is gone: the other daemon does not."""
        self._halting = False
        self._holdings.place.lent = False
        self._holdings.place.sign()
        self._disk.take_back()
        self._control.start_at = time.monotonic()


def _interrupt() -> None:
    """Ends this process as a shell expects it of Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGINT)
