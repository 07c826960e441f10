"""What makes metrics about restarts, poor machines, GPUs and sealed memory say something."""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path

import family_metrics
import pytest
from daemon_process import COMMAND, Daemon, wait_for
from fake_cuda import UUIDS
from gpus import Faults as GpuFaults
from metric_uses import MIB, Seen, key, running
from probe import get, readiness, samples, wait_for_reasons
from rawclient import DIGEST, SHARD, RawClient, Refused

from kmesh.v1 import spans_pb2
from kmesh_spand.core.record import RECORD_BYTES


def restarts(seen: Seen) -> None:
    """Worker and control die; one catalog record is damaged meanwhile."""
    # The first span is verified at once, and the next one not while this looks.
    with running(verify_rate=2000, grace_ms=200) as (daemon, _):
        daemon.wait_populated()
        with RawClient(daemon.socket_dir) as client:
            client.attach_staging(MIB)
            for number in range(4):
                assert client.store(key(number), b"x" * 200_000) == 0
            reserved = client.reserve([key(9)], 1000).reservation[0]
            worker = daemon.child("worker")
            os.kill(worker, signal.SIGSTOP)
            client.send(commit={"reservation": [reserved], "staging_offset": [0]})
            wait_for(lambda: samples(daemon)["kmesh_worker_copies"])
            os.kill(worker, signal.SIGKILL)
            response, _ = client.receive()
            assert list(response.commit.reason) == [9]
        seen.look(daemon)
        copy_a_record(daemon)
        os.kill(daemon.child("control"), signal.SIGKILL)
        daemon.wait_ready(2)
        looked = seen.look(daemon)
        assert looked["kmesh_recovering_spans"] > 0
        wait_for(lambda: seen.look(daemon)["kmesh_spans_verified_total"], 30)
        with RawClient(daemon.socket_dir) as client:
            client.attach_staging(MIB)
            # The new worker has yet to say how much memory there is.
            reserved = wait_for(lambda: client.reserve([key(9)], 1000).reservation[0])
            os.kill(daemon.child("worker"), signal.SIGSTOP)
            client.send(commit={"reservation": [reserved], "staging_offset": [0]})
            wait_for(lambda: seen.look(daemon)["kmesh_worker_copies"])
            daemon.process.send_signal(signal.SIGTERM)
            wait_for(lambda: "draining" in readiness(daemon))
            refused_by_drain = client.send(reserve=reserve_request(key(10)))
            response, _ = client.receive()
            assert (response.id, response.status.code) == (refused_by_drain, 10)
            seen.look(daemon)


def copy_a_record(daemon: Daemon) -> None:
    """The catalog says the same thing twice, as a broken machine might."""
    (path,) = daemon.memfds("catalog ")
    path.chmod(0o600)
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    record = os.pread(fd, RECORD_BYTES, 0)
    os.pwrite(fd, record, 100 * RECORD_BYTES)
    os.close(fd)


def poor_machines(seen: Seen) -> None:
    """Start is slow, memory is not there at first, file descriptors run out."""
    with running(ready=False, faults=["starting", "populate", "huge"]) as (daemon, faults):
        wait_for(lambda: answers(daemon))
        wait_for(lambda: seen.look(daemon)['kmesh_not_ready{reason="starting"}'])
        faults.end("starting")
        daemon.wait_ready()
        wait_for_reasons(daemon, "memory")
        with RawClient(daemon.socket_dir) as client:
            assert list(client.reserve([key(1)], 1000).reason) == [6]
        seen.look(daemon)
        faults.end("populate")
        daemon.wait_populated()
        wait_for_reasons(daemon)
        seen.look(daemon)
    with running(slab_size="16MiB", faults=["small"]) as (daemon, _):
        wait_for(lambda: seen.look(daemon)['kmesh_warning{reason="hugepages"}'])
    with running(slab_size="16MiB", faults=["second"]) as (daemon, _):
        wait_for(lambda: seen.look(daemon)['kmesh_warning{reason="memory"}'])
        assert readiness(daemon) == set()
    with running(nofile=64) as (daemon, _):
        daemon.wait_populated()
        crowd: list[RawClient] = []
        try:
            while len(crowd) < 64:
                crowd.append(RawClient(daemon.socket_dir))
        except Refused:
            wait_for_reasons(daemon, "files")
            seen.look(daemon)
        finally:
            for client in crowd:
                client.close()
    with running(allow_uids=os.geteuid() + 1) as (daemon, _):
        with pytest.raises(Refused, match="PERMISSION_DENIED"):
            RawClient(daemon.socket_dir)
        seen.look(daemon)


def gpus(seen: Seen) -> None:
    """What is equal on a GPU is looked for by the processor; a device worker dies and can't come
    back at once."""
    with tempfile.TemporaryDirectory(prefix="kmesh-") as base:
        driver = GpuFaults(Path(base) / "gpu")
        settings = {"gpu": 0, "gpu_memory": "4MiB", "host_memory": "4MiB"}
        daemon = Daemon(Path(base) / "s", **{**driver.settings, **settings})
        try:
            # The kernel counts hundredths of a second.
            wait_for(
                lambda: seen.look(daemon) and seen.values["kmesh_process_cpu_seconds_total{gpu}"],
                60,
            )
            family_metrics.by_processor(daemon, seen.look, UUIDS[0])
            driver.begin("retain_context")
            os.kill(daemon.child("gpu0"), signal.SIGKILL)
            wait_for(lambda: seen.look(daemon)['kmesh_warning{reason="gpu"}'])
            restarts = f'kmesh_gpu_restarts_total{{device="{UUIDS[0]}"}}'
            wait_for(lambda: seen.look(daemon)[restarts])
        finally:
            daemon.stop()
            daemon.kill()


def sealed(seen: Seen) -> None:
    """What an earlier daemon sealed is served, and given back where it is empty."""
    settings = {"hardened": "true", "host_memory": "4MiB", "slab_size": "2MiB"}
    with running(**settings) as (first, _):
        first.wait_populated()
        with RawClient(first.socket_dir) as client:
            assert client.store(key(0), b"x") == 0
        second = Daemon(first.socket_dir, command=(*COMMAND, "--upgrade"), **settings)
        try:
            first.process.wait(60)
            wait_for(lambda: seen.look(second)["kmesh_spans_slabs_given_up_total"])
            wait_for(lambda: seen.look(second)['kmesh_slab_read_only{slab="0"}'])
        finally:
            second.stop()
            second.kill()


def answers(daemon: Daemon) -> bool:
    try:
        return get(daemon.socket_dir, "/metrics")[0] == 200
    except OSError:
        return False


def reserve_request(of: bytes) -> spans_pb2.ReserveRequest:
    return spans_pb2.ReserveRequest(
        namespace=DIGEST, shard=SHARD, keys=of, tokens=[64], start=[0], length=[1000]
    )
