"""A GPU for tests that need one; where there is none they are skipped."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))


@pytest.fixture(scope="session")
def cupy() -> Any:
    module = pytest.importorskip("cupy", reason="CuPy is not installed")
    try:
        count = module.cuda.runtime.getDeviceCount()
    except module.cuda.runtime.CUDARuntimeError as wrong:
        pytest.skip(f"no GPU: {wrong}")
    if not count:
        pytest.skip("no GPU")
    # The driver opens its files at a process's first use of the GPU, and keeps them.
    module.zeros(1, dtype=module.uint8).get()
    return module


@pytest.fixture
def stream(cupy: Any) -> Iterator[int]:
    made = cupy.cuda.Stream(non_blocking=True)
    yield made.ptr
    made.synchronize()
