"""Spans that are kept as recipes, restored on a GPU by one launch, and what may fail of it."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from fake_gpu_streams import FakeGpu
from gpu_cases import Make, promised, prompt
from mini_engine import until
from sibling_cases import (
    SIBLINGS,
    TOKENS,
    WHOLE,
    bytes_of,
    cold,
    ends,
    key_of,
    place_of,
    ready,
    round_of_siblings,
    sealed,
    start,
    wrong,
)
from test_connector_halves import stored_by

from kmesh.errors import CudaError, UnsupportedError
from kmesh.kernels.cuda import Memory
from kmesh.testing import FakeDaemon
from kmesh_vllm.metadata import BASE_RECORD


def test_siblings_of_a_step_are_one_launch(engine: Make, daemon: FakeDaemon) -> None:
    round_of_siblings(daemon, engine("a"))
    gpu = FakeGpu()
    other = engine("b", gpu=gpu)
    ready(other, daemon)
    names = {str(seed): prompt(TOKENS, seed) for seed in SIBLINGS}
    places = start(other, names)
    # Three bases, though each of three requests has a lease of its own on them.
    assert gpu.launches == [("round", Memory.HOST, 3, 3)]
    assert ends(other, names) == set()
    for name in names:
        assert wrong(other, int(name), places[name]) == set()
    counted = other.workers[0].counts.take()
    assert counted["restored_bytes_recipes"] == counted["restored_bytes"] > 0
    assert counted["restored_bytes_kernel"] == counted["restored_bytes"]
    assert "recipes_decoded" not in counted
    until(lambda: daemon.leases == 0)


@pytest.mark.parametrize(("stored", "read"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_of_other_shards(engine: Make, daemon: FakeDaemon, stored: int, read: int) -> None:
    round_of_siblings(daemon, engine("a", tp=stored), (5,))
    other = engine("b", tp=read, gpu=[FakeGpu() for _ in range(read)])
    assert promised(other, "r", prompt(TOKENS, 5)) == 192
    blocks = [11, 3, 8, 2, 9, 4]
    assert not other.load("r", blocks, 192).bad_blocks
    assert wrong(other, 5, blocks) == set()
    for worker in other.workers:
        assert "recipes_decoded" not in worker.counts.take()


def test_dense_spans_and_recipes_of_a_step_are_one_launch(engine: Make, daemon: FakeDaemon) -> None:
    """Prompts that are recipes, that are dense, and that have a dense tail."""
    one = engine("a")
    round_of_siblings(daemon, one, (5,))
    stored_by(one, daemon, prompt(100, seed=4), seed=9)
    gpu = FakeGpu()
    other = engine("b", block=16, gpu=gpu)
    ready(other, daemon)
    wanted = {
        "base": (prompt(TOKENS), 192, 7),
        "mirror": (prompt(TOKENS, 5), 192, 5),
        "dense": (prompt(100, 4), 96, 9),
    }
    places, at = {}, 1
    for name, (tokens, found, _) in wanted.items():
        assert promised(other, name, tokens) == found
        places[name] = list(range(at, at + found // 16))
        at += found // 16
        other.scheduler.allocated(name, places[name], found)
    other.run(other.scheduler.plan([], []))
    assert gpu.launches == [("round", Memory.HOST, 3, 3)]
    assert ends(other, wanted) == set()
    assert wrong(other, 5, places.pop("mirror")) == set()
    for name, blocks in places.items():
        _, found, seed = wanted[name]
        assert other.wrong(seed, blocks, 0, found) == []
    counted = other.workers[0].counts.take()
    rows = {name: found for name, (_, found, _) in wanted.items()}
    assert counted["restored_bytes"] * rows["mirror"] == counted["restored_bytes_recipes"] * sum(
        rows.values()
    )
    # A step without recipes goes as before.
    assert promised(other, "again", prompt(100, 4)) == 96
    assert not other.load("again", [40, 41, 42, 43, 44, 45], 96).bad_blocks
    assert gpu.launches[1:] == [("restore", Memory.HOST, 1, 1)]


def test_a_bad_base_fails_those_blocks_of_each_sibling(engine: Make, daemon: FakeDaemon) -> None:
    one = engine("a")
    round_of_siblings(daemon, one)
    daemon.corrupt(key_of(0, 1), one.identity.sharding.shards[0])
    other = engine("b", gpu=FakeGpu())
    ready(other, daemon)
    names = {str(seed): prompt(TOKENS, seed) for seed in SIBLINGS}
    places = start(other, names)
    bad = ends(other, names)
    assert bad == {block for place in places.values() for block in place[2:4]}
    for name in names:
        assert wrong(other, int(name), places[name]) == set(range(64, 128))
        assert other.scheduler.finished(name) == {"kmesh": {"restored_tokens": 64}}
    assert other.workers[0].counts.take()["load_failed_corrupt"] == 3
    until(lambda: daemon.leases == 0)


@pytest.mark.parametrize("at", [0, 8, 30, 100, 200, 260, 300, 340, 500, -1, -5000])
def test_a_byte_of_a_recipe_is_changed(engine: Make, daemon: FakeDaemon, at: int) -> None:
    """In its head, in each of its tables, in its literals: exactly its blocks are named."""
    round_of_siblings(daemon, engine("a"))
    bytes_of(daemon, place_of(daemon, 6, 1))[at] ^= 1
    other = engine("b", gpu=FakeGpu())
    ready(other, daemon)
    names = {str(seed): prompt(TOKENS, seed) for seed in SIBLINGS}
    places = start(other, names)
    assert ends(other, names) == set(places["6"][2:4])
    for name in names:
        bad = set(range(64, 128)) if name == "6" else set()
        assert wrong(other, int(name), places[name]) == bad
    assert other.workers[0].counts.take()["load_failed_corrupt"] == 1
    until(lambda: daemon.leases == 0)


@pytest.mark.parametrize(
    "what", ["sibling", "length", "root", "dense length", "generation", "base"]
)
def test_what_the_lease_does_not_name_is_not_used(
    engine: Make, daemon: FakeDaemon, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    """All sums are right, but it is another span's recipe, or its base is not that of the lease."""
    one = engine("a")
    round_of_siblings(daemon, one)
    span = daemon._model.spans[key_of(6, 1), WHOLE.code()]
    place = place_of(daemon, 6, 1)
    if what == "sibling":
        found = place_of(daemon, 5, 1)
        bytes_of(daemon, place)[:] = bytes(bytes_of(daemon, found))
        sealed(daemon, place)
    elif what == "length":
        place.length -= 16
        sealed(daemon, place)
    elif what == "root":
        span.root ^= 1
    elif what == "dense length":
        span.length -= 4
    elif what == "generation":
        place.bases = [replace(base, generation=base.generation + 1) for base in place.bases]
    else:
        place.bases = [daemon._model.spans[key_of(0, 2), WHOLE.code()]]
    gpu = FakeGpu()
    other = engine("b", gpu=gpu)
    ready(other, daemon)
    places = start(other, {"6": prompt(TOKENS, 6)})
    assert ends(other, {"6"}) == set(places["6"][2:4])
    assert wrong(other, 6, places["6"]) == set(range(64, 128))
    assert [launch[0] for launch in gpu.launches] == ["round"]
    assert other.workers[0].counts.take()["load_failed_corrupt"] == 1


