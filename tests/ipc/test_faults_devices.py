"""Device workers that break, hang, start slowly or can't be reached: no span is lost by that."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from daemon_process import Daemon, wait_for
from fake_cuda import MIB, UUIDS
from gpus import Client, Faults, client, command, import_slab, ledger, vram
from held import held
from probe import without_files
from rawclient import RawClient, Refused

from kmesh.cuda.device import Device

Start = Callable[..., Daemon]
PATIENCE = 60.0
PAYLOADS = [bytes([number]) * 100_000 for number in range(1, 5)]


@contextmanager
def stored(daemon: Daemon, device: Device) -> Iterator[Client]:
    """A client that has stored ``PAYLOADS`` on the GPU as 1 to 4."""
    with client(daemon, device) as ours:
        assert ours.put([1, 2, 3, 4], PAYLOADS) == [0] * 4
        yield ours


def all_there(daemon: Daemon, device: Device) -> None:
    """The spans are served, and nothing was ever said against them."""
    daemon.wait_status(lambda s: s.gpus[0].ready, PATIENCE)
    with client(daemon, device) as ours:
        for number, payload in enumerate(PAYLOADS, 1):
            wait_for(lambda n=number: ours.read(n) is not None, PATIENCE)
            assert ours.read(number) == payload
    counters = daemon.status().counters
    assert (counters["spans_corrupt"], counters["spans_recovered_dropped"]) == (0, 0)


def lives(daemon: Daemon, restarts: int) -> None:
    """Waits until the device worker was started again that often."""
    daemon.wait_status(lambda s: s.gpus[0].restarts >= restarts, PATIENCE)


def test_a_context_that_breaks_at_each_verification_is_no_bad_span(
    start_gpu: Start, gpu_faults: Faults, gpu_device: Device
) -> None:
    daemon = start_gpu(errors=True)
    with stored(daemon, gpu_device) as ours:
        assert ours.put([9], [b"in host memory"], device="") == [0]
    gpu_faults.begin("read", "719 CUDA_ERROR_LAUNCH_FAILED")
    os.kill(daemon.child("control"), signal.SIGKILL)
    daemon.wait_ready(2)
    lives(daemon, 5)
    # Meanwhile host memory is served, and verified.
    with client(daemon, gpu_device) as ours:
        wait_for(lambda: ours.read(9, device="") == b"in host memory", PATIENCE)
    status = daemon.wait_status(lambda s: s.gpus[0].error or s.gpus[0].ready)
    assert status.counters["spans_corrupt"] == 0
    assert "read: CUDA_ERROR_LAUNCH_FAILED (719)" in daemon.log()
    gpu_faults.end("read")
    all_there(daemon, gpu_device)
    assert daemon.status().counters["spans_verified"] == 5


def test_a_worker_that_dies_at_its_start_is_no_bad_span(
    start_gpu: Start, gpu_faults: Faults, gpu_device: Device
) -> None:
    daemon = start_gpu(errors=True)
    with stored(daemon, gpu_device) as ours:
        gpu_faults.begin("read", "0 hang")
        with ours.acquire(1, 2, 3, 4) as lease:
            assert ours.session.report_corrupt(lease, [0, 1, 2, 3]) == 4
        wait_for(lambda: gpu_faults.reached("read"), PATIENCE)
        gpu_faults.begin("retain_context")
        os.kill(daemon.child("gpu0"), signal.SIGKILL)
        lives(daemon, 5)
        gpu_faults.end("read")
        gpu_faults.end("retain_context")
        daemon.wait_status(lambda s: s.counters["spans_corrupt_false"] == 4, PATIENCE)
    all_there(daemon, gpu_device)


def test_what_the_driver_calls_broken_memory_is_given_up(
    start_gpu: Start, gpu_faults: Faults, gpu_device: Device
) -> None:
    """After three workers have met it there; the others' spans stay."""
    daemon = start_gpu(errors=True)
    with stored(daemon, gpu_device) as ours:
        gpu_faults.begin("read", "214 CUDA_ERROR_ECC_UNCORRECTABLE")
        with ours.acquire(1) as lease:
            assert ours.session.report_corrupt(lease, [0]) == 1
        daemon.wait_status(lambda s: s.counters["spans_corrupt"] == 1, PATIENCE)
        gpu_faults.end("read")
        daemon.wait_status(lambda s: s.gpus[0].ready, PATIENCE)
    with client(daemon, gpu_device) as ours:
        assert ours.read(1) is None
        for number in (2, 3, 4):
            assert ours.read(number) == PAYLOADS[number - 1]


