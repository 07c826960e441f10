"""Tensor parallel 2: its spans serve an engine with one rank, and the other way round."""

from __future__ import annotations

import os
import signal
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest
from daemon_process import Daemon, process_tree
from driver import Engine, EngineError, flip, settled, tokens, transfer

from kmesh.layout import Shard


@pytest.fixture(scope="module")
def two(start: Callable[..., Engine], shared_spand: Daemon, storing: Engine) -> Engine:
    """An engine of two ranks, each with one of the two KV heads."""
    engine = start(
        transfer=transfer(shared_spand.socket_dir, retry_after_ms=100),
        tensor_parallel_size=2,
        distributed_executor_backend="mp",
    )
    storing.up()
    return engine.up()


def computed(engine: Engine, prompt: list[int]) -> list[int]:
    """What the engine itself computes: under a salt that nobody has used."""
    result = engine.one(prompt, salt=uuid.uuid4().hex)
    assert result.restored == 0
    return result.tokens


def test_one_rank_stores_and_two_restore(
    two: Engine, storing: Engine, shared_spand: Daemon
) -> None:
    prompt = tokens(520, seed=401)
    before = shared_spand.status().spans
    storing.one(prompt)
    settled(shared_spand, before + 8)
    result = two.one(prompt)
    assert result.restored == 512
    assert result.tokens == computed(two, prompt)


def test_two_ranks_store_and_one_restores(
    two: Engine, storing: Engine, shared_spand: Daemon
) -> None:
    prompt = tokens(520, seed=402)
    before = shared_spand.status().spans
    two.one(prompt)
    settled(shared_spand, before + 16)
    result = storing.one(prompt)
    assert result.restored == 512
    assert result.tokens == computed(storing, prompt)
    # And an engine of two ranks restores what two ranks stored.
    two.call("reset")
    result = two.one(prompt)
    assert result.restored == 512
    assert result.tokens == computed(two, prompt)


def test_one_rank_that_fails_is_enough_to_recompute(
    two: Engine, storing: Engine, shared_spand: Daemon
) -> None:
    prompt = tokens(520, seed=403)
    before = shared_spand.status().spans
    two.one(prompt)
    settled(shared_spand, before + 16)
    two.call("reset")
    keys = [bytes.fromhex(key) for key in storing.call("keys", prompt=prompt)]
    flip(shared_spand, [keys[4]], Shard(0, 4, 1, 2))
    result = two.one(prompt)
    assert result.restored == 256
    assert result.tokens == computed(two, prompt)
    settled(shared_spand)


def test_a_rank_that_is_killed_ends_its_engine_and_nobody_waits(
    two: Engine, storing: Engine, shared_spand: Daemon
) -> None:
    """The last one here: vLLM does not go on without a worker. Others restore what it had."""
    prompt = tokens(520, seed=404)
    before = shared_spand.status().spans
    storing.one(prompt)
    settled(shared_spand, before + 8)
    (rank,) = (pid for pid in process_tree(two.pid) if b"Worker_TP1" in _command(pid))
    two.begin("generate", prompts=[prompt])
    os.kill(rank, signal.SIGKILL)
    with pytest.raises(EngineError) as ended:
        two.end()
    assert "no answer" not in str(ended.value)
    two.close()
    settled(shared_spand)
    storing.call("reset")
    assert storing.one(prompt).restored == 512


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
