"""Requests that say what of their prompt others share, against a fake daemon."""

from __future__ import annotations

import json
from typing import Any

import pytest
from mini_engine import MiniEngine
from segment_cases import (
    DIGEST,
    MINUTES,
    OWN,
    SAID,
    Make,
    computes,
    keyed,
    keys_of,
    stored,
    until,
    until_stored,
    wrong_bytes,
)
from test_connector_halves import prompt

from kmesh.errors import ConfigError
from kmesh.segments import SegmentedPrompt
from kmesh.testing import FakeDaemon
from kmesh_vllm.config import Settings


@pytest.mark.parametrize(
    ("block", "steps", "tp"), [(32, 1, 1), (16, 5, 1), (128, 3, 2), (64, 237, 1)]
)
def test_a_shared_segment_is_stored_where_it_was_computed(
    patient: Make, daemon: FakeDaemon, block: int, steps: int, tp: int
) -> None:
    one = patient("a", block=block, tp=tp)
    told = computes(one, "r", [*OWN, *MINUTES], SAID.to_params(), steps=steps)
    assert told == {"restored_tokens": 0}
    (minutes,) = keyed(SAID, [*OWN, *MINUTES])
    # 237 tokens of the prompt in four spans, 192 of the segment's 200 in three.
    until(lambda: daemon.spans == (4 + 3) * tp)
    assert stored(one, keys_of(minutes))
    assert wrong_bytes(one, minutes, seed=7, begin=37) == []
    assert len(one.scheduler.segmenting) == 0


def test_a_prefix_restore_is_what_it_was(patient: Make, daemon: FakeDaemon) -> None:
    """A segment that is stored is not restored: its bytes are those of another position."""
    computes(patient("a"), "r", [*OWN, *MINUTES], SAID.to_params())
    until(lambda: daemon.spans == 7)
    other = patient("b")
    moved = SegmentedPrompt("round-17").with_shared(200, "minutes-16").with_private(37)
    for name, tokens, said, found in (
        ("moved", [*MINUTES, *OWN], moved, 0),
        ("same", [*OWN, *MINUTES], SAID, 224),
        ("silent", [*OWN, *MINUTES], None, 224),
    ):
        params = said.to_params() if said else None
        other.scheduler.add(name, tokens, DIGEST, params=params)
        assert other.match(name, 0, 237, 30.0) == found, name
        other.scheduler.allocated(name, [], 0)
        other.scheduler.finished(name)
    until(lambda: daemon.leases == 0)


def test_a_segment_is_stored_once_and_found_anywhere(patient: Make, daemon: FakeDaemon) -> None:
    computes(patient("a"), "r", [*OWN, *MINUTES], SAID.to_params())
    until(lambda: daemon.spans == 7)
    other = patient("b")
    # The minutes first, then something of its own, then the minutes again.
    said = SegmentedPrompt("round-17").with_shared(200, "x").with_private(50).with_shared(200)
    tokens = [*MINUTES, *prompt(50, seed=3), *MINUTES]
    computes(other, "r", tokens, said.to_params(), seed=9)
    counts = other.scheduler.counts.take()
    assert (counts["segment_requests"], counts["segment_hits"]) == (1, 2)
    assert "segment_misses" not in counts
    assert "segment_spans" not in counts
    # Seven spans of the prompt, and nothing of the segments.
    until(lambda: daemon.spans == 7 + 7)
    (minutes,) = keyed(SAID, [*OWN, *MINUTES])
    assert wrong_bytes(other, minutes, seed=7, begin=37) == []


def test_a_repeat_in_one_prompt_is_stored_once(patient: Make, daemon: FakeDaemon) -> None:
    one = patient("a")
    said = SegmentedPrompt("f").with_shared(200).with_private(37).with_shared(200)
    tokens = [*MINUTES, *OWN, *MINUTES]
    computes(one, "r", tokens, said.to_params(), steps=7)
    counts = one.scheduler.counts.take()
    assert (counts["segment_misses"], counts["segment_spans"]) == (2, 3)
    until(lambda: daemon.spans == 7 + 3)
    first, second = keyed(said, tokens)
    assert keys_of(first) == keys_of(second)
    assert wrong_bytes(one, first, seed=7, begin=0) == []


