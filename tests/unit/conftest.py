"""What several modules of unit tests need."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import one_thread
import pytest
from cpu_gpu import Gpu, instead_of_cupy
from hypothesis import HealthCheck, settings

# A deadline of an example bets on the machine's speed; where CI is set, Hypothesis has none either.
settings.register_profile(
    "patient", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("patient")


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
