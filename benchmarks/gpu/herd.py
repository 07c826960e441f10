"""`python -m benchmarks.gpu.herd run`: a herd of four vLLM engines on one GPU.

32 requests want one document that nobody has, at the same moment. The model has the shape of
Qwen2 7B and random weights. What was measured is written down after each round.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks import check, herd
from benchmarks.engines import Engine, transfer
from benchmarks.gpu.__main__ import evidence
from benchmarks.gpu.engines import ARGUMENTS, CONFIG, VARIABLES
from benchmarks.spand import ROOT, serve

RESULT = ROOT / ".bench" / "gpu-herd.json"
TARGETS = Path(__file__).with_name("herd-targets.toml")

#: Seconds from an order to the moment at which requests come, and that an engine may take for them.
_LEAD, _WAIT = 0.2, 30.0
#: Rounds that say nothing before that is the result.
_UNFIT = 3


def progress(began: float, text: str) -> None:
    """A line on stderr, with the seconds since then."""
    print(f"[{time.monotonic() - began:5.1f} s] {text}", file=sys.stderr, flush=True)


def measure(rounds: int, tier: str) -> Iterator[herd.Round]:
    """So many rounds, after one for warming up.

    Raises:
        RuntimeError: an engine did not start, or gave no answer.
        Unfit: too many rounds said nothing.
    """
    from benchmarks.gpu.rig import Driver

    # Nothing can be written down without it: better to know before engines start.
    Driver()
    began = time.monotonic()
    memory: dict[str, Any] = {"host_memory": "8GiB", "staging_memory": "2GiB"}
    if tier == "gpu":
        memory |= {"gpu": "0", "gpu_memory": "8GiB"}
    with ExitStack() as stack:
        model = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (model / "config.json").write_text(json.dumps(CONFIG))
        spand = stack.enter_context(serve(**memory))
        progress(began, "the daemon is up")
        words = {"weights_digest": "dummy", "tier": tier, "reserve_timeout_ms": 30_000}
        ours = transfer(spand.socket_dir, **words)
        engines = [
            stack.enter_context(Engine(str(model), ours, env=VARIABLES, **ARGUMENTS))
            for _ in range(herd.ENGINES)
        ]
        for number, engine in enumerate(engines):
            engine.up()
            progress(began, f"engine {number} is up")
        asked = herd.Herd(spand, engines, lead=_LEAD, wait=_WAIT)
        asked.warm(herd.DOCUMENT)
        progress(began, "warm")
        unfit = 0
        while rounds:
            try:
                one = asked.round()
            except herd.Unfit as why:
                progress(began, f"a round says nothing: {why}")
                unfit += 1
                if unfit == _UNFIT:
                    raise
                continue
            rounds -= 1
            progress(began, str(one))
            yield one


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, 1 (something failed or falls short) or 2 (wrong usage)."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.herd", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run", help="measure and write JSON")
    running.add_argument("--rounds", type=int, default=9, help="beside one for warming up [9]")
    running.add_argument("--tier", choices=["host", "gpu"], default="host", help="[host]")
    running.add_argument("--out", type=Path, default=RESULT)
    checking = commands.add_parser("check", help="compare a result with herd-targets.toml")
    checking.add_argument("result", nargs="?", type=Path, default=RESULT)
    options = parser.parse_args(argv)
    if options.command == "check":
        return check.main(options.result, TARGETS, ROOT, "bench-gpu-herd")
    rounds: list[herd.Round] = []
    failed = False
    try:
        for one in measure(options.rounds, options.tier):
            rounds.append(one)
            write(rounds, options)
    except Exception:
        # The rounds before are written down.
        traceback.print_exc()
        failed = True
    if not rounds:
        return 1
    for row in herd.rows(rounds, _what(options.tier)):
        value = "–" if row.value is None else f"{row.value:.4g}"
        print(f"{row.name:24} {value:>9} {row.unit:10} {row.note}", flush=True)
    print(f"{len(rounds)} rounds written to {options.out}{'; FAILED' if failed else ''}")
    return 1 if failed else 0


def write(rounds: Sequence[herd.Round], options: argparse.Namespace) -> None:
    """Writes the evidence of the rounds so far."""
    from benchmarks.gpu.rig import Driver

    found = [
        {"benchmark": "herd", **row.to_json()} for row in herd.rows(rounds, _what(options.tier))
    ]
    result = evidence(found, quick=len(rounds) < 5, driver=Driver().version())
    tier = "" if options.tier == "host" else f" --tier {options.tier}"
    result["command"] = f"python -m benchmarks.gpu.herd run --rounds {options.rounds}{tier}"
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, ensure_ascii=False, indent=1) + "\n", "utf-8")


def _what(tier: str) -> str:
    return f"7B shape, random weights, one GPU, spans in {tier} memory"


if __name__ == "__main__":
    sys.exit(main())
