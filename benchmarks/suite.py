"""Which benchmarks there are, and how one is run: each in a process of its own."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.results import Row
from benchmarks.spand import ROOT, environment

#: By name: the module, and what it measures. In the order in which they run.
BENCHMARKS = {
    "scheduler": "connector time in the scheduler: a miss, a hit, asked again",
    "hashing": "keys of a long prompt against a plain chain",
    "sessions": "leases by session socket and gRPC, alone and in a crowd",
    "kernels": "restore, verify and copy against torch and memcpy",
    "store": "from staging to slab through the store worker",
    "core": "Acquire and Release in the core alone",
    "daemon": "memory at rest, time to serving, pages of the pool",
    "restart": "time to serve again when control or the daemon ended, or is upgraded",
    "spans": "bytes a span of catalog, index and core",
    "eviction": "hit rates on a public trace, against LRU and the offline optimum",
    "engines": "vLLM: time to first token, hooks' share, zero-hit workload",
    "herd": "vLLM: 32 requests in four engines want one document that nobody has",
}
#: Run only when they are named, and written to a file of their own: they take long, measure no
#: time, and have no targets.
ALONE = {
    "tiers": "hit rates of memory and disk together, for each policy, against the optimum",
}


def measure(name: str, *, quick: bool) -> Iterator[Row]:
    """Rows of one benchmark, measured in this process."""
    module = importlib.import_module(f"benchmarks.bench_{name}")
    yield from module.run(quick)


def run_apart(name: str, *, quick: bool) -> tuple[list[Row], float, bool]:
    """Rows of one benchmark, run in a process of its own; seconds; whether it ended well.

    What it measured before it failed is kept.
    """
    with tempfile.TemporaryDirectory(prefix="kmesh-bench-") as folder:
        out = Path(folder) / "rows.jsonl"
        command = [sys.executable, "-m", "benchmarks", "measure", name, str(out)]
        began = time.monotonic()
        child = subprocess.Popen(
            [*command, *(["--quick"] if quick else [])], cwd=ROOT, env=_environment()
        )
        try:
            status = child.wait()
        except BaseException:
            child.terminate()
            child.wait()
            raise
        took = time.monotonic() - began
        lines = out.read_text().splitlines() if out.exists() else []
        return [Row.from_json(json.loads(line)) for line in lines], took, status == 0


def _environment() -> dict[str, str]:
    """``environment``, with the setting that says where the trace is."""
    trace = os.environ.get("KMESH_TRACE")
    return environment(**({"KMESH_TRACE": trace} if trace else {}))
