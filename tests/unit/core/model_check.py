"""`make model-check`: random walks through the core, as many steps as are asked for.

The walks are those of ``test_machine`` and ``test_disk_machine``, in rounds. A round is made from
one number, so that the one that fails can be made again alone: ``make model-check STEPS=1 SEED=…``.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path += [str(path) for path in Path(__file__).resolve().parents[3:4]]

from hypothesis import Phase, settings
from test_disk_machine import DISK_MUST_REACH, DiskMachine
from test_machine import (
    MUST_REACH,
    CoreMachine,
    FamilyMachine,
    FlightMachine,
    TierMachine,
    walks,
)

#: Of a round: what walks, how many do, and the steps of each. Many short ones, then long ones that
#: fill everything; many rounds, since walks of one seed are like each other.
ROUNDS = (
    (CoreMachine, 40, 60),
    (FlightMachine, 20, 60),
    (FamilyMachine, 20, 60),
    (TierMachine, 20, 60),
    (DiskMachine, 40, 60),
    (CoreMachine, 10, 240),
)
#: Walks of so many steps together must have been everywhere.
ENOUGH = 100_000


@dataclass
class Round:
    """What one round did.

    Attributes:
        reached: the core's counters, and ``steps``.
        failure: the walk that failed, as Hypothesis tells it; or empty.
    """

    seed: int
    reached: Counter[str] = field(default_factory=Counter)
    failure: str = ""


def walk(number: int) -> Round:
    """One round."""
    machine, count, steps = ROUNDS[number % len(ROUNDS)]
    CoreMachine.reached, DiskMachine.reached = Counter(), Counter()
    few = settings(
        max_examples=count,
        stateful_step_count=steps,
        deadline=None,
        database=None,
        phases=(Phase.generate, Phase.shrink),
    )
    done = Round(number)
    try:
        walks(machine, number, few)
    except Exception:
        done.failure = traceback.format_exc()
    done.reached = CoreMachine.reached + DiskMachine.reached
    return done


def rounds(first: int, steps: int, processes: int) -> Iterator[Round]:
    """Rounds from number ``first`` on, until they have made so many steps or one has failed."""
    context = multiprocessing.get_context("spawn")
    quiet = (signal.SIGINT, signal.SIG_IGN)
    with ProcessPoolExecutor(processes, context, signal.signal, quiet) as pool:
        made, failed, number = 0, False, first
        flying: set[Future[Round]] = set()
        try:
            while flying or not (failed or made >= steps):
                while len(flying) < processes and not (failed or made >= steps):
                    flying.add(pool.submit(walk, number))
                    number += 1
                done, flying = wait(flying, return_when=FIRST_COMPLETED)
                for one in done:
                    result = one.result()
                    made += result.reached["steps"]
                    failed = failed or bool(result.failure)
                    yield result
        except KeyboardInterrupt:
            for process in multiprocessing.active_children():
                process.kill()
            raise


def check(first: int, steps: int, processes: int) -> dict[str, Any]:
    """What rounds from number ``first`` on did.

    Raises:
        KeyboardInterrupt: told to stop.
    """
    print(f"SEED={first}", file=sys.stderr)
    began, total, made = time.monotonic(), Counter[str](), 0
    failures = []
    try:
        for one in rounds(first, steps, processes):
            total.update(one.reached)
            made += 1
            if one.failure:
                failures.append(one)
            if sys.stderr.isatty():
                print(f"\r{total['steps']:,} of {steps:,} steps", end="", file=sys.stderr)
    except KeyboardInterrupt:
        print(f"\nstopped after {total['steps']:,} steps", file=sys.stderr)
        raise
    if sys.stderr.isatty():
        print(file=sys.stderr)
    for one in failures:
        again = f"make model-check STEPS=1 SEED={one.seed}"
        print(f"{one.failure}\nround {one.seed} failed; again: {again}", file=sys.stderr)
    return {
        "seed": first,
        "steps": total.pop("steps"),
        "rounds": made,
        "seconds": round(time.monotonic() - began, 1),
        "failed_rounds": [one.seed for one in failures],
        "reached": dict(sorted(total.items())),
    }


def _must(checks: Sequence[dict[str, Any]]) -> list[str]:
    """Counters that so many steps have to reach together."""
    enough = sum(one["steps"] for one in checks) >= ENOUGH
    return sorted({*MUST_REACH, *DISK_MUST_REACH}) if enough else []


def evidence(checks: Sequence[dict[str, Any]], command: str) -> dict[str, Any]:
    """Checks in the form of evidence/README.md."""
    from demo.evidence import functional
    from tools.verify_evidence import derive

    made = {
        **functional("model-check", command),
        "raw": {"must_reach": _must(checks), "checks": list(checks)},
    }
    return {**made, "derived": derive(made)}


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, 1 (a walk failed, or they reached too little) or 2 (usage)."""
    parser = argparse.ArgumentParser(prog="model_check.py", description=__doc__)
    parser.add_argument("--steps", type=int, default=1_000_000, help="at least so many [1000000]")
    parser.add_argument(
        "--seed", type=int, action="append", help="number of the first round; may be repeated"
    )
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", action="store_true", help="the result as JSON on stdout")
    parser.add_argument(
        "--out", type=Path, help="write what was done to a file, as evidence, after each seed"
    )
    options = parser.parse_args(argv)
    seeds = options.seed or [random.SystemRandom().getrandbits(32)]
    if options.steps < 1 or options.processes < 1 or min(seeds) < 0:
        parser.error("numbers must be positive")
    from demo.evidence import command

    told = command("python tests/unit/core/model_check.py", argv or sys.argv[1:])
    done: list[dict[str, Any]] = []
    for seed in seeds:
        try:
            result = check(seed, options.steps, options.processes)
        except KeyboardInterrupt:
            return 130
        done.append(result)
        if options.out is not None:
            text = json.dumps(evidence(done, told), indent=1)
            options.out.write_text(text + "\n", encoding="utf-8")
        if result["failed_rounds"]:
            break
        if not options.json:
            steps, count, seconds = result["steps"], result["rounds"], result["seconds"]
            print(f"{steps:,} steps in {count} rounds, {seconds:,.0f} s: everything held")
    missed = [name for name in _must(done) if not any(one["reached"].get(name) for one in done)]
    if missed:
        print(f"no walk reached: {', '.join(missed)}", file=sys.stderr)
    if options.json:
        print(json.dumps(done, indent=1))
    return 1 if missed or done[-1]["failed_rounds"] else 0


if __name__ == "__main__":
    sys.exit(main())
