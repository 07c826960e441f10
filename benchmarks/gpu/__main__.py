"""`python -m benchmarks.gpu run` measures the GPU's kernels, `check` compares with the targets."""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import check

ROOT = Path(__file__).resolve().parents[2]
RESULT = ROOT / ".bench" / "bench-gpu.json"
PARTIAL = RESULT.with_name("partial-gpu.json")
TARGETS = Path(__file__).with_name("targets.toml")


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, 1 (something failed or falls short) or 2 (wrong usage)."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run", help="measure and write JSON")
    running.add_argument("--rounds", type=int, default=41, help="samples of a series [41]")
    running.add_argument("--out", type=Path, help=f"[{RESULT.name}; of parts {PARTIAL.name}]")
    running.add_argument("--only", action="append", help="one part, by name; may be repeated")
    running.add_argument("--peer", type=Path, help="results of the peer's benchmark, as JSON")
    checking = commands.add_parser("check", help="compare a result with targets.toml")
    checking.add_argument("result", nargs="?", type=Path, default=RESULT)
    options = parser.parse_args(argv)
    if options.command == "check":
        return check.main(options.result, TARGETS, ROOT, "bench-gpu")
    out = options.out or (PARTIAL if options.only else RESULT)
    return run(options.rounds, out, options.peer, options.only)


def run(rounds: int, out: Path, peer: Path | None, only: Sequence[str] | None = None) -> int:
    """Measures everything, or some parts, and writes the result file, also when a part fails.

    Args:
        only: parts to measure, by name; all of them by default.
    """
    from benchmarks.gpu import rows

    parts = dict(rows.ROWS)
    unknown = set(only or ()) - {*parts, "peer"}
    if unknown:
        print(
            f"--only: there is no {', '.join(sorted(unknown))}; there are {', '.join(parts)}",
            file=sys.stderr,
        )
        return 2
    bench = rows.Bench(rounds)
    found: list[dict[str, Any]] = []
    failed = []
    if peer:
        theirs = json.loads(peer.read_text(encoding="utf-8"))
        parts["peer"] = lambda bench: rows.peer(bench, theirs)
    for name, measure in parts.items():
        if only and name not in only:
            continue
        try:
            for row in measure(bench):
                found.append({"benchmark": name, **row.to_json()})
                value = "–" if row.value is None else f"{row.value:.4g}"
                print(f"{row.name:24} {value:>9} {row.unit:6} {row.note}", flush=True)
        except Exception:
            traceback.print_exc()
            failed.append(name)
    out.parent.mkdir(parents=True, exist_ok=True)
    result = evidence(found, quick=rounds < 20, driver=bench.driver.version())
    out.write_text(json.dumps(result, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    print(f"written to {out}{'; failed: ' + ', '.join(failed) if failed else ''}")
    return 1 if failed else 0


def evidence(found: list[dict[str, Any]], *, quick: bool, driver: str) -> dict[str, Any]:
    """The result file, which is an evidence file."""
    import cupy

    from demo.evidence import command, hardware, source, versions

    properties = cupy.cuda.runtime.getDeviceProperties(0)
    return {
        "kind": "bench",
        "label": "data-centre",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "command": command("python -m benchmarks.gpu", sys.argv[1:]),
        "quick": quick,
        **source(),
        "hardware": {
            **hardware(),
            "gpu": properties["name"].decode(),
            "gpu_memory_gib": round(properties["totalGlobalMem"] / 2**30, 1),
            "multiprocessors": properties["multiProcessorCount"],
        },
        "versions": {
            **versions(),
            "cupy": cupy.__version__,
            "cuda_driver": driver,
            "nvrtc": ".".join(map(str, cupy.cuda.nvrtc.getVersion())),
            "nvidia_driver": _driver_version(),
        },
        "raw": {"rows": found},
        "derived": {
            row["row"]: round(row["value"], 6) for row in found if row["value"] is not None
        },
    }


def _driver_version() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    return done.stdout.splitlines()[0].strip()


if __name__ == "__main__":
    sys.exit(main())
