"""`make chaos`: a daemon and its clients under faults that a seed decides.

It exits with 0 if no byte was wrong, no call hung, and nothing was left behind; then with the same
seed the same faults come in the same order again.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path += [str(path) for path in Path(__file__).resolve().parents[1:3]]
sys.path.append(str(Path(__file__).resolve().parents[1] / "ipc"))

from chaos_plan import SHAPES, schedule, shape_of
from chaos_run import evidence, run
from chaos_storm import CLIENTS
from chaos_watch import Broken


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, 1 (something did not hold), 2 (usage) or 130 (stopped)."""
    parser = argparse.ArgumentParser(prog="python tests/chaos", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60, help="how long faults come [60]")
    parser.add_argument(
        "--seed", type=int, action="append", help="decides everything; may be repeated [random]"
    )
    parser.add_argument("--shape", choices=SHAPES, help="how the daemon is made [by the seed]")
    parser.add_argument("--plan", action="store_true", help="show the faults and do nothing")
    parser.add_argument("--json", action="store_true", help="the summary as JSON on stdout")
    parser.add_argument("--quiet", action="store_true", help="no events while it runs")
    parser.add_argument("--out", type=Path, help="write the summary to a file, as evidence")
    options = parser.parse_args(argv)
    if not 5 <= options.seconds <= 1e6:
        parser.error("--seconds: from 5 on")
    seeds = options.seed or [random.SystemRandom().getrandbits(32)]
    # Told to end as by a terminal.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    done = []
    for seed in seeds:
        shape = options.shape or shape_of(seed)
        if options.plan:
            for fault in schedule(seed, options.seconds, shape, CLIENTS):
                print(json.dumps(fault.to_json()))
            continue
        print(f"SEED={seed} ({shape})", file=sys.stderr, flush=True)
        try:
            done.append(run(seed, options.seconds, shape, None if options.quiet else show))
        except Broken as broken:
            print(broken, file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            print("stopped", file=sys.stderr)
            return 130
        if not options.json:
            print(line(done[-1]))
    if options.out is not None:
        from demo.evidence import command

        told = command("python tests/chaos", argv or sys.argv[1:])
        text = json.dumps(evidence(done, told), indent=1)
        options.out.write_text(text + "\n", encoding="utf-8")
    if options.json:
        print(json.dumps(done, indent=1))
    return 0


def show(line: str) -> None:
    """An event, where somebody looks on."""
    if sys.stderr.isatty():
        print(line, file=sys.stderr)


def line(done: dict[str, Any]) -> str:
    """A run in a line, for a person."""
    clients, daemon = done["clients"], done["daemon"]
    return (
        f"{sum(done['faults'].values())} faults, {daemon['lives']} lives of the daemon, "
        f"{clients['ops']:,} operations, {clients['read_ok']:,} spans read: everything held"
    )


if __name__ == "__main__":
    sys.exit(main())
