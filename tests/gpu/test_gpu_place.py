"""Memory of the host that CUDA made for a GPU, on a real GPU."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from daemon_process import Daemon
from gpu_engine import GpuEngine
from gpus import client
from paged_reference import Engine, Stored

from kmesh.cuda.device import Device
from kmesh.cuda.memory import DeviceMemory
from kmesh.kernels.chooser import Route
from kmesh.kernels.cuda import Load, Memory, Request, Restorer, Settings
from kmesh.layout import TILE_BYTES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not os.path.exists("/dev/nvidiactl"), reason="no NVIDIA GPU"),
]


@pytest.mark.parametrize("route", list(Route))
def test_restores_read_it_by_both_routes(
    cupy: Any, stream: int, device: Device, route: Route
) -> None:
    engine = Engine.make(order="NHD", layers=2, heads=2, slots=16, row=256, gap=0, blocks=8)
    stored = Stored.make(seed=3, layers=2, heads=2, tokens=64, row=256)
    gpu = GpuEngine(cupy, engine)
    sums_at = -(-stored.array.nbytes // TILE_BYTES) * TILE_BYTES
    node = device.host_node
    with DeviceMemory.create(device, device.granularity_on(node), node=node) as made:
        made.write(stored.array.tobytes())
        made.write(stored.sums.tobytes(), sums_at)
        fd = made.export()
        with DeviceMemory.open(device, fd, made.size) as opened:
            os.close(fd)
            part = stored.part(address=opened.address, sums_address=opened.address + sums_at)
            load = Load.of([part], [Request(np.array([5, 2, 7, 1], dtype=np.int64))])
            restorer = Restorer(gpu.layout, settings=Settings(chunk_bytes=1 << 20))
            try:
                pending = restorer.restore([load], stream, memory=Memory.HOST, route=route)
                assert pending.wait() == [[b"\0"]]
                assert pending.route is route
            finally:
                restorer.close()
    for layer in range(2):
        for plane in (0, 1):
            engine.views[layer][plane][[5, 2, 7, 1]] = (
                stored.array[layer, plane].reshape(2, 4, 16, 256).transpose(1, 0, 2, 3)
            )
    assert gpu.image() == engine.image()


@pytest.mark.usefixtures("vram")
def test_a_daemon_keeps_a_gpus_tier_there(
    start: Callable[..., Daemon], device: Device, nvml: Callable[[], int],
    record: Callable[[str, object], None],
) -> None:  # fmt: skip
    before = nvml()
    daemon = start(gpu_place="host", gpu_memory="2GiB", gpu_slab_size="512MiB")
    daemon.wait_populated()
    used = nvml() - before
    record("vram_of_a_daemon_with_2_gib_in_host_memory", used)
    assert used < 1 << 30
    payloads = [os.urandom(size) for size in (100, 3 * TILE_BYTES + 5, 9 << 20)]
    with client(daemon, device, staging=16 << 20) as ours:
        assert ours.put([1, 2, 3], payloads) == [0, 0, 0]
        assert [ours.read(n) for n in (1, 2, 3)] == payloads
        assert ours.slabs.slab(1).in_host
