"""The processes of a chaos run that are no daemon: clients, and the one that is rude."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from chaos_pulse import Pulse
from chaos_watch import require
from daemon_process import ROOT, environment

HERE = Path(__file__).parent
#: How much later than its deadline a call may end: this machine may be starved.
SLACK = 20.0


class Client:
    """One place for a client process, of which there is a new one whenever it dies.

    Attributes:
        killed: it may end by SIGKILL.
        excused: until then (monotonic) its calls are late, because it was stopped.
        latest: seconds past its deadline of the call that was latest, as far as was seen.
    """

    def __init__(self, number: int, directory: Path, arguments: dict[str, int]) -> None:
        self.name = f"client{number}" if number >= 0 else "audit"
        self._sockets = directory / "s"
        self._arguments = {**arguments, "number": max(number, 0)}
        self._pulse_path = directory / f"{self.name}.pulse"
        self._log_path = directory / f"{self.name}.log"
        self._log_path.touch()
        self.pulse = Pulse(self._pulse_path)
        self._read = 0
        self.lives = 0
        self.killed = False
        self.excused = self.latest = 0.0
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """Of the process; 0: there is none."""
        return self.process.pid if self.process is not None and self.process.poll() is None else 0

    def start(self, *more: str) -> None:
        self.lives += 1
        self.killed = False
        flags = [f"--{name}={value}" for name, value in self._arguments.items()]
        command = [sys.executable, str(HERE / "chaos_engine.py"), str(self._sockets)]
        # As a user who may not write where Python lies.
        env = environment(PYTHONDONTWRITEBYTECODE="1", PYTHONPATH=f"{ROOT / 'client'}:{ROOT}")
        with self._log_path.open("ab") as log:
            self.process = subprocess.Popen(
                [*command, str(self._pulse_path), *flags, f"--life={self.lives}", *more],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=env,
            )

    def began(self) -> bool:
        """Whether this life of it has got as far as to say so."""
        return self.pulse.counts()["lives"] == self.lives

    def reports(self) -> list[dict[str, Any]]:
        """What it has said since the last time; a traceback is something broken."""
        with self._log_path.open("rb") as log:
            log.seek(self._read)
            text = log.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._read += len(whole)
        found = []
        for line in whole.decode(errors="replace").splitlines():
            if line.startswith("{"):
                found.append(json.loads(line))
            elif line.startswith("Traceback"):
                found.append({"what": "broken", "text": f"a traceback:\n{self.tail()}"})
        return found

    def check(self) -> None:
        """No call of it hangs, and it did not end by itself."""
        assert self.process is not None
        status = self.process.poll()
        if status is None:
            self._check_call()
            return
        self.pulse.forget()
        expected = (0, -9) if self.killed else (0,)
        require(
            status in expected,
            f"{self.name} (pid {self.process.pid}) ended with {status}:\n{self.tail()}",
        )

    def _check_call(self) -> None:
        call = self.pulse.call()
        if call is None:
            return
        name, began, seconds = call
        late = time.monotonic() - max(began, self.excused) - seconds
        self.latest = max(self.latest, late)
        require(late < SLACK, f"{self.name} hangs: {name} is {late:.0f} s past its deadline")

    def tail(self) -> str:
        return "\n".join(self._log_path.read_text(errors="replace").splitlines()[-30:])

    def close(self) -> None:
        """Ends it in any case."""
        if self.process is not None:
            if self.process.poll() is None:
                self.process.kill()
            self.process.wait()
        self.pulse.close()


class Rude:
    """The process that runs what is rude."""

    def __init__(self, directory: Path) -> None:
        self._log_path = directory / "rude.log"
        with self._log_path.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(HERE / "chaos_rude.py"), str(directory / "s")],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=environment(),
            )

    def do(self, what: str, seed: int, seconds: float) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{what} {seed} {seconds}\n".encode())
        self.process.stdin.flush()

    def end(self) -> None:
        """No more of it. ``check`` says when all of it has ended."""
        assert self.process.stdin is not None
        self.process.stdin.close()

    def check(self) -> None:
        said = self._log_path.read_text(errors="replace")
        require(self.process.poll() in (None, 0) and not said, f"the rude client: {said}")

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        if self.process.stdin is not None:
            self.process.stdin.close()


def total(clients: list[Client]) -> Counter[str]:
    """What all of them have counted."""
    found: Counter[str] = Counter()
    for client in clients:
        found.update(client.pulse.counts())
    return found


def is_root() -> bool:
    return os.getuid() == 0
