"""`python -m benchmarks.gpu.engines run`: time to the first token, by vLLM engines on one GPU.

A prompt's beginning is computed, comes from the engine's own prefix cache, from vLLM's own
offloading, or from KMesh, where another engine process has stored it: in host memory, or on the
GPU. The model has the shape of Qwen2 7B and random weights.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks import check
from benchmarks.engines import Engine, Run, transfer
from benchmarks.gpu.__main__ import evidence
from benchmarks.results import Row
from benchmarks.spand import ROOT, Spand, serve

RESULT = ROOT / ".bench" / "gpu-engines.json"
TARGETS = Path(__file__).with_name("engine-targets.toml")

#: How long is tried to store a prompt, and waited for what was computed to be stored.
_STORE_SECONDS, _SETTLE_SECONDS = 90.0, 10.0
#: Shared tokens, whole spans; and each prompt's own.
LENGTHS = {"4k": 4096, "16k": 16384, "30k": 30016}
OWN = 64
LAYERS, KV_HEADS, HEAD_DIM = 28, 4, 128
TOKEN_BYTES = LAYERS * 2 * KV_HEADS * HEAD_DIM * 2
CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_act": "silu",
    "hidden_size": 3584,
    "initializer_range": 0.02,
    "intermediate_size": 18944,
    "max_position_embeddings": 32768,
    "num_attention_heads": 28,
    "num_hidden_layers": LAYERS,
    "num_key_value_heads": KV_HEADS,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 152064,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}
OFFLOADING = {
    "kv_connector": "OffloadingConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"cpu_bytes_to_use": 8 << 30, "block_size": 16},
}
ARGUMENTS: dict[str, Any] = {
    "dtype": "bfloat16",
    "load_format": "dummy",
    "block_size": 16,
    "max_model_len": 32768,
    "max_num_batched_tokens": 8192,
    "max_num_seqs": 8,
    "enable_prefix_caching": True,
    "attention_backend": "FLASH_ATTN",
    # Given, so that engines that start side by side do not measure each other.
    "kv_cache_memory_bytes": 5 << 30,
    "gpu_memory_utilization": 0.15,
}
VARIABLES = {"VLLM_USE_FLASHINFER_SAMPLER": "0", "PYTHONHASHSEED": "0"}


class Prompts:
    """The same prompts for every engine: number 0 is for warming up.

    Args:
        lengths: tokens that they share, by name.
        vocabulary: prompts are made of tokens from 100 to there.
    """

    def __init__(
        self, rounds: int, lengths: Mapping[str, int] = LENGTHS, vocabulary: int = 150_000
    ) -> None:
        rng = random.Random(7)
        self.rounds = rounds
        self.lengths = lengths

        def drawn(count: int) -> list[int]:
            return [rng.randrange(100, vocabulary) for _ in range(count)]

        self._shared = {name: drawn(count) for name, count in lengths.items()}
        self._own = [drawn(OWN) for _ in range(rounds + 2)]

    def one(self, length: str, number: int) -> list[int]:
        return self._shared[length] + self._own[number]

    def storing(self, length: str) -> list[int]:
        """A prompt by which the beginning gets into caches."""
        return self._shared[length] + self._own[-1]


class Taken:
    """Milliseconds to the first token, and the tokens: by what was done, for each length."""

    def __init__(self, lengths: Mapping[str, int] = LENGTHS) -> None:
        self._lengths = lengths
        self.times: dict[tuple[str, str], list[float]] = {}
        self.tokens: dict[tuple[str, str, int], int] = {}
        self.traces: dict[str, Any] = {}
        self.failed: list[str] = []

    def add(self, what: str, length: str, number: int, run: Run, cached: bool) -> None:
        wanted = self._lengths[length] if cached else 0
        if run.cached != wanted:
            raise RuntimeError(f"{what}, {length}: {run.cached} tokens were cached, not {wanted}")
        if number:
            self.times.setdefault((what, length), []).append(run.first * 1e3)
            self.tokens[what, length, number] = run.last
            self.traces[f"{what}_{length}"] = traced(run)

    def differing(self, what: str, other: str) -> int:
        """Prompts whose first tokens are not the same."""
        return sum(
            token != self.tokens[other, length, number]
            for (which, length, number), token in self.tokens.items()
            if which == what and (other, length, number) in self.tokens
        )


def traced(run: Run) -> dict[str, Any]:
    """Where a run's time went, milliseconds: in adding it, in each step and the hooks in it."""
    return {
        "added": round(run.added * 1e3, 3),
        "steps": [
            {
                "step": round(took * 1e3, 3),
                "hooks": round(hooks * 1e3, 3),
                **{name: round(inside * 1e3, 3) for name, inside in named.items()},
            }
            for (took, hooks), named in zip(run.steps, run.named, strict=True)
        ],
    }


