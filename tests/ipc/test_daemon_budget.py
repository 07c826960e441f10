"""A pool never grows into the limit at which the kernel kills."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from daemon_process import Daemon, wait_for
from rawclient import RawClient

from kmesh.v1 import common_pb2

Start = Callable[..., Daemon]
MIB = 1 << 20
LIMIT = 700 * MIB


@contextlib.contextmanager
def memory_group(limit: int) -> Iterator[Path]:
    """A control group below this process's own, v1 or v2, whose parent has the limit."""
    outer = None
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            outer, file = Path("/sys/fs/cgroup/memory" + path), "memory.limit_in_bytes"
        elif controllers == "" and Path("/sys/fs/cgroup/cgroup.controllers").exists():
            outer, file = Path("/sys/fs/cgroup" + path), "memory.max"
    if outer is None:
        pytest.skip("no memory controller")
    group = outer / f"kmesh-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / file).write_text(str(limit))
        (group / "inner").mkdir()
    except OSError as failed:
        with contextlib.suppress(OSError):
            group.rmdir()
        pytest.skip(f"may not make control groups: {failed}")
    try:
        yield group / "inner"
    finally:
        for path in (group / "inner", group):
            wait_for(lambda path=path: not (path / "cgroup.procs").read_text())
            path.rmdir()


_HOG = """
import mmap, os, sys
open(sys.argv[1], "w").write(str(os.getpid()))
memory = mmap.mmap(-1, int(sys.argv[2]))
for at in range(0, len(memory), 4096):
    memory[at] = 1
print("full", flush=True)
sys.stdin.read()
"""


def test_growth_pauses_instead_of_being_killed(start_spand: Start) -> None:
    with memory_group(LIMIT) as group:
        procs = group / "cgroup.procs"
        with subprocess.Popen(
            [sys.executable, "-c", _HOG, str(procs), str(350 * MIB)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as hog:
            assert hog.stdout is not None
            assert hog.stdout.readline() == "full\n"
            daemon = start_spand(host_memory="320MiB", slab_size="64MiB", group=group)
            status = daemon.wait_status(lambda status: status.paused)
            assert str(group.parent) in status.paused
            assert status.counters["population_pauses"] >= 1
            populated = sum(slab.populated for slab in status.slabs)
            assert populated < 320 * MIB - 64 * MIB
            with RawClient(daemon.socket_dir) as client:
                # What is there is served, and more is not waited for.
                if populated:
                    assert client.store(b"k" * 32, b"bytes") == 0
                    assert client.read(b"k" * 32) == b"bytes"
            time.sleep(1)
            assert daemon.process.poll() is None
            hog.communicate()
        daemon.wait_populated()
        assert not daemon.status().paused
        log = daemon.log()
        assert log.count("memory does not grow for now") >= 1
        assert "memory grows again" in log
        daemon.stop()


def test_a_pool_over_the_limit_is_refused(start_spand: Start) -> None:
    with memory_group(200 * MIB) as group:
        daemon = start_spand(host_memory="180MiB", ready=False, errors=True, group=group)
        assert daemon.process.wait(20) == 2
        assert "staging_memory: with host_memory 244 MiB" in daemon.log()
        assert str(group.parent) in daemon.log()


def test_a_pause_is_told(start_spand: Start) -> None:
    """More is left to others than the machine has, so that nothing grows from the start."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    daemon = start_spand(memory_headroom="64TiB", metrics_listen=f"127.0.0.1:{port}")
    status = daemon.wait_status(lambda status: status.paused)
    assert "memory_headroom" in status.paused
    (warning,) = (w for w in status.warnings if w.name == "growth")
    assert warning.text == f"slabs do not grow: {status.paused}"
    assert status.counters["population_pauses"] == 1
    with RawClient(daemon.socket_dir) as client:
        assert client.store(b"k" * 32, b"bytes") == common_pb2.REASON_NOT_READY
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as page:
        lines = page.read().decode().splitlines()
    assert "kmesh_population_paused 1.0" in lines
    assert 'kmesh_warning{reason="growth"} 1.0' in lines
    assert "kmesh_population_pauses_total 1.0" in lines
