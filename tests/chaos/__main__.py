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

sys.path += [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "ipc")]

from chaos_plan import SHAPES, schedule, shape_of
from chaos_run import run
from chaos_storm import CLIENTS
from chaos_watch import Broken


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, 1 (something did not hold), 2 (usage) or 130 (stopped)."""
    parser = argparse.ArgumentParser(prog="python tests/chaos", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60, help="how long faults come [60]")
    parser.add_argument("--seed", type=int, help="decides everything [random, printed]")
    parser.add_argument("--shape", choices=SHAPES, help="how the daemon is made [by the seed]")
    parser.add_argument("--plan", action="store_true", help="show the faults and do nothing")
    parser.add_argument("--json", action="store_true", help="the summary as JSON on stdout")
    parser.add_argument("--quiet", action="store_true", help="no events while it runs")
    parser.add_argument("--out", type=Path, help="write the summary to a file too")
    options = parser.parse_args(argv)
    if not 5 <= options.seconds <= 1e6:
        parser.error("--seconds: from 5 on")
    seed = random.SystemRandom().getrandbits(32) if options.seed is None else options.seed
    shape = options.shape or shape_of(seed)
    if options.plan:
        for fault in schedule(seed, options.seconds, shape, CLIENTS):
            print(json.dumps(fault.to_json()))
        return 0
    print(f"SEED={seed} ({shape})", file=sys.stderr, flush=True)

    def show(line: str) -> None:
        if not options.quiet and sys.stderr.isatty():
            print(line, file=sys.stderr)

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        done = run(seed, options.seconds, shape, show)
    except Broken as broken:
        print(broken, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    text = json.dumps(done, indent=1)
    if options.out is not None:
        options.out.write_text(text + "\n", encoding="utf-8")
    if options.json:
        print(text)
    else:
        print(
            f"{sum(done['faults'].values())} faults, {done['clients']['ops']:,} operations, "
            f"{done['clients']['read_ok']:,} spans read: everything held"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
