"""Engines whose blocks are different share spans, in the order that docs/layout.md gives."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import pytest
from daemon_process import Daemon, wait_for
from driver import HERE, Engine, Result, settled, tokens, transfer
from nursery import Nursery

BLOCKS = (32, 64, 128)


def test_vllm_own_kernels_have_the_documented_order(nursery: Nursery) -> None:
    """What they write is read in that order, and what is written from it they attend to."""
    said = nursery.run(HERE / "attention_process.py")
    found = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    assert len(found) == 32
    assert len([one for one in found if "off" in one]) >= 30
    for one in found:
        assert one["gathered"], one
        assert one["scattered"], one
        assert one.get("off", 0.0) < 0.01 * one.get("size", 1.0), one


@pytest.fixture(scope="module")
def engines(
    start: Callable[..., Engine], control: Engine, shared_spand: Daemon
) -> Iterator[dict[int, Engine]]:
    """One for each size of blocks; they start side by side, and leave their staging to others."""
    arguments = {"transfer": transfer(shared_spand.socket_dir)}
    found = {block: start(block_size=block, **arguments) for block in BLOCKS}
    for engine in (control, *found.values()):
        engine.up()
    yield found
    for engine in found.values():
        engine.close()


@pytest.mark.parametrize("storing", BLOCKS)
def test_each_restores_what_any_other_has_stored(
    control: Engine, engines: dict[int, Engine], shared_spand: Daemon, storing: int
) -> None:
    prompt = tokens(1000, seed=800 + storing)
    wanted = control.one(prompt)
    before = shared_spand.status().spans
    assert engines[storing].one(prompt).same(wanted)
    settled(shared_spand, before + 16)
    for block, engine in engines.items():
        engine.call("reset")
        restored = engine.one(prompt)
        assert restored.restored == 992 // block * block
        assert restored.same(wanted)
        # Of its own cache, to which the restored blocks belong now: bit for bit.
        cached = engine.one(prompt)
        assert (cached.restored, cached.cached) == (0, restored.restored)
        assert (cached.tokens, cached.logprobs) == (restored.tokens, restored.logprobs)
    assert len({engine.call("namespace") for engine in engines.values()}) == 1


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_in_sixteen_bits_blocks_of_another_size_hold_the_same(
    start: Callable[..., Engine], shared_spand: Daemon, dtype: str
) -> None:
    """The storing engine's own cache is the peer, as in test_vllm_dtypes.py."""
    arguments = {"transfer": transfer(shared_spand.socket_dir), "dtype": dtype}
    small, large = (start(block_size=block, **arguments) for block in (32, 64))
    try:
        prompt = tokens(520, seed=72)
        before = shared_spand.status().spans
        small.one(prompt)
        settled(shared_spand, before + 8)
        cached = small.one(prompt)
        assert (cached.restored, cached.cached) == (0, 512)

        def asked() -> Result | None:
            # One that is up may not be connected yet, and computes then.
            large.call("reset")
            result = large.one(prompt)
            return result if result.restored else None

        restored = wait_for(asked, 60)
        assert (restored.restored, restored.cached) == (512, 512)
        assert restored.tokens == cached.tokens
        # The same state and the same kernel, in blocks of another size.
        assert all(
            abs(a - b) < 1e-2 for a, b in zip(restored.logprobs, cached.logprobs, strict=True)
        )
    finally:
        small.close()
        large.close()
