"""Processes that were killed and are not gone, as where a driver, a disk or much memory is why."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
from collections.abc import Iterator

import pytest

_PTRACE_CONT, _PTRACE_SEIZE = 7, 0x4206
_TRACE_EXIT = 0x40
_EXITS = signal.SIGTRAP | 6 << 8
_WALL = 0x40000000


class _Holder(threading.Thread):
    """Traces a task: the parent of one that is traced by another can't reap it.

    Args:
        memory: the task is stopped at its end while it has its memory. Without, it leaves that.
    """

    def __init__(self, task: int, memory: bool) -> None:
        super().__init__()
        self._task = task
        self._memory = memory
        self._go = threading.Event()
        self.seized = threading.Event()
        self.refused = 0
        self.start()
        self.seized.wait(30)

    def run(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.ptrace.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p)
        if libc.ptrace(_PTRACE_SEIZE, self._task, None, _TRACE_EXIT if self._memory else None):
            self.refused = ctypes.get_errno()
        self.seized.set()
        if self.refused:
            return
        if not self._memory:
            self._go.wait(120)
        while os.WIFSTOPPED(status := os.waitpid(self._task, _WALL)[1]):
            exits = status >> 8 == _EXITS
            if exits:
                self._go.wait(120)
            libc.ptrace(_PTRACE_CONT, self._task, None, None if exits else os.WSTOPSIG(status))

    def let_go(self) -> None:
        self._go.set()
        self.join()


@contextlib.contextmanager
def held(task: int, *, memory: bool = False) -> Iterator[None]:
    """A block in which a process, or a thread of it, is not gone, although it is killed.

    Args:
        memory: it keeps its memory too. Without, it can't be reaped, and that is all.
    """
    holder = _Holder(task, memory)
    if holder.refused:
        holder.join()
        pytest.skip(f"no process may be traced here: {os.strerror(holder.refused)}")
    try:
        yield
    finally:
        holder.let_go()
