"""GPU memory on a real GPU: the daemon's slabs, kills at every step, and nothing left behind."""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from daemon_process import Daemon, environment, wait_for
from gpus import Faults, client, import_slab, ledger, refused
from leaks import process_tree
from probe import readiness, samples

from kmesh import errors
from kmesh.cli import gpu
from kmesh.cuda import proof
from kmesh.cuda.device import Device
from kmesh.cuda.memory import DeviceMemory, Registration
from kmesh.cuda.reading import read_span
from kmesh.cuda.slabs import DeviceSlabs
from kmesh.handles import HandleKind
from kmesh.mapping import Mapping
from kmesh.session import Role, Session
from kmesh_spand.memory import make_memfd, reopen_read_only

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not os.path.exists("/dev/nvidiactl"), reason="no NVIDIA GPU"),
    pytest.mark.usefixtures("vram"),
]

MIB, GIB = 1 << 20, 1 << 30
Start = Callable[..., Daemon]
Record = Callable[[str, object], None]


def test_doctor_proves_every_rung(start: Start, nvml: object, record: Record) -> None:
    daemon = start(errors=True)
    daemon.wait_populated()
    with Session.connect(daemon.socket_dir, role=Role.TOOL) as session:
        found = gpu.examine("0", session)
    record("doctor", [check.as_json() for check in found])
    assert {check.name: check.level for check in found} == {
        "gpu": "ok",
        **{f"gpu {rung}": "ok" for rung in gpu.RUNGS},
    }
    (said,) = [check.seen for check in found if check.name == "gpu dma-buf"]
    assert said.startswith("exporter nv_dmabuf, 2097152 bytes")


def test_slabs_are_listed_imported_and_registered(start: Start, device: Device) -> None:
    daemon = start()
    daemon.wait_populated()
    status = daemon.status()
    assert [slab.device for slab in status.slabs[1:]] == [device.uuid] * 4
    assert (status.gpus[0].name, status.gpus[0].slab_bytes) == (device.name, 256 * MIB)
    assert samples(daemon)[f'kmesh_gpu_ready{{device="{device.uuid}"}}'] == 1
    pattern = os.urandom(MIB)
    with import_slab(daemon, device, 2, writable=True) as mine:
        assert mine.read(0, mine.size) == bytes(64 * MIB)
        mine.write(pattern, 7 * MIB)
    session = Session.connect(daemon.socket_dir, role=Role.TOOL)
    with session, DeviceSlabs(session, device) as slabs:
        host, made = slabs.slab(0), slabs.slab(2)
        assert (host.kind, made.kind) == (HandleKind.MEMFD, HandleKind.CUDA_VMM_FD)
        assert proof.fetch(device, made.address + 7 * MIB, MIB) == pattern
        assert len(proof.fetch(device, host.address, MIB)) == MIB
    del session.index


def test_only_the_device_worker_has_a_context(start: Start, record: Record) -> None:
    pynvml = pytest.importorskip("pynvml")
    daemon = start()
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    users = {found.pid for found in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)}
    ours = {daemon.pid, *process_tree(daemon.pid)}
    record("processes_with_context", len(users & ours))
    assert users & ours <= {daemon.child("gpu0")}
    for name in ("control", "worker"):
        maps = Path(f"/proc/{daemon.child(name)}/maps").read_text()
        assert "libcuda" not in maps, name
    assert "libcuda" not in Path(f"/proc/{daemon.pid}/maps").read_text()
    assert "libcuda" in Path(f"/proc/{daemon.child('gpu0')}/maps").read_text()


@pytest.mark.parametrize("victims", [("gpu0",), ("control",), ("gpu0", "control", "worker")])
def test_slabs_survive_kills(start: Start, device: Device, victims: tuple[str, ...]) -> None:
    daemon = start(errors=True)
    daemon.wait_populated()
    before = ledger(daemon.status())
    pattern = os.urandom(MIB)
    with import_slab(daemon, device, 3, writable=True) as mine:
        mine.write(pattern, MIB)
    with import_slab(daemon, device, 3) as held:
        old = {name: daemon.child(name) for name in victims}
        for pid in old.values():
            os.kill(pid, signal.SIGKILL)
        assert held.read(MIB, MIB) == pattern
        if "control" in victims:
            daemon.wait_ready(2)
        daemon.wait_status(lambda s: s.gpus[0].ready and s.gpus[0].pid != old.get("gpu0"), 60)
        assert held.read(MIB, MIB) == pattern
    with import_slab(daemon, device, 3) as again:
        assert again.read(MIB, MIB) == pattern
    daemon.wait_populated()
    assert ledger(daemon.status()) == before
    assert readiness(daemon) == set()


