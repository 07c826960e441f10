"""Asks a daemon's ``metrics.sock``, and breaks its parts."""

from __future__ import annotations

import http.client
import json
import os
import re
import resource
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import faulty
from daemon_process import Daemon, wait_for

_SAMPLE = re.compile(r"^(\w+)(?:\{(.*)\})? (\S+)$")


class _Connection(http.client.HTTPConnection):
    def __init__(self, path: Path, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


def get(socket_dir: Path, path: str, timeout: float = 10.0) -> tuple[int, str]:
    """Status and body; OSError when nobody answers."""
    connection = _Connection(socket_dir / "metrics.sock", timeout)
    try:
        connection.request("GET", path)
        with connection.getresponse() as response:
            return response.status, response.read().decode()
    finally:
        connection.close()


def readiness(daemon: Daemon) -> set[str]:
    """Names of the reasons for which a daemon is not ready."""
    status, text = get(daemon.socket_dir, "/readyz")
    answer: dict[str, Any] = json.loads(text)
    names = {reason["name"] for reason in answer["reasons"]}
    assert (status, answer["ready"]) == ((503, False) if names else (200, True))
    assert all(reason["text"] for reason in answer["reasons"])
    return names


def wait_for_reasons(daemon: Daemon, *names: str, seconds: float = 30.0) -> None:
    """Waits until these are the reasons; none: until it is ready."""
    wait_for(lambda: readiness(daemon) == set(names), seconds, f"{names}: {daemon.log()}")


def samples(daemon: Daemon) -> dict[str, float]:
    """The metrics page: values by name with labels, without the buckets of histograms."""
    status, text = get(daemon.socket_dir, "/metrics")
    assert status == 200, text
    found = {}
    for line in text.splitlines():
        if line.startswith("#"):
            continue
        match = _SAMPLE.match(line)
        assert match, line
        name, labels, value = match.groups()
        if not name.endswith("_bucket"):
            found[f"{name}{{{labels}}}" if labels else name] = float(value)
    return found


@contextmanager
def without_files(pid: int) -> Iterator[None]:
    """Meanwhile a process gets no file descriptor more than it has."""
    before, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    used = {int(name) for name in os.listdir(f"/proc/{pid}/fd")}
    lowest = next(number for number in range(len(used) + 1) if number not in used)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (lowest, hard))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (before, hard))


class Faults:
    """Faults of one daemon; give ``settings`` to what starts it."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(exist_ok=True)
        self._directory = directory
        self.settings: dict[str, Any] = {
            "command": faulty.COMMAND,
            "env": {faulty.DIRECTORY: str(directory)},
            "errors": True,
        }

    def begin(self, name: str) -> None:
        (self._directory / name).touch()

    def end(self, name: str) -> None:
        (self._directory / name).unlink()

    @contextmanager
    def during(self, name: str) -> Iterator[None]:
        self.begin(name)
        try:
            yield
        finally:
            self.end(name)
