"""``/livez`` and ``/readyz`` turn red when the data path is stuck, and green again after."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from daemon_process import Daemon, environment, wait_for
from grpc_health.v1 import health_pb2, health_pb2_grpc
from probe import Faults, get, readiness, samples, wait_for_reasons
from rawclient import RawClient, Refused

from kmesh.v1 import common_pb2

Start = Callable[..., Daemon]
#: Parts of tests that run at the same time, and their outcomes.
Slow = dict[Callable[[], None], Future[None]]
KEY = b"k" * 32


@pytest.fixture
def faults(tmp_path: Path) -> Faults:
    return Faults(tmp_path / "faults")


def serving(daemon: Daemon) -> bool:
    """What gRPC's health service says."""
    with grpc.insecure_channel(f"unix:{daemon.socket_dir}/grpc.sock") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=20)
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def cli(daemon: Daemon, command: str) -> tuple[int, dict[str, object]]:
    done = subprocess.run(
        [sys.executable, "-m", "kmesh.cli", "--socket-dir", daemon.socket_dir, command, "--json"],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.returncode, json.loads(done.stdout)


def test_a_daemon_that_works_is_live_and_ready(spand: Daemon) -> None:
    wait_for_reasons(spand)
    status, text = get(spand.socket_dir, "/livez")
    assert (status, json.loads(text)["live"]) == (200, True)
    assert get(spand.socket_dir, "/nothing")[0] == 404
    assert serving(spand)


def test_only_get_is_answered_and_others_end(spand: Daemon) -> None:
    path = str(spand.socket_dir / "metrics.sock")
    for sent, start in (
        (b"POST /readyz HTTP/1.1\r\n\r\n", b"HTTP/1.1 405"),
        (b"\r\n\r\n", b"HTTP/1.1 405"),
        (b"x" * 20_000, b""),
        (b"GET", b""),
    ):
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(20)
            sock.connect(path)
            sock.sendall(sent)
            sock.shutdown(socket.SHUT_WR)
            try:
                assert sock.recv(100).startswith(start)
            except ConnectionResetError:
                assert not start
    assert get(spand.socket_dir, "/livez")[0] == 200


def test_a_crowd_that_says_nothing_takes_few_files(spand: Daemon) -> None:
    before = samples(spand)['kmesh_process_open_files{process="control"}']
    crowd = [socket.socket(socket.AF_UNIX) for _ in range(40)]
    try:
        for sock in crowd:
            sock.settimeout(20)
            sock.connect(str(spand.socket_dir / "metrics.sock"))
        # All but a few are hung up on.
        assert all(sock.recv(1) == b"" for sock in crowd[8:])
        now = len(os.listdir(f"/proc/{spand.child('control')}/fd"))
        assert now <= before + 10
    finally:
        for sock in crowd:
            sock.close()
    wait_for(lambda: _reasons_or_none(spand) == set())


@pytest.mark.skipif(os.geteuid() != 0, reason="needs another uid")
def test_another_uid_may_probe_but_not_read_metrics(start_spand: Start) -> None:
    daemon = start_spand(socket_mode="0666")
    daemon.socket_dir.chmod(0o755)
    daemon.socket_dir.parent.chmod(0o755)
    code = """
import os, sys
sys.path.insert(0, sys.argv[1])
import probe, pathlib
os.setgid(65534); os.setuid(65534)
for path in ("/metrics", "/readyz", "/livez"):
    print(probe.get(pathlib.Path(sys.argv[2]), path)[0])
"""
    here = Path(__file__).parent
    paths = os.pathsep.join([environment()["PYTHONPATH"], str(here), str(here.parent)])
    done = subprocess.run(
        [sys.executable, "-c", code, str(here), str(daemon.socket_dir)],
        env={**environment(), "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.split() == ["403", "200", "200"], done.stderr


def test_a_stopped_worker(start_spand: Start) -> None:
    daemon = start_spand(stuck_ms=400)
    daemon.wait_populated()
    wait_for_reasons(daemon)
    worker = daemon.child("worker")
    os.kill(worker, signal.SIGSTOP)
    try:
        # Nobody asks anything of it: only its heart is heard no more.
        wait_for_reasons(daemon, "worker")
        wait_for(lambda: not serving(daemon))
        assert get(daemon.socket_dir, "/livez")[0] == 200
        code, found = cli(daemon, "status")
        assert code == 0
        assert found["not_ready"][0]["name"] == "worker"  # type: ignore[index]
    finally:
        os.kill(worker, signal.SIGCONT)
    wait_for_reasons(daemon)
    wait_for(lambda: serving(daemon))
    assert daemon.status().worker_restarts == 0
    assert "not ready, the store worker has not answered for" in daemon.log()


@contextmanager
def running(**settings: Any) -> Iterator[tuple[Daemon, Faults]]:
    """A daemon with a directory of its own."""
    with tempfile.TemporaryDirectory(prefix="kmesh-") as base:
        faults = Faults(Path(base) / "faults")
        daemon = Daemon(Path(base) / "s", **{**faults.settings, **settings})
        try:
            daemon.wait_populated()
            yield daemon, faults
            daemon.stop()
        finally:
            daemon.kill()
        daemon.check_log()


def a_stopped_worker_with_a_copy() -> None:
    with (
        running(stuck_ms=400, copy_timeout_ms=6000) as (daemon, _),
        RawClient(daemon.socket_dir) as client,
    ):
        client.attach_staging(1 << 20)
        reserved = list(client.reserve([KEY], 1000).reservation)
        worker = daemon.child("worker")
        os.kill(worker, signal.SIGSTOP)
        client.send(commit={"reservation": reserved, "staging_offset": [0]})
        wait_for_reasons(daemon, "worker")
        assert samples(daemon)["kmesh_worker_owed_seconds"] >= 0.3
        # It is given up, another takes its place, and the daemon is ready again.
        response, _ = client.receive()
        assert list(response.commit.reason) == [common_pb2.REASON_COPY_FAILED]
        wait_for_reasons(daemon)
        assert daemon.status().worker_restarts == 1
        assert client.store(KEY, b"bytes") == 0


#: A daemon that bears a silent worker for a shorter time.
_IMPATIENT = """
import sys
from kmesh_spand.__main__ import main
from kmesh_spand.control import storeworker
storeworker._SILENT_SECONDS = 5.0
sys.exit(main())
"""


def a_worker_that_stays_silent() -> None:
    command = (sys.executable, "-c", _IMPATIENT)
    with running(copy_timeout_ms=200, stuck_ms=400, command=command) as (daemon, _):
        wait_for(lambda: samples(daemon)["kmesh_worker_silent_seconds"] == 0)
        os.kill(daemon.child("worker"), signal.SIGSTOP)
        wait_for_reasons(daemon, "worker")
        wait_for(lambda: daemon.status().worker_restarts == 1, 40)
        wait_for_reasons(daemon)
        assert "no heartbeat for 5.0 s" in daemon.log()


def a_control_loop_that_hangs() -> None:
    with running() as (daemon, faults):
        with faults.during("loop"):
            wait_for(lambda: get(daemon.socket_dir, "/livez")[0] == 503)
            assert "loop" in readiness(daemon)
        wait_for(lambda: get(daemon.socket_dir, "/livez")[0] == 200)
        wait_for_reasons(daemon)


@pytest.fixture(scope="module")
def slow() -> Slow:
    """What is noticed only after seconds, all at the same time."""
    parts = (a_stopped_worker_with_a_copy, a_worker_that_stays_silent, a_control_loop_that_hangs)
    with ThreadPoolExecutor(len(parts)) as threads:
        return {part: threads.submit(part) for part in parts}


def test_a_stopped_worker_with_a_copy(slow: Slow) -> None:
    slow[a_stopped_worker_with_a_copy].result()


def test_a_worker_that_stays_silent_is_replaced(slow: Slow) -> None:
    slow[a_worker_that_stays_silent].result()


def test_a_control_loop_that_hangs(slow: Slow) -> None:
    slow[a_control_loop_that_hangs].result()


def test_a_killed_worker(start_spand: Start) -> None:
    daemon = start_spand(errors=True)
    seen: list[set[str]] = []
    stop = threading.Event()

    def look() -> None:
        while not stop.is_set():
            seen.append(readiness(daemon))

    watcher = threading.Thread(target=look)
    wait_for_reasons(daemon)
    watcher.start()
    try:
        # Each death but the first is followed by a wait.
        for _ in range(3):
            os.kill(daemon.child("worker"), signal.SIGKILL)
    finally:
        wait_for(lambda: {"worker"} in seen)
        stop.set()
        watcher.join()
    wait_for_reasons(daemon)


def test_a_policy_that_throws(start_spand: Start, faults: Faults) -> None:
    daemon = start_spand(host_memory="2MiB", **faults.settings)
    daemon.wait_populated()
    with RawClient(daemon.socket_dir) as client:
        keys = iter(range(1000))

        def store() -> None:
            # Evicting goes on without the policy, so nobody is refused.
            assert client.store(next(keys).to_bytes(32, "little"), b"x" * 200_000) == 0

        for _ in range(12):
            store()
        assert readiness(daemon) == set()
        with faults.during("policy"):
            for _ in range(5):
                store()
            wait_for_reasons(daemon, "evictor")
            wait_for(lambda: not serving(daemon))
        store()
        wait_for_reasons(daemon)
        wait_for(lambda: serving(daemon))
    assert daemon.status().counters["spans_policy_faults"] >= 3


def test_a_pool_that_finds_no_room_although_spans_may_go(spand: Daemon) -> None:
    size = 1 << 20
    with RawClient(spand.socket_dir) as client:
        keys = [os.urandom(32) for _ in range(31)]
        for key in keys:
            assert client.store(key, os.urandom(size)) == 0
        # Every second span is leased: all that may go lies between those.
        leases = [client.acquire([key]).lease for key in keys[::2]]
        for _ in range(4):
            reserved = client.reserve([os.urandom(32)], 3 * size)
            assert list(reserved.reason) == [common_pb2.REASON_POOL_FULL]
        wait_for_reasons(spand, "pool")
        for lease in leases:
            client.release(lease)
        assert list(client.reserve([os.urandom(32)], 3 * size).reason) == [0]
        wait_for_reasons(spand)


def test_no_memory(start_spand: Start, faults: Faults) -> None:
    faults.begin("populate")
    daemon = start_spand(host_memory="8MiB", slab_size="4MiB", **faults.settings)
    wait_for_reasons(daemon, "memory")
    code, found = cli(daemon, "doctor")
    assert code == 1
    health = [c for c in found["checks"] if c["name"] == "health"]  # type: ignore[attr-defined]
    assert "Cannot allocate memory" in health[0]["seen"]
    faults.end("populate")
    # It is asked for again.
    wait_for_reasons(daemon)
    daemon.wait_populated()
    with RawClient(daemon.socket_dir) as client:
        assert client.store(KEY, b"bytes") == 0
    assert daemon.log().count("a slab stays smaller") == 2


def test_no_file_descriptors(start_spand: Start) -> None:
    daemon = start_spand(nofile=64)
    daemon.wait_populated()
    crowd: list[RawClient] = []
    try:
        seen = 0
        while len(crowd) < 64:
            try:
                crowd.append(RawClient(daemon.socket_dir))
            except Refused as refused:
                seen = refused.code
                break
        assert seen == common_pb2.CODE_EXHAUSTED
        wait_for_reasons(daemon, "files")
    finally:
        for client in crowd:
            client.close()
    wait_for_reasons(daemon)


def test_a_stopped_control_is_not_live(spand: Daemon) -> None:
    control = spand.child("control")
    os.kill(control, signal.SIGSTOP)
    try:
        for path in ("/livez", "/readyz"):
            with pytest.raises(TimeoutError):
                get(spand.socket_dir, path, timeout=0.5)
    finally:
        os.kill(control, signal.SIGCONT)
    assert get(spand.socket_dir, "/livez")[0] == 200
    wait_for_reasons(spand)


def test_a_control_loop_that_fails_is_started_again(start_spand: Start, faults: Faults) -> None:
    daemon = start_spand(bugs=True, **faults.settings)
    before = daemon.child("control")
    with faults.during("turn"):
        wait_for(lambda: not Path(f"/proc/{before}").exists())
    wait_for(lambda: daemon.log().count("info supervisor: ready") > 1)
    assert daemon.status().control_restarts >= 1
    wait_for_reasons(daemon)


def test_not_yet_serving(start_spand: Start, faults: Faults) -> None:
    with faults.during("starting"):
        daemon = start_spand(ready=False, **faults.settings)
        wait_for(lambda: (daemon.socket_dir / "metrics.sock").exists())
        wait_for(lambda: "starting" in (_reasons_or_none(daemon) or ()))
    daemon.wait_ready()
    wait_for_reasons(daemon)


def _reasons_or_none(daemon: Daemon) -> set[str] | None:
    """None while nobody answers."""
    try:
        return readiness(daemon)
    except OSError:
        return None


def test_draining(spand: Daemon) -> None:
    with RawClient(spand.socket_dir) as client:
        client.attach_staging(1 << 20)
        reserved = list(client.reserve([KEY], 1000).reservation)
        worker = spand.child("worker")
        os.kill(worker, signal.SIGSTOP)
        client.send(commit={"reservation": reserved, "staging_offset": [0]})
        wait_for(lambda: samples(spand)["kmesh_worker_copies"] == 1)
        spand.process.send_signal(signal.SIGTERM)
        wait_for_reasons(spand, "draining")
        assert get(spand.socket_dir, "/livez")[0] == 200
        os.kill(worker, signal.SIGCONT)
        assert spand.process.wait(20) == 0
    assert not (spand.socket_dir / "metrics.sock").exists()


def test_control_killed(start_spand: Start) -> None:
    daemon = start_spand(errors=True, grace_ms=200)
    os.kill(daemon.child("control"), signal.SIGKILL)
    daemon.wait_ready(2)
    wait_for_reasons(daemon)
