"""A store worker that was killed goes as slowly as it likes: who waits for what of it."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from daemon_process import COMMAND, Daemon, wait_for
from held import held
from rawclient import RawClient
from stored import SETTINGS, assert_filled, fill

from kmesh.v1 import common_pb2

Start = Callable[..., Daemon]

_IMPATIENT = """
import sys
from kmesh_spand import workerkeeper
from kmesh_spand.__main__ import main
workerkeeper._END_SECONDS = workerkeeper._CLOSE_SECONDS = 0.5
sys.exit(main())
"""
IMPATIENT = (sys.executable, "-c", _IMPATIENT)


def state(pid: int) -> str:
    """As ``ps`` shows it."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def stores(daemon: Daemon) -> None:
    """A worker copies into memory."""
    with RawClient(daemon.socket_dir) as client:
        wait_for(lambda: client.store(b"more" * 8, b"bytes") in (0, common_pb2.REASON_EXISTS))
        assert client.read(b"more" * 8) == b"bytes"


def test_control_is_back_before_the_worker_is_gone(start_spand: Start) -> None:
    """It has left its memory: to unmap a large pool takes seconds."""
    daemon = start_spand(errors=True, **SETTINGS)
    fill(daemon)
    worker = daemon.child("worker")
    with held(worker):
        for times in (2, 3):
            os.kill(daemon.child("control"), signal.SIGKILL)
            daemon.wait_ready(times)
            # The next worker has verified them.
            assert_filled(daemon)
            stores(daemon)
        assert state(worker) == "Z"
    # It is reaped when it can be.
    wait_for(lambda: not Path(f"/proc/{worker}").exists())
    assert daemon.status().control_restarts == 2
    assert daemon.stop() == 0


def test_a_wedged_worker_is_replaced_before_it_is_gone(start_spand: Start) -> None:
    daemon = start_spand(errors=True, copy_timeout_ms=400, **SETTINGS)
    fill(daemon)
    worker = daemon.child("worker")
    with RawClient(daemon.socket_dir) as client, held(worker):
        client.attach_staging(1 << 20)
        reserved = list(client.reserve([b"a" * 32], 1000).reservation)
        os.kill(worker, signal.SIGSTOP)
        assert client.commit(reserved, [0]) == [common_pb2.REASON_COPY_FAILED]
        stores(daemon)
        assert state(worker) == "Z"
    status = daemon.status()
    assert (status.worker_restarts, status.control_restarts) == (1, 0)


@pytest.mark.parametrize("which", [0, 1])
def test_control_waits_for_a_worker_that_may_write(start_spand: Start, which: int) -> None:
    """One thread of it is not at its end yet, the first one or another."""
    daemon = start_spand(errors=True, command=IMPATIENT, **SETTINGS)
    fill(daemon)
    worker = daemon.child("worker")
    threads = sorted(int(task) for task in os.listdir(f"/proc/{worker}/task"))
    with held(threads[which], memory=True):
        os.kill(daemon.child("control"), signal.SIGKILL)
        late = f"has not ended: the kernel holds it (process {worker})"
        wait_for(lambda: late in daemon.log())
        # The others are at their end.
        wait_for(lambda: state(worker) == ("Z" if which else "t"))
        assert daemon.log().count("ready: ") == 1
    daemon.wait_ready(2)
    assert_filled(daemon)
    stores(daemon)


def test_a_daemon_is_taken_over_before_its_worker_is_gone(start_spand: Start) -> None:
    first = start_spand(command=IMPATIENT, **SETTINGS)
    fill(first)
    worker = first.child("worker")
    with held(worker):
        second = start_spand(command=(*COMMAND, "--upgrade"), **SETTINGS)
        assert first.process.wait(60) == 0
        assert_filled(second)
        stores(second)
        assert state(worker) == "Z"
