"""Hostile clients against a real daemon, on both of its sockets."""

from __future__ import annotations

import contextlib
import os
import select
import socket
from collections import Counter, deque
from collections.abc import Callable, Iterator

import grpc
import pytest
from daemon_process import Daemon
from hostile import Hostile, attack
from leaks import open_fds
from probe import wait_for_reasons
from rawclient import RawClient

from kmesh.v1 import admin_pb2, spans_pb2

SESSION_CASES, RPC_CASES, WIRE_CASES = 5_000, 4_800, 200


@pytest.fixture
def calm(start_spand: Callable[..., Daemon]) -> Iterator[Daemon]:
    """A daemon that serves after the test, holds nothing of it, and has logged no error."""
    daemon = start_spand(
        host_memory="4MiB", slab_size="1MiB", staging_memory="2MiB", max_spans=256, watch_events=64
    )
    daemon.wait_populated()
    pids = [daemon.pid, daemon.child("control"), daemon.child("worker")]
    with RawClient(daemon.socket_dir) as client:
        assert client.store(b"k" * 32, b"bytes") == 0
    daemon.wait_status(lambda s: s.sessions == 1 and not s.staging_bytes)
    before = [open_fds(pid).total() for pid in pids]
    yield daemon
    status = daemon.wait_status(lambda s: s.sessions == 1 and not s.staging_bytes, 30)
    assert (status.leases, status.reservations) == (0, 0)
    assert (status.control_restarts, status.worker_restarts) == (0, 0)
    assert status.counters["refused_internal"] == 0
    daemon.wait_status(lambda _: [open_fds(pid).total() for pid in pids] == before, 30)
    with RawClient(daemon.socket_dir) as client:
        key = os.urandom(32)
        assert client.store(key, b"more bytes") == 0
        assert client.read(key) == b"more bytes"
    wait_for_reasons(daemon, seconds=30)


def test_hostile_packets_on_the_session_socket(calm: Daemon, run_seed: int) -> None:
    hostile = Hostile(run_seed)
    clients: list[RawClient] = []

    def wait() -> None:
        select.select([client.sock for client in clients], [], [], 1.0)

    sent = 0
    with contextlib.ExitStack() as stack:
        while sent < SESSION_CASES:
            if len(clients) < 4:
                clients.append(stack.enter_context(RawClient(calm.socket_dir)))
                with contextlib.suppress(Exception):
                    clients[-1].attach_staging(262_144)
                clients[-1].sock.setblocking(False)
            client = hostile.rng.choice(clients)
            count, alive = attack(client.sock, hostile, wait)
            sent += count
            if not alive or hostile.rng.random() < 0.05:
                clients.remove(client)
                client.close()
    counters = calm.status().counters
    assert counters["protocol_errors"] > 20
    assert counters["spans_committed"] > 20
    assert counters["spans_hits"] > 20
    assert counters["flight_leads"] > 20
    # About seventeen, fewer where waits of a millisecond or two have ended before they are joined.
    assert counters["flight_joins"] > 0


_UNARY = (
    *(f"Spans/{name}" for name in ("Acquire", "Release", "Reserve", "Commit", "Abort")),
    "Spans/ReportCorrupt",
    "Sessions/List",
    "Sessions/Describe",
    "Admin/Status",
    "Admin/List",
    "Admin/Explain",
    "Admin/Evict",
    "Flights/List",
)
_NAMES = {
    "acquire": "Spans/Acquire",
    "release": "Spans/Release",
    "reserve": "Spans/Reserve",
    "commit": "Spans/Commit",
    "abort": "Spans/Abort",
    "report_corrupt": "Spans/ReportCorrupt",
}
#: What a caller must never be told: it says that the daemon did not know what to do.
_BUGS = {grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN}


