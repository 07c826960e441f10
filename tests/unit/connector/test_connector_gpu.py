"""Pages on a GPU: streams that a test lets run, kernels that are the reference, a fake driver."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from fake_cuda import refuse_nth
from fake_gpu_streams import COMPUTE, FakeGpu
from mini_engine import LAYERS, NAMESPACE, WAIT, MiniEngine, until

from kmesh.cuda import proof
from kmesh.cuda.driver import Attribute
from kmesh.errors import CudaError, UnsupportedError
from kmesh.handles import HandleKind
from kmesh.kernels.cuda import Memory, Settings
from kmesh.testing import FakeDaemon
from kmesh_vllm import gpumemory, gpumover, gpustore, saving
from kmesh_vllm.counts import Counts
from kmesh_vllm.gpumemory import GpuMemory
from kmesh_vllm.gpumover import GpuMover
from kmesh_vllm.movers import Piece, empty_records

DIGEST = NAMESPACE.digest()
SPAN_BYTES = NAMESPACE.layers * 2 * NAMESPACE.kv_heads * 64 * NAMESPACE.head_dim * 4
Make = Callable[..., MiniEngine]
#: Generous: what is waited for happens soon, unless the machine does something else.


def prompt(count: int, seed: int = 0) -> list[int]:
    return [(i * 31 + seed * 977) % 5000 for i in range(count)]


def stored_by(
    engine: MiniEngine, daemon: FakeDaemon, tokens: list[int], seed: int = 7, name: str = "first"
) -> None:
    """One engine computes a whole prompt and stores it."""
    before = daemon.spans
    engine.scheduler.add(name, tokens, DIGEST)
    assert engine.match(name, 0, len(tokens)) == 0
    blocks = list(range(1, -(-len(tokens) // engine.block) + 1))[::-1]
    engine.scheduler.allocated(name, blocks, 0)
    # What comes before its kernels are compiled is not stored.
    mover: Any = engine.workers[0]._mover
    until(mover.ready, WAIT)
    engine.prefill(name, seed, blocks, 0, len(tokens))
    spans = len(tokens) // 64 + (len(tokens) % 64 >= 16)
    until(lambda: daemon.spans == before + spans, WAIT)
    engine.scheduler.finished(name)


def promised(engine: MiniEngine, name: str, tokens: list[int]) -> int:
    """A new request for which a restore is promised."""
    engine.scheduler.add(name, tokens, DIGEST)
    return engine.match(name, 0, len(tokens), WAIT)


def warm(engine: MiniEngine, daemon: FakeDaemon) -> None:
    """Waits until the background has attached the slab, which the daemon has filled."""
    (slab,) = daemon._model.slabs
    os.posix_fallocate(slab.fd, 0, slab.memory.size)
    mover: Any = engine.workers[0]._mover
    session = engine.workers_client.session
    until(lambda: mover.attached(session, 0) is not None, WAIT)


@pytest.mark.parametrize(
    "layout",
    [
        {"block": 16},
        {"block": 32, "heads_last": True},
        {"block": 64, "kernel_block": 16},
        {"block": 128, "kernel_block": 32, "heads_last": True},
    ],
)
def test_what_one_gpu_stores_another_restores(
    engine: Make, daemon: FakeDaemon, layout: dict[str, Any]
) -> None:
    stored_by(engine("a", gpu=FakeGpu(), **layout), daemon, prompt(270))
    other = engine("b", gpu=FakeGpu(), **layout)
    found = promised(other, "r", prompt(270))
    assert found == 256
    blocks = [11, 3, 8, 2, 9, 4, 7, 1, 10, 5, 13, 6, 12, 16, 14, 15][: found // other.block]
    assert not other.load("r", blocks, found, WAIT).bad_blocks
    assert other.wrong(7, blocks, 0, found) == []
    counted = other.workers[0].counts.take()
    assert counted["restored_bytes_kernel"] == counted["restored_bytes"] > 0
    until(lambda: daemon.leases == 0, WAIT)


def test_host_and_gpu_engines_share_spans(engine: Make, daemon: FakeDaemon) -> None:
    stored_by(engine("a"), daemon, prompt(200))
    other = engine("b", gpu=FakeGpu())
    assert promised(other, "r", prompt(200)) == 192
    assert not other.load("r", [5, 1, 2, 9, 7, 3], 192, WAIT).bad_blocks
    assert other.wrong(7, [5, 1, 2, 9, 7, 3], 0, 192) == []
    stored_by(other, daemon, prompt(130, seed=3), seed=8)
    third = engine("c")
    assert promised(third, "s", prompt(130, seed=3)) == 128
    assert not third.load("s", [4, 2, 1, 3], 128, WAIT).bad_blocks
    assert third.wrong(8, [4, 2, 1, 3], 0, 128) == []


def test_loads_of_one_step_go_out_in_one_launch_and_share_what_is_equal(
    engine: Make, daemon: FakeDaemon
) -> None:
    one = engine("a")
    stored_by(one, daemon, prompt(200))
    stored_by(one, daemon, prompt(100, seed=4), seed=9, name="second")
    gpu = FakeGpu()
    other = engine("b", gpu=gpu, sharing=False)
    warm(other, daemon)
    wanted = {"r": (prompt(200), 192, 7), "s": (prompt(200), 192, 7), "t": (prompt(100, 4), 96, 9)}
    at = 1
    places = {}
    for name, (tokens, found, _) in wanted.items():
        assert promised(other, name, tokens) == found
        places[name] = list(range(at, at + found // 32))
        at += found // 32
        other.scheduler.allocated(name, places[name], found)
    other.run(other.scheduler.plan([], []))
    # Started by the engine's own thread, before it goes on: three requests, two different loads.
    assert gpu.launches == [("restore", Memory.HOST, 2, 3)]
    ended: set[str] = set()
    until(lambda: not ended.update(other.workers[0].finished()) and ended == set(wanted), WAIT)
    assert not other.workers[0].bad_blocks()
    other.scheduler.worked(None, ended)
    for name, (_, found, seed) in wanted.items():
        assert other.wrong(seed, places[name], 0, found) == []


def test_a_restore_waits_for_what_the_engine_has_started(engine: Make, daemon: FakeDaemon) -> None:
    """Blocks may have been given to it while the step that used them last still runs."""
    stored_by(engine("a"), daemon, prompt(200))
    gpu = FakeGpu()
    other = engine("b", gpu=gpu)
    warm(other, daemon)
    blocks = [5, 1, 2, 9, 7, 3]
    assert promised(other, "r", prompt(200)) == 192
    gpu.held = True
    gpu.start(COMPUTE, lambda: other.compute(99, blocks, 0, 192))
    other.scheduler.allocated("r", blocks, 192)
    other.run(other.scheduler.plan([], []))
    loading: Any = other.workers[0]._mover
    gpu.run(only=[loading._stream])
    assert other.wrong(7, blocks, 0, 192) == list(range(192)), "it did not wait"
    assert other.workers[0].finished() == set()
    gpu.run()
    assert not other.settle("r", WAIT).bad_blocks
    assert other.wrong(7, blocks, 0, 192) == []


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


def test_pages_of_a_bad_span_hold_rubbish_and_all_of_them_are_named(
    engine: Make, daemon: FakeDaemon
) -> None:
    stored_by(engine("a"), daemon, prompt(256))
    other = engine("b", gpu=FakeGpu())
    assert promised(other, "r", prompt(256)) == 224
    key = other.scheduler._states["r"].chain(64, 16).key(1)
    daemon.corrupt(key, other.identity.sharding.shards[0])
    blocks = [11, 12, 13, 14, 15, 16, 17]
    outcome = other.load("r", blocks, 224, WAIT)
    assert outcome.bad_blocks == {13, 14}
    assert other.wrong(7, blocks, 0, 224) == list(range(64, 128))
    assert other.match("r", 0, 256) == 0
    assert other.scheduler.finished("r") == {"kmesh": {"restored_tokens": 64}}
    until(lambda: daemon.leases == 0, WAIT)
    assert other.workers[0].counts.take()["load_failed_corrupt"] == 1


def test_bad_blocks_are_told_no_later_than_the_end(engine: Make, daemon: FakeDaemon) -> None:
    """Until both are told, nothing is: vLLM would take the blocks for good."""
    stored_by(engine("a"), daemon, prompt(256))
    gpu = FakeGpu()
    other = engine("b", gpu=gpu)
    warm(other, daemon)
    assert promised(other, "r", prompt(256)) == 224
    key = other.scheduler._states["r"].chain(64, 16).key(0)
    daemon.corrupt(key, other.identity.sharding.shards[0])
    gpu.held = True
    other.scheduler.allocated("r", [1, 2, 3, 4, 5, 6, 7], 224)
    other.run(other.scheduler.plan([], []))
    (worker,) = other.workers
    for _ in range(50):
        assert worker.finished() == set()
        assert worker.bad_blocks() == set()
        gpu.run(steps=1)
        if worker.finished():
            break
    else:
        pytest.fail("it never ended")
    assert worker.bad_blocks() == {1, 2}


def test_a_restore_under_way_is_waited_for_beyond_its_time(
    engine: Make, daemon: FakeDaemon
) -> None:
    stored_by(engine("a"), daemon, prompt(192))
    gpu = FakeGpu()
    now = [0.0]
    other = engine("b", gpu=gpu, load_timeout_ms=1000)
    other.workers[0]._loader._clock = lambda: now[0]  # type: ignore[union-attr]
    warm(other, daemon)
    assert promised(other, "r", prompt(192)) == 160
    gpu.held = True
    other.scheduler.allocated("r", [1, 2, 3, 4, 5], 160)
    other.run(other.scheduler.plan([], []))
    now[0] = 1e6
    # Its pages are being written: who ends it now gives them to somebody else.
    assert other.workers[0].finished() == set()
    gpu.run()
    assert not other.settle("r", WAIT).bad_blocks
    assert other.wrong(7, [1, 2, 3, 4, 5], 0, 160) == []


def test_a_load_whose_memory_comes_too_late_never_writes(engine: Make, daemon: FakeDaemon) -> None:
    stored_by(engine("a"), daemon, prompt(192))
    gpu = FakeGpu()
    with daemon.hold("attach_slab"):
        other = engine("b", gpu=gpu, load_timeout_ms=100)
        assert promised(other, "r", prompt(192)) == 160
        assert other.load("r", [1, 2, 3, 4, 5], 160).bad_blocks == {1, 2, 3, 4, 5}
    warm(other, daemon)
    assert other.workers[0].finished() == set()
    assert gpu.launches == []
    assert other.wrong(7, [1, 2, 3, 4, 5], 0, 160) == list(range(160))


def test_a_load_that_comes_first_waits_for_its_memory(engine: Make, daemon: FakeDaemon) -> None:
    stored_by(engine("a"), daemon, prompt(192))
    with daemon.hold("attach_slab"):
        other = engine("b", gpu=FakeGpu())
        mover: Any = other.workers[0]._mover
        assert promised(other, "r", prompt(192)) == 160
        assert mover.attached(other.workers_client.session, 0) is None
        other.scheduler.allocated("r", [1, 2, 3, 4, 5], 160)
        other.run(other.scheduler.plan([], []))
        assert other.workers[0].finished() == set()
    assert not other.settle("r").bad_blocks
    assert other.wrong(7, [1, 2, 3, 4, 5], 0, 160) == []


def test_no_thread_of_ours_spoils_a_graph_that_the_engine_captures(
    engine: Make, daemon: FakeDaemon
) -> None:
    """Each of them tells the driver before it calls what a capture elsewhere forbids."""
    stored_by(engine("a"), daemon, prompt(192))
    gpu = FakeGpu()
    with daemon.hold("attach_slab"):
        other = engine("b", gpu=gpu)
        assert promised(other, "r", prompt(192)) == 160
        other.scheduler.allocated("r", [1, 2, 3, 4, 5], 160)
        other.run(other.scheduler.plan([], []))
    assert not other.settle("r").bad_blocks
    warm(other, daemon)
    stored_by(other, daemon, prompt(128, seed=6), seed=2)
    mover: Any = other.workers[0]._mover
    session = other.workers_client.session
    assert session is not None
    session.close()
    other.workers_client.session = None
    mover.warm(None)
    until(
        lambda: not gpu.driver._registered.keys() - {s.address for s in mover._store._staging}, WAIT
    )
    other.workers[0].close()
    engines = threading.current_thread().name
    assert {thread for thread, _ in gpu.driver.unsafe} == {engines}
    assert {thread.removesuffix("_0") for thread in gpu.driver.relaxed} == {
        *("kmesh-kernels", "kmesh-slabs", "kmesh-load", "kmesh-reserve", "kmesh-store")
    }


@pytest.mark.parametrize("call", ["restorer", "restore", "storer", "store", "wait"])
def test_kernels_are_compiled_again_when_something_came_between(
    engine: Make, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    monkeypatch.setattr(gpumover, "_COMPILE_PAUSES", (0.001, 0.001))
    gpu = FakeGpu()
    left = [2]

    def refuse(name: str) -> None:
        ours = threading.current_thread().name.startswith("kmesh-kernels")
        if ours and name == call and left[0]:
            left[0] -= 1
            raise CudaError(name, 900, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED")

    gpu.refuse = refuse
    one = engine("a", gpu=gpu)
    mover: Any = one.workers[0]._mover
    until(mover.ready, WAIT)
    stored_by(one, daemon, prompt(192))
    one.workers[0].close()
    assert (gpu.open, left) == (0, [0])


def test_the_background_fills_no_holes(engine: Make, daemon: FakeDaemon) -> None:
    """Pages that the daemon has not made yet would be made at the engine's cost."""
    (slab,) = daemon._model.slabs
    gpu = FakeGpu()
    one = engine("a", gpu=gpu)
    mover: Any = one.workers[0]._mover
    until(mover.ready, WAIT)
    session = one.workers_client.session
    assert mover._memory._attach_filled(session) == 1
    assert os.fstat(slab.fd).st_blocks == 0
    assert gpu.driver.calls.count("register") == 0
    warm(one, daemon)
    assert mover._memory._attach_filled(session) == 0


