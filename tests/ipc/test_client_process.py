"""Clients in processes of their own, and daemons that die under them."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from daemon_process import Daemon, environment, wait_for

from kmesh import errors
from kmesh.client import Client
from kmesh.layout import Shard
from kmesh.session import ReserveBatch, Role, Session
from kmesh.store import put_spans, read_span

SHARD = Shard(0, 2, 0, 2)

_PRELUDE = """
import os, sys, time
from kmesh import Shard
from kmesh.session import ReserveBatch, Role, Session
from kmesh.store import put_spans, read_span
socket_dir, key = sys.argv[1], bytes.fromhex(sys.argv[2])
session = Session.connect(socket_dir, role=Role.TOOL)
shard = Shard(0, 2, 0, 2)
"""


@contextmanager
def process(code: str, daemon: Daemon, key: bytes, files: int = 0) -> Iterator[subprocess.Popen]:
    """Runs a client; ends it in any case."""

    def limit() -> None:
        if files:
            resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))

    child = subprocess.Popen(
        [sys.executable, "-c", _PRELUDE + code, str(daemon.socket_dir), key.hex()],
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=limit,
    )
    try:
        yield child
    finally:
        child.kill()
        child.wait()
        assert child.stdout is not None
        child.stdout.close()


def said(child: subprocess.Popen) -> str:
    """The next line of a client."""
    assert child.stdout is not None
    return str(child.stdout.readline().strip())


def store(session: Session, key: bytes, payload: bytes) -> None:
    batch = ReserveBatch(b"n" * 32, SHARD, key, [64], [0], [len(payload)])
    assert put_spans(session, session.staging(len(payload)), batch, [payload]) == [0]


def test_a_killed_client_leaves_nothing_even_when_it_forked(spand: Daemon) -> None:
    key = os.urandom(32)
    code = """
staging = session.staging(4096)
batch = ReserveBatch(b"n" * 32, shard, key, [64], [0], [1000])
assert put_spans(session, staging, batch, [bytes(1000)]) == [0]
lease = session.acquire(key, [shard])
session.reserve(ReserveBatch(b"n" * 32, shard, os.urandom(320), [64] * 10, [0] * 10, [9] * 10))
import warnings
warnings.simplefilter("ignore")  # of threads and fork, from Python 3.12 on
child = os.fork()
if child == 0:
    time.sleep(60)
    os._exit(0)
print(child, flush=True)
time.sleep(60)
"""
    with process(code, spand, key) as client:
        orphan = int(said(client))
        try:
            spand.wait_status(lambda s: s.leases == 1 and s.reservations == 10)
            client.send_signal(signal.SIGKILL)
            client.wait()
            status = spand.wait_status(lambda s: s.leases == s.reservations == s.staging_bytes == 0)
            assert status.spans == 1
            os.kill(orphan, 0)
        finally:
            os.kill(orphan, signal.SIGKILL)


def test_ten_thousand_leases_with_64_descriptors(spand: Daemon) -> None:
    key = os.urandom(32)
    code = """
staging = session.staging(4096)
batch = ReserveBatch(b"n" * 32, shard, key, [64], [0], [1000])
put_spans(session, staging, batch, [b"x" * 1000])
before = len(os.listdir("/proc/self/fd"))
for i in range(10_000):
    with session.acquire(key, [shard]) as lease:
        if i % 100 == 0:
            assert read_span(session, lease, 0) == b"x" * 1000
for i in range(500):
    os.close(session.export_slab(0).fd)
    with Session.connect(socket_dir, role=Role.TOOL) as other:
        other.slab(0)
session.ping()
print(len(os.listdir("/proc/self/fd")) - before, session.pending, flush=True)
"""
    with process(code, spand, key, files=64) as client:
        assert said(client) == "0 0"
    spand.wait_status(lambda s: s.leases == 0)


def test_spans_survive_the_death_of_control(spand: Daemon) -> None:
    key, payload = os.urandom(32), os.urandom(100_000)
    spand.errors = True
    with Client(spand.socket_dir, role=Role.TOOL) as client:
        first = client.wait(10)
        store(first, key, payload)
        lease = first.acquire(key, [SHARD])
        slab = first.slab(lease.slab[0])
        os.kill(spand.child("control"), signal.SIGKILL)
        second = wait_for(lambda: client.session is not first and client.session)
        assert second.epoch != first.epoch
        assert first.closed
        lease.release()
        with pytest.raises(errors.ConnectionClosed):
            first.ping()
        wait_for(lambda: first.index.poisoned)
        assert first.index.probe(key, [SHARD.code()]).hits == 0
        # The old mapping is still memory, not a fault.
        assert bytes(slab.view(lease.offset[0], 16)) == payload[:16]

        def served() -> bool:
            with second.acquire(key, [SHARD]) as again:
                return bool(again.hits) and read_span(second, again, 0) == payload

        wait_for(served)


def test_a_stopped_daemon_is_unavailable_and_then_back(spand: Daemon, start_spand) -> None:
    with Client(spand.socket_dir, role=Role.TOOL) as client:
        first = client.wait(10)
        spand.stop()
        wait_for(lambda: client.session is None)
        with pytest.raises(errors.ConnectionClosed):
            first.ping()
        with pytest.raises(errors.DaemonUnavailable):
            Session.connect(spand.socket_dir, role=Role.TOOL)
        start_spand()
        client.wait(20).ping()


def test_a_frozen_daemon_costs_a_deadline_and_no_lease(spand: Daemon) -> None:
    key = os.urandom(32)
    with Session.connect(spand.socket_dir, role=Role.TOOL) as session:
        store(session, key, bytes(1000))
        control = spand.child("control")
        os.kill(control, signal.SIGSTOP)
        try:
            for _ in range(3):
                with pytest.raises(errors.DeadlineExceeded):
                    session.acquire(key, [SHARD], timeout=0.1)
            with pytest.raises(errors.DaemonUnavailable):
                Session.connect(spand.socket_dir, role=Role.TOOL, timeout=0.2)
        finally:
            os.kill(control, signal.SIGCONT)
        spand.wait_status(lambda s: s.leases == 0)
        wait_for(lambda: session.pending == 0)
        with session.acquire(key, [SHARD]) as lease:
            assert lease.hits == 1
