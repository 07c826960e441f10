"""Processes that the demo starts, each with a log, and always ends."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

LOG_TAIL_LINES = 30


class ProcessFailed(Exception):
    """A process ended, or did not become ready; the message holds the end of its log."""


class Process:
    """One process and its descendants, in a process group of its own.

    Leaving the context sends SIGTERM, waits, and then ends what is left of the group.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        log: Path,
        *,
        env: Mapping[str, str] | None = None,
        stop_timeout: float = 30.0,
    ) -> None:
        self.name = name
        self._command = list(command)
        self._log = log
        self._env = {**os.environ, **(env or {})}
        self._stop_timeout = stop_timeout
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Process:
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._env,
                start_new_session=True,
            )
        return self

    @property
    def log(self) -> str:
        """Where it writes, as seen from here."""
        return os.path.relpath(self._log)

    @property
    def pid(self) -> int:
        """Of the process, which must have been started."""
        assert self._process is not None
        return self._process.pid

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        process = self._process
        if process is None:
            return
        try:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(self._stop_timeout)
        finally:
            # The group outlives its leader while a child of it runs.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def wait_ready(self, is_ready: Callable[[], bool], timeout: float) -> None:
        """Polls ``is_ready`` until it holds; ProcessFailed if it doesn't in ``timeout`` seconds."""
        assert self._process is not None
        deadline = time.monotonic() + timeout
        while not is_ready():
            status = self._process.poll()
            if status is not None:
                raise ProcessFailed(f"{self.name} ended with status {status}\n{self._tail()}")
            if time.monotonic() > deadline:
                raise ProcessFailed(f"{self.name} not ready after {timeout:.0f} s\n{self._tail()}")
            time.sleep(0.25)

    def _tail(self) -> str:
        lines = self._log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
        return "\n".join([f"--- end of {self._log}", *lines])
