"""One engine stores, another restores: the same answers as an engine that computes everything."""

from __future__ import annotations

import time

import pytest
from daemon_process import Daemon
from driver import Engine, EngineError, flip, settled, tokens

from kmesh.layout import Shard

BLOCK = 32


@pytest.fixture(scope="module", autouse=True)
def _up(control: Engine, storing: Engine, restoring: Engine) -> None:
    """All three start side by side."""
    for engine in (control, storing, restoring):
        engine.up()


@pytest.mark.parametrize("length", [127, 128, 129, 191, 192, 193, 1023, 1024, 1025, 1040])
def test_prompt_lengths_around_blocks_and_spans(
    control: Engine, storing: Engine, restoring: Engine, shared_spand: Daemon, length: int
) -> None:
    prompt = tokens(length, seed=length)
    before = shared_spand.status().spans
    stored = storing.one(prompt)
    settled(shared_spand, before + length // 64 + (length % 64 >= 16))
    restored = restoring.one(prompt)
    wanted = control.one(prompt)
    assert stored.same(wanted)
    assert stored.restored == 0
    assert restored.same(wanted)
    known = length // 16 * 16
    assert restored.restored == min(known, length - 1) // BLOCK * BLOCK
    settled(shared_spand)


def test_behind_a_local_hit(
    control: Engine, storing: Engine, restoring: Engine, shared_spand: Daemon
) -> None:
    prompt = tokens(1000, seed=21)
    before = shared_spand.status().spans
    # 224 tokens are in the restoring engine's own cache: not a whole number of spans.
    restoring.one(prompt[:225])
    storing.one(prompt)
    settled(shared_spand, before + 15)
    result = restoring.one(prompt)
    assert result.restored == 992 - 224
    assert result.cached == 992
    assert result.same(control.one(prompt))


def test_five_siblings_make_one_load_and_share_its_blocks(
    control: Engine, storing: Engine, shared_spand: Daemon
) -> None:
    ancestor = tokens(4096, seed=31)
    children = [ancestor + tokens(512, seed=100 + i) for i in range(5)]
    before = shared_spand.status().spans
    storing.one([*ancestor, 7])
    settled(shared_spand, before + 64)
    storing.call("reset")
    restores = storing.call("metrics").get("vllm:kmesh_restores", 0)
    storing.call("watch_peak")
    results = storing.generate(*children)
    assert storing.call("metrics")["vllm:kmesh_restores"] == restores + 1
    assert sorted(result.restored for result in results) == [0, 0, 0, 0, 4096]
    assert [result.cached for result in results] == [4096] * 5
    # 128 blocks of the ancestor once, 17 for each child's own tokens, and the null block.
    assert storing.call("state")["peak"] <= 128 + 5 * 17 + 1
    for result, child in zip(results, children, strict=True):
        assert result.same(control.one(child))


def test_salts_are_kept_apart(
    control: Engine, storing: Engine, restoring: Engine, shared_spand: Daemon
) -> None:
    prompt = tokens(200, seed=41)
    before = shared_spand.status().spans
    storing.one(prompt, salt="one")
    settled(shared_spand, before + 3)
    wanted = control.one(prompt)
    for salt, restored in ((None, 0), ("two", 0), ("one", 192)):
        result = restoring.one(prompt, salt=salt)
        assert result.restored == restored, salt
        assert result.same(wanted)


@pytest.mark.parametrize("bad", [[0], [3], [0, 1, 2, 3, 4, 5, 6, 7]])
def test_flipped_bits_are_never_served(
    control: Engine, storing: Engine, shared_spand: Daemon, bad: list[int]
) -> None:
    prompt = tokens(520, seed=50 + len(bad) + bad[0])
    before = shared_spand.status().spans
    storing.one(prompt)
    settled(shared_spand, before + 8)
    storing.call("reset")
    keys = [bytes.fromhex(key) for key in storing.call("keys", prompt=prompt)]
    flip(shared_spand, [keys[i] for i in bad], Shard(0, 4, 0, 2))
    result = storing.one(prompt)
    assert result.same(control.one(prompt))
    assert result.restored == bad[0] * 64
    counts = storing.call("metrics")
    assert counts["vllm:kmesh_load_failed_corrupt"] >= len(bad)
    # What is recomputed is stored again once the daemon has dropped the bad spans: by this request,
    # or, where that was too quick, by the next.
    until = time.monotonic() + 30
    while shared_spand.status().spans < before + 8:
        assert time.monotonic() < until
        storing.call("reset")
        storing.one(prompt)
    settled(shared_spand, before + 8)
    storing.call("reset")
    time.sleep(0.1)
    state = storing.call("state")
    assert state["requests"] == state["known"] == 0
    assert state["free"] == state["blocks"] - 1


def test_settings_are_read_before_the_model(storing: Engine) -> None:
    assert storing.call("piecewise", extra={"socket_dir": "/run/kmesh"}) is False
    with pytest.raises(EngineError, match="no_such_setting is none of"):
        storing.call("piecewise", extra={"socket_dir": "/run/kmesh", "no_such_setting": 1})
