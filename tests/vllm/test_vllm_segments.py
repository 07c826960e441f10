"""Requests that name their segments and family: the same answers, and what is stored of it."""

from __future__ import annotations

from typing import Any

import pytest
from daemon_process import Daemon, wait_for
from driver import Engine, settled, tokens

from kmesh.keys import KeyChain
from kmesh.layout import Shard
from kmesh.segmentkeys import keyed_segments
from kmesh.segments import SegmentedPrompt
from kmesh.session import Role, Session
from kmesh.store import read_span

OWN, MINUTES = 64, 416
SHARD = Shard(0, 4, 0, 2)


@pytest.fixture(scope="module", autouse=True)
def _up(control: Engine, storing: Engine, restoring: Engine) -> None:
    """All three start side by side."""
    for engine in (control, storing, restoring):
        engine.up()


def told(params: dict[str, Any] | None) -> dict[str, Any]:
    assert params is not None
    return dict(params["kmesh"])


def test_a_family_stores_its_segments_once(
    control: Engine, storing: Engine, restoring: Engine, shared_spand: Daemon
) -> None:
    said = SegmentedPrompt("round-17").with_private(OWN).with_shared(MINUTES, "minutes-16")
    minutes = tokens(MINUTES, seed=171)
    prompt = [*tokens(OWN, seed=172), *minutes]
    before = shared_spand.status().spans
    stored = storing.one(prompt, params=said.to_params())
    assert stored.same(control.one(prompt))
    assert told(stored.params) == {"restored_tokens": 0}
    # Eight spans of the prompt, and seven of its segment.
    settled(shared_spand, before + 8 + 7)

    # The segment elsewhere is found, and not restored; nothing of it is stored again.
    moved = SegmentedPrompt("round-17").with_shared(MINUTES).with_private(40)
    sibling = [*minutes, *tokens(40, seed=173)]
    counts = storing.call("metrics")
    result = storing.one(sibling, params=moved.to_params())
    assert result.same(control.one(sibling))
    assert told(result.params) == {"restored_tokens": 0}
    settled(shared_spand, before + 15 + 7)
    after = storing.call("metrics")
    assert after["vllm:kmesh_segment_hits"] == counts["vllm:kmesh_segment_hits"] + 1
    assert after["vllm:kmesh_segment_spans"] == counts["vllm:kmesh_segment_spans"]

    namespace = bytes.fromhex(storing.call("namespace"))
    (segment,) = keyed_segments(said, prompt, namespace, span_tokens=64, sub_tokens=16)
    with Session.connect(shared_spand.socket_dir, role=Role.TOOL) as session:
        keys = b"".join(span.key for span in segment.spans)
        with session.acquire(keys, [SHARD], positions=True) as lease:
            assert list(lease.start) == [span.begin for span in segment.spans]
        found = wait_for(
            lambda: len((d := session.families.describe("round-17")).members) == 2 and d
        )
    assert (found.family.base_spans, found.family.base_stored) == (7, 7)
    assert sorted((member.spans, member.base) for member in found.members) == [(7, 0), (15, 7)]
    # Its spans become recipes, and another engine restores the prompt all the same.
    restoring.call("reset")
    result = restoring.one(prompt, params=said.to_params())
    assert result.same(control.one(prompt))
    assert told(result.params) == {"restored_tokens": 448}
    settled(shared_spand)


def test_good_and_bad_segments_give_the_same_tokens(
    control: Engine, storing: Engine, restoring: Engine, shared_spand: Daemon
) -> None:
    minutes = tokens(MINUTES, seed=181)
    prompt = [*tokens(OWN, seed=182), *minutes]
    wanted = control.one(prompt)
    before = shared_spand.status().spans
    assert storing.one(prompt).same(wanted)
    settled(shared_spand, before + 8)
    # Its segment is stored by a request that finds the prompt in its own cache. Since the segment
    # begins on the prompt's grid, its spans are the prompt's, bit for bit.
    said = SegmentedPrompt("round-18").with_private(OWN).with_shared(MINUTES)
    assert storing.one(prompt, params=said.to_params()).same(wanted)
    settled(shared_spand, before + 8 + 7)
    namespace = bytes.fromhex(storing.call("namespace"))
    (segment,) = keyed_segments(said, prompt, namespace, span_tokens=64, sub_tokens=16)
    keys = b"".join(span.key for span in segment.spans)
    chain = KeyChain(namespace)
    chain.extend(prompt)
    prefix = chain.keys[32:] + chain.key(7, 32)
    with (
        Session.connect(shared_spand.socket_dir, role=Role.TOOL) as session,
        session.acquire(keys, [SHARD]) as ours,
        session.acquire(prefix, [SHARD], recipes=True) as theirs,
    ):
        assert ours.hits == theirs.hits == 7
        for number in range(7):
            assert read_span(session, ours, number) == read_span(session, theirs, number)

    # What can't be used is told and counted, and nothing else changes: prefixes are restored.
    prompt = [*tokens(OWN, seed=183), *minutes]
    wanted = control.one(prompt)
    before = shared_spand.status().spans
    assert storing.one(prompt).same(wanted)
    settled(shared_spand, before + 8)
    wrong = {"kmesh": {"family": "f", "segments": [{"tokens": 64}, {"tokens": [60, 480]}]}}
    good = SegmentedPrompt().with_private(OWN).with_shared(MINUTES)
    for params, field in (
        (wrong, "kmesh.segments[1].tokens"),
        ({"kmesh": {"segments": [{"tokens": 10**15}]}}, "kmesh.segments[0].tokens"),
        ({"kmesh": {"segmnts": []}}, "kmesh.segmnts"),
        (good.to_params(), None),
    ):
        restoring.call("reset")
        result = restoring.one(prompt, params=params)
        assert result.same(wanted)
        answer = told(result.params)
        assert answer["restored_tokens"] == 448
        assert answer.get("refused", {}).get("field") == field
    assert restoring.call("metrics")["vllm:kmesh_segment_refused"] == 3
    settled(shared_spand)
