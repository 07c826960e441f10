"""An engine's GPU is looked at before the first restore, unless a setting says not to."""

from __future__ import annotations

import dataclasses
from typing import Any

from fake_gpu_streams import FakeGpu
from gpu_cases import Make, promised, prompt, stored_by
from mini_engine import WAIT, MiniEngine, until

from kmesh.kernels.cuda import H200
from kmesh.testing import FakeDaemon

SEEN = dataclasses.replace(H200, copy=1e9)


def compiled(engine: MiniEngine) -> Any:
    mover: Any = engine.workers[0]._mover
    until(mover.ready, WAIT)
    return mover


def test_restores_choose_by_what_was_seen(engine: Make, daemon: FakeDaemon) -> None:
    gpu = FakeGpu()
    gpu.seen = SEEN
    threads: list[str] = []
    gpu.refuse = lambda name: threads.append(name) if name == "rates" else None
    other = engine("b", gpu=gpu, calibrate=True)
    mover = compiled(other)
    assert mover._restorer.rates is SEEN
    assert threads == ["rates"]
    assert other.workers[0].counts.take() == {"calibrated": 1}
    # Not in the engine's thread.
    assert ("MainThread", "rates") not in gpu.driver.unsafe


def test_what_cannot_be_seen_is_counted_and_restores_go_on(
    engine: Make, daemon: FakeDaemon
) -> None:
    stored_by(engine("a"), daemon, prompt(192))
    other = engine("b", gpu=FakeGpu(), calibrate=True)
    mover = compiled(other)
    assert mover._restorer.rates is H200
    assert other.workers[0].counts.take() == {"calibration_failed": 1}
    assert promised(other, "r", prompt(192)) == 160
    assert not other.load("r", [1, 2, 3, 4, 5], 160, WAIT).bad_blocks


def test_what_the_first_restore_allocates_is_there_before_it_or_not(
    engine: Make, daemon: FakeDaemon, caplog: Any
) -> None:
    stored_by(engine("a"), daemon, prompt(192))
    gpu = FakeGpu()
    asked: list[str] = []

    def refuse(name: str) -> None:
        if name == "prepare":
            asked.append(name)
            raise MemoryError("out of memory")

    gpu.refuse = refuse
    other = engine("b", gpu=gpu)
    compiled(other)
    assert asked == ["prepare"]
    assert "the first restore will have to allocate: out of memory" in caplog.text
    assert promised(other, "r", prompt(192)) == 160
    assert not other.load("r", [1, 2, 3, 4, 5], 160, WAIT).bad_blocks


def test_a_gpu_is_left_alone_where_the_setting_says_so(engine: Make, daemon: FakeDaemon) -> None:
    gpu = FakeGpu()
    gpu.seen = SEEN
    other = engine("b", gpu=gpu, calibrate=False)
    assert compiled(other)._restorer.rates is H200
    assert not {"calibrated", "calibration_failed"} & other.workers[0].counts.take().keys()
