"""Spans in GPU memory: stored from staging, read, verified, evicted; faults on the way."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from daemon_process import Daemon, wait_for
from fake_cuda import MIB, UUIDS
from gpus import SHARD, Faults, client, import_slab, key, ledger
from leaks import open_fds
from rawclient import RawClient

from kmesh import errors
from kmesh.cuda.device import Device
from kmesh.cuda.reading import read_span
from kmesh.layout import TILE_BYTES, sums_offset
from kmesh.session import Role, Session
from kmesh.store import read_span as read_host_span

Start = Callable[..., Daemon]


def staging(pid: int) -> list[str]:
    """Staging that a process has open or mapped."""
    maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    found = [*open_fds(pid), *(line.split(maxsplit=5)[-1] for line in maps)]
    return [name for name in found if "kmesh-staging" in name]


def test_spans_are_stored_on_the_gpu_that_is_named(start_gpu: Start, gpu_device: Device) -> None:
    daemon = start_gpu()
    daemon.wait_populated()
    # Less than a tile, whole tiles, and more than is moved at a time.
    payloads = [os.urandom(size) for size in (100, TILE_BYTES, 3 * TILE_BYTES + 5)]
    with client(daemon, gpu_device) as ours:
        assert ours.put([1, 2, 3], payloads) == [0, 0, 0]
        assert ours.put([3], payloads[2:]) == [4]
        for number, payload in enumerate(payloads, 1):
            assert ours.read(number) == payload
            assert ours.read(number, device="") is None
        # In host memory the same key is another span.
        assert ours.put([1], [b"host" * 99], device="") == [0]
        assert ours.read(1, device="") == b"host" * 99
        assert ours.read(1) == payloads[0]
        with ours.acquire(1) as lease, pytest.raises(errors.UnsupportedError, match="CUDA_VMM_FD"):
            read_host_span(ours.session, lease, 0)
        with pytest.raises(errors.InvalidArgument, match=r"reserve\.device: the daemon has no mem"):
            ours.put([1], payloads[:1], device=UUIDS[1])
        with pytest.raises(errors.InvalidArgument, match=r"acquire\.device"):
            ours.acquire(1, device="GPU-x")
        # The index tells tiers apart.
        index, keys, codes = ours.session.index, key(1) + key(2) + key(3), [SHARD.code()]
        assert index.probe(keys, codes).hits == 1
        assert index.probe(keys, codes, device=gpu_device.uuid).hits == 3
        assert index.probe(keys, codes, device=UUIDS[1]).hits == 0
    # The staging goes with the session, in every process.
    for name in ("control", "worker", "gpu0"):
        wait_for(lambda name=name: not staging(daemon.child(name)), 30, name)
    status = daemon.status()
    assert sum(slab.used for slab in status.slabs if slab.device) == 6 * TILE_BYTES
    uid = os.getuid()
    assert [tenant.name for tenant in status.tenants] == [str(uid), f"{uid}@gpu0"]
    assert status.tenants[1].spans == 3


def test_a_gpu_that_was_not_found_yet_is_asked_for_again(
    start_gpu: Start, gpu_faults: Faults
) -> None:
    """Sessions are served before a device worker has said which GPU it is on."""
    gpu_faults.begin("device_uuid", "0 hang")
    daemon = start_gpu(ready=False)
    wait_for((daemon.socket_dir / "session.sock").exists, 30)
    with Session.connect(daemon.socket_dir, role=Role.TOOL, timeout=30) as session:
        wait_for(lambda: gpu_faults.reached("device_uuid"), 30)
        for name in UUIDS:
            with pytest.raises(errors.Unavailable, match=r"acquire\.device: not all"):
                session.acquire(key(1), [SHARD], device=name)
        gpu_faults.end("device_uuid")
        daemon.wait_ready()
        assert session.acquire(key(1), [SHARD], device=UUIDS[0]).hits == 0
        with pytest.raises(errors.InvalidArgument, match=r"acquire\.device: the daemon has no"):
            session.acquire(key(1), [SHARD], device=UUIDS[1])


def test_staging_is_had_by_all_workers_or_by_none(start_gpu: Start, gpu_device: Device) -> None:
    """Control has too few file descriptors, one more each time."""
    daemon = start_gpu(gpu="0,1")
    control = daemon.child("control")
    with client(daemon, gpu_device, staging=0) as ours:
        limits = resource.prlimit(control, resource.RLIMIT_NOFILE)
        before = open_fds(control)
        for few in range(12):
            resource.prlimit(control, resource.RLIMIT_NOFILE, (before.total() + few, limits[1]))
            try:
                ours.staging = ours.session.staging(1 << 20)
                break
            except errors.Exhausted:
                assert not open_fds(control) - before
            finally:
                resource.prlimit(control, resource.RLIMIT_NOFILE, limits)
        for number, device in enumerate(("", *UUIDS)):
            assert ours.put([number], [b"bytes"], device) == [0]


def test_a_large_span_is_moved_in_pieces(start_gpu: Start, gpu_device: Device) -> None:
    daemon = start_gpu(gpu_slab_size="16MiB")
    payload = os.urandom(8 * MIB - 12345)
    with client(daemon, gpu_device) as ours:
        assert ours.put([1], [payload]) == [0]
        assert ours.read(1) == payload


def test_eviction_is_of_the_gpu_alone(start_gpu: Start, gpu_device: Device) -> None:
    daemon = start_gpu(gpu_memory="4MiB")
    with client(daemon, gpu_device) as ours:
        assert ours.put([0], [b"host"], device="") == [0]
        for number in range(1, 9):
            assert ours.put([number], [bytes([number]) * MIB]) == [0]
        assert ours.read(1) is None
        assert ours.read(8) == bytes([8]) * MIB
        assert ours.read(0, device="") == b"host"
        with ours.acquire(6, 7, 8) as lease:
            assert lease.hits == 3
            assert ours.put([20], [bytes(2 * MIB)]) == [5]
    counters = daemon.status().counters
    assert counters["spans_evicted"] == 5


@pytest.mark.parametrize("victim", ["gpu0", "control"])
def test_spans_survive_a_kill(start_gpu: Start, gpu_device: Device, victim: str) -> None:
    daemon = start_gpu(errors=True)
    payloads = [os.urandom(300_000) for _ in range(4)]
    with client(daemon, gpu_device) as ours:
        assert ours.put([1, 2, 3, 4], payloads) == [0] * 4
    before = ledger(daemon.wait_status(lambda s: s.sessions == 1 and not s.staging_bytes))
    os.kill(daemon.child(victim), signal.SIGKILL)
    if victim == "control":
        daemon.wait_ready(2)
    daemon.wait_status(lambda s: s.gpus[0].ready and s.gpus[0].restarts, 60)
    if victim == "control":
        daemon.wait_status(lambda s: s.counters["spans_verified"] == 4, 60)
    with client(daemon, gpu_device) as ours:
        for number, payload in enumerate(payloads, 1):
            assert ours.read(number) == payload
        # And new ones are stored.
        assert ours.put([5], payloads[:1]) == [0]
        assert ours.read(5) == payloads[0]
    status = daemon.wait_status(lambda s: s.sessions == 1 and not s.staging_bytes)
    assert ledger(status)[:3] == before[:3]
    assert status.counters["spans_recovered_dropped"] == 0


def test_what_changed_is_found_and_not_served(start_gpu: Start, gpu_device: Device) -> None:
    daemon = start_gpu(errors=True)
    with client(daemon, gpu_device) as ours:
        assert ours.put([1, 2], [b"a" * 70_000, b"b" * 70_000]) == [0, 0]
        with ours.acquire(1) as lease:
            span = lease.entry(0)
            with import_slab(daemon, gpu_device, span.slab, writable=True) as slab:
                slab.write(b"z", span.offset + 69_999)
            with pytest.raises(errors.CorruptionError, match="do not match"):
                read_span(ours.slabs, gpu_device, lease, 0)
            assert ours.session.report_corrupt(lease, [0]) == 1
        wait_for(lambda: daemon.status().counters["spans_corrupt"] == 1)
        assert ours.read(1) is None
        assert ours.read(2) == b"b" * 70_000
        # A false report changes nothing.
        with ours.acquire(2) as lease:
            ours.session.report_corrupt(lease, [0])
        wait_for(lambda: daemon.status().counters["spans_corrupt_false"] == 1)
        assert ours.read(2) == b"b" * 70_000


def test_damage_while_control_is_down_is_found(start_gpu: Start, gpu_device: Device) -> None:
    daemon = start_gpu(errors=True)
    with client(daemon, gpu_device) as ours:
        assert ours.put([1, 2], [b"a" * 70_000, b"b" * 70_000]) == [0, 0]
        with ours.acquire(1) as lease:
            span = lease.entry(0)
    with import_slab(daemon, gpu_device, span.slab, writable=True) as slab:
        at = sums_offset(slab.size) + span.offset // TILE_BYTES * 8
        slab.write(bytes(8), at)
    os.kill(daemon.child("control"), signal.SIGKILL)
    daemon.wait_ready(2)
    daemon.wait_status(lambda s: s.counters["spans_verified"] and s.counters["spans_corrupt"], 60)
    with client(daemon, gpu_device) as ours:
        assert ours.read(1) is None
        assert ours.read(2) == b"b" * 70_000


@pytest.mark.parametrize("step", ["write", "read"])
def test_a_copy_that_fails_leaves_nothing(
    start_gpu: Start, gpu_faults: Faults, gpu_device: Device, step: str
) -> None:
    daemon = start_gpu(errors=True, bugs=True)
    daemon.wait_populated()
    with client(daemon, gpu_device) as ours:
        before = ledger(daemon.status())
        gpu_faults.begin(step, "999 a bug that a test put here")
        assert ours.put([1], [b"x" * 1000]) == [9]
        gpu_faults.end(step)
        assert ledger(daemon.status()) == before
        assert ours.put([1], [b"x" * 1000]) == [0]
        assert ours.read(1) == b"x" * 1000


def test_a_worker_that_dies_in_a_copy_fails_it(
    start_gpu: Start, gpu_faults: Faults, gpu_device: Device
) -> None:
    daemon = start_gpu(errors=True)
    daemon.wait_populated()
    before = ledger(daemon.wait_status(lambda s: s.sessions == 1))
    gpu_faults.begin("write", "0 hang")
    with RawClient(daemon.socket_dir) as writer:
        writer.attach_staging(MIB)
        answer = writer.call(
            reserve={
                "namespace": key(0),
                "shard": {"layer_end": 1, "head_end": 1},
                "keys": key(1) + key(2),
                "tokens": [64, 64],
                "start": [0, 0],
                "length": [1000, 1000],
                "device": UUIDS[0],
            }
        )[0]
        reserved = list(answer.reservation)
        writer.send(commit={"reservation": reserved, "staging_offset": [0, 0]})
        wait_for(lambda: gpu_faults.reached("write"), 30)
        os.kill(daemon.child("gpu0"), signal.SIGKILL)
        gpu_faults.end("write")
        assert list(writer.receive()[0].commit.reason) == [9, 9]
    daemon.wait_status(lambda s: s.gpus[0].ready and s.gpus[0].restarts, 60)
    assert ledger(daemon.wait_status(lambda s: s.sessions == 1 and not s.staging_bytes)) == before
    with client(daemon, gpu_device) as ours:
        assert ours.put([1], [b"after"]) == [0]
        assert ours.read(1) == b"after"


def test_a_client_that_dies_holds_nothing(
    start_gpu: Start, gpu_faults: Faults, gpu_device: Device
) -> None:
    """Its copy is under way: the range is free when that has ended."""
    daemon = start_gpu()
    daemon.wait_populated()
    with client(daemon, gpu_device) as ours:
        before = ledger(daemon.wait_status(lambda s: s.sessions == 2))
        gpu_faults.begin("write", "0 hang")
        writer = RawClient(daemon.socket_dir)
        writer.attach_staging(MIB)
        request = {
            "namespace": key(0),
            "shard": {"layer_end": 1, "head_end": 1},
            "keys": key(9),
            "tokens": [64],
            "start": [0],
            "length": [1000],
            "device": UUIDS[0],
        }
        reserved = list(writer.call(reserve=request)[0].reservation)
        writer.send(commit={"reservation": reserved, "staging_offset": [0]})
        wait_for(lambda: gpu_faults.reached("write"), 30)
        writer.close()
        gpu_faults.end("write")
        quiet = daemon.wait_status(
            lambda s: s.sessions == 2 and not s.reservations and ledger(s) == before, 30
        )
        assert quiet.spans == 0
        assert ours.read(9) is None
