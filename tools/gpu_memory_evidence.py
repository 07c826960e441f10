"""Runs the tests of GPU memory on this machine's GPU, and writes the run down as evidence.

    python -m tools.gpu_memory_evidence --out evidence/gpu-memory.json

Needs NVML (``pip install nvidia-ml-py``). In a copy without git, ``--commit`` says what it is of.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

from demo.evidence import hardware, source, versions
from tools.verify_evidence import derive

ROOT = Path(__file__).resolve().parent.parent
TESTS = ("tests/gpu/test_gpu_memory.py", "tests/gpu/test_gpu_faults.py")


def read_tests(report: Path) -> list[dict[str, Any]]:
    """Each test of a JUnit report: its name, what came out, and what it recorded."""
    found = []
    for case in ET.parse(report).iter("testcase"):
        ends = {child.tag for child in case} & {"failure", "error", "skipped"}
        found.append(
            {
                "name": case.attrib["name"],
                "outcome": min(ends, default="passed"),
                "seconds": float(case.attrib["time"]),
                "recorded": {
                    item.attrib["name"]: json.loads(item.attrib["value"])
                    for item in case.iter("property")
                },
            }
        )
    return found


def gpu() -> dict[str, Any]:
    """The GPU and its driver, as NVML says."""
    import pynvml

    pynvml.nvmlInit()
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        return {
            "gpu": pynvml.nvmlDeviceGetName(handle),
            "gpu_memory_mib": pynvml.nvmlDeviceGetMemoryInfo(handle).total >> 20,
            "driver": pynvml.nvmlSystemGetDriverVersion(),
            "cuda_of_driver": pynvml.nvmlSystemGetCudaDriverVersion(),
        }
    finally:
        pynvml.nvmlShutdown()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="the evidence file to write")
    parser.add_argument(
        "--commit", default="", help="of a copy without git, whose files are all committed"
    )
    options, more = parser.parse_known_args()
    # Before the tests: a copy that doesn't know its commit says so at once.
    commit = source(options.commit)
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", *TESTS, f"--junitxml={report}"]
        # The form of reports that holds what tests record.
        command += ["-o", "junit_family=xunit1", *more]
        status = subprocess.run(command, cwd=ROOT, env={**os.environ}).returncode
        tests = read_tests(report)
    evidence: dict[str, Any] = {
        "kind": "gpu-memory",
        "label": "data-centre",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "command": "python -m tools.gpu_memory_evidence --out evidence/gpu-memory.json",
        **commit,
        "hardware": hardware() | gpu(),
        "versions": versions(),
        "raw": {"tests": tests},
    }
    evidence["derived"] = derive(evidence)
    options.out.write_text(json.dumps(evidence, indent=1, ensure_ascii=False) + "\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
