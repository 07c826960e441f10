"""Requests of one engine that miss the same prompt: one waits for a flight, the others for that."""

from __future__ import annotations

import pytest
from flight_engines import (
    ALONE,
    ASK,
    DIGEST,
    PATIENT,
    Clock,
    Make,
    answered,
    ask,
    leads,
    two,
    waits,
)
from mini_engine import until
from test_connector_halves import prompt

from kmesh.testing import FakeDaemon


def test_siblings_wait_inside_the_engine(engine: Make, daemon: FakeDaemon) -> None:
    first, second, _ = two(engine)
    document = prompt(192)
    leads(first, "r", document)
    waits(second, daemon, "r0", document)
    session = second.client.session
    assert session is not None
    for n in range(1, 5):
        second.scheduler.add(f"r{n}", document + prompt(64, seed=n), DIGEST)
    asked = session.pending
    for _ in range(20):
        for n in range(1, 5):
            assert ask(second, f"r{n}", 256) == ASK
    assert session.pending == asked
    first.prefill("r", 0, list(range(6)), 0, 192)
    assert answered(second, "r0") == 160
    second.scheduler.allocated("r0", [1, 2, 3, 4, 5], 160)
    # Now they wait for its load, as always.
    assert ask(second, "r1", 256) == ASK


def test_an_answer_that_was_not_taken_in_yet_lets_no_sibling_ask_too(
    engine: Make, daemon: FakeDaemon
) -> None:
    first, second, _ = two(engine)
    leads(first, "r", prompt(192))
    for name in "st":
        second.scheduler.add(name, prompt(192) + prompt(64, seed=ord(name)), DIGEST)
    assert ask(second, "s", 256) == ASK
    part = second.scheduler._states["s"].part
    assert part is not None
    until(part.future.done)
    assert ask(second, "t", 256) == ASK
    assert second.scheduler._states["t"].part is None
    until(lambda: ask(second, "s", 256) == ASK and daemon.waits == 1)
    assert second.scheduler.counts.take() == {"flight_joins": 1}


def test_one_that_leaves_does_not_end_the_wait_of_another(engine: Make, daemon: FakeDaemon) -> None:
    """Without a cache of its own an engine waits once for each request."""
    first, second = engine("a", **PATIENT), engine("b", **PATIENT, sharing=False)
    document = prompt(192)
    leads(first, "r", document)
    waits(second, daemon, "r0", document)
    waits(second, daemon, "r1", document)
    left = second.scheduler._states["r1"].claims_left
    second.scheduler.finished("r0")
    until(lambda: daemon.waits == 1)
    assert ask(second, "r1") == ASK
    assert second.scheduler._states["r1"].claims_left == left
    first.prefill("r", 0, list(range(6)), 0, 192)
    assert answered(second, "r1") == 160


def test_siblings_wait_no_longer_than_the_setting_says(engine: Make) -> None:
    clock = Clock()
    one = engine("a", **PATIENT, flight_wait_ms=5_000, clock=clock)
    document = prompt(256)
    leads(one, "r0", document)
    one.scheduler.plan([("r0", [0, 1], 0, 64)], [])
    one.scheduler.add("r1", document, DIGEST)
    for _ in range(3):
        assert ask(one, "r1", 256, 64) == ASK
        clock.now += 1
    # What it waits for becomes another one, and another: it is one wait for all that.
    one.scheduler.plan([], [], ["r0"])
    assert answered(one, "r0", 256) == 0
    one.scheduler.plan([("r0", [0, 1], 0, 64)], [])
    assert ask(one, "r1", 256, 64) == ASK
    clock.now += 1
    assert ask(one, "r1", 256, 64) == ASK
    clock.now += 1
    assert one.match("r1", 64, 256) == 0
    assert ask(one, "r1", 256, 64) == ALONE


@pytest.mark.parametrize("sharing", [True, False])
def test_siblings_of_a_leader_find_its_blocks(
    engine: Make, daemon: FakeDaemon, sharing: bool
) -> None:
    one = engine("a", **PATIENT, sharing=sharing)
    document = prompt(256)
    leads(one, "r0", document)
    one.scheduler.add("r1", document, DIGEST)
    # Without blocks the leader holds nobody up; in its own cache vLLM finds what it has begun.
    assert answered(one, "r1", 256) == 0
    one.scheduler.add("r2", document, DIGEST)
    one.scheduler.plan([("r0", [0, 1], 0, 64)], [])
    if sharing:
        assert ask(one, "r2", 256, 64) == ASK
        assert one.scheduler._states["r2"].part is None
        one.scheduler.plan([], [("r0", [2, 3, 4, 5, 6, 7], False, 64, 192)])
    assert answered(one, "r2", 256) == 0
    assert daemon.flights == 1


def test_a_claim_without_an_answer_holds_up_one_request_and_not_each(
    engine: Make, daemon: FakeDaemon
) -> None:
    clock = Clock()
    one = engine("a", min_flight_tokens=128, clock=clock)
    with daemon.hold("claim"):
        one.scheduler.add("r", prompt(192), DIGEST)
        assert ask(one, "r") == ASK
        clock.now += 60
        assert ask(one, "r") == ALONE
        assert one.scheduler.counts.take() == {"flight_late": 1}
        one.scheduler.add("s", prompt(192, seed=5), DIGEST)
        assert ask(one, "s") == ALONE
        clock.now += 5 * 60 + 1
        assert ask(one, "s") == ASK
    # The answer that came too late was given back.
    assert answered(one, "s") == 0
    until(lambda: daemon.flights == 1)
