"""Requests that name their segments and family: the same answers, and what is stored of it."""

from __future__ import annotations

from typing import Any

import pytest
from daemon_process import Daemon
from driver import Engine, settled, tokens

from kmesh.keys import KeyChain
from kmesh.layout import Shard
from kmesh.segmentkeys import keyed_segments
from kmesh.segments import SegmentedPrompt
from kmesh.session import Role, Session
from kmesh.store import read_span

OWN, MINUTES = 64, 416
SAID = SegmentedPrompt("round-17").with_private(OWN).with_shared(MINUTES, "minutes-16")
SHARD = Shard(0, 4, 0, 2)


@pytest.fixture(scope="module", autouse=True)
def _up(control: Engine, storing: Engine, restoring: Engine) -> None:
    """All three start side by side."""
    for engine in (control, storing, restoring):
        engine.up()


def told(params: dict[str, Any] | None) -> dict[str, Any]:
    assert params is not None
    return dict(params["kmesh"])


def test_good_and_bad_segments_give_the_same_tokens(
    control: Engine, storing: Engine, restoring: Engine, shared_spand: Daemon
) -> None:
    minutes = tokens(MINUTES, seed=171)
    prompt = [*tokens(OWN, seed=172), *minutes]
    before = shared_spand.status().spans
    stored = storing.one(prompt, params=SAID.to_params())
    assert stored.same(control.one(prompt))
    assert told(stored.params) == {"restored_tokens": 0}
    # Eight spans of the prompt, and seven of its segment.
    settled(shared_spand, before + 8 + 7)

    # Where the segment begins on the prompt's grid, its spans are the prompt's, bit for bit.
    namespace = bytes.fromhex(storing.call("namespace"))
    (segment,) = keyed_segments(SAID, prompt, namespace, span_tokens=64, sub_tokens=16)
    chain = KeyChain(namespace)
    chain.extend(prompt)
    prefix = chain.keys[32:] + chain.key(7, 32)
    keys = b"".join(span.key for span in segment.spans)
    with (
        Session.connect(shared_spand.socket_dir, role=Role.TOOL) as session,
        session.acquire(keys, [SHARD]) as ours,
        session.acquire(prefix, [SHARD]) as theirs,
    ):
        assert ours.hits == theirs.hits == 7
        for number in range(7):
            assert read_span(session, ours, number) == read_span(session, theirs, number)

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

    # What can't be used is told and counted, and nothing else changes: prefixes are restored.
    wrong = {"kmesh": {"family": "f", "segments": [{"tokens": 64}, {"tokens": [60, 480]}]}}
    for params, field in (
        (SAID.to_params(), None),
        (wrong, "kmesh.segments[1].tokens"),
        ({"kmesh": {"segments": [{"tokens": 10**15}]}}, "kmesh.segments[0].tokens"),
        ({"kmesh": {"segmnts": []}}, "kmesh.segmnts"),
    ):
        restoring.call("reset")
        result = restoring.one(prompt, params=params)
        assert result.same(control.one(prompt))
        said = told(result.params)
        assert said["restored_tokens"] == 448
        assert said.get("refused", {}).get("field") == field
    assert restoring.call("metrics")["vllm:kmesh_segment_refused"] == 3
    settled(shared_spand)
