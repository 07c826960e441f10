"""DMA-BUFs through the daemon: agreed on, given, read by others, and survived.

Run in the machine of ``machine.py``. Sessions are served long before this slow machine has
loaded gRPC, so that most tests do not wait for it.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from daemon_process import Daemon, environment, wait_for
from rawclient import RawClient, Refused

from kmesh import dmabuf, errors
from kmesh.dmabuf import DmaBufMapping
from kmesh.handles import HandleKind, HandleRefusal, Preferences, Tier
from kmesh.layout import Shard
from kmesh.session import ReserveBatch, Role, Session
from kmesh.store import put_spans, read_span
from kmesh.v1 import common_pb2, sessions_pb2

MIB = 1 << 20
SHARD = Shard(0, 1, 0, 1)
LIMIT = Path("/sys/module/udmabuf/parameters/size_limit_mb")
WISH: Preferences = {Tier.HOST: (HandleKind.DMA_BUF, HandleKind.MEMFD)}
_NO_FILES = r"Too many open files|no file descriptor left"
#: The machine is slow, and what runs it may be busy.
PATIENCE = 180.0
TIMEOUT = 60.0
SMALL = {
    "host_memory": "16MiB",
    "slab_size": "8MiB",
    "staging_memory": "16MiB",
    "max_spans": 1024,
    "memory_headroom": 0,
    "stuck_ms": 60000,
}


def connect(daemon: Daemon, handles: Preferences = WISH) -> Session:
    def attempt() -> Session | None:
        assert daemon.process.poll() is None, daemon.log()
        try:
            return Session.connect(
                daemon.socket_dir, role=Role.TOOL, handles=handles, timeout=TIMEOUT
            )
        except errors.DaemonUnavailable:
            return None

    session = wait_for(attempt, PATIENCE)
    assert isinstance(session, Session)
    return session


def store(session: Session, payload: bytes) -> bytes:
    key = os.urandom(32)
    batch = ReserveBatch(b"n" * 32, SHARD, key, [64], [0], [len(payload)])

    def room() -> bool:
        reserved = session.reserve(batch, TIMEOUT)
        session.abort([number for number in reserved.reservation if number], TIMEOUT)
        return reserved.reason == [0]

    wait_for(room, PATIENCE)
    staging = session.staging(len(payload), TIMEOUT)
    assert put_spans(session, staging, batch, [payload]) == [0]
    return key


def whole_slab(session: Session, slab: int) -> None:
    """Waits until the slab has its pages, and maps it."""

    def attempt() -> bool:
        try:
            session.slab(slab, TIMEOUT)
        except errors.Exhausted:
            return False
        return True

    wait_for(attempt, PATIENCE)


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    # A test lets it have no file descriptor more.
    made = Daemon(Path("/run/kmesh-vm/s"), ready=False, dma_buf="slabs", errors=True, **SMALL)
    try:
        yield made
        assert made.stop(seconds=PATIENCE) == 0
        made.check_log()
    finally:
        made.kill()


@pytest.fixture(scope="module", autouse=True)
def directory() -> None:
    Path("/run/kmesh-vm").mkdir()


#: A client that leases a span, is given it as a DMA-BUF, and says what it saw.
READER = """
import hashlib, json, os, sys
from kmesh import dmabuf
from kmesh.dmabuf import DmaBufMapping
from kmesh.layout import Shard
from kmesh.session import Role, Session
directory, key = sys.argv[1], bytes.fromhex(sys.argv[2])
with Session.connect(directory, role=Role.TOOL, timeout=60) as session:
    with session.acquire(key, [Shard(0, 1, 0, 1)], timeout=60) as lease:
        handle = session.export_span(lease, 0, timeout=60)
        seen = dmabuf.look(handle.fd)
        with DmaBufMapping(handle.fd, handle.size) as mapping:
            os.close(handle.fd)
            print("mapped", flush=True)
            sys.stdin.readline()
            with mapping.reading():
                payload = bytes(mapping.view(0, handle.length))
