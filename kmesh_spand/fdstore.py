"""systemd's store of file descriptors: memory that outlives the daemon.

What is put there under a name comes back at the next start (``LISTEN_FDS``), also when this
process was killed. Sockets that systemd listens on come in the same way, under other names.
"""

from __future__ import annotations

import fcntl
import logging
import os
import select
from collections.abc import MutableMapping

from kmesh_spand import notify
from kmesh_spand.inherit import PREFIX, Named

logger = logging.getLogger(__name__)

_FIRST = 3
#: More than any process has.
_MOST = 1 << 20


class FdStore:
    """The store of this service, if it has one.

    Args:
        environ: where systemd says so. What is only for this process is taken out.

    Attributes:
        received: what an earlier life put there; whoever takes it out owns it.
        size: file descriptors that it takes.
        active: it takes some, and none was refused yet.
    """

    def __init__(self, environ: MutableMapping[str, str]) -> None:
        self.received = _received(environ)
        size = environ.get("FDSTORE", "")
        # Before version 254, systemd does not say how many.
        self.size = int(size) if size.isdigit() else len(self.received)
        self.active = self.size > 0 and "NOTIFY_SOCKET" in environ

    def put(self, name: str, fd: int) -> None:
        """Stores a duplicate. A store that does not take it is not used any more."""
        # Not polled: that would take the file descriptors of some drivers for ended.
        self._send(f"FDSTORE=1\nFDNAME={name}\nFDPOLL=0", fd)

    def remove(self, name: str) -> None:
        """Gives up all that is stored under a name."""
        self._send(f"FDSTOREREMOVE=1\nFDNAME={name}")

    def close(self) -> None:
        """Gives up what was received and not taken out; it stays in the store."""
        for _, fd in self.received:
            os.close(fd)
        self.received.clear()

    def settle(self) -> None:
        """Waits until systemd has done what it was told, for a while."""
        ours, theirs = os.pipe()
        try:
            self._send("BARRIER=1", theirs)
        finally:
            os.close(theirs)
        try:
            poll = select.poll()
            poll.register(ours, 0)
            if self.active and not poll.poll(notify.SECONDS * 1000):
                logger.warning("systemd has not answered in %d s", int(notify.SECONDS))
        finally:
            os.close(ours)

    def _send(self, state: str, fd: int | None = None) -> None:
        if not self.active:
            return
        try:
            notify.send(state, fd)
        except OSError as failed:
            self.active = False
            logger.warning("spans will not survive a restart: systemd's fd store: %s", failed)


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
