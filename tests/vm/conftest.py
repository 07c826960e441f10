"""For tests in the machine of ``machine.py``."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator

import pytest
from leaks import Snapshot

GRACE_SECONDS = 60.0


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    """As for all tests, but for processes: those of a module's daemon come and go."""
    before = Snapshot.take()
    yield
    deadline = time.monotonic() + GRACE_SECONDS
    while grown := [what for what in before.grown(Snapshot.take()) if not _process(what)]:
        assert time.monotonic() < deadline, f"the test left behind: {', '.join(grown)}"
        gc.collect()
        time.sleep(0.05)


def _process(what: str) -> bool:
    return what.startswith("process ")