def test_a_worker_that_starts_slower_than_a_copy_is_left_alone(
    start_gpu: Start, gpu_faults: Faults, gpu_device: Device
) -> None:
    daemon = start_gpu(errors=True, copy_timeout_ms=300)
    with stored(daemon, gpu_device) as ours:
        gpu_faults.begin("read", "0 hang")
        with ours.acquire(1) as lease:
            assert ours.session.report_corrupt(lease, [0]) == 1
        wait_for(lambda: gpu_faults.reached("read"), PATIENCE)
        gpu_faults.begin("import_fd", "0 hang")
        os.kill(daemon.child("gpu0"), signal.SIGKILL)
        gpu_faults.end("read")
        wait_for(lambda: gpu_faults.reached("import_fd"), PATIENCE)
        slow = daemon.child("gpu0")
        daemon.wait_status(lambda s: s.gpus[0].pid == slow, PATIENCE)
        # Each of these has waited as long as a copy may take.
        for _ in range(3):
            assert ours.put([7], [b"x" * 1000]) == [9]
        assert daemon.child("gpu0") == slow
        gpu_faults.end("import_fd")
        daemon.wait_status(lambda s: s.counters["spans_corrupt_false"] == 1, PATIENCE)
        wait_for(lambda: ours.put([7], [b"x" * 1000]) in ([0], [4]), PATIENCE)
        assert daemon.child("gpu0") == slow
    all_there(daemon, gpu_device)


def test_a_copy_whose_error_took_the_context_ends_the_worker(
    start_gpu: Start, gpu_faults: Faults, gpu_device: Device
) -> None:
    """Every later one would fail in the same way; the heartbeat alone would tell too late."""
    daemon = start_gpu(errors=True)
    with stored(daemon, gpu_device) as ours:
        before = ledger(daemon.status())
        gpu_faults.begin("memory_info", "719 CUDA_ERROR_LAUNCH_FAILED")
        gpu_faults.begin("write", "719 CUDA_ERROR_LAUNCH_FAILED")
        assert ours.put([7], [b"x" * 1000]) == [9]
        gpu_faults.end("write")
        gpu_faults.end("memory_info")
        lives(daemon, 1)
        status = daemon.wait_status(lambda s: s.gpus[0].ready, PATIENCE)
        assert ledger(status) == before
        wait_for(lambda: ours.put([7], [b"x" * 1000]) in ([0], [4]), PATIENCE)
        assert ours.read(7) == b"x" * 1000
    all_there(daemon, gpu_device)


IMPATIENT = command(
    "import kmesh_spand.gpukeeper as keeper; keeper._END_SECONDS = keeper._CLOSE_SECONDS = 0.5"
)


def test_a_worker_that_does_not_go_holds_nobody_else_up(
    start_gpu: Start, gpu_device: Device
) -> None:
    daemon = start_gpu(errors=True, command=IMPATIENT)
    with stored(daemon, gpu_device) as ours:
        assert ours.put([9], [b"in host memory"], device="") == [0]
    stuck = daemon.child("gpu0")
    with held(stuck):
        os.kill(daemon.child("control"), signal.SIGKILL)
        daemon.wait_ready(2)
        with client(daemon, gpu_device) as ours:
            wait_for(lambda: ours.read(9, device="") == b"in host memory", PATIENCE)
            assert ours.put([10], [b"new"], device="") == [0]
        status = daemon.wait_status(lambda s: s.gpus[0].error, PATIENCE)
        assert not status.gpus[0].ready
        assert f"has not ended: the driver holds it (process {stuck})" in status.gpus[0].error
        assert Path(f"/proc/{stuck}/stat").read_text().split()[2] == "Z"
        # No other has begun: two would write the same memory.
        assert status.gpus[0].restarts == 0
    all_there(daemon, gpu_device)


