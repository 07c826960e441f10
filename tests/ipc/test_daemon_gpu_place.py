"""GPU tiers whose memory CUDA made in the host's, on a driver that needs no GPU."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest
from daemon_process import Daemon
from fake_cuda import UUIDS
from gpus import Faults, client, import_slab, ledger, refused, vram
from leaks import open_fds

from kmesh import errors
from kmesh.cuda import proof
from kmesh.cuda.device import Device
from kmesh.handles import HandleKind, Tier
from kmesh.layout import TILE_BYTES
from kmesh.session import Role, Session
from kmesh_spand.memory import memory_limits

Start = Callable[..., Daemon]

#: More than a fake GPU of the daemon's has.
MORE = {"gpu_place": "host", "gpu_memory": "96MiB", "gpu_slab_size": "32MiB"}


@pytest.fixture(autouse=True)
def unproved() -> None:
    proof._proved.clear()


def in_host(pid: int) -> int:
    """Pieces of the host's memory that CUDA made, of which a process holds file descriptors."""
    return sum(n for name, n in open_fds(pid).items() if "fake-numa:1" in name)


def test_slabs_lie_in_the_hosts_memory_and_are_read_by_the_gpu(
    start_gpu: Start, gpu_device: Device
) -> None:
    daemon = start_gpu(**MORE, dma_buf="spans")
    daemon.wait_populated()
    assert (in_host(daemon.pid), sum(vram(daemon.pid).values())) == (3, 0)
    rows = [slab for slab in daemon.status().slabs if slab.device]
    assert [(row.kind, row.device, row.in_host, row.size >> 20) for row in rows] == [
        ("CUDA_VMM_FD", UUIDS[0], True, 32)
    ] * 3
    payloads = [os.urandom(size) for size in (100, 5 * TILE_BYTES + 5)]
    with client(daemon, gpu_device) as ours:
        assert ours.put([1, 2], payloads) == [0, 0]
        assert [ours.read(n) for n in (1, 2)] == payloads
        assert ours.slabs.slab(1).in_host
        assert ours.slabs.slab(0).in_host
        handle = ours.session.export_slab(1)
        os.close(handle.fd)
        assert (handle.kind, handle.device, handle.in_host) == (
            *(HandleKind.CUDA_VMM_FD, UUIDS[0]),
            True,
        )
        with ours.acquire(1) as lease, pytest.raises(errors.InvalidArgument, match="has no DMA-B"):
            ours.session.export_span(lease, 0)


def test_they_survive_the_device_worker(start_gpu: Start, gpu_device: Device) -> None:
    daemon = start_gpu(errors=True, **MORE)
    daemon.wait_populated()
    before = ledger(daemon.status())
    with import_slab(daemon, gpu_device, 2, writable=True) as mine:
        mine.write(b"pattern")
    old = daemon.child("gpu0")
    os.kill(old, signal.SIGKILL)
    status = daemon.wait_status(lambda s: s.gpus[0].ready and s.gpus[0].pid not in (0, old), 60)
    assert ledger(status) == before
    assert in_host(daemon.pid) == 3
    with import_slab(daemon, gpu_device, 2) as again:
        assert again.read(0, 7) == b"pattern"


def test_dma_bufs_are_refused_with_a_reason(start_gpu: Start, gpu_faults: Faults) -> None:
    gpu_faults.begin("with_dma_buf", "")
    daemon = start_gpu(**MORE, dma_buf="slabs")
    daemon.wait_populated()
    wish = {Tier.GPU: (HandleKind.DMA_BUF, HandleKind.CUDA_VMM_FD)}
    with Session.connect(daemon.socket_dir, role=Role.TOOL, handles=wish) as session:
        agreed = session.welcome.handles[Tier.GPU]
    assert agreed.chosen == HandleKind.CUDA_VMM_FD
    assert agreed.fallback is not None
    assert agreed.fallback.text == (
        'gpu_place = "host": memory of the host that CUDA made has no DMA-BUF'
    )


def test_more_than_the_host_has_is_refused(start_gpu: Start) -> None:
    (available,) = (limit.size for limit in memory_limits() if "meminfo" in limit.source)
    # One GPU's fits. No device worker begins with it, should it be asked to.
    each = f"{available * 6 // 10 >> 20}MiB"
    much = {**MORE, "gpu": "0,1", "gpu_memory": each, "gpu_slab_size": "1GiB"}
    daemon = start_gpu(errors=True, ready=False, memory_headroom="64TiB", **much)
    assert daemon.process.wait(60) == 2
    assert "gpu_memory: that of all GPUs in the host's memory, with all else, " in daemon.log()
    assert "Traceback" not in daemon.log()


def test_room_that_others_took_is_not_made_use_of(start_gpu: Start) -> None:
    status, words = refused(start_gpu(errors=True, ready=False, memory_headroom="64TiB", **MORE))
    assert (status, words.partition(": ")[2][:18]) == (2, "96MiB are too much")
