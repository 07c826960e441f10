"""`make test-again`: the tests that failed in the last run, once more, alone and with its seed.

A machine that keeps a process off its processors for seconds can fail a test that is right. So at
most three failures of a whole run get a second chance, and are named. More than three, or a run
that did not end by itself, are no matter of chance.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
#: Where tests/last_run.py has pytest write.
RUN = Path(".pytest_cache/v/kmesh/last_run")
LIMIT = 3
#: Exit statuses of pytest.
_PASSED, _FAILED = 0, 1


def last_run(root: Path, path: Path = RUN) -> dict[str, Any]:
    """What the last run left; empty if there is nothing that can be read."""
    try:
        run = json.loads((root / path).read_text())
    except (OSError, ValueError):
        return {}
    return run if isinstance(run, dict) else {}


def refusal(run: dict[str, Any]) -> str:
    """Why nothing of a run is tried again; empty if its failures are."""
    if not run or run["status"] is None:
        return "the last run of the tests did not end by itself"
    if run["status"] == _PASSED:
        return "no test failed in the last run"
    if run["status"] != _FAILED or not run["failed"]:
        return f"the last run ended with pytest's status {run['status']}, not over a failed test"
    if len(run["failed"]) > LIMIT:
        return f"{len(run['failed'])} tests failed, more than {LIMIT}: that is no chance"
    return ""


def again(root: Path, run: dict[str, Any], arguments: Sequence[str]) -> dict[str, Any]:
    """Runs what failed; what that run left."""
    command = [sys.executable, "-m", "pytest", *arguments, *run["failed"]]
    subprocess.run(command, cwd=root, env={**os.environ, "KMESH_TEST_SEED": run["seed"]})
    return last_run(root)


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0 if all of them pass now."""
    parser = argparse.ArgumentParser(prog="test_again.py", description=__doc__)
    parser.add_argument("--root", type=Path, default=ROOT, help="where pytest runs")
    parser.add_argument("arguments", nargs="*", metavar="ARG", help="for pytest, behind --")
    options = parser.parse_args(argv)
    first = last_run(options.root)
    if why := refusal(first):
        print(f"test-again: {why}", file=sys.stderr)
        return 1
    count = len(first["failed"])
    print(f"== once more, alone: {count} failed (KMESH_TEST_SEED={first['seed']})", flush=True)
    second = again(options.root, first, options.arguments)
    failed = second.get("failed", {})
    good = second.get("status") == _PASSED
    for name, text in first["failed"].items():
        if good or (second.get("status") == _FAILED and name not in failed):
            print(f"\n== unsteady: {name} failed, and passed alone. Its failure was:\n{text}")
        else:
            print(f"\n== failed: {name}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
