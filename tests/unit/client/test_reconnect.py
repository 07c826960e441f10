"""Clients find the daemon again, and say little while they can't."""

from __future__ import annotations

import asyncio
import logging
import queue
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kmesh import client as client_module
from kmesh import errors
from kmesh.aio import AsyncSession
from kmesh.client import (
    FIRST_DELAY,
    LAST_DELAY,
    REFUSED_DELAY,
    AsyncClient,
    Client,
    Reconnect,
)
from kmesh.session import Role, Session
from kmesh.testing import FakeDaemon


def until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come true"
        time.sleep(0.005)


def test_delays_grow_and_are_jittered() -> None:
    reconnect = Reconnect("/run/kmesh")
    delays = [reconnect.failed(errors.DaemonUnavailable("x")) for _ in range(20)]
    bound = FIRST_DELAY
    for delay in delays:
        assert bound / 2 <= delay <= bound
        bound = min(bound * 2, LAST_DELAY)
    assert len(set(delays[-10:])) > 1


def test_a_daemon_that_dies_at_once_is_not_hammered() -> None:
    reconnect = Reconnect("/run/kmesh")
    for _ in range(10):
        reconnect.connected(1)
        last = reconnect.lost(0.01)
    assert last >= LAST_DELAY / 2
    reconnect.connected(1)
    assert reconnect.lost(LAST_DELAY + 1) <= FIRST_DELAY


def test_an_outage_is_said_once_and_a_refusal_once_per_reason(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "kmesh")
    reconnect = Reconnect("/run/kmesh")
    for _ in range(5):
        reconnect.failed(errors.DaemonUnavailable("x"))
    assert len(caplog.records) == 1
    for field in ("layout_version", "layout_version", "protocol_version"):
        delay = reconnect.failed(errors.VersionMismatch("2 is not 1", field=field))
        assert delay == REFUSED_DELAY
    assert [r.levelname for r in caplog.records] == ["WARNING", "ERROR", "ERROR"]
    reconnect.connected(1)
    reconnect.lost(10)
    reconnect.failed(errors.DaemonUnavailable("x"))
    assert [r.levelname for r in caplog.records[3:]] == ["INFO", "WARNING"]


def test_absent_then_there_then_restarted_then_gone(tmp_path: Path) -> None:
    seen: queue.Queue[Session | None] = queue.Queue()
    with Client(tmp_path, role=Role.TOOL) as client:
        client.on_change(seen.put)
        assert client.session is None
        with pytest.raises(errors.DaemonUnavailable):
            client.wait(0.05)
        with FakeDaemon(socket_dir=tmp_path) as daemon:
            first = client.wait(30)
            assert seen.get(timeout=30) is first
            assert first.epoch == daemon.epoch
            first.ping()
            daemon.restart()
            assert seen.get(timeout=30) is None
            second = client.wait(30)
            assert seen.get(timeout=30) is second
            assert second.epoch == daemon.epoch != first.epoch
            assert first.index.poisoned
            late: queue.Queue[Session | None] = queue.Queue()
            client.on_change(late.put)
            assert late.get_nowait() is second
        until(lambda: client.session is None)
        assert seen.get(timeout=30) is None
    assert second.closed


def test_a_failing_callback_stops_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def fails(_: object) -> None:
        raise ValueError("mine")

    with FakeDaemon(socket_dir=tmp_path) as daemon, Client(tmp_path, role=Role.TOOL) as client:
        client.on_change(fails)
        client.wait(30)
        until(lambda: "mine" in caplog.text)
        daemon.disconnect()
        until(lambda: client.session is None)
        client.wait(30).ping()
    # The tracebacks hold frames, and those the sessions.
    caplog.clear()


def test_close_from_a_callback_and_while_connecting(tmp_path: Path) -> None:
    with FakeDaemon(socket_dir=tmp_path) as daemon:
        client = Client(tmp_path, role=Role.TOOL)
        # In the caller's thread, where the client's own waits for the callback's end.
        client.wait(30)
        client.on_change(lambda session: client.close())
        until(lambda: not client._thread.is_alive())
        client.close()
        client = Client(tmp_path, role=Role.TOOL)
        client.on_change(lambda session: client.close())
        until(lambda: not client._thread.is_alive())
        client.close()
        until(lambda: daemon.sessions == 0)
        daemon.delay("hello", 0.2)
        client = Client(tmp_path, role=Role.TOOL)
        client.close()
        assert client.session is None


def test_a_refused_client_waits_long_and_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(client_module, "REFUSED_DELAY", 0.3)
    with FakeDaemon(socket_dir=tmp_path) as daemon:
        daemon.refuse("hello", errors.VersionMismatch("2 is not 1", field="layout_version"), 2)
        began = time.monotonic()
        with Client(tmp_path, role=Role.TOOL) as client:
            client.wait(30)
            assert time.monotonic() - began >= 0.6
    assert caplog.text.count("layout_version") == 1


async def test_the_same_in_asyncio(tmp_path: Path) -> None:
    seen: asyncio.Queue[AsyncSession | None] = asyncio.Queue()
    async with AsyncClient(tmp_path, role=Role.TOOL) as client:
        client.on_change(seen.put_nowait)
        assert client.session is None
        with pytest.raises(errors.DaemonUnavailable):
            await client.wait(0.05)
        with FakeDaemon(socket_dir=tmp_path) as daemon:
            first = await client.wait(30)
            assert await seen.get() is first
            daemon.restart()
            assert await asyncio.wait_for(seen.get(), 30) is None
            second = await client.wait(30)
            assert await seen.get() is second
            assert second.epoch == daemon.epoch != first.epoch
            await second.ping()
        assert await asyncio.wait_for(seen.get(), 30) is None
        assert client.session is None
