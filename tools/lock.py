"""Writes requirements/lock.txt from lock.in, keeping pins that still fit unless --upgrade."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

REQUIREMENTS = Path(__file__).resolve().parent.parent / "requirements"
SOURCE = REQUIREMENTS / "lock.in"
LOCK = REQUIREMENTS / "lock.txt"
HEADER = """\
# Written by `make lock` from lock.in, for Linux and CPython 3.11 to 3.13. Do not edit.
#
# torch stands without a local version: an index that has a CPU build may give that, and the
# public one gives its CUDA build, which runs on the CPU as well but brings CUDA's libraries.
"""


def pins(report: dict[str, object]) -> list[str]:
    """``name==version`` of a pip installation report, sorted, without local versions."""
    found = {}
    for item in report["install"]:  # type: ignore[attr-defined]
        metadata = item["metadata"]
        found[metadata["name"].lower()] = metadata["version"].split("+")[0]
    return [f"{name}=={version}" for name, version in sorted(found.items())]


def resolve(constraints: Path | None) -> list[str]:
    """Asks pip what lock.in means; raises CalledProcessError if it has no answer."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed"]
        command += ["--report", str(report), "-r", str(SOURCE)]
        if constraints:
            command += ["-c", str(constraints)]
        subprocess.run(command, check=True, stdout=sys.stderr)
        return pins(json.loads(report.read_text()))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--upgrade", action="store_true", help="forget the present pins")
    upgrade: bool = parser.parse_args(argv).upgrade
    lines = resolve(LOCK if LOCK.is_file() and not upgrade else None)
    LOCK.write_text(HEADER + "\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
