"""What the daemon's processes use of the machine, as /proc says."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

_PAGE = os.sysconf("SC_PAGE_SIZE")
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Usage:
    """Of one process.

    Attributes:
        resident_bytes: with the pages of slabs that it touched.
        private_bytes: without what it shares: its own weight.
    """

    resident_bytes: int
    private_bytes: int
    open_files: int
    cpu_seconds: float


def read_usage(pid: int) -> Usage | None:
    """None if the process is gone, or hidden from us."""
    try:
        with open(f"/proc/{pid}/statm", encoding="ascii") as file:
            _, resident, shared, *_ = file.read().split()
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            # The name before it may hold anything.
            fields = file.read().rpartition(")")[2].split()
        files = len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return None
    return Usage(
        int(resident) * _PAGE,
        (int(resident) - int(shared)) * _PAGE,
        files,
        (int(fields[11]) + int(fields[12])) / _TICKS,
    )


def read_all(pids: Mapping[str, int]) -> dict[str, Usage]:
    """By name, of those that can be read."""
    found = {name: read_usage(pid) for name, pid in pids.items() if pid}
    return {name: usage for name, usage in found.items() if usage is not None}
