"""A fake daemon, and engines that talk to it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from mini_engine import MiniEngine

from kmesh.testing import FakeDaemon, Limits

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]


@pytest.fixture
def daemon() -> Iterator[FakeDaemon]:
    with FakeDaemon(Limits()) as daemon:
        yield daemon


@pytest.fixture
def engine(daemon: FakeDaemon) -> Iterator[Callable[..., MiniEngine]]:
    """Makes engines that are closed at the end of the test."""
    engines: list[MiniEngine] = []

    def make(name: str = "engine", **settings: Any) -> MiniEngine:
        engines.append(MiniEngine(daemon, name, **settings))
        return engines[-1]

    yield make
    while engines:
        # Mappings go with the last reference.
        engines.pop().close()


@pytest.fixture
def patient(engine: Callable[..., MiniEngine]) -> Callable[..., MiniEngine]:
    """As ``engine``: these wait long for a daemon that gets no processor."""
    waits = ("acquire_timeout_ms", "load_timeout_ms", "reserve_timeout_ms")
    return lambda name="engine", **more: engine(name, **(dict.fromkeys(waits, 30_000) | more))
