"""Engines whose pages are on a GPU that a test lets run, and what they store and restore."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from mini_engine import NAMESPACE, MiniEngine, until

from kmesh.testing import FakeDaemon

DIGEST = NAMESPACE.digest()
SPAN_BYTES = NAMESPACE.layers * 2 * NAMESPACE.kv_heads * 64 * NAMESPACE.head_dim * 4
Make = Callable[..., MiniEngine]


def prompt(count: int, seed: int = 0) -> list[int]:
    return [(i * 31 + seed * 977) % 5000 for i in range(count)]


def stored_by(
    engine: MiniEngine, daemon: FakeDaemon, tokens: list[int], seed: int = 7, name: str = "first"
) -> None:
    """One engine computes a whole prompt and stores it."""
    before = daemon.spans
    engine.scheduler.add(name, tokens, DIGEST)
    assert engine.match(name, 0, len(tokens)) == 0
    blocks = list(range(1, -(-len(tokens) // engine.block) + 1))[::-1]
    engine.scheduler.allocated(name, blocks, 0)
    # What comes before its kernels are compiled is not stored.
    mover: Any = engine.workers[0]._mover
    until(mover.ready)
    engine.prefill(name, seed, blocks, 0, len(tokens))
    spans = len(tokens) // 64 + (len(tokens) % 64 >= 16)
    until(lambda: daemon.spans == before + spans)
    engine.scheduler.finished(name)


def set_clock(engine: MiniEngine, clock: Callable[[], float]) -> None:
    """By which the engine's loads are late."""
    loader: Any = engine.workers[0]._loader
    loader._clock = loader._preparer._clock = clock


def promised(engine: MiniEngine, name: str, tokens: list[int]) -> int:
    """A new request for which a restore is promised."""
    engine.scheduler.add(name, tokens, DIGEST)
    return engine.match(name, 0, len(tokens))


def warm(engine: MiniEngine, daemon: FakeDaemon) -> None:
    """Waits until the background has attached the slab, which the daemon has filled."""
    (slab,) = daemon._model.slabs
    os.posix_fallocate(slab.fd, 0, slab.memory.size)
    mover: Any = engine.workers[0]._mover
    session = engine.workers_client.session
    until(lambda: mover.attached(session, 0) is not None)
