"""Engines that miss the same prompt, for tests of flights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mini_engine import NAMESPACE, MiniEngine, until

from kmesh.testing import FakeDaemon

DIGEST = NAMESPACE.digest()
Make = Callable[..., MiniEngine]
ASK, ALONE = (None, False), (0, False)
#: Engines that wait as long as this machine takes.
PATIENT = {"min_flight_tokens": 128, "acquire_timeout_ms": 30_000, "flight_patience": 100_000}


@dataclass
class Clock:
    """Stands still unless it is told to go on."""

    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


def two(engine: Make) -> tuple[MiniEngine, MiniEngine, Clock]:
    """Two engines, and the clock of the second."""
    clock = Clock()
    settings = {"min_flight_tokens": 128, "acquire_timeout_ms": 30_000}
    return engine("a", **settings), engine("b", clock=clock, **settings), clock


def ask(engine: MiniEngine, request: str, total: int = 192, local: int = 0) -> object:
    return engine.scheduler.match(request, local, total)


def leads(engine: MiniEngine, request: str, tokens: list[int]) -> None:
    """A request whose prompt nobody has: it claims, and computes."""
    engine.scheduler.add(request, tokens, DIGEST)
    assert engine.match(request, 0, len(tokens), 30) == 0
    assert engine.scheduler.counts.take() == {"flight_leads": 1}


def waits(engine: MiniEngine, daemon: FakeDaemon, request: str, tokens: list[int]) -> None:
    """A request that waits for another engine."""
    before = daemon.waits
    engine.scheduler.add(request, tokens, DIGEST)
    until(lambda: ask(engine, request, len(tokens)) == ASK and daemon.waits > before)


def answered(engine: MiniEngine, request: str, total: int = 192) -> int:
    return engine.match(request, 0, total)
