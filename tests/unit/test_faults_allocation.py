"""No space, no memory, no descriptor, at each single allocation: an error, and nothing is left."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from hostile import receive
from rawclient import DIGEST, SHARD
from room import Room, room, settings
from scarce import each_allocation, scarce

from kmesh.errors import ConfigError
from kmesh.v1 import common_pb2, session_socket_pb2
from kmesh_spand import ipc, jobmessages, memory, messages
from kmesh_spand.fdstore import FdStore
from kmesh_spand.holdings import Holdings
from kmesh_spand.inherit import Named
from kmesh_spand.launch import Prepared
from kmesh_spand.storage import Storage
from kmesh_spand.supervisor import Supervisor

CODES = [errno.ENOSPC, errno.ENOMEM, errno.EMFILE]
_SEVERAL = {"slab_size": "1MiB", "allow_uids": "0,1000"}


def end(storage: Storage) -> None:
    storage.drop_writable()
    storage.close()


def is_the_error(code: int) -> Callable[[BaseException | None], None]:
    """A check for ``each_allocation``: what failed says so, by its errno."""

    def check(failed: BaseException | None) -> None:
        assert isinstance(failed, OSError)
        assert failed.errno == code

    return check


@pytest.mark.parametrize("code", CODES, ids=errno.errorcode.get)
@pytest.mark.parametrize("hardened", ["false", "true"])
def test_memory_that_outlives_processes(tmp_path: Path, code: int, hardened: str) -> None:
    chosen = settings(tmp_path, hardened=hardened, **_SEVERAL)
    refused = each_allocation(code, lambda: end(Storage(chosen)), after=is_the_error(code))
    # Four slabs, the catalog, an index for each of two uids.
    assert refused.count("memfd_create") == 7
    assert refused.count("posix_fallocate") == 3
    assert refused.count("Region") == (4 if hardened == "true" else 0)


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENOMEM], ids=errno.errorcode.get)
def test_what_a_supervisor_holds(socket_dir: Path, code: int) -> None:
    chosen = settings(socket_dir, slab_size="1MiB")
    borne: list[None] = []

    def check(failed: BaseException | None) -> None:
        if failed is None:
            borne.append(failed)
        else:
            assert isinstance(failed, OSError | ConfigError)
        assert not [name for name in os.listdir(socket_dir) if name.endswith(".sock")]

    socket_dir.mkdir()
    refused = each_allocation(
        code, lambda: Holdings(chosen, "test", FdStore({})).close(), after=check
    )
    # Four slabs, catalog, index, manifest and life; two sockets, and one to ask whether a daemon
    # is there.
    assert refused.count("memfd_create") == 8
    assert refused.count("socket") == 3
    # Nobody's number in the lock.
    assert len(borne) == 1


def test_what_a_supervisor_inherits(socket_dir: Path) -> None:
    """Without a descriptor for something it is given up, or the next try uses it."""
    chosen = settings(socket_dir, slab_size="1MiB")
    first = Holdings(chosen, "test", FdStore({}))
    first.life.release()
    used: list[bool] = []

    def begin() -> None:
        store = FdStore({})
        # ``os.dup`` would be counted.
        store.received = [
            Named(name, fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 0)) for name, fd in first.named()
        ]
        held = Holdings(chosen, "test", store)
        used.append(os.path.sameopenfile(held.storage.catalog.fd, first.storage.catalog.fd))
        held.close()

    def check(failed: BaseException | None) -> None:
        assert failed is None or isinstance(failed, OSError | ConfigError)

    first.place.close()
    try:
        refused = each_allocation(errno.EMFILE, begin, after=check)
        # For the lock, and for the life, without which it is given up.
        assert refused.count("open") == 2
        # The lock's number is not missed.
        assert used == [True, False, True]
    finally:
        first.storage.close()
        first._estate.close()


@pytest.mark.parametrize("threads", [0, 1, 2])
def test_filling_memory(monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    """A thread less only makes it slower; without any it can be tried again."""
    size = 96 << 20
    filled: list[int] = []
    started: list[threading.Thread] = []
    start = threading.Thread.start

    def scanty(thread: threading.Thread) -> None:
        if len(started) == threads:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", scanty)
    fd = memory.make_memfd("test", size)
    try:
        filler = memory.Populator(fd, 0, [(0, size)], huge=False, done=filled.append)
        if threads:
            filler.run(3)
            assert filled[-1] == size
            assert os.fstat(fd).st_blocks * 512 == size
        else:
            with pytest.raises(OSError, match="can't start new thread") as failed:
                filler.run(3)
            assert failed.value.errno == errno.EAGAIN
            assert os.fstat(fd).st_blocks == 0
        assert len(started) == threads
    finally:
        os.close(fd)


@pytest.mark.parametrize("code", CODES, ids=errno.errorcode.get)
def test_a_new_epoch(tmp_path: Path, code: int) -> None:
    storage = Storage(settings(tmp_path, **_SEVERAL))
    try:
        epoch = storage.epoch

        def unchanged(failed: BaseException | None) -> None:
            assert isinstance(failed, OSError)
            assert failed.errno == code
            assert storage.epoch == epoch
            # The old epoch can still be ended, and tried again.
            storage.poison()

        refused = each_allocation(code, storage.new_epoch, after=unchanged)
        assert refused.count("memfd_create") == 2
        assert storage.epoch != epoch
    finally:
        end(storage)


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENOMEM], ids=errno.errorcode.get)
def test_starting_the_other_processes(
    socket_dir: Path, code: int, caplog: pytest.LogCaptureFixture
) -> None:
    """No process can be started here: a child would be a copy of this test."""
    chosen = settings(socket_dir, gpu="0", gpu_memory="2MiB")
    supervisor = Supervisor(chosen, "test", None)  # type: ignore[arg-type]
    held = supervisor._holdings = Holdings(chosen, "test", FdStore({}))
    try:
        gpus = supervisor._gpus
        for start in (
            supervisor._start_control,
            lambda now: supervisor._worker.start(now, held.storage, held.life.held, None),
            lambda now: gpus._start(gpus._workers[0], now),
            lambda _: Prepared(),
        ):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(os, "fork", _never)
                refused = each_allocation(
                    code, lambda start=start: _start(start), after=is_the_error(code)
                )
            # The last thing that is asked for is the process.
            assert (refused[-2], refused[-1]) == ("socketpair", "fork")
        # And the loop tries again later instead of ending.
        supervisor._control.start_at = 0.0
        with scarce(1, code):
            supervisor._start_due()
        assert supervisor._control.start_at is not None
        assert supervisor._control.start_at > 0
        assert f"control could not be started: [Errno {code}]" in caplog.text
    finally:
        held.close()


class _Started(Exception):
    """All was there for a process to be started."""


def _never() -> int:
    raise _Started


def _start(start: Callable[[float], object]) -> None:
    with contextlib.suppress(_Started):
        start(0.0)


@pytest.fixture
def parts(socket_dir: Path) -> object:
    with room(socket_dir) as made:
        yield made


def call(parts: Room, sock: socket.socket, **body: object) -> session_socket_pb2.Response:
    """One request's answer; an attached descriptor is closed."""
    sock.send(session_socket_pb2.Request(id=9, **body).SerializeToString())  # type: ignore[arg-type]
    got: list[bytes] = []

    def heard() -> bool:
        with contextlib.suppress(BlockingIOError):
            got.append(receive(sock))
        return bool(got)

    parts.turn(heard)
    return session_socket_pb2.Response.FromString(got[0])


