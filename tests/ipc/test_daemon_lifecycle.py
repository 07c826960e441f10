"""Start, stop, and what a daemon leaves behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
from daemon_process import COMMAND, Daemon, environment, wait_for
from grpc_health.v1 import health_pb2, health_pb2_grpc
from leaks import open_fds, process_tree
from probe import readiness
from rawclient import RawClient, Refused

from kmesh.v1 import common_pb2

Start = Callable[..., Daemon]


def run(*flags: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *flags], env=environment(**env), capture_output=True, text=True, timeout=30
    )


def test_start_and_stop(spand: Daemon) -> None:
    sockets = {"session.sock", "grpc.sock", "metrics.sock"}
    assert sockets | {"daemon.lock", "upgrade.sock"} == set(os.listdir(spand.socket_dir))
    assert (spand.socket_dir / "upgrade.sock").stat().st_mode & 0o777 == 0o600
    assert spand.socket_dir.stat().st_mode & 0o777 == 0o700
    for name in sockets:
        assert (spand.socket_dir / name).stat().st_mode & 0o777 == 0o660
    children = process_tree(spand.pid)
    assert len(children) == 2
    assert spand.stop() == 0
    assert os.listdir(spand.socket_dir) == ["daemon.lock"]
    assert not any(Path(f"/proc/{pid}").exists() for pid in children)
    assert not [name for name in os.listdir("/dev/shm") if "kmesh" in name]


def test_supervisor_stays_small(spand: Daemon) -> None:
    maps = Path(f"/proc/{spand.pid}/maps").read_text()
    for heavy in ("grpc", "numpy", "torch", "pydantic", "uvloop"):
        assert heavy not in maps
    assert len(os.listdir(f"/proc/{spand.pid}/task")) == 1
    pss = 0
    for pid in (spand.pid, *process_tree(spand.pid)):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            # The pages of spans are not the daemon's weight.
            if line.startswith("Pss_Anon:") or line.startswith("Pss_File:"):
                pss += int(line.split()[1])
    assert pss < 150 << 10, f"{pss >> 10} MiB"


def test_more_slabs_than_one_packet_carries(start_spand: Start) -> None:
    """Control is given the fds of all of them, at its start and when it is started again."""
    daemon = start_spand(host_memory="300MiB", slab_size="1MiB", errors=True)
    for restarts in (0, 1):
        with RawClient(daemon.socket_dir) as client:
            assert client.welcome.slab_count == 300
            daemon.wait_status(lambda s: s.slabs[299].populated == s.slabs[299].capacity)
            assert daemon.status().control_restarts == restarts
        if not restarts:
            os.kill(daemon.child("control"), signal.SIGKILL)
            daemon.wait_ready(2)
    assert daemon.stop() == 0


def test_second_daemon_is_refused(spand: Daemon) -> None:
    second = run(f"--socket-dir={spand.socket_dir}", "--host-memory=16MiB")
    assert second.returncode == 2
    assert f"another daemon serves {spand.socket_dir} (process {spand.pid})" in second.stderr
    with RawClient(spand.socket_dir):
        pass


@pytest.mark.parametrize(("policy", "kept"), [("lru", False), ("s3-fifo", True)])
def test_memory_is_made_free_in_the_order_that_was_asked_for(
    start_spand: Start, policy: str, kept: bool
) -> None:
    """What was used once pushes out what was used again, or not."""
    daemon = start_spand(host_memory="2MiB", memory_policy=policy)
    daemon.wait_populated()
    with RawClient(daemon.socket_dir) as client:
        for number in range(80):
            key = number.to_bytes(32, "little")
            assert client.store(key, key * 100) == 0
            if not number:
                assert client.read(key) == key * 100
        lease = client.acquire([bytes(32)])
        assert list(lease.reason) == [0 if kept else common_pb2.REASON_MISS]
    assert daemon.status().counters["spans_evicted"] >= 40


def test_stale_sockets_are_replaced(start_spand: Start, socket_dir: Path) -> None:
    first = start_spand()
    children = process_tree(first.pid)
    first.process.send_signal(signal.SIGKILL)
    first.process.wait()
    # Its children go with it: nobody would hold the memory they serve.
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in children))
    assert (socket_dir / "session.sock").exists()
    second = start_spand()
    assert second.status().sessions == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_end_it_cleanly(start_spand: Start, number: int) -> None:
    daemon = start_spand()
    status = daemon.stop(number)
    # As a shell expects: interrupted is told from ended.
    assert status == (0 if number == signal.SIGTERM else -signal.SIGINT)
    assert "stopped" in daemon.log()


def test_sigterm_lets_copies_finish(spand: Daemon) -> None:
    with RawClient(spand.socket_dir) as client, RawClient(spand.socket_dir) as other:
        staging = client.attach_staging(1 << 20)
        staging[:5] = b"bytes"
        first, second = client.reserve([b"a" * 32, b"b" * 32], 100_000).reservation
        os.kill(spand.child("worker"), signal.SIGSTOP)
        client.send(commit={"reservation": [first], "staging_offset": [0]})
        spand.process.send_signal(signal.SIGTERM)
        wait_for(lambda: "stopping" in spand.log())
        wait_for(lambda: "draining" in readiness(spand))
        with pytest.raises(Refused) as refused:
            other.reserve([b"c" * 32], 100_000)
        assert refused.value.code == common_pb2.CODE_DRAINING
        assert other.acquire([b"d" * 32]).reason == [1]
        with grpc.insecure_channel(f"unix:{spand.socket_dir}/grpc.sock") as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            health = stub.Check(health_pb2.HealthCheckRequest(), timeout=20)
            assert health.status == health_pb2.HealthCheckResponse.NOT_SERVING
        os.kill(spand.child("worker"), signal.SIGCONT)
        response, _ = client.receive()
        assert list(response.commit.reason) == [0]
        assert second
        with pytest.raises(EOFError):
            client.receive()
    assert spand.process.wait(60) == 0


def test_sigterm_does_not_wait_for_ever(start_spand: Start) -> None:
    daemon = start_spand(shutdown_timeout_ms=500)
    daemon.wait_populated()
    with RawClient(daemon.socket_dir) as client:
        client.attach_staging(1 << 20)
        reserved = client.reserve([b"a" * 32], 100_000).reservation
        os.kill(daemon.child("worker"), signal.SIGSTOP)
        client.send(commit={"reservation": list(reserved), "staging_offset": [0]})
        assert daemon.stop() == 0
    assert "not finished in time" in daemon.log()


def test_tells_systemd(start_spand: Start, socket_dir: Path) -> None:
    address = socket_dir.parent / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
        notify.bind(str(address))
        notify.settimeout(20)
        daemon = start_spand(env={"NOTIFY_SOCKET": str(address)})
        assert notify.recv(100) == b"READY=1"
        assert notify.recv(100).startswith(b"STATUS=")
        daemon.stop()
        said = [notify.recv(100)]
        while said[-1] != b"STOPPING=1":
            said.append(notify.recv(100))
        assert all(line == b"STATUS=ready" for line in said[:-1])


def test_more_memory_than_there_is_is_refused(socket_dir: Path) -> None:
    done = run(f"--socket-dir={socket_dir}", "--host-memory=1000TiB", "--slab-size=1000TiB")
    assert done.returncode == 2
    assert "host_memory: " in done.stderr
    assert "MemAvailable" in done.stderr or "memory" in done.stderr.partition("that ")[2]
    assert len(done.stderr.splitlines()) == 1


def test_lives_with_64_fds(start_spand: Start) -> None:
    daemon = start_spand(nofile=64, host_memory="16MiB", slab_size="4MiB")
    clients: list[RawClient] = []
    try:

        def connect_many() -> None:
            for _ in range(64):
                clients.append(RawClient(daemon.socket_dir))
                clients[-1].attach_staging(4096)

        with pytest.raises(Refused) as refused:
            connect_many()
        assert refused.value.code == common_pb2.CODE_EXHAUSTED
        assert "file descriptors" in refused.value.message
        assert len(clients) > 8
        # Those that were let in are served, with fds too.
        for client in clients:
            client.attach_slab(3)
            client.acquire([b"a" * 32])
        control = daemon.child("control")
        before = _cpu(control)
        time.sleep(0.5)
        assert _cpu(control) - before < 20, "control spins"
    finally:
        for client in clients:
            client.close()
    daemon.wait_status(lambda status: status.sessions == 1)


def _cpu(pid: int) -> int:
    """Clock ticks that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def test_no_fd_at_all_is_survived(start_spand: Start) -> None:
    """More connections at once than control has fds: the spare one refuses, nothing spins."""
    daemon = start_spand(nofile=64)
    socks = []
    try:
        for _ in range(120):
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            socks.append(sock)
            sock.settimeout(30)
            sock.connect(str(daemon.socket_dir / "session.sock"))
    finally:
        for sock in socks:
            sock.close()
    wait_for(lambda: _served(daemon))


