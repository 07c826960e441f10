"""What tests of requests with segments begin with, and how they look at what was stored."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from mini_engine import DIM, LAYERS, NAMESPACE, MiniEngine
from mini_engine import until as until_soon
from test_connector_halves import prompt

from kmesh.segmentkeys import KeyedSegment, keyed_segments
from kmesh.segments import SegmentedPrompt
from kmesh.store import read_span

DIGEST = NAMESPACE.digest()
Make = Callable[..., MiniEngine]
MINUTES = prompt(200, seed=50)
OWN = prompt(37, seed=51)
#: Whose shared segment begins at no multiple of anything.
SAID = SegmentedPrompt("round-17").with_private(37).with_shared(200, "minutes-16")


def keyed(
    said: SegmentedPrompt, tokens: Sequence[int], namespace: bytes = DIGEST
) -> list[KeyedSegment]:
    return keyed_segments(said, tokens, namespace, span_tokens=64, sub_tokens=16)


def keys_of(one: KeyedSegment) -> bytes:
    return b"".join(span.key for span in one.spans)


def computes(
    engine: MiniEngine,
    request: str,
    tokens: list[int],
    params: object,
    *,
    seed: int = 7,
    steps: int = 1,
    first_block: int = 1,
    namespace: bytes = DIGEST,
    salt: bytes = b"",
) -> dict[str, Any]:
    """A request that misses, from its first step to its end; what its client is told."""
    engine.scheduler.add(request, tokens, namespace, salt=salt, params=params)
    assert engine.match(request, 0, len(tokens), 30.0) == 0
    count = -(-len(tokens) // engine.block)
    blocks = list(range(first_block, first_block + count))[::-1]
    engine.scheduler.allocated(request, blocks, 0)
    cuts = [len(tokens) * i // steps for i in range(steps + 1)]
    for i, (begin, end) in enumerate(itertools.pairwise(cuts)):
        if i == 0:
            engine.prefill(request, seed, blocks, begin, end)
            continue
        step = engine.scheduler.plan([], [(request, [], False, begin, end - begin)])
        engine.run(step, lambda a=begin, b=end: engine.compute(seed, blocks, a, b))
    said = engine.scheduler.finished(request)
    assert said is not None
    return dict(said["kmesh"])


def stored(engine: MiniEngine, keys: bytes) -> bool:
    session = engine.client.session
    assert session is not None
    codes = engine.identity.sharding.codes
    return all(session.index.probe(keys, codes, prefix=False).slots)


def until(condition: Callable[[], bool]) -> None:
    until_soon(condition, 30.0)


def until_stored(engine: MiniEngine, one: KeyedSegment) -> None:
    until(lambda: stored(engine, keys_of(one)))


def wrong_bytes(engine: MiniEngine, one: KeyedSegment, seed: int, begin: int) -> list[int]:
    """Numbers of spans that do not hold what a segment at this position was computed as."""
    session = engine.client.session
    assert session is not None
    bad = []
    shards = engine.identity.sharding.shards
    with session.acquire(keys_of(one), shards, prefix=True) as lease:
        assert lease.hits == len(one.spans)
        for number, span in enumerate(one.spans):
            at = torch.arange(span.tokens) + begin + span.begin - one.segment.begin
            for part, shard in enumerate(shards):
                payload = bytearray(read_span(session, lease, number, part))
                shape = (LAYERS, 2, shard.heads, span.tokens, DIM)
                found = torch.frombuffer(payload, dtype=torch.float32).reshape(shape)
                for layer in range(LAYERS):
                    rows = found[layer].permute(2, 1, 0, 3).reshape(span.tokens, shard.heads, -1)
                    if not torch.equal(rows, engine.expected(part, layer, seed, at)):
                        bad.append(number)
    return bad
