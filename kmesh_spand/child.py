"""Forking the daemon's other processes from the supervisor."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable, Collection, Iterable
from typing import NoReturn

logger = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_POLL_SECONDS = 0.005
#: Links to a directory in /proc whose tasks add one each.
_NO_TASKS = 2
#: The machine's limits, not our bugs; met anywhere, also while code is loaded.
_SCARCE = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC)


def fork(name: str, keep: Collection[int], main: Callable[[], int]) -> int:
    """Starts a process that runs ``main`` and exits with its result; returns its pid.

    It keeps only stdio and the fds in ``keep``, is killed when its parent dies, and ignores the
    signals that stop the daemon: its parent tells it. The caller must have a single thread.
    """
    parent = os.getpid()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    _run(name, parent, keep, main)


def fork_or_close(
    ours: socket.socket, name: str, keep: Collection[int], main: Callable[[], int]
) -> int:
    """As ``fork``; ``ours`` is closed if there is no child to talk to."""
    try:
        return fork(name, keep, main)
    except BaseException:
        ours.close()
        raise


def wait(pids: Iterable[int], seconds: float) -> None:
    """Reaps children that were killed; those that are not gone by then are left."""
    until = time.monotonic() + seconds
    left = set(pids)
    while left:
        left -= {pid for pid in left if os.waitpid(pid, os.WNOHANG)[0]}
        if not left or time.monotonic() >= until:
            return
        time.sleep(_POLL_SECONDS)


def has_left_memory(pid: int) -> bool:
    """Whether a child that was killed writes nothing any more. It may not be gone for long yet.

    A thread that ends leaves its memory when it runs no code and is in no system call any more.
    The last one then unmaps all of it, which takes the longer, the more it is.

    Args:
        pid: was sent SIGKILL, so that no thread is added, and was not reaped. No other process
            runs in its memory.

    Returns:
        Also False where it can't be known, for want of a /proc that shows our processes.
    """
    tasks = f"/proc/{pid}/task"
    try:
        if os.readlink("/proc/self") != str(os.getpid()):
            return False
        # That of a process that lives is there, so one that is missing means something.
        os.readlink("/proc/self/exe")
        count = os.stat(tasks).st_nlink - _NO_TASKS
        found = set(os.listdir(tasks))
    except OSError:
        return False
    # One that ends while they are listed may end the list.
    return len(found) == count and not any(_has_memory(f"{tasks}/{task}") for task in found)


def _has_memory(task: str) -> bool:
    # Files such as status say so too, but hold on to the memory while they are read: who lets go
    # of it last unmaps it, and that would be this process.
    try:
        os.readlink(f"{task}/exe")
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return True


def _run(name: str, parent: int, keep: Collection[int], main: Callable[[], int]) -> NoReturn:
    status = 1
    try:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        libc = ctypes.CDLL(None)
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
        libc.prctl(_PR_SET_NAME, f"kmesh-{name}".encode())
        close_except(keep)
        status = main()
    except SystemExit as leaving:
        status = leaving.code if isinstance(leaving.code, int) else 1
    except OSError as failed:
        if failed.errno in _SCARCE:
            logger.error("%s could not go on: %s", name, failed)
        else:
            sys.excepthook(*sys.exc_info())
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def raise_file_limit() -> int:
    """Lets this process have as many fds as it may; returns how many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def close_except(keep: Collection[int]) -> None:
    """Closes every fd of this process but stdio and ``keep``."""
    kept = {0, 1, 2, *keep}
    for fd in [int(text) for text in os.listdir("/proc/self/fd")]:
        if fd not in kept:
            with contextlib.suppress(OSError):
                os.close(fd)
