"""Connections of the gRPC socket, which its library accepts without a limit of its own."""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import socket
import stat

from kmesh_spand.control import limits
from kmesh_spand.control.handler import Handler

logger = logging.getLogger(__name__)


def max_files() -> int:
    """File descriptors that this process may have."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def _numbers() -> list[int] | None:
    """Numbers of this process's file descriptors; None if there is none left to look with.

    That of the look itself, closed by now, is one of them.
    """
    try:
        return [int(name) for name in os.listdir("/proc/self/fd")]
    except OSError:
        return None


def count_files() -> int:
    """File descriptors that this process has."""
    numbers = _numbers()
    return max_files() if numbers is None else len(numbers) - 1


class Crowd:
    """Ends the youngest gRPC connections where there are too many: sessions need the files.

    Args:
        path: of the gRPC socket.

    Attributes:
        limit: of connections at a time.
    """

    def __init__(self, handler: Handler, path: str) -> None:
        free = max_files() - count_files()
        self.limit = max(4, min(limits.MAX_RPC_CONNECTIONS, free // 4))
        self._handler = handler
        self._path = path
        # Given up for a moment to look at files when no other is left.
        self._spare = _spare()
        self._others: dict[int, int] = {}
        # Connections by inode, oldest first, with their descriptors.
        self._ours: dict[int, int] = {}
        self._ended: set[int] = set()

    def close(self) -> None:
        """Ends no connection."""
        if self._spare >= 0:
            os.close(self._spare)
            self._spare = -1

    def trim(self) -> int:
        """Ends what is over the limit; returns how many files will be free in a moment."""
        numbers = _numbers()
        if numbers is None:
            self.close()
            numbers = _numbers()
        try:
            if numbers is None:
                return 0
            self._look(numbers)
            excess = list(self._ours.items())[self.limit :]
            ended = {inode for inode, fd in excess if self._end(inode, fd)}
        finally:
            if self._spare < 0:
                self._spare = _spare()
        # gRPC closes them in a moment, in a thread of its own.
        new = len(ended - self._ended)
        self._ended = ended
        if new:
            self._handler.counters["connections_refused"] += new
            logger.warning(
                "gRPC connections over the limit were ended",
                extra={"ended": new, "limit": self.limit},
            )
        return len(ended)

    def _look(self, numbers: list[int]) -> None:
        """Learns which connections there are."""
        others: dict[int, int] = {}
        found: dict[int, int] = {}
        for fd in numbers:
            with contextlib.suppress(OSError):
                inode = os.fstat(fd).st_ino
                if self._others.get(fd) == inode:
                    others[fd] = inode
                elif self._ours.get(inode) == fd:
                    found[inode] = fd
                elif (mine := self._connection(fd)) is not None:
                    with mine:
                        found[os.fstat(mine.fileno()).st_ino] = fd
                else:
                    others[fd] = inode
        self._others = others
        young = {inode: fd for inode, fd in found.items() if inode not in self._ours}
        self._ours = {inode: fd for inode, fd in self._ours.items() if inode in found} | young

    def _connection(self, fd: int) -> socket.socket | None:
        """A duplicate, since gRPC's threads may close ``fd`` at any moment; None if it's another's.

        OSError if ``fd`` is closed, or none is left for the duplicate.
        """
        if not stat.S_ISSOCK(os.fstat(fd).st_mode):
            return None
        sock = socket.socket(fileno=os.dup(fd))
        if (
            sock.family == socket.AF_UNIX
            and sock.getsockname() == self._path
            and not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        ):
            return sock
        sock.close()
        return None

    def _end(self, inode: int, fd: int) -> bool:
        with contextlib.suppress(OSError):
            sock = self._connection(fd)
            if sock is not None:
                with sock:
                    if os.fstat(sock.fileno()).st_ino == inode:
                        sock.shutdown(socket.SHUT_RDWR)
                        return True
        return False


def _spare() -> int:
    try:
        return os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return -1
