"""A GPU without CuPy: kernels that are compiled by NVRTC are started through the driver."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest
from codec_cases import Family, Geometry, recovered
from fake_cuda import FakeDriver, Gpu
from gpu_families import families, nearly, same
from hypothesis import HealthCheck, given, settings

from kmesh.codec import Op
from kmesh.cuda import nvrtc
from kmesh.cuda.device import Device
from kmesh.cuda.driver import Attribute
from kmesh.errors import CudaError, UnsupportedError
from kmesh.kernels.bare import BareDevice


@pytest.fixture(scope="module")
def bare(kernels: ctypes.CDLL) -> Iterator[BareDevice]:
    fake = FakeDriver(kernels=lambda: kernels)
    with Device(fake, "0") as device:
        made = BareDevice(device)
        yield made
        assert fake.ledger()["modules"] == 1
        made.close()
    assert not any(fake.ledger().values())
    fake.end()


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(family=families())
def test_any_member_gives_the_same_recipe(bare: BareDevice, family: Family) -> None:
    same(bare, family, stream=bare.stream)


def test_differences_are_read_back_too(bare: BareDevice) -> None:
    """Counts and the head travel apart from the kernels' own results."""
    family = nearly(recovered(Geometry(head_dim=20), 2, segments=[90, 30]), 0.5, 9, 4)
    assert Op.XOR in same(bare, family, stream=bare.stream).recipe.ops["kind"]


def test_kernels_with_parts_are_not_for_it(bare: BareDevice) -> None:
    with bare, bare.job(bare.stream) as slot:
        with pytest.raises(ValueError, match="takes parts"):
            bare.launch("encode", "kmesh_encode_clear", 1, 0, slot, (0, 1), bare.stream)
        with pytest.raises(CudaError, match="NOT_FOUND"):
            bare.launch("encode", "kmesh_encode_nothing", 1, 0, slot, None, bare.stream)
    bare.release(slot)


def test_a_compiler_is_not_newer_than_the_driver() -> None:
    with pytest.raises(UnsupportedError, match=r"^CUDA 11 is too old for the kernels$"):
        nvrtc.Compiler(11080)
    # A driver that is newer than every compiler takes what there is.
    nvrtc.Compiler(14000)


def test_what_does_not_compile_says_why() -> None:
    compiler = nvrtc.Compiler(13000)
    with pytest.raises(UnsupportedError, match=r'x\.cu does not compile: .*"nonsense"'):
        compiler.compile("nonsense f() {}", "x.cu", ["--gpu-architecture=sm_90"])
    made = compiler.compile(
        'extern "C" __global__ void f() {}', "x.cu", ["--gpu-architecture=sm_90"]
    )
    assert made[:4] == b"\x7fELF"


def test_a_gpu_that_the_compiler_does_not_know() -> None:
    fake = FakeDriver(Gpu(attributes={Attribute.COMPUTE_MAJOR: 1}))
    with Device(fake, "0") as device:
        made = BareDevice(device)
        with pytest.raises(UnsupportedError, match="does not compile"):
            made.prepare("encode")
        made.close()
    assert not any(fake.ledger().values())
