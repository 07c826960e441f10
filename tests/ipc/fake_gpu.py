"""A daemon on a machine with two GPUs that are not there: run instead of ``-m kmesh_spand``.

With ``REAL`` set it is the machine's own driver, which fails in the same ways.

A file named after a method of the driver, in the directory that the environment names, makes
that method fail; what is in it is the error's number and name. ``hang`` instead of a name makes
it wait, as long as the file is there, and say so with a file of the suffix ``.reached``. ``break``
lets a kernel of the machine's GPU write where nothing is, which takes the context. ``gpus``
says how many there are, ``with_dma_buf`` that they have DMA-BUFs, ``split`` that they are parts of
GPUs.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
import time
from pathlib import Path
from typing import Any, cast

from fake_cuda import MIB, UUIDS, FakeDriver, Gpu

from kmesh.cuda import driver
from kmesh.cuda.driver import Attribute
from kmesh.errors import CudaError, UnsupportedError
from kmesh.layout import Shard
from kmesh_spand import gpuworker
from kmesh_spand.__main__ import main

DIRECTORY = "KMESH_TEST_GPU"
REAL = "KMESH_TEST_GPU_REAL"
#: Path of the kernels that encode, compiled for the CPU: the fake GPU runs them.
KERNELS = "KMESH_TEST_GPU_KERNELS"
COMMAND = (sys.executable, __file__)
#: Of all spans that tests store on a GPU.
SHARD = Shard(0, 1, 0, 1)


def _refuse(name: str) -> None:
    file = Path(os.environ[DIRECTORY], name)
    while True:
        try:
            code, _, text = file.read_text().partition(" ")
        except FileNotFoundError:
            return
        if text == "break":
            _break_context()
            return
        if text != "hang":
            raise CudaError(name, int(code), text)
        file.with_suffix(".reached").touch()
        time.sleep(0.02)


def _break_context() -> None:
    import cupy

    kernel = cupy.RawKernel('extern "C" __global__ void wild(int* p) { *p = 1; }', "wild")
    try:
        kernel((1,), (1,), (cupy.uint64(1 << 60),))
        cupy.cuda.runtime.deviceSynchronize()
    except cupy.cuda.runtime.CUDARuntimeError:
        return
    raise AssertionError("the GPU wrote where nothing is")


class Failing:
    """The machine's driver, but for what is to fail."""

    def __init__(self) -> None:
        self._inner = _machines()

    def __getattr__(self, name: str) -> Any:
        _refuse(name)
        return getattr(self._inner, name)


def load() -> driver.Driver:
    """What the device worker gets instead of the machine's driver."""
    assert "CUDA_VISIBLE_DEVICES" not in os.environ
    assert os.environ["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    if os.environ.get(REAL) == "1":
        return cast(driver.Driver, Failing())
    file = Path(os.environ[DIRECTORY], "gpus")
    count = int(file.read_text()) if file.exists() else 2
    if not count:
        raise UnsupportedError("there is no CUDA driver: libcuda.so.1")
    able = {Attribute.DMA_BUF: int(Path(os.environ[DIRECTORY], "with_dma_buf").exists())}
    part = " MIG 1g.18gb" if Path(os.environ[DIRECTORY], "split").exists() else ""
    gpus = [
        Gpu(uuid, f"Fake GPU {n}{part}", 64 * MIB, able) for n, uuid in enumerate(UUIDS[:count])
    ]
    kernels = os.environ.get(KERNELS)
    run = functools.partial(ctypes.CDLL, kernels) if kernels else None
    return FakeDriver(*gpus, refuse=_refuse, kernels=run)


_machines = driver.load

if __name__ == "__main__":
    driver.load = load
    gpuworker.STATE_SECONDS = 0.1
    sys.exit(main())