def test_a_worker_that_does_not_go_does_not_keep_the_daemon(start_gpu: Start) -> None:
    daemon = start_gpu(errors=True, command=IMPATIENT)
    with held(daemon.child("gpu0")):
        assert daemon.stop() == 0


def test_slabs_that_control_had_no_descriptor_for_come_later(
    start_gpu: Start, gpu_faults: Faults, gpu_device: Device
) -> None:
    gpu_faults.begin("create", "0 hang")
    daemon = start_gpu(errors=True, ready=False)
    wait_for(lambda: gpu_faults.reached("create"), PATIENCE)
    control = daemon.child("control")
    wait_for(lambda: (daemon.socket_dir / "grpc.sock").exists(), PATIENCE)
    with RawClient(daemon.socket_dir) as asking:
        with without_files(control):
            gpu_faults.end("create")
            wait_for(lambda: "no file descriptor is left for a slab" in daemon.log(), PATIENCE)
            with pytest.raises(Refused, match="not made yet"):
                asking.call(attach_slab={"slab": 4, "kind": 2})
        daemon.wait_ready()
        wait_for(lambda: sum(vram(control).values()) == 4, PATIENCE)
    with import_slab(daemon, gpu_device, 4) as seen:
        assert seen.read(0, 7) == bytes(7)
    assert daemon.status().control_restarts == 0


def test_slabs_that_the_supervisor_had_no_descriptor_for_are_made_anew(
    start_gpu: Start, gpu_faults: Faults, gpu_device: Device
) -> None:
    """It is the supervisor that keeps them alive: what it did not get is gone with its maker."""
    gpu_faults.begin("create", "0 hang")
    daemon = start_gpu(errors=True, ready=False)
    wait_for(lambda: gpu_faults.reached("create"), PATIENCE)
    first = daemon.child("gpu0")
    with without_files(daemon.pid):
        gpu_faults.end("create")
        wait_for(lambda: "no file descriptor is left for a slab" in daemon.log(), PATIENCE)
        wait_for(lambda: "a device worker could not be started" in daemon.log(), PATIENCE)
    daemon.wait_ready()
    assert daemon.child("gpu0") != first
    status = daemon.wait_status(lambda s: s.gpus[0].slabs == 4, PATIENCE)
    assert status.gpus[0].slab_bytes == 16 * MIB
    assert sum(vram(daemon.pid).values()) == 4
    with import_slab(daemon, gpu_device, 1) as seen:
        assert seen.read(0, 7) == bytes(7)


def test_slabs_are_told_also_to_a_control_that_does_not_read(
    start_gpu: Start, gpu_faults: Faults, gpu_device: Device
) -> None:
    """The way to it holds a few messages here, as it does with many slabs elsewhere."""
    small = command(
        "import socket; import kmesh_spand.ipc as ipc; inner = ipc.pair\n"
        "def pair():\n"
        "    ends = inner()\n"
        "    for end in ends: end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)\n"
        "    return ends\n"
        "ipc.pair = pair"
    )
    gpu_faults.begin("create", "0 hang")
    daemon = start_gpu(
        errors=True, ready=False, gpu_memory="60MiB", gpu_slab_size="2MiB",
        command=small,
    )  # fmt: skip
    wait_for(lambda: gpu_faults.reached("create"), PATIENCE)
    control = daemon.child("control")
    wait_for(lambda: (daemon.socket_dir / "grpc.sock").exists(), PATIENCE)
    os.kill(control, signal.SIGSTOP)
    gpu_faults.end("create")
    # Beside its own it holds those that are on their way.
    wait_for(lambda: sum(vram(daemon.pid).values()) > 30, PATIENCE)
    os.kill(control, signal.SIGCONT)
    daemon.wait_ready()
    wait_for(lambda: sum(vram(daemon.pid).values()) == 30, PATIENCE)
    wait_for(lambda: sum(vram(control).values()) == 30, PATIENCE)
    with import_slab(daemon, gpu_device, 30) as seen:
        assert seen.size == 2 * MIB
    assert {slab.device for slab in daemon.status().slabs} == {"", UUIDS[0]}
