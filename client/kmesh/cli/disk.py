"""Whether a directory does for the disk tier: tried, with a file of its own."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import stat
import tempfile

from kmesh.cli.checks import Check
from kmesh.cli.render import size

_BLOCK = 4096
_MAKE = "the daemon makes it; make it first (install -d -m 700) to have it tried"
_FIX = "name a directory on a local disk that only the daemon's user can write"


def examine(path: str) -> Check:
    """Writes a block, makes sure of it, reads it back and compares; past the page cache if it can.

    The directory must be there; nothing is left in it.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError as failed:
        return Check("disk", "fail", f"{path}: {failed.strerror}", _MAKE)
    except OSError as failed:
        return Check("disk", "fail", f"{path}: {failed.strerror}", _FIX)
    try:
        about, room = os.fstat(fd), os.fstatvfs(fd)
    finally:
        os.close(fd)
    if about.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        mode = stat.S_IMODE(about.st_mode)
        return Check("disk", "fail", f"{path}: others may write it, mode {mode:04o}", _FIX)
    try:
        with tempfile.TemporaryDirectory(prefix="kmesh-doctor-", dir=path) as folder:
            direct = _try(os.path.join(folder, "block"))
    except OSError as failed:
        return Check("disk", "fail", f"{path}: {failed.strerror or failed}", _FIX)
    free = size(room.f_bavail * room.f_frsize)
    if direct:
        return Check("disk", "ok", f"{path}: a block was written and read, {free} are free")
    seen = f"{path}: a block was written and read, {free} are free, but not past the page cache"
    return Check("disk", "warn", seen, "a file system with direct I/O spares memory")


def _try(path: str) -> bool:
    """Whether direct I/O is had. OSError where not even the other kind is."""
    content = os.urandom(_BLOCK)
    for flag in (os.O_DIRECT, 0):
        try:
            _round(path, content, flag)
        except OSError as refused:
            if not flag or refused.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
        else:
            return bool(flag)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
    raise AssertionError("the last way is tried or refused")


def _round(path: str, content: bytes, flag: int) -> None:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | flag, 0o600)
    try:
        # Anonymous memory is aligned, as direct I/O wants it.
        with mmap.mmap(-1, _BLOCK) as block:
            block[:] = content
            written = os.pwritev(fd, [block], 0)
            os.fdatasync(fd)
            block[:] = bytes(_BLOCK)
            read = os.preadv(fd, [block], 0)
            if (written, read) != (_BLOCK, _BLOCK) or block[:] != content:
                raise OSError(errno.EIO, "what was written is not what is read")
    finally:
        os.close(fd)
