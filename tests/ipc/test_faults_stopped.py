"""Each kind of process stands still for ten seconds, all at the same time, each with a daemon of
its own: what the others do meanwhile, and that everything goes on after."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from daemon_process import Daemon, environment, wait_for
from probe import get, readiness, wait_for_reasons
from rawclient import RawClient

from kmesh import Role, Session, Shard, errors
from kmesh.store import read_span
from kmesh.v1 import common_pb2

SECONDS = 10.0
KEY, PAYLOAD = b"k" * 32, os.urandom(100_000)
# As rawclient stores it.
SHARD = Shard(0, 2, 0, 1)

_ENGINE = """
import sys
from kmesh import Namespace, Role, Session, Shard
sockets, key = sys.argv[1], bytes.fromhex(sys.argv[2])
names = Namespace("tiny", "w", "float32", layers=2, kv_heads=1, head_dim=8)
engine = {"engine_id": "e1", "namespace": names}
with (
    Session.connect(sockets, role=Role.SCHEDULER, **engine) as scheduler,
    Session.connect(sockets, role=Role.WORKER, **engine) as worker,
):
    lease = scheduler.acquire(key, [Shard(0, 2, 0, 1)])
    late = [scheduler.acquire_async(key, [Shard(0, 2, 0, 1)]) for _ in range(200)]
    print(lease.hits, flush=True)
    sys.stdin.readline()
    # It stood still in between. Its sessions are those it had, and its lease holds.
    for one in late:
        one.result(30).release()
    assert not scheduler.closed and not worker.closed
    assert bytes(worker.slab(lease.slab[0]).view(lease.offset[0], lease.length[0]))[:9]
    assert worker.report_corrupt(lease, []) == 0
    lease.release()
    print("well", flush=True)
"""


@contextlib.contextmanager
def daemon(name: str, stuck_ms: int = 30_000) -> Iterator[Daemon]:
    """A daemon that is starting."""
    parent = Path(tempfile.mkdtemp(prefix=f"kmesh-{name}-"))
    made = Daemon(parent / "s", ready=False, stuck_ms=stuck_ms, copy_timeout_ms=60_000)
    try:
        yield made
        made.stop()
        made.check_log()
    finally:
        made.kill()
        shutil.rmtree(parent)


@contextlib.contextmanager
def engine(of: Daemon) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", _ENGINE, str(of.socket_dir), KEY.hex()],
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "1\n"
            yield process
        finally:
            process.kill()


def serves(of: Daemon, number: int) -> None:
    """A new client stores and reads."""
    key = number.to_bytes(32, "little")
    with RawClient(of.socket_dir) as client:
        assert client.store(key, PAYLOAD) == 0
        assert client.read(key) == client.read(KEY) == PAYLOAD


@pytest.mark.slow
def test_each_process_stands_still_for_ten_seconds() -> None:
    with contextlib.ExitStack() as stack:
        headless = stack.enter_context(daemon("supervisor"))
        deaf = stack.enter_context(daemon("control"))
        idle = stack.enter_context(daemon("worker", 2000))
        calm = stack.enter_context(daemon("client"))
        for one in (headless, deaf, idle, calm):
            one.wait_ready()
            one.wait_populated()
            with RawClient(one.socket_dir) as first:
                assert first.store(KEY, PAYLOAD) == 0
        client = stack.enter_context(engine(calm))
        # A session on the daemon whose control will stop, with a lease and a mapping.
        held = stack.enter_context(Session.connect(deaf.socket_dir, role=Role.TOOL))
        lease = held.acquire(KEY, [SHARD])
        slab = held.slab(lease.slab[0])
        # A commit on its way when the worker stops.
        writer = stack.enter_context(RawClient(idle.socket_dir))
        writer.attach_staging(1 << 20)
        (reserved,) = writer.reserve([b"w" * 32], 1000).reservation
        stopped = [headless.pid, deaf.child("control"), idle.child("worker"), client.pid]
        try:
            for pid in stopped:
                os.kill(pid, signal.SIGSTOP)
            began = time.monotonic()
            writer.send(
                deadline_ms=60_000, commit={"reservation": [reserved], "staging_offset": [0]}
            )
            rounds = 0
            while time.monotonic() < began + SECONDS or rounds < 3:
                rounds += 1
                # Without its supervisor, and beside a client that stands still: all is served.
                serves(headless, rounds)
                serves(calm, rounds)
                assert readiness(headless) == readiness(calm) == set()
                assert calm.status().leases >= 1
                # Without its worker: what is stored is served, and nothing is lost.
                with RawClient(idle.socket_dir) as reader:
                    assert reader.read(KEY) == PAYLOAD
                    assert reader.acquire([b"w" * 32]).reason[0] == common_pb2.REASON_PENDING
                # Without control: calls end at their deadlines. What is mapped is memory.
                with pytest.raises(errors.DeadlineExceeded):
                    held.ping(timeout=0.1)
                with pytest.raises(errors.DaemonUnavailable):
                    Session.connect(deaf.socket_dir, role=Role.TOOL, timeout=0.1)
                with pytest.raises(TimeoutError):
                    get(deaf.socket_dir, "/livez", timeout=0.1)
                assert held.index.probe(KEY, [SHARD.code()]).hits == 1
                assert bytes(slab.view(lease.offset[0], len(PAYLOAD))) == PAYLOAD
                time.sleep(0.5)
            wait_for_reasons(idle, "worker")
        finally:
            for pid in stopped:
                os.kill(pid, signal.SIGCONT)
        # The commit is done, by the worker that it was given to.
        assert list(writer.receive()[0].commit.reason) == [0]
        # The same session goes on; what nobody waited for was given back.
        wait_for(lambda: held.pending == 0, 30)
        assert read_span(held, lease, 0) == PAYLOAD
        lease.release()
        # The client has all its answers, and the lease that it held.
        assert client.communicate("\n", timeout=60)[0] == "well\n"
        assert client.returncode == 0
        for one in (headless, deaf, idle, calm):
            wait_for_reasons(one, seconds=30)
            serves(one, 1000)
        held.close()
        writer.close()
        for one in (headless, deaf, idle, calm):
            status = one.wait_status(lambda s: s.sessions == 1 and not s.staging_bytes, 30)
            assert (status.leases, status.reservations) == (0, 0)
            # Nobody was ended for standing still, or for what it owed.
            assert (status.control_restarts, status.worker_restarts) == (0, 0)
        # The supervisor is one again: it reaps and starts what dies.
        headless.errors = True
        worker = headless.child("worker")
        os.kill(worker, signal.SIGKILL)
        wait_for(lambda: headless.child("worker") != worker, 30)
        headless.wait_status(lambda s: s.worker_restarts == 1)
