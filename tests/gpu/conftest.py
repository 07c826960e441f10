"""A GPU for tests that need one; where there is none they are skipped."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from daemon_process import Daemon, wait_for
from gpus import Faults

from kmesh.cuda import driver as cuda
from kmesh.cuda.device import Device, see_all

_UNIT = Path(__file__).parents[1] / "unit"
sys.path[:0] = [str(_UNIT), str(_UNIT / "codec")]

Start = Callable[..., Daemon]
Record = Callable[[str, object], None]


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


@pytest.fixture
def record(record_property: Callable[[str, object], None]) -> Record:
    """Takes down what the evidence of a run is made of."""
    return lambda name, value: record_property(name, json.dumps(value))


@pytest.fixture(scope="module")
def nvml() -> Iterator[Callable[[], int]]:
    """Bytes of the GPU that are used, by whoever."""
    pynvml = pytest.importorskip("pynvml")
    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    see_all()
    # What the first context of a process leaves is not left by a test.
    Device(cuda.load(), "0").close()
    yield lambda: int(pynvml.nvmlDeviceGetMemoryInfo(handle).used)
    pynvml.nvmlShutdown()


@pytest.fixture
def vram(nvml: Callable[[], int], record: Record) -> Iterator[None]:
    """The GPU's memory is used as much after a test as before it."""
    before = nvml()
    yield
    try:
        wait_for(lambda: nvml() == before, 30)
    finally:
        record("vram_before", before)
        record("vram_after", nvml())


@pytest.fixture
def device() -> Iterator[Device]:
    with Device(cuda.load(), "0") as opened:
        yield opened


@pytest.fixture
def faults(tmp_path: Path) -> Faults:
    return Faults(tmp_path / "faults", real=True)


@pytest.fixture
def start(start_spand: Start, faults: Faults) -> Start:
    """A daemon with 256 MiB in four slabs on the GPU. No GPU is visible in its environment."""

    def begin(**settings: Any) -> Daemon:
        usual = {"gpu": "0", "gpu_memory": "256MiB", "gpu_slab_size": "64MiB"}
        return start_spand(**{**faults.settings, **usual, **settings})

    return begin
