"""What two GPUs are asked, without them: every row has its target, and parts add up in one file."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import benchmarks.gpu
from benchmarks.check import judge_all, read_targets
from benchmarks.engines import Run
from benchmarks.gpu import engines, pair, pair_engines
from benchmarks.results import Row

ROOT = Path(__file__).parents[2]
#: Seconds that a restore takes on one of the two GPUs here, and when both are at it.
TAKES = {"kernel": 0.004, "copies": 0.003, "copy": 0.002}


def restorer(conn: Connection) -> None:
    """Answers as ``pair._restorer`` does, as if everything took as long as ``TAKES`` says."""
    while (order := conn.recv()) is not None:
        name, at = order
        conn.send((at, at + TAKES[name]))


@contextmanager
def processes(_filled: Any) -> Iterator[list[Connection]]:
    with ExitStack() as stack:
        ours = []
        for _ in range(2):
            here, there = Pipe()
            thread = threading.Thread(target=restorer, args=(there,))
            thread.start()
            stack.callback(there.close)
            stack.callback(thread.join)
            ours.append(here)
        yield ours
        for conn in ours:
            conn.send(None)
    for conn in ours:
        conn.close()


@pytest.fixture
def host_rows(monkeypatch: pytest.MonkeyPatch) -> list[Row]:
    rig = SimpleNamespace(fill=lambda *_: None, LARGE=None)
    monkeypatch.setattr(benchmarks.gpu, "rig", rig, raising=False)
    monkeypatch.setattr(pair, "_processes", processes)
    monkeypatch.setattr(pair, "_LEAD", 0.0)
    return list(pair.host(3))


def test_both_at_once_are_compared_with_one_and_with_the_host(host_rows: list[Row]) -> None:
    """Two that do not get into each other's way are twice as fast as one."""
    found = {row.name: row.value for row in host_rows}
    assert found == {
        "pair_host_kernel": pytest.approx(2, rel=0.01),
        "pair_host_copies": pytest.approx(2, rel=0.01),
        "pair_host_copy": pytest.approx(2, rel=0.01),
        "pair_host_kernel_share": pytest.approx(0.5, rel=0.01),
        "pair_host_copies_share": pytest.approx(2 / 3, rel=0.01),
    }


def taken(shape: pair_engines.Shape) -> engines.Taken:
    """Of engines that restored all that was asked."""
    found = engines.Taken(shape.lengths)
    for length, tokens in shape.lengths.items():
        for number in range(3):
            for what in ("host", "host_prefix"):
                run = Run(1.0, 0.1, 9, 0.01, [], [], 0.01, tokens, 7)
                found.add(what, length, number, run, cached=True)
    return found


class Storing:
    """An engine and its daemon: prompts are stored from the second run on, and one span is late."""

    def __init__(self, runs: int = 1) -> None:
        self.runs, self.spans, self.late = -runs, 0, 0
        self.told: list[str] = []

    def run(self, prompts: list[list[int]]) -> None:
        self.runs += 1
        self.told.append(f"run {len(prompts[0])}")
        if self.runs > 0:
            self.late = 1
            self.spans += -(-len(prompts[0]) // 128) * 2 - 1

    def reset(self) -> None:
        self.told.append("reset")

    def status(self) -> SimpleNamespace:
        self.spans, self.late = self.spans + self.late, 0
        return SimpleNamespace(spans=self.spans)


def test_what_an_engine_did_not_store_it_stores_when_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engines, "_SETTLE_SECONDS", 0.1)
    prompts = engines.Prompts(1, {"short": 128, "long": 512})
    both: Any = Storing()
    engines.store(both, both, prompts, 0, 2, 128)
    # 192 tokens are a span and a tail, 576 are four and a tail, of two ranks.
    assert both.spans == 4 + 10
    assert both.told == ["run 192", "reset", "run 192", "run 576"]
    monkeypatch.setattr(engines, "_STORE_SECONDS", 0.0)
    never: Any = Storing(1000)
    with pytest.raises(RuntimeError, match="0 of 4 spans were stored"):
        engines.store(never, never, prompts, 0, 2, 128)