def test_siblings_leave_a_segment_to_the_first(patient: Make, daemon: FakeDaemon) -> None:
    now = [0.0]
    one = patient("a", clock=lambda: now[0])
    scheduler = one.scheduler
    prompts = {f"r{i}": [*prompt(37, seed=60 + i), *MINUTES] for i in range(3)}
    for name, tokens in prompts.items():
        scheduler.add(name, tokens, DIGEST, params=SAID.to_params())
        assert one.match(name, 0, 237, 30.0) == 0
    # The first and the second begin together; the first is aborted before it comes to the minutes.
    step = scheduler.plan([("r0", [1, 2, 3], 0, 90), ("r1", list(range(11, 19)), 0, 237)], [])
    assert [len(plan.tokens) for plan in step.stores] == [1, 4]
    scheduler.finished("r0")
    step = scheduler.plan([("r2", list(range(21, 29)), 0, 237)], [])
    assert [len(plan.tokens) for plan in step.stores] == [4, 3]
    # What was not stored after all is stored by whoever comes later.
    late = [*prompt(37, seed=90), *MINUTES]
    for at, spans in ((29.0, [4]), (31.0, [4, 3])):
        now[0] = at
        scheduler.add("late", late, DIGEST, params=SAID.to_params())
        step = scheduler.plan([("late", list(range(31, 39)), 0, 237)], [])
        assert [len(plan.tokens) for plan in step.stores] == spans
        scheduler.finished("late")


def test_segments_come_behind_all_prefixes_of_a_step(patient: Make) -> None:
    """Where there is no room for all of them, prefixes come first."""
    scheduler = patient("a").scheduler
    new = []
    for i in range(2):
        tokens = [*prompt(37, seed=60 + i), *prompt(200, seed=70 + i)]
        scheduler.add(f"r{i}", tokens, DIGEST, params=SAID.to_params())
        new.append((f"r{i}", list(range(1 + 10 * i, 9 + 10 * i)), 0, 237))
    step = scheduler.plan(new, [])
    assert [len(plan.tokens) for plan in step.stores] == [4, 4, 3, 3]
    assert [plan.start[0] for plan in step.stores] == [0, 0, 37, 37]


def test_part_of_a_segment_that_is_there_is_not_stored_again(
    patient: Make, daemon: FakeDaemon
) -> None:
    computes(patient("a"), "r", MINUTES[:64], SegmentedPrompt("f").with_shared(64).to_params())
    until(lambda: daemon.spans == 2)
    other = patient("b")
    computes(other, "r", [*OWN, *MINUTES], SAID.to_params())
    assert other.scheduler.counts.take()["segment_spans"] == 2
    until(lambda: daemon.spans == 2 + 4 + 2)


def test_segments_of_a_request_without_a_family_are_only_looked_for(
    patient: Make, daemon: FakeDaemon
) -> None:
    one = patient("a")
    said = SegmentedPrompt().with_private(37).with_shared(200)
    computes(one, "r", [*OWN, *MINUTES], said.to_params())
    until(lambda: daemon.spans == 4)
    assert one.scheduler.counts.take()["segment_misses"] == 1
    off = patient("b", store_segments=False)
    computes(off, "r", [*prompt(37, seed=9), *MINUTES], SAID.to_params())
    until(lambda: daemon.spans == 8)


def test_private_segments_get_no_key(patient: Make, daemon: FakeDaemon) -> None:
    one = patient("a")
    said = SegmentedPrompt("f").with_private(237)
    computes(one, "r", [*OWN, *MINUTES], said.to_params())
    until(lambda: daemon.spans == 4)
    assert one.scheduler.counts.take().keys() >= {"segment_requests"}
    assert len(one.scheduler.segmenting.book) == 0


def test_namespaces_and_salts_are_kept_apart(patient: Make, daemon: FakeDaemon) -> None:
    one = patient("a")
    tokens = [*OWN, *MINUTES]
    computes(one, "r", tokens, SAID.to_params())
    computes(one, "s", tokens, SAID.to_params(), namespace=b"n" * 32, salt=b"s" * 32)
    counts = one.scheduler.counts.take()
    assert counts["segment_misses"] == 2
    assert "segment_hits" not in counts
    until(lambda: daemon.spans == 14)
    # An id that one tenant used says nothing to another, not even that it is known.
    params = {"kmesh": {"segments": [{"tokens": 37}, {"id": "minutes-16"}]}}
    for namespace, refused in ((DIGEST, False), (b"n" * 32, False), (b"o" * 32, True)):
        told = computes_nothing(one, tokens, params, namespace)
        assert ("refused" in told) == refused
        if refused:
            assert told["refused"]["why"].startswith("not known")


