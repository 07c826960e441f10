"""The daemon's place in the file system: its directory, the lock on it, and its sockets."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import socket

from kmesh.errors import ConfigError
from kmesh_spand.settings import (
    GRPC_SOCKET,
    LOCK_NAME,
    METRICS_SOCKET,
    SESSION_SOCKET,
    UPGRADE_SOCKET,
    Settings,
)

logger = logging.getLogger(__name__)

_PID_BYTES = 32
_BACKLOG = 128


class Place:
    """One daemon on one socket directory.

    Attributes:
        lock: file descriptor of the lock, which is held as long as any process has it.
        sessions: listens for sessions. upgrades: listens for the daemon that is to follow.
        lent: the sockets are another daemon's as well, and stay when this one ends.
    """

    def __init__(
        self, directory: str, lock: int, sessions: socket.socket, upgrades: socket.socket
    ) -> None:
        self._directory = directory
        self.lock = lock
        self.sessions = sessions
        self.upgrades = upgrades
        self.lent = False
        for listener in (sessions, upgrades):
            listener.setblocking(False)

    @classmethod
    def take(cls, settings: Settings) -> Place:
        """Locks the directory, which is made if it is not there, and listens in it.

        Raises:
            ConfigError: another daemon serves it, or it can't be used.
            OSError: a socket can't be made.
        """
        directory = settings.socket_dir
        lock = _lock(directory)
        with contextlib.ExitStack() as undo:
            undo.callback(os.close, lock)
            if not _is_in(directory, lock) or _answers(directory):
                raise ConfigError(
                    f"socket_dir: another daemon serves {directory}, and its {LOCK_NAME} is gone"
                )
            # We hold the lock, so whoever made these is gone.
            _unlink(directory)
            undo.callback(_unlink, directory)
            sessions = undo.enter_context(_listen(directory, SESSION_SOCKET, settings.socket_mode))
            upgrades = undo.enter_context(_listen(directory, UPGRADE_SOCKET, 0o600))
            place = cls(directory, lock, sessions, upgrades)
            place.sign()
            undo.pop_all()
        return place

    def locked(self) -> bool:
        """Whether the lock is held, and is the one that others would find."""
        try:
            # Nothing to those who have this very opening of it.
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return _is_in(self._directory, self.lock)

    def sign(self) -> None:
        """Says whose it is: the lock to whoever is refused, the sockets to whoever connects."""
        for listener in (self.sessions, self.upgrades):
            # The kernel tells the process that listened last.
            listener.listen(_BACKLOG)
        try:
            os.ftruncate(self.lock, 0)
            os.pwrite(self.lock, f"{os.getpid()}\n".encode(), 0)
        except OSError as failed:
            # A full disk, say: it holds all the same.
            logger.warning("%s can't be written: %s", LOCK_NAME, failed)

    def own(self, settings: Settings) -> None:
        """The sockets are this daemon's alone."""
        self.lent = False
        self.sign()
        try:
            os.chmod(os.path.join(self._directory, SESSION_SOCKET), settings.socket_mode)
        except OSError as failed:
            # Somebody has removed it. Whoever is connected is served.
            logger.error("%s: %s", SESSION_SOCKET, failed)

    def renew(self, settings: Settings) -> None:
        """Listens anew: whoever made the sockets is gone, and may have removed them.

        Raises:
            OSError: a socket can't be made.
        """
        self.sessions.close()
        self.upgrades.close()
        _unlink(self._directory)
        self.sessions = _listen(self._directory, SESSION_SOCKET, settings.socket_mode)
        self.upgrades = _listen(self._directory, UPGRADE_SOCKET, 0o600)
        self.own(settings)

    def close(self) -> None:
        """Leaves; the directory is free if nobody else has it."""
        self.sessions.close()
        self.upgrades.close()
        if not self.lent:
            _unlink(self._directory)
        os.close(self.lock)


def _lock(directory: str) -> int:
    try:
        os.makedirs(directory, mode=0o700, exist_ok=True)
        lock = os.open(
            os.path.join(directory, LOCK_NAME),
            os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW,
            0o600,
        )
    except OSError as failed:
        raise ConfigError(
            f"socket_dir: {directory}: {failed.strerror}: --socket-dir takes another one"
        ) from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        words = os.pread(lock, _PID_BYTES, 0).decode(errors="replace").split()
        os.close(lock)
        who = f" (process {words[0]})" if words and words[0].isdigit() else ""
        raise ConfigError(f"socket_dir: another daemon serves {directory}{who}") from None
    return lock


def _is_in(directory: str, lock: int) -> bool:
    """Whether the lock's name still leads to it."""
    with contextlib.suppress(OSError):
        found = os.stat(os.path.join(directory, LOCK_NAME), follow_symlinks=False)
        return os.path.samestat(found, os.fstat(lock))
    return False


def _answers(directory: str) -> bool:
    """Whether a supervisor listens there, whatever became of its lock."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC) as sock:
        sock.setblocking(False)
        try:
            sock.connect(os.path.join(directory, UPGRADE_SOCKET))
        except BlockingIOError:
            # Its queue is full.
            return True
        except OSError:
            return False
    return True


def _unlink(directory: str) -> None:
    for name in (SESSION_SOCKET, GRPC_SOCKET, METRICS_SOCKET, UPGRADE_SOCKET):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(directory, name))


def _listen(directory: str, name: str, mode: int) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    try:
        path = os.path.join(directory, name)
        before = os.umask(0o777 & ~0o600)
        try:
            listener.bind(path)
        finally:
            os.umask(before)
        os.chmod(path, mode)
        listener.setblocking(False)
        listener.listen(_BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener
