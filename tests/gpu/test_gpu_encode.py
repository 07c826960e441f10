"""Recipes made on a GPU are those of the CPU's encoder, byte for byte."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from codec_cases import Family, Geometry, recovered
from gpu_families import ELEMENTS, Placed, families, nearly, same
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kmesh.codec import Encoder, Op
from kmesh.codec.gpu import GpuBytes, GpuEncoder, GpuSegment
from kmesh.errors import RecipeError
from kmesh.kernels.device import Device

pytestmark = pytest.mark.gpu

FEW = settings(
    max_examples=40, deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip


@pytest.fixture
def gpu(cupy: Any) -> Iterator[Device]:
    made = Device(0)
    yield made
    made.close()


@FEW
@given(family=families(), off=st.sampled_from([0, 4]))
def test_any_member_gives_the_same_recipe(
    gpu: Device, stream: int, family: Family, off: int
) -> None:
    same(gpu, family, stream=stream, off=off)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", ELEMENTS)
@pytest.mark.parametrize("pairs", [64, 40, 31])
def test_keys_are_turned_as_the_cpu_turns_them(
    gpu: Device, stream: int, dtype: str, interleaved: bool, pairs: int
) -> None:
    """More items than blocks, and whole tiles."""
    geometry = Geometry(dtype=dtype, layers=6, heads=4, head_dim=128)
    rotary = geometry.rotary(interleaved=interleaved, pairs=pairs)
    family = recovered(
        geometry, pairs, segments=[700, 400], own=[20, 7, 9], anew=0.1, rotary=rotary
    )
    assert Op.REF_ROT in same(gpu, family, stream=stream).recipe.ops["kind"]


@pytest.mark.parametrize("dtype", ELEMENTS)
@pytest.mark.parametrize("share", [0.1, 1.0])
def test_small_differences_are_packed_as_the_cpu_packs_them(
    gpu: Device, stream: int, dtype: str, share: float
) -> None:
    family = recovered(Geometry(dtype=dtype, heads=4, head_dim=128), 2, segments=[600], own=[9, 3])
    found = same(gpu, nearly(family, share, 30, 4), stream=stream)
    assert Op.XOR in found.recipe.ops["kind"]


def test_recipes_in_host_memory(gpu: Device, stream: int, cupy: Any) -> None:
    family = recovered(Geometry(heads=4, head_dim=128), 2, segments=[600], own=[90, 3])
    expected = Encoder(family.base, family.rotary).encode(
        family.member, family.state, family.provenance
    )
    room = cupy.cuda.alloc_pinned_memory(len(expected.data))
    found = same(gpu, family, stream=stream, place=lambda _size: room.ptr)
    assert found.address == room.ptr
    assert bytes(np.frombuffer(room, np.uint8, len(expected.data))) == expected.data


def test_a_payload_that_changes_meanwhile_is_an_error(gpu: Device, stream: int) -> None:
    family = recovered(Geometry(heads=4, head_dim=128), 2, segments=[600])
    placed, launch = Placed(gpu, family), gpu.launch
    bit = np.ones(1, dtype=np.uint8)

    def change(program: str, name: str, *more: Any, **rest: Any) -> None:
        if name.startswith("kmesh_encode_verify"):
            gpu.runtime.memcpyAsync(placed.payload.address, bit.ctypes.data, 1, 1, stream)
        launch(program, name, *more, **rest)

    bit[0] ^= family.state.view(np.uint8).reshape(-1)[0]
    gpu.launch = change  # type: ignore[method-assign]
    with pytest.raises(RecipeError, match="changed"):
        GpuEncoder(placed.base, family.rotary, device=gpu).encode(
            family.member, placed.payload, family.provenance, stream
        )
    placed.free()


def test_a_segment_that_is_read_has_its_digest_and_root(gpu: Device) -> None:
    family = recovered(Geometry(head_dim=128), 2, segments=[600])
    placed = Placed(gpu, family)
    (kept,), (there,) = family.base, placed.base
    found = GpuSegment.read(kept.description, GpuBytes(there.address, kept.rows.nbytes), gpu)
    assert (found.digest, found.root) == (kept.digest, kept.root)
    placed.free()


def test_members_one_behind_the_other_use_the_same_memory(gpu: Device, stream: int) -> None:
    for seed, tokens in enumerate([500, 20, 900, 3]):
        family = recovered(Geometry(head_dim=64), seed, segments=[tokens], anew=0.2)
        same(gpu, family, stream=stream)
        same(gpu, dataclasses.replace(family, provenance=family.provenance[:1]), stream=stream)
