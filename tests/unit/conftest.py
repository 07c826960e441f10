"""What several modules of unit tests need."""

from __future__ import annotations

import ctypes

import one_thread
import pytest


@pytest.fixture(scope="session")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The GPU kernels' code, compiled for the CPU."""
    return one_thread.build(tmp_path_factory.mktemp("kernels"))
