"""Engines that miss the same prompt: one computes, the others wait, and each way that can end."""

from __future__ import annotations

import contextlib

import pytest
from flight_engines import ALONE, ASK, DIGEST, PATIENT, Make, answered, ask, leads, two, waits
from mini_engine import MiniEngine, until
from test_connector_halves import prompt

from kmesh import errors
from kmesh.testing import FakeDaemon, Limits


def test_one_engine_computes_and_the_other_restores(engine: Make, daemon: FakeDaemon) -> None:
    first, second, _ = two(engine)
    leads(first, "r", prompt(192))
    waits(second, daemon, "r", prompt(192))
    # Asking costs neither a call nor a look at the index.
    session = second.client.session
    assert session is not None
    pending = session.pending
    for _ in range(200):
        assert ask(second, "r") == ASK
    assert session.pending == pending
    first.prefill("r", 0, list(range(6)), 0, 192)
    assert answered(second, "r") == 160
    assert not second.load("r", [1, 2, 3, 4, 5], 160).bad_blocks
    assert second.wrong(0, [1, 2, 3, 4, 5], 0, 160) == []
    until(lambda: daemon.flights == 0)
    counts = second.scheduler.counts.take()
    assert (counts["flight_joins"], counts["flight_landed"], counts["restores"]) == (1, 1, 1)
    assert second.scheduler.computing.rates.restore > 0


