"""What keeps work that can wait from taking what others need: bytes a second, and the processor."""

from __future__ import annotations

import os
import threading
import time

#: Of a thread whose work can wait, as of ``nice``.
_NICE = 10


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


def be_nice() -> None:
    """The calling thread has the processor when nobody who serves or computes wants it."""
    thread = threading.get_native_id()
    if os.getpriority(os.PRIO_PROCESS, thread) < _NICE:
        os.setpriority(os.PRIO_PROCESS, thread, _NICE)
