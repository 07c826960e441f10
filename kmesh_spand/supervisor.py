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
from kmesh_spand import child, ipc, logs
from kmesh_spand.backoff import Backoff
from kmesh_spand.diskdir import Custody, open_directory
from kmesh_spand.fdstore import FdStore
from kmesh_spand.gpukeeper import GpuKeeper
from kmesh_spand.handover import Handover
from kmesh_spand.holdings import Holdings
from kmesh_spand.inherit import SEALED, Named
from kmesh_spand.launch import Prepared
from kmesh_spand.notify import notify
from kmesh_spand.outbox import Outbox
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
        self._prepared: Prepared | None = prepared
        self._version = version
        self._control_pid = 0
        self._control_restarts = -1
        self._control_backoff = Backoff()
        self._control_at: float | None = 0.0
        self._ready = False
        self._control_ready = False
        self._control_worked = False
        self._failed = 0
        self._stop_signal = 0
        self._stop_by: float | None = None
        self._to_control: socket.socket | None = None
        self._for_control: Outbox | None = None
        self._halting = False
        self._upgrade = upgrade
        self._store = FdStore(os.environ)
        self._worker = WorkerKeeper(settings, self._tell_control)
        self._gpus = GpuKeeper(settings, self._tell_control, self._store)
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
            self._end_prepared()
            return 2
        except OSError as failed:
            logger.error("could not start: %s", failed)
            self._end_prepared()
            return 1
        except KeyboardInterrupt:
            self._end_prepared()
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
                self._disk = Custody(open_directory(settings.disk))
            except BaseException:
                held.close()
                raise
        self._gpus.begin(held.life.held, held.gpu)
        self._handover.begin(held.place, held.manifest, held.life)

    def _end_prepared(self) -> None:
        if self._prepared is not None:
            self._prepared.end()
            self._prepared = None

    def _close(self) -> None:
        self._end_prepared()
        if self._control_pid:
            os.kill(self._control_pid, signal.SIGKILL)
            os.waitpid(self._control_pid, 0)
        self._worker.close()
        self._gpus.close()
        self._forget_control()
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
        if self._to_control is not None and self._for_control is not None:
            wanted = select.POLLOUT if self._for_control.blocked else 0
            poll.register(self._to_control, select.POLLIN | wanted)
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
            elif self._to_control is not None and fd == self._to_control.fileno():
                if what & select.POLLOUT:
                    self._flush()
                if what & ~select.POLLOUT:
                    self._hear_control()
        self._handover.turn()
        self._store.retry()
        retry_at = self._retry_at
        if retry_at is not None and time.monotonic() >= retry_at:
            self._flush()

    @property
    def _retry_at(self) -> float | None:
        return None if self._for_control is None else self._for_control.retry_at

    def _flush(self) -> None:
        if self._for_control is not None:
            with contextlib.suppress(ConnectionError):
                self._for_control.flush()

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
        if self._control_pid and time.monotonic() >= self._stop_by:
            logger.warning("not finished in time, ending what still runs")
            return True
        return not self._control_pid

    def _on_stop(self, number: int, _frame: object) -> None:
        if self._stop_signal:
            # Asked twice: don't wait for anything.
            self._stop_by = 0.0
        self._stop_signal = self._stop_signal or number

    def _begin_stop(self) -> None:
        notify("STOPPING=1")
        logger.info("stopping", extra={"signal": signal.Signals(self._stop_signal).name})
        self._stop_by = time.monotonic() + self._settings.shutdown_timeout_ms / 1000
        self._tell_control(ipc.Drain())

    def _timeout_ms(self) -> int | None:
        ours = (
            # The end of a process is told by a signal.
            None if self._occupied else self._control_at,
            self._worker.late_at,
            self._worker.start_at,
            self._stop_by,
            self._retry_at,
            self._handover.moment,
            self._store.moment,
            None if self._stop_signal else self._disk.moment,
        )
        moments = [at for at in ours if at is not None]
        if self._control_pid:
            moments += self._gpus.moments
        if not moments:
            return None
        return max(0, int((min(moments) - time.monotonic()) * 1000) + 1)

    # Children.

    def _start_due(self) -> None:
        if self._stop_signal:
            self._control_at = self._worker.start_at = None
            self._gpus.stop()
            return
        now = time.monotonic()
        self._worker.say_late(now)
        if self._control_at is not None and now >= self._control_at and not self._occupied:
            self._control_at = None
            try:
                self._start_control(now)
                self._worker.start_at = now
            except OSError as failed:
                logger.error("control could not be started: %s", failed)
                self._control_at = self._control_backoff.died(now)
        if self._control_pid:
            held = self._holdings
            self._worker.start_due(now, held.storage, held.life.held, self._disk.directory)
        if self._disk.came_back(now) and self._worker.pid:
            logger.info("the disk tier's directory is ours again: restarting the store worker")
            self._worker.kill()
        if self._control_pid:
            self._gpus.start_due(now)

    def _start_control(self, now: float) -> None:
        assert not self._occupied
        if self._control_restarts >= 0:
            self._holdings.new_epoch()
        self._control_restarts += 1
        held = self._holdings
        ours, theirs = ipc.pair()
        try:
            if self._prepared is None:
                self._prepared = Prepared(held.storage.drop_writable)
            self._prepared.launch(
                self._settings,
                self._version,
                self._control_restarts,
                held.storage.shared,
                held.place.sessions,
                theirs,
                held.life.held,
            )
        except BaseException:
            ours.close()
            self._end_prepared()
            raise
        finally:
            theirs.close()
        self._control_pid, self._prepared = self._prepared.pid, None
        ours.setblocking(False)
        self._to_control = ours
        self._for_control = Outbox(ours)
        for message, fd in self._gpus.known():
            self._tell_control(message, fd)
        self._control_backoff.started(now)

    def _tell_control(self, message: ipc.AnyMessage, fd: int | None = None) -> None:
        """Now or soon, in order. A control that is gone is noticed by SIGCHLD."""
        if self._for_control is None:
            return
        with contextlib.suppress(ConnectionError):
            try:
                self._for_control.send(message, fd)
            except OSError as lacking:
                if isinstance(lacking, ConnectionError):
                    raise
                logger.error("%s: %s", type(message).__name__, lacking)
                # It hears that there is something, and asks for it, or for another.
                self._for_control.send(message)

    def _forget_control(self) -> None:
        if self._for_control is not None:
            self._for_control.close()
            self._for_control = None
        if self._to_control is not None:
            self._to_control.close()
            self._to_control = None

    def _hear_control(self) -> None:
        assert self._to_control is not None
        try:
            message, _ = ipc.receive(self._to_control)
        except BlockingIOError:
            return
        except (EOFError, OSError):
            self._forget_control()
            return
        match message:
            case ipc.Ready():
                self._control_ready = self._control_worked = True
                self._announce()
            case ipc.Health():
                notify("STATUS=" + (f"not ready: {message.text}" if message.text else "ready"))
            case ipc.RestartWorker():
                what = "the store worker" if message.gpu < 0 else f"device worker {message.gpu}"
                logger.error("restarting %s: %s", what, message.reason)
                if message.gpu >= 0:
                    self._gpus.restart(message.gpu)
                else:
                    self._worker.kill()
            case ipc.SlabWanted():
                self._gpus.tell(message.slab)
            case ipc.GivenUp():
                self._replace(message.slab)
            case ipc.Stop():
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
        self._tell_control(ipc.Replaced(slab, heir))

    def _announce(self) -> None:
        """Says once for each control process that all is there."""
        if not self._control_ready or not self._gpus.ready:
            return
        self._control_ready = False
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
        """All processes that were started and not reaped, control first."""
        return [pid for pid in (self._control_pid, self._worker.pid, *self._gpus.pids) if pid]

    @property
    def _occupied(self) -> bool:
        """Whether a control or its worker lives, which must not write once the next one reads."""
        return bool(self._control_pid or self._worker.pid)

    def _reap(self) -> None:
        for pid in reversed(self._pids):
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                self._on_death(pid, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))

    def _on_death(self, pid: int, status: int) -> None:
        now = time.monotonic()
        name = "control" if pid == self._control_pid else "worker"
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
        self._control_pid = 0
        self._control_ready = False
        # The indexes that were offered are over.
        self._handover.break_off()
        self._holdings.storage.poison()
        self._forget_control()
        # Its jobs are for nobody.
        self._worker.end()
        self._gpus.end_lives()
        # One that ended by itself would again. One that was killed may have had sessions already.
        if not self._control_worked and status >= 0 and not self._stop_signal:
            logger.error("control could not start")
            self._failed = 1
        self._control_at = self._control_backoff.died(now)
        self._prepare()

    def _prepare(self) -> None:
        """The next control loads its code while the worker goes, which has much to unmap."""
        if self._stop_signal or self._halting or self._failed:
            return
        try:
            self._prepared = Prepared(self._holdings.storage.drop_writable)
        except OSError as failed:
            logger.warning("the next control is prepared later: %s", failed)

    # The daemon that follows: ``handover.House``.

    def why_not(self) -> str:
        """Why this daemon can't be taken over."""
        if self._settings.hardened and self._settings.dma_buf == "slabs":
            return SEALED
        if "NOTIFY_SOCKET" in os.environ:
            return "its process is systemd's: restart the service, whose fd store keeps spans"
        if self._stop_signal:
            return "it is stopping"
        return "" if self._ready and self._control_pid else "it is not ready"

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
            if self._control_pid:
                os.kill(self._control_pid, signal.SIGKILL)
            self._reap()
            time.sleep(_HALT_POLL_SECONDS)
        self._control_at = None
        self._holdings.place.lent = True
        self._disk.release()
        return ""

    def resume(self) -> None:
        """Serves again, once what was ended is gone: the other daemon does not."""
        self._halting = False
        self._holdings.place.lent = False
        self._holdings.place.sign()
        self._disk.take_back()
        self._control_at = time.monotonic()


def _interrupt() -> None:
    """Ends this process as a shell expects it of Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGINT)
