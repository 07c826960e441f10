"""Sessions and what comes over the socket: descriptors, handles and packets that are wrong."""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from session_cases import MEMFD, SHARD, Raw, open_fds, until

from kmesh import errors
from kmesh.channel import MAX_UNSENT
from kmesh.fake_state import create_memfd
from kmesh.layout import sums_offset
from kmesh.session import Session
from kmesh.v1 import session_socket_pb2 as frames
from kmesh.v1 import sessions_pb2, spans_pb2


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
