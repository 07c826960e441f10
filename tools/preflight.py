"""Says what a machine lacks before `make env` starts. Standard library only."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import sysconfig
from pathlib import Path

PYTHONS = ((3, 11), (3, 13))


def problems() -> list[str]:
    """What is missing, one sentence each with the remedy; empty if nothing is."""
    found = []
    if not sys.platform.startswith("linux"):
        found.append(f"KMesh runs on Linux only, this is {sys.platform}.")
    if not PYTHONS[0] <= sys.version_info[:2] <= PYTHONS[1]:
        have = ".".join(map(str, sys.version_info[:2]))
        found.append(f"Python 3.11 to 3.13 is needed, this is {have}: make PYTHON=python3.12 ...")
    if importlib.util.find_spec("venv") is None or importlib.util.find_spec("ensurepip") is None:
        found.append("Python's venv module is missing: install python3-venv.")
    if not Path(sysconfig.get_paths()["include"], "Python.h").is_file():
        found.append("Python's C headers are missing: install python3-dev.")
    compiler = os.environ.get("CC", "gcc").split()[0]
    if shutil.which(compiler) is None:
        found.append(f"no C compiler ({compiler}): install gcc and libc6-dev.")
    return found


def main() -> int:
    found = problems()
    for problem in found:
        print(f"preflight: {problem}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
