"""Families on a GPU: the device worker makes their recipes with the GPU's kernels."""

from __future__ import annotations

import dataclasses
import mmap
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from codec_cases import Geometry, recovered
from daemon_process import Daemon, wait_for
from gpu_families import ELEMENTS, families, nearly, same
from gpu_reader import reader
from household import LARGE, SMALL, Household
from hypothesis import HealthCheck, given, settings

from experiments.tokendance.workload import Shape
from kmesh import _host
from kmesh.codec import Encoder
from kmesh.cuda.device import Device
from kmesh.cuda.memory import Registration
from kmesh.kernels.bare import BareDevice

pytestmark = pytest.mark.gpu

Start = Callable[..., Daemon]
Record = Callable[[str, object], None]


@pytest.fixture
def bare(cupy: Any, device: Device) -> Iterator[BareDevice]:
    made = BareDevice(device)
    yield made
    made.close()


@settings(
    max_examples=25, deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip
@given(family=families())
def test_any_member_gives_the_same_recipe_without_cupy(bare: BareDevice, family: Any) -> None:
    same(bare, family, stream=bare.stream)


@pytest.mark.parametrize("dtype", ELEMENTS)
def test_larger_members_one_behind_the_other(bare: BareDevice, dtype: str) -> None:
    for seed, tokens in enumerate([500, 20, 900, 3]):
        geometry = Geometry(dtype=dtype, layers=4, heads=4, head_dim=128)
        family = recovered(geometry, seed, segments=[tokens], own=[20, 7], anew=0.2)
        same(bare, nearly(family, 0.1, 30, 4), stream=bare.stream)
        same(bare, dataclasses.replace(family, provenance=family.provenance[:1]),
             stream=bare.stream)  # fmt: skip


def test_recipes_in_registered_memory(bare: BareDevice, device: Device) -> None:
    family = recovered(Geometry(heads=4, head_dim=128), 2, segments=[600], own=[90, 3])
    expected = Encoder(family.base, family.rotary).encode(
        family.member, family.state, family.provenance
    )
    size = -(-len(expected.data) // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, size)
    seen = Registration(device, _host.address(memory), size, writable=True)
    found = same(bare, family, stream=bare.stream, place=lambda _size: seen.address)
    assert found.address == seen.address
    assert memory[: len(expected.data)] == expected.data
    seen.close()


@pytest.mark.usefixtures("vram")
@pytest.mark.parametrize(
    ("shape", "recipes"),
    [(SMALL, 3), (LARGE, 4)],
    ids=["small", "28 layers of 4 x 128"],
)
@pytest.mark.parametrize("place", ["gpu", "host"])
def test_members_are_recipes_on_the_gpu(
    start: Start, device: Device, record: Record, shape: Shape, recipes: int, place: str
) -> None:
    """Made by the GPU, read back bit for bit, made dense; also after the device worker was killed
    and control begins anew."""
    daemon = start(errors=True, gpu_place=place)
    daemon.wait_populated()
    household = Household(shape)
    with reader(daemon, device) as ours:
        household.settle(ours.session, device.uuid)
        ours.settled(2 * recipes)
        status = daemon.status()
        assert status.counters["fallback_encode"] == 0, "the processor has encoded"
        assert status.counters["spans_encode_failed"] == 0
        family = ours.session.families.describe("round", device=device.uuid).family
        record("dense_bytes", family.dense_bytes)
        record("stored_bytes", family.stored_bytes)
        for sibling in household.siblings:
            assert ours.read(household, sibling, recipes=True) == recipes
    for victim in ("gpu0", "control"):
        pid = daemon.child(victim)
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda pid=pid, victim=victim: daemon.child(victim) != pid, 60)
    daemon.wait_ready(2)
    daemon.wait_status(lambda s: s.counters.get("spans_verified", 0) >= 15)
    assert daemon.status().counters["spans_mirrors_dropped"] == 0
    with reader(daemon, device) as ours:
        for sibling in household.siblings:
            assert ours.read(household, sibling, recipes=True) == recipes
            assert ours.read(household, sibling, recipes=False) == 0
    assert daemon.stop() == 0
