"""Engines on two GPUs: each rank reads its own heads, and a herd computes once."""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.engines import Engine, transfer
from benchmarks.gpu.engines import (
    ARGUMENTS,
    CONFIG,
    LENGTHS,
    OWN,
    VARIABLES,
    Prompts,
    Taken,
    restored,
    store,
)
from benchmarks.results import Row
from benchmarks.spand import Spand, serve

_PARALLEL: dict[str, Any] = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
_GPUS = {1: "0", 2: "0,1"}


@dataclass(frozen=True)
class Shape:
    """A model, and what is asked of engines that run it.

    Attributes:
        name: with which its rows begin.
        config: the model's.
        lengths: shared tokens by name; whole spans.
        ways: ranks that store, ranks that are asked.
        span_tokens: of the daemon.
        host_memory: of the daemon; enough for one of ``ways``.
        vocabulary: prompts are made of tokens from 100 to there.
        document: tokens of the herd's, which is new in each round.
        arguments: of vLLM.
    """

    name: str
    config: Mapping[str, Any]
    lengths: Mapping[str, int] = field(default_factory=lambda: LENGTHS)
    ways: tuple[tuple[int, int], ...] = ((1, 2),)
    span_tokens: int = 64
    host_memory: str = "5GiB"
    vocabulary: int = 150_000
    document: int = 4096
    arguments: Mapping[str, Any] = field(default_factory=lambda: ARGUMENTS)

    @contextmanager
    def model(self) -> Iterator[str]:
        """A directory with the model, whose weights are random."""
        with tempfile.TemporaryDirectory() as directory:
            Path(directory, "config.json").write_text(json.dumps(self.config))
            yield directory

    def engine(self, model: str, what: dict[str, Any], gpus: str, **more: Any) -> Engine:
        """An engine that sees these GPUs; it starts in the background."""
        env = {**VARIABLES, "CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": gpus}
        return Engine(model, what, env=env, **{**self.arguments, **more})


#: Four KV heads, as elsewhere in these benchmarks: a plane of a layer is one tile, which both ranks
#: read.
FOUR = Shape("parallel", CONFIG, ways=((1, 2), (2, 1)))
#: The same with spans of which each rank's half is a tile.
LONG = Shape("parallel128", CONFIG, {"4k": 4096, "30k": 29_952}, span_tokens=128)
#: Eight KV heads, as models of this size have: each rank's half is a tile.
EIGHT = Shape(
    "parallel8",
    {**CONFIG, "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
     "num_key_value_heads": 8},
    {"4k": 4096, "30k": 30_016},
    host_memory="8GiB",
)  # fmt: skip


def _ours(spand: Spand, **more: Any) -> dict[str, Any]:
    return transfer(spand.socket_dir, weights_digest="dummy", reserve_timeout_ms=30_000, **more)


def parallel(rounds: int, shape: Shape = FOUR) -> Iterator[Row]:
    """What some ranks stored, others restore: times, tokens, and bytes that each rank read."""
    rounds = min(rounds, 9)
    for stored, asked in shape.ways:
        sizes: dict[int, dict[str, Any]] = {1: {}, 2: _PARALLEL}
        prompts = Prompts(rounds, shape.lengths, shape.vocabulary)
        taken = Taken(shape.lengths)
        daemon = {"host_memory": shape.host_memory, "span_tokens": shape.span_tokens}
        with shape.model() as model, serve(staging_memory="1GiB", **daemon) as spand:
            storing = _ours(spand, load=False)
            with shape.engine(model, storing, _GPUS[stored], **sizes[stored]) as one:
                store(one.up(), spand, prompts, 0, stored, shape.span_tokens)
                spand.settle()
            asking = {**sizes[asked], "disable_log_stats": False}
            with shape.engine(model, _ours(spand, store=False), _GPUS[asked], **asking) as other:
                restored(other.up(), prompts, taken, "host")
                counted = other.counted()
        yield from _rows(f"{shape.name}_{stored}_to_{asked}", taken, counted, shape, asked)


def _rows(
    name: str, taken: Taken, counted: Mapping[str, float], shape: Shape, asked: int
) -> Iterator[Row]:
    heads = shape.config["num_key_value_heads"]
    about = f"{heads} KV heads, spans of {shape.span_tokens}; {asked} rank(s) asked"
    for length, tokens in shape.lengths.items():
        what = f"{about}: {tokens} shared tokens"
        times = taken.times["host", length]
        yield Row(f"{name}_{length}", "ms", "median", {"restored": times}, what)
        series = {"restored": times, "own prefix cache": taken.times["host_prefix", length]}
        yield Row(f"{name}_{length}_over", "ms", "median a - median b", series, what)
    wrong = [float(taken.differing("host", "host_prefix"))]
    yield Row(
        f"{name}_other_tokens", "prompts", "max", {"host": wrong},
        "first tokens unlike those of the own prefix cache",
    )  # fmt: skip
    read, whole = counted["restore_read_bytes"], counted["restored_bytes"]
    series = {"read by a rank": [read / asked], "restored by all": [whole]}
    yield Row(f"{name}_read", "ratio", "sum a / sum b", series, f"{about}: its bytes over all")


def herd(rounds: int, shape: Shape = FOUR) -> Iterator[Row]:
    """Two engines, one on each GPU, asked for the same new document at the same moment; then for
    one that both have, first one engine alone."""
    rng = random.Random(11)
    rounds, size = min(rounds, 9), shape.document

    def drawn(count: int) -> list[int]:
        return [rng.randrange(100, shape.vocabulary) for _ in range(count)]

    documents = [drawn(size) for _ in range(rounds + 1)]
    computed, first, alone, together = [], [], [], []
    with (
        shape.model() as model,
        serve(host_memory=shape.host_memory, staging_memory="1GiB") as spand,
        shape.engine(model, _ours(spand), "0") as one,
        shape.engine(model, _ours(spand), "1") as other,
        ThreadPoolExecutor(2) as pool,
    ):
        engines = [one.up(), other.up()]

        def ask(asked: list[Engine], document: list[int]) -> list[Any]:
            runs = [pool.submit(engine.run, [document + drawn(OWN)]) for engine in asked]
            return [run.result() for run in runs]

        for number, document in enumerate(documents):
            done = ask(engines, document)
            if number:
                computed.append(sum(size - run.cached for run in done) / size)
                first.append(max(run.first for run in done) * 1e3)
        what = f"two engines on two GPUs, the same {size} new tokens at once"
        yield Row("pair_herd_computed", "documents", "max", {"computed": computed}, what)
        yield Row("pair_herd_worst", "ms", "median", {"worst first token": first}, what)
        spand.settle()
        for number in range(rounds + 1):
            for asked, found in ((engines[:1], alone), (engines, together)):
                for engine in engines:
                    engine.reset()
                done = ask(asked, documents[-1])
                if not number:
                    # What was not stored of it is now.
                    spand.settle()
                    continue
                found.append(max(run.first for run in done) * 1e3)
                if any(run.cached != size for run in done):
                    raise RuntimeError(f"{[run.cached for run in done]} of {size} were restored")
    series = {"both at once": together, "one alone": alone}
    what = f"{size} stored tokens restored by both engines at once: the later first token"
    yield Row("pair_engines_at_once", "ratio", "median a / median b", series, what)
