"""The scheduler half: what it answers, and what it leaves behind."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from mini_engine import NAMESPACE, MiniEngine, until
from test_connector_halves import prompt, stored_by

from kmesh import errors
from kmesh.session import Role
from kmesh.testing import FakeDaemon

DIGEST = NAMESPACE.digest()
Make = Callable[..., MiniEngine]


def test_may_be_asked_a_hundred_times(engine: Make, daemon: FakeDaemon) -> None:
    stored_by(engine("a"), daemon, prompt(192))
    other = engine("b")
    other.scheduler.add("r", prompt(192), DIGEST)
    assert other.match("r", 0, 192) == 160
    for _ in range(100):
        assert other.scheduler.match("r", 0, 192) == (160, True)
    assert daemon.leases == 1
    other.scheduler.allocated("r", [], 0)
    until(lambda: daemon.leases == 0)


def test_a_miss_makes_no_call_and_hashes_once(
    engine: Make, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = engine("b")
    other.scheduler.add("r", prompt(8192), DIGEST)
    assert other.scheduler.match("r", 0, 8192) == (0, False)
    session = other.client.session
    assert session is not None
    monkeypatch.setattr(session, "_start", None)
    chain = other.scheduler._states["r"].chain(64, 16)
    for _ in range(1000):
        assert other.scheduler.match("r", 0, 8192) == (0, False)
    assert other.scheduler._states["r"].chain(64, 16) is chain


def test_one_sibling_loads_and_the_others_wait(engine: Make, daemon: FakeDaemon) -> None:
    ancestor = prompt(192)
    stored_by(engine("a"), daemon, ancestor)
    other = engine("b")
    names = [f"child{i}" for i in range(5)]
    for i, name in enumerate(names):
        other.scheduler.add(name, ancestor + prompt(64, seed=10 + i), DIGEST)
    found = other.match(names[0], 0, 256)
    assert found == 192
    other.scheduler.allocated(names[0], [1, 2, 3, 4, 5, 6], 192)
    step = other.scheduler.plan([], [])
    for _ in range(50):
        for name in names[1:]:
            assert other.scheduler.match(name, 0, 256) == (None, False)
    other.run(step)
    assert not other.settle(names[0]).bad_blocks
    # Now vLLM's own cache has the ancestor, and nothing is left to load.
    for name in names[1:]:
        assert other.match(name, 192, 256) == 0
    until(lambda: daemon.leases == 0)


@pytest.mark.parametrize("how", ["abort", "failure"])
def test_siblings_go_on_when_the_first_one_does_not(
    engine: Make, daemon: FakeDaemon, how: str
) -> None:
    tokens = prompt(192)
    stored_by(engine("a"), daemon, tokens)
    other = engine("b", load_timeout_ms=200)
    for name in ("first", "second"):
        other.scheduler.add(name, tokens, DIGEST)
    assert other.match("first", 0, 192) == 160
    other.scheduler.allocated("first", [1, 2, 3, 4, 5], 160)
    assert other.scheduler.match("second", 0, 192) == (None, False)
    if how == "abort":
        other.scheduler.finished("first")
    else:
        with daemon.hold("attach_slab"):
            other.run(other.scheduler.plan([], []))
            assert other.settle("first").bad_blocks
    found = other.match("second", 0, 192)
    # A span that failed is left alone for a while; one that was never tried is not.
    assert found == (160 if how == "abort" else 0)


def test_a_sibling_with_a_lease_and_no_blocks_holds_nobody_up(
    engine: Make, daemon: FakeDaemon
) -> None:
    tokens = prompt(192)
    stored_by(engine("a"), daemon, tokens)
    other = engine("b")
    for name in ("first", "second"):
        other.scheduler.add(name, tokens, DIGEST)
    assert other.match("first", 0, 192) == 160
    # The pool is full for the first; another one, say of higher priority, is asked.
    assert other.match("second", 0, 192) == 160


def test_without_a_prefix_cache_nobody_waits(engine: Make, daemon: FakeDaemon) -> None:
    tokens = prompt(192)
    stored_by(engine("a"), daemon, tokens)
    other = engine("b", sharing=False)
    for name in ("first", "second"):
        other.scheduler.add(name, tokens, DIGEST)
    assert other.match("first", 0, 192) == 160
    other.scheduler.allocated("first", [1, 2, 3, 4, 5], 160)
    assert other.match("second", 0, 192) == 160


def test_a_refused_lease_is_not_asked_for_again(engine: Make, daemon: FakeDaemon) -> None:
    stored_by(engine("a"), daemon, prompt(192))
    other = engine("b")
    other.scheduler.add("r", prompt(192), DIGEST)
    daemon.refuse("acquire", errors.Unavailable("not now"))
    assert other.match("r", 0, 192) == 0
    for _ in range(20):
        assert other.scheduler.match("r", 0, 192) == (0, False)
    assert other.scheduler.counts.take() == {"acquire_refused": 1}


def test_a_late_lease_is_given_back(engine: Make, daemon: FakeDaemon) -> None:
    stored_by(engine("a"), daemon, prompt(192))
    other = engine("b", acquire_timeout_ms=100)
    other.scheduler.add("r", prompt(192), DIGEST)
    with daemon.hold("acquire"):
        assert other.match("r", 0, 192) == 0
        assert other.scheduler.counts.take() == {"acquire_late": 1}
        until(lambda: daemon.leases == 1)
    until(lambda: daemon.leases == 0)


def test_a_daemon_that_hangs_holds_up_one_request_and_not_each(
    engine: Make, daemon: FakeDaemon
) -> None:
    stored_by(engine("a"), daemon, prompt(192))
    now = [100.0]
    other = engine("b", clock=lambda: now[0])
    for name in ("r", "s", "t"):
        other.scheduler.add(name, prompt(192), DIGEST)
    with daemon.hold("acquire"):
        assert other.scheduler.match("r", 0, 192) == (None, False)
        now[0] += 60
        assert other.scheduler.match("r", 0, 192) == (0, False)
        assert other.scheduler.match("s", 0, 192) == (0, False)
    now[0] += 5 * 60
    assert other.match("t", 0, 192) == 160
    until(lambda: daemon.leases == 1)


def test_aborted_while_the_lease_is_under_way(engine: Make, daemon: FakeDaemon) -> None:
    stored_by(engine("a"), daemon, prompt(192))
    other = engine("b")
    other.scheduler.add("r", prompt(192), DIGEST)
    with daemon.hold("acquire"):
        assert other.scheduler.match("r", 0, 192) == (None, False)
        other.scheduler.finished("r")
        until(lambda: daemon.leases == 1)
    until(lambda: daemon.leases == 0)


def test_without_a_daemon_everything_is_computed(engine: Make, daemon: FakeDaemon) -> None:
    one = engine("a")
    one.client.session = None
    one.scheduler.add("r", prompt(192), DIGEST)
    assert one.scheduler.match("r", 0, 192) == (0, False)
    step = one.scheduler.plan([("r", [1, 2, 3, 4, 5, 6], 0, 192)], [])
    assert not step


def test_what_was_computed_before_the_daemon_came_is_stored(
    engine: Make, daemon: FakeDaemon
) -> None:
    one = engine("a")
    session, one.client.session = one.client.session, None
    one.scheduler.add("r", prompt(192), DIGEST)
    one.prefill("r", 7, [1, 2, 3, 4, 5, 6], 0, 192)
    assert daemon.spans == 0
    one.client.session = session
    step = one.scheduler.plan([], [("r", [9], False, 192, 1)])
    one.run(step)
    until(lambda: daemon.spans == 3)


def test_the_index_of_another_epoch_drops_a_lease(engine: Make, daemon: FakeDaemon) -> None:
    stored_by(engine("a"), daemon, prompt(192))
    other = engine("b")
    other.scheduler.add("r", prompt(192), DIGEST)
    assert other.match("r", 0, 192) == 160
    old = other.client.session
    assert old is not None
    with old:
        new = other.client.session = MiniEngine._connect(daemon, "b2", Role.SCHEDULER)
        # The answer may come while it is asked, or later.
        assert other.match("r", 0, 192) == 160
        restore = other.scheduler._states["r"].restore
        assert restore is not None
        assert restore.session is new
        until(lambda: daemon.leases == 1)
    assert daemon.leases == 1


def test_chunks_are_stored_as_they_are_completed(engine: Make, daemon: FakeDaemon) -> None:
    one = engine("a")
    tokens = prompt(200)
    one.scheduler.add("r", tokens, DIGEST)
    starts = []
    blocks = list(range(1, 8))
    step = one.scheduler.plan([("r", blocks[:3], 0, 90)], [])
    starts.append([plan.start for plan in step.stores])
    step = one.scheduler.plan([], [("r", blocks[3:6], False, 90, 90)])
    starts.append([plan.start for plan in step.stores])
    step = one.scheduler.plan([], [("r", blocks[6:], False, 180, 20)])
    starts.append([plan.start for plan in step.stores])
    assert starts == [[(0,)], [(64,)], [(128,)]]
    # 200 tokens: three full spans; eight tokens are no tail. Nothing of what is decoded.
    for i in range(10):
        assert not one.scheduler.plan([], [("r", [], False, 200 + i, 1)])


def test_a_preempted_request_stores_from_its_new_blocks(engine: Make, daemon: FakeDaemon) -> None:
    one = engine("a")
    tokens = prompt(192)
    one.scheduler.add("r", tokens, DIGEST)
    one.match("r", 0, 192)
    one.prefill("r", 7, [1, 2, 3], 0, 90)
    until(lambda: daemon.spans == 1)
    # Preempted: its old blocks hold something else by now.
    one.compute(99, [1, 2, 3], 0, 96)
    assert one.match("r", 0, 192) == 64
    one.scheduler.allocated("r", [], 0)
    blocks = [7, 8, 9, 10, 11, 12]
    step = one.scheduler.plan([], [("r", blocks, True, 0, 192)])
    one.run(step, lambda: one.compute(7, blocks, 0, 192))
    until(lambda: daemon.spans == 3)
    other = engine("b")
    other.scheduler.add("s", prompt(193), DIGEST)
    assert other.match("s", 0, 193) == 192
    assert not other.load("s", blocks, 192).bad_blocks
    assert other.wrong(7, blocks, 0, 192) == []


def test_local_hits_are_stored_too(engine: Make, daemon: FakeDaemon) -> None:
    one = engine("a")
    one.compute(7, [1, 2], 0, 64)
    one.scheduler.add("r", prompt(128), DIGEST)
    assert one.match("r", 64, 128) == 0
    one.prefill("r", 7, [1, 2, 3, 4], 64, 64)
    until(lambda: daemon.spans == 2)


def test_what_another_connector_loads_is_not_stored(engine: Make, daemon: FakeDaemon) -> None:
    one = engine("a")
    one.scheduler.add("r", prompt(192), DIGEST)
    assert one.match("r", 32, 192) == 0
    # Another child of MultiConnector brings 64 tokens; we are told of the blocks and of 0 tokens.
    one.scheduler.allocated("r", [1, 2, 3], 0)
    assert not one.scheduler.plan([("r", [1, 2, 3, 4, 5, 6], 96, 96)], [])
    assert not one.scheduler.plan([], [("r", [7], False, 192, 1)])


def test_another_connectors_load_gives_our_lease_back(engine: Make, daemon: FakeDaemon) -> None:
    stored_by(engine("a"), daemon, prompt(192))
    other = engine("b")
    other.scheduler.add("r", prompt(192), DIGEST)
    assert other.match("r", 0, 192) == 160
    other.scheduler.allocated("r", [1, 2, 3], 0)
    until(lambda: daemon.leases == 0)
    assert not other.scheduler.plan([], []).loads


def test_a_second_allocation_after_the_load_changes_nothing(
    engine: Make, daemon: FakeDaemon
) -> None:
    stored_by(engine("a"), daemon, prompt(192))
    other = engine("b")
    other.scheduler.add("r", prompt(192), DIGEST)
    assert other.match("r", 0, 192) == 160
    assert not other.load("r", [1, 2, 3, 4, 5], 160).bad_blocks
    other.scheduler.allocated("r", [1, 2, 3, 4, 5, 6], 0)
    assert not other.scheduler.plan([], []).loads
    assert other.scheduler.finished("r") == {"kmesh": {"restored_tokens": 160}}


def test_small_restores_are_left_to_prefill(engine: Make, daemon: FakeDaemon) -> None:
    stored_by(engine("a"), daemon, prompt(192))
    other = engine("b", min_restore_tokens=96)
    other.scheduler.add("r", prompt(192), DIGEST)
    assert other.match("r", 96, 192) == 0
    assert other.match("r", 64, 192) == 96


def test_a_local_cache_that_shrinks_is_looked_up_again(engine: Make, daemon: FakeDaemon) -> None:
    stored_by(engine("a"), daemon, prompt(192))
    other = engine("b")
    other.scheduler.add("r", prompt(192), DIGEST)
    assert other.match("r", 128, 192) == 32
    assert other.match("r", 0, 192) == 160
    blocks = [1, 2, 3, 4, 5]
    assert not other.load("r", blocks, 160).bad_blocks
    assert other.wrong(7, blocks, 0, 160) == []


@pytest.mark.parametrize("local", [32, 64, 96, 128, 160])
def test_a_local_cache_that_grows_takes_the_rest_of_the_lease(
    engine: Make, daemon: FakeDaemon, local: int
) -> None:
    """While a request waits for its lease, another one of its engine may compute its prefix."""
    stored_by(engine("a"), daemon, prompt(328))
    other = engine("b")
    other.scheduler.add("r", prompt(328), DIGEST)
    assert other.match("r", 0, 328) == 320
    assert other.match("r", local, 328) == 320 - local
    blocks = list(range(1, 22))
    done = other.load("r", blocks, 320 - local)
    assert not done.bad_blocks
    assert not done.report.failed
    assert other.wrong(7, blocks, local, 320) == []
    assert other.scheduler.counts.take()["restored_tokens"] == 320 - local
    # Nothing of it is taken for bad: a sibling gets all.
    other.scheduler.add("s", prompt(328), DIGEST)
    assert other.match("s", 0, 328) == 320


def test_namespaces_do_not_mix(engine: Make, daemon: FakeDaemon) -> None:
    stored_by(engine("a"), daemon, prompt(192))
    other = engine("b")
    other.scheduler.add("r", prompt(192), b"another namespace of 32 bytes...")
    assert other.match("r", 0, 192) == 0


def test_after_a_reset_nothing_old_is_used(engine: Make, daemon: FakeDaemon) -> None:
    one = engine("a")
    stored_by(one, daemon, prompt(192))
    one.scheduler.add("r", prompt(192), DIGEST)
    assert one.match("r", 0, 192) == 160
    assert one.scheduler.reset_word == ""
    one.scheduler.reset()
    assert len(one.scheduler.reset_word) == 32
    assert one.match("r", 0, 192) == 0
    assert not one.scheduler.plan([("r", [1, 2, 3, 4, 5, 6], 0, 192)], [])
    until(lambda: daemon.leases == 0)


def test_roles_and_settings_turn_halves_off(engine: Make, daemon: FakeDaemon) -> None:
    stored_by(engine("a"), daemon, prompt(192))
    other = engine("b", load=False, store=False)
    other.scheduler.add("r", prompt(192), DIGEST)
    assert other.match("r", 0, 192) == 0
    assert not other.scheduler.plan([("r", [1, 2, 3, 4, 5, 6], 0, 192)], [])


def test_shutdown_gives_everything_back(engine: Make, daemon: FakeDaemon) -> None:
    stored_by(engine("a"), daemon, prompt(192))
    threads = threading.active_count()
    other = engine("b")
    for name in ("r", "s"):
        other.scheduler.add(name, prompt(192), DIGEST)
    assert other.match("r", 0, 192) == 160
    other.scheduler.shutdown()
    until(lambda: daemon.leases == 0)
    other.close()
    until(lambda: threading.active_count() == threads)


def test_a_lease_that_comes_soon_is_waited_for(engine: Make, daemon: FakeDaemon) -> None:
    """Asking again costs a step, and the answer's thread the interpreter."""
    stored_by(engine("a"), daemon, prompt(192))
    other = engine("b", patience=30.0)
    other.scheduler.add("r", prompt(192), DIGEST)
    assert other.scheduler.match("r", 0, 192) == (160, True)
    other.scheduler.allocated("r", [], 0)
    until(lambda: daemon.leases == 0)


