"""Asyncio sessions: cancellation, deadlines, guards."""

# The fake runs in another thread, which no asyncio.Event can tell of.
# ruff: noqa: ASYNC110

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kmesh import errors
from kmesh.aio import AsyncSession
from kmesh.layout import Shard
from kmesh.session import ReserveBatch, Role
from kmesh.store import put_spans, read_mapped
from kmesh.testing import FakeDaemon

SHARD = Shard(0, 2, 0, 2)


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


async def until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[FakeDaemon]:
    with FakeDaemon(socket_dir=tmp_path) as fake:
        yield fake


@pytest.fixture
def key(daemon: FakeDaemon) -> bytes:
    """Of a span that is stored."""
    name = os.urandom(32)
    with daemon.connect() as session:
        batch = ReserveBatch(b"n" * 32, SHARD, name, [64], [0], [500])
        assert put_spans(session, session.staging(500), batch, [bytes(500)]) == [0]
    return name


async def test_store_and_read(daemon: FakeDaemon, tmp_path: Path) -> None:
    async with await AsyncSession.connect(tmp_path, role=Role.TOOL) as session:
        payload = os.urandom(100_000)
        key = os.urandom(32)
        staging = await session.staging(len(payload))
        staging.view()[: len(payload)] = payload
        reserved = await session.reserve(
            ReserveBatch(b"n" * 32, SHARD, key, [64], [0], [len(payload)])
        )
        assert reserved.reason == [0]
        assert await session.commit(reserved.reservation, [0]) == [0]
        assert session.index.probe(key, [SHARD.code()]).hits == 1
        with await session.acquire(key, [SHARD]) as lease:
            slab = await session.slab(lease.slab[0])
            assert read_mapped(slab, lease, 0) == payload
            assert await session.report_corrupt(lease, [0]) == 1
        handle = await session.export_slab(0)
        os.close(handle.fd)
        assert await session.abort([12345]) == 0
        await session.ping()


async def test_a_cancelled_acquire_holds_nothing(
    daemon: FakeDaemon, tmp_path: Path, key: bytes
) -> None:
    async with await AsyncSession.connect(tmp_path, role=Role.TOOL) as session:
        with daemon.hold("acquire"):
            task = asyncio.create_task(session.acquire(key, [SHARD]))
            await until(lambda: daemon.leases == 1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert session.pending == 1
        await until(lambda: daemon.leases == 0 and session.pending == 0)


async def test_an_acquire_cancelled_just_as_it_is_answered_holds_nothing(
    daemon: FakeDaemon, tmp_path: Path, key: bytes
) -> None:
    async with await AsyncSession.connect(tmp_path, role=Role.TOOL) as session:
        for _ in range(5):
            task = asyncio.create_task(session.acquire(key, [SHARD]))
            await asyncio.sleep(0)
            # The answer is read while the task can't run; then the task is cancelled.
            while daemon.leases == 0:
                await asyncio.sleep(0)
            session._channel._readable()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await until(lambda: daemon.leases == 0 and session.pending == 0)


async def test_deadlines(daemon: FakeDaemon, tmp_path: Path, key: bytes) -> None:
    async with await AsyncSession.connect(tmp_path, role=Role.TOOL) as session:
        with daemon.hold("acquire"), pytest.raises(errors.DeadlineExceeded):
            await session.acquire(key, [SHARD], timeout=0.05)
        await until(lambda: daemon.leases == 0 and session.pending == 0)
        with daemon.hold("acquire"), pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await session.acquire(key, [SHARD])
        await until(lambda: daemon.leases == 0 and session.pending == 0)


async def test_many_calls_at_once(daemon: FakeDaemon, tmp_path: Path, key: bytes) -> None:
    async with await AsyncSession.connect(tmp_path, role=Role.TOOL) as session:
        for i in range(10):
            daemon.delay("acquire", 0.01 * (10 - i))
        leases = await asyncio.gather(*(session.acquire(key, [SHARD]) for _ in range(50)))
        assert [lease.hits for lease in leases] == [1] * 50
        slabs = await asyncio.gather(*(session.slab(0) for _ in range(10)))
        assert len({id(slab) for slab in slabs}) == 1
        # A lease may be given back from any thread.
        with ThreadPoolExecutor(1) as pool:
            for lease in leases:
                await asyncio.wrap_future(pool.submit(lease.release))
        await until(lambda: daemon.leases == 0)


async def test_the_end_of_the_connection(daemon: FakeDaemon, tmp_path: Path, key: bytes) -> None:
    async with await AsyncSession.connect(tmp_path, role=Role.TOOL) as session:
        lease = await session.acquire(key, [SHARD])
        ended = asyncio.Event()
        session.on_close(ended.set)
        daemon.delay("ping", 60)
        waiting = asyncio.create_task(session.ping())
        await asyncio.sleep(0.05)
        daemon.disconnect()
        with pytest.raises(errors.ConnectionClosed):
            await waiting
        await asyncio.wait_for(ended.wait(), 30)
        assert session.closed
        lease.release()
        with pytest.raises(errors.ConnectionClosed):
            await session.ping()


async def test_refusals(daemon: FakeDaemon, tmp_path: Path) -> None:
    before = open_fds()
    daemon.refuse("hello", errors.PermissionDenied("uid 7", field="peer.uid"))
    with pytest.raises(errors.PermissionDenied) as refused:
        await AsyncSession.connect(tmp_path, role=Role.TOOL)
    assert refused.value.field == "peer.uid"
    daemon.delay("hello", 60)
    with pytest.raises(errors.DaemonUnavailable, match="answer"):
        await AsyncSession.connect(tmp_path, role=Role.TOOL, timeout=0.05)
    with pytest.raises(errors.DaemonUnavailable):
        await AsyncSession.connect(tmp_path / "nowhere", role=Role.TOOL)
    await until(lambda: open_fds() == before)


async def test_another_loop_is_refused(daemon: FakeDaemon, tmp_path: Path) -> None:
    async with await AsyncSession.connect(tmp_path, role=Role.TOOL) as session:

        def elsewhere() -> None:
            with pytest.raises(RuntimeError, match="event loop"):
                asyncio.run(session.ping())

        await asyncio.to_thread(elsewhere)


async def test_the_descriptor_count_stays_flat(daemon: FakeDaemon, tmp_path: Path) -> None:
    before = open_fds()
    for _ in range(50):
        async with await AsyncSession.connect(tmp_path, role=Role.TOOL) as session:
            await session.staging(4096)
            await session.slab(0)
    await until(lambda: open_fds() == before)
