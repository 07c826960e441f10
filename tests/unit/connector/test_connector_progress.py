"""What a leader says of how far it is, and what those who wait make of it."""

from __future__ import annotations

import pytest
from flight_engines import ALONE, ASK, Make, ask, leads, two, waits
from mini_engine import WAIT, MiniEngine, until
from test_connector_halves import prompt

from kmesh.flight import Progress
from kmesh.testing import FakeDaemon
from kmesh_vllm.metadata import LoadReport
from kmesh_vllm.requests import RequestState
from kmesh_vllm.underway import UnderWay


def far(engine: MiniEngine, request: str) -> Progress:
    """How far the flight is that a request waits for."""
    part, session = engine.scheduler._states[request].part, engine.client.session
    assert part is not None
    assert part.claim is not None
    assert session is not None
    found = session.progress_async(part.claim.flight, part.claim.place).result(WAIT)
    assert found is not None
    return found


def stores_nothing(engine: MiniEngine) -> None:
    """What it computes never lands."""
    engine.workers_client.session, session = None, engine.workers_client.session
    assert session is not None
    session.close()


def ran(engine: MiniEngine) -> None:
    """The workers' word of a step comes to the scheduler."""
    engine.scheduler.worked(engine.workers[0].report(), [])
    assert engine.client.session is not None
    engine.client.session.ping()


def test_what_has_run_is_told_and_not_what_is_planned(engine: Make, daemon: FakeDaemon) -> None:
    first, second, _ = two(engine)
    leads(first, "r", prompt(192))
    waits(second, daemon, "r", prompt(192))
    stores_nothing(first)
    assert first.prefill("r", 0, list(range(6)), 0, 100).number == 1
    assert far(second, "r").computed == 0
    ran(first)
    # Whole spans count.
    assert far(second, "r").computed == 1
    step = first.scheduler.plan([], [("r", [], False, 100, 92)])
    first.run(step, lambda: first.compute(0, list(range(6)), 100, 192))
    ran(first)
    assert far(second, "r").computed == 3
    # Whoever leads nothing has nothing to say.
    first.scheduler.add("s", prompt(64, seed=7), b"n" * 32)
    assert first.prefill("s", 7, [6, 7], 0, 64).number == 0
    assert first.workers[0].report() is None


def test_a_step_that_failed_has_computed_nothing(engine: Make, daemon: FakeDaemon) -> None:
    first, second, _ = two(engine)
    leads(first, "r", prompt(192))
    waits(second, daemon, "r", prompt(192))
    step = first.scheduler.plan([("r", list(range(6)), 0, 192)], [])
    worker = first.workers[0]
    worker.begin(step)
    worker.save(failed=True)
    assert worker.report() is None
    assert far(second, "r").computed == 0


def test_one_that_goes_on_is_waited_for_and_one_that_is_quiet_is_not(
    engine: Make, daemon: FakeDaemon
) -> None:
    first, second, clock = two(engine)
    leads(first, "r", prompt(192))
    waits(second, daemon, "r", prompt(192))
    stores_nothing(first)
    first.prefill("r", 0, list(range(6)), 0, 192)
    ran(first)
    # Longer than patience has it.
    clock.now += 1.0
    part = second.scheduler._states["r"].part
    assert part is not None
    until(lambda: ask(second, "r") == ASK and part.far.computed == 3)
    assert ask(second, "r") == ASK
    with daemon.hold("progress"):
        clock.now += 0.06
        assert ask(second, "r") == ASK
        clock.now += 50.0
        assert ask(second, "r") == ALONE
    assert second.scheduler.counts.take() == {"flight_joins": 1, "flight_left": 1}


@pytest.mark.parametrize(("tp", "place"), [(1, "GPU-1"), (2, "")])
def test_a_gpu_that_is_one_names_the_place(engine: Make, tp: int, place: str) -> None:
    one = engine("a", tp=tp)
    one.scheduler.worked(LoadReport(devices=("GPU-1", "GPU-2", "")), [])
    assert one.scheduler.computing.place == place


def test_who_leads_on_the_same_device_is_known(engine: Make, daemon: FakeDaemon) -> None:
    first, second, _ = two(engine)
    for one in (first, second):
        one.scheduler.computing.place = "GPU-1"
    leads(first, "r", prompt(192))
    waits(second, daemon, "r", prompt(192))
    assert far(second, "r").beside
    # Also if it came to lead by waiting.
    first.scheduler.finished("r")
    until(lambda: ask(second, "r") == ALONE)
    waits(first, daemon, "s", prompt(192))
    assert far(first, "s").beside


def test_a_step_that_nobody_speaks_of_is_over_with_the_next() -> None:
    under_way = UnderWay()
    assert under_way.planned() == 0
    states = [RequestState(name, [], b"") for name in "ab"]
    under_way.add(states[0], 10)
    first = under_way.planned()
    under_way.add(states[0], 20)
    under_way.add(states[1], 5)
    second = under_way.planned()
    assert under_way.planned() == 0
    assert under_way.ran(first - 1) == []
    assert under_way.ran(second) == [(states[0], 10), (states[0], 20), (states[1], 5)]
    assert under_way.ran(second) == []
