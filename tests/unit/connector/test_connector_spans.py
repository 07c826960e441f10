"""Spans of other lengths than 64 tokens, and what each rank reads of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fake_gpu_streams import FakeGpu
from mini_engine import DIM, HEADS, LAYERS, NAMESPACE, MiniEngine, until

from kmesh.layout import TILE_BYTES
from kmesh.testing import FakeDaemon, Limits

DIGEST = NAMESPACE.digest()
#: Bytes of a token, of all heads of a layer's K or V, and of all.
PLANE = HEADS * DIM * 4
TOKEN = LAYERS * 2 * PLANE
Start = Callable[[int], FakeDaemon]


@pytest.fixture
def spans_of() -> Iterator[Start]:
    """A daemon whose spans have so many tokens."""
    daemons: list[FakeDaemon] = []

    def start(tokens: int) -> FakeDaemon:
        limits = Limits(span_tokens=tokens)
        daemons.append(FakeDaemon(limits).__enter__())
        return daemons[-1]

    yield start
    for daemon in daemons:
        daemon.__exit__(None, None, None)


@pytest.fixture
def between(spans_of: Start) -> Iterator[Callable[..., Any]]:
    """One engine stores a prompt, another is to restore it."""
    engines: list[MiniEngine] = []

    def make(daemon: FakeDaemon, count: int, stored: int, read: int, **reader: Any) -> MiniEngine:
        blocks = -(-count // 32) + 2
        one = MiniEngine(daemon, "a", tp=stored, blocks=blocks)
        other = MiniEngine(daemon, "b", tp=read, blocks=blocks, **reader)
        engines.extend((one, other))
        one.scheduler.add("first", prompt(count), DIGEST)
        assert one.match("first", 0, count) == 0
        ids = list(range(blocks - 2))
        one.scheduler.allocated("first", ids, 0)
        one.prefill("first", 7, ids, 0, count)
        span = daemon.limits.span_tokens
        until(lambda: daemon.spans == (count // span + (count % span >= 16)) * stored)
        one.scheduler.finished("first")
        return other

    yield make
    while engines:
        engines.pop().close()


def prompt(count: int) -> list[int]:
    return [i * 31 % 5000 for i in range(count)]


@pytest.mark.parametrize("span", [16, 32, 48, 128, 256, 1024])
@pytest.mark.parametrize(("stored", "read"), [(1, 1), (1, 2), (2, 1)])
@pytest.mark.parametrize("where", ["host", "gpu"])
def test_spans_of_any_length_serve_any_sharding(
    spans_of: Start, between: Callable[..., MiniEngine], span: int, stored: int, read: int,
    where: str,
) -> None:  # fmt: skip
    """With a tail: 16 tokens more than whole spans, and some that are not stored."""
    count = max(2 * span, 256) + 16 + 5
    gpu = {"gpu": [FakeGpu() for _ in range(read)]} if where == "gpu" else {}
    other = between(spans_of(span), count, stored, read, **gpu)
    other.scheduler.add("r", prompt(count), DIGEST)
    wanted = (count // 16 * 16) // 32 * 32
    assert other.match("r", 0, count) == wanted
    ids = list(range(wanted // 32))[::-1]
    assert not other.load("r", ids, wanted).bad_blocks
    assert other.wrong(7, ids, 0, wanted) == []


@pytest.mark.parametrize("where", ["host", "gpu"])
@pytest.mark.parametrize(
    ("span", "read", "factor"), [(512, 2, 2), (1024, 2, 1), (1024, 4, 2), (2048, 4, 1)]
)
def test_what_ranks_read_is_counted_beside_what_they_want(
    spans_of: Start, between: Callable[..., MiniEngine], span: int, read: int, factor: int,
    where: str,
) -> None:  # fmt: skip
    """A rank whose heads fill whole tiles of a span reads these alone."""
    assert (factor == 1) == (span * PLANE // read % TILE_BYTES == 0)
    gpu = {"gpu": [FakeGpu() for _ in range(read)]} if where == "gpu" else {}
    other = between(spans_of(span), 2 * span, 1, read, **gpu)
    other.scheduler.add("r", prompt(2 * span + 1), DIGEST)
    assert other.match("r", 0, 2 * span + 1) == 2 * span
    ids = list(range(2 * span // 32))
    assert not other.load("r", ids, 2 * span).bad_blocks
    for worker in other.workers:
        counted = worker.counts.take()
        assert counted["restored_bytes"] == 2 * span * TOKEN // read
        assert counted["restore_read_bytes"] == counted["restored_bytes"] * factor
