"""Slabs of GPU memory in a daemon, on a driver that needs no GPU."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable

import pytest
from daemon_process import Daemon, process_tree, wait_for
from fake_cuda import MIB, UUIDS
from gpus import Faults, command, import_slab, ledger, refused, vram
from probe import readiness, samples
from rawclient import RawClient, Refused

from kmesh.cuda.device import Device
from kmesh.errors import UnsupportedError
from kmesh.session import Role, Session

Start = Callable[..., Daemon]


def test_slabs_are_made_held_listed_and_imported(start_gpu: Start, gpu_device: Device) -> None:
    daemon = start_gpu()
    daemon.wait_populated()
    status = daemon.status()
    assert [slab.kind for slab in status.slabs] == ["MEMFD"] + ["CUDA_VMM_FD"] * 4
    assert [slab.slab for slab in status.slabs] == [0, 1, 2, 3, 4]
    assert {slab.device for slab in status.slabs} == {"", UUIDS[0]}
    (gpu,) = status.gpus
    assert (gpu.device, gpu.name, gpu.ready) == (UUIDS[0], "Fake GPU 0", True)
    assert (gpu.slabs, gpu.slab_bytes, gpu.error) == (4, 16 * MIB, "")
    assert gpu.free_bytes == gpu.total_bytes - 16 * MIB
    assert gpu.pid == daemon.child("gpu0")
    assert "48 MiB in 5 slabs" in daemon.log()
    with Session.connect(daemon.socket_dir, role=Role.TOOL) as session:
        assert session.welcome.slab_count == 5
        assert session.index.slab_count == 5
        with pytest.raises(UnsupportedError, match="slab 3 is CUDA_VMM_FD, not host memory"):
            session.slab(3)
    with import_slab(daemon, gpu_device, 4, writable=True) as other:
        # Nothing of whoever had it before.
        assert other.read(0, other.size) == bytes(4 * MIB)
        other.write(b"pattern", MIB)
        with import_slab(daemon, gpu_device, 4) as seen:
            assert seen.read(MIB, 7) == b"pattern"
    # The supervisor, the worker and control hold them, nobody else does.
    held = {"worker": 0, "control": 4, "gpu0": 4}
    for name, count in held.items():
        assert sum(vram(daemon.child(name)).values()) == count, name
    assert sum(vram(daemon.pid).values()) == 4


def test_metrics_tell_of_gpus(start_gpu: Start) -> None:
    daemon = start_gpu(gpu="0,1")
    daemon.wait_populated()
    found = samples(daemon)
    for uuid in UUIDS:
        label = f'{{device="{uuid}"}}'
        assert found[f"kmesh_gpu_ready{label}"] == 1
        assert found[f"kmesh_gpu_slabs{label}"] == 4
        assert found[f"kmesh_gpu_slab_bytes{label}"] == 16 * MIB
        assert found[f"kmesh_gpu_total_bytes{label}"] == 64 * MIB
        assert found[f"kmesh_gpu_free_bytes{label}"] == 48 * MIB
        assert found[f"kmesh_gpu_restarts_total{label}"] == 0
    assert found['kmesh_warning{reason="gpu"}'] == 0
    assert found['kmesh_slab_size_bytes{slab="8"}'] == 4 * MIB
    assert found['kmesh_process_open_files{process="gpu1"}'] > 4


def test_each_gpu_has_a_worker_without_a_context_on_the_other(start_gpu: Start) -> None:
    daemon = start_gpu(gpu=f"{UUIDS[1]},0")
    status = daemon.status()
    assert [gpu.device for gpu in status.gpus] == [UUIDS[1], UUIDS[0]]
    assert [slab.device for slab in status.slabs[1:]] == [UUIDS[1]] * 4 + [UUIDS[0]] * 4
    for number, uuid in enumerate((UUIDS[1], UUIDS[0])):
        held = vram(daemon.child(f"gpu{number}"))
        assert all(uuid in link for link in held), held
        assert sum(held.values()) == 4


def test_the_second_gpu_alone(start_gpu: Start) -> None:
    """No process of the daemon's holds anything of the first one."""
    daemon = start_gpu(gpu="1")
    daemon.wait_populated()
    status = daemon.status()
    assert [gpu.device for gpu in status.gpus] == [UUIDS[1]]
    assert {slab.device for slab in status.slabs} == {"", UUIDS[1]}
    assert status.gpus[0].free_bytes == status.gpus[0].total_bytes - 16 * MIB
    links = [link for pid in (daemon.pid, *process_tree(daemon.pid)) for link in vram(pid)]
    # The supervisor, control and its worker.
    assert len(links) == 3
    assert all(UUIDS[1] in link for link in links), links


