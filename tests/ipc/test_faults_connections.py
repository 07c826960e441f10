"""Connections that come and go, say nothing, or close one half: files and memory stay flat."""

from __future__ import annotations

import contextlib
import http.client
import os
import resource
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from daemon_process import Daemon, wait_for
from leaks import open_fds
from probe import get, wait_for_reasons
from rawclient import RawClient, Refused

from kmesh import Role, Session
from kmesh.mapping import Mapping
from kmesh.v1 import common_pb2, session_socket_pb2, sessions_pb2

Start = Callable[..., Daemon]


@contextlib.contextmanager
def idle(path: Path, count: int) -> Iterator[list[socket.socket]]:
    """Stream connections that never say anything."""
    socks: list[socket.socket] = []
    try:
        for _ in range(count):
            socks.append(socket.socket(socket.AF_UNIX))
            socks[-1].settimeout(30)
            socks[-1].connect(str(path))
        yield socks
    finally:
        for sock in socks:
            sock.close()


def test_idle_grpc_connections_leave_sessions_their_files(start_spand: Start) -> None:
    daemon = start_spand(nofile=64)
    daemon.wait_populated()
    control = daemon.child("control")
    before = open_fds(control).total()
    with idle(daemon.socket_dir / "grpc.sock", 60) as crowd, contextlib.ExitStack() as sessions:
        for _ in range(5):
            # While they still come in, a session may be told to try again.
            sessions.enter_context(wait_for(lambda: _storing(daemon), 30))
        wait_for(lambda: _lives(daemon), 30)
        # Most were hung up on; those that may stay and say nothing end in time.
        wait_for(lambda: sum(map(_hung_up, crowd)) >= 40, 30)
        sessions.close()
        wait_for(lambda: open_fds(control).total() <= before + 10, 30)
        wait_for_reasons(daemon, seconds=30)
        wait_for(lambda: all(map(_hung_up, crowd)), 30)
    # Asked over gRPC: as long as there was a crowd this might have been hung up on as well.
    status = daemon.status()
    assert status.counters["connections_refused"] >= 20
    assert status.control_restarts == 0


def _lives(daemon: Daemon) -> bool:
    """What /livez says; False if there was no file for who asks just now."""
    try:
        return get(daemon.socket_dir, "/livez")[0] == 200
    except (OSError, http.client.HTTPException):
        return False


def _storing(daemon: Daemon) -> RawClient | None:
    """A client that has stored something; None if there were no files for it just now."""
    with contextlib.ExitStack() as ending:
        try:
            client = ending.enter_context(RawClient(daemon.socket_dir))
            assert client.store(os.urandom(32), b"bytes") == 0
        except Refused as refused:
            if refused.code != common_pb2.CODE_EXHAUSTED:
                raise
            return None
        ending.pop_all()
        return client


def _hung_up(sock: socket.socket) -> bool:
    sock.setblocking(False)
    try:
        return sock.recv(1000) == b""
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True


def test_control_without_any_file_lives(start_spand: Start) -> None:
    """Files that nobody can be asked to give back: nothing fails but what needs one."""
    daemon = start_spand(errors=True)
    daemon.wait_populated()
    control = daemon.child("control")
    soft, hard = _limit(control)
    with RawClient(daemon.socket_dir) as client:
        assert client.store(b"k" * 32, b"bytes") == 0
        held = client.attach_slab(0)
        _limit(control, open_fds(control).total(), hard)
        try:
            with RawClient(daemon.socket_dir, hello=False) as other:
                # It may be told why, or wait in the backlog; it is not served.
                other.sock.settimeout(2)
                with contextlib.suppress(TimeoutError, EOFError, ConnectionResetError):
                    assert other.receive()[0].status.code == common_pb2.CODE_EXHAUSTED
            lease = client.acquire([b"k" * 32])
            assert lease.lease
            client.release(lease.lease)
        finally:
            _limit(control, soft, hard)
        assert held
    wait_for_reasons(daemon, seconds=30)
    status = daemon.status()
    assert (status.control_restarts, status.worker_restarts) == (0, 0)


def _limit(pid: int, *limits: int) -> tuple[int, int]:
    """The limit of files of a running process, set first if limits are given."""
    if limits:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (limits[0], limits[1]))
    soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    return soft, hard


