"""Both halves together: what one engine stores, another restores, bit for bit."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from typing import Any

import pytest
from mini_engine import DIM, HEADS, LAYERS, NAMESPACE, MiniEngine, until

from kmesh.testing import FakeDaemon, Limits
from kmesh_vllm import hostmover

DIGEST = NAMESPACE.digest()
Make = Callable[..., MiniEngine]


def prompt(count: int, seed: int = 0) -> list[int]:
    return [(i * 31 + seed * 977) % 5000 for i in range(count)]


def stored_by(engine: MiniEngine, daemon: FakeDaemon, tokens: list[int], seed: int = 7) -> None:
    """One engine computes a whole prompt and stores it."""
    before = daemon.spans
    engine.scheduler.add("first", tokens, DIGEST)
    assert engine.match("first", 0, len(tokens)) == 0
    count = -(-len(tokens) // engine.block)
    blocks = list(range(1, count + 1))[::-1]
    engine.scheduler.allocated("first", blocks, 0)
    engine.prefill("first", seed, blocks, 0, len(tokens))
    ranks = min(len(engine.workers), HEADS)
    spans = (len(tokens) // 64 + (len(tokens) % 64 >= 16)) * ranks
    until(lambda: daemon.spans == before + spans)
    engine.scheduler.finished("first")


@pytest.mark.parametrize("tokens", [127, 128, 129, 191, 192, 193, 200, 215])
@pytest.mark.parametrize("block", [16, 32, 64, 128])
def test_restores_every_whole_block_but_the_last_token(
    engine: Make, daemon: FakeDaemon, tokens: int, block: int
) -> None:
    stored_by(engine("a", block=block), daemon, prompt(tokens))
    other = engine("b", block=block)
    other.scheduler.add("r", prompt(tokens), DIGEST)
    found = other.match("r", 0, tokens)
    # Of the tail behind the last full span, multiples of 16 tokens are stored.
    known = tokens // 16 * 16
    assert found == min(known, tokens - 1) // block * block
    if not found:
        return
    blocks = list(range(5, 5 + found // block))
    outcome = other.load("r", blocks, found)
    assert not outcome.bad_blocks
    assert other.wrong(7, blocks, 0, found) == []
    assert other.scheduler.finished("r") == {"kmesh": {"restored_tokens": found}}
    until(lambda: daemon.leases == 0)


@pytest.mark.parametrize(("stored", "restored"), [(1, 2), (2, 1), (2, 4), (4, 2), (1, 8), (8, 1)])
def test_any_sharding_serves_any_other(
    engine: Make, daemon: FakeDaemon, stored: int, restored: int
) -> None:
    stored_by(engine("a", tp=stored), daemon, prompt(200))
    other = engine("b", tp=restored)
    other.scheduler.add("r", prompt(200), DIGEST)
    assert other.match("r", 0, 200) == 192
    blocks = [9, 4, 7, 2, 8, 1]
    assert not other.load("r", blocks, 192).bad_blocks
    assert other.wrong(7, blocks, 0, 192) == []
    # Nothing is stored a second time under the other sharding.
    before = daemon.spans
    other.prefill("r", 7, [*blocks, 3], 192, 8)
    assert daemon.spans == before


def test_stores_and_restores_under_the_requests_salt(engine: Make, daemon: FakeDaemon) -> None:
    """Both halves say the salt: what was stored under one is leased to nobody without it."""
    salt = b"s" * 32
    storing, other = engine("a"), engine("b")
    storing.scheduler.add("first", prompt(128), DIGEST, salt=salt)
    assert storing.match("first", 0, 128) == 0
    storing.scheduler.allocated("first", [3, 1, 2, 4], 0)
    storing.prefill("first", 7, [3, 1, 2, 4], 0, 128)
    until(lambda: daemon.spans == 2)
    other.scheduler.add("without", prompt(130), DIGEST)
    assert other.match("without", 0, 130) == 0
    other.scheduler.add("with", prompt(130), DIGEST, salt=salt)
    assert other.match("with", 0, 130) == 128
    assert not other.load("with", [5, 1, 2, 9], 128).bad_blocks
    assert other.wrong(7, [5, 1, 2, 9], 0, 128) == []


@pytest.mark.parametrize("local", [32, 64, 96])
def test_loads_behind_a_local_hit_and_not_over_it(
    engine: Make, daemon: FakeDaemon, local: int
) -> None:
    stored_by(engine("a"), daemon, prompt(200))
    other = engine("b")
    other.scheduler.add("r", prompt(200), DIGEST)
    found = other.match("r", local, 200)
    assert found == 192 - local
    blocks = [11, 3, 8, 2, 9, 4]
    assert not other.load("r", blocks, found).bad_blocks
    assert other.wrong(7, blocks, local, 192) == []
    assert other.wrong(7, blocks, 0, local) == list(range(local)), "wrote over local blocks"


@pytest.mark.parametrize("heads_last", [False, True])
@pytest.mark.parametrize("kernel_block", [16, 32, 64])
def test_strides_and_split_blocks(
    engine: Make, daemon: FakeDaemon, heads_last: bool, kernel_block: int
) -> None:
    layout = {"block": 64, "kernel_block": kernel_block, "heads_last": heads_last}
    stored_by(engine("a", **layout), daemon, prompt(130))
    other = engine("b", block=32)
    other.scheduler.add("r", prompt(130), DIGEST)
    assert other.match("r", 0, 130) == 128
    assert not other.load("r", [5, 1, 2, 9], 128).bad_blocks
    assert other.wrong(7, [5, 1, 2, 9], 0, 128) == []


def test_half_a_shared_tail_is_found_by_its_sub_key(engine: Make, daemon: FakeDaemon) -> None:
    stored_by(engine("a", block=16), daemon, prompt(64 + 48))
    other = engine("b", block=16)
    tokens = prompt(64 + 32) + prompt(64, seed=5)
    other.scheduler.add("r", tokens, DIGEST)
    assert other.match("r", 0, len(tokens)) == 96
    blocks = [5, 1, 2, 9, 7, 3]
    assert not other.load("r", blocks, 96).bad_blocks
    assert other.wrong(7, blocks, 0, 96) == []


def test_a_corrupt_span_names_its_blocks_and_is_reported(engine: Make, daemon: FakeDaemon) -> None:
    stored_by(engine("a"), daemon, prompt(256))
    other = engine("b")
    other.scheduler.add("r", prompt(256), DIGEST)
    assert other.match("r", 0, 256) == 224
    state = other.scheduler._states["r"]
    key = state.chain(64, 16).key(1)
    daemon.corrupt(key, other.identity.sharding.shards[0])
    blocks = [11, 12, 13, 14, 15, 16, 17]
    outcome = other.load("r", blocks, 224)
    assert outcome.bad_blocks == {13, 14}
    assert other.wrong(7, blocks, 0, 64) == []
    # The request is not promised anything again, and others are kept away from the span.
    assert other.match("r", 0, 256) == 0
    assert other.scheduler.finished("r") == {"kmesh": {"restored_tokens": 64}}
    other.scheduler.add("s", prompt(256), DIGEST)
    assert other.match("s", 0, 256) == 64
    other.scheduler.finished("s")
    until(lambda: daemon.leases == 0)
    assert other.workers[0].counts.take()["load_failed_corrupt"] == 1


def test_recomputed_spans_are_stored_again(engine: Make, daemon: FakeDaemon) -> None:
    stored_by(engine("a"), daemon, prompt(192))
    other = engine("b")
    other.scheduler.add("r", prompt(192), DIGEST)
    assert other.match("r", 0, 192) == 160
    key = other.scheduler._states["r"].chain(64, 16).key(1)
    daemon.corrupt(key, other.identity.sharding.shards[0])
    blocks = [11, 12, 13, 14, 15, 16]
    assert other.load("r", blocks[:5], 160).bad_blocks == {13, 14}
    until(lambda: daemon.leases == 0)
    step = other.prefill("r", 7, blocks, 64, 128)
    assert [plan.start for plan in step.stores] == [(64,)]
    until(lambda: daemon.spans == 3)


def test_a_dead_daemon_fails_the_load_in_time(engine: Make, daemon: FakeDaemon) -> None:
    stored_by(engine("a"), daemon, prompt(192))
    other = engine("b", load_timeout_ms=300)
    other.scheduler.add("r", prompt(192), DIGEST)
    assert other.match("r", 0, 192) == 160
    daemon.disconnect()
    until(lambda: other.workers_client.session is not None and other.workers_client.session.closed)
    other.workers_client.session = None
    other.client.session = None
    outcome = other.load("r", [1, 2, 3, 4, 5], 160)
    assert outcome.bad_blocks == {1, 2, 3, 4, 5}
    assert other.match("r", 0, 192) == 0


def test_a_copy_under_way_keeps_its_memory_when_the_session_ends(
    engine: Make, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored_by(engine("a"), daemon, prompt(192))
    other = engine("b")
    other.scheduler.add("r", prompt(192), DIGEST)
    assert other.match("r", 0, 192) == 160
    session = other.workers_client.session
    assert session is not None
    inner = hostmover.scatter_packed

    def scatter(*arguments: Any) -> bytes:
        daemon.disconnect()
        until(lambda: session.closed)
        time.sleep(0.05)
        return inner(*arguments)

    monkeypatch.setattr(hostmover, "scatter_packed", scatter)
    assert not other.load("r", [1, 2, 3, 4, 5], 160).bad_blocks
    assert other.wrong(7, [1, 2, 3, 4, 5], 0, 160) == []


def test_a_late_load_is_given_up_and_never_writes(engine: Make, daemon: FakeDaemon) -> None:
    stored_by(engine("a"), daemon, prompt(192))
    other = engine("b", load_timeout_ms=100)
    other.scheduler.add("r", prompt(192), DIGEST)
    assert other.match("r", 0, 192) == 160
    with daemon.hold("attach_slab"):
        outcome = other.load("r", [1, 2, 3, 4, 5], 160)
    assert outcome.bad_blocks == {1, 2, 3, 4, 5}
    other.workers[0].close()
    assert other.wrong(7, [1, 2, 3, 4, 5], 0, 160) == list(range(160)), "wrote after its end"


def test_loads_do_not_queue_behind_those_that_wait_for_memory() -> None:
    """However many of these there are."""
    tokens, blocks = 256, 7
    tile = 1 << 16
    with FakeDaemon(Limits(slab_bytes=5 * tile, slabs=4)) as daemon:
        one = MiniEngine(daemon, "a")
        for seed in range(4):
            # Four spans of a tile each fill a slab.
            stored_by(one, daemon, prompt(tokens, seed), seed=seed)
        other = MiniEngine(daemon, "b")
        try:
            ranges = [list(range(1 + n * blocks, 1 + (n + 1) * blocks)) for n in range(5)]
            for name, seed in (("before", 0), ("x", 1), ("y", 2), ("z", 3), ("after", 0)):
                other.scheduler.add(name, prompt(tokens, seed), DIGEST)
                assert other.match(name, 0, tokens) == 32 * blocks
            assert not other.load("before", ranges[0], 32 * blocks).bad_blocks
            with daemon.hold("attach_slab"):
                for name, mine in zip("xyz", ranges[1:4], strict=True):
                    other.scheduler.allocated(name, mine, 32 * blocks)
                    other.run(other.scheduler.plan([], []))
                assert not other.load("after", ranges[4], 32 * blocks).bad_blocks
                assert other.wrong(0, ranges[4], 0, 32 * blocks) == []
                assert other.workers[0].finished() == set()
            ended: set[str] = set()
            until(lambda: ended.update(other.workers[0].finished()) or ended == {*"xyz"})
            assert other.workers[0].bad_blocks() == set()
            for seed in (1, 2, 3):
                assert other.wrong(seed, ranges[seed], 0, 32 * blocks) == []
        finally:
            other.close()
            one.close()


def test_aborted_while_loading_keeps_its_lease_until_the_end(
    engine: Make, daemon: FakeDaemon
) -> None:
    stored_by(engine("a"), daemon, prompt(192))
    other = engine("b")
    other.scheduler.add("r", prompt(192), DIGEST)
    assert other.match("r", 0, 192) == 160
    other.scheduler.allocated("r", [1, 2, 3, 4, 5], 160)
    assert other.scheduler.finished("r") == {"kmesh": {"restored_tokens": 0}}
    assert len(other.scheduler) == 1
    assert daemon.leases == 1
    other.run(other.scheduler.plan([], []))
    other.settle("r")
    assert len(other.scheduler) == 0
    until(lambda: daemon.leases == 0)


def test_an_id_used_again_during_its_load_computes(engine: Make, daemon: FakeDaemon) -> None:
    stored_by(engine("a"), daemon, prompt(192))
    other = engine("b")
    other.scheduler.add("r", prompt(192), DIGEST)
    assert other.match("r", 0, 192) == 160
    other.scheduler.allocated("r", [1, 2, 3, 4, 5], 160)
    other.scheduler.finished("r")
    other.scheduler.add("r", prompt(192), DIGEST)
    assert other.scheduler.match("r", 0, 192) == (0, False)
    other.run(other.scheduler.plan([], []))
    other.settle("r")
    other.scheduler.finished("r")
    until(lambda: daemon.leases == 0)
    assert len(other.scheduler) == 0


def test_a_failed_forward_pass_stores_nothing(engine: Make, daemon: FakeDaemon) -> None:
    one = engine("a")
    one.scheduler.add("r", prompt(128), DIGEST)
    step = one.scheduler.plan([("r", [1, 2, 3, 4], 0, 128)], [])
    assert len(step.stores) == 1
    one.workers[0].begin(step)
    one.workers[0].save(failed=True)
    until(lambda: daemon.reservations == 0)
    one.workers[0].begin(one.scheduler.plan([], []))
    one.workers[0].save(failed=False)
    assert daemon.spans == 0


SPAN_BYTES = LAYERS * 2 * HEADS * 64 * DIM * 4


def test_a_step_larger_than_the_staging_is_stored_in_turns(
    engine: Make, daemon: FakeDaemon
) -> None:
    one = engine("a", staging_bytes=2 * SPAN_BYTES)
    tokens = prompt(320)
    one.scheduler.add("r", tokens, DIGEST)
    one.prefill("r", 7, list(range(10)), 0, 320)
    until(lambda: daemon.spans == 5)
    other = engine("b")
    other.scheduler.add("s", [*tokens, 1], DIGEST)
    assert other.match("s", 0, 321) == 320
    assert not other.load("s", list(range(10)), 320).bad_blocks
    assert other.wrong(7, list(range(10)), 0, 320) == []


def test_staging_that_stays_full_skips_and_counts(engine: Make, daemon: FakeDaemon) -> None:
    one = engine("a", staging_bytes=2 * SPAN_BYTES, reserve_timeout_ms=100)
    one.scheduler.add("r", prompt(320), DIGEST)
    with daemon.hold("commit"):
        one.prefill("r", 7, list(range(10)), 0, 320, one.reserved)
        assert one.workers[0].counts.take() == {"store_skipped_staging": 3}
    until(lambda: one.workers[0].counts.take().get("stored_spans") == 2)
    until(lambda: daemon.reservations == 0)
    # The room is free again.
    one.scheduler.add("s", prompt(128, seed=3), DIGEST)
    one.prefill("s", 8, list(range(20, 24)), 0, 128, one.reserved)
    until(lambda: daemon.spans == 4)


def test_no_step_waits_for_an_abort(engine: Make, daemon: FakeDaemon) -> None:
    one = engine("a", staging_bytes=2 * SPAN_BYTES, reserve_timeout_ms=100)
    one.scheduler.add("r", prompt(320), DIGEST)
    session = one.workers_client.session
    assert session is not None
    with daemon.hold("commit"), daemon.hold("abort"):
        one.prefill("r", 7, list(range(10)), 0, 320, one.reserved)
        assert one.workers[0].counts.take() == {"store_skipped_staging": 3}
        # Both are still to be answered: had the step waited, the abort would be no more.
        until(lambda: session.pending == 2)
    until(lambda: daemon.reservations == 0)
    assert daemon.spans == 2


def test_a_span_larger_than_the_staging_is_skipped(engine: Make, daemon: FakeDaemon) -> None:
    one = engine("a", staging_bytes=SPAN_BYTES // 2)
    one.scheduler.add("r", prompt(128), DIGEST)
    one.prefill("r", 7, list(range(4)), 0, 128)
    assert one.workers[0].counts.take() == {"store_skipped_staging": 2}


def test_staging_that_others_have_is_asked_for_again(engine: Make, daemon: FakeDaemon) -> None:
    greedy = engine("a", staging_bytes=daemon.limits.max_staging_bytes)
    stored_by(greedy, daemon, prompt(128))
    other = engine("b")
    other.scheduler.add("r", prompt(128, seed=1), DIGEST)
    other.prefill("r", 8, list(range(4)), 0, 128)
    assert other.workers[0].counts.take() == {"store_skipped_staging": 2}
    greedy.close()
    saver = other.workers[0]._saver
    assert saver is not None
    saver._reserver._ask_at = 0.0
    stored_by(other, daemon, prompt(128, seed=2))


def test_late_reservations_are_given_back(engine: Make, daemon: FakeDaemon) -> None:
    one = engine("a", reserve_timeout_ms=300)
    one.scheduler.add("r", prompt(128), DIGEST)
    saver = one.workers[0]._saver
    assert saver is not None
    with daemon.hold("reserve"):
        one.prefill("r", 7, [1, 2, 3, 4], 0, 128)
        assert one.workers[0].counts.take() == {"store_skipped_late": 2}
        # The next step has nothing to wait for while the daemon hangs.
        one.scheduler.add("s", prompt(128, seed=3), DIGEST)
        waits_for: list[object] = []
        one.prefill("s", 8, [5, 6, 7, 8], 0, 128, lambda: waits_for.append(saver._pending))
        assert waits_for == [None]
        assert one.workers[0].counts.take() == {"store_skipped_late": 2}
        until(lambda: daemon.reservations == 2)
    until(lambda: daemon.reservations == 0)
    assert daemon.spans == 0


def test_a_step_is_small_when_pickled(engine: Make, daemon: FakeDaemon) -> None:
    stored_by(engine("a", blocks=300), daemon, prompt(32 * 64))
    other = engine("b", blocks=300)
    other.scheduler.add("r", prompt(32 * 64 + 1), DIGEST)
    found = other.match("r", 0, 32 * 64 + 1)
    other.scheduler.allocated("r", list(range(64)), found)
    step = other.scheduler.plan([], [])
    assert len(pickle.dumps(step)) < 32 * 64 + 64 * 8 + 1000
