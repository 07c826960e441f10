"""A limit of bytes a second."""

from __future__ import annotations

import threading
import time


class Throttle:
    """Lets ``rate`` bytes a second pass; 0 lets all pass."""

    def __init__(self, rate: int) -> None:
        self._rate = rate
        self._free_at = 0.0
        self._lock = threading.Lock()

    def wait(self, length: int) -> None:
        """Returns when ``length`` more bytes may be read."""
        if not self._rate:
            return
        with self._lock:
            now = time.monotonic()
            start = max(now, self._free_at)
            self._free_at = start + length / self._rate
        time.sleep(start - now)