print(json.dumps([seen.exporter, seen.size, hashlib.sha256(payload).hexdigest()]))
"""


def test_two_clients_exchange_a_span(daemon: Daemon) -> None:
    """And what was mapped stays when those who made it are killed: worker, then control."""
    payload = os.urandom(100_000)
    with connect(daemon) as session:
        key = store(session, payload)
        reader = subprocess.Popen(
            [sys.executable, "-c", READER, str(daemon.socket_dir), key.hex()],
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert reader.stdout is not None
        assert reader.stdin is not None
        assert reader.stdout.readline() == "mapped\n"
        # This client read it as a DMA-BUF of the whole slab meanwhile.
        assert session.welcome.handles[Tier.HOST].chosen == HandleKind.DMA_BUF
        with session.acquire(key, [SHARD], timeout=TIMEOUT) as lease:
            whole_slab(session, lease.slab[0])
            assert session.slab(lease.slab[0]).kind == HandleKind.DMA_BUF
            assert read_span(session, lease, 0) == payload
    said, _ = reader.communicate("\n", timeout=PATIENCE)
    import hashlib

    assert json.loads(said) == ["udmabuf", 102_400, hashlib.sha256(payload).hexdigest()]


def test_a_span_is_given_alone_and_whole(daemon: Daemon) -> None:
    payload = os.urandom(70_000)
    with connect(daemon) as session:
        key = store(session, payload)
        with session.acquire(key, [SHARD], timeout=TIMEOUT) as lease:
            handle = session.export_span(lease, 0, timeout=TIMEOUT)
            assert (handle.kind, handle.size, handle.length) == (3, 73_728, 70_000)
            with DmaBufMapping(handle.fd, handle.size) as mapping, mapping.reading():
                assert bytes(mapping.view(0, handle.length)) == payload
            os.close(handle.fd)
            with pytest.raises(errors.InvalidArgument, match="not a kind of this tier"):
                session.export_span(lease, 0, kind=HandleKind.CUDA_VMM_FD, timeout=TIMEOUT)
        with pytest.raises(LookupError):
            session.export_span(lease, 0, timeout=TIMEOUT)


def test_who_leases_nothing_gets_nothing(daemon: Daemon) -> None:
    with connect(daemon) as session:
        key = store(session, bytes(1000))
        with session.acquire(key, [SHARD], timeout=TIMEOUT) as lease:
            (number,) = lease.ids
            with RawClient(daemon.socket_dir) as other:
                for body in (
                    sessions_pb2.ExportSpan(lease=number, kind=common_pb2.HANDLE_KIND_DMA_BUF),
                    sessions_pb2.ExportSpan(lease=999, kind=common_pb2.HANDLE_KIND_DMA_BUF),
                ):
                    with pytest.raises(Refused) as refused:
                        other.call(export_span=body)
                    assert refused.value.code == common_pb2.CODE_NOT_FOUND
                assert other.fds == []


def test_a_client_without_descriptors_loses_its_session_and_nothing_else(daemon: Daemon) -> None:
    """The kernel cuts the control message short; the packet is not taken for whole."""
    with connect(daemon) as good, connect(daemon) as session:
        key = store(session, bytes(5000))
        with session.acquire(key, [SHARD], timeout=TIMEOUT) as lease:
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            free = os.open("/dev/null", os.O_RDONLY)
            os.close(free)
            resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
            try:
                with pytest.raises(errors.ProtocolError, match="none is left"):
                    session.export_span(lease, 0, timeout=TIMEOUT)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert session.closed
        with good.acquire(key, [SHARD], timeout=TIMEOUT) as lease:
            os.close(good.export_span(lease, 0, timeout=TIMEOUT).fd)


@pytest.mark.parametrize("name", ["worker", "control"])
def test_a_daemon_without_descriptors_says_so_and_goes_on(daemon: Daemon, name: str) -> None:
    with connect(daemon) as session:
        key = store(session, bytes(5000))
        pid = daemon.child(name)
        with session.acquire(key, [SHARD], timeout=TIMEOUT) as lease:
            held = sorted(int(n) for n in os.listdir(f"/proc/{pid}/fd"))
            gap = next(n for n in range(len(held) + 1) if n not in held)
            before = resource.prlimit(pid, resource.RLIMIT_NOFILE, (gap, 4096))
            try:
                with pytest.raises(errors.Exhausted, match=_NO_FILES):
                    session.export_span(lease, 0, timeout=TIMEOUT)
            finally:
                resource.prlimit(pid, resource.RLIMIT_NOFILE, before)

            def again() -> bool:
                try:
                    os.close(session.export_span(lease, 0, timeout=TIMEOUT).fd)
                except errors.Exhausted:
                    return False
                return True

            wait_for(again, PATIENCE)


def test_what_was_given_outlives_the_whole_daemon(daemon: Daemon) -> None:
    own = Daemon(Path("/run/kmesh-vm/k"), ready=False, dma_buf="spans", errors=True, **SMALL)
    try:
        payload = os.urandom(9000)
        with connect(own) as session:
            # Slabs are not given so by this one.
            offer = session.welcome.handles[Tier.HOST].offers[0]
            assert (offer.slabs, offer.spans) == (False, True)
            assert offer.refusal == HandleRefusal.NOT_ALLOWED
            key = store(session, payload)
            lease = session.acquire(key, [SHARD], timeout=TIMEOUT)
            with pytest.raises(errors.PermissionDenied, match='dma_buf = "spans"'):
                session.export_slab(lease.slab[0], TIMEOUT, HandleKind.DMA_BUF)
            assert session.slab(lease.slab[0], TIMEOUT).kind == HandleKind.MEMFD
            handle = session.export_span(lease, 0, timeout=TIMEOUT)
            own.process.send_signal(signal.SIGKILL)
            own.process.wait()
            wait_for(lambda: session.closed, PATIENCE)
        with DmaBufMapping(handle.fd, handle.size) as mapping, mapping.reading():
            assert bytes(mapping.view(0, handle.length)) == payload
        os.close(handle.fd)
        assert own.log().count("a client would rather have DMA_BUF") == 1
    finally:
        own.kill()


def test_slabs_over_the_modules_limit_are_refused_by_its_name(daemon: Daemon) -> None:
    before = LIMIT.read_text()
    LIMIT.write_text("4")
    own = Daemon(Path("/run/kmesh-vm/l"), ready=False, dma_buf="slabs", **SMALL)
    try:
        with connect(own) as session:
            agreed = session.welcome.handles[Tier.HOST]
            assert agreed.chosen == HandleKind.MEMFD
            assert agreed.fallback is not None
            assert agreed.fallback.refusal == HandleRefusal.SIZE_LIMIT
            assert "size_limit_mb = 4" in agreed.fallback.text
            key = store(session, bytes(5 * MIB))
            with session.acquire(key, [SHARD], timeout=TIMEOUT) as lease:
                with pytest.raises(errors.TooLarge, match="size_limit_mb = 4"):
                    session.export_span(lease, 0, timeout=TIMEOUT)
                LIMIT.write_text(before)
                handle = session.export_span(lease, 0, timeout=TIMEOUT)
                assert dmabuf.look(handle.fd).size == 5 * MIB
                os.close(handle.fd)
        for _ in range(2):
            connect(own).close()
        # Each session counts, one line is enough.
        assert own.log().count("a client would rather have DMA_BUF") == 1
    finally:
        LIMIT.write_text(before)
        # Its children die with it; to end in good order it would have to load gRPC first.
        own.kill()
        own.check_log()


@pytest.fixture
def group() -> Iterator[Callable[[int], Path]]:
    root = Path("/sys/fs/cgroup")
    (root / "cgroup.subtree_control").write_text("+memory")
    made: list[Path] = []

    def make(limit: int) -> Path:
        path = root / f"t{time.monotonic_ns()}"
        path.mkdir()
        (path / "memory.max").write_text(str(limit))
        made.append(path)
        return path

    yield make
    for path in made:
        wait_for(lambda path=path: _removed(path), PATIENCE)


def _removed(group: Path) -> bool:
    """Whether a control group is gone: it can't go before the last of its processes."""
    try:
        group.rmdir()
    except OSError:
        return False
    return True


