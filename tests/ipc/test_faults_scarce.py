"""No memory, no descriptor, no thread: in a client at each allocation, in a real daemon's parts."""

from __future__ import annotations

import errno
import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from daemon_process import Daemon, wait_for
from leaks import open_fds
from probe import Faults, wait_for_reasons, without_files
from rawclient import RawClient, Refused
from scarce import each_allocation, scarce

from kmesh import KMeshError, Role, Session, Shard
from kmesh.aio import AsyncSession
from kmesh.calls import ReserveBatch
from kmesh.store import put_spans, read_span
from kmesh.v1 import common_pb2

Start = Callable[..., Daemon]
SHARD = Shard(0, 2, 0, 2)
CODES = [errno.EMFILE, errno.ENOMEM]


def clear(failed: BaseException | None, code: int) -> None:
    """What a caller may be told: an error of ours, or the kernel's with its errno."""
    assert isinstance(failed, KMeshError | OSError | RuntimeError), failed
    assert str(failed)
    if isinstance(failed, OSError):
        assert failed.errno == code
    if isinstance(failed, RuntimeError):
        assert "thread" in str(failed)


@pytest.mark.parametrize("code", CODES, ids=errno.errorcode.get)
def test_a_client_at_each_allocation(shared_spand: Daemon, code: int) -> None:
    key = os.urandom(32)
    batch = ReserveBatch(b"n" * 32, SHARD, key, [64], [0], [1000])
    with Session.connect(shared_spand.socket_dir, role=Role.TOOL) as session:
        assert put_spans(session, session.staging(4096), batch, [b"x" * 1000]) == [0]

    def use() -> None:
        with Session.connect(shared_spand.socket_dir, role=Role.TOOL) as session:
            with session.acquire(key, [SHARD]) as lease:
                assert read_span(session, lease, 0) == b"x" * 1000
            session.staging(4096)

    refused = each_allocation(code, use, after=lambda failed: clear(failed, code))
    for name in ("socket", "eventfd", "start"):
        assert name in refused
    # The index, a slab, and staging.
    assert refused.count("Region") == 3
    shared_spand.wait_status(lambda s: s.sessions == 1 and not s.leases and not s.staging_bytes)


@pytest.mark.parametrize("code", CODES, ids=errno.errorcode.get)
def test_a_session_goes_on_where_a_slab_could_not_be_mapped(
    shared_spand: Daemon, code: int
) -> None:
    with Session.connect(shared_spand.socket_dir, role=Role.TOOL) as session:

        def attach() -> None:
            assert session.slab(0).size == 32 << 20
            session._slabs.clear()

        def again(failed: BaseException | None) -> None:
            clear(failed, code)
            assert not session.closed
            attach()

        assert each_allocation(code, attach, after=again) == ["Region"]


@pytest.mark.parametrize("code", CODES, ids=errno.errorcode.get)
async def test_a_client_of_an_event_loop_at_each_allocation(
    shared_spand: Daemon, code: int
) -> None:
    at, refused = 1, []
    while True:
        before = open_fds()
        failed: BaseException | None = None
        with scarce(at, code) as told:
            try:
                async with await AsyncSession.connect(
                    shared_spand.socket_dir, role=Role.TOOL
                ) as session:
                    await session.slab(0)
            except Exception as wrong:
                failed = wrong.with_traceback(None)
        if not told.fired:
            break
        clear(failed, code)
        refused.append(told.asked[at - 1])
        assert open_fds() == before
        at += 1
    assert failed is None
    assert refused == ["socket", "Region", "Region"]


def test_a_client_without_descriptors_ends_its_session_with_a_reason(
    shared_spand: Daemon,
) -> None:
    """The kernel drops the descriptor of an answer; that must not look like an answer."""
    with Session.connect(shared_spand.socket_dir, role=Role.TOOL) as session:
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        spare = os.dup(0)
        os.close(spare)
        resource.setrlimit(resource.RLIMIT_NOFILE, (spare, limits[1]))
        try:
            with pytest.raises(KMeshError, match="none is left"):
                session.slab(0)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        wait_for(lambda: session.closed, 30)


@pytest.fixture
def faults(tmp_path: Path) -> Faults:
    return Faults(tmp_path / "faults")


def test_a_worker_that_can_not_map_its_slabs(start_spand: Start, faults: Faults) -> None:
    daemon = start_spand(**faults.settings)
    daemon.wait_populated()
    with RawClient(daemon.socket_dir) as client:
        assert client.store(b"k" * 32, b"bytes") == 0
        with faults.during("mapping"):
            os.kill(daemon.child("worker"), signal.SIGKILL)
            wait_for(lambda: "slabs can't be mapped: Cannot allocate memory" in daemon.log(), 30)
            wait_for_reasons(daemon, "worker", seconds=30)
            assert client.read(b"k" * 32) == b"bytes"
        wait_for_reasons(daemon, seconds=30)
        assert client.store(b"l" * 32, b"bytes") == 0


