"""GPU memory outlives the daemon, too, as long as it is on the GPU that it was made on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import fake_gpu
import pytest
from daemon_process import Daemon
from fake_cuda import UUIDS
from gpus import Faults, client, vram
from managed import Managed

from kmesh.cuda.device import Device

Start = Callable[..., Daemon]

PAYLOADS = [bytes([number]) * 300_000 for number in range(1, 5)]
SLABS = [f"gpu-{number}-{UUIDS[0]}" for number in range(1, 5)]


@pytest.fixture
def manager(start_gpu: Start, socket_dir: Path) -> Iterator[Managed]:
    with Managed(start_gpu, socket_dir.parent / "notify") as made:
        yield made


def begin(manager: Managed, gpu: Device) -> Daemon:
    """A daemon with spans on the GPU, and one in host memory."""
    daemon = manager.daemon(command=fake_gpu.COMMAND)
    with client(daemon, gpu) as ours:
        assert ours.put([1, 2, 3, 4], PAYLOADS) == [0] * 4
        assert ours.put([9], [b"host"], device="") == [0]
    assert [name for name in manager.names if name.startswith("gpu")] == SLABS
    return daemon


def read(daemon: Daemon, gpu: Device) -> list[bytes | None]:
    with client(daemon, gpu) as ours:
        assert ours.read(9, device="") == b"host"
        return [ours.read(number) for number in range(1, 5)]


def test_gpu_memory_outlives_a_killed_daemon(manager: Managed, gpu_device: Device) -> None:
    first = begin(manager, gpu_device)
    before = set(vram(first.pid))
    first.kill()
    second = manager.daemon(command=fake_gpu.COMMAND)
    assert read(second, gpu_device) == PAYLOADS
    assert set(vram(second.pid)) == before
    assert second.status().counters["spans_recovered_dropped"] == 0
    with client(second, gpu_device) as ours:
        assert ours.put([5], [b"new"]) == [0]
        assert ours.read(5) == b"new"


@pytest.mark.parametrize("why", ["another GPU", "the driver refuses"])
def test_gpu_memory_that_does_not_fit_is_made_anew(
    manager: Managed, gpu_device: Device, gpu_faults: Faults, why: str
) -> None:
    begin(manager, gpu_device).stop()
    if why == "another GPU":
        # It is now the second one that has this number.
        manager.stored = [(name.replace(UUIDS[0], UUIDS[1]), fd) for name, fd in manager.stored]
        text = f"it is on another GPU than {UUIDS[0]}"
    else:
        gpu_faults.begin("import_fd")
        text = "CUDA_ERROR_UNKNOWN"
    second = manager.daemon(command=fake_gpu.COMMAND, errors=True)
    (line,) = [line for line in second.log().splitlines() if "is given up" in line]
    assert "GPU memory of the earlier daemon is given up: " in line
    assert text in line
    if why != "another GPU":
        gpu_faults.end("import_fd")
    assert read(second, gpu_device) == [None] * 4
    second.wait_status(lambda s: s.counters["spans_corrupt"] == 4)
    assert [name for name in manager.names if name.startswith("gpu")] == SLABS
    with client(second, gpu_device) as ours:
        assert ours.put([1, 2, 3, 4], PAYLOADS) == [0] * 4
    assert read(second, gpu_device) == PAYLOADS
    # Until the next restart, and after it.
    second.stop()
    assert read(manager.daemon(command=fake_gpu.COMMAND), gpu_device) == PAYLOADS


def test_gpu_memory_of_a_daemon_without_a_store_is_stored_by_the_next(
    manager: Managed, start_gpu: Start, gpu_device: Device
) -> None:
    first = start_gpu(command=fake_gpu.COMMAND)
    with client(first, gpu_device) as ours:
        assert ours.put([1, 2, 3, 4], PAYLOADS) == [0] * 4
        assert ours.put([9], [b"host"], device="") == [0]
    second = manager.daemon(command=(*fake_gpu.COMMAND, "--upgrade"))
    assert first.process.wait(60) == 0
    assert [name for name in manager.names if name.startswith("gpu")] == SLABS
    assert read(second, gpu_device) == PAYLOADS
    assert second.stop() == 0
    assert read(manager.daemon(command=fake_gpu.COMMAND), gpu_device) == PAYLOADS
