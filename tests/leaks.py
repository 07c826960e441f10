"""Fails a test that leaves something behind: an fd, a child process, a thread, a memfd.

``no_leaks`` is used by every test. What fixtures of a wider scope hold is not counted.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

#: What ends by itself has this long: a killed child's pipes, gRPC's threads.
GRACE_SECONDS = 30.0
#: Pids of wider fixtures' processes that start others while tests run; those are not counted.
STARTING: set[int] = set()


def process_tree(root: int | None = None) -> set[int]:
    """All descendants of a process (default: this one), except those of ``STARTING``."""
    found: set[int] = set()
    waiting = [root or os.getpid()]
    while waiting:
        tasks: list[Path] = []
        parent = waiting.pop()
        if parent in STARTING:
            continue
        # A process, or a task of it, may end meanwhile.
        with contextlib.suppress(OSError):
            tasks += Path(f"/proc/{parent}/task").glob("*/children")
        for task in tasks:
            try:
                children = {int(pid) for pid in task.read_text().split()}
            except OSError:
                continue
            waiting += children - found
            found |= children
    return found


def open_fds(pid: int | str = "self") -> Counter[str]:
    """What a process has open, by the names of its links."""
    found: Counter[str] = Counter()
    directory = f"/proc/{pid}/fd"
    for name in os.listdir(directory):
        try:
            link = os.readlink(f"{directory}/{name}")
        except OSError:
            continue
        # The directories that this very look has open.
        if not link.startswith("/proc/"):
            found[_kind(link)] += 1
    return found


def _kind(link: str) -> str:
    """Sockets and pipes by what they are: their numbers say nothing."""
    return link.partition(":[")[0] if link.startswith(("socket:", "pipe:")) else link


def mapped_memfds() -> Counter[str]:
    """Memfds and DMA-BUFs that this process has mapped."""
    with open("/proc/self/maps") as maps:
        shared = [line for line in maps if "/memfd:" in line or "/dmabuf:" in line]
    return Counter(line.split(maxsplit=5)[5].strip() for line in shared)


@dataclass(frozen=True)
class Snapshot:
    fds: Counter[str]
    children: frozenset[int]
    threads: frozenset[threading.Thread]
    memfds: Counter[str]

    @classmethod
    def take(cls) -> Snapshot:
        return cls(
            open_fds(),
            frozenset(process_tree()),
            frozenset(threading.enumerate()),
            mapped_memfds(),
        )

    def grown(self, now: Snapshot) -> list[str]:
        """What ``now`` has more than this."""
        found = [f"fd {link} x{count}" for link, count in (now.fds - self.fds).items()]
        found += [f"process {pid} ({_command(pid)})" for pid in now.children - self.children]
        found += [f"thread {thread.name}" for thread in now.threads - self.threads]
        found += [f"mapped {link} x{n}" for link, n in (now.memfds - self.memfds).items()]
        return found


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    except OSError:
        return "gone"


def _forget_failure() -> None:
    """Lets go of the frames of the last failure, those of its causes included."""
    sys.last_traceback = None
    seen: list[BaseException] = []
    waiting: list[BaseException | None] = [getattr(sys, "last_value", None)]
    while waiting:
        one = waiting.pop()
        if one is None or any(one is other for other in seen):
            continue
        seen.append(one)
        one.__traceback__ = None
        waiting += [one.__cause__, one.__context__]
        if isinstance(one, BaseExceptionGroup):
            waiting += one.exceptions


def pytest_collection_finish() -> None:
    """Spares collections all that modules and the list of tests hold: it lives as long as the run.

    They are half a million objects, and many tests leave a cycle that makes ``no_leaks`` collect.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    """Compares before and after; waits a moment for what is on its way out.

    Garbage is collected only where something has grown: a test that ends well leaves none that
    holds anything. One that fails is in a traceback, whose frames hold what it had.
    """
    before = Snapshot.take()
    yield
    deadline = time.monotonic() + GRACE_SECONDS
    while grown := before.grown(Snapshot.take()):
        if time.monotonic() > deadline:
            pytest.fail("the test left behind: " + "; ".join(sorted(grown)))
        _forget_failure()
        gc.collect()
        time.sleep(0.02)
