"""What several modules of the codec's tests need."""

from __future__ import annotations

import ctypes

import cpu_kernels
import pytest


@pytest.fixture(scope="session")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The kernels that encode, compiled for the CPU."""
    return cpu_kernels.build(tmp_path_factory.mktemp("kernels"))
