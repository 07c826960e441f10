"""The supervisor's part in the control process: it starts each, and is the way to it."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket

from kmesh_spand import ipc
from kmesh_spand.backoff import Backoff
from kmesh_spand.holdings import Holdings
from kmesh_spand.launch import Prepared
from kmesh_spand.outbox import Outbox
from kmesh_spand.settings import Settings

logger = logging.getLogger(__name__)


class ControlKeeper:
    """The control process, over all of its lives.

    Args:
        prepared: the first one, which this object launches or ends.

    Attributes:
        pid: of the one that runs, or 0.
        start_at: when the next one is due, by the monotonic clock; None: none is.
        ready: the one that runs has said that it serves, and nobody was told so yet.
        worked: any has said that.
        sock: the way to the one that runs; None: there is none.
    """

    def __init__(self, settings: Settings, version: str, prepared: Prepared) -> None:
        self.pid = 0
        self.start_at: float | None = 0.0
        self.ready = False
        self.worked = False
        self.sock: socket.socket | None = None
        self._settings = settings
        self._version = version
        self._prepared: Prepared | None = prepared
        self._restarts = -1
        self._backoff = Backoff()
        self._outbox: Outbox | None = None

    def start(self, now: float, held: Holdings) -> None:
        """Starts one; there is none. Each but the first begins a new epoch.

        Raises:
            OSError: there is no process or no file descriptor for it.
        """
        assert not self.pid
        if self._restarts >= 0:
            held.new_epoch()
        self._restarts += 1
        ours, theirs = ipc.pair()
        try:
            if self._prepared is not None and self._prepared.gone:
                self.end_prepared()
            if self._prepared is None:
                self._prepared = Prepared(held.storage.drop_writable)
            self._prepared.launch(
                self._settings,
                self._version,
                self._restarts,
                held.storage.shared,
                held.place.sessions,
                theirs,
                held.life.held,
            )
        except BaseException:
            ours.close()
            self.end_prepared()
            raise
        finally:
            theirs.close()
        self.pid, self._prepared = self._prepared.pid, None
        ours.setblocking(False)
        self.take(ours)
        self._backoff.started(now)

    def take(self, sock: socket.socket) -> None:
        """This is the way to it: non-blocking, and ours from now on."""
        self.sock, self._outbox = sock, Outbox(sock)

    def prepare(self, held: Holdings) -> None:
        """Has the next one load its code while the store worker ends."""
        try:
            self._prepared = Prepared(held.storage.drop_writable)
        except OSError as failed:
            logger.warning("the next control is prepared later: %s", failed)

    def put_off(self, now: float) -> None:
        """It died, or could not be started: the next one is due later."""
        self.start_at = self._backoff.died(now)

    def died(self, now: float) -> None:
        """It was reaped."""
        self.pid = 0
        self.ready = False
        self.forget()
        self.put_off(now)

    def tell(self, message: ipc.AnyMessage, fd: int | None = None) -> None:
        """Now or soon, in order; ``fd`` stays the caller's. One that is gone is noticed by
        SIGCHLD."""
        if self._outbox is None:
            return
        with contextlib.suppress(ConnectionError):
            try:
                self._outbox.send(message, fd)
            except OSError as lacking:
                if isinstance(lacking, ConnectionError):
                    raise
                logger.error("%s: %s", type(message).__name__, lacking)
                # It hears that there is something, and asks for it, or for another.
                self._outbox.send(message)

    @property
    def blocked(self) -> bool:
        """Whether to ``flush`` when the way to it can be written."""
        return self._outbox is not None and self._outbox.blocked

    @property
    def retry_at(self) -> float | None:
        """When to ``flush``, by the monotonic clock; None: nothing waits for a time."""
        return None if self._outbox is None else self._outbox.retry_at

    def flush(self) -> None:
        """Sends what it was not told yet, as far as it takes it."""
        if self._outbox is not None:
            with contextlib.suppress(ConnectionError):
                self._outbox.flush()

    def hear(self) -> ipc.AnyMessage | None:
        """What it says; None: nothing, or it says no more."""
        assert self.sock is not None
        try:
            return ipc.receive(self.sock)[0]
        except BlockingIOError:
            return None
        except (EOFError, OSError):
            self.forget()
            return None

    def forget(self) -> None:
        """Closes the way to it, if there is one."""
        if self._outbox is not None:
            self._outbox.close()
            self._outbox = None
        if self.sock is not None:
            self.sock.close()
            self.sock = None

    def kill(self) -> None:
        """Ends the one that runs, if any."""
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)

    def end_prepared(self) -> None:
        """Ends the one that was prepared and is not launched, if any."""
        if self._prepared is not None:
            self._prepared.end()
            self._prepared = None

    def close(self) -> None:
        """Ends the one that runs, if any, for good; the way to it stays until ``forget``."""
        self.end_prepared()
        if self.pid:
            self.kill()
            os.waitpid(self.pid, 0)