HARDENED = {**SMALL, "hardened": "true", "dma_buf": "slabs"}


def test_a_sealed_slab_is_given_as_it_was_made_before(
    daemon: Daemon, group: Callable[[int], Path]
) -> None:
    limited = group(400 * MIB)
    own = Daemon(Path("/run/kmesh-vm/h"), ready=False, group=limited, **HARDENED)
    try:
        payload = os.urandom(5000)
        with connect(own) as session:
            key = store(session, payload)
            with session.acquire(key, [SHARD], timeout=TIMEOUT) as lease:
                whole_slab(session, lease.slab[0])
                assert session.slab(lease.slab[0]).kind == HandleKind.DMA_BUF
                assert read_span(session, lease, 0) == payload
                with pytest.raises(errors.PermissionDenied, match="single spans are not"):
                    session.export_span(lease, 0, timeout=TIMEOUT)
                memfd = session.export_slab(0, TIMEOUT, HandleKind.MEMFD)
                with pytest.raises(dmabuf.NotExported, match="sealed"):
                    dmabuf.create(memfd.fd, [(0, 4096)])
                os.close(memfd.fd)
        events = (limited / "memory.events").read_text()
        assert "oom_kill 0" in events
    finally:
        # Its children die with it; to end in good order it would have to load gRPC first.
        own.kill()
        own.check_log()