def test_a_new_session_attaches_anew_and_registers_no_memory_twice(
    engine: Make, daemon: FakeDaemon
) -> None:
    stored_by(engine("a"), daemon, prompt(192))
    gpu = FakeGpu()
    other = engine("b", gpu=gpu)
    warm(other, daemon)
    mover: Any = other.workers[0]._mover
    registered = gpu.driver.calls.count("register")
    old = other.workers_client.session
    assert old is not None
    old.close()
    other.workers_client.session = MiniEngine._connect(daemon, "b", old.welcome and 2)  # type: ignore[arg-type]
    other._clients.append(type(other.client)(other.workers_client.session))
    mover.warm(other.workers_client.session)
    warm(other, daemon)
    assert gpu.driver.calls.count("register") == registered
    assert promised(other, "r", prompt(192)) == 160
    assert not other.load("r", [1, 2, 3, 4, 5], 160, WAIT).bad_blocks
    assert other.wrong(7, [1, 2, 3, 4, 5], 0, 160) == []
    until(lambda: not mover._memory._ended, WAIT)
    assert len(gpu.driver._registered) == 1


def test_memory_of_a_daemon_that_is_gone_is_given_back_when_nothing_reads_it(
    engine: Make, daemon: FakeDaemon
) -> None:
    stored_by(engine("a"), daemon, prompt(192))
    gpu = FakeGpu()
    other = engine("b", gpu=gpu)
    warm(other, daemon)
    mover: Any = other.workers[0]._mover
    assert promised(other, "r", prompt(192)) == 160
    gpu.held = True
    other.scheduler.allocated("r", [1, 2, 3, 4, 5], 160)
    other.run(other.scheduler.plan([], []))
    session = other.workers_client.session
    assert session is not None
    session.close()
    other.workers_client.session = None
    mover.warm(None)
    until(lambda: mover._memory._known is None, WAIT)
    assert len(gpu.driver._registered) == 1, "memory went while it was read"
    gpu.run()
    assert not other.settle("r", WAIT).bad_blocks
    assert other.wrong(7, [1, 2, 3, 4, 5], 0, 160) == []
    # Without a further step: an engine that has nothing to do keeps nothing.
    until(lambda: not gpu.driver._registered, WAIT)