def store(parts: Room, sock: socket.socket, key: bytes) -> int:
    """Reserve and commit; the Reason of the commit."""
    reserve = {
        "namespace": DIGEST,
        "shard": SHARD,
        "keys": key,
        "tokens": [64],
        "start": [0],
        "length": [1000],
    }
    answer = call(parts, sock, reserve=reserve).reserve
    assert list(answer.reason) == [0]
    commit = {"reservation": list(answer.reservation), "staging_offset": [0]}
    return call(parts, sock, commit=commit).commit.reason[0]


@pytest.mark.parametrize("code", CODES, ids=errno.errorcode.get)
def test_staging(parts: Room, code: int, caplog: pytest.LogCaptureFixture) -> None:
    reasons: list[int] = []

    def session() -> None:
        sock, _ = parts.session()
        with sock:
            answer = call(parts, sock, attach_staging={"size": 1 << 20})
            if answer.HasField("status"):
                assert answer.status.code == common_pb2.CODE_EXHAUSTED
                assert answer.status.message == f"staging memory: {os.strerror(code)}"
                assert answer.status.field == "attach_staging.size"
                raise OSError(code, answer.status.message)
            # Where the worker could not map it, what is committed is not stored, and says so.
            reasons.append(store(parts, sock, os.urandom(32)))
        parts.turn(lambda: not parts.handler.registry.members and not parts.staging.used)

    def ended(failed: BaseException | None) -> None:
        parts.turn(lambda: not parts.handler.registry.members)
        parts.turn(lambda: not parts.staging.used and parts.core.idle)
        parts.core.check()
        assert parts.core.views.status().reservations == 0

    # The pool of threads has to be there, or its first use would be counted.
    sock, _ = parts.session()
    with sock:
        call(parts, sock, attach_staging={"size": 4096})
    parts.turn(lambda: not parts.staging.used)
    refused = each_allocation(code, session, after=ended)
    for name in ("memfd_create", "ftruncate", "fchmod", "fcntl", "posix_fallocate", "Region"):
        assert name in refused
    assert set(reasons) == {common_pb2.REASON_OK, common_pb2.REASON_COPY_FAILED}
    assert parts.core.counters["copy_failed"] == reasons.count(common_pb2.REASON_COPY_FAILED)
    assert "staging: [Errno" in caplog.text