@pytest.mark.parametrize("then", ["read", "vanish"])
def test_a_half_closed_client_gets_what_it_is_owed(start_spand: Start, then: str) -> None:
    daemon = start_spand(copy_timeout_ms=60_000, stuck_ms=60_000)
    daemon.wait_populated()
    worker = daemon.child("worker")
    with RawClient(daemon.socket_dir) as client:
        client.attach_staging(1 << 20)
        reserved = list(client.reserve([b"a" * 32, b"b" * 32], 1000).reservation)
        os.kill(worker, signal.SIGSTOP)
        try:
            for number in reserved:
                client.send(commit={"reservation": [number], "staging_offset": [0]})
            client.sock.shutdown(socket.SHUT_WR)
            # Another session has been served since: the daemon has seen the end of the requests.
            daemon.wait_status(lambda s: s.counters["requests_commit"] == 2)
            if then == "vanish":
                client.close()
                daemon.wait_status(lambda s: s.sessions == 1, 30)
            else:
                assert daemon.status().sessions == 2
        finally:
            os.kill(worker, signal.SIGCONT)
        if then == "read":
            for _ in reserved:
                assert list(client.receive()[0].commit.reason) == [0]
            with pytest.raises(EOFError):
                client.receive()
    status = daemon.wait_status(lambda s: s.sessions == 1 and not s.staging_bytes)
    assert status.spans == (2 if then == "read" else 0)
    assert (status.reservations, status.leases) == (0, 0)


def test_a_half_closed_client_gets_the_answers_of_its_last_turn(shared_spand: Daemon) -> None:
    """Also those that nobody usually waits for, which are sent last."""
    control = shared_spand.child("control")
    with RawClient(shared_spand.socket_dir) as client:
        # All of it is there when control looks, the end included.
        os.kill(control, signal.SIGSTOP)
        try:
            sent = {client.send(release={"leases": [99]}) for _ in range(3)}
            sent.add(client.send(ping={}))
            client.sock.shutdown(socket.SHUT_WR)
        finally:
            os.kill(control, signal.SIGCONT)
        assert {client.receive()[0].id for _ in sent} == sent
        with pytest.raises(EOFError):
            client.receive()


CYCLES = 10_000
_HELLO = session_socket_pb2.Request(
    id=1,
    hello=sessions_pb2.Hello(protocol_version=1, layout_version=1, role=sessions_pb2.ROLE_TOOL),
).SerializeToString()
_ATTACH = session_socket_pb2.Request(id=2, attach_slab={"slab": 0}).SerializeToString()


def _cycles(daemon: Daemon, count: int) -> None:
    """Connects and leaves: without a word, with Hello, and with a slab on the way."""
    path = str(daemon.socket_dir / "session.sock")
    for batch in range(count // 50):
        socks = []
        for _ in range(50):
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            sock.settimeout(30)
            sock.connect(path)
            if batch % 3:
                sock.send(_HELLO)
            if batch % 3 == 2:
                sock.send(_ATTACH)
            socks.append(sock)
        for sock in socks:
            if batch % 3:
                assert sock.recv(4096)
            sock.close()


def _anonymous(pid: int) -> int:
    """Bytes of a process's own memory: of its heap, not of spans or code."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss_Anon:"):
            return int(line.split()[1]) << 10
    raise AssertionError(pid)


def test_ten_thousand_connections_leave_files_and_memory_flat(start_spand: Start) -> None:
    daemon = start_spand(log_level="warning", watch_events=64, ready=False)
    wait_for(lambda: _answers(daemon), 30)
    pids = [daemon.pid, daemon.child("control"), daemon.child("worker")]

    def settled() -> tuple[list[int], int]:
        daemon.wait_status(lambda s: s.sessions == 1 and not s.staging_bytes)
        return [open_fds(pid).total() for pid in pids], sum(map(_anonymous, pids))

    _cycles(daemon, 1500)
    files, memory = settled()
    _cycles(daemon, CYCLES)
    wait_for(lambda: settled()[0] == files, 30, f"{files} {settled()}")
    assert settled()[1] - memory < 2 << 20
    status = daemon.status()
    assert status.counters["sessions_opened"] == status.counters["sessions_closed"] + 1
    assert status.counters["sessions_opened"] >= CYCLES * 2 // 3


def _answers(daemon: Daemon) -> bool:
    """At this level its log does not say that it is ready."""
    try:
        return bool(get(daemon.socket_dir, "/readyz")[0] == 200)
    except OSError:
        return False


def test_ten_thousand_imports_leave_files_flat(shared_spand: Daemon) -> None:
    """An import is a slab's descriptor, mapped, and both given back; ours and the daemon's."""
    control = shared_spand.child("control")
    with Session.connect(shared_spand.socket_dir, role=Role.TOOL) as session:
        session.ping()
        before, theirs = open_fds(), open_fds(control).total()
        for number in range(CYCLES):
            handle = session.export_slab(0)
            with Mapping(handle.fd, handle.size):
                os.close(handle.fd)
            if number % 1000 == 0:
                assert open_fds() == before
        assert open_fds() == before
        assert open_fds(control).total() == theirs
        assert session.pending == 0