def test_host_memory_that_the_gpu_can_not_read(
    engine: Make, daemon: FakeDaemon, caplog: pytest.LogCaptureFixture
) -> None:
    stored_by(engine("a"), daemon, prompt(192))
    other = engine("b", gpu=FakeGpu(attributes={Attribute.READ_ONLY_REGISTER: 0}))
    assert other.workers[0].counts.take() == {"host_memory_unreadable": 1}
    assert caplog.text.count("can't read memory that is mapped read-only") == 1
    report = other.workers[0].report()
    assert report is not None
    assert report.devices == (other.workers[0]._mover.devices[0],)  # type: ignore[union-attr]
    other.scheduler.worked(report, ())
    # Nothing is promised that could not be kept; what it computes is stored all the same.
    assert promised(other, "r", prompt(192)) == 0
    stored_by(other, daemon, prompt(128, seed=5), seed=3)


def test_kernels_that_can_not_be_compiled(
    engine: Make, daemon: FakeDaemon, caplog: pytest.LogCaptureFixture
) -> None:
    stored_by(engine("a"), daemon, prompt(192))
    gpu = FakeGpu()

    def refuse(name: str) -> None:
        if name == "restore":
            raise UnsupportedError("no compiler")

    gpu.refuse = refuse
    other = engine("b", gpu=gpu, reserve_timeout_ms=30_000)
    assert promised(other, "r", prompt(192)) == 160
    assert other.load("r", [1, 2, 3, 4, 5], 160, WAIT).bad_blocks == {1, 2, 3, 4, 5}
    other.scheduler.add("s", prompt(128, seed=9), DIGEST)
    other.prefill("s", 7, [1, 2, 3, 4], 0, 128)
    counted = other.workers[0].counts.take()
    assert (counted["load_failed_error"], counted["store_skipped_late"]) == (1, 2)
    assert "the kernels can't be compiled: no compiler" in caplog.text


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


