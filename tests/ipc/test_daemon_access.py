"""Who may do what: foreign users, gRPC calls with and without a session."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
from daemon_process import Daemon, environment, wait_for
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from rawclient import DIGEST, NAMESPACE, SHARD, RawClient, engine

from kmesh.keys import Namespace
from kmesh.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    sessions_pb2,
    sessions_pb2_grpc,
    spans_pb2,
    spans_pb2_grpc,
)

Start = Callable[..., Daemon]
Metadata = tuple[tuple[str, str], ...]
_NOBODY = 65534


@pytest.fixture
def spand(shared_spand: Daemon) -> Daemon:
    return shared_spand


@pytest.fixture
def rpc(spand: Daemon) -> Iterator[tuple[grpc.Channel, Metadata]]:
    with spand.rpc() as found:
        yield found


def code_of(call: Callable[[], Message]) -> tuple[grpc.StatusCode, str, dict[str, str]]:
    with pytest.raises(grpc.RpcError) as failed:
        call()
    error = failed.value
    return error.code(), error.details(), dict(error.trailing_metadata())


_FOREIGN = """
import os, sys
from pathlib import Path
from rawclient import RawClient, Refused
os.setgroups([]); os.setresgid({uid}, {uid}, {uid}); os.setresuid({uid}, {uid}, {uid})
try:
    RawClient(Path(sys.argv[1]))
except Refused as refused:
    print(refused.code, refused.field)
except OSError as failed:
    print(failed.strerror)
else:
    print("let in")
