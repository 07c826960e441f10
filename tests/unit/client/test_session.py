"""Sessions against a daemon that misbehaves, is late, or goes away."""

from __future__ import annotations

import array
import gc
import mmap
import os
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kmesh import errors
from kmesh.channel import MAX_UNSENT
from kmesh.fake_state import create_memfd
from kmesh.handles import HandleKind
from kmesh.index import IndexWriter, index_size
from kmesh.keys import Namespace
from kmesh.layout import Shard, sums_offset
from kmesh.mapping import Mapping
from kmesh.session import ReserveBatch, Role, Session
from kmesh.store import put_spans, read_span
from kmesh.testing import FakeDaemon, Limits
from kmesh.v1 import session_socket_pb2 as frames
from kmesh.v1 import sessions_pb2, spans_pb2

MEMFD = 1
SHARD = Shard(0, 2, 0, 2)


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come true"
        time.sleep(0.005)


def store(session: Session, key: bytes, payload: bytes) -> None:
    batch = ReserveBatch(b"n" * 32, SHARD, key, [64], [0], [len(payload)])
    assert put_spans(session, session.staging(len(payload)), batch, [payload]) == [0]


@pytest.fixture
def daemon() -> Iterator[FakeDaemon]:
    with FakeDaemon() as fake:
        yield fake


def test_a_call_ends_at_its_deadline_and_its_late_lease_is_released(daemon: FakeDaemon) -> None:
    key = os.urandom(32)
    with daemon.connect() as session:
        store(session, key, b"x" * 1000)
        with daemon.hold("acquire"):
            with pytest.raises(errors.DeadlineExceeded):
                session.acquire(key, [SHARD], timeout=0.1)
            until(lambda: daemon.leases == 1)
        until(lambda: daemon.leases == 0)
        until(lambda: session.pending == 0)
        session.ping()


def test_calls_leave_no_garbage(daemon: FakeDaemon) -> None:
    """What was leased or mapped ends with its last reference, not when somebody collects."""
    with daemon.connect() as session:
        store(session, b"k" * 32, b"bytes")

        def calls() -> None:
            session.ping()
            session.acquire(b"k" * 32, [SHARD]).release()
            session.acquire_async(b"m" * 32, [SHARD]).result()
            os.close(session.export_slab(0).fd)

        calls()
        gc.collect()
        gc.disable()
        try:
            for _ in range(20):
                calls()
            found = gc.collect()
        finally:
            gc.enable()
    assert found == 0


def test_late_reservations_are_aborted(daemon: FakeDaemon) -> None:
    with daemon.connect() as session:
        batch = ReserveBatch(b"n" * 32, SHARD, os.urandom(32), [64], [0], [10])
        with daemon.hold("reserve"):
            with pytest.raises(errors.DeadlineExceeded):
                session.reserve(batch, timeout=0.05)
            until(lambda: daemon.reservations == 1)
        until(lambda: daemon.reservations == 0 and session.pending == 0)


def test_a_late_slab_is_closed(daemon: FakeDaemon) -> None:
    with daemon.connect() as session:
        session.ping()  # The fake has closed what it sent with the index.
        before = open_fds()
        with daemon.hold("attach_slab"), pytest.raises(errors.DeadlineExceeded):
            session.slab(0, timeout=0.05)
        until(lambda: session.pending == 0)
        # While it is held back the fake itself holds the descriptor.
        until(lambda: open_fds() == before)
        assert session.slab(0).kind == HandleKind.MEMFD


def test_calls_of_many_threads_and_answers_out_of_order(daemon: FakeDaemon) -> None:
    with daemon.connect() as session, ThreadPoolExecutor(8) as pool:
        key = os.urandom(32)
        store(session, key, b"y" * 100)
        for i in range(20):
            daemon.delay("acquire", 0.002 * (20 - i))
        leases = list(pool.map(lambda _: session.acquire(key, [SHARD]), range(40)))
        assert [lease.hits for lease in leases] == [1] * 40
        assert len({lease.ids for lease in leases}) == 40
        for lease in leases:
            lease.release()
        session.ping()
        assert daemon.leases == 0