def test_hostile_calls_on_the_grpc_socket(calm: Daemon, run_seed: int) -> None:
    hostile = Hostile(run_seed)
    rng, codes = hostile.rng, Counter[str]()
    waiting: deque[tuple[str, grpc.Future]] = deque()
    sent: list[tuple[str, bytes]] = [("Admin/Explain", _explain())]

    def settle(down_to: int) -> None:
        while len(waiting) > down_to:
            name, call = waiting.popleft()
            failed = call.exception(timeout=30)
            if failed is None:
                codes["OK"] += 1
                continue
            assert failed.code() not in _BUGS, (name, failed)
            assert failed.details(), name
            codes[failed.code().name] += 1

    with (
        RawClient(calm.socket_dir) as client,
        grpc.insecure_channel(f"unix:{calm.socket_dir}/grpc.sock") as channel,
    ):
        client.attach_staging(1 << 20)
        gone = RawClient(calm.socket_dir)
        gone.close()
        tokens = [client.welcome.token] * 20 + [gone.welcome.token, "", "x" * 3000]
        methods = {
            name: channel.unary_unary(f"/kmesh.v1.{name}") for name in (*_UNARY, "Admin/Nothing")
        }
        for number in range(RPC_CASES):
            name, body = _call(hostile)
            dice = rng.random()
            if dice < 0.15:
                name, body = rng.choice(sent)
            elif dice < 0.45:
                body = hostile.spoil(body, rng.choice(("cut", "flipped", "longer")))
            elif dice < 0.5:
                body = rng.randbytes(rng.randint(0, 300))
            elif dice < 0.505:
                body = rng.randbytes((1 << 20) + 1)
            if dice > 0.92:
                # To a method that is meant for other messages.
                name = rng.choice(list(methods))
            metadata = (("kmesh-session", rng.choice(tokens)),)
            waiting.append((name, methods[name].future(body, metadata=metadata, timeout=60)))
            if len(body) < 4096 and len(sent) < 300:
                sent.append((name, body))
            settle(48)
            if number % 16 == 0:
                # What exists, so that numbers are guessed right.
                _learn(client, hostile)
        settle(0)
        token = (("kmesh-session", client.welcome.token),)
        reflection = "grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
        for answers in (
            channel.unary_stream("/kmesh.v1.Admin/Watch")(b"\xff\xff", metadata=token),
            channel.unary_stream("/kmesh.v1.Admin/Drain")(b"\xff\xff", metadata=token),
            channel.unary_stream("/grpc.health.v1.Health/Watch")(b"\xff\xff"),
            channel.unary_stream("/grpc.health.v1.Health/Check")(b"\xff\xff"),
            channel.stream_stream(f"/{reflection}")(iter([b"\xff\xff"]), metadata=token),
        ):
            with pytest.raises(grpc.RpcError) as refused:
                next(answers)
            assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    least = {
        "OK": 500,
        "INVALID_ARGUMENT": 200,
        "UNAUTHENTICATED": 100,
        "RESOURCE_EXHAUSTED": 3,
        "UNIMPLEMENTED": 3,
    }
    for code, count in least.items():
        assert codes[code] > count, codes


def _explain() -> bytes:
    return admin_pb2.ExplainRequest(keys=bytes(64)).SerializeToString()


def _call(hostile: Hostile) -> tuple[str, bytes]:
    """A method of gRPC and a message for it."""
    if hostile.rng.random() < 0.25:
        name = hostile.rng.choice(_UNARY[6:])
        body = _explain() if name == "Admin/Explain" else b""
        return name, body if name != "Admin/Evict" else b"\x20\x01"
    while True:
        kind, body = hostile.body()
        if kind in _NAMES:
            return _NAMES[kind], body.SerializeToString()


def _learn(client: RawClient, hostile: Hostile) -> None:
    request = spans_pb2.ReserveRequest.FromString(
        next(body for name, body in iter(lambda: _call(hostile), None) if name == "Spans/Reserve")
    )
    client.send(reserve=request)
    hostile.learn(client.receive()[0])
    client.send(acquire=spans_pb2.AcquireRequest(keys=b"k" * 32, shards=[request.shard]))
    hostile.learn(client.receive()[0])


def test_bytes_that_are_no_grpc(calm: Daemon, run_seed: int) -> None:
    hostile = Hostile(run_seed)
    rng = hostile.rng
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4" + bytes(5)
    forged = b"\n1970-01-01 forged by a client\n"
    goaway = (8 + len(forged)).to_bytes(3, "big") + b"\7" + bytes(5) + bytes(7) + b"\2" + forged
    for number in range(WIRE_CASES):
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(30)
            sock.connect(str(calm.socket_dir / "grpc.sock"))
            content = rng.randbytes(rng.randint(0, 2000))
            if number % 2:
                # A frame that says how long it is, of a kind that may exist.
                head = rng.randint(0, 1 << rng.randint(1, 24)).to_bytes(4, "big")[1:]
                frame = head + bytes([rng.randint(0, 11)]) + rng.randbytes(5)
                content = preface + (goaway if number % 4 == 1 else frame) + content
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                sock.sendall(content)
                if number % 8 == 0:
                    sock.recv(100)
    assert calm.status().sessions == 1
    assert b"forged" not in calm.log_path.read_bytes()
