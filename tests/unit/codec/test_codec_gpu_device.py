"""The encoder with the device that it has on a GPU, but CuPy's place is taken by the CPU."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import pytest
from codec_cases import Geometry, recovered
from cpu_gpu import Gpu, instead_of_cupy
from gpu_families import nearly, same

from kmesh.kernels import device as devices


class Encoding(Gpu):
    """For kernels of a job and results alone."""

    def __init__(self, kernels: ctypes.CDLL) -> None:
        super().__init__(kernels)
        runtime = self.cuda.runtime
        runtime.memcpy = lambda to, source, size, _: ctypes.memmove(to, source, size)
        runtime.memsetAsync = lambda to, value, size, _: ctypes.memset(to, value, size)

    def _launch(self, name: str, blocks: int, *rest: Any) -> None:
        pointers = (ctypes.c_void_p * 2).from_address(rest[7])
        job, told = (ctypes.c_uint64.from_address(one).value for one in pointers)
        self.launched.append((name, blocks, (0, 0)))
        self._kernels[name](
            ctypes.c_void_p(job), ctypes.c_void_p(told), ctypes.c_uint32(blocks), ctypes.c_uint32(1)
        )


@pytest.fixture
def gpu(kernels: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> Iterator[Encoding]:
    found = Encoding(kernels)
    with instead_of_cupy(found, monkeypatch):
        yield found


def test_members_one_behind_the_other_use_the_same_memory(gpu: Encoding) -> None:
    """Which grows: for some of them what is told, for some of them the job."""
    device = devices.Device(0)
    for seed, tokens in enumerate([50, 20, 3000, 3]):
        family = recovered(Geometry(head_dim=16), seed, segments=[tokens])
        same(device, family)
        assert gpu.held == 1
        same(device, nearly(family, 0.2, 2, seed))
        assert gpu.held == 1
    assert {name.removeprefix("kmesh_encode_") for name, _, _ in gpu.launched} == {
        *("pack", "gather_16", "verify_16", "unpack", "tell"),
    }
    device.close()
    assert not gpu.held
