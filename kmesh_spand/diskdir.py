"""The directory of the disk tier: whether it may be used, and by whom it is."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import stat
import time
from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from kmesh.errors import ConfigError
from kmesh_spand.units import format_size

logger = logging.getLogger(__name__)

MARK = "kmesh-disk.json"
VERSION = 1
#: Files are in the folder of their names' first two digits.
FOLDERS = tuple(f"{number:02x}" for number in range(256))
#: What a new file system has in its first directory.
_OTHERS = frozenset({MARK, "lost+found"})


_PATIENCE_SECONDS = 5.0
_POLL_SECONDS = 0.02
#: Until a directory that another daemon has is asked for again.
_RETRY_SECONDS = 1.0


class Mark(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the directory says of itself; ``directory`` tells it from others, in hex."""

    version: int
    directory: str


class Directory(NamedTuple):
    """An open directory, which no other daemon uses while ``lock`` is open.

    Attributes:
        id: 16 bytes that its files repeat.
    """

    path: str
    fd: int
    lock: int
    id: bytes

    def take(self) -> bool:
        """Be the only one who uses it; False if another daemon does for a while.

        Processes of a daemon that was killed a moment ago may not be gone yet.
        """
        until = time.monotonic() + _PATIENCE_SECONDS
        while not self.try_take():
            if time.monotonic() >= until:
                return False
            time.sleep(_POLL_SECONDS)
        return True

    def try_take(self) -> bool:
        """As ``take``, and waits for nobody."""
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def release(self) -> None:
        """Let another daemon use it, which this one is handed over to."""
        fcntl.flock(self.lock, fcntl.LOCK_UN)

    def close(self) -> None:
        """Others may use it."""
        os.close(self.fd)
        os.close(self.lock)


class Custody:
    """A daemon's directory, which another one may have for a while.

    Attributes:
        moment: when ``came_back`` has something to do (``time.monotonic``), or None.
    """

    def __init__(self, directory: Directory | None = None) -> None:
        self._directory = directory
        self._away = False
        self.moment: float | None = None

    @property
    def directory(self) -> Directory | None:
        """What may be used now; None while it is another's, or if there is none."""
        return None if self._away else self._directory

    def release(self) -> None:
        """Lets the daemon that follows use it."""
        if self._directory is not None:
            self._away, self.moment = True, None
            self._directory.release()

    def take_back(self) -> None:
        """That daemon does not serve. Who has the directory all the same may keep it for now."""
        if self._directory is None:
            return
        self._away, self.moment = not self._directory.take(), None
        if self._away:
            logger.error("disk: %s: another daemon uses it; going on without", self._directory.path)
            self.moment = time.monotonic() + _RETRY_SECONDS

    def came_back(self, now: float) -> bool:
        """Whether it is ours again from now on."""
        if self.moment is None or now < self.moment:
            return False
        assert self._directory is not None
        self._away = not self._directory.try_take()
        self.moment = now + _RETRY_SECONDS if self._away else None
        return not self._away

    def close(self) -> None:
        if self._directory is not None:
            self._directory.close()


def open_directory(path: str, wanted: int = 0) -> Directory:
    """Takes a directory, which is made if it is not there (but not its parents).

    Args:
        wanted: bytes that files may take there; more than the file system has is warned of.

    Raises:
        ConfigError: it is not to be used, and why.
    """
    # With a slash at its end a link would be followed.
    path = path.rstrip("/") or "/"
    with contextlib.ExitStack() as undo:
        with _refusals(path):
            _make(path)
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
            fd = os.open(path, flags)
        undo.callback(os.close, fd)
        about = os.fstat(fd)
        if about.st_uid != os.geteuid():
            raise ConfigError(f"disk: {path}: belongs to uid {about.st_uid}, not to the daemon's")
        if about.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            mode = stat.S_IMODE(about.st_mode)
            raise ConfigError(f"disk: {path}: others may write it (mode {mode:04o}); chmod go-w")
        with _refusals(path):
            lock = _lock(fd, path)
            undo.callback(os.close, lock)
            if not Directory(path, fd, lock, b"").take():
                raise ConfigError(f"disk: {path}: another daemon uses it")
            made = Directory(path, fd, lock, _identity(lock, path))
            _check_folders(fd, path)
            _try_to_write(fd)
            room = os.fstatvfs(fd)
        undo.pop_all()
    whole = room.f_blocks * room.f_frsize
    if wanted > whole:
        told, there = format_size(wanted), format_size(whole >> 20 << 20)
        logger.warning("disk_bytes: %s, but the file system of %s has %s", told, path, there)
    return made


def _make(path: str) -> None:
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        pass
    except FileNotFoundError:
        raise ConfigError(
            f"disk: {path}: there is no {os.path.dirname(path)} to make it in"
        ) from None


@contextlib.contextmanager
def _refusals(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as failed:
        text = failed.strerror
        if failed.errno in (errno.ELOOP, errno.ENOTDIR) and os.path.islink(path):
            text = "is a symbolic link; name the directory itself"
        raise ConfigError(f"disk: {path}: {text}") from None


def _lock(fd: int, path: str) -> int:
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        return os.open(MARK, flags, dir_fd=fd)
    except FileNotFoundError:
        strange = sorted(set(os.listdir(fd)) - _OTHERS)
        if strange:
            raise ConfigError(
                f"disk: {path}: has other files in it, such as {strange[0]}; name an empty one"
            ) from None
        return os.open(MARK, flags | os.O_CREAT, 0o600, dir_fd=fd)


def _identity(lock: int, path: str) -> bytes:
    """What the mark says; a new one is written if it is empty."""
    data = os.pread(lock, 4096, 0)
    if not data:
        made = os.urandom(16)
        os.pwrite(lock, msgspec.json.encode(Mark(VERSION, made.hex())) + b"\n", 0)
        os.fsync(lock)
        return made
    try:
        version = msgspec.json.decode(data, type=dict[str, object]).get("version")
        if version != VERSION:
            raise ConfigError(
                f"disk: {path}: is of version {version}, this daemon has {VERSION}; "
                "name another directory"
            )
        identity = bytes.fromhex(msgspec.json.decode(data, type=Mark).directory)
    except (msgspec.DecodeError, ValueError) as wrong:
        if isinstance(wrong, ConfigError):
            raise
        raise ConfigError(f"disk: {path}: {MARK} is damaged; empty the directory") from None
    if len(identity) != 16:
        raise ConfigError(f"disk: {path}: {MARK} is damaged; empty the directory")
    return identity


def _check_folders(fd: int, path: str) -> None:
    """Files must not end up elsewhere: only the last part of a path is kept from being a link."""
    for folder in FOLDERS:
        with contextlib.suppress(FileNotFoundError):
            mode = os.stat(folder, dir_fd=fd, follow_symlinks=False).st_mode
            if not stat.S_ISDIR(mode):
                kind = "a symbolic link" if stat.S_ISLNK(mode) else "no folder"
                raise ConfigError(f"disk: {path}: {folder} in it is {kind}; remove it")


def _try_to_write(fd: int) -> None:
    """Raises OSError where the file system is read-only, for instance."""
    name = "kmesh-try.new"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name, dir_fd=fd)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    os.close(os.open(name, flags, 0o600, dir_fd=fd))
    os.unlink(name, dir_fd=fd)
