"""kmesh-spand, and what its CLI says about it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from demo.processes import Process

HOST_MEMORY = "1GiB"
START_TIMEOUT = 60.0
SETTLE_TIMEOUT = 60.0
_BIN = Path(sys.executable).parent


class Daemon:
    """A running daemon, seen through ``kmesh status``."""

    def __init__(self, socket_dir: Path) -> None:
        self.socket_dir = socket_dir

    def status(self) -> dict[str, Any]:
        """What ``kmesh status --json`` prints; CalledProcessError if no daemon answers."""
        return self.ask("status")

    def ask(self, *command: str) -> dict[str, Any]:
        """What a command of ``kmesh`` prints with ``--json``; CalledProcessError if it fails."""
        line = [str(_BIN / "kmesh"), "--socket-dir", str(self.socket_dir), *command, "--json"]
        done = subprocess.run(line, check=True, capture_output=True, text=True, timeout=30)
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer

    def is_ready(self) -> bool:
        """Whether it answers and all of its memory is there."""
        try:
            slabs = self.status()["slabs"]
        except subprocess.CalledProcessError:
            return False
        return all(int(slab["populated"]) >= int(slab["capacity"]) for slab in slabs)

    def settle(self) -> dict[str, Any]:
        """Waits until nothing is being stored; TimeoutError if that does not come."""
        deadline = time.monotonic() + SETTLE_TIMEOUT
        last: tuple[int, int] | None = None
        while time.monotonic() < deadline:
            status = self.status()
            now = (int(status["reservations"]), int(status["spans"]))
            if now[0] == 0 and now == last:
                return status
            last = now
            time.sleep(0.2)
        raise TimeoutError(f"the daemon still stores after {SETTLE_TIMEOUT:.0f} s")


@contextmanager
def run(folder: Path, socket_dir: Path) -> Iterator[tuple[Daemon, Process]]:
    """Starts a daemon on ``socket_dir``. It is not ready yet."""
    command = [str(_BIN / "kmesh-spand"), "--host-memory", HOST_MEMORY]
    command += ["--socket-dir", str(socket_dir)]
    with Process("kmesh-spand", command, folder / "kmesh-spand.log") as process:
        yield Daemon(socket_dir), process