def test_the_driver_fails_at_each_step_of_attaching(daemon: FakeDaemon) -> None:
    """Whichever call fails: a later one succeeds, and nothing is held twice or left."""
    with daemon.connect() as session:
        with FakeGpu().device as device:
            # The proof of the kind is moved once in a process.
            proof.prove(device, HandleKind.MEMFD)
        for number in range(1, 100):
            gpu = FakeGpu()
            memory = GpuMemory(gpu.device, lambda: None)
            refuse = refuse_nth(number)
            # Undoing something does not fail here, and naming it for later is no call.
            gpu.driver.refuse = lambda name, refuse=refuse: (  # type: ignore[misc]
                None if name in ("unregister", "free", "pop_context") else refuse(name)
            )
            failed = False
            try:
                memory.attach(session, 0)
            except CudaError:
                failed = True
            gpu.driver.refuse = None
            assert memory.attach(session, 0).size == memory.attached(session, 0).size  # type: ignore[union-attr]
            assert len(gpu.driver._registered) == 1
            memory.close()
            gpu.close()
            assert not any(gpu.driver.ledger().values())
            if not failed:
                break
        del session.index
    assert number >= 5


@pytest.mark.parametrize("call", ["record", "follow", "restore"])
def test_a_restore_that_can_not_be_started_is_computed(
    engine: Make, daemon: FakeDaemon, call: str
) -> None:
    stored_by(engine("a"), daemon, prompt(192))
    gpu = FakeGpu()
    other = engine("b", gpu=gpu)
    warm(other, daemon)
    assert promised(other, "r", prompt(192)) == 160

    def refuse(name: str) -> None:
        if name == call:
            raise CudaError(name, 999, "CUDA_ERROR_UNKNOWN")

    gpu.refuse = refuse
    assert other.load("r", [1, 2, 3, 4, 5], 160, WAIT).bad_blocks == {1, 2, 3, 4, 5}
    assert other.workers[0].counts.take()["load_failed_error"] == 1
    gpu.refuse = lambda name: None
    until(lambda: daemon.leases == 0, WAIT)


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


