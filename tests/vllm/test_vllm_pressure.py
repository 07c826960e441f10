"""An engine with little memory, small chunks and no async scheduling: preemption and aborts."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from daemon_process import Daemon
from driver import Engine, settled, tokens, transfer


@pytest.fixture(scope="module")
def small(start: Callable[..., Engine], shared_spand: Daemon, control: Engine) -> Engine:
    """80 blocks of 32 tokens, 512 tokens a step."""
    engine = start(
        transfer=transfer(shared_spand.socket_dir, load_timeout_ms=5000),
        num_gpu_blocks_override=80,
        max_num_batched_tokens=512,
        max_num_seqs=8,
        async_scheduling=False,
    )
    control.up()
    return engine.up()


def held(engine: Engine, daemon: Daemon) -> None:
    """Nothing is held by requests that are gone, in the engine or in the daemon."""
    state = engine.call("settle")
    assert state["requests"] == state["known"] == 0
    assert state["free"] == state["blocks"] - 1
    settled(daemon)


def test_chunked_prefill_is_stored_and_restored(
    control: Engine, small: Engine, shared_spand: Daemon
) -> None:
    prompt = tokens(1500, seed=201)
    before = shared_spand.status().spans
    wanted = control.one(prompt)
    assert small.one(prompt).same(wanted)
    settled(shared_spand, before + 23)
    small.call("reset")
    result = small.one(prompt)
    assert result.restored == 1472
    assert result.same(wanted)
    held(small, shared_spand)


def test_preempted_requests_give_the_same_answers(
    control: Engine, small: Engine, shared_spand: Daemon
) -> None:
    prompts = [tokens(600, seed=210 + i) for i in range(6)]
    wanted = control.generate(*prompts, max_tokens=80)
    for restored in (False, True):
        preempted = small.call("metrics")["vllm:num_preemptions"]
        results = small.generate(*prompts, max_tokens=80)
        assert small.call("metrics")["vllm:num_preemptions"] > preempted
        for result, want in zip(results, wanted, strict=True):
            assert result.tokens == want.tokens
        assert any(result.restored for result in results) or not restored
        held(small, shared_spand)
        small.call("reset")


def test_many_loads_under_pressure_make_progress(
    control: Engine, small: Engine, shared_spand: Daemon
) -> None:
    prompts = [tokens(500, seed=230 + i) for i in range(8)]
    for prompt in prompts:
        small.one(prompt)
    small.call("reset")
    results = small.generate(*prompts)
    assert all(result.restored == 480 for result in results)
    for result, prompt in zip(results, prompts, strict=True):
        assert result.same(control.one(prompt))
    held(small, shared_spand)


@pytest.mark.parametrize("state", ["new", "asked", "loading", "loaded", "running"])
def test_aborted_at_every_state(
    control: Engine, small: Engine, shared_spand: Daemon, state: str
) -> None:
    prompt = tokens(500, seed=260)
    before = shared_spand.status().spans
    wanted = control.one(prompt)
    small.one(prompt)
    if state == "new":
        settled(shared_spand, before + 8)
    small.call("reset")
    if state in ("loading", "loaded"):
        small.call("gate", closed=True)
    small.call("add", name="doomed", prompt=prompt, max_tokens=50)
    if state == "asked":
        small.call("step")
    if state in ("loading", "loaded"):
        until = time.monotonic() + 60
        while small.call("statuses") != ["WAITING_FOR_REMOTE_KVS"]:
            assert time.monotonic() < until
            small.call("step")
        for _ in range(3):
            small.call("step")
    if state == "loaded":
        small.call("gate", closed=False)
    if state == "running":
        until = time.monotonic() + 60
        while small.call("statuses") != ["RUNNING"]:
            assert time.monotonic() < until
            small.call("step")
    small.call("abort", name="doomed")
    if state == "loading":
        # Its blocks may still be written, so they are not free before the load has ended.
        assert small.call("state")["free"] < small.call("state")["blocks"] - 1
        assert shared_spand.status().leases == 1
        small.call("gate", closed=False)
    held(small, shared_spand)
    small.call("reset")
    result = small.one(prompt)
    assert result.restored == 480
    assert result.same(wanted)


def test_a_load_that_hangs_before_it_copies_ends_in_time(
    control: Engine, small: Engine, shared_spand: Daemon
) -> None:
    prompts = [tokens(500, seed=270 + i) for i in range(3)]
    for prompt in prompts:
        small.one(prompt)
    small.call("reset")
    # Both threads are held in their copies, so the third load never begins.
    small.call("gate", closed=True)
    for i, prompt in enumerate(prompts):
        small.call("add", name=str(i), prompt=prompt)
    until = time.monotonic() + 60
    ended: list[str] = []
    while not ended:
        assert time.monotonic() < until
        ended = small.call("step", times=20)
    small.call("gate", closed=False)
    results = small.call("run")
    assert sorted(r["params"]["kmesh"]["restored_tokens"] for r in results.values()) == [
        0,
        480,
        480,
    ]
    for i, prompt in enumerate(prompts):
        assert results[str(i)]["tokens"] == control.one(prompt).tokens
    assert small.call("metrics")["vllm:kmesh_load_failed_late"] == 1
    held(small, shared_spand)


# Last: what the engine stores afterwards, no other finds.
def test_reset_of_the_connector_forgets_what_was_stored(
    control: Engine, small: Engine, shared_spand: Daemon
) -> None:
    prompt = tokens(200, seed=61)
    before = shared_spand.status().spans
    small.one(prompt)
    settled(shared_spand, before + 3)
    assert small.call("reset", connector=True)
    result = small.one(prompt)
    assert result.restored == 0
    assert result.same(control.one(prompt))
    settled(shared_spand, before + 6)
    assert small.call("reset")
    assert small.one(prompt).restored == 192