def test_every_call_fails_when_the_daemon_hangs_up(daemon: FakeDaemon) -> None:
    with daemon.connect() as session:
        key = os.urandom(32)
        store(session, key, b"z")
        lease = session.acquire(key, [SHARD])
        ended = threading.Event()
        session.on_close(ended.set)
        daemon.delay("acquire", 60, times=3)
        futures = [session.acquire_async(key, [SHARD]) for _ in range(3)]
        session.ping()
        daemon.disconnect()
        for future in futures:
            with pytest.raises(errors.ConnectionClosed):
                future.result(30)
        assert ended.wait(30)
        assert session.closed
        assert session.pending == 0
        lease.release()
        assert lease.released
        with pytest.raises(errors.ConnectionClosed):
            session.ping()
        late = threading.Event()
        session.on_close(late.set)
        assert late.is_set()
        # What was mapped stays readable.
        assert session.index.probe(key, [SHARD.code()]).hits == 1


def test_a_callback_may_not_wait_for_its_own_session(daemon: FakeDaemon) -> None:
    with daemon.connect() as session:
        caught: list[BaseException] = []
        done = threading.Event()

        def callback(_: object) -> None:
            try:
                session.ping()
            except RuntimeError as wrong:
                caught.append(wrong)
            done.set()

        with daemon.hold("acquire"):
            session.acquire_async(os.urandom(32), [SHARD]).add_done_callback(callback)
        assert done.wait(30)
        assert len(caught) == 1
        session.ping()


def test_refusals_carry_the_field(daemon: FakeDaemon) -> None:
    daemon.refuse("hello", errors.VersionMismatch("2 is not 1", field="layout_version"))
    with pytest.raises(errors.VersionMismatch) as refused:
        daemon.connect()
    assert refused.value.field == "layout_version"
    daemon.refuse("reserve", errors.Draining("about to stop"))
    with daemon.connect() as session:
        batch = ReserveBatch(b"n" * 32, SHARD, bytes(32), [64], [0], [1])
        with pytest.raises(errors.Draining):
            session.reserve(batch)
        assert session.reserve(batch).reason == [0]


def test_the_descriptor_count_stays_flat(daemon: FakeDaemon) -> None:
    before = open_fds()
    for _ in range(200):
        with daemon.connect() as session:
            session.staging(4096)
            session.slab(0)
            session.slab(0)
    until(lambda: open_fds() == before)


