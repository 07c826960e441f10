"""Engines on two GPUs: each rank reads its own heads, and a herd computes once."""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
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

#: A document that nobody has, for each of the herd's rounds.
DOCUMENT = 4096
_PARALLEL: dict[str, Any] = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}


@contextmanager
def _model() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "config.json").write_text(json.dumps(CONFIG))
        yield directory


def _engine(model: str, what: dict[str, Any], gpus: str, **more: Any) -> Engine:
    env = {**VARIABLES, "CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": gpus}
    return Engine(model, what, env=env, **{**ARGUMENTS, **more})


def _ours(spand: Spand, **more: Any) -> dict[str, Any]:
    return transfer(spand.socket_dir, weights_digest="dummy", reserve_timeout_ms=30_000, **more)


def parallel(rounds: int) -> Iterator[Row]:
    """What one rank stored, two restore, and the other way round; times of both."""
    rounds = min(rounds, 9)
    for stored, asked in ((1, 2), (2, 1)):
        sizes = {1: {}, 2: _PARALLEL}
        gpus = {1: "0", 2: "0,1"}
        with _model() as model, serve(host_memory="5GiB", staging_memory="1GiB") as spand:
            prompts, taken = Prompts(rounds), Taken()
            with _engine(model, _ours(spand, load=False), gpus[stored], **sizes[stored]) as one:
                store(one.up(), spand, prompts, 0, stored)
                spand.settle()
            with _engine(model, _ours(spand, store=False), gpus[asked], **sizes[asked]) as other:
                restored(other.up(), prompts, taken, "host")
        for length in LENGTHS:
            name = f"parallel_{stored}_to_{asked}_{length}"
            what = f"stored by {stored} rank(s), {asked} asked: {LENGTHS[length]} shared tokens"
            yield Row(name, "ms", "median", {"restored": taken.times["host", length]}, what)
            series = {
                "restored": taken.times["host", length],
                "own prefix cache": taken.times["host_prefix", length],
            }
            yield Row(f"{name}_over", "ms", "median a - median b", series, what)
        wrong = [float(taken.differing("host", "host_prefix"))]
        yield Row(
            f"parallel_{stored}_to_{asked}_other_tokens", "prompts", "max", {"host": wrong},
            "first tokens unlike those of the own prefix cache",
        )  # fmt: skip


def herd(rounds: int) -> Iterator[Row]:
    """Two engines, one on each GPU, asked for the same new document at the same moment."""
    rng = random.Random(11)
    rounds = min(rounds, 9)
    documents = [[rng.randrange(100, 150_000) for _ in range(DOCUMENT)] for _ in range(rounds + 1)]
    computed, first = [], []
    with (
        _model() as model,
        serve(host_memory="5GiB", staging_memory="1GiB") as spand,
        _engine(model, _ours(spand), "0") as one,
        _engine(model, _ours(spand), "1") as other,
        ThreadPoolExecutor(2) as pool,
    ):
        engines = [one.up(), other.up()]
        for number, document in enumerate(documents):
            own = [[rng.randrange(100, 150_000) for _ in range(OWN)] for _ in engines]
            runs = [
                pool.submit(engine.run, [document + tail])
                for engine, tail in zip(engines, own, strict=True)
            ]
            done = [run.result() for run in runs]
            if number:
                computed.append(sum(DOCUMENT - run.cached for run in done) / DOCUMENT)
                first.append(max(run.first for run in done) * 1e3)
    what = f"two engines on two GPUs, the same {DOCUMENT} new tokens at once"
    yield Row("pair_herd_computed", "documents", "max", {"computed": computed}, what)
    yield Row("pair_herd_worst", "ms", "median", {"worst first token": first}, what)
