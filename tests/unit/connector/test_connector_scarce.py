"""An engine that can't map what the daemon gives it: it recomputes, skips, counts, and goes on."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest import mock

import pytest
from fake_gpu_streams import FakeGpu
from gpu_cases import stored_by
from mini_engine import NAMESPACE, MiniEngine, until

from kmesh import memory
from kmesh.testing import FakeDaemon

DIGEST = NAMESPACE.digest()
Make = Callable[..., MiniEngine]
BLOCKS = [5, 1, 2, 9]


def lacking(*_: object, **__: object) -> None:
    raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))


def prompt(count: int) -> list[int]:
    return [i * 31 % 5000 for i in range(count)]


def test_a_slab_that_can_not_be_mapped(
    engine: Make, daemon: FakeDaemon, caplog: pytest.LogCaptureFixture
) -> None:
    one = engine("a")
    one.scheduler.add("first", prompt(128), DIGEST)
    one.prefill("first", 7, [1, 2, 3, 4], 0, 128)
    until(lambda: daemon.spans == 2)
    one.scheduler.finished("first")
    other = engine("b")
    other.scheduler.add("r", prompt(128), DIGEST)
    assert other.match("r", 0, 128) == 96
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "Mapping", lacking)
        outcome = other.load("r", BLOCKS[:3], 96)
    # All of its blocks are named, and no byte of them was written.
    assert outcome.bad_blocks == set(BLOCKS[:3])
    assert other.workers[0].counts.take() == {"load_failed_error": 1}
    assert "a load failed: [Errno 12] Cannot allocate memory" in caplog.text
    assert "Traceback" not in caplog.text
    other.scheduler.finished("r")
    until(lambda: daemon.leases == 0)
    # The session is the same; when there is memory again, it restores.
    until(lambda: other.workers_client.session is not None)
    assert other.workers_client.session is not None
    assert not other.workers_client.session.closed


def test_staging_that_can_not_be_mapped(
    engine: Make, daemon: FakeDaemon, caplog: pytest.LogCaptureFixture
) -> None:
    one = engine("a")
    one.scheduler.add("r", prompt(128), DIGEST)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "Mapping", lacking)
        one.prefill("r", 7, BLOCKS, 0, 128)
    assert one.workers[0].counts.take() == {"store_skipped_staging": 2}
    assert "nothing is stored: no staging memory: [Errno 12]" in caplog.text
    assert (daemon.spans, daemon.reservations) == (0, 0)
    # The step was computed all the same.
    assert one.wrong(7, BLOCKS, 0, 128) == []


def without_thread(name: str) -> AbstractContextManager[object]:
    """While it lasts, no thread of such a name is to be had."""
    start = threading.Thread.start

    def refused(thread: threading.Thread) -> None:
        if thread.name.startswith(name):
            raise RuntimeError("can't start new thread")
        start(thread)

    return mock.patch.object(threading.Thread, "start", refused)


@pytest.mark.parametrize(
    ("name", "gpu"), [("kmesh-reserve", False), ("kmesh-reserve", True), ("kmesh-store", True)]
)
def test_a_store_for_which_there_is_no_thread(
    engine: Make, daemon: FakeDaemon, caplog: pytest.LogCaptureFixture, name: str, gpu: bool
) -> None:
    """The step goes on, and nothing of the store is reserved or kept; the next one finds one."""
    one = engine("a", gpu=FakeGpu() if gpu else None)
    mover: Any = one.workers[0]._mover
    until(mover.ready)
    one.scheduler.add("lost", prompt(128), DIGEST)
    with without_thread(name):
        one.prefill("lost", 7, BLOCKS, 0, 128)
    assert one.wrong(7, BLOCKS, 0, 128) == []
    assert one.workers[0].counts.take() == {"store_skipped_error": 2}
    assert caplog.messages == ["a store failed: can't start new thread"]
    until(lambda: daemon.reservations == 0)
    stored_by(one, daemon, prompt(192)[64:], seed=8)
    assert (daemon.spans, daemon.reservations) == (2, 0)
    if gpu:
        until(lambda: mover._store._ring.used == 0)


@pytest.mark.parametrize("pool", ["kmesh-load", "kmesh-wait"])
def test_a_load_for_which_there_is_no_thread(
    engine: Make, daemon: FakeDaemon, caplog: pytest.LogCaptureFixture, pool: str
) -> None:
    """The step goes on without it; the next load finds one."""
    one, other = engine("a"), engine("b")
    for turn in range(2):
        name, tokens = f"{turn}", prompt(128)[turn:]
        one.scheduler.add(name, tokens, DIGEST)
        assert one.match(name, 0, len(tokens)) == 0
        one.prefill(name, 7, [1, 2, 3, 4], 0, len(tokens))
        until(lambda: daemon.spans == 2 + 2 * turn)  # noqa: B023
        one.scheduler.finished(name)
        other.scheduler.add(name, tokens, DIGEST)
        assert other.match(name, 0, len(tokens)) == 96
        with nullcontext() if turn else without_thread(pool):
            outcome = other.load(name, BLOCKS[:3], 96)
        assert outcome.bad_blocks == (set() if turn else set(BLOCKS[:3]))
        other.scheduler.finished(name)
        until(lambda: daemon.leases == 0)
    assert other.workers[0].counts.take()["load_failed_error"] == 1
    assert other.wrong(7, BLOCKS[:3], 0, 96) == []
    assert caplog.messages == ["a load failed: can't start new thread"]