def test_exports_leave_their_descriptor_to_the_caller(daemon: FakeDaemon) -> None:
    with daemon.connect() as session:
        session.ping()  # The fake has closed what it sent with the index.
        before = open_fds()
        handle = session.export_slab(0)
        assert os.fstat(handle.fd).st_size == handle.size
        with pytest.raises(PermissionError):
            mmap.mmap(handle.fd, 4096, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        os.close(handle.fd)
        until(lambda: open_fds() == before)
        with pytest.raises(errors.NotFound):
            session.export_slab(99)


def test_a_session_has_one_staging(daemon: FakeDaemon) -> None:
    with daemon.connect() as session:
        staging = session.staging(5000)
        assert staging.size >= 5000
        staging.view()[:4] = b"abcd"
        assert session.staging(5000).view()[:4] == b"abcd"
        with pytest.raises(errors.InvalidArgument):
            session.staging(50_000)


def test_batches_over_the_limits_are_split_and_joined() -> None:
    limits = Limits(max_batch=8, max_message_bytes=4096, slab_bytes=8 << 20)
    with FakeDaemon(limits) as daemon, daemon.connect() as session:
        ids = [os.urandom(32) for _ in range(50)]
        payloads = [os.urandom(100 + i) for i in range(50)]
        batch = ReserveBatch(
            b"n" * 32, SHARD, b"".join(ids), [64] * 50, range(50), [len(p) for p in payloads]
        )
        staging = session.staging(700)
        assert put_spans(session, staging, batch, payloads) == [0] * 50
        assert put_spans(session, staging, batch, payloads) == [4] * 50
        absent = b"".join(ids[:30]) + bytes(32) + b"".join(ids[30:])
        with session.acquire(absent, [SHARD]) as lease:
            assert lease.hits == 30
            assert len(lease.ids) == 4
            assert read_span(session, lease, 29) == payloads[29]
        with session.acquire(absent, [SHARD], prefix=False) as lease:
            assert lease.hits == 30
            assert lease.reason.count(0) == 50
            assert read_span(session, lease, 50) == payloads[49]
        session.ping()
        assert daemon.leases == 0


def test_wrong_bytes_are_never_returned(daemon: FakeDaemon) -> None:
    with daemon.connect() as session:
        key = os.urandom(32)
        store(session, key, os.urandom(70_000))
        with session.acquire(key, [SHARD]) as lease:
            daemon.corrupt(key, SHARD)
            with pytest.raises(errors.CorruptionError, match=key.hex()):
                read_span(session, lease, 0)
            assert session.report_corrupt(lease, [0]) == 1
        assert session.acquire(key, [SHARD]).hits == 0


def test_payloads_that_do_not_fit_are_refused_before_anything_is_stored(
    daemon: FakeDaemon,
) -> None:
    with daemon.connect() as session:
        staging = session.staging(4096)
        batch = ReserveBatch(b"n" * 32, SHARD, bytes(32), [64], [0], [5000])
        for payload in (b"x" * 4999, b"x" * 5000):
            with pytest.raises(errors.ConfigError, match="payloads"):
                put_spans(session, staging, batch, [payload])
        with pytest.raises(errors.ConfigError, match="payloads"):
            put_spans(session, staging, batch, [])
        assert daemon.reservations == 0


def test_a_failed_store_leaves_no_reservation(daemon: FakeDaemon) -> None:
    with daemon.connect() as session:
        batch = ReserveBatch(b"n" * 32, SHARD, os.urandom(64), [64] * 2, [0, 64], [100] * 2)
        daemon.refuse("commit", errors.Unavailable("no store worker"))
        with pytest.raises(errors.Unavailable):
            put_spans(session, session.staging(4096), batch, [b"a" * 100, b"b" * 100])
        assert daemon.reservations == 0


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_lets_go_of_the_connection(daemon: FakeDaemon) -> None:
    session = daemon.connect()
    assert daemon.sessions == 1
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.close(writing)
            if session.closed:
                os.read(reading, 1)
                code = 0
        finally:
            os._exit(code)
    os.close(reading)
    try:
        session.ping()
        session.close()
        # The child still runs; it must not keep the session alive.
        until(lambda: daemon.sessions == 0)
    finally:
        os.close(writing)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_nobody_there_and_paths_that_are_too_long(tmp_path: Path) -> None:
    with pytest.raises(errors.DaemonUnavailable):
        Session.connect(tmp_path, role=Role.TOOL)
    with pytest.raises(errors.ConfigError, match="socket_dir"):
        Session.connect(tmp_path / ("x" * 120), role=Role.TOOL)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as dead:
        dead.bind(str(tmp_path / "session.sock"))
    with pytest.raises(errors.DaemonUnavailable):
        Session.connect(tmp_path, role=Role.TOOL)


def test_a_daemon_that_accepts_nothing_is_unavailable(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as busy:
        busy.bind(str(tmp_path / "session.sock"))
        busy.listen(0)
        before = open_fds()
        for _ in range(3):  # The first ones wait in the backlog for their Welcome.
            with pytest.raises(errors.DaemonUnavailable):
                Session.connect(tmp_path, role=Role.TOOL, timeout=0.2)
        assert open_fds() == before


def test_what_a_hello_says(daemon: FakeDaemon) -> None:
    space = Namespace("m", "w", "float32", 2, 2, 4)
    with daemon.connect(role=Role.SCHEDULER, engine_id="e", namespace=space) as first:
        assert first.epoch == daemon.epoch == first.index.epoch
        other = Namespace("m", "w", "float16", 2, 2, 4)
        with pytest.raises(errors.NamespaceMismatch) as refused:
            daemon.connect(role=Role.WORKER, engine_id="e", namespace=other)
        assert refused.value.field == "hello.namespace.dtype"
        with daemon.connect(role=Role.WORKER, engine_id="e", namespace=space) as second:
            assert second.welcome.session_id != first.welcome.session_id


class Raw:
    """A peer that says what the test wants, after it has let a session in."""

    EPOCH = 5

    def __init__(self) -> None:
        self.ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        theirs.setblocking(False)
        self.ours.settimeout(30)
        with ThreadPoolExecutor(1) as pool:
            future = pool.submit(Session, theirs, sessions_pb2.Hello(), 30.0)
            welcome = sessions_pb2.Welcome(
                max_message_bytes=4096, max_batch=8, span_tokens=64, sub_tokens=16
            )
            self.reply(welcome=welcome)
            size = index_size(64)
            fd = create_memfd("index", size)
            IndexWriter(Mapping(fd, size, writable=True), self.EPOCH)
            self.reply([fd], index=sessions_pb2.IndexHandle(kind=MEMFD, size=size))
            os.close(fd)
            self.session = future.result()

    def reply(self, fds: list[int] | None = None, **body: object) -> None:
        request = frames.Request.FromString(self.ours.recv(65536))
        response = frames.Response(id=request.id, epoch=self.EPOCH, **body)  # type: ignore[arg-type]
        self.send(response.SerializeToString(), fds or [])

    def send(self, packet: bytes, fds: list[int]) -> None:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        self.ours.sendmsg([packet], rights)


@pytest.fixture
def raw() -> Iterator[Raw]:
    peer = Raw()
    yield peer
    peer.session.close()
    del peer.session
    peer.ours.close()


def broken(raw: Raw, caplog: pytest.LogCaptureFixture) -> str:
    """What the session said when it closed itself."""
    until(lambda: raw.session.closed)
    assert raw.session.pending == 0
    until(lambda: "closing the session" in caplog.text)
    return caplog.text


def test_no_descriptor_left_ends_the_session_and_is_said(
    raw: Raw, caplog: pytest.LogCaptureFixture
) -> None:
    """The kernel hands the packet over without its descriptor, and marks it as cut short."""
    future = raw.session.acquire_async(bytes(32), [SHARD])
    free = os.dup(0)
    os.close(free)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, before[1]))
    try:
        raw.reply([0], acquire=spans_pb2.AcquireResponse())
        with pytest.raises(errors.ProtocolError, match="none is left"):
            future.result(30)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert "none is left (ulimit -n)" in broken(raw, caplog)


