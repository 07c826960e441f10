"""Faults around GPU memory on a real GPU: broken contexts, clients that die anywhere, DMA-BUFs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from daemon_process import Daemon, environment, wait_for
from gpus import IMPORT_STEPS, Faults, client, importing, key, ledger

from kmesh import dmabuf
from kmesh.cuda.device import Device
from kmesh.handles import HandleKind
from kmesh.layout import whole_pages
from kmesh.session import Role, Session

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not os.path.exists("/dev/nvidiactl"), reason="no NVIDIA GPU"),
    pytest.mark.usefixtures("vram"),
]

Start = Callable[..., Daemon]
Record = Callable[[str, object], None]
MIB = 1 << 20
PAYLOADS = [os.urandom(size) for size in (100, 65536, 3 * MIB + 5)]


@pytest.mark.parametrize("fault", ["0 break", "719 CUDA_ERROR_LAUNCH_FAILED"])
def test_a_context_that_breaks_at_each_verification_is_no_bad_span(
    start: Start, faults: Faults, device: Device, record: Record, fault: str
) -> None:
    if fault == "0 break":
        pytest.importorskip("cupy")
    daemon = start(errors=True)
    with client(daemon, device) as ours:
        assert ours.put([1, 2, 3], PAYLOADS) == [0] * 3
    faults.begin("read", fault)
    os.kill(daemon.child("control"), 9)
    daemon.wait_ready(2)
    status = daemon.wait_status(lambda s: s.gpus[0].restarts >= 4, 60)
    assert status.counters["spans_corrupt"] == 0
    faults.end("read")
    daemon.wait_status(lambda s: s.counters["spans_verified"] == 3, 60)
    record("said", next(line for line in daemon.log().splitlines() if "CUDA_ERROR" in line))
    with client(daemon, device) as ours:
        for number, payload in enumerate(PAYLOADS, 1):
            assert ours.read(number) == payload
    assert daemon.status().counters["spans_corrupt"] == 0


def test_a_client_that_is_killed_at_any_step_of_its_import_leaves_nothing(
    start: Start, device: Device, nvml: Callable[[], int], record: Record, tmp_path: Path
) -> None:
    daemon = start()
    theirs = Faults(tmp_path / "theirs", real=True)
    with client(daemon, device) as ours:
        assert ours.put([1], PAYLOADS[:1]) == [0]
    # What the driver keeps of a process's first use of the GPU is not left by those that follow.
    with importing(daemon, theirs, device, key(1)) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"done\n"
    before, used = ledger(daemon.wait_status(lambda s: s.sessions == 1)), nvml()
    for step in IMPORT_STEPS:
        theirs.begin(step, "0 hang")
        with importing(daemon, theirs, device, key(1)) as process:
            wait_for(lambda step=step: theirs.reached(step), 60, step)
            process.kill()
        theirs.end(step)
        assert ledger(daemon.wait_status(lambda s: s.sessions == 1)) == before
        wait_for(lambda: nvml() == used, 30, step)
    record("steps", list(IMPORT_STEPS))


def test_a_command_gets_a_span_as_a_dma_buf(start: Start, device: Device, record: Record) -> None:
    daemon = start(dma_buf="spans")
    code = "from kmesh import dmabuf; seen = dmabuf.look(3); print(seen.exporter, seen.size)"
    with client(daemon, device) as ours:
        assert ours.put([1, 2, 3], PAYLOADS) == [0] * 3
        for number, payload in enumerate(PAYLOADS, 1):
            with ours.acquire(number) as lease:
                handle = ours.session.export_span(lease, 0)
            os.close(handle.fd)
            assert (handle.device, handle.length) == (device.uuid, len(payload))
    done = subprocess.run(
        [
            sys.executable, "-m", "kmesh.cli", "export", key(3).hex(), "--dma-buf",
            "--device", device.uuid, "--", sys.executable, "-c", code,
        ],
        env=environment(KMESH_SOCKET_DIR=str(daemon.socket_dir)),
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    record("exported", done.stdout)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"nv_dmabuf {whole_pages(len(PAYLOADS[2]))}\n"


def test_a_slab_as_a_dma_buf_outlives_the_daemon(
    start: Start, device: Device, nvml: Callable[[], int], record: Record
) -> None:
    before = nvml()
    daemon = start(errors=True, dma_buf="slabs")
    with Session.connect(daemon.socket_dir, role=Role.TOOL) as session:
        handle = session.export_slab(2, kind=HandleKind.DMA_BUF)
    del session.index
    try:
        daemon.kill()
        seen = dmabuf.look(handle.fd)
        assert (seen.exporter, seen.size) == (dmabuf.NVIDIA, 64 * MIB)
        wait_for(lambda: nvml() < before + 256 * MIB, 30)
        record("kept_by_the_dma_buf", nvml() - before)
        assert nvml() >= before + 64 * MIB
    finally:
        os.close(handle.fd)
