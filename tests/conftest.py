"""Fixtures for all tests."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "ipc"))

from daemon_process import BYTECODE, ROOT, Daemon
from last_run import pytest_configure, pytest_report_header, run_seed
from leaks import no_leaks, pytest_collection_finish

__all__ = [
    "no_leaks",
    "pytest_collection_finish",
    "pytest_configure",
    "pytest_report_header",
    "run_seed",
]

if sys.dont_write_bytecode and os.access(ROOT, os.W_OK):
    # Otherwise each run would compile all tests again. It goes where daemons have theirs.
    sys.dont_write_bytecode = False
    sys.pycache_prefix = str(BYTECODE)


@pytest.fixture
def socket_dir() -> Iterator[Path]:
    """A directory for sockets that does not exist yet; its path is short, as it must be."""
    parent = Path(tempfile.mkdtemp(prefix="kmesh-"))
    yield parent / "s"
    shutil.rmtree(parent)


@pytest.fixture
def start_spand(socket_dir: Path) -> Iterator[Callable[..., Daemon]]:
    """Starts daemons (settings as arguments, see ``Daemon``); ends them and reads their logs."""
    started: list[Daemon] = []

    def start(**settings: object) -> Daemon:
        daemon = Daemon(socket_dir, **settings)  # type: ignore[arg-type]
        started.append(daemon)
        return daemon

    yield start
    for daemon in started:
        try:
            daemon.stop()
        finally:
            daemon.kill()
    for daemon in started:
        daemon.check_log()


@pytest.fixture(scope="module")
def shared_spand() -> Iterator[Daemon]:
    """One daemon for a module's tests that leave it as it was."""
    parent = Path(tempfile.mkdtemp(prefix="kmesh-"))
    daemon = Daemon(parent / "s")
    try:
        daemon.wait_populated()
        yield daemon
        daemon.stop()
        daemon.check_log()
    finally:
        daemon.kill()
        shutil.rmtree(parent)


@pytest.fixture
def spand(start_spand: Callable[..., Daemon]) -> Daemon:
    """A running daemon with 32 MiB."""
    daemon = start_spand()
    daemon.wait_populated()
    return daemon