def test_more_descriptors_than_one_end_the_session(
    raw: Raw, caplog: pytest.LogCaptureFixture
) -> None:
    before = open_fds()
    future = raw.session.acquire_async(bytes(32), [SHARD])
    raw.reply([0, 1, 2], acquire=spans_pb2.AcquireResponse())
    with pytest.raises(errors.ProtocolError):
        future.result(30)
    assert "more file descriptors than allowed" in broken(raw, caplog)
    # The session's own socket and eventfd are gone, and nothing came instead.
    until(lambda: open_fds() == before - 2)


def test_a_descriptor_that_nobody_asked_for_ends_the_session(
    raw: Raw, caplog: pytest.LogCaptureFixture
) -> None:
    before = open_fds()
    future = raw.session.acquire_async(bytes(32), [SHARD])
    raw.reply([0], acquire=spans_pb2.AcquireResponse(reason=[1]))
    with pytest.raises(errors.ProtocolError, match="unasked"):
        future.result(30)
    broken(raw, caplog)
    until(lambda: open_fds() == before - 2)


def test_the_last_words_of_a_daemon_that_hangs_up_are_heard() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    theirs.setblocking(False)
    theirs.send(b"never read")
    response = frames.Response(id=0)
    response.status.code = 7
    response.status.message = "file descriptors: none is left"
    ours.send(response.SerializeToString())
    ours.close()
    with pytest.raises(errors.Exhausted, match="none is left"):
        Session(theirs, sessions_pb2.Hello(), 30.0)


