"""Engines are dear: they are started once and shared, and most are forked off one that has vLLM.

A fixture that starts an engine returns before it is up, so that several start side by side.
"""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import leaks
import pytest
from daemon_process import Daemon
from driver import ENVIRONMENT, Engine, environment, transfer
from early import Early
from nursery import Nursery

HERE = Path(__file__).parent
NURSERY = pytest.StashKey[Early[Nursery]]()


def pytest_configure(config: pytest.Config) -> None:
    def make() -> Nursery:
        return Nursery(environment(**ENVIRONMENT, PYTHONHASHSEED="0"))

    def wants(item: pytest.Item) -> bool:
        return HERE in item.path.parents and item.get_closest_marker("skip") is None

    early = config.stash[NURSERY] = Early(make, 400, wants)
    config.pluginmanager.register(early)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every test here starts real engines; they need vLLM, and more time than others."""
    missing = importlib.util.find_spec("vllm") is None
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.vllm)
            item.add_marker(pytest.mark.slow)
            item.add_marker(pytest.mark.timeout(600))
            if missing:
                item.add_marker(pytest.mark.skip(reason="vLLM is not installed"))


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory, nursery: Nursery) -> Path:
    """A tiny model with real weights."""
    path = tmp_path_factory.mktemp("tiny-model")
    # Not in this process: its imports warn, and warnings are errors here.
    nursery.run(HERE / "tiny_model.py", "model", path)
    return path


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where digests of weights are kept during the tests."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def shared_spand() -> Iterator[Daemon]:
    """One daemon for all engines that do not need one of their own."""
    # A socket's path must be short.
    with tempfile.TemporaryDirectory(prefix="kmesh-") as base:
        daemon = Daemon(Path(base) / "s", host_memory="512MiB", staging_memory="512MiB")
        daemon.wait_populated()
        yield daemon
        try:
            daemon.stop()
        finally:
            daemon.kill()
        daemon.check_log()


@pytest.fixture(scope="session")
def nursery(pytestconfig: pytest.Config) -> Nursery:
    return pytestconfig.stash[NURSERY].get()


@pytest.fixture(scope="session")
def start(model: Path, cache: Path, nursery: Nursery) -> Iterator[Callable[..., Engine]]:
    """Starts engines that end with the tests, unless they are closed before."""
    engines: list[Engine] = []

    def start(**arguments: Any) -> Engine:
        path = arguments.pop("model", model)
        engine = Engine(path, cache=cache, env=ENVIRONMENT, nursery=nursery, **arguments)
        engines.append(engine)
        return engine

    yield start
    for engine in engines:
        engine.leave()
    for engine in engines:
        engine.close()


@pytest.fixture(scope="session")
def control(start: Callable[..., Engine]) -> Engine:
    """An engine without a connector and without a prefix cache of its own."""
    return start(
        enable_prefix_caching=False,
        max_model_len=6144,
        max_num_batched_tokens=6144,
        num_gpu_blocks_override=1200,
    )


@pytest.fixture(scope="session")
def storing(start: Callable[..., Engine], shared_spand: Daemon) -> Engine:
    """An engine with the connector; its scheduler and worker are in one process."""
    return start(
        transfer=transfer(shared_spand.socket_dir),
        async_scheduling=True,
        max_model_len=6144,
        max_num_batched_tokens=6144,
        num_gpu_blocks_override=1200,
    )


@pytest.fixture(scope="session")
def restoring(start: Callable[..., Engine], shared_spand: Daemon) -> Engine:
    """Another one, whose interpreter has another hash seed; its worker is a process of its own."""
    return start(
        transfer=transfer(shared_spand.socket_dir),
        hash_seed=2,
        separate=True,
        async_scheduling=True,
    )


@pytest.fixture(scope="session", autouse=True)
def begun(request: pytest.FixtureRequest) -> None:
    """What takes longest to start does so from the beginning, where it is used."""
    if any("restoring" in item.fixturenames for item in request.session.items):
        leaks.STARTING.add(request.getfixturevalue("restoring").pid)
