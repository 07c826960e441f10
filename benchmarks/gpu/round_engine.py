"""`python -m benchmarks.gpu.round_engine run`: a round of siblings in one vLLM engine on a GPU.

Eight prompts share a passage that another engine process has computed; what they make of it was
recovered outside of both. They are restored together, out of dense spans, and out of recipes.
The model has the shape of Qwen2 7B and random weights.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks import check
from benchmarks.engines import Engine, transfer
from benchmarks.gpu.__main__ import evidence
from benchmarks.gpu.engines import ARGUMENTS, CONFIG, HEAD_DIM, KV_HEADS, LAYERS, VARIABLES
from benchmarks.gpu.recovered import ANEW, SPAN, Passage
from benchmarks.results import Row
from benchmarks.spand import ROOT, Spand, serve
from kmesh.kernels.rotary import Rotary
from kmesh.layout import Shard

RESULT = ROOT / ".bench" / "gpu-round-engine.json"
TARGETS = Path(__file__).with_name("round-engine-targets.toml")

SIBLINGS, TOKENS, TAIL = 8, 4096, 8
#: Seconds until all of it is a recipe.
_ENCODE = 300.0


class Siblings:
    """Tokens of a passage, and of eight prompts that have it at one place or another."""

    def __init__(self) -> None:
        rng = random.Random(11)

        def drawn(count: int) -> list[int]:
            return [rng.randrange(100, 150_000) for _ in range(count)]

        self.passage = drawn(TOKENS)
        self.beginnings = [drawn(SPAN * (1 + n % 2)) for n in range(SIBLINGS)]
        # The last tokens are too few to be stored.
        self.prompts = [[*own, *self.passage, *drawn(TAIL)] for own in self.beginnings]
        self.restored = sum(len(prompt) - TAIL for prompt in self.prompts)


class Taken:
    """Milliseconds until each of the eight has its first token, and the last one's, by what they
    were restored from: "dense" or "recipes"."""

    def __init__(self) -> None:
        self.times: dict[str, list[float]] = {}
        self.tokens: dict[str, list[int]] = {}

    def measure(self, what: str, engine: Engine, siblings: Siblings, rounds: int) -> None:
        """The first round is for warming up."""
        for number in range(rounds + 1):
            engine.reset()
            run = engine.run(siblings.prompts)
            if run.cached != siblings.restored:
                raise RuntimeError(
                    f"{what}: {run.cached} tokens were restored, not {siblings.restored}"
                )
            if number:
                self.times.setdefault(what, []).append(run.seconds * 1e3)
            self.tokens.setdefault(what, []).append(run.last)

    def rows(self) -> Iterator[Row]:
        """What is written down."""
        size = TOKENS * LAYERS * 2 * KV_HEADS * HEAD_DIM * 2
        what = (
            f"{SIBLINGS} siblings of {TOKENS} shared tokens ({size / 1e6:.0f} MB),"
            f" {ANEW} of {SPAN} their own"
        )
        for name, samples in self.times.items():
            yield Row(f"engine_round_{name}", "ms", "median", {name: samples}, what)
        series = {name: self.times[name] for name in ("dense", "recipes")}
        yield Row("engine_round_ratio", "ratio", "median of a/b", series, what)
        pairs = zip(self.tokens["dense"], self.tokens["recipes"], strict=True)
        differing = [float(a != b) for a, b in pairs]
        what = "rounds whose last prompt's first token differs"
        yield Row("engine_round_other_tokens", "rounds", "max", {"recipes": differing}, what)


def encoded(passage: Passage, beginnings: list[list[int]], spand: Spand) -> None:
    """Has all that siblings share made recipes."""
    passage.join("round", beginnings)
    deadline = time.monotonic() + _ENCODE
    while (found := passage.mirrors("round")) < SIBLINGS * TOKENS // SPAN:
        if time.monotonic() > deadline:
            raise RuntimeError(f"only {found} spans became recipes")
        time.sleep(0.5)
    spand.settle()


def measure(rounds: int) -> Taken:
    """Runs the engines; the one that computes ends before the other restores."""
    siblings, taken = Siblings(), Taken()
    with ExitStack() as stack:
        model = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (model / "config.json").write_text(json.dumps(CONFIG))
        spand = stack.enter_context(serve(host_memory="5GiB", staging_memory="1GiB"))

        def engine(**more: Any) -> Engine:
            words = {"weights_digest": "dummy", "reserve_timeout_ms": 30_000, **more}
            what = transfer(spand.socket_dir, **words)
            return Engine(str(model), what, env=VARIABLES, **ARGUMENTS)

        with engine(load=False) as storing:
            storing.up().run([siblings.passage])
            deadline = time.monotonic() + 60
            while spand.status().spans < TOKENS // SPAN:
                if time.monotonic() > deadline:
                    raise RuntimeError("the passage was not stored")
                time.sleep(0.05)
            namespace = storing.namespace()
        rotary = Rotary.from_parameters(
            {"rope_theta": CONFIG["rope_theta"]},
            head_dim=HEAD_DIM, interleaved=False, dtype="bfloat16",
        )  # fmt: skip
        passage = Passage(
            spand.socket_dir, namespace, Shard(0, LAYERS, 0, KV_HEADS), HEAD_DIM,
            siblings.passage, rotary,
        )  # fmt: skip
        passage.store_siblings(siblings.beginnings)
        restoring = stack.enter_context(engine(store=False)).up()
        taken.measure("dense", restoring, siblings, rounds)
        encoded(passage, siblings.beginnings, spand)
        taken.measure("recipes", restoring, siblings, rounds)
        if restoring.said("decoded on the host"):
            raise RuntimeError("spans were decoded on the host: the rows would say nothing")
    return taken


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, 1 (something falls short) or 2 (wrong usage)."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.round_engine", description=__doc__
    )
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run", help="measure and write JSON")
    running.add_argument("--rounds", type=int, default=9, help="samples of a series [9]")
    running.add_argument("--out", type=Path, default=RESULT)
    checking = commands.add_parser("check", help=f"compare a result with {TARGETS.name}")
    checking.add_argument("result", nargs="?", type=Path, default=RESULT)
    options = parser.parse_args(argv)
    if options.command == "check":
        return check.main(options.result, TARGETS, ROOT, "bench-gpu-round")
    from benchmarks.gpu.rig import Driver

    found = []
    for row in measure(options.rounds).rows():
        found.append({"benchmark": "round_engine", **row.to_json()})
        print(f"{row.name:40} {row.value:>9.4g} {row.unit:6} {row.note}", flush=True)
    result = evidence(found, quick=options.rounds < 9, driver=Driver().version())
    result["command"] = f"python -m benchmarks.gpu.round_engine run --rounds {options.rounds}"
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, ensure_ascii=False, indent=1) + "\n", "utf-8")
    print(f"written to {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
