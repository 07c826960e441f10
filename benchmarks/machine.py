"""Where and on what a run was made, as its result file says it."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.results import Row
from demo.evidence import command, functional


def busy_cpus(seconds: float = 1.0) -> float:
    """CPUs that others keep busy while we sleep."""
    before = _ticks()
    time.sleep(seconds)
    after = _ticks()
    total = sum(after) - sum(before)
    idle = after[3] + after[4] - before[3] - before[4]
    return round((1 - idle / total) * (os.cpu_count() or 1), 2) if total else 0.0


def _ticks() -> list[int]:
    fields = Path("/proc/stat").read_text().splitlines()[0].split()[1:9]
    return [int(field) for field in fields]


class Run:
    """Collects rows; says what machine they come from and what else it did meanwhile."""

    def __init__(self, *, quick: bool) -> None:
        self._quick = quick
        self._rows: list[dict[str, Any]] = []
        self._benchmarks: dict[str, dict[str, float]] = {}
        self._others = busy_cpus()

    def add(self, name: str, rows: list[Row], seconds: float) -> None:
        """One benchmark has ended."""
        self._rows += [{"benchmark": name, **row.to_json()} for row in rows]
        self._benchmarks[name] = {
            "seconds": round(seconds, 1),
            "load_1min": round(os.getloadavg()[0], 2),
            "busy_cpus_behind": busy_cpus(),
        }

    def to_json(self) -> dict[str, Any]:
        """The result file, which is an evidence file."""
        return {
            **functional("bench", command("python -m benchmarks", sys.argv[1:])),
            "quick": self._quick,
            "raw": {
                "busy_cpus_before": self._others,
                "benchmarks": self._benchmarks,
                "rows": self._rows,
            },
            "derived": {
                row["row"]: round(row["value"], 6) for row in self._rows if row["value"] is not None
            },
        }