@pytest.mark.parametrize("victim", ["gpu0", "control"])
def test_slabs_survive_a_kill(start_gpu: Start, gpu_device: Device, victim: str) -> None:
    daemon = start_gpu(errors=True)
    daemon.wait_populated()
    before = ledger(daemon.status())
    with import_slab(daemon, gpu_device, 2, writable=True) as mine:
        mine.write(b"pattern", MIB)
    with import_slab(daemon, gpu_device, 2) as held:
        pid = daemon.child(victim)
        os.kill(pid, signal.SIGKILL)
        # What is mapped stays, whoever has made it.
        assert held.read(MIB, 7) == b"pattern"
        if victim == "control":
            daemon.wait_ready(2)
        status = daemon.wait_status(lambda s: s.gpus[0].ready and s.gpus[0].restarts)
        assert (status.gpus[0].pid, status.gpus[0].restarts) == (daemon.child("gpu0"), 1)
    daemon.wait_populated()
    assert ledger(daemon.status()) == before
    assert sum(vram(daemon.pid).values()) == 4
    with import_slab(daemon, gpu_device, 2) as again:
        assert again.read(MIB, 7) == b"pattern"
    assert readiness(daemon) == set()


def test_a_worker_that_is_down_is_said(start_gpu: Start, gpu_faults: Faults) -> None:
    daemon = start_gpu(errors=True)
    gpu_faults.begin("retain_context", "46 CUDA_ERROR_DEVICE_UNAVAILABLE")
    os.kill(daemon.child("gpu0"), signal.SIGKILL)
    status = daemon.wait_status(lambda s: s.gpus[0].error)
    assert status.gpus[0].error == "retain_context: CUDA_ERROR_DEVICE_UNAVAILABLE (46)"
    (warning,) = [w.text for w in status.warnings if w.name == "gpu"]
    assert warning == f"GPU {UUIDS[0]}: {status.gpus[0].error}"
    # It serves all the same, and the slabs are still there.
    assert readiness(daemon) == set()
    assert status.gpus[0].slabs == 4
    gpu_faults.end("retain_context")
    status = daemon.wait_status(lambda s: s.gpus[0].ready, 60)
    assert not status.gpus[0].error
    assert not [w for w in status.warnings if w.name == "gpu"]


def test_a_worker_that_hangs_is_ended(start_gpu: Start, gpu_faults: Faults) -> None:
    quick = command("import kmesh_spand.gpukeeper as keeper; keeper._SILENT_SECONDS = 5.0")
    daemon = start_gpu(errors=True, command=quick)
    pid = daemon.child("gpu0")
    gpu_faults.begin("memory_info", "0 hang")
    wait_for(lambda: "ending a device worker that is silent" in daemon.log(), 60)
    gpu_faults.end("memory_info")
    status = daemon.wait_status(lambda s: s.gpus[0].ready and s.gpus[0].pid not in (0, pid), 60)
    assert status.gpus[0].restarts >= 1


@pytest.mark.parametrize(
    ("settings", "gpus", "status", "words"),
    [
        ({}, 0, 1, "there is no CUDA driver: libcuda.so.1"),
        ({"gpu": "7"}, 2, 2, rf"gpu: there is no GPU 7 here, only 0 \({UUIDS[0]}\), 1 \(.*\)"),
        ({"gpu": UUIDS[1]}, 1, 2, rf"gpu: there is no GPU {UUIDS[1]} here, only 0 .*"),
        ({"gpu": f"0,{UUIDS[0]}"}, 2, 2, f"gpu: {UUIDS[0]} is named twice"),
        (
            {"gpu_memory": "128MiB"},
            2,
            2,
            rf"gpu_memory: 128MiB are more than the 64 MiB that are free on {UUIDS[0]} .*",
        ),
    ],
    ids=["no driver", "no such number", "wrong UUID", "twice", "too much"],
)
def test_what_cannot_be_had_is_said(
    start_gpu: Start,
    gpu_faults: Faults,
    settings: dict[str, str],
    gpus: int,
    status: int,
    words: str,
) -> None:
    gpu_faults.begin("gpus", str(gpus))
    daemon = start_gpu(errors=True, ready=False, **settings)
    found = refused(daemon)
    assert found[0] == status
    assert re.match(words + r"( |$)", found[1]), found


