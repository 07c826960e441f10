"""What is measured on two GPUs, with engines on the CPU: that it runs, and what ranks read."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from driver import ROOT
from nursery import Fork, Nursery

from benchmarks.engines import Engine
from benchmarks.gpu import pair_engines
from benchmarks.results import Row

#: Rows of a head have 512 bytes: of two heads, each rank's half is a tile with spans of 128 tokens.
CONFIG = {
    **pair_engines.FOUR.config,
    "hidden_size": 512,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "max_position_embeddings": 4096,
    "torch_dtype": "float32",
    "vocab_size": 2048,
}
ARGUMENTS: dict[str, Any] = {
    "dtype": "float32",
    "load_format": "dummy",
    "block_size": 32,
    "max_model_len": 2048,
    "max_num_batched_tokens": 2048,
    "num_gpu_blocks_override": 200,
    "enable_prefix_caching": True,
}
SHAPE = pair_engines.Shape(
    "parallel", CONFIG, {"short": 256, "long": 1024}, host_memory="256MiB", vocabulary=2000,
    document=1024, arguments=ARGUMENTS,
)  # fmt: skip


@pytest.fixture(autouse=True)
def _few_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch, nursery: Nursery) -> None:
    """Engines come out of the nursery."""
    child = str(ROOT / "benchmarks" / "engine_child.py")

    class Forked(Engine):
        def _start(self, env: dict[str, str]) -> Fork:  # type: ignore[override]
            return Fork(nursery, env, [child], self._log.fileno())

    monkeypatch.setattr(pair_engines, "Engine", Forked)


def values(rows: list[Row]) -> dict[str, float | None]:
    return {row.name: row.value for row in rows}


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(("stored", "asked", "span", "read"), [(1, 2, 128, 0.5), (2, 1, 64, 1.0)])
def test_each_rank_reads_its_heads(stored: int, asked: int, span: int, read: float) -> None:
    """Halves where its heads are whole tiles; no first token differs."""
    shape = replace(SHAPE, span_tokens=span, ways=((stored, asked),))
    name = f"parallel_{stored}_to_{asked}"
    found = values(list(pair_engines.parallel(1, shape)))
    # Of a tail, and of a span of which a block is missing, more is read than is wanted.
    assert read <= (found[f"{name}_read"] or 0) < 1.1 * read
    assert found[f"{name}_other_tokens"] == 0
    assert len(found) == 6


def test_a_herd_of_two_is_measured() -> None:
    found = values(list(pair_engines.herd(1, SHAPE)))
    assert set(found) == {"pair_herd_computed", "pair_herd_worst", "pair_engines_at_once"}
    assert 1 <= (found["pair_herd_computed"] or 0) <= 2
