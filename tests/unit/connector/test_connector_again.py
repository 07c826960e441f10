"""Spans that somebody else has reserved, and does not store: they are tried again."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from flight_engines import PATIENT, Clock, answered, leads, waits
from mini_engine import HEADS, LAYERS, NAMESPACE, MiniEngine, until
from test_connector_halves import prompt

from kmesh.calls import ReserveBatch
from kmesh.keys import KeyChain
from kmesh.layout import Shard
from kmesh.session import Role, Session
from kmesh.testing import FakeDaemon, Limits

DIGEST = NAMESPACE.digest()
Make = Callable[..., MiniEngine]
BLOCKS = [1, 2, 3, 4, 5, 6, 7]


def reserved(daemon: FakeDaemon, tokens: list[int]) -> Session:
    """A worker of another engine that has reserved all spans of a prompt, its tail too."""
    session = daemon.connect(role=Role.WORKER, engine_id="dying", namespace=NAMESPACE)
    chain = KeyChain(DIGEST)
    chain.extend(tokens)
    full, tail = chain.spans, len(tokens) % 64 // 16 * 16
    sizes = [64] * full + [tail] * bool(tail)
    keys = b"".join(chain.key(i, size) for i, size in enumerate(sizes))
    length = LAYERS * HEADS * 2 * 8 * 4
    batch = ReserveBatch(
        DIGEST,
        Shard(0, LAYERS, 0, HEADS),
        keys,
        sizes,
        [i * 64 for i in range(len(sizes))],
        [size * length for size in sizes],
        sub_keys=b"".join(chain.sub_keys(full, tail)[:-1]) if tail else b"",
    )
    assert session.reserve(batch).reason == [0] * len(sizes)
    return session


def heard(engine: MiniEngine) -> dict[str, set[int]]:
    """What the worker says goes to the scheduler, as after each step."""
    report = engine.workers[0].report()
    engine.scheduler.worked(report, [])
    return report.reserved if report is not None else {}


def decodes(engine: MiniEngine, computed: int, blocks: list[int] | None = None) -> int:
    """A step that computes one token of "r"; how many spans it stores."""
    step = engine.scheduler.plan([], [("r", blocks or [], False, computed, 1)])
    engine.run(step)
    return sum(len(plan.tokens) for plan in step.stores)


@pytest.mark.parametrize(("total", "starts"), [(192, {0, 64, 128}), (210, {0, 64, 128, 192})])
def test_what_an_engine_that_died_had_reserved_is_stored(
    engine: Make, daemon: FakeDaemon, total: int, starts: set[int]
) -> None:
    clock = Clock()
    tokens = prompt(total)
    one = engine("a", clock=clock)
    dying = reserved(daemon, tokens)
    one.scheduler.add("r", tokens, DIGEST)
    one.prefill("r", 7, BLOCKS[: -(-total // 32)], 0, total)
    assert heard(one) == {"r": starts}
    dying.close()
    until(lambda: daemon.reservations == 0)
    assert decodes(one, total) == 0
    clock.now += 0.05
    assert decodes(one, total + 1) == len(starts)
    until(lambda: daemon.spans == len(starts))
    assert heard(one) == {}
    clock.now += 60
    assert decodes(one, total + 2) == 0
    # They hold what was computed.
    one.scheduler.finished("r")
    other = engine("b")
    other.scheduler.add("s", tokens, DIGEST)
    found = other.match("s", 0, total + 40)
    assert found == total // 32 * 32
    assert not other.load("s", BLOCKS[: found // 32], found).bad_blocks
    assert other.wrong(7, BLOCKS[: found // 32], 0, found) == []


def test_it_is_tried_a_few_times_and_more_seldom_each_time(
    engine: Make, daemon: FakeDaemon
) -> None:
    clock = Clock()
    one = engine("a", clock=clock)
    holding = reserved(daemon, prompt(192))
    one.scheduler.add("r", prompt(192), DIGEST)
    one.prefill("r", 7, BLOCKS[:6], 0, 192)
    heard(one)
    tries, began = [], clock.now
    for step in range(400):
        clock.now = began + step * 0.025
        if decodes(one, 192 + step):
            tries.append(step)
            heard(one)
    assert tries == [2, 6, 14, 30, 62, 126]
    counts = one.workers[0].counts.take()
    assert counts == {"store_skipped_exists": 3 * 7}
    holding.close()


def test_what_another_one_stored_meanwhile_is_not_tried(engine: Make, daemon: FakeDaemon) -> None:
    clock = Clock()
    one, other = engine("a", clock=clock), engine("b")
    holding = reserved(daemon, prompt(192))
    one.scheduler.add("r", prompt(192), DIGEST)
    one.prefill("r", 7, BLOCKS[:6], 0, 192)
    assert heard(one) == {"r": {0, 64, 128}}
    holding.close()
    until(lambda: daemon.reservations == 0)
    other.scheduler.add("r", prompt(192), DIGEST)
    other.prefill("r", 7, BLOCKS[:6], 0, 192)
    until(lambda: daemon.spans == 3)
    clock.now += 60
    assert decodes(one, 192) == 0


def test_a_preempted_request_tries_again_only_what_it_has_computed(
    engine: Make, daemon: FakeDaemon
) -> None:
    clock = Clock()
    one = engine("a", clock=clock)
    holding = reserved(daemon, prompt(192))
    one.scheduler.add("r", prompt(192), DIGEST)
    one.prefill("r", 7, BLOCKS[:6], 0, 192)
    heard(one)
    holding.close()
    until(lambda: daemon.reservations == 0)
    clock.now += 60
    step = one.scheduler.plan([], [("r", [9, 8, 10, 11, 12, 13], True, 0, 96)], ["r"])
    assert [plan.start for plan in step.stores] == [(0,)]
    one.run(step, lambda: one.compute(7, [9, 8, 10], 0, 96))
    until(lambda: daemon.spans == 1)
    step = one.scheduler.plan([], [("r", [], False, 96, 96)])
    assert [plan.start for plan in step.stores] == [(64, 128)]
    one.run(step, lambda: one.compute(7, [9, 8, 10, 11, 12, 13], 96, 192))
    until(lambda: daemon.spans == 3)


def test_a_leader_lands_when_what_was_reserved_is_stored(engine: Make, daemon: FakeDaemon) -> None:
    """Those who wait for it get all of it, though another engine had reserved it and died."""
    clock = Clock()
    first, second = engine("a", clock=clock, **PATIENT), engine("b", **PATIENT)
    dying = reserved(daemon, prompt(192))
    leads(first, "r", prompt(192))
    waits(second, daemon, "r", prompt(192))
    first.prefill("r", 0, BLOCKS[:6], 0, 192)
    assert heard(first) == {"r": {0, 64, 128}}
    for step in range(5):
        assert decodes(first, 192 + step) == 0
    dying.close()
    until(lambda: daemon.reservations == 0)
    clock.now += 0.05
    assert decodes(first, 200) == 3
    assert answered(second, "r") == 160


def test_a_daemon_with_longer_spans_is_told_nothing_of_what_it_has_not(
    engine: Make, daemon: FakeDaemon
) -> None:
    """A span's number means other tokens there, or none of the prompt."""
    clock = Clock()
    one = engine("a", clock=clock)
    holding = reserved(daemon, prompt(240))
    one.scheduler.add("r", prompt(240), DIGEST)
    one.prefill("r", 7, BLOCKS, 0, 224)
    one.run(one.scheduler.plan([], [("r", [8], False, 224, 16)]))
    assert heard(one)["r"] >= {0, 64, 128}
    with FakeDaemon(Limits(span_tokens=128)) as other:
        holding.close()
        before, one.client.session = one.client.session, other.connect(namespace=NAMESPACE)
        clock.now += 60
        step = one.scheduler.plan([], [("r", [9, 10, 11, 12, 13, 14, 15, 16], False, 500, 1)])
        stored = [(plan.start, plan.tokens) for plan in step.stores]
        assert stored == [((0, 128), (128, 112))]
        step = one.scheduler.plan([], [("r", [], False, 501, 1)])
        assert step.stores == []
        assert before is not None
        before.close()
