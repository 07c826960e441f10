"""Recipes that are decoded before a GPU restores them: when that is, and what may fail of it."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from fake_gpu_streams import FakeGpu
from gpu_cases import Make, promised, prompt, set_clock, warm
from mini_engine import WAIT, until
from sibling_cases import (
    SIBLINGS,
    TOKENS,
    bytes_of,
    cold,
    ends,
    place_of,
    ready,
    round_of_siblings,
    start,
    wrong,
)
from test_connector_halves import stored_by

from kmesh.errors import CudaError, UnsupportedError
from kmesh.kernels.cuda import Memory
from kmesh.testing import FakeDaemon
from kmesh_vllm import mirroring
from kmesh_vllm.decoding import decode_mirrors


def test_a_recipe_that_the_kernels_do_not_serve_is_decoded(
    engine: Make, daemon: FakeDaemon, caplog: pytest.LogCaptureFixture
) -> None:
    """It goes with the others, by the same launch; counted each time, and said once."""
    one = engine("a")
    round_of_siblings(daemon, one)
    cold(daemon, one, 6, 1)
    gpu = FakeGpu()
    other = engine("b", gpu=gpu)
    ready(other, daemon)
    for turn in range(2):
        places = start(other, {f"{turn}": prompt(TOKENS, 6)})
        assert ends(other, {f"{turn}"}) == set()
        assert wrong(other, 6, places[f"{turn}"]) == set()
    assert gpu.launches == [("round", Memory.HOST, 3, 1)] * 2
    counted = other.workers[0].counts.take()
    assert counted["recipes_decoded"] == 2
    assert counted["restored_bytes_recipes"] == counted["restored_bytes"]
    told = [r for r in caplog.records if "decoded on the host" in r.message]
    assert len(told) == 1
    assert "cold form" in told[0].message
    # What was registered for it is given back, by a thread.
    until(lambda: len(gpu.driver._registered) == 1)


def test_a_damaged_recipe_that_is_decoded(engine: Make, daemon: FakeDaemon) -> None:
    one = engine("a")
    round_of_siblings(daemon, one)
    cold(daemon, one, 6, 1)
    bytes_of(daemon, place_of(daemon, 6, 1))[-1] ^= 1
    other = engine("b", gpu=FakeGpu())
    ready(other, daemon)
    places = start(other, {"6": prompt(TOKENS, 6)})
    assert ends(other, {"6"}) == set(places["6"][2:4])
    assert wrong(other, 6, places["6"]) == set(range(64, 128))


@pytest.mark.parametrize("seen", ["round", "plan_round"])
def test_a_round_that_the_kernels_do_not_serve_is_decoded(
    engine: Make, daemon: FakeDaemon, caplog: pytest.LogCaptureFixture, seen: str
) -> None:
    """Whether that is seen at once or when copies are on their way. The dense ones of its step go
    then. What had been decoded before is decoded again, and what is wrong is told once."""
    one = engine("a")
    round_of_siblings(daemon, one)
    cold(daemon, one, 6, 1)
    bytes_of(daemon, place_of(daemon, 7, 2))[30] ^= 1
    stored_by(one, daemon, prompt(100, seed=4), seed=9)
    gpu = FakeGpu()

    def refuse(name: str) -> None:
        if name == seen:
            raise UnsupportedError("keys that are turned in different ways")

    gpu.refuse = refuse
    other = engine("b", gpu=gpu)
    ready(other, daemon)
    assert promised(other, "dense", prompt(100, 4)) == 96
    other.scheduler.allocated("dense", [40, 41, 42], 96)
    names = {str(seed): prompt(TOKENS, seed) for seed in SIBLINGS}
    places = start(other, names)
    assert gpu.launches == [("restore", Memory.HOST, 1, 1)] * (seen == "round")
    assert ends(other, [*names, "dense"]) == set(places["7"][4:6])
    for name in names:
        bad = set(range(128, 192)) if name == "7" else set()
        assert wrong(other, int(name), places[name]) == bad
    assert other.wrong(9, [40, 41, 42], 0, 96) == []
    assert {launch[0] for launch in gpu.launches} == {"restore"}
    counted = other.workers[0].counts.take()
    assert counted["recipes_decoded"] == 9
    assert counted["load_failed_corrupt"] == 1
    until(lambda: len(gpu.driver._registered) == 1)
    assert caplog.text.count("keys that are turned in different ways") == 1


def test_without_the_kernel_for_recipes_they_are_decoded(
    engine: Make, daemon: FakeDaemon, caplog: pytest.LogCaptureFixture
) -> None:
    round_of_siblings(daemon, engine("a"))
    gpu = FakeGpu()

    def refuse(name: str) -> None:
        if name == "prepare_rounds":
            raise UnsupportedError("no registers")

    gpu.refuse = refuse
    other = engine("b", gpu=gpu)
    warm(other, daemon)
    mover: Any = other.workers[0]._mover
    until(mover._rounds_compiled.is_set)
    places = start(other, {"5": prompt(TOKENS, 5)})
    assert ends(other, {"5"}) == set()
    assert wrong(other, 5, places["5"]) == set()
    assert gpu.launches == [("restore", Memory.HOST, 1, 1)]
    assert other.workers[0].counts.take()["recipes_decoded"] == 3
    assert "the kernel for recipes can't be compiled: no registers" in caplog.text


def test_recipes_wait_a_while_for_their_kernel_and_nobody_else_does(
    engine: Make, daemon: FakeDaemon
) -> None:
    one = engine("a")
    round_of_siblings(daemon, one, (5,))
    gpu, go = FakeGpu(), threading.Event()

    def slow(name: str) -> None:
        if name == "prepare_rounds":
            assert go.wait(2 * WAIT)

    gpu.refuse = slow
    other = engine("b", gpu=gpu)
    warm(other, daemon)
    places = start(other, {"5": prompt(TOKENS, 5)})
    assert promised(other, "base", prompt(TOKENS)) == 192
    assert not other.load("base", [40, 41, 42, 43, 44, 45], 192).bad_blocks
    assert gpu.launches == [("restore", Memory.HOST, 1, 1)]
    go.set()
    assert ends(other, {"5"}) == set()
    assert wrong(other, 5, places["5"]) == set()
    assert gpu.launches[1:] == [("round", Memory.HOST, 3, 1)]


def test_who_has_waited_for_a_thread_does_not_wait_for_the_kernel_as_well(
    engine: Make, daemon: FakeDaemon
) -> None:
    """All threads wait for it; of the load behind them half the time is over when they end."""
    round_of_siblings(daemon, engine("a"))
    gpu, compiled, half_time = FakeGpu(), threading.Event(), threading.Event()
    gpu.refuse = lambda name: (
        None if name != "prepare_rounds" or compiled.wait(2 * WAIT) else pytest.fail(name)
    )
    now = [0.0]
    other = engine("b", gpu=gpu)
    set_clock(other, lambda: now[0])
    warm(other, daemon)
    mover: Any = other.workers[0]._mover
    takes, waits = mover.takes_recipes, []

    def patient(timeout: float) -> bool:
        if timeout:
            waits.append(timeout)
            assert half_time.wait(WAIT)
        return bool(takes(0))

    mover.takes_recipes = patient
    names = {str(seed): prompt(TOKENS, seed) for seed in SIBLINGS}
    places = start(other, names)
    until(lambda: len(waits) == 2)
    now[0] = 31.0
    half_time.set()
    bad = ends(other, names)
    compiled.set()
    assert bad == set()
    assert waits == [30.0, 30.0]
    for name in names:
        assert wrong(other, int(name), places[name]) == set()
    assert other.workers[0].counts.take()["recipes_decoded"] == 9


def test_decoding_that_takes_too_long_is_dropped(
    engine: Make, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request goes on, its blocks are not touched, and memory comes back when it ends."""
    one = engine("a")
    round_of_siblings(daemon, one, (5,))
    cold(daemon, one, 5, 1)
    reached, go = threading.Event(), threading.Event()

    def slow(*given: Any) -> Any:
        reached.set()
        assert go.wait(2 * WAIT)
        return decode_mirrors(*given)

    monkeypatch.setattr(mirroring, "decode_mirrors", slow)
    gpu, now = FakeGpu(), [0.0]
    other = engine("b", gpu=gpu)
    set_clock(other, lambda: now[0])
    ready(other, daemon)
    places = start(other, {"5": prompt(TOKENS, 5)})
    assert reached.wait(WAIT)
    now[0] = 1e6
    assert ends(other, {"5"}) == set(places["5"])
    go.set()
    until(lambda: gpu.driver.calls.count("unregister") == 1)
    assert len(gpu.driver._registered) == 1
    assert gpu.launches == []
    assert other.workers[0].counts.take()["load_failed_late"] == 1