def test_a_gpu_that_fails_while_it_restores(engine: Make, daemon: FakeDaemon) -> None:
    stored_by(engine("a"), daemon, prompt(192))
    gpu = FakeGpu()
    other = engine("b", gpu=gpu)
    warm(other, daemon)
    assert promised(other, "r", prompt(192)) == 160
    gpu.held = True
    other.scheduler.allocated("r", [1, 2, 3, 4, 5], 160)
    other.run(other.scheduler.plan([], []))
    gpu.dead = True
    assert other.settle("r", WAIT).bad_blocks == {1, 2, 3, 4, 5}
    gpu.dead = gpu.held = False
    gpu.run()


def test_memory_is_mixed_in_one_plan() -> None:
    """A launch for each memory; statuses come back to their records."""
    from paged_reference import Engine, Stored

    from kmesh.kernels.plan import pack

    engine = Engine.make(order="NHD", layers=2, heads=2, slots=16, row=64, gap=0, blocks=40)
    spans = [Stored.make(i, 2, 2, 64, 64) for i in range(4)]
    spans[2].array.reshape(-1)[0] ^= 1
    records = pack([span.part(position=64 * i) for i, span in enumerate(spans)])
    gpu = FakeGpu()
    mover = GpuMover(gpu, engine.layout, lambda: None, Counts(), max_ctas=0, buffer_bytes=0)
    pages = np.arange(16, dtype=np.int64)
    both = Piece(records, np.array([True, False, True, False]), pages)
    host = Piece(records[:1], np.zeros(1, np.bool_), pages + 16)
    moving = mover.restore([both, host])
    assert moving.done()
    bad = 2
    assert moving.statuses() == [bytes([0, 0, bad, 0]), b"\0"]
    assert gpu.launches == [("restore", Memory.HOST, 2, 2), ("restore", Memory.GPU, 1, 1)]
    # The second launch fails: the first one's pages are written until it ends.
    gpu.held = True

    def refuse(name: str) -> None:
        if name == "restore" and len(gpu.launches) == 3:
            raise CudaError(name, 999, "CUDA_ERROR_UNKNOWN")

    gpu.refuse = refuse
    moving = mover.restore([both])
    assert not moving.done()
    gpu.run()
    assert moving.done()
    with pytest.raises(CudaError):
        moving.statuses()
    gpu.refuse = lambda name: None
    mover.close()
    assert not any(gpu.driver.ledger().values())


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
    until(lambda: loader._threads._shutdown, WAIT)
    assert gpu.driver.ledger()["registered"] > 0, "memory went while it was read"
    gpu.run()
    gpu.held = False
    closing.join(WAIT)
    assert not closing.is_alive()
    assert gpu.open == 0
    assert not any(gpu.driver.ledger().values())
    assert other.wrong(7, [1, 2, 3, 4, 5], 0, 160) == []