def test_slabs_that_a_control_group_has_no_room_for_are_refused_not_killed_for(
    daemon: Daemon, group: Callable[[int], Path]
) -> None:
    limited = group(64 * MIB)
    settings = {**HARDENED, "host_memory": "32MiB", "memory_headroom": "32MiB"}
    own = Daemon(Path("/run/kmesh-vm/c"), ready=False, group=limited, **settings)
    try:
        assert own.process.wait(PATIENCE) == 2
        assert "dma_buf: hardened slabs need all of their memory at once" in own.log()
        assert str(limited / "memory.max") in own.log()
        assert "oom_kill 0" in (limited / "memory.events").read_text()
    finally:
        own.kill()


def test_commands(daemon: Daemon) -> None:
    """The daemon has loaded gRPC by now, or soon."""
    wait_for(lambda: "ready: " in daemon.log(), PATIENCE)
    look = "cat /proc/self/fdinfo/$KMESH_DMA_BUF_FD; env; exit 9"
    with connect(daemon) as session:
        key = store(session, bytes(70_000))
        done = _kmesh(daemon, "export", key.hex()[:12], "--dma-buf", "--", "sh", "-c", look)
        assert done.returncode == 9, done.stderr
        assert "exp_name:\tudmabuf" in done.stdout
        assert "size:\t73728" in done.stdout
        for line in (
            "KMESH_DMA_BUF_FD=3",
            "KMESH_DMA_BUF_SIZE=73728",
            "KMESH_SPAN_LENGTH=70000",
            f"KMESH_SPAN_KEY={key.hex()}",
        ):
            assert f"{line}\n" in done.stdout
    doctor = json.loads(_kmesh(daemon, "doctor", "--json").stdout)
    checks = {check["name"]: check for check in doctor["checks"]}
    assert doctor["ok"], doctor
    for name in ("memfd", "udmabuf", "dma_buf"):
        assert checks[name]["level"] == "ok", doctor
    assert "DMA_BUF (slabs, spans)" in checks["handles"]["seen"]


def _kmesh(daemon: Daemon, *arguments: str) -> subprocess.CompletedProcess[str]:
    where = ("--socket-dir", str(daemon.socket_dir), "--timeout", str(TIMEOUT))
    return subprocess.run(
        [sys.executable, "-m", "kmesh.cli", *where, *arguments],
        env=environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE,
        check=False,
    )
