"""What the session socket answers, to good and to bad clients."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import resource
import signal
import socket
import struct
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from daemon_process import Daemon, wait_for
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rawclient import DIGEST, NAMESPACE, SHARD, RawClient, Refused, engine

from kmesh import index, layout
from kmesh.mapping import Mapping
from kmesh.v1 import common_pb2, session_socket_pb2, sessions_pb2, spans_pb2

Start = Callable[..., Daemon]
CODE = common_pb2.Code


@pytest.fixture
def spand(shared_spand: Daemon) -> Daemon:
    """The same daemon for all tests here: none may leave anything in it but spans."""
    return shared_spand


@pytest.fixture(scope="module", autouse=True)
def silent() -> Iterator[tuple[RawClient, RawClient]]:
    """A connection without a Hello, and a session, that say nothing while all tests here run."""
    with tempfile.TemporaryDirectory(prefix="kmesh-") as base:
        daemon = Daemon(Path(base) / "s")
        try:
            where = daemon.socket_dir
            with RawClient(where) as idle, RawClient(where, hello=False) as stranger:
                yield stranger, idle
            daemon.stop()
            daemon.check_log()
        finally:
            daemon.kill()


def refusal(call: Callable[[], object]) -> Refused:
    with pytest.raises(Refused) as refused:
        call()
    return refused.value


def test_hello(spand: Daemon) -> None:
    with RawClient(spand.socket_dir) as client:
        welcome = client.welcome
        assert welcome.session_id
        assert len(welcome.token) > 40
        assert (welcome.max_message_bytes, welcome.max_batch) == (128 * 1024, 1024)
        assert (welcome.span_tokens, welcome.sub_tokens) == (64, 16)
        assert (welcome.tile_bytes, welcome.slab_count) == (65536, 1)
        assert list(welcome.handle_kinds) == [common_pb2.HANDLE_KIND_MEMFD]
        assert client.epoch == spand.status().epoch != 0
        again = refusal(client.hello)
        assert (again.code, again.field) == (CODE.CODE_INVALID_ARGUMENT, "hello")


@pytest.mark.parametrize(
    ("fields", "code", "field"),
    [
        ({"protocol_version": 2}, CODE.CODE_VERSION_MISMATCH, "hello.protocol_version"),
        ({"layout_version": 9}, CODE.CODE_VERSION_MISMATCH, "hello.layout_version"),
        ({"role": 0}, CODE.CODE_INVALID_ARGUMENT, "hello.role"),
        ({"role": 17}, CODE.CODE_INVALID_ARGUMENT, "hello.role"),
        ({"client_name": "x" * 300}, CODE.CODE_INVALID_ARGUMENT, "hello.client_name"),
        (
            {"role": sessions_pb2.ROLE_WORKER, "namespace": NAMESPACE},
            CODE.CODE_INVALID_ARGUMENT,
            "hello.engine_id",
        ),
        (
            {"role": sessions_pb2.ROLE_WORKER, "engine_id": "e"},
            CODE.CODE_INVALID_ARGUMENT,
            "hello.namespace.model",
        ),
        (engine(1, layers="two"), CODE.CODE_INVALID_ARGUMENT, "hello.namespace.layers"),
        (engine(1, colour="red"), CODE.CODE_INVALID_ARGUMENT, "hello.namespace.colour"),
    ],
)
def test_hello_is_refused_by_field(
    spand: Daemon, fields: dict[str, object], code: int, field: str
) -> None:
    with RawClient(spand.socket_dir, hello=False) as client:
        refused = refusal(lambda: client.hello(**fields))
        assert (refused.code, refused.field) == (code, field)
        with pytest.raises(EOFError):
            client.receive()
    wait_for(lambda: spand.status().sessions == 1)


def test_sessions_of_an_engine_agree_on_the_namespace(spand: Daemon) -> None:
    scheduler, worker = sessions_pb2.ROLE_SCHEDULER, sessions_pb2.ROLE_WORKER
    with RawClient(spand.socket_dir, **engine(scheduler)):
        with RawClient(spand.socket_dir, **engine(worker)):
            pass
        # A tool that says nothing of the namespace ends nothing of the engine when it goes.
        RawClient(spand.socket_dir, engine_id="e1").close()
        wait_for(lambda: spand.status().sessions == 2)
        other = refusal(lambda: RawClient(spand.socket_dir, **engine(worker, dtype="float16")))
        assert other.code == CODE.CODE_NAMESPACE_MISMATCH
        assert other.field == "hello.namespace.dtype"
        # Another engine may differ.
        RawClient(spand.socket_dir, **engine(worker, "e2", dtype="float16")).close()
    # So may the same id once the engine is gone.
    wait_for(lambda: spand.status().sessions == 1)
    RawClient(spand.socket_dir, **engine(worker, dtype="float16")).close()


def test_hello_comes_first(spand: Daemon) -> None:
    with RawClient(spand.socket_dir, hello=False) as client:
        refused = refusal(lambda: client.call(ping={}))
        assert (refused.code, refused.field) == (CODE.CODE_UNAUTHENTICATED, "ping")
        with pytest.raises(EOFError):
            client.receive()


def test_slabs_can_only_be_read(spand: Daemon) -> None:
    with RawClient(spand.socket_dir) as client:
        handle, fd = client.attach_slab(0)
        assert handle.kind == common_pb2.HANDLE_KIND_MEMFD
        assert (handle.size, handle.sums_offset) == (32 << 20, layout.sums_offset(32 << 20))
        assert fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        assert seals == fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        assert os.fstat(fd).st_mode & 0o777 == 0o400
        with pytest.raises(PermissionError):
            mmap.mmap(fd, handle.size)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.pwrite(fd, b"x", 0)
        with pytest.raises(OSError, match=r"not permitted|Invalid"):
            os.ftruncate(fd, 0)
        mmap.mmap(fd, handle.size, prot=mmap.PROT_READ).close()
        unknown = refusal(lambda: client.attach_slab(7))
        assert (unknown.code, unknown.field) == (CODE.CODE_NOT_FOUND, "attach_slab.slab")


def test_index_shows_what_is_stored(spand: Daemon) -> None:
    key = os.urandom(32)
    with RawClient(spand.socket_dir) as client:
        handle, fds = client.call(attach_index={})
        assert fcntl.fcntl(fds[0], fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
        with Mapping(fds[0], handle.size) as mapping:
            reader = index.IndexReader(mapping)
            assert (reader.epoch, reader.slab_count) == (client.epoch, 1)
            codes = [layout.Shard(0, 2, 0, 1).code()]
            assert reader.probe(key, codes).hits == 0
            before = reader.version
            assert client.store(key, b"payload") == 0
            assert reader.version > before
            assert reader.probe(key, codes).hits == 1


def test_stored_bytes_come_back(spand: Daemon) -> None:
    before = spand.status()
    payloads = {os.urandom(32): os.urandom(size) for size in (1, 4096, 65536, 65537, 300_000)}
    with RawClient(spand.socket_dir) as writer, RawClient(spand.socket_dir) as reader:
        for key, payload in payloads.items():
            assert writer.store(key, payload) == 0
            assert writer.store(key, payload) == common_pb2.REASON_EXISTS
        for key, payload in payloads.items():
            assert reader.read(key) == payload
        assert reader.read(bytes(32)) == common_pb2.REASON_MISS
    status = spand.status()
    assert status.spans - before.spans == len(payloads)
    assert status.span_bytes - before.span_bytes == sum(map(len, payloads.values()))
    assert status.index_entries - before.index_entries == len(payloads)


def test_staging_has_limits(start_spand: Start) -> None:
    daemon = start_spand(staging_memory="4MiB", session_staging="3MiB")
    with RawClient(daemon.socket_dir) as one, RawClient(daemon.socket_dir) as two:

        def attach(client: RawClient, size: int) -> Refused:
            refused = refusal(lambda: client.attach_staging(size))
            assert refused.field == "attach_staging.size"
            return refused

        assert attach(one, 0).code == CODE.CODE_INVALID_ARGUMENT
        assert attach(one, 5000).code == CODE.CODE_INVALID_ARGUMENT
        assert attach(one, 4 << 20).code == CODE.CODE_TOO_LARGE
        one.attach_staging(3 << 20)
        assert attach(one, 4096).code == CODE.CODE_INVALID_ARGUMENT
        assert attach(two, 2 << 20).code == CODE.CODE_EXHAUSTED
        seals = fcntl.fcntl(one.fds[0], fcntl.F_GET_SEALS)
        assert seals == fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        one.close()
        wait_for(lambda: daemon.status().staging_bytes == 0)
        two.attach_staging(2 << 20)
        assert daemon.status().staging_bytes == 2 << 20


def test_requests_may_be_pipelined(spand: Daemon) -> None:
    with RawClient(spand.socket_dir) as client:
        sent = {client.send(ping={}) for _ in range(50)}
        answered = {client.receive()[0].id for _ in range(50)}
        assert sent == answered


def test_answers_that_nobody_waits_for_come_last(spand: Daemon) -> None:
    """Of requests that are read together: a client is woken by each answer."""
    with RawClient(spand.socket_dir) as client:
        lease = client.acquire([b"o" * 32]).lease
        if not lease:
            client.store(b"o" * 32, b"bytes")
            lease = client.acquire([b"o" * 32]).lease
        control = spand.child("control")
        os.kill(control, signal.SIGSTOP)
        try:
            sent = [
                client.send(release={"leases": [lease]}),
                client.send(acquire={"keys": b"o" * 32, "shards": [SHARD]}),
                client.send(ping={}),
            ]
        finally:
            os.kill(control, signal.SIGCONT)
        answers = [client.receive()[0] for _ in sent]
    # A Pong says that all before it is answered.
    assert [answer.id for answer in answers] == [sent[1], sent[0], sent[2]]
    assert answers[0].acquire.lease > lease
    assert answers[1].release.released == 1


def test_bad_requests_name_the_field(spand: Daemon) -> None:
    with RawClient(spand.socket_dir) as client:
        cases: list[tuple[dict[str, object], int, str]] = [
            ({"acquire": {"keys": b"x" * 31, "shards": [SHARD]}}, 1, "acquire.keys"),
            ({"acquire": {"keys": b"x" * 32}}, 1, "acquire.shards"),
            (
                {"acquire": {"keys": b"x" * 32, "shards": [{"layer_end": 70_000}]}},
                1,
                "acquire.shards[0]",
            ),
            ({"acquire": {"keys": b"x" * 32 * 1025, "shards": [SHARD]}}, 8, "acquire.keys"),
            ({"release": {"leases": [1] * 1025}}, 8, "release.leases"),
            ({"reserve": {"keys": b"x" * 32}}, 1, "reserve.shard"),
            (
                {"reserve": {"keys": b"x" * 32, "shard": SHARD, "namespace": DIGEST}},
                1,
                "reserve.tokens",
            ),
            ({"commit": {"reservation": [1], "staging_offset": []}}, 1, "commit.staging_offset"),
            ({"report_corrupt": {"lease": 99, "entry": [0]}}, 2, "report_corrupt.lease"),
            ({}, 1, "body"),
        ]
        for body, code, field in cases:
            refused = refusal(lambda body=body: client.call(**body))
            assert (refused.code, refused.field) == (code, field)
        client.call(ping={})
    assert spand.status().counters["refused_invalid_argument"] >= 6


def test_leases_are_their_owners(spand: Daemon) -> None:
    with RawClient(spand.socket_dir) as one, RawClient(spand.socket_dir) as two:
        key = os.urandom(32)
        one.store(key, b"bytes")
        lease = one.acquire([key]).lease
        assert list(two.release(lease).refused) == [lease]
        assert spand.status().leases == 1
        assert one.release(lease).released == 1
        assert list(one.release(lease).refused) == [lease]
        assert spand.status().leases == 0


def test_a_large_packet_ends_its_connection_alone(spand: Daemon) -> None:
    with RawClient(spand.socket_dir) as good, RawClient(spand.socket_dir) as bad:
        good.sock.send(_padded(128 * 1024))
        assert good.receive()[0].HasField("pong")
        bad.sock.send(_padded(128 * 1024 + 1))
        response, _ = bad.receive()
        assert (response.id, response.status.code) == (0, CODE.CODE_TOO_LARGE)
        with pytest.raises(EOFError):
            bad.receive()
        good.call(ping={})


def _padded(size: int) -> bytes:
    """A Ping of exactly ``size`` bytes: the rest is a field that nobody knows."""
    ping = session_socket_pb2.Request(id=5, ping={}).SerializeToString()
    rest = size - len(ping) - 5
    return (
        ping
        + b"\xfa\x7f"
        + bytes([rest & 127 | 128, rest >> 7 & 127 | 128, rest >> 14])
        + bytes(rest)
    )


def test_fds_are_refused(spand: Daemon) -> None:
    control = spand.child("control")
    before = len(os.listdir(f"/proc/{control}/fd"))
    with RawClient(spand.socket_dir) as client, open("/dev/null") as null:
        packet = session_socket_pb2.Request(id=1, ping={}).SerializeToString()
        socket.send_fds(client.sock, [packet], [null.fileno()] * 20)
        response, _ = client.receive()
        assert response.status.code == CODE.CODE_INVALID_ARGUMENT
        assert "file descriptors" in response.status.message
        with pytest.raises(EOFError):
            client.receive()
    wait_for(lambda: len(os.listdir(f"/proc/{control}/fd")) <= before)


requests = st.builds(
    session_socket_pb2.Request,
    # A request of nothing but zeros is an empty packet, which is the end of a connection.
    id=st.integers(1, 2**64 - 1),
    deadline_ms=st.integers(0, 2**32 - 1),
    acquire=st.none()
    | st.builds(
        spans_pb2.AcquireRequest,
        keys=st.binary(max_size=100),
        shards=st.lists(
            st.builds(
                common_pb2.Shard,
                layer_begin=st.integers(0, 2**32 - 1),
                layer_end=st.integers(0, 2**32 - 1),
                head_end=st.integers(0, 2**32 - 1),
            ),
            max_size=3,
        ),
        prefix=st.booleans(),
    ),
    reserve=st.none()
    | st.builds(
        spans_pb2.ReserveRequest,
        namespace=st.sampled_from([DIGEST, b""]),
        shard=st.just(SHARD),
        keys=st.binary(min_size=64, max_size=64),
        tokens=st.lists(st.integers(0, 2**32 - 1), max_size=3),
        start=st.lists(st.integers(0, 2**32 - 1), max_size=3),
        length=st.lists(st.integers(0, 2**64 - 1), max_size=3),
        sub_keys=st.binary(max_size=64),
    ),
    commit=st.none()
    | st.builds(
        spans_pb2.CommitRequest,
        reservation=st.lists(st.integers(0, 2**64 - 1), max_size=3),
        staging_offset=st.lists(st.integers(0, 2**64 - 1), max_size=3),
    ),
    attach_staging=st.none()
    | st.builds(sessions_pb2.AttachStaging, size=st.integers(0, 2**64 - 1)),
)


@given(
    packets=st.lists(st.binary(min_size=1, max_size=300), min_size=1, max_size=4),
    hello=st.booleans(),
)
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_garbage_is_survived(spand: Daemon, packets: list[bytes], hello: bool) -> None:
    with RawClient(spand.socket_dir, hello=hello) as client:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            for packet in packets:
                client.sock.send(packet)
        client.sock.shutdown(socket.SHUT_WR)
        with contextlib.suppress(EOFError, ConnectionResetError):
            while True:
                client.receive()
    with RawClient(spand.socket_dir) as client:
        client.call(ping={})


@given(sent=st.lists(requests, min_size=1, max_size=5))
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_each_request_gets_one_answer(
    spand: Daemon, sent: list[session_socket_pb2.Request]
) -> None:
    with RawClient(spand.socket_dir) as client:
        for request in sent:
            client.sock.send(request.SerializeToString())
        answered = [client.receive()[0].id for _ in sent]
        assert sorted(answered) == sorted(request.id for request in sent)


def test_a_slow_reader_costs_little(spand: Daemon) -> None:
    control = spand.child("control")
    key = os.urandom(32)
    with RawClient(spand.socket_dir) as slow, RawClient(spand.socket_dir) as other:
        slow.store(key, b"bytes")
        packet = session_socket_pb2.Request(
            acquire={"keys": bytes(32 * 1000), "shards": [SHARD]}
        ).SerializeToString()
        before = _rss(control)
        slow.sock.setblocking(False)
        sent = 0
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            try:
                slow.sock.send(packet)
                sent += 1
            except BlockingIOError:
                time.sleep(0.005)
                if time.monotonic() > deadline - 8:
                    break
        assert sent > 5
        assert other.read(key) == b"bytes"
        assert _rss(control) - before < 16 << 20
        # Back-pressure, no loss: each request is answered once it reads.
        slow.sock.settimeout(20)
        for _ in range(sent):
            assert slow.receive()[0].HasField("acquire")


def _rss(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def test_a_deadline_ends_a_commit(start_spand: Start) -> None:
    daemon = start_spand()
    daemon.wait_populated()
    with RawClient(daemon.socket_dir) as client:
        client.attach_staging(1 << 20)
        reserved = client.reserve([b"a" * 32], 1000)
        worker = daemon.child("worker")
        os.kill(worker, signal.SIGSTOP)
        number = client.send(
            deadline_ms=200,
            commit={"reservation": list(reserved.reservation), "staging_offset": [0]},
        )
        response, _ = client.receive()
        assert (response.id, response.status.code) == (number, CODE.CODE_DEADLINE)
        os.kill(worker, signal.SIGCONT)
        # Nothing is held, nothing was stored.
        daemon.wait_status(lambda s: not s.reservations and not s.slabs[0].used and not s.spans)
        assert client.read(b"a" * 32) == common_pb2.REASON_MISS


def test_a_busy_client_leaves_others_their_turn(spand: Daemon) -> None:
    acquire = spans_pb2.AcquireRequest(keys=b"", shards=[SHARD] * 15_000)
    request = session_socket_pb2.Request(id=1, acquire=acquire).SerializeToString()
    with RawClient(spand.socket_dir) as busy, RawClient(spand.socket_dir) as other:
        busy.sock.setblocking(False)
        for _ in range(5):
            with contextlib.suppress(BlockingIOError):
                while True:
                    busy.sock.send(request)
            other.call(ping=sessions_pb2.Ping())
        busy.sock.settimeout(20)
        assert busy.receive()[0].status.code == CODE.CODE_TOO_LARGE


def test_too_many_pending_requests_are_refused(start_spand: Start) -> None:
    daemon = start_spand()
    daemon.wait_populated()
    with RawClient(daemon.socket_dir) as client:
        client.attach_staging(1 << 20)
        keys = [struct.pack("<I", n) * 8 for n in range(257)]
        reserved = client.reserve(keys, 64).reservation
        os.kill(daemon.child("worker"), signal.SIGSTOP)
        for number in reserved:
            client.send(commit={"reservation": [number], "staging_offset": [0]})
        response, _ = client.receive()
        assert response.status.code == CODE.CODE_EXHAUSTED
        os.kill(daemon.child("worker"), signal.SIGCONT)
        for _ in range(256):
            assert list(client.receive()[0].commit.reason) == [0]


def test_max_sessions(start_spand: Start) -> None:
    daemon = start_spand(max_sessions=2)
    with RawClient(daemon.socket_dir), RawClient(daemon.socket_dir):
        refused = refusal(lambda: RawClient(daemon.socket_dir))
        assert refused.code == CODE.CODE_EXHAUSTED
        assert "max_sessions" in refused.message
    wait_for(lambda: daemon.status().sessions == 1)


def test_silence_ends_a_connection_before_hello_and_no_session(
    silent: tuple[RawClient, RawClient],
) -> None:
    stranger, idle = silent
    with pytest.raises(EOFError):
        stranger.receive()
    # As long as the other was, from before it came.
    idle.call(ping={})