@pytest.mark.parametrize("reader", ["read_recipes", "decode_mirrors"])
def test_memory_stays_until_a_late_thread_has_read_it(
    engine: Make, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch, reader: str
) -> None:
    """The load has failed and the slab was given up, but the thread has its address."""
    one = engine("a")
    round_of_siblings(daemon, one, (5,))
    if reader == "decode_mirrors":
        cold(daemon, one, 5, 1)
    reached, go, read = threading.Event(), threading.Event(), getattr(mirroring, reader)

    def slow(*given: Any) -> Any:
        # The engine's thread looks whether it can do without another one, and must not wait.
        if threading.current_thread() is not threading.main_thread():
            reached.set()
            assert go.wait(2 * WAIT)
        return read(*given)

    monkeypatch.setattr(mirroring, reader, slow)
    gpu, now, compiled = FakeGpu(), [0.0], threading.Event()
    gpu.refuse = lambda name: (
        None if name != "prepare_rounds" or compiled.wait(2 * WAIT) else pytest.fail(name)
    )
    other = engine("b", gpu=gpu)
    set_clock(other, lambda: now[0])
    warm(other, daemon)
    places = start(other, {"5": prompt(TOKENS, 5)})
    compiled.set()
    assert reached.wait(WAIT)
    now[0] = 1e6
    assert ends(other, {"5"}) == set(places["5"])
    session, mover = other.workers_client.session, other.workers[0]._mover
    assert session is not None
    session._slabs.forget([0])
    mover._memory._thread.join(0.2)  # type: ignore[union-attr]
    kept = bool(gpu.driver._registered)
    go.set()
    assert kept, "memory went while it was read"
    until(lambda: not gpu.driver._registered)
    assert gpu.launches == []


def test_there_is_no_memory_for_what_was_decoded(engine: Make, daemon: FakeDaemon) -> None:
    one = engine("a")
    round_of_siblings(daemon, one, (5,))
    cold(daemon, one, 5, 1)
    gpu = FakeGpu()
    other = engine("b", gpu=gpu)
    ready(other, daemon)

    def refuse(name: str) -> None:
        if name == "register":
            raise CudaError("cuMemHostRegister", 2, "CUDA_ERROR_OUT_OF_MEMORY")

    gpu.driver.refuse = refuse
    places = start(other, {"5": prompt(TOKENS, 5)})
    assert ends(other, {"5"}) == set(places["5"])
    assert gpu.launches == []
    gpu.driver.refuse = None