def computes_nothing(
    engine: MiniEngine, tokens: list[int], params: object, namespace: bytes = DIGEST
) -> dict[str, Any]:
    """A request that ends before it runs; what its client is told."""
    engine.scheduler.add("short", tokens, namespace, params=params)
    said = engine.scheduler.finished("short")
    assert said is not None
    return dict(said["kmesh"])


def test_an_id_may_name_other_tokens_later(patient: Make, daemon: FakeDaemon) -> None:
    one = patient("a")
    by_id = {"kmesh": {"segments": [{"tokens": 37}, {"id": "minutes-16"}]}}
    computes(one, "r", [*OWN, *MINUTES], SAID.to_params())
    assert "refused" not in computes_nothing(one, [*OWN, *MINUTES], by_id)
    changed = prompt(200, seed=77)
    computes(one, "s", [*OWN, *changed], SAID.to_params(), seed=8)
    counts = one.scheduler.counts.take()
    assert (counts["segment_misses"], counts.get("segment_hits", 0)) == (2, 0)
    assert "refused" not in computes_nothing(one, [*OWN, *changed], by_id)
    told = computes_nothing(one, [*OWN, *MINUTES], by_id)
    assert told["refused"]["field"] == "kmesh.segments[1].id"
    # Both contents are there, each under its own key.
    for tokens, seed in ((MINUTES, 7), (changed, 8)):
        (segment,) = keyed(SAID, [*OWN, *tokens])
        until_stored(one, segment)
        assert wrong_bytes(one, segment, seed=seed, begin=37) == []


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"kmesh": {"family": "f", "segments": [{"tokens": 100}]}}, "kmesh.segments"),
        (
            {"kmesh": {"family": "f", "segments": [{"tokens": 10**4999}]}},
            "kmesh.segments[0].tokens",
        ),
        ({"kmesh": {"family": ["f"]}}, "kmesh.family"),
        ({"kmesh": 7}, "kmesh"),
        ([1], "kv_transfer_params"),
    ],
    ids=["sum", "huge", "type", "no object", "no params"],
)
def test_what_is_refused_is_told_and_changes_nothing_else(
    patient: Make, daemon: FakeDaemon, params: Any, field: str
) -> None:
    one = patient("a")
    told = computes(one, "r", [*OWN, *MINUTES], params)
    assert told["restored_tokens"] == 0
    assert told["refused"]["field"] == field
    assert json.loads(json.dumps(told)) == told
    until(lambda: daemon.spans == 4)
    other = patient("b")
    other.scheduler.add("r", [*OWN, *MINUTES], DIGEST, params=params)
    assert other.match("r", 0, 237, 30.0) == 224
    assert not other.load("r", [9, 4, 7, 2, 8, 1, 5], 224, 30.0).bad_blocks
    assert other.wrong(7, [9, 4, 7, 2, 8, 1, 5], 0, 224) == []
    told = other.scheduler.finished("r")
    assert told is not None
    assert told["kmesh"]["restored_tokens"] == 224
    assert told["kmesh"]["refused"]["field"] == field
    assert one.scheduler.counts.take()["segment_refused"] == 1
    assert len(one.scheduler.segmenting) == len(other.scheduler.segmenting) == 0


def test_separators_say_what_counts_say(patient: Make, daemon: FakeDaemon) -> None:
    separator = 4999
    tokens = [*OWN, separator, *MINUTES, separator, *prompt(20, seed=4)]
    said = SegmentedPrompt("f").with_shared(38).with_shared(201).with_shared(20)
    spoken = patient("a")
    computes(spoken, "r", tokens, said.to_params())
    until(lambda: daemon.spans == 4 + 1 + 3 + 1)
    cut = patient("b", segment_separators=(separator, 4998))
    computes(cut, "r", [7, *tokens], {"kmesh": {"family": "f"}})
    counts = cut.scheduler.counts.take()
    # Its first segment begins with another token; the others were found.
    assert (counts["segment_hits"], counts["segment_misses"]) == (2, 1)
    # What a request says itself comes before what its separators say.
    computes(cut, "s", [5, *tokens], SegmentedPrompt("f").with_private(260).to_params())
    assert "segment_misses" not in cut.scheduler.counts.take()
    # A prompt of too many of them is served without.
    told = computes(cut, "t", [separator] * 1500, {"kmesh": {"family": "f"}}, first_block=10)
    assert told["refused"]["field"] == "prompt"
    # Without a family, and without a word, separators are only looked at.
    computes(cut, "u", [9, *tokens], None)
    counts = cut.scheduler.counts.take()
    assert (counts["segment_hits"], counts["segment_refused"]) == (2, 1)
    assert "segment_spans" not in counts


