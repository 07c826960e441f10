"""How soon spans are served again: control killed, daemon restarted, daemon upgraded."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from benchmarks.results import Row
from benchmarks.spand import Spand, environment, store
from kmesh.errors import KMeshError
from kmesh.keys import KEY_BYTES
from kmesh.layout import TILE_BYTES, Shard
from tools.service_manager import ServiceManager

SHARD = Shard(0, 1, 0, 1)
COMMAND = (sys.executable, "-m", "kmesh_spand")
_SPANS = 100_000
_SECONDS = 120.0
#: Keys of one question, from all over the catalog.
_ASKED = 64
#: Bytes of a span; it takes a tile.
_LENGTH = 1024


class Daemons:
    """Daemons on one directory, each in the place of the one before.

    Args:
        base: for the directory and their logs.
        spans: that are stored in the first one.
    """

    def __init__(self, base: Path, spans: int) -> None:
        self._base = base
        self._spans = spans
        self._running: list[subprocess.Popen[bytes]] = []
        self.keys = os.urandom(spans * KEY_BYTES)
        self.spand = Spand(base / "s", 0)

    def start(
        self,
        command: Sequence[str],
        pass_fds: Sequence[int] = (),
        **more: str,
    ) -> None:
        """Starts one, and does not wait for it."""
        # A span of a tile, with its sums and room at the end of each slab.
        memory = (self._spans + self._spans // 50 + 1024) * TILE_BYTES
        flags = (
            f"--socket-dir={self.spand.socket_dir}",
            f"--host-memory={memory}",
            f"--max-spans={2 * self._spans}",
        )
        with (self._base / "log").open("ab") as log:
            process = subprocess.Popen(
                [*command, *flags],
                env=environment(**more),
                pass_fds=pass_fds,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self._running.append(process)
        self.spand.pid = process.pid

    def fill(self) -> None:
        """Stores the spans."""
        until = time.monotonic() + _SECONDS
        while time.monotonic() < until:
            with contextlib.suppress(KMeshError):
                self.spand.connect().close()
                break
            time.sleep(0.01)
        self.spand.settle()
        with self.spand.connect() as session:
            store(session, self.keys, SHARD, length=_LENGTH)

    def served(self) -> float:
        """When a new session has been given all spans that it asks for, by ``perf_counter``."""
        step = len(self.keys) // KEY_BYTES // _ASKED * KEY_BYTES
        asked = [self.keys[at : at + KEY_BYTES] for at in range(0, len(self.keys), step)]
        until = time.perf_counter() + _SECONDS
        while time.perf_counter() < until:
            with contextlib.suppress(KMeshError), self.spand.connect() as session:
                while time.perf_counter() < until:
                    with session.acquire(b"".join(asked), [SHARD], prefix=False) as lease:
                        # What was not verified yet is on its way.
                        if lease.hits == len(asked):
                            return time.perf_counter()
                    time.sleep(0.002)
            time.sleep(0.002)
        raise TimeoutError((self._base / "log").read_text()[-2000:])

    def lost(self) -> int:
        """Spans that are not there any more, once all were looked at."""
        until = time.monotonic() + _SECONDS
        while time.monotonic() < until:
            status = self.spand.settle()
            looked = status.counters["spans_verified"] + status.counters["spans_corrupt"]
            if looked >= status.counters["spans_recovered"]:
                return self._spans - status.spans
            time.sleep(0.05)
        raise TimeoutError(f"spans are not verified after {_SECONDS:.0f} s")

    def signal(self, number: int) -> None:
        """Sends a signal to the daemon that was started first, of those that run."""
        self._running[0].send_signal(number)

    def wait(self) -> None:
        """Until the daemon that was started first has ended."""
        self._running.pop(0).wait(_SECONDS)

    def kill_control(self) -> None:
        """Control alone."""
        for pid in self.spand.processes():
            if Path(f"/proc/{pid}/comm").read_text().strip() == "kmesh-control":
                os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        """Ends what runs."""
        for process in self._running:
            process.kill()
            process.wait()


def _rows(
    name: str, daemons: Daemons, rounds: int, again: Callable[[], object], what: str
) -> Iterator[Row]:
    taken, lost = [], []
    for _ in range(rounds):
        begin = time.perf_counter()
        again()
        taken.append(daemons.served() - begin)
        lost.append(float(daemons.lost()))
    note = f"{what}; {len(daemons.keys) // KEY_BYTES} spans"
    yield Row(f"restart_{name}", "s", "median", {"served": taken}, note)
    yield Row(f"restart_{name}_lost", "spans", "max", {"lost": lost}, note)


def with_store(base: Path, spans: int, rounds: int) -> Iterator[Row]:
    """Control killed, then the whole daemon restarted by a manager that keeps its memory."""
    daemons = Daemons(base, spans)
    with ServiceManager(base / "notify") as manager:

        def start() -> None:
            how = manager.start(COMMAND)
            daemons.start(how.command, how.pass_fds, **how.env)

        def restart() -> None:
            daemons.signal(signal.SIGTERM)
            daemons.wait()
            start()

        try:
            start()
            daemons.fill()
            what = "from SIGKILL of control to spans in a new session"
            yield from _rows("control", daemons, rounds, daemons.kill_control, what)
            what = "from SIGTERM to spans of the next daemon in a new session"
            yield from _rows("daemon", daemons, rounds, restart, what)
        finally:
            daemons.close()


def upgraded(base: Path, spans: int, rounds: int) -> Iterator[Row]:
    """A new daemon takes over from the one that runs."""
    daemons = Daemons(base, spans)

    def again() -> None:
        daemons.start((*COMMAND, "--upgrade"))
        daemons.wait()

    try:
        daemons.start(COMMAND)
        daemons.fill()
        what = "from the new daemon's command to its spans in a new session"
        yield from _rows("upgrade", daemons, rounds, again, what)
    finally:
        daemons.close()


def run(quick: bool) -> Iterator[Row]:
    """Rows of this file."""
    spans, rounds = (2_000, 1) if quick else (_SPANS, 3)
    for measure in (with_store, upgraded):
        with tempfile.TemporaryDirectory(prefix="kmesh-bench-") as base:
            yield from measure(Path(base), spans, rounds)
