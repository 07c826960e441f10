"""`python -m benchmarks run` measures, `check` compares with the targets, `table` shows."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

from rich.console import Console

from benchmarks import check, machine, readme, report
from benchmarks.suite import ALONE, BENCHMARKS, measure, run_apart

ROOT = Path(__file__).resolve().parent.parent
RESULT = ROOT / ".bench" / "bench.json"
PARTIAL = ROOT / ".bench" / "partial.json"
EVIDENCE = ROOT / "evidence" / "bench-cpu.json"
TARGETS = Path(__file__).with_name("targets.toml")


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, 1 (something failed or falls short) or 2 (wrong usage)."""
    options = _parse(argv)
    # What was started ends with us, however we are told to end.
    signal.signal(signal.SIGTERM, _terminated)
    if options.command == "run":
        return run(options.names, quick=options.quick, out=options.out)
    if options.command == "check":
        return check.main(options.result, TARGETS, ROOT)
    if options.command == "table":
        return table(options.result, options.write)
    with open(options.out, "w", encoding="utf-8", buffering=1) as out:
        for row in measure(options.name, quick=options.quick):
            print(json.dumps(row.to_json()), file=out)
    return 0


def _terminated(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def run(names: Sequence[str], *, quick: bool, out: Path | None) -> int:
    """Measures, writes the result file and prints the table."""
    console = Console(stderr=True, highlight=False)
    out = out or (PARTIAL if names else RESULT)
    run_of = machine.Run(quick=quick)
    failed = []
    for name in names or BENCHMARKS:
        console.print(f"== {name}: {(BENCHMARKS | ALONE)[name]}")
        rows, seconds, well = run_apart(name, quick=quick)
        run_of.add(name, rows, seconds)
        if not well:
            failed.append(name)
        console.print(f"   {seconds:.0f} s{'' if well else ', FAILED'}")
    evidence = run_of.to_json()
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(evidence, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    targets = check.read_targets(TARGETS)
    Console(width=None if sys.stdout.isatty() else 160).print(report.table(evidence, targets))
    console.print(f"written to {out}")
    if failed:
        console.print(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


def table(path: Path, document: Path | None) -> int:
    """Prints the README's table, or puts it between the markers of a document."""
    if not path.is_file():
        print(f"{path} is not there", file=sys.stderr)
        return 1
    result = json.loads(path.read_text(encoding="utf-8"))
    text = readme.markdown(result, path.stem, check.read_targets(TARGETS), ROOT)
    if document is None:
        print(text)
        return 0
    try:
        document.write_text(readme.placed(document.read_text(encoding="utf-8"), text), "utf-8")
    except readme.MarkerError as wrong:
        print(f"{document}: {wrong}", file=sys.stderr)
        return 1
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run", help="measure, write JSON and print a table")
    names = ", ".join(BENCHMARKS | ALONE)
    running.add_argument("names", nargs="*", help=f"of {names}; without: {', '.join(BENCHMARKS)}")
    running.add_argument("--quick", action="store_true", help="fewer samples; not for figures")
    running.add_argument("--out", type=Path, help=f"result file [{RESULT.relative_to(ROOT)}]")
    checking = commands.add_parser("check", help="compare a result with targets.toml")
    checking.add_argument("result", nargs="?", type=Path, default=RESULT)
    shown = commands.add_parser("table", help="the README's table of a result, as Markdown")
    shown.add_argument("result", nargs="?", type=Path, default=EVIDENCE)
    shown.add_argument("--write", type=Path, metavar="FILE", help="put it between FILE's markers")
    one = commands.add_parser("measure", help="one benchmark in this process")
    one.add_argument("name", choices=BENCHMARKS | ALONE)
    one.add_argument("out")
    one.add_argument("--quick", action="store_true")
    options = parser.parse_args(argv)
    unknown = [name for name in getattr(options, "names", ()) if name not in BENCHMARKS | ALONE]
    if unknown:
        parser.error(f"{unknown[0]} is none of {names}")
    return options


if __name__ == "__main__":
    sys.exit(main())
