"""32 requests in four vLLM engines with a small real model want one document that nobody has."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

from benchmarks import herd
from benchmarks.engines import RUN_SECONDS, Engine, transfer
from benchmarks.results import Row
from benchmarks.spand import serve
from demo.__main__ import prepared_model

#: Tokens of a document for warming up, and of all in a quick run.
SHORT = 1024


def run(quick: bool) -> Iterator[Row]:
    """Rows of this file."""
    model = prepared_model()
    arguments: dict[str, Any] = {
        "dtype": "float32",
        "block_size": 32,
        "max_model_len": herd.DOCUMENT + 512,
        "max_num_batched_tokens": herd.DOCUMENT + 512,
        "max_num_seqs": herd.EACH,
        # Two documents and their tails: memory is short where four engines run.
        "num_gpu_blocks_override": 400,
        "enable_prefix_caching": True,
    }
    with ExitStack() as stack:
        spand = stack.enter_context(serve(host_memory="1536MiB", staging_memory="512MiB"))
        # Two cores are slow, and others may be busy on them: nobody gives up meanwhile.
        words = {
            "flight_patience": 1000,
            "flight_wait_ms": int(RUN_SECONDS * 1e3),
            "acquire_timeout_ms": 30_000,
            "reserve_timeout_ms": 30_000,
        }
        ours = transfer(spand.socket_dir, **words)
        engines = [
            stack.enter_context(Engine(model, ours, **arguments)) for _ in range(herd.ENGINES)
        ]
        for engine in engines:
            engine.up()
        asked = herd.Herd(spand, engines, lead=1.0, wait=RUN_SECONDS)
        asked.warm(SHORT)
        tokens = SHORT if quick else herd.DOCUMENT
        rounds = [asked.round(tokens) for _ in range(1 if quick else 3)]
    yield from herd.rows(rounds, "SmolLM2-135M float32, nobody gives up waiting", tokens)
