"""Beside another connector under ``MultiConnector``: the first with a hit loads, both store."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from daemon_process import Daemon
from driver import Engine, settled, tokens, transfer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("example")


@pytest.fixture(scope="module")
def engine(
    start: Callable[..., Engine], shared_spand: Daemon, folder: Path, control: Engine
) -> Engine:
    """vLLM's example connector, which loads and stores files, comes first."""
    example = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(folder)},
    }
    children = [example, transfer(shared_spand.socket_dir)]
    engine = start(
        transfer={
            "kv_connector": "MultiConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"connectors": children},
        }
    )
    control.up()
    return engine.up()


def test_the_other_connector_loads_and_then_we_do(
    control: Engine, engine: Engine, shared_spand: Daemon, folder: Path
) -> None:
    prompt = tokens(300, seed=601)
    wanted = control.one(prompt)
    before = shared_spand.status().spans
    assert engine.one(prompt).same(wanted)
    settled(shared_spand, before + 5)
    # Both have it; the example connector is asked first and loads, so our lease goes back.
    engine.call("reset")
    result = engine.one(prompt)
    assert (result.cached, result.restored) == (288, 0)
    assert result.same(wanted)
    settled(shared_spand)
    # Now only we have it.
    for child in folder.iterdir():
        shutil.rmtree(child)
    engine.call("reset")
    result = engine.one(prompt)
    assert (result.cached, result.restored) == (288, 288)
    assert result.same(wanted)
    settled(shared_spand)


def test_what_the_other_connector_loaded_is_not_stored(
    control: Engine, engine: Engine, shared_spand: Daemon, folder: Path
) -> None:
    prompt = tokens(300, seed=602)
    engine.one(prompt, salt="ours is another namespace")
    engine.call("reset")
    settled(shared_spand)
    before = shared_spand.status().spans
    # The example connector knows no salt: it loads what ours has never seen.
    result = engine.one(prompt)
    assert (result.cached, result.restored) == (288, 0)
    assert result.same(control.one(prompt))
    settled(shared_spand)
    assert shared_spand.status().spans == before