@pytest.mark.parametrize("step", ["retain_context", "create", "map", "fill", "export_fd"])
def test_a_worker_that_is_killed_at_a_step_is_replaced(
    start: Start, faults: Faults, step: str
) -> None:
    faults.begin(step, "0 hang")
    daemon = start(errors=True, ready=False)
    wait_for(lambda: faults.reached(step), 60)
    os.kill(daemon.child("gpu0"), signal.SIGKILL)
    faults.end(step)
    daemon.wait_ready()
    status = daemon.wait_status(lambda s: s.gpus[0].ready, 60)
    assert (status.gpus[0].slabs, status.gpus[0].restarts) == (4, 1)


@pytest.mark.parametrize("step", ["retain_context", "create", "set_access", "fill", "export_fd"])
def test_a_call_that_fails_ends_the_daemon(start: Start, faults: Faults, step: str) -> None:
    faults.begin(step)
    status, words = refused(start(errors=True, ready=False))
    assert status == 1
    assert words.startswith(f"{step}: CUDA_ERROR_UNKNOWN (999)")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"gpu": "99"}, "gpu: there is no GPU 99 here, only 0 (GPU-"),
        ({"gpu": "GPU-00000000-0000-0000-0000-000000000000"}, "gpu: there is no GPU GPU-0000"),
        ({"gpu_memory": "1TiB", "gpu_slab_size": "1GiB"}, "gpu_memory: 1TiB are more than the "),
    ],
)
def test_what_cannot_be_had_is_said(start: Start, settings: dict[str, str], words: str) -> None:
    status, said = refused(start(errors=True, ready=False, **settings))
    assert status == 2
    assert said.startswith(words)


def test_memory_runs_out_without_a_trace(device: Device) -> None:
    free = device.memory_info()[0]
    with pytest.raises(errors.CudaError, match="cuMemCreate: CUDA_ERROR_OUT_OF_MEMORY"):
        DeviceMemory.create(device, 1 << 40)
    assert device.memory_info()[0] == free


_CLIENT = """
import sys
from kmesh.cuda import driver
from kmesh.cuda.device import Device
from kmesh.cuda.slabs import DeviceSlabs
from kmesh.session import Role, Session
session = Session.connect(sys.argv[1], role=Role.TOOL)
with Device(driver.load(), "0") as device, DeviceSlabs(session, device) as slabs:
    for number in range(5):
        slabs.slab(number)
    print("done", flush=True)
    sys.stdin.read()
"""


def test_a_client_that_is_killed_leaves_nothing(
    start: Start, nvml: Callable[[], int], record: Record
) -> None:
    """No more, that is, than one that ends in order: the driver keeps something of the first."""
    daemon = start()
    daemon.wait_populated()
    before, used = ledger(daemon.status()), [nvml()]
    for how in ("in order", "killed", "killed"):
        command = [sys.executable, "-c", _CLIENT, str(daemon.socket_dir)]
        pipe = subprocess.PIPE
        with subprocess.Popen(command, env=environment(), stdin=pipe, stdout=pipe) as process:
            assert process.stdout is not None
            assert process.stdin is not None
            assert process.stdout.readline() == b"done\n"
            # Its context takes memory; the slabs that it imported do not take it twice.
            assert nvml() - used[0] < 2 * GIB
            if how == "killed":
                process.kill()
                process.wait()
                wait_for(lambda: nvml() == used[1], 30)
            process.stdin.close()
            assert process.wait() == (-signal.SIGKILL if how == "killed" else 0)
        used.append(nvml())
    record("vram_with_daemon", used)
    assert ledger(daemon.wait_status(lambda s: s.sessions == 1)) == before


def test_a_daemon_that_is_killed_leaves_what_is_mapped(start: Start, device: Device) -> None:
    daemon = start(errors=True)
    with import_slab(daemon, device, 1, writable=True) as mine:
        mine.write(b"pattern")
        daemon.kill()
        assert mine.read(0, 7) == b"pattern"


def _milliseconds(times: int, what: Callable[[], None]) -> list[float]:
    found = []
    for _ in range(times):
        began = time.perf_counter()
        what()
        found.append(1000 * (time.perf_counter() - began))
    return found


def test_how_long_it_takes(start: Start, device: Device, record: Record) -> None:
    daemon = start(gpu_memory="64MiB")
    session = Session.connect(daemon.socket_dir, role=Role.TOOL)
    with session:
        handle = session.export_slab(1)
    del session.index
    imports = _milliseconds(20, lambda: DeviceMemory.open(device, handle.fd, handle.size).close())
    os.close(handle.fd)

    def make() -> None:
        with DeviceMemory.create(device, GIB) as memory:
            memory.fill(0)

    made = _milliseconds(3, make)
    fd = make_memfd("timed", GIB)
    os.posix_fallocate(fd, 0, GIB)
    seen = reopen_read_only(fd)
    os.close(fd)
    alone, first, again = [], [], []
    for ours in (False, True):
        # A mapping that nobody has touched yet, as an engine's is.
        with Mapping(seen, GIB) as mapping:

            def register(at: int = mapping.address, ours: bool = ours) -> None:
                if ours:
                    Registration(device, at, GIB).close()
                    return
                with device.current() as driver:
                    driver.register(at, GIB, read_only=True)
                    driver.unregister(at)

            took = _milliseconds(3, register)
            (first if ours else alone).append(took[0])
            again += took[1:]
    os.close(seen)
    record("import_64_mib_ms", imports)
    record("create_and_clear_1_gib_ms", made)
    record("register_1_gib_untouched_by_the_driver_alone_ms", alone)
    record("register_1_gib_untouched_ms", first)
    record("register_1_gib_again_ms", again)
    assert statistics.median(imports) > 0