def test_an_aborted_request_leaves_nothing(patient: Make, daemon: FakeDaemon) -> None:
    one = patient("a")
    tokens = [*OWN, *MINUTES]
    one.scheduler.add("r", tokens, DIGEST, params=SAID.to_params())
    assert one.match("r", 0, 237, 30.0) == 0
    one.scheduler.allocated("r", list(range(1, 9)), 0)
    one.prefill("r", 7, list(range(1, 9)), 0, 150)
    one.scheduler.finished("r")
    assert len(one.scheduler.segmenting) == 0
    # Two spans of the prompt, and one of the segment: 37 + 64 of 150 tokens.
    until(lambda: daemon.spans == 3)


def test_a_preempted_request_stores_from_its_new_blocks(patient: Make, daemon: FakeDaemon) -> None:
    one = patient("a")
    tokens = [*OWN, *MINUTES]
    one.scheduler.add("r", tokens, DIGEST, params=SAID.to_params())
    assert one.match("r", 0, 237, 30.0) == 0
    one.scheduler.allocated("r", list(range(1, 9)), 0)
    one.prefill("r", 7, list(range(1, 9)), 0, 110)
    until(lambda: daemon.spans == 2)
    one.scheduler.plan([], [], ["r"])
    blocks = list(range(30, 38))
    step = one.scheduler.plan([], [("r", blocks, True, 0, 237)])
    one.run(step, lambda: one.compute(7, blocks, 0, 237))
    until(lambda: daemon.spans == 7)
    (minutes,) = keyed(SAID, tokens)
    assert wrong_bytes(one, minutes, seed=7, begin=37) == []


def test_restored_pages_are_stored_as_segments_too(patient: Make, daemon: FakeDaemon) -> None:
    """Who restores a prompt and is the first to say its segments stores these."""
    tokens = [*OWN, *MINUTES]
    computes(patient("a"), "r", tokens, None)
    until(lambda: daemon.spans == 4)
    other = patient("b")
    other.scheduler.add("r", tokens, DIGEST, params=SAID.to_params())
    assert other.match("r", 0, 237, 30.0) == 224
    blocks = [9, 4, 7, 2, 8, 1, 5, 3]
    assert not other.load("r", blocks[:7], 224, 30.0).bad_blocks
    step = other.scheduler.plan([("r", blocks, 224, 13)], [])
    other.run(step, lambda: other.compute(7, blocks, 224, 237))
    (minutes,) = keyed(SAID, tokens)
    until_stored(other, minutes)
    assert wrong_bytes(other, minutes, seed=7, begin=37) == []


def test_a_request_that_is_not_cached_is_told_so(patient: Make) -> None:
    segmenting = patient("a").scheduler.segmenting
    segmenting.declined("r", None, "no")
    segmenting.declined("s", {"other": 1}, "no")
    segmenting.declined("t", SAID.to_params(), "its prompt is an embedding")
    scheduler = patient("b").scheduler
    assert scheduler.finished("t") is None
    assert segmenting.finished("r") == segmenting.finished("s") == {}
    refused = {"field": "kmesh", "why": "its prompt is an embedding"}
    assert segmenting.finished("t") == {"refused": refused}
    assert len(segmenting) == 0


# Settings


def test_settings_of_segments() -> None:
    base = {"socket_dir": "/x"}
    assert Settings.read(base).segment_separators == ()
    read = Settings.read(base | {"segment_separators": [3, 151643], "store_segments": False})
    assert read.segment_separators == (3, 151643)
    assert not read.store_segments
    for wrong, why in (
        (7, "segment_separators is int, not list"),
        ("7", "segment_separators is str, not list"),
        (["x"], "segment_separators has 'x', no token id"),
        ([True], "segment_separators has True, no token id"),
        ([-1], "segment_separators has -1, no token id"),
        ([2**32], "segment_separators has 4294967296, no token id"),
        (list(range(65)), "segment_separators has more than 64 token ids"),
    ):
        with pytest.raises(ConfigError, match=why):
            Settings.read(base | {"segment_separators": wrong})
    with pytest.raises(ConfigError, match="store_segments is int, not bool"):
        Settings.read(base | {"store_segments": 1})
