"""Pages on a GPU: streams that a test lets run, kernels that are the reference, a fake driver."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from fake_gpu_streams import COMPUTE, FakeGpu
from gpu_cases import Make, promised, prompt, set_clock, stored_by, warm
from mini_engine import LAYERS, WAIT, until

from kmesh.errors import CudaError, UnsupportedError
from kmesh.kernels.cuda import Memory
from kmesh.testing import FakeDaemon
from kmesh_vllm.counts import Counts
from kmesh_vllm.gpumover import GpuMover
from kmesh_vllm.movers import Piece


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
    set_clock(other, lambda: now[0])
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
    # What is held back below must not be what its kernels are tried with.
    until(mover.ready, WAIT)
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