def test_an_end_waits_a_bounded_time_for_what_is_being_attached(
    engine: Make, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpumemory, "_CLOSE_WAIT", 0.05)
    gpu = FakeGpu()
    reached, hangs = threading.Event(), threading.Event()

    def hang(name: str) -> None:
        if name == "register" and threading.current_thread().name == "kmesh-slabs":
            reached.set()
            assert hangs.wait(2 * WAIT)

    gpu.driver.refuse = hang
    (slab,) = daemon._model.slabs
    os.posix_fallocate(slab.fd, 0, slab.memory.size)
    one = engine("a", gpu=gpu)
    mover: Any = one.workers[0]._mover
    assert reached.wait(WAIT)
    closing = threading.Thread(target=one.workers[0].close)
    closing.start()
    closing.join(WAIT)
    assert not closing.is_alive()
    assert gpu.driver.ledger()["contexts"] == 1, "closed under a call"
    hangs.set()
    mover._memory._thread.join(WAIT)
    one.workers[0].close()
    assert not any(gpu.driver.ledger().values())


def test_tensors_of_two_devices_are_refused(engine: Make, daemon: FakeDaemon) -> None:
    from mini_engine import OnGpu

    one = engine("a")
    tensors = dict(one.pages[0])
    name = next(iter(tensors))
    tensors[name] = OnGpu(tensors[name])  # type: ignore[assignment]
    with pytest.raises(UnsupportedError, match="only in host memory or on one GPU"):
        one.workers[0].register(tensors)
    assert len(tensors) == LAYERS
    assert isinstance(next(iter(one.pages[0].values())), torch.Tensor)
