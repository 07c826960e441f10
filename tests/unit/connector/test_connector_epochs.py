"""Loads of a daemon that is gone, or that a worker has not found yet: whom they hold up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from gpu_cases import set_clock
from mini_engine import NAMESPACE, MiniEngine, until
from test_connector_halves import DIGEST, prompt, stored_by

from kmesh.session import Role, Session
from kmesh.testing import FakeDaemon
from kmesh_vllm import preparing
from kmesh_vllm.epochs import Epochs
from kmesh_vllm.metadata import StepPlan

Make = Callable[..., MiniEngine]
#: More than any test waits for something.
LONG = 600.0
#: More than there are threads that wait.
LOADS = range(5)


def promised(make: Make, daemon: FakeDaemon) -> tuple[MiniEngine, StepPlan]:
    """An engine, and a step of it with a load for each of ``LOADS``."""
    one, other = make("a"), make("b", load_timeout_ms=int(4000 * LONG))
    for number in LOADS:
        tokens = prompt(64 + 1, seed=number)
        stored_by(one, daemon, tokens)
        other.scheduler.add(f"{number}", tokens, DIGEST)
        assert other.match(f"{number}", 0, 64 + 1) == 64
        other.scheduler.allocated(f"{number}", [1 + 2 * number, 2 + 2 * number], 64)
    return other, other.scheduler.plan([], [])


def all_lost(engine: MiniEngine) -> None:
    worker = engine.workers[0]
    ended: set[str] = set()
    bad: set[int] = set()

    def over() -> bool:
        ended.update(worker.finished())
        bad.update(worker.bad_blocks())
        return len(ended) == len(LOADS)

    until(over)
    assert bad == set(range(1, 1 + 2 * len(LOADS)))
    assert worker.counts.take()["load_failed_lost"] == len(LOADS)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparing, "_CATCH_UP", LONG)


def test_an_epoch_that_is_over_is_not_waited_for(engine: Make, daemon: FakeDaemon) -> None:
    one, step = promised(engine, daemon)
    old = one.workers_client.session
    daemon.restart()
    assert old is not None
    old.close()
    one.workers_client.session = daemon.connect(
        role=Role.WORKER, engine_id="b", namespace=NAMESPACE
    )
    one.run(step)
    all_lost(one)


def test_an_epoch_that_never_comes_is_waited_for_once(engine: Make, daemon: FakeDaemon) -> None:
    """However many loads of it queue behind those that wait."""
    one, step = promised(engine, daemon)
    now = [0.0]
    set_clock(one, lambda: now[0])
    step.loads = [replace(plan, epoch=plan.epoch ^ 2) for plan in step.loads]
    one.run(step)
    assert one.workers[0].finished() == set()
    now[0] = LONG
    all_lost(one)


def test_a_session_that_a_thread_has_seen_late_ends_no_epoch(daemon: FakeDaemon) -> None:
    with daemon.connect() as first:
        daemon.restart()
        with daemon.connect() as second:
            seen: list[Session | None] = [first, second, first, second]
            epochs = Epochs(lambda: seen.pop(0))
            assert epochs.session_of(first.epoch) is first
            assert epochs.session_of(second.epoch) is second
            assert epochs.session_of(second.epoch) is None
            assert epochs.session_of(second.epoch) is second