def test_every_row_has_its_target(host_rows: list[Row]) -> None:
    rows = list(host_rows)
    for shape in (pair_engines.FOUR, pair_engines.EIGHT, pair_engines.LONG):
        for stored, asked in shape.ways:
            name = f"{shape.name}_{stored}_to_{asked}"
            # As docs/vllm.md has it: all for four heads in spans of 64 tokens, otherwise a half.
            read = 2.0 if asked == 1 or shape is pair_engines.FOUR else 1.0
            counted = {"restore_read_bytes": read * asked, "restored_bytes": 2.0}
            rows += pair_engines._rows(name, taken(shape), counted, shape, asked)
    # Of parts that need a GPU to say anything at all.
    rows += [Row(name, unit, "max", {"": [1.0]}) for name, unit in {
        "pair_peer": "ratio", "pair_peer_copy": "GB/s", "pair_herd_computed": "documents",
        "pair_herd_worst": "ms", "pair_engines_at_once": "ratio",
    }.items()]  # fmt: skip
    result = {"raw": {"rows": [row.to_json() for row in rows]}}
    lines = judge_all(result, read_targets(pair.TARGETS), ROOT)
    assert [line for line in lines if line.verdict.fails] == []
    assert len(lines) == len(rows)


@pytest.mark.parametrize("shape", [pair_engines.FOUR, pair_engines.EIGHT, pair_engines.LONG])
def test_shapes_are_what_can_be_measured(shape: pair_engines.Shape) -> None:
    """Whole spans are shared, all of it fits the daemon's and the engines' memory, heads divide."""
    config, room = shape.config, int(shape.host_memory.removesuffix("GiB")) << 30
    heads, size = config["num_key_value_heads"], 128 * 2
    token = config["num_hidden_layers"] * 2 * heads * size
    assert config["num_attention_heads"] % heads == heads % 2 == 0
    assert config["hidden_size"] == 128 * config["num_attention_heads"]
    assert all(tokens % shape.span_tokens == 0 for tokens in shape.lengths.values())
    stored = sum(-(-(tokens + engines.OWN) // shape.span_tokens) * shape.span_tokens
                 for tokens in shape.lengths.values())  # fmt: skip
    assert stored * token < room * 0.95
    longest = shape.arguments["max_model_len"]
    assert max(shape.lengths.values()) + engines.OWN < longest
    assert longest * token <= shape.arguments["kv_cache_memory_bytes"]


def evidence(part: str, value: float, **changes: Any) -> dict[str, Any]:
    row = Row(f"of {part}", "ms", "max", {"": [value]})
    made = {"command": "c", "quick": False, "commit": "1", "clean": True, "hardware": {},
            "versions": {}, "raw": {"rows": [{"benchmark": part, **row.to_json()}]},
            "derived": {row.name: value}}  # fmt: skip
    return {**made, **changes}


def test_parts_of_several_calls_add_up(tmp_path: Path) -> None:
    out = tmp_path / "there" / "pair.json"
    for part, value in (("host", 1.0), ("peer", 2.0), ("host", 3.0)):
        pair.write(pair.merged(evidence(part, value), part, out), out)
    found = json.loads(out.read_text())
    assert [(row["row"], row["value"]) for row in found["raw"]["rows"]] == [
        ("of peer", 2.0), ("of host", 3.0),
    ]  # fmt: skip
    assert found["derived"] == {"of peer": 2.0, "of host": 3.0}
    # What was measured of other code is no part of it.
    pair.write(pair.merged(evidence("herd", 4.0, commit="2"), "herd", out), out)
    assert [row["row"] for row in json.loads(out.read_text())["raw"]["rows"]] == ["of herd"]


def test_access_that_is_open_already_is_no_error() -> None:
    class CUDARuntimeError(RuntimeError):
        def __init__(self, status: int) -> None:
            super().__init__(str(status))
            self.status = status

    def runtime(status: int) -> Any:
        def enable(_to: int) -> None:
            if status:
                raise CUDARuntimeError(status)

        return SimpleNamespace(deviceEnablePeerAccess=enable, CUDARuntimeError=CUDARuntimeError)

    for status in (0, 704):
        pair._open_access(runtime(status), 0)
    with pytest.raises(CUDARuntimeError, match="217"):
        pair._open_access(runtime(217), 0)


def test_an_answer_that_does_not_come_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pair, "_ANSWER", 0.0)
    here, there = Pipe()
    with here, there, pytest.raises(RuntimeError, match="no answer"):
        pair._answer(here)


def test_both_begin_at_one_moment() -> None:
    with processes(None) as conns:
        before = time.monotonic()
        assert pair._together(conns, "copy") == pytest.approx(TAKES["copy"])
        assert time.monotonic() >= before
