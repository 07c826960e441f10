"""What several modules of unit tests need."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import one_thread
import pytest
from cpu_gpu import Gpu, instead_of_cupy
from daemon_process import environment
from early import Early
from hypothesis import HealthCheck, settings
from nvrtc import Kernels

# A deadline of an example bets on the machine's speed; where CI is set, Hypothesis has none either.
settings.register_profile(
    "patient", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("patient")
KERNELS = pytest.StashKey[Early[Kernels]]()


def pytest_configure(config: pytest.Config) -> None:
    def make() -> Kernels:
        return Kernels(environment())

    def wants(item: pytest.Item) -> bool:
        return "all_kernels" in getattr(item, "fixturenames", ())

    early = config.stash[KERNELS] = Early(make, 900, wants)
    config.pluginmanager.register(early)


@pytest.fixture(scope="session")
def all_kernels(pytestconfig: pytest.Config) -> Kernels:
    """The GPU kernels on their way through NVIDIA's compiler."""
    return pytestconfig.stash[KERNELS].get()


@pytest.fixture(scope="session")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The GPU kernels' code, compiled for the CPU."""
    return one_thread.build(tmp_path_factory.mktemp("kernels"))


@pytest.fixture
def gpu(kernels: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    """A GPU that is the CPU, in CuPy's place; all that was allocated on it is freed."""
    found = Gpu(kernels)
    with instead_of_cupy(found, monkeypatch):
        yield found
    assert not found.held