def _served(daemon: Daemon) -> bool:
    try:
        RawClient(daemon.socket_dir).close()
    except (Refused, OSError, EOFError):
        return False
    return True


def test_too_many_slabs_for_the_fd_limit(start_spand: Start) -> None:
    daemon = start_spand(nofile=64, host_memory="64MiB", slab_size="1MiB", ready=False, errors=True)
    assert daemon.process.wait(20) == 2
    assert "slab_size: 64 slabs need" in daemon.log()


def test_fds_stay_flat(spand: Daemon) -> None:
    pids = [spand.pid, spand.child("control"), spand.child("worker")]

    def visit(count: int) -> None:
        for number in range(count):
            with RawClient(spand.socket_dir) as client:
                if number % 10 == 0:
                    client.attach_staging(4096)
                    client.attach_slab(0)
                    client.call(attach_index={})

    def settled() -> list[int]:
        spand.wait_status(lambda status: status.sessions == 1 and not status.staging_bytes)
        return [open_fds(pid).total() for pid in pids]

    visit(50)
    before = settled()
    visit(2000)
    wait_for(lambda: settled() == before, 10, f"{before} {settled()}")


def test_json_log(start_spand: Start) -> None:
    daemon = start_spand(log_format="json", log_level="debug")
    with RawClient(daemon.socket_dir) as client:
        token = client.welcome.token
    wait_for(lambda: "session closed" in daemon.log())
    daemon.stop()
    lines = [json.loads(line) for line in daemon.log().splitlines()]
    opened = next(line for line in lines if line["message"] == "session opened")
    assert (opened["session"], opened["process"], opened["level"]) == (1, "control", "info")
    assert token not in daemon.log()