def test_what_is_too_short_makes_no_call(engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    one = engine("a", min_flight_tokens=256)
    session = one.client.session
    assert session is not None
    monkeypatch.setattr(session, "_start", None)
    one.scheduler.add("r", prompt(192), DIGEST)
    one.scheduler.add("long", prompt(320), DIGEST)
    assert ask(one, "r") == ALONE
    # Most of the long one is in vLLM's own cache.
    assert ask(one, "long", 320, 96) == ALONE


@pytest.mark.parametrize("how", ["closed", "aborted", "preempted"])
def test_a_leader_that_fails_is_replaced(engine: Make, daemon: FakeDaemon, how: str) -> None:
    first, second, _ = two(engine)
    third = engine("c", **PATIENT)
    leads(first, "r", prompt(192))
    waits(second, daemon, "r", prompt(192))
    waits(third, daemon, "r", prompt(192))
    if how == "closed":
        assert first.client.session is not None
        first.client.session.close()
    elif how == "aborted":
        first.scheduler.finished("r")
    else:
        first.scheduler.plan([("r", [0, 1], 0, 64)], [])
        first.scheduler.plan([], [], ["r"])
    assert answered(second, "r") == 0
    assert second.scheduler.counts.take()["flight_promoted"] == 1
    assert ask(third, "r") == ASK
    second.prefill("r", 0, list(range(6)), 0, 192)
    assert answered(third, "r") == 160


def test_a_leader_whose_stores_have_no_room_ends_all_waits(engine: Make) -> None:
    with FakeDaemon(Limits(slab_bytes=1 << 20, slabs=1)) as small:
        first = MiniEngine(small, "a", **PATIENT)
        second = MiniEngine(small, "b", **PATIENT)
        try:
            filler = MiniEngine(small, "c")
            for seed in range(1, 8):
                filler.scheduler.add(f"f{seed}", prompt(192, seed=seed), DIGEST)
                filler.prefill(f"f{seed}", seed, list(range(6)), 0, 192)
            filler.close()
            leads(first, "r", prompt(192))
            waits(second, small, "r", prompt(192))
            first.prefill("r", 0, list(range(6)), 0, 192)
            assert answered(second, "r") == 0
            assert second.scheduler.counts.take()["flight_ended"] == 1
        finally:
            first.close()
            second.close()


def test_a_leader_that_stored_nothing_says_so_some_steps_later(
    engine: Make, daemon: FakeDaemon
) -> None:
    first, second, _ = two(engine)
    leads(first, "r", prompt(192))
    waits(second, daemon, "r", prompt(192))
    # The workers were late: of the plan nothing came.
    first.scheduler.plan([("r", list(range(6)), 0, 192)], [])
    for step in range(2):
        first.scheduler.plan([], [("r", [], False, 192 + step, 1)])
        assert ask(second, "r") == ASK
    assert daemon.waits == 1
    first.scheduler.plan([], [("r", [], False, 194, 1)])
    assert answered(second, "r") == 0
    assert second.scheduler.counts.take()["flight_ended"] == 1


def test_a_request_that_ends_at_once_lands_what_it_has_stored(
    engine: Make, daemon: FakeDaemon
) -> None:
    first, second, _ = two(engine)
    leads(first, "r", prompt(192))
    waits(second, daemon, "r", prompt(192))
    with daemon.hold("commit"):
        first.prefill("r", 0, list(range(6)), 0, 192)
        assert first.scheduler.finished("r")
    assert answered(second, "r") == 160
    assert first.scheduler.computing.rates.prefill > 0


def test_what_a_wait_brought_may_be_part_of_it(engine: Make, daemon: FakeDaemon) -> None:
    first, second, _ = two(engine)
    document = prompt(192)
    leads(first, "r", document)
    waits(second, daemon, "r", document + prompt(256, seed=9))
    first.prefill("r", 0, list(range(6)), 0, 192)
    # What is behind the document is claimed too, and is ours.
    assert answered(second, "r", 448) == 192
    counts = second.scheduler.counts.take()
    assert (counts["flight_landed"], counts["flight_leads"]) == (1, 1)
    assert daemon.flights == 1


def test_the_rule_is_asked_again_and_the_wait_given_up(engine: Make, daemon: FakeDaemon) -> None:
    first, second, clock = two(engine)
    leads(first, "r", prompt(192))
    waits(second, daemon, "r", prompt(192))
    clock.now += 0.04
    assert ask(second, "r") == ASK
    clock.now += 1.0
    until(lambda: ask(second, "r") == ALONE)
    assert second.scheduler.counts.take() == {"flight_joins": 1, "flight_left": 1}
    until(lambda: daemon.waits == 0)
    for _ in range(10):
        assert ask(second, "r") == ALONE
    # A leader that fails now finds nobody.
    first.scheduler.finished("r")
    until(lambda: daemon.flights == 0)


def test_waiting_that_is_not_worth_it_is_not_begun(engine: Make, daemon: FakeDaemon) -> None:
    first, second, _ = two(engine)
    leads(first, "r", prompt(192))
    second.scheduler.computing.rates.restore = 1.0
    second.scheduler.add("r", prompt(192), DIGEST)
    assert answered(second, "r") == 0
    assert second.scheduler.counts.take() == {"flight_declined": 1}
    assert daemon.waits == 0


def test_a_deadline_ends_a_wait(engine: Make, daemon: FakeDaemon) -> None:
    first = engine("a", **PATIENT)
    second = engine("b", **PATIENT, flight_wait_ms=300, clock=lambda: 1000.0)
    leads(first, "r", prompt(192))
    waits(second, daemon, "r", prompt(192))
    assert answered(second, "r") == 0
    assert second.scheduler.counts.take() == {"flight_joins": 1, "flight_left": 1}


@pytest.mark.parametrize("state", ["claiming", "waiting", "leading"])
@pytest.mark.parametrize("how", ["aborted", "reset", "shutdown"])
def test_a_request_that_ends_leaves_nothing_behind(
    engine: Make, daemon: FakeDaemon, state: str, how: str
) -> None:
    first, second = (engine(name, **PATIENT) for name in "ab")
    with contextlib.ExitStack() as held:
        if state == "waiting":
            leads(first, "r", prompt(192))
            waits(second, daemon, "r", prompt(192))
        elif state == "leading":
            leads(second, "r", prompt(192))
        else:
            held.enter_context(daemon.hold("claim"))
            second.scheduler.add("r", prompt(192), DIGEST)
            assert ask(second, "r") == ASK
            until(lambda: daemon.flights == 1)
        if how == "aborted":
            second.scheduler.finished("r")
        elif how == "reset":
            second.scheduler.reset()
        else:
            second.scheduler.shutdown()
    until(lambda: daemon.waits == 0)
    until(lambda: daemon.flights == (state == "waiting"))
    assert not second.scheduler.computing


def test_a_daemon_that_knows_no_flights_is_asked_once(
    engine: Make, daemon: FakeDaemon, caplog: pytest.LogCaptureFixture
) -> None:
    one = engine("a", **PATIENT)
    daemon.refuse("claim", errors.InvalidArgument("no known request", field="body"))
    for n in range(3):
        one.scheduler.add(f"r{n}", prompt(192, seed=n), DIGEST)
        assert answered(one, f"r{n}") == 0
    assert one.scheduler.counts.take() == {}
    assert caplog.text.count("the daemon knows no flights") == 1
    assert daemon.flights == 0


def test_refusals_are_counted_and_computed(engine: Make, daemon: FakeDaemon) -> None:
    first, second, _ = two(engine)
    daemon.refuse("claim", errors.Exhausted("too many flights"))
    first.scheduler.add("s", prompt(192, seed=3), DIGEST)
    assert answered(first, "s") == 0
    assert first.scheduler.counts.take() == {"flight_refused": 1}
    leads(first, "r", prompt(192))
    daemon.refuse("await_flight", errors.Exhausted("too many waits"))
    second.scheduler.add("r", prompt(192), DIGEST)
    assert answered(second, "r") == 0
    assert second.scheduler.counts.take()["flight_refused"] == 1


def test_a_daemon_that_goes_away_ends_all_waits(engine: Make, daemon: FakeDaemon) -> None:
    first, second, _ = two(engine)
    leads(first, "r", prompt(192))
    waits(second, daemon, "r", prompt(192))
    daemon.disconnect()
    assert answered(second, "r") == 0
    # The next daemon's session knows nothing of it.
    second.client.session = daemon.connect(engine_id="new")
    assert answered(second, "r") == 0
    assert not second.scheduler.computing
    second.client.session.close()


def test_an_engine_that_only_waits_rests_and_one_that_works_does_not(
    engine: Make,
    daemon: FakeDaemon,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, second, _ = two(engine)
    leads(first, "r", prompt(192))
    waits(second, daemon, "r", prompt(192))
    news = second.scheduler.computing._rest._news
    slept: list[float] = []
    monkeypatch.setattr(news, "wait", lambda seconds: slept.append(seconds))
    for _ in range(4):
        second.scheduler.plan([], [])
    # Each rest is longer, up to a limit, since one that comes meanwhile has to wait for its end.
    assert slept == [0.002, 0.004, 0.008, 0.008]
    second.scheduler.add("s", prompt(64, seed=7), DIGEST)
    second.scheduler.plan([("s", [0, 1], 0, 64)], [])
    second.scheduler.plan([], [("s", [], False, 64, 1)])
    assert len(slept) == 4
    second.scheduler.plan([], [])
    second.scheduler.plan([], [])
    assert slept[4:] == [0.002, 0.004]
    # Another one has come to wait: more may follow.
    leads(first, "t", prompt(192, seed=5))
    waits(second, daemon, "t", prompt(192, seed=5))
    second.scheduler.plan([], [])
    assert slept[6:] == [0.002]
    monkeypatch.undo()
    # An answer ends the rest: the first of these takes it in, the next would be the wait.
    first.scheduler.finished("r")
    until(lambda: news.is_set())
    assert ask(second, "r") == ALONE
    first.scheduler.plan([], [])


def test_another_connectors_tokens_are_not_computed_for_others(
    engine: Make, daemon: FakeDaemon
) -> None:
    first, second, _ = two(engine)
    leads(first, "r", prompt(192))
    waits(second, daemon, "r", prompt(192))
    first.scheduler.plan([("r", list(range(6)), 96, 96)], [])
    assert answered(second, "r") == 0
    assert second.scheduler.counts.take()["flight_promoted"] == 1


def test_an_engine_that_does_not_store_takes_no_part(engine: Make, daemon: FakeDaemon) -> None:
    one = engine("a", min_flight_tokens=128, store=False)
    one.scheduler.add("r", prompt(192), DIGEST)
    assert ask(one, "r") == ALONE
    assert daemon.flights == 0


def test_where_nothing_is_in_the_air_one_call_is_made(
    engine: Make, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = engine("a", **PATIENT)
    leads(one, "r", prompt(8192))
    session = one.client.session
    assert session is not None
    monkeypatch.setattr(session, "_start", None)
    chain = one.scheduler._states["r"].chain(64, 16)
    for _ in range(1000):
        assert ask(one, "r", 8192) == ALONE
    assert one.scheduler._states["r"].chain(64, 16) is chain
