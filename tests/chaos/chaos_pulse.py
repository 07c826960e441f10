"""A page of memory in which a client says what it is doing, and what it has done.

It is shared with the runner, and outlives the client: also one that was killed is accounted for.
"""

from __future__ import annotations

import mmap
import struct
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

#: What is counted; a place in the page for each.
COUNTED = (
    *("ops", "connects", "lives", "store_ok", "store_exists", "store_refused", "store_failed"),
    *("read_ok", "read_bytes", "read_miss", "read_pending", "held_ok", "corrupt", "corrupt_raced"),
    *("reported", "false_reports", "abandoned", "bursts", "probes", "left", "not_connected"),
    *("deadline_exceeded", "connection_closed", "exhausted", "draining", "unavailable", "stale"),
    *("not_found", "os_error", "no_descriptor", "no_staging"),
    *("joined", "dissolved", "read_recipes"),
)
_CALL = struct.Struct("<Qd32s")
_COUNTS = struct.Struct(f"<{len(COUNTED)}Q")
_COUNTS_AT = 64
PAGE = 4096


class Pulse:
    """The page. One writer."""

    def __init__(self, path: Path) -> None:
        with path.open("r+b" if path.exists() else "w+b") as file:
            file.truncate(PAGE)
            self._page = mmap.mmap(file.fileno(), PAGE)

    def close(self) -> None:
        self._page.close()

    @contextmanager
    def calling(self, name: str, seconds: float) -> Iterator[None]:
        """While it lasts, a call is out that must end within so many seconds."""
        _CALL.pack_into(self._page, 0, time.monotonic_ns(), seconds, name.encode())
        try:
            yield
        finally:
            _CALL.pack_into(self._page, 0, 0, 0.0, b"")

    def call(self) -> tuple[str, float, float] | None:
        """The call that is out: its name, when it began (monotonic), and its seconds."""
        began, seconds, name = _CALL.unpack_from(self._page, 0)
        return (name.rstrip(b"\0").decode(), began / 1e9, seconds) if began else None

    def forget(self) -> None:
        """The client is gone, and so is its call."""
        _CALL.pack_into(self._page, 0, 0, 0.0, b"")

    def count(self, name: str, number: int = 1) -> None:
        at = _COUNTS_AT + 8 * COUNTED.index(name)
        (before,) = struct.unpack_from("<Q", self._page, at)
        struct.pack_into("<Q", self._page, at, before + number)

    def counts(self) -> Counter[str]:
        return Counter(dict(zip(COUNTED, _COUNTS.unpack_from(self._page, _COUNTS_AT), strict=True)))
