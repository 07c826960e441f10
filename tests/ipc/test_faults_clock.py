"""The system clock jumps, or is another one in the client: only monotonic time decides."""

from __future__ import annotations

import ast
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
from daemon_process import ROOT, Daemon, environment, wait_for
from faulty import YEARS
from probe import Faults, wait_for_reasons
from rawclient import RawClient

from kmesh.v1 import admin_pb2, admin_pb2_grpc, common_pb2

Start = Callable[..., Daemon]

#: Where the time of day may be asked for: to be shown to people.
_SHOWN = {
    "kmesh_spand/control/journal.py": {"time_ns"},
    "kmesh_spand/logs.py": {"gmtime"},
    "client/kmesh/cli/flights.py": {"time_ns"},
    "client/kmesh/cli/top.py": {"time_ns"},
}
_WALL = {"time", "time_ns", "localtime", "gmtime", "ctime", "now", "utcnow", "today"}


def test_the_time_of_day_is_asked_for_only_to_be_shown() -> None:
    found: dict[str, set[str]] = {}
    for room in ("client/kmesh", "kmesh_spand", "vllm_connector/kmesh_vllm"):
        for file in (ROOT / room).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.Attribute) and node.attr in _WALL:
                    owner = ast.unparse(node.value)
                    if owner in ("time", "datetime", "datetime.datetime", "date"):
                        found.setdefault(str(file.relative_to(ROOT)), set()).add(node.attr)
                if isinstance(node, ast.ImportFrom) and node.module in ("time", "datetime"):
                    names = {alias.name for alias in node.names}
                    assert not names & _WALL, f"{file}: import time, so that its use is seen"
    assert found == _SHOWN
    for source in (ROOT / "client/kmesh").glob("*.[ch]"):
        assert "CLOCK_REALTIME" not in source.read_text()
        assert "gettimeofday" not in source.read_text()


def test_the_clock_jumps_while_everything_is_under_way(start_spand: Start, tmp_path: Path) -> None:
    faults = Faults(tmp_path / "faults")
    daemon = start_spand(copy_timeout_ms=60_000, stuck_ms=60_000, **faults.settings)
    daemon.wait_populated()
    worker = daemon.child("worker")
    with RawClient(daemon.socket_dir) as client, daemon.rpc() as (channel, token):
        assert client.store(b"k" * 32, b"bytes") == 0
        lease = client.acquire([b"k" * 32])
        slow, *quick = client.reserve([b"a" * 32, b"b" * 32, b"c" * 32], 1000).reservation
        admin = admin_pb2_grpc.AdminStub(channel)
        seen: list[admin_pb2.WatchEvent] = []
        stream = admin.Watch(admin_pb2.WatchRequest(), metadata=token)
        watcher = threading.Thread(target=_watch, args=(stream, seen))
        watcher.start()
        os.kill(worker, signal.SIGSTOP)
        try:
            # One may take a minute, the other has hardly any time.
            long = client.send(deadline_ms=60_000, commit=_commit(slow))
            for jump, number in zip(("forward", "back"), quick, strict=True):
                with faults.during(jump):
                    short = client.send(deadline_ms=300, commit=_commit(number))
                    answer = client.receive()[0]
                    # It ends in time, and alone.
                    assert (answer.id, answer.status.code) == (short, common_pb2.CODE_DEADLINE)
                    status = daemon.status()
                    assert (status.leases, status.spans) == (1, 1)
                    rows = admin.List(admin_pb2.ListRequest(), metadata=token).spans
                    (stored,) = [row for row in rows if row.state == "committed"]
                    assert 0 <= stored.age_ms < 3_600_000
                    # Something of now in the journal.
                    RawClient(daemon.socket_dir).close()
                    wait_for(lambda jump=jump: any(_is(event, jump) for event in seen), 30)
                    wait_for_reasons(daemon)
        finally:
            os.kill(worker, signal.SIGCONT)
        answer = client.receive()[0]
        assert (answer.id, list(answer.commit.reason)) == (long, [0])
        assert client.release(lease.lease).released == 1
        stream.cancel()
        watcher.join()
    # Told in order, without a gap, however their times of day ran.
    assert [event.sequence for event in seen] == list(range(1, len(seen) + 1))
    status = daemon.status()
    assert (status.control_restarts, status.worker_restarts) == (0, 0)