@pytest.mark.parametrize("field", ["offset", "length", "slab", "tokens"])
def test_a_base_that_no_slab_can_have_fails_the_load(
    engine: Make, daemon: FakeDaemon, field: str
) -> None:
    round_of_siblings(daemon, engine("a"), (5,))
    gpu = FakeGpu()
    other = engine("b", gpu=gpu)
    ready(other, daemon)
    assert promised(other, "r", prompt(TOKENS, 5)) == 192
    other.scheduler.allocated("r", [1, 2, 3, 4, 5, 6], 192)
    step = other.scheduler.plan([], [])
    bases = np.frombuffer(bytearray(step.loads[0].bases), BASE_RECORD)
    bases[field][1] = {"offset": 1 << 40, "length": 1 << 40, "slab": 9, "tokens": 65}[field]
    step.loads[0] = replace(step.loads[0], bases=bases.tobytes())
    other.run(step)
    assert other.settle("r").bad_blocks == {1, 2, 3, 4, 5, 6}
    assert gpu.launches == []
    assert other.workers[0].counts.take()["load_failed_error"] == 1


def test_a_round_that_is_refused_while_the_engine_ends(engine: Make, daemon: FakeDaemon) -> None:
    """Nobody is left who would decode it."""
    round_of_siblings(daemon, engine("a"))
    gpu = FakeGpu()

    def refuse(name: str) -> None:
        if name == "plan_round":
            raise UnsupportedError("keys that are turned in different ways")

    gpu.refuse = refuse
    other = engine("b", gpu=gpu)
    ready(other, daemon)
    gpu.held = True
    start(other, {"5": prompt(TOKENS, 5)})
    gpu.held = False
    gpu.run()
    loader = other.workers[0]._loader
    assert loader is not None
    loader.close()
    assert other.workers[0].counts.take()["load_failed_lost"] == 1
    assert gpu.launches == []


