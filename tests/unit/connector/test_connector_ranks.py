"""Two ranks restore one request: what happens to one of them is what happens to both."""

from __future__ import annotations

import pytest
from fake_gpu_streams import FakeGpu
from gpu_cases import Make, promised, prompt, stored_by, warm
from mini_engine import WAIT, MiniEngine, until

from kmesh.testing import FakeDaemon

BLOCKS = [5, 1, 2, 9, 7, 3]


def two_ranks(engine: Make, daemon: FakeDaemon, **settings: int) -> tuple[MiniEngine, FakeGpu]:
    """An engine with a GPU for each rank, and the second one's; another engine has stored."""
    stored_by(engine("a"), daemon, prompt(200))
    gpus = [FakeGpu(), FakeGpu()]
    other = engine("b", tp=2, gpu=gpus, **settings)
    warm(other, daemon)
    for worker in other.workers:
        until(worker._mover.ready)  # type: ignore[union-attr]
    assert promised(other, "r", prompt(200)) == 192
    return other, gpus[1]


def begun(other: MiniEngine) -> None:
    """The load is on its way on both."""
    other.scheduler.allocated("r", BLOCKS, 192)
    other.run(other.scheduler.plan([], []))


def test_a_request_waits_for_its_slowest_rank(engine: Make, daemon: FakeDaemon) -> None:
    other, second = two_ranks(engine, daemon)
    second.held = True
    begun(other)
    until(lambda: other.workers[0].finished() == {"r"}, WAIT)
    assert other.workers[1].finished() == set()
    # The spans stay leased as long as one of them may read.
    assert daemon.leases == 1
    second.held = False
    second.run()
    until(lambda: other.workers[1].finished() == {"r"}, WAIT)
    other.scheduler.worked(None, ["r"])
    assert not any(worker.bad_blocks() for worker in other.workers)
    assert other.wrong(7, BLOCKS, 0, 192) == []
    until(lambda: daemon.leases == 0, WAIT)


def test_a_gpu_that_dies_under_one_rank_makes_the_request_recompute(
    engine: Make, daemon: FakeDaemon
) -> None:
    other, second = two_ranks(engine, daemon)
    second.held = True
    begun(other)
    second.dead = True
    outcome = other.settle("r", WAIT)
    second.dead = second.held = False
    assert outcome.bad_blocks == set(BLOCKS)
    assert other.scheduler.finished("r") == {"kmesh": {"restored_tokens": 0}}
    assert other.workers[0].counts.take().get("load_failed_error") is None
    assert other.workers[1].counts.take()["load_failed_error"] == 1
    until(lambda: daemon.leases == 0, WAIT)
    # Nothing more is promised to it, so that both ranks compute.
    assert promised(other, "r", prompt(200)) == 0


def test_a_load_that_is_late_on_one_rank_makes_the_request_recompute(
    engine: Make, daemon: FakeDaemon
) -> None:
    other, _ = two_ranks(engine, daemon, load_timeout_ms=300)
    late = other.workers[1]
    session = late._client.session
    assert session is not None
    # As for a worker that has lost the daemon and does not know it yet.
    late._client.session = None  # type: ignore[misc]
    begun(other)
    outcome = other.settle("r", WAIT)
    late._client.session = session  # type: ignore[misc]
    assert outcome.bad_blocks == set(BLOCKS)
    assert other.scheduler.finished("r") == {"kmesh": {"restored_tokens": 0}}
    counted = late.counts.take()
    assert counted.get("load_failed_late", 0) + counted.get("load_failed_lost", 0) == 1
    until(lambda: daemon.leases == 0, WAIT)


@pytest.mark.parametrize("rank", [0, 1])
def test_wrong_bytes_in_one_ranks_half_are_recomputed_by_both(
    engine: Make, daemon: FakeDaemon, rank: int
) -> None:
    """Of a span that two ranks have stored the other half may be sound."""
    one = engine("a", tp=2)
    one.scheduler.add("first", prompt(200), one.identity.namespace.digest())
    assert one.match("first", 0, 200) == 0
    ids = list(range(7))
    one.scheduler.allocated("first", ids, 0)
    one.prefill("first", 7, ids, 0, 200)
    until(lambda: daemon.spans == 3 * 2)
    other = engine("b", tp=2)
    assert promised(other, "r", prompt(200)) == 192
    key = other.scheduler._states["r"].chain(64, 16).key(1)
    daemon.corrupt(key, other.identity.sharding.shards[rank])
    assert other.load("r", BLOCKS, 192).bad_blocks == {2, 9}
    assert other.scheduler.finished("r") == {"kmesh": {"restored_tokens": 64}}
    until(lambda: daemon.leases == 0, WAIT)
