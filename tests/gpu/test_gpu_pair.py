"""Two GPUs of one host, and a daemon that serves both, or the second one alone."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from daemon_process import Daemon, process_tree, wait_for

from kmesh import errors
from kmesh.cuda import driver as cuda
from kmesh.cuda import proof
from kmesh.cuda.device import Device, see_all
from kmesh.cuda.memory import DeviceMemory
from kmesh.cuda.slabs import DeviceSlabs
from kmesh.handles import HandleKind
from kmesh.session import Role, Session

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]

MIB = 1 << 20
Start = Callable[..., Daemon]
Record = Callable[[str, object], None]


@pytest.fixture(scope="module")
def cards() -> Iterator[tuple[Callable[[int], int], Callable[[int], set[int]]]]:
    """Bytes in use on a GPU, and the processes that have a context there."""
    pynvml = pytest.importorskip("pynvml")
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as wrong:
        pytest.skip(f"no NVIDIA GPU: {wrong}")
    if pynvml.nvmlDeviceGetCount() < 2:
        pynvml.nvmlShutdown()
        pytest.skip("there are no two GPUs")
    see_all()
    handles = [pynvml.nvmlDeviceGetHandleByIndex(number) for number in range(2)]
    # What the first context of a process leaves is not left by a test.
    for number in range(2):
        Device(cuda.load(), str(number)).close()

    def used(number: int) -> int:
        return int(pynvml.nvmlDeviceGetMemoryInfo(handles[number]).used)

    def users(number: int) -> set[int]:
        found = pynvml.nvmlDeviceGetComputeRunningProcesses(handles[number])
        return {one.pid for one in found}

    yield used, users
    pynvml.nvmlShutdown()


def test_the_second_gpu_alone(cards: Any, start: Start, record: Record) -> None:
    """The first one has no context of the daemon's and no byte less; the second is as before."""
    used, users = cards
    before = [used(0), used(1)]
    daemon = start(gpu="1")
    daemon.wait_populated()
    ours = {daemon.pid, *process_tree(daemon.pid)}
    assert not users(0) & ours
    # Workers are counted as the settings name their GPUs.
    assert users(1) & ours <= {daemon.child("gpu0")}
    assert used(0) == before[0]
    assert used(1) - before[1] >= 256 * MIB
    daemon.stop()
    wait_for(lambda: [used(0), used(1)] == before, 30)
    record("vram", {"before": before, "after": [used(0), used(1)]})


def test_one_gpu_reads_the_slabs_of_the_other(cards: Any, start: Start, record: Record) -> None:
    used, _ = cards
    before = used(0)
    daemon = start(gpu="0")
    daemon.wait_populated()
    pattern = os.urandom(MIB)
    with Device(cuda.load(), "0") as near:
        session = Session.connect(daemon.socket_dir, role=Role.TOOL)
        with session:
            handle = session.export_slab(1)
            try:
                with DeviceMemory.open(near, handle.fd, handle.size, writable=True) as mine:
                    mine.write(pattern, 5 * MIB)
            finally:
                os.close(handle.fd)
            with Device(cuda.load(), "1") as far, DeviceSlabs(session, far) as slabs:
                record("peers", far.peers())
                if near.uuid not in far.peers():
                    with pytest.raises(errors.UnsupportedError, match="can't read here"):
                        slabs.slab(1)
                else:
                    slab = slabs.slab(1)
                    assert slab.kind == HandleKind.CUDA_VMM_FD
                    assert proof.fetch(far, slab.address + 5 * MIB, MIB) == pattern
        del session.index
    daemon.stop()
    wait_for(lambda: used(0) == before, 30)


def test_both_gpus_read_one_base_in_host_memory(cards: Any, start: Start) -> None:
    daemon = start(gpu="0,1")
    daemon.wait_populated()
    with Session.connect(daemon.socket_dir, role=Role.TOOL) as session:
        seen = []
        for name in ("0", "1"):
            with Device(cuda.load(), name) as device, DeviceSlabs(session, device) as slabs:
                seen.append(proof.fetch(device, slabs.slab(0).address, MIB))
        assert seen[0] == seen[1]
        devices = [slab.device for slab in daemon.status().slabs]
        with Device(cuda.load(), "0") as one, Device(cuda.load(), "1") as other:
            assert set(devices) == {"", one.uuid, other.uuid}
        del session.index