def test_rounds_are_prepared_off_the_engines_thread_and_without_memory_go_on(
    engine: Make, daemon: FakeDaemon, caplog: pytest.LogCaptureFixture
) -> None:
    round_of_siblings(daemon, engine("a"))
    gpu, threads, made = FakeGpu(), [], []

    def refuse(name: str) -> None:
        if name == "round_restorer":
            made.append(name)
        if name == "prepare_rounds":
            threads.append(threading.current_thread().name)
            raise MemoryError("out of memory")

    gpu.refuse = refuse
    other = engine("b", gpu=gpu)
    ready(other, daemon)
    assert threads == ["kmesh-kernels"]
    # What was prepared is what restores.
    assert made == ["round_restorer"]
    assert "the first restore will have to allocate: out of memory" in caplog.text
    places = start(other, {"5": prompt(TOKENS, 5)})
    assert ends(other, {"5"}) == set()
    assert wrong(other, 5, places["5"]) == set()
    assert gpu.launches == [("round", Memory.HOST, 3, 1)]


@pytest.mark.parametrize("decoded", [False, True])
def test_what_a_round_reads_is_leased_and_mapped_until_it_ends(
    engine: Make, daemon: FakeDaemon, decoded: bool
) -> None:
    """Its requests are aborted, and its session ends, while the GPU reads."""
    one = engine("a")
    round_of_siblings(daemon, one)
    if decoded:
        cold(daemon, one, 6, 1)
    gpu = FakeGpu()
    other = engine("b", gpu=gpu)
    ready(other, daemon)
    gpu.held = True
    names = {str(seed): prompt(TOKENS, seed) for seed in SIBLINGS}
    places = start(other, names)
    # In one launch or two, as the thread that decodes is fast or slow.
    until(lambda: other.workers[0].finished() or sum(one[3] for one in gpu.launches) == 3)
    leased = daemon._model.spans[key_of(0, 1), WHOLE.code()]
    for name in names:
        other.scheduler.finished(name)
    assert daemon.leases == 3
    session = other.workers_client.session
    assert session is not None
    session.close()
    other.workers_client.session = None
    mover: Any = other.workers[0]._mover
    mover.warm(None)
    until(lambda: mover._memory._known is None)
    assert len(gpu.driver._registered) == 1 + decoded, "memory went while it was read"
    assert other.workers[0].finished() == set()
    assert daemon.leases == 3
    assert not leased.dropped
    gpu.run()
    gpu.held = False
    assert ends(other, names) == set()
    for name in names:
        assert wrong(other, int(name), places[name]) == set()
    until(lambda: daemon.leases == 0)
    until(lambda: len(gpu.driver._registered) == 0)


def test_a_preempted_request_is_restored_again(engine: Make, daemon: FakeDaemon) -> None:
    round_of_siblings(daemon, engine("a"))
    gpu = FakeGpu()
    other = engine("b", gpu=gpu)
    ready(other, daemon)
    places = start(other, {"5": prompt(TOKENS, 5)})
    assert ends(other, {"5"}) == set()
    other.run(other.scheduler.plan([], [], ["5"]))
    other.compute(1, places["5"], 0, 192)
    assert other.match("5", 0, TOKENS) == 192
    assert not other.load("5", [30, 31, 32, 33, 34, 35], 192).bad_blocks
    assert wrong(other, 5, [30, 31, 32, 33, 34, 35]) == set()
    assert gpu.launches == [("round", Memory.HOST, 3, 1)] * 2


@pytest.mark.parametrize("call", ["record", "follow", "round", "wait"])
def test_a_gpu_that_fails_a_round(engine: Make, daemon: FakeDaemon, call: str) -> None:
    round_of_siblings(daemon, engine("a"))
    gpu = FakeGpu()
    other = engine("b", gpu=gpu)
    ready(other, daemon)

    def refuse(name: str) -> None:
        if name == call:
            raise CudaError(name, 999, "CUDA_ERROR_UNKNOWN")

    gpu.refuse = refuse
    names = {str(seed): prompt(TOKENS, seed) for seed in SIBLINGS}
    places = start(other, names)
    assert ends(other, names) == {block for place in places.values() for block in place}
    assert other.workers[0].counts.take()["load_failed_error"] == 3
    gpu.refuse = lambda name: None
    until(lambda: daemon.leases == 0)