def test_a_packet_that_is_too_long_ends_the_session(
    raw: Raw, caplog: pytest.LogCaptureFixture
) -> None:
    raw.send(bytes(5000), [])
    assert "more bytes than allowed" in broken(raw, caplog)


@pytest.mark.parametrize("sealed", [True, False], ids=["too small", "unsealed"])
def test_memory_that_could_be_a_sigbus_is_not_mapped(raw: Raw, sealed: bool) -> None:
    before = open_fds()
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(raw.session.slab, 0)
        if sealed:
            fd = create_memfd("slab", 1 << 20)
        else:
            fd = os.memfd_create("slab", os.MFD_CLOEXEC)
            os.truncate(fd, 2 << 20)
        size = 2 << 20
        handle = sessions_pb2.SlabHandle(kind=MEMFD, size=size, sums_offset=sums_offset(size))
        raw.reply([fd], slab=handle)
        os.close(fd)
        with pytest.raises(errors.ProtocolError):
            future.result(30)
    assert open_fds() == before


def test_handles_of_another_kind_are_not_mapped_as_memory(raw: Raw) -> None:
    with ThreadPoolExecutor(1) as pool:
        size = 2 << 20
        for kind, error in ((2, errors.UnsupportedError), (77, errors.UnsupportedError)):
            future = pool.submit(raw.session.slab, 0)
            handle = sessions_pb2.SlabHandle(size=size, sums_offset=sums_offset(size))
            handle.kind = kind  # type: ignore[assignment]
            raw.reply([0], slab=handle)
            with pytest.raises(error):
                future.result(30)


def test_sums_that_overlap_payloads_are_refused(raw: Raw) -> None:
    size = 2 << 20
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(raw.session.slab, 0)
        fd = create_memfd("slab", size)
        raw.reply([fd], slab=sessions_pb2.SlabHandle(kind=MEMFD, size=size, sums_offset=8))
        os.close(fd)
        with pytest.raises(errors.ProtocolError, match="sums"):
            future.result(30)


def test_a_daemon_that_reads_nothing_blocks_no_caller(raw: Raw) -> None:
    futures = []
    while not raw.session.closed:
        futures.append(raw.session.acquire_async(bytes(8 * 32), [SHARD], timeout=60))
    assert len(futures) > MAX_UNSENT
    for future in futures:
        assert isinstance(future.exception(5), errors.ConnectionClosed)
    assert raw.session.closed


def test_staging_that_the_daemon_may_still_read_goes_with_its_session(daemon: FakeDaemon) -> None:
    late = errors.DeadlineExceeded("too late")
    batch = ReserveBatch(b"n" * 32, SHARD, bytes(32), [64], [0], [1000])
    with daemon.connect() as session:
        staging = session.staging(4096)
        # The abort was answered: whatever is still copied is never served.
        daemon.refuse("commit", late)
        with pytest.raises(errors.DeadlineExceeded, match="too late"):
            put_spans(session, staging, batch, [bytes(1000)])
        assert put_spans(session, staging, batch, [b"x" * 1000]) == [0]
        # It was not. The next one to write that staging would write what is being copied.
        daemon.refuse("commit", late)
        daemon.refuse("abort", errors.DeadlineExceeded("this too"))
        other = ReserveBatch(b"n" * 32, SHARD, b"k" * 32, [64], [0], [1000])
        with pytest.raises(errors.DeadlineExceeded, match="too late"):
            put_spans(session, staging, other, [bytes(1000)])
        assert session.closed
