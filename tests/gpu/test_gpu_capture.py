"""What our threads ask of CUDA while another thread captures a graph, as an engine's start does."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from gpu_engine import GpuEngine
from paged_reference import Engine

from kmesh.cuda import proof
from kmesh.cuda.device import Device
from kmesh.cuda.memory import DeviceMemory
from kmesh.kernels.cuda import Restorer, Storer
from kmesh.kernels.cuda_rounds import RoundRestorer
from kmesh.kernels.host import PagedLayout

pytestmark = pytest.mark.gpu

PATTERN = os.urandom(1 << 16)
SIZES = {"order": "NHD", "layers": 1, "heads": 1, "slots": 16, "row": 64, "gap": 0}


def proves(device: Device, _layout: PagedLayout) -> None:
    """As the first attach of a slab of each kind does."""
    assert proof.through_export(device, PATTERN) == PATTERN
    assert proof.through_registration(device, PATTERN) == PATTERN


def moves(device: Device, _layout: PagedLayout) -> None:
    with DeviceMemory.create(device, device.granularity) as memory:
        memory.fill(3)
        memory.write(PATTERN, 100)
        assert memory.read(99, len(PATTERN) + 2) == b"\3" + PATTERN + b"\3"
        assert proof.fetch(device, memory.address + 100, len(PATTERN)) == PATTERN


def prepares(_device: Device, layout: PagedLayout) -> None:
    """As what restores need is got ready beside an engine's start."""
    # Compiled anew, whatever is kept.
    dense = Restorer(layout, options=(f"-DKM_TEST={os.getpid()}",))
    for made in (dense, RoundRestorer(layout)):
        made.prepare(copies=True)
        made.close()
    Storer(layout)


@pytest.mark.parametrize("ours", [proves, moves, prepares])
def test_a_capture_goes_on_beside_it(
    cupy: Any, device: Device, ours: Callable[[Device, PagedLayout], None]
) -> None:
    pages = GpuEngine(cupy, Engine.make(**SIZES, blocks=4))
    numbers = cupy.zeros(1000, dtype=np.int32)
    one_more = cupy.ElementwiseKernel("int32 x", "int32 y", "y = x + 1")
    one_more(numbers, numbers)
    cupy.cuda.runtime.deviceSynchronize()
    wrong: list[BaseException] = []

    def beside() -> None:
        try:
            device.enter()
            cupy.cuda.runtime.setDevice(0)
            ours(device, pages.layout)
        except BaseException as failed:
            wrong.append(failed)

    with cupy.cuda.Stream(non_blocking=True) as stream:
        stream.begin_capture(cupy.cuda.runtime.streamCaptureModeGlobal)
        try:
            one_more(numbers, numbers)
            thread = threading.Thread(target=beside, daemon=True)
            thread.start()
            thread.join(60)
            late = thread.is_alive()
            one_more(numbers, numbers)
        finally:
            graph = stream.end_capture()
        assert not wrong
        assert not late
        graph.launch(stream)
        stream.synchronize()
    assert (numbers.get() == 3).all()