def _commit(number: int) -> dict[str, list[int]]:
    return {"reservation": [number], "staging_offset": [0]}


def _watch(stream: object, seen: list[admin_pb2.WatchEvent]) -> None:
    with contextlib.suppress(grpc.RpcError):
        for answer in stream:  # type: ignore[attr-defined]
            assert not answer.lost
            seen += answer.events


def _is(event: admin_pb2.WatchEvent, jump: str) -> bool:
    """Whether an event bears a time of day as far off as the jump."""
    off = event.time_ms / 1000 - time.time()
    return off > YEARS / 2 if jump == "forward" else off < -YEARS / 2


_ELSEWHEN = """
import os, sys, time
from kmesh import Role, Session, Shard, errors
from kmesh.session import ReserveBatch
from kmesh.store import put_spans, read_span
far = abs(time.monotonic() - float(sys.argv[2])) > 1000
assert far, (time.monotonic(), sys.argv[2])
shard, key = Shard(0, 2, 0, 2), os.urandom(32)
with Session.connect(sys.argv[1], role=Role.TOOL) as session:
    staging = session.staging(4096)
    batch = ReserveBatch(b"n" * 32, shard, key, [64], [0], [1000])
    assert put_spans(session, staging, batch, [b"x" * 1000]) == [0]
    with session.acquire(key, [shard], timeout=30) as lease:
        assert read_span(session, lease, 0) == b"x" * 1000
    print("ready", flush=True)
    sys.stdin.readline()
    # The worker stands still: the daemon ends this call when we would.
    held = session.reserve(ReserveBatch(b"n" * 32, shard, os.urandom(32), [64], [0], [1000]))
    try:
        session.commit(held.reservation, [0], timeout=0.3)
    except errors.DeadlineExceeded:
        print("late", flush=True)
"""


def _offsets() -> list[int]:
    """Ten days ahead, and as far back as a clock that began at boot can be set."""
    return [864_000, -int(time.monotonic() / 2)]


def _refusal() -> str:
    """Why there is no time namespace here, or nothing."""
    done = subprocess.run(
        ["unshare", "--time", "--monotonic", "1000", "true"], capture_output=True, text=True
    )
    return done.stderr.strip()


_REFUSED = _refusal()


@pytest.mark.skipif(bool(_REFUSED), reason=f"unshare --time: {_REFUSED}")
@pytest.mark.skipif(time.monotonic() < 4000, reason="the machine has just been started")
def test_a_client_whose_clock_is_another_one(start_spand: Start) -> None:
    """As in a container with a clock of its own, or one that was moved from another machine."""
    daemon = start_spand(copy_timeout_ms=60_000, stuck_ms=60_000)
    daemon.wait_populated()
    worker = daemon.child("worker")
    clients = [
        subprocess.Popen(
            [
                *("unshare", "--time", f"--monotonic={offset}", "--fork", "--kill-child"),
                *(sys.executable, "-c", _ELSEWHEN),
                *(str(daemon.socket_dir), str(time.monotonic())),
            ],
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for offset in _offsets()
    ]
    try:
        for client in clients:
            assert client.stdout is not None
            assert client.stdout.readline() == "ready\n"
        os.kill(worker, signal.SIGSTOP)
        try:
            for client in clients:
                assert client.communicate("\n", timeout=30)[0] == "late\n"
        finally:
            os.kill(worker, signal.SIGCONT)
    finally:
        for client in clients:
            client.kill()
            client.wait()
            for pipe in (client.stdin, client.stdout):
                assert pipe is not None
                pipe.close()
    status = daemon.wait_status(lambda s: s.sessions == 1 and not s.staging_bytes, 30)
    assert (status.spans, status.reservations, status.leases) == (2, 0, 0)
