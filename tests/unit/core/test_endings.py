"""The memory of keys that are gone."""

from __future__ import annotations

import sys

import hypothesis.strategies as st
from asking import A, B
from contents import OTHER_SHARD, SHARD, key
from hypothesis import given, settings
from world import World

from kmesh_spand.core import events as ev
from kmesh_spand.core.codes import Cause, Verdict
from kmesh_spand.core.endings import Ending, Endings

KEYS = [key(n) for n in range(6)] + [bytes(32), bytes(31) + b"\1"]
ended = st.tuples(
    st.sampled_from(KEYS), st.sampled_from([3, 2**64 - 1]), st.sampled_from(list(Cause))
)


@settings(deadline=None)
@given(st.integers(0, 9), st.lists(ended, max_size=60))
def test_the_last_ones_are_found_and_no_others(
    limit: int, added: list[tuple[bytes, int, Cause]]
) -> None:
    endings = Endings(limit)
    for tick, (name, shard, cause) in enumerate(added):
        endings.add(name, shard, cause, tick)
    kept = [(name, Ending(*rest, tick)) for tick, (name, *rest) in enumerate(added)]
    forgotten, kept = kept[: max(0, len(kept) - limit)], kept[max(0, len(kept) - limit) :]
    assert len(endings) == len(kept)
    for name in KEYS:
        assert list(endings.of(name)) == [what for other, what in reversed(kept) if other == name]
    newest = kept[-1] if kept else None
    if newest is not None:
        assert endings.last(newest[0], newest[1].shard) == newest[1]
    assert endings.last(KEYS[0], 77) is None
    if not forgotten:
        assert endings.oldest is None
    elif kept:
        assert endings.oldest == kept[0][1].tick


def test_an_ending_takes_at_most_64_bytes() -> None:
    for limit in (1 << 15, 40_000):
        endings = Endings(limit)
        columns = [getattr(endings, name) for name in vars(endings)]
        held = sum(sys.getsizeof(c) for c in columns if not isinstance(c, int))
        assert held <= 64 * limit


def test_a_key_that_came_back_is_no_ended_one(world: World) -> None:
    one = world.connect()
    fates = world.core.fates
    world.store(one, [A])
    slot = world.core.views.spans(now_ms=0)[0].slot
    world.send(ev.Evict([slot]))
    world.now += 640
    assert fates.of(A, SHARD, world.now).cause is Cause.OPERATOR
    assert fates.of(A, SHARD, world.now).ago_ms == 640
    assert fates.of(A, OTHER_SHARD, world.now).verdict is Verdict.NEVER
    world.store(one, [A])
    assert fates.of(A, SHARD, world.now).verdict is Verdict.SERVED
    assert fates.served(A + B, SHARD) == 1


def test_shards_of_keys_that_are_here_or_were(world: World) -> None:
    one = world.connect()
    world.store(one, [A], shard=SHARD)
    world.store(one, [B], shard=OTHER_SHARD)
    world.send(ev.Evict([row.slot for row in world.core.views.spans(now_ms=0) if row.key == B]))
    assert world.core.fates.shards(A + B, 9) == [SHARD, OTHER_SHARD]
    assert world.core.fates.shards(A + B, 1) == [SHARD]
    assert world.core.fates.shards(key("x"), 9) == []