def test_a_gpu_that_is_split_is_refused(start_gpu: Start, gpu_faults: Faults) -> None:
    gpu_faults.begin("split", "")
    status, words = refused(start_gpu(errors=True, ready=False))
    assert status == 1
    assert words.startswith("gpu: Fake GPU 0 MIG 1g.18gb is a part of a GPU (MIG): only whole GPUs")


# Of each kind; ``tests/unit/test_cuda_memory.py`` lets every call fail.
STEPS = ["device_count", "retain_context", "memory_info", "create", "set_access", "fill"]
STEPS += ["export_fd", "register"]


@pytest.mark.parametrize("step", STEPS)
def test_a_call_that_fails_at_the_start_ends_the_daemon(
    start_gpu: Start, gpu_faults: Faults, step: str
) -> None:
    gpu_faults.begin(step)
    daemon = start_gpu(errors=True, ready=False)
    status, words = refused(daemon)
    assert status == 1
    assert words.startswith(f"{step}: CUDA_ERROR_UNKNOWN (999)"), words
    assert not list(daemon.socket_dir.glob("*.sock"))


@pytest.mark.parametrize("step", ["import_fd", "map", "set_access"])
def test_a_call_that_fails_later_leaves_the_memory(
    start_gpu: Start, gpu_faults: Faults, gpu_device: Device, step: str
) -> None:
    daemon = start_gpu(errors=True)
    before = ledger(daemon.status())
    with import_slab(daemon, gpu_device, 1, writable=True) as mine:
        mine.write(b"pattern")
    gpu_faults.begin(step)
    os.kill(daemon.child("gpu0"), signal.SIGKILL)
    daemon.wait_status(lambda s: step in s.gpus[0].error)
    assert sum(vram(daemon.pid).values()) == 4
    gpu_faults.end(step)
    status = daemon.wait_status(lambda s: s.gpus[0].ready, 60)
    assert ledger(status) == before
    with import_slab(daemon, gpu_device, 1) as again:
        assert again.read(0, 7) == b"pattern"


def test_a_worker_that_dies_while_slabs_are_made_is_replaced(
    start_gpu: Start, gpu_faults: Faults
) -> None:
    """The first slab is there when the second hangs; the next worker makes only the others."""
    gpu_faults.begin("export_fd", "0 hang")
    daemon = start_gpu(errors=True, ready=False)
    wait_for(lambda: vram(daemon.child("gpu0")), 30)
    with RawClient(daemon.socket_dir) as client, pytest.raises(Refused, match="not made yet"):
        client.call(attach_slab={"slab": 1})
    os.kill(daemon.child("gpu0"), signal.SIGKILL)
    gpu_faults.end("export_fd")
    daemon.wait_ready()
    status = daemon.wait_status(lambda s: s.gpus[0].ready)
    assert (status.gpus[0].slabs, status.gpus[0].restarts) == (4, 1)
    assert sum(vram(daemon.pid).values()) == 4


def test_a_worker_that_always_dies_ends_the_daemon(start_gpu: Start, gpu_faults: Faults) -> None:
    gpu_faults.begin("create", "0 hang")
    daemon = start_gpu(errors=True, ready=False)
    killed: set[int] = set()
    while len(killed) < 3:
        pid = daemon.child("gpu0")
        if pid not in killed:
            os.kill(pid, signal.SIGKILL)
            killed.add(pid)
    status, words = refused(daemon)
    assert status == 1
    assert words.startswith("gpu: the device worker of 0 died: killed by SIGKILL")
