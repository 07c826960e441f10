"""Children of the supervisor that were killed: from when on they write nothing any more."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from daemon_process import wait_for
from held import held

from kmesh_spand import child

#: A thread beside the first one; that one may end before the process does.
_THREADS = """
import ctypes, sys, threading, time
threading.Thread(target=time.sleep, args=(600,)).start()
print("begun", flush=True)
if sys.argv[1:]:
    ctypes.CDLL(None).pthread_exit(None)
"""


@contextmanager
def process(*flags: str) -> Iterator[int]:
    """The pid of a child with two threads, which the block may kill, and must not reap."""
    with subprocess.Popen(
        [sys.executable, "-c", _THREADS, *flags], stdout=subprocess.PIPE, text=True
    ) as begun:
        try:
            assert begun.stdout is not None
            assert begun.stdout.readline() == "begun\n"
            yield begun.pid
        finally:
            begun.kill()


def ended(pid: int) -> None:
    """Kills a child, and waits until nothing is left of it but its status."""
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


def task_state(pid: int, task: int) -> str:
    return Path(f"/proc/{pid}/task/{task}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_child_that_runs_has_its_memory() -> None:
    with process() as pid:
        assert not child.has_left_memory(pid)
        ended(pid)
        assert child.has_left_memory(pid)


def test_each_thread_counts() -> None:
    with process("alone") as pid:
        # The first one has ended: of the process alone, nothing is to be seen.
        wait_for(lambda: task_state(pid, pid) == "Z")
        assert not child.has_left_memory(pid)
        ended(pid)
        assert child.has_left_memory(pid)


def test_one_that_is_not_quite_at_its_end_has_its_memory() -> None:
    with process() as pid, held(pid, memory=True):
        os.kill(pid, signal.SIGKILL)
        # The other thread is gone, and this one is stopped on its way out.
        wait_for(lambda: os.listdir(f"/proc/{pid}/task") == [str(pid)])
        wait_for(lambda: task_state(pid, pid) == "t")
        assert not child.has_left_memory(pid)


@pytest.mark.parametrize("shown", ["none", "others", "without programs", "fewer", "forbidden"])
def test_what_can_not_be_seen_is_not_taken_for_gone(
    monkeypatch: pytest.MonkeyPatch, shown: str
) -> None:
    """A /proc that is not mounted, of another namespace, or that says less than usual."""
    readlink = os.readlink

    def read(path: str) -> str:
        if shown == "none" or (shown == "without programs" and path.endswith("exe")):
            raise FileNotFoundError(path)
        if shown == "forbidden" and "/task/" in path:
            raise PermissionError(path)
        return readlink(path)

    with process() as pid:
        ended(pid)
        with monkeypatch.context() as patch:
            patch.setattr(os, "readlink", read)
            if shown == "others":
                patch.setattr(os, "getpid", lambda: pid)
            if shown == "fewer":
                patch.setattr(os, "listdir", lambda _: [])
            assert not child.has_left_memory(pid)
        assert child.has_left_memory(pid)
