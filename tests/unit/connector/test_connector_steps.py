"""When a load's end is told: in the step in which it comes, if that has nothing else to do."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from fake_gpu_streams import FakeGpu
from gpu_cases import DIGEST, Make, promised, prompt, stored_by, warm
from mini_engine import WAIT, MiniEngine, until

from kmesh.testing import FakeDaemon
from kmesh_vllm import worker as workers

BLOCKS = [9, 3, 7, 1, 5]


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that compute nothing wait longer than any load takes here."""
    monkeypatch.setattr(workers, "_REST", 10 * WAIT)


def begun(engine: MiniEngine, daemon: FakeDaemon, *, computes: bool) -> None:
    """A load of five blocks is started, in a step that computes something or nothing."""
    assert promised(engine, "r", prompt(192)) == 160
    engine.scheduler.allocated("r", BLOCKS, 160)
    new = []
    if computes:
        engine.scheduler.add("other", prompt(32, seed=5), DIGEST)
        new = [("other", [20], 0, 32)]
    engine.run(engine.scheduler.plan(new, []))


def test_the_end_is_told_in_the_step_in_which_it_comes(engine: Make, daemon: FakeDaemon) -> None:
    stored_by(engine("a"), daemon, prompt(192))
    gpu = FakeGpu()
    other = engine("b", gpu=gpu)
    warm(other, daemon)
    gpu.held = True
    begun(other, daemon, computes=False)
    (moving,) = other.workers[0]._loader._moving  # type: ignore[union-attr]
    asked = threading.Event()
    done: Any = moving[0].done
    moving[0].done = lambda: asked.set() or done()  # type: ignore[func-returns-value,method-assign]

    def run() -> None:
        assert asked.wait(WAIT)
        gpu.run()

    thread = threading.Thread(target=run)
    thread.start()
    assert other.workers[0].finished() == {"r"}
    thread.join()
    assert other.wrong(7, BLOCKS, 0, 160) == []
    other.scheduler.worked(other.workers[0].report(), ["r"])


@pytest.mark.parametrize("why", ["computes", "lockstep"])
def test_a_step_that_others_wait_for_waits_for_no_load(
    engine: Make, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    stored_by(engine("a"), daemon, prompt(192))
    gpu = FakeGpu()
    other = engine("b", gpu=gpu, store=False)
    warm(other, daemon)
    gpu.held = True
    (one,) = other.workers
    monkeypatch.setattr(one, "_lockstep", why == "lockstep")
    begun(other, daemon, computes=why == "computes")
    loader: Any = one._loader

    def waits(seconds: float) -> None:
        raise AssertionError(f"a step that computes waits {seconds} s")

    with monkeypatch.context() as patched:
        patched.setattr(loader._states.news, "wait", waits)
        assert one.finished() == set()
    gpu.run()
    assert one.finished() == {"r"}
    other.scheduler.worked(one.report(), ["r"])


def test_threads_that_copy_wake_the_step(engine: Make, daemon: FakeDaemon) -> None:
    stored_by(engine("a"), daemon, prompt(192))
    other = engine("b")
    begun(other, daemon, computes=False)
    assert other.workers[0].finished() == {"r"}
    assert other.wrong(7, BLOCKS, 0, 160) == []
    other.scheduler.worked(other.workers[0].report(), ["r"])


@pytest.mark.parametrize("on_gpu", [False, True])
def test_a_load_that_can_not_be_made_ready_ends_the_step(
    engine: Make, daemon: FakeDaemon, on_gpu: bool
) -> None:
    stored_by(engine("a"), daemon, prompt(192))
    other = engine("b", gpu=FakeGpu() if on_gpu else None)
    workers_session = other.workers_client.session
    assert workers_session is not None
    assert promised(other, "r", prompt(192)) == 160
    workers_session.close()
    other.workers_client.session = None
    other.scheduler.allocated("r", BLOCKS, 160)
    other.run(other.scheduler.plan([], []))
    (one,) = other.workers
    assert one.finished() == {"r"}
    assert one.bad_blocks() == set(BLOCKS)
    other.scheduler.worked(one.report(), ["r"])
    until(lambda: daemon.leases == 0)
