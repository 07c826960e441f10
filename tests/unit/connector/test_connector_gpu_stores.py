"""Stores out of pages on a GPU: a fake driver, kernels that are the reference."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from fake_gpu_streams import COMPUTE, FakeGpu
from gpu_cases import DIGEST, SPAN_BYTES, Make, promised, prompt, stored_by, warm
from mini_engine import WAIT, until

from kmesh.errors import CudaError
from kmesh.kernels.cuda import Settings
from kmesh.testing import FakeDaemon
from kmesh_vllm import gpustore, saving
from kmesh_vllm.movers import empty_records


def test_pages_are_read_before_the_next_step_writes_them(engine: Make, daemon: FakeDaemon) -> None:
    gpu = FakeGpu()
    one = engine("a", gpu=gpu)
    mover: Any = one.workers[0]._mover
    until(mover.ready, WAIT)
    gpu.held = True
    one.scheduler.add("r", prompt(128), DIGEST)
    blocks = [3, 1, 4, 2]
    step = one.scheduler.plan([("r", blocks, 0, 128)], [])
    one.run(step, lambda: gpu.start(COMPUTE, lambda: one.compute(7, blocks, 0, 128)))
    # The request is preempted, and its blocks are another's in the next step.
    gpu.start(COMPUTE, lambda: one.compute(55, blocks, 0, 128))
    gathering = mover._store._gathering
    gpu.run(only=[gathering])
    gpu.run(only=[COMPUTE])
    assert one.wrong(7, blocks, 0, 128) == [], "the next step did not wait"
    gpu.run(only=[gathering, COMPUTE])
    # The pages were read, and a thread waits until the bytes are in staging.
    until(lambda: gpu.asked[mover._store._fetched] > 0, WAIT)
    assert (daemon.spans, daemon.reservations) == (0, 2)
    gpu.run()
    gpu.held = False
    until(lambda: daemon.spans == 2, WAIT)
    assert one.wrong(55, blocks, 0, 128) == []
    other = engine("b")
    assert promised(other, "s", [*prompt(128), 1]) == 128
    assert not other.load("s", blocks, 128, WAIT).bad_blocks
    assert other.wrong(7, blocks, 0, 128) == []


def test_nothing_is_committed_before_it_was_copied(engine: Make, daemon: FakeDaemon) -> None:
    gpu = FakeGpu()
    one = engine("a", gpu=gpu)
    mover: Any = one.workers[0]._mover
    until(mover.ready, WAIT)
    reached: list[int] = []

    def watch(name: str) -> None:
        if name == "fetch":
            reached.append(daemon.spans)
            raise CudaError("cuMemcpyDtoHAsync_v2", 999, "CUDA_ERROR_UNKNOWN")

    gpu.refuse = watch
    one.scheduler.add("r", prompt(128), DIGEST)
    one.prefill("r", 7, [1, 2, 3, 4], 0, 128)
    until(lambda: bool(reached) and daemon.reservations == 0, WAIT)
    assert reached == [0]
    assert daemon.spans == 0
    until(lambda: one.workers[0].counts.take().get("store_skipped_error") == 2, WAIT)
    gpu.refuse = lambda name: None
    # The buffer and the staging have all their room again.
    assert mover._store._ring.used == 0
    stored_by(one, daemon, prompt(192, seed=2), seed=5, name="next")


@pytest.mark.parametrize("reads", [False, True])
def test_a_gpu_that_hangs_while_it_stores(
    engine: Make,
    daemon: FakeDaemon,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    reads: bool,
) -> None:
    """Nobody waits for ever, and what it may still use is used for nothing else until it ends."""
    monkeypatch.setattr(gpustore, "_DEVICE_WAIT", 0.05)
    gpu = FakeGpu()
    one = engine("a", gpu=gpu)
    mover: Any = one.workers[0]._mover
    until(mover.ready, WAIT)
    gpu.held = True
    one.scheduler.add("r", prompt(128), DIGEST)
    one.prefill("r", 7, [1, 2, 3, 4], 0, 128)
    if reads:
        gpu.run(only=[COMPUTE, mover._store._gathering])
    until(lambda: daemon.reservations == 0, WAIT)
    assert daemon.spans == 0
    assert mover._store.stuck
    one.scheduler.add("s", prompt(128, seed=3), DIGEST)
    one.prefill("s", 7, [1, 2, 3, 4], 0, 128)
    until(lambda: daemon.reservations == 0, WAIT)
    assert mover._store._ring.used == 2 * SPAN_BYTES
    assert mover._store.stuck
    assert caplog.text.count("the GPU does not end") == 1
    # Fetched late, into staging that nobody reads any more.
    gpu.held = False
    gpu.run()
    assert not mover._store.stuck
    assert daemon.spans == 0
    until(lambda: mover._store._ring.used == 0, WAIT)
    monkeypatch.undo()
    stored_by(one, daemon, prompt(192, seed=2), seed=5, name="next")
    assert caplog.text.count("the GPU has ended") == 1


def test_staging_of_a_later_session_stays_when_an_earlier_one_is_written(
    daemon: FakeDaemon,
) -> None:
    """It may be there before the last spans of the earlier session are put."""
    from paged_reference import Engine

    pages = Engine.make(order="NHD", layers=2, heads=2, slots=16, row=64, gap=0, blocks=4)
    gpu = FakeGpu()
    store = gpustore.GpuStore(gpu, pages.layout, Settings(), 1 << 20)
    with daemon.connect() as first, daemon.connect() as second:
        given = [session.staging(4096) for session in (first, second)]
        for staging in given:
            store.prepare(staging)
        store.fetch(empty_records(0), [], given[0])
        assert gpu.driver._registered.keys() == {staging.address for staging in given}
        store.fetch(empty_records(0), [], given[1])
        assert gpu.driver._registered.keys() == {given[1].address}
        store.close()
    gpu.close()
    assert not any(gpu.driver.ledger().values())


@pytest.mark.parametrize("room", [2, 16])
def test_a_session_that_has_ended_keeps_no_store_waiting(
    engine: Make, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    """Neither for room in its staging nor for copies that nobody commits."""
    monkeypatch.setattr(saving, "_PUT_TIMEOUT", 1000.0)
    gpu = FakeGpu()
    settings = {"staging_bytes": room * SPAN_BYTES, "reserve_timeout_ms": 30_000}
    one = engine("a", gpu=gpu, **settings)
    mover: Any = one.workers[0]._mover
    until(mover.ready, WAIT)
    fetched: list[str] = []
    gpu.refuse = lambda name: fetched.append(name) if name == "fetch" else None
    gpu.held = True
    one.scheduler.add("r", prompt(320), DIGEST)
    one.prefill("r", 7, list(range(10)), 0, 320)
    one.scheduler.add("s", prompt(128, seed=3), DIGEST)
    one.prefill("s", 8, list(range(10, 14)), 0, 128)
    # The first waits for the GPU when the session ends.
    until(lambda: "kmesh-store_0" in gpu.driver.relaxed, WAIT)
    session = one.workers_client.session
    assert session is not None
    session.close()
    gpu.held = False
    gpu.run()
    until(lambda: mover._store._ring.used == 0, WAIT)
    assert len(fetched) == 1
    assert daemon.spans == 0


def test_staging_that_can_not_be_registered_is_tried_again(
    engine: Make, daemon: FakeDaemon, caplog: pytest.LogCaptureFixture
) -> None:
    """The session would not give it a second time."""
    gpu = FakeGpu()
    one = engine("a", gpu=gpu, reserve_timeout_ms=30_000)
    mover: Any = one.workers[0]._mover
    until(mover.ready, WAIT)

    def refuse(name: str) -> None:
        if name == "register" and threading.current_thread().name.startswith("kmesh-reserve"):
            raise CudaError(name, 2, "CUDA_ERROR_OUT_OF_MEMORY")

    gpu.driver.refuse = refuse
    saver: Any = one.workers[0]._saver
    for name in ("r", "s"):
        one.scheduler.add(name, prompt(128), DIGEST)
        saver._reserver._ask_at = 0.0
        one.prefill(name, 7, [1, 2, 3, 4], 0, 128)
        assert one.workers[0].counts.take() == {"store_skipped_staging": 2}
    assert caplog.text.count("staging memory: register") == 2
    gpu.driver.refuse = None
    saver._reserver._ask_at = 0.0
    stored_by(one, daemon, prompt(192, seed=2), seed=5, name="next")


def test_what_the_buffer_has_no_room_for_is_skipped(engine: Make, daemon: FakeDaemon) -> None:
    gpu = FakeGpu()
    one = engine("a", gpu=gpu, store_buffer_bytes=3 * SPAN_BYTES, reserve_timeout_ms=200)
    mover: Any = one.workers[0]._mover
    until(mover.ready, WAIT)
    gpu.held = True
    one.scheduler.add("r", prompt(320), DIGEST)
    one.prefill("r", 7, list(range(10)), 0, 320)
    assert one.workers[0].counts.take() == {"store_skipped_staging": 2}
    gpu.run()
    gpu.held = False
    until(lambda: daemon.spans == 3 and daemon.reservations == 0, WAIT)
    other = engine("b")
    assert promised(other, "s", prompt(320)) == 192


def test_a_buffer_smaller_than_a_step_is_used_in_turns(engine: Make, daemon: FakeDaemon) -> None:
    one = engine("a", gpu=FakeGpu(), store_buffer_bytes=2 * SPAN_BYTES, reserve_timeout_ms=30_000)
    stored_by(one, daemon, prompt(400))
    other = engine("b")
    assert promised(other, "s", prompt(400)) == 384
    assert not other.load("s", list(range(12)), 384, WAIT).bad_blocks
    assert other.wrong(7, list(range(12)), 0, 384) == []


def test_staging_smaller_than_the_buffer_is_used_in_turns(engine: Make, daemon: FakeDaemon) -> None:
    one = engine("a", gpu=FakeGpu(), staging_bytes=2 * SPAN_BYTES)
    stored_by(one, daemon, prompt(400))
    other = engine("b")
    assert promised(other, "s", prompt(400)) == 384
    blocks = list(range(12))
    assert not other.load("s", blocks, 384, WAIT).bad_blocks
    assert other.wrong(7, blocks, 0, 384) == []


def test_no_step_waits_for_kernels_or_reserves_without(engine: Make, daemon: FakeDaemon) -> None:
    gpu = FakeGpu()
    compiled = threading.Event()

    def hold(name: str) -> None:
        if name == "restore" and threading.current_thread().name.startswith("kmesh-kernels"):
            assert compiled.wait(WAIT)

    gpu.refuse = hold
    one = engine("a", gpu=gpu, reserve_timeout_ms=1_000_000)
    saver: Any = one.workers[0]._saver
    one.scheduler.add("r", prompt(128), DIGEST)
    one.prefill("r", 7, [1, 2, 3, 4], 0, 128)
    assert not compiled.is_set()
    assert one.workers[0].counts.take() == {"store_skipped_late": 2}
    assert saver._reserver._staging is None, "something was reserved"
    # Asked for before, taken after: nothing waits there either.
    assert one.workers[0]._mover.take(empty_records(2), np.arange(4)).count == 0  # type: ignore[union-attr]
    compiled.set()
    stored_by(one, daemon, prompt(192, seed=2), seed=5, name="next")


@pytest.mark.parametrize("call", ["record", "follow", "store", "allocate", "wait"])
def test_a_store_that_fails_is_skipped(engine: Make, daemon: FakeDaemon, call: str) -> None:
    gpu = FakeGpu()
    one = engine("a", gpu=gpu)
    mover: Any = one.workers[0]._mover
    until(mover.ready, WAIT)

    def refuse(name: str) -> None:
        if name == call:
            raise CudaError(name, 999, "CUDA_ERROR_UNKNOWN")

    gpu.refuse = refuse
    one.scheduler.add("r", prompt(128), DIGEST)
    one.prefill("r", 7, [1, 2, 3, 4], 0, 128)
    until(lambda: daemon.reservations == 0, WAIT)
    gpu.refuse = lambda name: None
    assert daemon.spans == 0
    until(lambda: mover._store._ring.used == 0, WAIT)
    stored_by(one, daemon, prompt(192, seed=2), seed=5, name="next")


def test_closed_while_it_restores_and_stores(engine: Make, daemon: FakeDaemon) -> None:
    """It waits for what the GPU still does, and then nothing is left."""
    stored_by(engine("a"), daemon, prompt(192))
    gpu = FakeGpu()
    other = engine("b", gpu=gpu)
    warm(other, daemon)
    stored_by(other, daemon, prompt(128, seed=6), seed=2)
    assert promised(other, "r", prompt(192)) == 160
    gpu.held = True
    other.scheduler.allocated("r", [1, 2, 3, 4, 5], 160)
    other.run(other.scheduler.plan([], []))
    closing = threading.Thread(target=other.workers[0].close)
    closing.start()
    loader: Any = other.workers[0]._loader
    until(lambda: loader._preparer._threads._shutdown, WAIT)
    assert gpu.driver.ledger()["registered"] > 0, "memory went while it was read"
    gpu.run()
    gpu.held = False
    closing.join(WAIT)
    assert not closing.is_alive()
    assert gpu.open == 0
    assert not any(gpu.driver.ledger().values())
    assert other.wrong(7, [1, 2, 3, 4, 5], 0, 160) == []