def test_patience_is_for_a_step_not_for_each_request(engine: Make, daemon: FakeDaemon) -> None:
    stored_by(engine("a"), daemon, prompt(192))
    other = engine("b", patience=0.05, sharing=False)
    with daemon.hold("acquire"):
        for name in ("r", "s"):
            other.scheduler.add(name, prompt(192), DIGEST)
            assert other.scheduler.match(name, 0, 192) == (None, False)
    assert other.scheduler._patience._left <= 0
    other.scheduler.plan([], [])
    assert other.scheduler._patience._left == 0.05
    for name in ("r", "s"):
        assert other.match(name, 0, 192) == 160


def test_counts_are_told_in_steps_that_compute(engine: Make, daemon: FakeDaemon) -> None:
    """vLLM does not always look at those of a step without output."""
    one = engine("a")
    stored_by(one, daemon, prompt(128))
    (worker,) = one.workers
    until(lambda: worker.counts._values.get("stored_spans") == 2)
    one.scheduler.counts.add("acquire_late")
    one.run(one.scheduler.plan([], []))
    assert (worker.told(), one.scheduler.told()) == ({}, {})
    one.scheduler.add("x", prompt(32, seed=8), DIGEST)
    one.prefill("x", 1, [9], 0, 32)
    assert worker.told()["stored_spans"] >= 2
    assert one.scheduler.told() == {"acquire_late": 1}
    assert worker.told() == {}