@pytest.mark.parametrize("fault", ["mapping", "space"])
def test_a_control_that_can_not_be_had(start_spand: Start, faults: Faults, fault: str) -> None:
    """It has not what it needs, or there is no space for its index: it is tried again."""
    daemon = start_spand(grace_ms=200, **faults.settings)
    daemon.wait_populated()
    with RawClient(daemon.socket_dir) as client:
        assert client.store(b"k" * 32, b"bytes") == 0
    before = open_fds(daemon.pid).total()
    said = {
        "mapping": "control can't have what it needs: [Errno 12] Cannot allocate memory",
        "space": "control could not be started: [Errno 28] No space left on device",
    }[fault]
    with faults.during(fault):
        os.kill(daemon.child("control"), signal.SIGKILL)
        wait_for(lambda: daemon.log().count(said) >= 3, 30)
    daemon.wait_ready(2)
    wait_for_reasons(daemon, seconds=30)
    with RawClient(daemon.socket_dir) as client:
        wait_for(lambda: client.read(b"k" * 32) == b"bytes", 30)
        # The new worker has yet to say how much memory there is.
        wait_for(lambda: client.store(b"l" * 32, b"bytes") == 0, 30)
    wait_for(lambda: open_fds(daemon.pid).total() == before, 30)


def test_a_daemon_that_never_gets_what_it_needs_says_so(start_spand: Start, faults: Faults) -> None:
    for fault, said in (
        ("mapping", "control can't have what it needs: [Errno 12] Cannot allocate memory"),
        ("space", "could not start: [Errno 28] No space left on device"),
    ):
        with faults.during(fault):
            daemon = start_spand(ready=False, **faults.settings)
            assert daemon.process.wait(30) == 1
        assert said in daemon.log()


def test_limits_of_the_kernel_on_a_running_daemon(start_spand: Start) -> None:
    """Address space of the worker, file sizes of control: what they stop is refused, or skipped."""
    daemon = start_spand(errors=True)
    daemon.wait_populated()
    worker, control = daemon.child("worker"), daemon.child("control")
    with RawClient(daemon.socket_dir) as client:
        assert client.store(b"k" * 32, b"bytes") == 0
        used = int(Path(f"/proc/{worker}/statm").read_text().split()[0]) * resource.getpagesize()
        old = resource.prlimit(worker, resource.RLIMIT_AS, (used + (4 << 20), -1))
        with RawClient(daemon.socket_dir) as other:
            other.attach_staging(16 << 20)
            reserved = list(other.reserve([b"o" * 32], 1000).reservation)
            assert other.commit(reserved, [0]) == [common_pb2.REASON_COPY_FAILED]
            assert client.store(b"l" * 32, b"bytes") == 0
        resource.prlimit(worker, resource.RLIMIT_AS, old)
        old = resource.prlimit(control, resource.RLIMIT_FSIZE, (4096, -1))
        with RawClient(daemon.socket_dir) as other:
            with pytest.raises(Refused, match="staging memory: File too large") as refused:
                other.attach_staging(1 << 20)
            assert refused.value.code == common_pb2.CODE_EXHAUSTED
            assert client.read(b"k" * 32) == b"bytes"
            resource.prlimit(control, resource.RLIMIT_FSIZE, old)
            assert other.store(b"m" * 32, b"bytes") == 0
    assert "staging: [Errno 12] Cannot allocate memory" in daemon.log()
    status = daemon.wait_status(lambda s: s.sessions == 1 and not s.staging_bytes, 30)
    assert (status.control_restarts, status.worker_restarts, status.reservations) == (0, 0, 0)
    assert status.counters["spans_copy_failed"] == 1


def test_staging_that_the_worker_has_no_descriptor_for_fails_its_own_copies(
    start_spand: Start,
) -> None:
    daemon = start_spand(errors=True)
    daemon.wait_populated()
    worker = daemon.child("worker")
    with RawClient(daemon.socket_dir) as before, RawClient(daemon.socket_dir) as without:
        assert before.store(b"a" * 32, b"bytes") == 0
        with without_files(worker):
            without.attach_staging(1 << 20)
            assert without.store(b"b" * 32, b"bytes") == common_pb2.REASON_COPY_FAILED
            assert before.store(b"c" * 32, b"bytes") == 0
        assert "staging: no file descriptor is left for it" in daemon.log()
        with RawClient(daemon.socket_dir) as after:
            assert after.store(b"b" * 32, b"bytes") == 0
    assert daemon.child("worker") == worker
    assert daemon.status().worker_restarts == 0