def store(
    engine: Engine, spand: Spand, prompts: Prompts, before: int, parts: int = 1, span: int = 64
) -> None:
    """Has an engine store the beginnings; waits until all of their spans are there.

    Args:
        parts: spans of each stretch of tokens: one for each of its ranks.
        span: tokens of a span.
    """
    wanted = before
    for length, tokens in prompts.lengths.items():
        # Own tokens that fill no span are a tail.
        wanted += -(-(tokens + OWN) // span) * parts
        deadline = time.monotonic() + _STORE_SECONDS
        engine.run([prompts.storing(length)])
        while (found := _stored(spand, wanted)) < wanted:
            if time.monotonic() > deadline:
                raise RuntimeError(f"{found} of {wanted} spans were stored")
            # What is computed before an engine is connected, or has its kernels, is not stored.
            engine.reset()
            engine.run([prompts.storing(length)])


def _stored(spand: Spand, wanted: int) -> int:
    """Spans that are there when it is so many, or after a while."""
    until = time.monotonic() + _SETTLE_SECONDS
    while (found := spand.status().spans) < wanted and time.monotonic() < until:
        time.sleep(0.05)
    return int(found)


def plain(engine: Engine, prompts: Prompts, taken: Taken) -> None:
    """Computes everything; then only what is a prompt's own."""
    for length in LENGTHS:
        for number in range(prompts.rounds + 1):
            engine.reset()
            prompt = prompts.one(length, number)
            taken.add("recompute", length, number, engine.run([prompt]), cached=False)
        engine.reset()
        engine.run([prompts.storing(length)])
        for number in range(prompts.rounds + 1):
            prompt = prompts.one(length, number)
            taken.add("prefix", length, number, engine.run([prompt]), cached=True)


def offloaded(engine: Engine, prompts: Prompts, taken: Taken) -> None:
    """What vLLM's own connector brings back from host memory."""
    for length in LENGTHS:
        engine.reset()
        engine.run([prompts.storing(length)])
        # It stores behind the steps that follow.
        engine.run([prompts.one("4k", 0)[:256]], 16)
        for number in range(prompts.rounds + 1):
            engine.reset()
            run = engine.run([prompts.one(length, number)])
            taken.add("offload", length, number, run, cached=True)


def restored(engine: Engine, prompts: Prompts, taken: Taken, tier: str) -> None:
    """What KMesh brings, and the engine's own prefix cache just after it."""
    for length in prompts.lengths:
        for number in range(prompts.rounds + 1):
            engine.reset()
            prompt = prompts.one(length, number)
            run = engine.run([prompt])
            until = time.monotonic() + _STORE_SECONDS
            # One that is just up may not be connected, or have no kernels yet.
            while not (number or run.cached or time.monotonic() > until):
                engine.reset()
                run = engine.run([prompt])
            taken.add(tier, length, number, run, cached=True)
            engine.reset()
            engine.run([prompts.storing(length)])
            taken.add(f"{tier}_prefix", length, number, engine.run([prompt]), cached=True)


def rows(taken: Taken, copies: dict[str, list[float]]) -> Iterator[Row]:
    """What is written down."""
    for length, tokens in LENGTHS.items():
        size = tokens * TOKEN_BYTES
        what = f"{tokens} shared tokens ({size / 1e6:.0f} MB), {OWN} of its own"
        for name in ("recompute", "prefix", "offload", "host", "gpu"):
            if samples := taken.times.get((name, length)):
                yield Row(f"engine_{name}_{length}", "ms", "median", {name: samples}, what)
        for tier, reduce in (
            ("host", "median a - median b - 1.1 median c"),
            ("gpu", "median a - median b"),
        ):
            ours, own = (taken.times.get((what, length)) for what in (tier, f"{tier}_prefix"))
            if ours and own:
                series = {tier: ours, "own prefix cache": own}
                if tier == "host":
                    series["pinned copy"] = copies[length]
                yield Row(f"engine_{tier}_over_{length}", "ms", reduce, series, what)
    for tier in ("host", "gpu"):
        if any(what == tier for what, _ in taken.times):
            for name, other in (("prefix", f"{tier}_prefix"), ("recompute", "recompute")):
                found = [float(taken.differing(tier, other))]
                what = f"first tokens unlike those of {other}"
                yield Row(
                    f"engine_{tier}_other_tokens_{name}", "prompts", "max", {tier: found}, what
                )


def measure(rounds: int, parts: Sequence[str]) -> tuple[Taken, dict[str, list[float]]]:
    """Runs the engines: those that store first, in processes that end before others restore."""
    prompts, taken = Prompts(rounds), Taken()
    copies: dict[str, list[float]] = {}
    with ExitStack() as stack:
        model = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (model / "config.json").write_text(json.dumps(CONFIG))
        tiers = [part for part in parts if part in ("host", "gpu")]
        memory: dict[str, Any] = {"host_memory": "5GiB", "staging_memory": "1GiB"}
        if "gpu" in tiers:
            memory |= {"gpu": "0", "gpu_memory": "5GiB"}
        spand = stack.enter_context(serve(**memory))

        def engine(what: dict[str, Any] | None, stack: ExitStack) -> Engine:
            return stack.enter_context(Engine(str(model), what, env=VARIABLES, **ARGUMENTS))

        def ours(tier: str, **more: Any) -> dict[str, Any]:
            # Milliseconds of patience: whole prompts are stored, as fast as the daemon can.
            words = {"weights_digest": "dummy", "tier": tier, "reserve_timeout_ms": 30_000}
            return transfer(spand.socket_dir, **words, **more)

        with ExitStack() as first:
            storing = {tier: engine(ours(tier, load=False), first) for tier in tiers}
            before = 0
            for one in storing.values():
                store(one.up(), spand, prompts, before)
                before = spand.settle().spans
        setups = {"plain": None, "offload": OFFLOADING}
        setups |= {tier: ours(tier, store=False) for tier in tiers}
        engines = {part: engine(setups[part], stack) for part in parts}
        for part, one in engines.items():
            one.up()
            print(f"{part} is up", file=sys.stderr, flush=True)
        for part, one in engines.items():
            try:
                if part == "plain":
                    plain(one, prompts, taken)
                elif part == "offload":
                    offloaded(one, prompts, taken)
                else:
                    restored(one, prompts, taken, part)
            except RuntimeError:
                # What the others measured is worth having.
                traceback.print_exc()
                taken.failed.append(part)
            if part == "host":
                for length, tokens in LENGTHS.items():
                    times = one.copies(tokens * TOKEN_BYTES, 11)
                    copies[length] = [took * 1e3 for took in times]
    return taken, copies


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, 1 (something failed or falls short) or 2 (wrong usage)."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.engines", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run", help="measure and write JSON")
    running.add_argument("--rounds", type=int, default=9, help="samples of a series [9]")
    running.add_argument("--out", type=Path, default=RESULT)
    running.add_argument("--parts", nargs="+", default=["plain", "offload", "host", "gpu"],
                         choices=["plain", "offload", "host", "gpu"])  # fmt: skip
    running.add_argument("--trace", type=Path, help="write the steps of each kind's last run there")
    checking = commands.add_parser("check", help="compare a result with engine-targets.toml")
    checking.add_argument("result", nargs="?", type=Path, default=RESULT)
    options = parser.parse_args(argv)
    if options.command == "check":
        return check.main(options.result, TARGETS, ROOT, "bench-gpu-engines")
    from benchmarks.gpu.rig import Driver

    taken, copies = measure(options.rounds, options.parts)
    if options.trace:
        options.trace.write_text(json.dumps(taken.traces))
    found = []
    for row in rows(taken, copies):
        found.append({"benchmark": "engines", **row.to_json()})
        print(f"{row.name:40} {row.value:>9.4g} {row.unit:6} {row.note}", flush=True)
    result = evidence(found, quick=options.rounds < 9, driver=Driver().version())
    result["command"] = f"python -m benchmarks.gpu.engines run --rounds {options.rounds}"
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, ensure_ascii=False, indent=1) + "\n", "utf-8")
    print(f"written to {options.out}", *(f"; {part} failed" for part in taken.failed))
    return 1 if taken.failed else 0


if __name__ == "__main__":
    sys.exit(main())