#: The first control process is killed just before, or just after, it is given what it works with.
_KILL_PREPARED = """
import os, signal, sys
from kmesh_spand import launch
from kmesh_spand.__main__ import main
inner, killed = launch.Prepared.launch, []
def kill(pid):
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
def chosen(self, *arguments):
    if not killed and {before}:
        killed.append(self.pid)
        kill(self.pid)
    if not killed:
        os.kill(self.pid, signal.SIGSTOP)
    inner(self, *arguments)
    if not killed:
        killed.append(self.pid)
        kill(self.pid)
launch.Prepared.launch = chosen
sys.exit(main())
"""


def test_a_control_that_dies_before_it_is_needed_is_replaced(start_spand: Start) -> None:
    code = _KILL_PREPARED.format(before=True)
    daemon = start_spand(errors=True, command=(sys.executable, "-c", code))
    assert "control could not be started: [Errno 32] Broken pipe" in daemon.log()
    daemon.wait_populated()
    with RawClient(daemon.socket_dir) as client:
        assert client.store(b"k" * 32, b"bytes") == 0
        assert client.read(b"k" * 32) == b"bytes"
    assert daemon.stop() == 0


def test_a_first_control_that_is_killed_before_it_serves_is_replaced(start_spand: Start) -> None:
    code = _KILL_PREPARED.format(before=False)
    daemon = start_spand(errors=True, command=(sys.executable, "-c", code))
    daemon.wait_populated()
    assert daemon.status().control_restarts == 1
    assert daemon.log().count("a process died: killed by SIGKILL") == 1
    with RawClient(daemon.socket_dir) as client:
        assert client.store(b"k" * 32, b"bytes") == 0
        assert client.read(b"k" * 32) == b"bytes"
    assert daemon.stop() == 0
