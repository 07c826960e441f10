"""Exports through a real daemon, on any machine: where one makes a DMA-BUF, memfds are made.

Real ones are in ``tests/vm``.
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from daemon_process import Daemon, wait_for
from leaks import open_fds
from probe import Faults, without_files
from rawclient import SHARD, RawClient, Refused

from kmesh import errors
from kmesh.handles import HandleKind, Tier
from kmesh.layout import Shard
from kmesh.session import Role, Session
from kmesh.v1 import common_pb2, spans_pb2

DMA_BUF = common_pb2.HANDLE_KIND_DMA_BUF
KEY = b"k" * 32


@contextmanager
def running() -> Iterator[Daemon]:
    base = Path(tempfile.mkdtemp(prefix="kmesh-"))
    faults = Faults(base / "faults")
    faults.begin("pretend")
    daemon = Daemon(base / "s", dma_buf="slabs", **faults.settings)
    try:
        daemon.wait_populated()
        with RawClient(daemon.socket_dir) as client:
            assert client.store(KEY, b"x" * 5000) == 0
        yield daemon
    finally:
        daemon.stop()
        daemon.kill()
        shutil.rmtree(base)


@pytest.fixture(scope="module")
def exporting() -> Iterator[Daemon]:
    with running() as daemon:
        yield daemon


def pretended(daemon: Daemon) -> list[str]:
    """What control and worker hold of what was made."""
    found = []
    for name in ("control", "worker"):
        folder = f"/proc/{daemon.child(name)}/fd"
        for fd in os.listdir(folder):
            try:
                link = os.readlink(f"{folder}/{fd}")
            except OSError:
                continue
            if "kmesh-pretended" in link:
                found.append(name)
    return found


def export(client: RawClient) -> dict[str, Any]:
    lease = client.acquire([KEY]).lease
    return {"lease": lease, "entry": 0, "kind": DMA_BUF}


def test_a_client_does_not_take_a_memfd_for_a_dma_buf(exporting: Daemon) -> None:
    with Session.connect(
        exporting.socket_dir,
        role=Role.TOOL,
        handles={Tier.HOST: (HandleKind.DMA_BUF, HandleKind.MEMFD)},
    ) as session:
        assert session.welcome.handles[Tier.HOST].chosen == HandleKind.DMA_BUF
        shard = Shard(SHARD.layer_begin, SHARD.layer_end, SHARD.head_begin, SHARD.head_end)
        with session.acquire(KEY, [shard]) as lease:
            before = open_fds()
            for attempt in (lambda: session.export_span(lease, 0), lambda: session.slab(0)):
                with pytest.raises(errors.ProtocolError, match="called a DMA-BUF is none"):
                    attempt()
            # Channels of gRPC that were closed before may let go of theirs only now.
            assert not open_fds() - before
        # The broker gave what it could, and its word is not what the client goes by.
        memfd = session.export_slab(0, kind=HandleKind.MEMFD)
        assert memfd.kind == HandleKind.MEMFD
        os.close(memfd.fd)


def test_an_export_that_nobody_waits_for_leaves_nothing(exporting: Daemon) -> None:
    """Its lease, or its session, ends while it is being made."""
    worker = exporting.child("worker")
    with RawClient(exporting.socket_dir) as gone, RawClient(exporting.socket_dir) as client:
        request = export(client)
        os.kill(worker, signal.SIGSTOP)
        try:
            gone.send(export_span=export(gone))
            gone.close()
            number = client.send(export_span=request)
            client.send(release=spans_pb2.ReleaseRequest(leases=[request["lease"]]))
            released, _ = client.receive()
            assert released.release.released == 1
        finally:
            os.kill(worker, signal.SIGCONT)
        answer, fds = client.receive()
        assert (answer.id, answer.status.code, fds) == (number, common_pb2.CODE_NOT_FOUND, [])
        client.call(attach_slab={"slab": 0, "kind": DMA_BUF})
    # Control keeps one for the slab, for those who come.
    wait_for(lambda: pretended(exporting) == ["control"], 30)


def test_a_store_worker_that_dies_fails_its_exports_and_no_others() -> None:
    with running() as daemon, RawClient(daemon.socket_dir) as client:
        request = export(client)
        worker = daemon.child("worker")
        os.kill(worker, signal.SIGSTOP)
        client.send(export_span=request)
        # It was read when what came behind it is answered.
        client.send(ping={})
        assert client.receive()[0].WhichOneof("body") == "pong"
        os.kill(worker, signal.SIGKILL)
        answer, fds = client.receive()
        assert (answer.status.code, fds) == (common_pb2.CODE_EXHAUSTED, [])
        assert "store worker died" in answer.status.message

        def again() -> bool:
            try:
                handle, (fd,) = client.call(export_span=request)
            except Refused:
                return False
            return (handle.size, handle.length, os.fstat(fd).st_size) == (8192, 5000, 8192)

        wait_for(again, 30)
        wait_for(lambda: pretended(daemon) == [], 30)


def test_an_export_that_control_has_no_descriptor_for_fails_alone(exporting: Daemon) -> None:
    """The kernel leaves it out of the worker's message; the way to the worker stays."""
    control, worker = exporting.child("control"), exporting.child("worker")
    with RawClient(exporting.socket_dir) as client:
        request = export(client)
        with without_files(control), pytest.raises(Refused, match="no file descriptor left for it"):
            client.call(export_span=request)
        assert client.store(b"n" * 32, b"stored through the same worker") == 0
        _, (fd,) = client.call(export_span=request)
        os.close(fd)
    assert exporting.child("worker") == worker
    assert exporting.status().worker_restarts == 0
