"""How long a step waits for answers that mostly come at once."""

from __future__ import annotations

import contextlib
import time
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any

#: Seconds of a step.
PATIENCE = 0.002


class Patience:
    """A thread that takes an answer has to wait for the interpreter, in which an engine without
    other work spins, unless the engine waits for the answer.

    Args:
        seconds: of one step, for all of its answers.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = self._left = seconds

    def renew(self) -> None:
        """A step is over."""
        self._left = self._seconds

    def wait(self, future: Future[Any]) -> None:
        """Waits for an answer, as long as there is patience left."""
        if self._left > 0 and not future.done():
            begun = time.perf_counter()
            with contextlib.suppress(FutureTimeout):
                future.exception(self._left)
            self._left -= time.perf_counter() - begun