@pytest.mark.parametrize("victims", [("gpu0",), ("gpu0", "control")])
def test_spans_survive_kills(start: Start, device: Device, victims: tuple[str, ...]) -> None:
    daemon = start(errors=True)
    daemon.wait_populated()
    payloads = [os.urandom(size) for size in (100, 65536, 6 * MIB + 5)]
    with client(daemon, device) as ours:
        assert ours.put([1, 2, 3], payloads) == [0] * 3
        assert ours.put([1], [b"in host memory"], device="") == [0]
    before = ledger(daemon.wait_status(lambda s: s.sessions == 1 and not s.staging_bytes))
    for name in victims:
        os.kill(daemon.child(name), signal.SIGKILL)
    if "control" in victims:
        daemon.wait_ready(2)
        daemon.wait_status(lambda s: s.counters["spans_verified"] == 4, 60)
    daemon.wait_status(lambda s: s.gpus[0].ready and s.gpus[0].restarts, 60)
    with client(daemon, device) as ours:
        for number, payload in enumerate(payloads, 1):
            assert ours.read(number) == payload
        assert ours.read(1, device="") == b"in host memory"
        assert ours.put([5], payloads[:1]) == [0]
    daemon.wait_populated()
    after = ledger(daemon.wait_status(lambda s: s.sessions == 1 and not s.staging_bytes))
    assert after[:3] == before[:3]


def test_a_flipped_bit_is_found_and_not_served(start: Start, device: Device) -> None:
    daemon = start(errors=True)
    with client(daemon, device) as ours:
        assert ours.put([1, 2], [b"a" * 70_000, b"b" * 70_000]) == [0, 0]
        with ours.acquire(1) as lease:
            span = lease.entry(0)
            with import_slab(daemon, device, span.slab, writable=True) as slab:
                slab.write(b"c", span.offset + 69_999)
            with pytest.raises(errors.CorruptionError):
                read_span(ours.slabs, device, lease, 0)
            assert ours.session.report_corrupt(lease, [0]) == 1
        wait_for(lambda: daemon.status().counters["spans_corrupt"] == 1, 30)
        assert ours.read(1) is None
        assert ours.read(2) == b"b" * 70_000


def test_a_copy_that_fails_leaves_nothing(start: Start, faults: Faults, device: Device) -> None:
    daemon = start(errors=True, bugs=True)
    daemon.wait_populated()
    with client(daemon, device) as ours:
        before = ledger(daemon.status())
        faults.begin("write", "999 a bug that a test put here")
        assert ours.put([1], [b"x" * 1000]) == [9]
        faults.end("write")
        assert ledger(daemon.status()) == before
        assert ours.put([1], [b"x" * 1000]) == [0]
        assert ours.read(1) == b"x" * 1000


def test_a_worker_that_dies_in_a_copy_leaves_nothing(
    start: Start, faults: Faults, device: Device
) -> None:
    daemon = start(errors=True)
    daemon.wait_populated()
    with client(daemon, device) as ours:
        before = ledger(daemon.status())
        faults.begin("write", "0 hang")
        victim = threading.Thread(target=_kill_at_write, args=(daemon, faults))
        victim.start()
        assert ours.put([1], [b"x" * 1000]) == [9]
        victim.join()
        status = daemon.wait_status(lambda s: s.gpus[0].ready and s.gpus[0].restarts, 60)
        assert ledger(status) == before
        assert ours.put([1], [b"x" * 1000]) == [0]
        assert ours.read(1) == b"x" * 1000


def _kill_at_write(daemon: Daemon, faults: Faults) -> None:
    wait_for(lambda: faults.reached("write"), 60)
    os.kill(daemon.child("gpu0"), signal.SIGKILL)
    faults.end("write")


def test_how_long_a_store_takes(start: Start, device: Device, record: Record) -> None:
    """128 MiB from staging into host memory and into the GPU's, in spans of 4 MiB."""
    daemon = start(host_memory="256MiB", staging_memory="256MiB")
    daemon.wait_populated()
    payloads = [os.urandom(4 * MIB) for _ in range(32)]
    with client(daemon, device, staging=128 * MIB) as ours:
        for name, where in (("host", ""), ("gpu", device.uuid)):
            taken = _milliseconds(
                1,
                lambda: ours.put(list(range(32)), payloads, device=where),  # noqa: B023
            )
            record(f"store_128_mib_{name}_ms", taken)
            assert ours.read(31, device=where) == payloads[31]
