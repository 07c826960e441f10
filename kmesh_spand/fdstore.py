"""systemd's store of file descriptors: memory that outlives the daemon.

What is put there under a name comes back at the next start (``LISTEN_FDS``), also when this
process was killed. Sockets that systemd listens on come in the same way, under other names.
"""

from __future__ import annotations

import fcntl
import logging
import os
import select
import time
from collections.abc import Callable, MutableMapping

from kmesh_spand import notify
from kmesh_spand.backoff import Backoff
from kmesh_spand.inherit import PREFIX, Named

logger = logging.getLogger(__name__)

_FIRST = 3
#: More than any process has.
_MOST = 1 << 20
#: What is tried again is done by whoever keeps the daemon alive, so that it does not wait.
_SECONDS_AGAIN = 0.05


class FdStore:
    """The store of this service, if it has one.

    What systemd could not be told, as while it starts itself anew, is *owed*: it is told again, in
    the same order. A slab that it still has takes memory, and one that it lacks is lost with the
    daemon.

    Args:
        environ: where systemd says so. What is only for this process is taken out.
        clock: seconds, of a monotonic clock.

    Attributes:
        received: what an earlier life put there; whoever takes it out owns it.
        size: file descriptors that it takes.
        active: it takes some.
        moment: when to ``retry``, of the clock; None while nothing is owed.
    """

    def __init__(
        self, environ: MutableMapping[str, str], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.received = _received(environ)
        size = environ.get("FDSTORE", "")
        # Before version 254, systemd does not say how many.
        self.size = int(size) if size.isdigit() else len(self.received)
        self.active = self.size > 0 and "NOTIFY_SOCKET" in environ
        self.moment: float | None = None
        # By name, in order: file descriptors of ours to put, None to remove what is there.
        self._owed: list[tuple[str, int | None]] = []
        self._backoff = Backoff()
        self._clock = clock

    def put(self, name: str, fd: int) -> None:
        """Stores a duplicate, now or when systemd can be told."""
        self._do(name, fd)

    def remove(self, name: str) -> None:
        """Gives up all that is stored under a name, now or when systemd can be told."""
        self._forget(name)
        self._do(name, None)

    def retry(self) -> None:
        """Tells systemd what it is owed, if it is time, and does not wait."""
        if self.moment is None or self._clock() < self.moment:
            return
        while self._owed:
            name, fd = self._owed[0]
            try:
                _tell(name, fd, _SECONDS_AGAIN)
            except OSError:
                self._put_off()
                return
            del self._owed[0]
            if fd is not None:
                os.close(fd)
        self.moment = None
        self._backoff = Backoff()
        logger.info("systemd's fd store has been told what it was owed")

    def close(self) -> None:
        """Gives up what was received and not taken out; it stays in the store.

        What is owed is not told any more.
        """
        for _, fd in (*self.received, *self._owed):
            if fd is not None:
                os.close(fd)
        self.received.clear()
        self._owed.clear()
        self.moment = None

    def settle(self) -> None:
        """Waits until systemd has done what it was told, for a while; not for what is owed."""
        if not self.active or self._owed:
            return
        ours, theirs = os.pipe()
        try:
            notify.send("BARRIER=1", theirs)
        except OSError as failed:
            logger.warning("systemd's fd store: %s", failed)
            os.close(ours)
            return
        finally:
            os.close(theirs)
        try:
            poll = select.poll()
            poll.register(ours, 0)
            if not poll.poll(notify.SECONDS * 1000):
                logger.warning("systemd has not answered in %d s", int(notify.SECONDS))
        finally:
            os.close(ours)

    def _do(self, name: str, fd: int | None) -> None:
        if not self.active:
            return
        if not self._owed:
            try:
                _tell(name, fd, notify.SECONDS)
            except OSError as failed:
                self._put_off()
                logger.warning(
                    "spans will not survive a restart while systemd's fd store does not answer: %s",
                    failed,
                )
            else:
                return
        try:
            self._owed.append((name, None if fd is None else os.dup(fd)))
        except OSError as lacking:
            logger.error("%s will not survive a restart: %s", name, lacking)

    def _put_off(self) -> None:
        now = self._clock()
        # No attempt is a steady life, however long ago the first one failed.
        self._backoff.started(now)
        self.moment = self._backoff.died(now)

    def _forget(self, name: str) -> None:
        """Nothing is owed of a name that is given up."""
        for item in [item for item in self._owed if item[0] == name]:
            self._owed.remove(item)
            if item[1] is not None:
                os.close(item[1])


def _tell(name: str, fd: int | None, seconds: float) -> None:
    if fd is None:
        notify.send(f"FDSTOREREMOVE=1\nFDNAME={name}", None, seconds)
    else:
        # Not polled: that would take the file descriptors of some drivers for ended.
        notify.send(f"FDSTORE=1\nFDNAME={name}\nFDPOLL=0", fd, seconds)


def _received(environ: MutableMapping[str, str]) -> list[Named]:
    pid, count, names = (environ.get(f"LISTEN_{part}", "") for part in ("PID", "FDS", "FDNAMES"))
    if pid != str(os.getpid()) or not count.isdigit():
        return []
    for part in ("PID", "FDS", "FDNAMES"):
        environ.pop(f"LISTEN_{part}", None)
    listed = names.split(":") if names else []
    total = min(int(count), _MOST)
    listed += [""] * (total - len(listed))
    found = []
    for fd, name in enumerate(listed[:total], _FIRST):
        try:
            flags = fcntl.fcntl(fd, fcntl.F_GETFD)
        except OSError:
            logger.warning("systemd names a file descriptor that is not there: %s", name)
            continue
        fcntl.fcntl(fd, fcntl.F_SETFD, flags | fcntl.FD_CLOEXEC)
        if name.startswith(PREFIX):
            found.append(Named(name, fd))
        else:
            logger.warning("a file descriptor from systemd is not used: %r", name)
            os.close(fd)
    return found