def test_an_answers_descriptor_that_has_to_wait(parts: Room) -> None:
    """The client does not read, so the descriptor is kept; without one left, the session ends."""

    def session() -> None:
        sock, connection = parts.session()
        with sock:
            connection._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2048)
            for number in range(60):
                ping = session_socket_pb2.Request(id=number + 1, ping={})
                sock.send(ping.SerializeToString())
            parts.turn(lambda: connection._queue)
            sock.send(session_socket_pb2.Request(id=99, attach_slab={}).SerializeToString())
            parts.turn()
            parts.turn()
            if connection._open:
                assert any(fd >= 0 for _, fd in connection._queue)
                connection.close("seen")
            else:
                raise OSError(errno.EMFILE, "the connection was closed")

    def gone(failed: BaseException | None) -> None:
        assert isinstance(failed, OSError)
        parts.turn(lambda: not parts.handler.registry.members)

    refused = each_allocation(errno.EMFILE, session, after=gone)
    assert "dup" in refused


def test_staging_that_the_worker_can_not_be_told_of(parts: Room) -> None:
    """The way to the worker is full, so its copy of the descriptor has to wait, and can't."""
    sock, _ = parts.session()
    with sock:
        link = parts.control._worker._link
        assert link is not None
        while not link._outbox.waiting:
            link.send(jobmessages.DropStaging(0))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "dup", _no_dup)
            answer = call_without_worker(parts, sock)
        assert answer.status.code == common_pb2.CODE_EXHAUSTED
        assert "Too many open files" in answer.status.message
        assert parts.staging.used == 0
        parts.turn(lambda: not link._outbox.waiting)
        assert call(parts, sock, attach_staging={"size": 4096}).HasField("staging")
        assert store(parts, sock, os.urandom(32)) == 0
    parts.turn(lambda: not parts.staging.used)


def _no_dup(_fd: int) -> int:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def call_without_worker(parts: Room, sock: socket.socket) -> session_socket_pb2.Response:
    """AttachStaging's answer, while the worker does not read."""
    request = session_socket_pb2.Request(id=9, attach_staging={"size": 4096})
    sock.send(request.SerializeToString())
    got: list[bytes] = []

    def heard() -> bool:
        with contextlib.suppress(BlockingIOError):
            got.append(receive(sock))
        return bool(got)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts, "_work", lambda: None)
        parts.turn(heard)
    return session_socket_pb2.Response.FromString(got[0])


def test_a_worker_that_starts_with_too_few_descriptors_for_all_staging(
    parts: Room, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    sock, _ = parts.session()
    with sock:
        assert call(parts, sock, attach_staging={"size": 4096}).HasField("staging")
        worker = parts.control._worker
        ours, theirs = ipc.pair()
        with ours:
            worker.attach(theirs.detach(), 1, 0)
            worker.check()
            message, _ = ipc.receive(ours)
            assert isinstance(message, messages.Beat)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("kmesh_spand.control.link.Link.send", _lacking)
                ipc.send(ours, message)
                parts.turn(lambda: worker._started)
        assert "staging: Too many open files" in caplog.text
    parts.turn(lambda: not parts.handler.registry.members)
    worker._detach()


def _lacking(*_: object) -> None:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
