"""Measuring two sides in turn."""

from __future__ import annotations

import time
from collections.abc import Callable


def seconds(call: Callable[[], object]) -> float:
    """Wall-clock seconds of one call."""
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def in_turn(
    calls: dict[str, Callable[[], object]], rounds: int, warm: int = 2, block: int = 1
) -> dict[str, list[float]]:
    """Seconds of each call, ``rounds`` times one after the other; every other round backwards.

    The first ``warm`` rounds are not kept.

    Args:
        block: how often a call is repeated before it is another one's turn.
    """
    taken: dict[str, list[float]] = {name: [] for name in calls}
    names = list(calls)
    for number in range(-warm, rounds):
        for name in names if number % 2 == 0 else reversed(names):
            for _ in range(block):
                took = seconds(calls[name])
                if number >= 0:
                    taken[name].append(took)
    return taken