"""


def _as_nobody(socket_dir: Path) -> str:
    script = _FOREIGN.format(uid=_NOBODY)
    paths = os.pathsep.join([str(Path(__file__).parent), environment()["PYTHONPATH"]])
    env = {**environment(), "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", script, str(socket_dir)],
        env=env,
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to become another user")
def test_foreign_users_are_refused(start_spand: Start) -> None:
    daemon = start_spand(socket_mode="0666")
    # The directory's mode keeps them out first.
    assert _as_nobody(daemon.socket_dir) == "Permission denied"
    for path in (daemon.socket_dir, daemon.socket_dir.parent):
        path.chmod(0o755)
    assert _as_nobody(daemon.socket_dir) == "3 uid"
    wait_for(lambda: daemon.status().counters["connections_refused"] == 1)


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to become another user")
def test_allowed_users_are_let_in(start_spand: Start) -> None:
    daemon = start_spand(socket_mode="0666", allow_uids=f"0,{_NOBODY}")
    for path in (daemon.socket_dir, daemon.socket_dir.parent):
        path.chmod(0o755)
    assert _as_nobody(daemon.socket_dir) == "let in"


@pytest.mark.parametrize("token", [None, "", "wrong", "wrong.wrong", "half"])
def test_without_a_session_only_health_answers(
    spand: Daemon, rpc: tuple[grpc.Channel, Metadata], token: str | None
) -> None:
    channel, good = rpc
    if token == "half":
        token = good[0][1].partition(".")[0] + ".x"
    metadata = () if token is None else (("kmesh-session", token),)
    calls: list[Callable[[], Message]] = [
        lambda: admin_pb2_grpc.AdminStub(channel).Status(
            admin_pb2.StatusRequest(), metadata=metadata
        ),
        lambda: sessions_pb2_grpc.SessionsStub(channel).List(
            sessions_pb2.ListSessionsRequest(), metadata=metadata
        ),
        lambda: spans_pb2_grpc.SpansStub(channel).Acquire(
            spans_pb2.AcquireRequest(keys=bytes(32), shards=[SHARD]), metadata=metadata
        ),
        lambda: next(
            reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(
                iter([reflection_pb2.ServerReflectionRequest(list_services="")]),
                metadata=metadata,
            )
        ),
    ]
    for call in calls:
        assert code_of(call)[0] == grpc.StatusCode.UNAUTHENTICATED
    wait_for(
        lambda: (
            health_pb2_grpc.HealthStub(channel)
            .Check(health_pb2.HealthCheckRequest(service="kmesh.v1.Spans"))
            .status
            == health_pb2.HealthCheckResponse.SERVING
        )
    )


def test_a_token_ends_with_its_session(spand: Daemon, rpc: tuple[grpc.Channel, Metadata]) -> None:
    stub = admin_pb2_grpc.AdminStub(rpc[0])
    with RawClient(spand.socket_dir) as client:
        metadata = (("kmesh-session", client.welcome.token),)
        stub.Status(admin_pb2.StatusRequest(), metadata=metadata)

    def refused() -> bool:
        try:
            stub.Status(admin_pb2.StatusRequest(), metadata=metadata)
        except grpc.RpcError as failed:
            return failed.code() == grpc.StatusCode.UNAUTHENTICATED
        return False

    wait_for(refused)


def test_a_call_ends_with_its_session(start_spand: Start) -> None:
    spand = start_spand(copy_timeout_ms=60_000)
    spand.wait_populated()
    worker = spand.child("worker")
    with (
        RawClient(spand.socket_dir) as client,
        grpc.insecure_channel(f"unix:{spand.socket_dir}/grpc.sock") as channel,
    ):
        client.attach_staging(1 << 16)
        reserved = client.reserve([bytes(32)], 100)
        os.kill(worker, signal.SIGSTOP)
        try:
            call = spans_pb2_grpc.SpansStub(channel).Commit.future(
                spans_pb2.CommitRequest(reservation=reserved.reservation, staging_offset=[0]),
                metadata=(("kmesh-session", client.welcome.token),),
            )
            wait_for(lambda: spand.status().counters["requests_commit"] == 1)
            client.close()
            assert call.exception(timeout=10).code() == grpc.StatusCode.UNAUTHENTICATED
        finally:
            os.kill(worker, signal.SIGCONT)


def test_reflection_lists_the_services(rpc: tuple[grpc.Channel, Metadata]) -> None:
    channel, metadata = rpc
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    asked = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
    answer = next(stub.ServerReflectionInfo(asked, metadata=metadata))
    names = {service.name for service in answer.list_services_response.service}
    assert {"kmesh.v1.Admin", "kmesh.v1.Sessions", "kmesh.v1.Spans"} <= names


def test_both_doors_lead_to_one_handler(spand: Daemon, rpc: tuple[grpc.Channel, Metadata]) -> None:
    channel, _ = rpc
    key = os.urandom(32)
    with RawClient(spand.socket_dir) as client:
        metadata = (("kmesh-session", client.welcome.token),)
        stub = spans_pb2_grpc.SpansStub(channel)
        staging = client.attach_staging(1 << 20)
        reserve = spans_pb2.ReserveRequest(
            namespace=DIGEST, shard=SHARD, keys=key, tokens=[64], start=[0], length=[5]
        )
        reservation = stub.Reserve(reserve, metadata=metadata).reservation
        staging[:5] = b"bytes"
        commit = spans_pb2.CommitRequest(reservation=reservation, staging_offset=[0])
        assert list(stub.Commit(commit, metadata=metadata, timeout=20).reason) == [0]
        acquire = spans_pb2.AcquireRequest(keys=key, shards=[SHARD])
        lease = stub.Acquire(acquire, metadata=metadata).lease
        assert client.read(key) == b"bytes"
        sessions = sessions_pb2_grpc.SessionsStub(channel)
        mine = sessions.Describe(sessions_pb2.DescribeSessionRequest(), metadata=metadata)
        assert mine.session_id == client.welcome.session_id
        assert (mine.uid, mine.pid, mine.client_name) == (os.getuid(), os.getpid(), "rawclient")
        assert (mine.leases, mine.leased_spans, mine.leased_bytes) == (1, 1, 5)
        assert (mine.reservations, mine.staging_bytes) == (0, 1 << 20)
        listed = sessions.List(sessions_pb2.ListSessionsRequest(), metadata=metadata)
        assert mine.session_id in {info.session_id for info in listed.sessions}
        assert client.release(lease).released == 1


def test_grpc_codes_name_the_field(spand: Daemon, rpc: tuple[grpc.Channel, Metadata]) -> None:
    channel, metadata = rpc
    spans = spans_pb2_grpc.SpansStub(channel)
    code, details, trailers = code_of(
        lambda: spans.Acquire(spans_pb2.AcquireRequest(keys=b"x"), metadata=metadata)
    )
    assert code == grpc.StatusCode.INVALID_ARGUMENT
    assert details.startswith("acquire.keys: ")
    assert trailers["kmesh-code"] == "CODE_INVALID_ARGUMENT"
    assert trailers["kmesh-field"] == "acquire.keys"
    admin = admin_pb2_grpc.AdminStub(channel)
    for request, field in (
        (admin_pb2.ListRequest(limit=10_001), "limit"),
        (admin_pb2.ListRequest(namespace=b"short"), "namespace"),
        (admin_pb2.ListRequest(page_token="x"), "page_token"),
    ):
        code, _, trailers = code_of(lambda request=request: admin.List(request, metadata=metadata))
        assert (code, trailers["kmesh-field"]) == (grpc.StatusCode.INVALID_ARGUMENT, field)
    report = spans_pb2.ReportCorruptRequest(lease=123456, entry=[0])
    assert code_of(lambda: spans.ReportCorrupt(report, metadata=metadata))[0] == (
        grpc.StatusCode.NOT_FOUND
    )


def test_list_pages_through_all_spans(start_spand: Start) -> None:
    daemon = start_spand()
    daemon.wait_populated()
    keys = {os.urandom(32) for _ in range(25)}
    digest = Namespace.from_fields(NAMESPACE).digest()
    with (
        daemon.rpc() as (channel, metadata),
        RawClient(daemon.socket_dir, **engine(sessions_pb2.ROLE_WORKER)) as client,
    ):
        admin = admin_pb2_grpc.AdminStub(channel)
        client.attach_staging(1 << 20)
        for key in keys:
            request = spans_pb2.ReserveRequest(
                namespace=digest, shard=SHARD, keys=key, tokens=[64], start=[128], length=[100]
            )
            client.commit(list(client.call(reserve=request)[0].reservation), [0])
        found: list[admin_pb2.SpanInfo] = []
        token, pages = "", 0
        while True:
            page = admin.List(admin_pb2.ListRequest(limit=10, page_token=token), metadata=metadata)
            assert bool(page.namespaces) == (pages == 0)
            if page.namespaces:
                (space,) = page.namespaces
                assert (space.digest, space.spans, space.bytes) == (digest, 25, 2500)
                assert dict(space.fields) == NAMESPACE
            found += page.spans
            pages += 1
            token = page.next_page_token
            if not token:
                break
        assert pages == 3
        assert {span.key for span in found} == keys
        assert {(s.start, s.tokens, s.length, s.state) for s in found} == {
            (128, 64, 100, "committed")
        }
        none = admin.List(admin_pb2.ListRequest(namespace=bytes(32)), metadata=metadata)
        assert not none.spans
        assert not none.namespaces


def test_metrics_page(start_spand: Start, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    disk = {"disk": tmp_path / "disk", "disk_bytes": "64MiB"}
    daemon = start_spand(metrics_listen=f"127.0.0.1:{port}", **disk)
    daemon.wait_populated()
    with RawClient(daemon.socket_dir) as client:
        client.store(b"k" * 32, b"bytes")
        client.read(b"k" * 32)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as page:
            lines = page.read().decode().splitlines()
    values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    assert float(values["kmesh_spans"]) == 1
    assert float(values["kmesh_spans_committed_total"]) == 1
    assert float(values["kmesh_spans_hits_total"]) == 1
    assert float(values["kmesh_requests_commit_total"]) == 1
    assert float(values['kmesh_slab_populated_bytes{slab="0"}']) > 32 << 19
    for line in lines:
        if line.startswith("# HELP "):
            _, _, name, text = line.split(" ", 3)
            assert text != name.removeprefix("kmesh_").removesuffix("_total"), name
    with pytest.raises(urllib.error.HTTPError, match="404") as missing:
        urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=20)
    missing.value.close()


def test_a_taken_metrics_address_is_named(start_spand: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        daemon = start_spand(metrics_listen=f"127.0.0.1:{port}", ready=False, errors=True)
        assert daemon.process.wait(20) == 1
    log = daemon.log()
    assert "metrics_listen: " in log
    assert str(port) in log
    assert "Traceback" not in log


def test_every_counter_is_explained(spand: Daemon) -> None:
    text = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    for name in spand.status().counters:
        if not name.startswith(("requests_", "refused_")):
            assert f"`{name}`" in text, name


def test_no_tcp_unless_asked_for(spand: Daemon) -> None:
    inodes = set()
    for pid in (spand.pid, spand.child("control"), spand.child("worker")):
        for name in os.listdir(f"/proc/{pid}/fd"):
            try:
                inodes.add(os.readlink(f"/proc/{pid}/fd/{name}"))
            except FileNotFoundError:
                continue
    for table in ("tcp", "tcp6", "udp", "udp6"):
        path = Path(f"/proc/net/{table}")
        for line in path.read_text().splitlines()[1:] if path.exists() else ():
            assert f"socket:[{line.split()[9]}]" not in inodes
