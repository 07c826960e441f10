"""LoRA: an adapter is its content, not its name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from daemon_process import Daemon
from driver import HERE, Engine, settled, tokens, transfer
from nursery import Nursery


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory, nursery: Nursery) -> list[Path]:
    """Two adapters, and a copy of the first."""
    base = tmp_path_factory.mktemp("adapters")
    names = ("1-first", "2-other", "1-again")
    nursery.run(HERE / "tiny_model.py", "adapters", base, *names)
    return [base / name for name in names]


@pytest.fixture(scope="module")
def engine(start: Callable[..., Engine], shared_spand: Daemon) -> Engine:
    return start(
        transfer=transfer(shared_spand.socket_dir),
        enable_lora=True,
        max_loras=2,
        max_lora_rank=8,
        max_cpu_loras=4,
    ).up()


def test_adapters_of_one_name_do_not_mix(
    engine: Engine, shared_spand: Daemon, adapters: list[Path]
) -> None:
    prompt = tokens(300, seed=501)
    one, other, copy = (str(path) for path in adapters)
    before = shared_spand.status().spans
    base = engine.one(prompt)
    wanted = {path: engine.one(prompt, adapter=path) for path in (one, other)}
    settled(shared_spand, before + 3 * 5)
    assert len({tuple(r.tokens) for r in (base, *wanted.values())}) == 3
    assert all(r.restored == 0 for r in (base, *wanted.values()))
    engine.call("reset")
    result = engine.one(prompt, adapter=one)
    assert result.restored == 288
    assert result.same(wanted[one])
    # Loaded under another id from another place, its content is the same.
    engine.call("reset")
    result = engine.one(prompt, adapter=copy)
    assert result.restored == 288
    assert result.same(wanted[one])
    engine.call("reset")
    result = engine.one(prompt)
    assert result.restored == 288
    assert result.same(base)
