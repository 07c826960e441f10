"""Fixtures for daemons with GPU memory that is not there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fake_gpu
import pytest
from cpu_kernels import build
from daemon_process import Daemon
from fake_cuda import UUIDS, FakeDriver, Gpu
from gpus import Faults

from kmesh.cuda.device import Device

Start = Callable[..., Daemon]


@pytest.fixture
def gpu_faults(tmp_path: Path) -> Faults:
    return Faults(tmp_path / "faults")


@pytest.fixture
def start_gpu(start_spand: Start, gpu_faults: Faults) -> Start:
    """A daemon with 16 MiB in slabs of 4 MiB on the first GPU, after one slab of host memory."""

    def begin(**settings: Any) -> Daemon:
        usual = {"gpu": "0", "gpu_memory": "16MiB", "gpu_slab_size": "4MiB"}
        env = {**gpu_faults.settings["env"], **settings.pop("env", {})}
        return start_spand(**{**gpu_faults.settings, **usual, **settings, "env": env})

    return begin


@pytest.fixture(scope="session")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kernels that encode, compiled for the CPU."""
    folder = tmp_path_factory.mktemp("kernels")
    build(folder)
    (library,) = folder.iterdir()
    return library


@pytest.fixture
def start_encoding(start_gpu: Start, kernels: Path) -> Start:
    """As ``start_gpu``, with kernels that make recipes."""

    def begin(**settings: Any) -> Daemon:
        daemon = start_gpu(env={fake_gpu.KERNELS: str(kernels)}, **settings)
        daemon.wait_populated()
        return daemon

    return begin


@pytest.fixture
def gpu_device() -> Iterator[Device]:
    """The first GPU in this process."""
    fake = FakeDriver(Gpu(), Gpu(UUIDS[1]))
    with Device(fake, UUIDS[0]) as opened:
        yield opened
    assert not any(fake.ledger().values())
