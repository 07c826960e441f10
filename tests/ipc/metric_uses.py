"""Uses of a daemon, each of which makes metrics say something."""

from __future__ import annotations

import os
import re
import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import family_metrics
import grpc
import pytest
from daemon_process import Daemon, wait_for
from probe import Faults, get, readiness, samples, wait_for_reasons
from rawclient import SHARD, RawClient, Refused, engine

from kmesh.v1 import admin_pb2, admin_pb2_grpc, common_pb2, flights_pb2, sessions_pb2, spans_pb2

MIB = 1 << 20


class Seen:
    """The highest value of each sample over all looks at all daemons, by several threads."""

    def __init__(self) -> None:
        self.values: dict[str, float] = {}
        self._lock = threading.Lock()

    def look(self, daemon: Daemon) -> dict[str, float]:
        now = samples(daemon)
        for name, value in now.items():
            # Each slab and each tenant tells the same things.
            name = re.sub(r'slab="\d+"', "slab", name)
            name = re.sub(r'tenant="[^"]+"', "tenant", name)
            name = re.sub(r'device="[^"]+"', "device", name)
            name = re.sub(r'process="gpu\d"', "gpu", name)
            with self._lock:
                self.values[name] = max(value, self.values.get(name, 0.0))
        return now


@contextmanager
def running(**settings: Any) -> Iterator[tuple[Daemon, Faults]]:
    with tempfile.TemporaryDirectory(prefix="kmesh-") as base:
        faults = Faults(Path(base) / "faults")
        for fault in settings.pop("faults", ()):
            faults.begin(fault)
        daemon = Daemon(Path(base) / "s", **{**faults.settings, **settings})
        try:
            yield daemon, faults
        finally:
            for name in ("worker", "control"):
                if daemon.process.poll() is None:
                    os.kill(daemon.child(name), signal.SIGCONT)
            daemon.stop()
            daemon.kill()


def key(number: int) -> bytes:
    return number.to_bytes(32, "little")


def refused(client: RawClient, **body: Any) -> None:
    with pytest.raises(Refused):
        client.call(**body)


@contextmanager
def stopped(daemon: Daemon) -> Iterator[None]:
    worker = daemon.child("worker")
    os.kill(worker, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(worker, signal.SIGCONT)


def ordinary_use(seen: Seen) -> None:
    """Sessions of all roles store, read, report, and ask for what can't be."""
    settings = {"slow_call_ms": 1, "stuck_ms": 300, "dma_buf": "slabs", "faults": ("pretend",)}
    with running(**settings) as (daemon, faults):
        daemon.wait_populated()
        path = daemon.socket_dir
        scheduler, worker = sessions_pb2.ROLE_SCHEDULER, sessions_pb2.ROLE_WORKER
        with (
            RawClient(path, **engine(scheduler)),
            RawClient(path, **engine(worker)) as client,
            RawClient(path) as tool,
        ):
            client.call(ping={})
            client.call(attach_index={})
            client.attach_staging(MIB)
            for number in range(4):
                assert client.store(key(number), b"x" * 100_000) == 0
            lease = client.acquire([key(0), key(1), key(9)])
            seen.look(daemon)
            # Slabs and spans as DMA-BUFs, and what can't be had.
            dma_buf = common_pb2.HANDLE_KIND_DMA_BUF
            client.call(attach_slab={"slab": 0, "kind": dma_buf})
            span = {"lease": lease.lease, "entry": 0, "kind": dma_buf}
            client.call(export_span=span)
            with faults.during("export"):
                refused(client, export_span=span)
            RawClient(path, handles=[{"tier": 1, "kinds": [2, 1]}]).close()
            # One is damaged, one is not.
            daemon.flip(lease.offset[0] + 5)
            report = spans_pb2.ReportCorruptRequest(lease=lease.lease, entry=[0, 1])
            client.call(report_corrupt=report)
            wait_for(lambda: seen.look(daemon)["kmesh_spans_corrupt_false_total"])
            client.release(lease.lease)
            client.release(lease.lease)
            client.read(key(1))
            # What Reserve may answer.
            assert list(client.reserve([key(1)], 1000).reason) == [4]
            held = client.reserve([key(20), key(21)], 1000).reservation
            assert list(tool.reserve([key(20)], 1000).reason) == [2]
            tool.acquire([key(20)])
            assert list(client.reserve([key(22)], 64 * MIB).reason) == [7]
            client.call(abort=spans_pb2.AbortRequest(reservation=[held[0]]))
            assert client.commit([held[0]], [0]) == [8]
            with stopped(daemon):
                client.send(commit={"reservation": [held[1]], "staging_offset": [0]})
                wait_for_reasons(daemon, "worker")
                assert seen.look(daemon)["kmesh_worker_copies"] == 1
                wait_for(lambda: seen.look(daemon)["kmesh_worker_silent_seconds"])
                client.send(abort=spans_pb2.AbortRequest(reservation=[held[1]]))
                client.receive()
            client.receive()
            late = client.reserve([key(23)], 1000).reservation[0]
            with stopped(daemon):
                client.send(deadline_ms=50, commit={"reservation": [late], "staging_offset": [0]})
                response, _ = client.receive()
                assert response.status.code == 9
            # What is refused.
            too_many = spans_pb2.ReleaseRequest(leases=[1] * 2000)
            refused(client, release=too_many)
            refused(client, acquire=spans_pb2.AcquireRequest(keys=b"short", shards=[SHARD]))
            refused(client, attach_slab={"slab": 99})
            refused(client, attach_staging={"size": 2 * MIB})
            refused(tool, attach_staging={"size": 4 << 30})
            with RawClient(path) as greedy:
                greedy.attach_staging(32 * MIB)
                refused(tool, attach_staging={"size": 32 * MIB})
            with faults.during("internal"):
                refused(client, attach_slab={"slab": 0})
            with faults.during("index"):
                assert client.store(key(30), b"never found") == 0
        for wrong in (
            {"protocol_version": 99},
            {"role": 77},
        ):
            with pytest.raises(Refused):
                RawClient(path, **wrong)
        with RawClient(path, **engine(scheduler)), pytest.raises(Refused):
            RawClient(path, **engine(worker, dtype="float16"))
        with RawClient(path, hello=False) as stranger, pytest.raises(Refused):
            stranger.call(ping={})
        with RawClient(path) as rude:
            rude.sock.send(b"\xff" * 10)
            response, _ = rude.receive()
            assert response.status.code == 1
        channel = grpc.insecure_channel(f"unix:{path}/grpc.sock")
        with channel, pytest.raises(grpc.RpcError):
            admin_pb2_grpc.AdminStub(channel).Status(admin_pb2.StatusRequest(), timeout=20)
        with faults.during("loop"):
            wait_for(lambda: get(path, "/livez")[0] == 503)
            assert "loop" in readiness(daemon)
            seen.look(daemon)
        wait_for_reasons(daemon)
        seen.look(daemon)


def full_pools(seen: Seen) -> None:
    """Memory and catalog run out; the policy throws; allocation fails although it could work."""
    with running(host_memory="4MiB", max_spans=40) as (daemon, faults):
        daemon.wait_populated()
        with RawClient(daemon.socket_dir) as client:
            client.attach_staging(MIB)
            for number in range(10):
                assert client.store(key(number), b"x" * (MIB // 2)) == 0
            with faults.during("policy"):
                for number in range(10, 15):
                    assert client.store(key(number), b"x" * (MIB // 2)) == 0
                wait_for_reasons(daemon, "evictor")
                seen.look(daemon)
            leased = [n for n in range(15) if client.acquire([key(n)]).reason[0] == 0]
            assert len(leased) == 7
            everything = list(client.reserve([key(99)], MIB).reason)
            assert everything == [5]
    with running(max_spans=31) as (daemon, _):
        daemon.wait_populated()
        with RawClient(daemon.socket_dir) as client:
            client.attach_staging(MIB)
            leases = {}
            for number in range(31):
                assert client.store(key(number), b"x" * MIB) == 0
                leases[number] = client.acquire([key(number)]).lease
            client.reserve([key(77)], 1000)
            for number in range(1, 31, 2):
                client.release(leases[number])
            for _ in range(3):
                client.reserve([key(99)], 3 * MIB)
            wait_for_reasons(daemon, "pool")
            seen.look(daemon)
    with running(max_spans=8) as (daemon, _):
        daemon.wait_populated()
        with RawClient(daemon.socket_dir) as client:
            for number in range(8):
                assert client.store(key(number), b"bytes") == 0
                client.acquire([key(number)])
            assert list(client.reserve([key(99)], 10).reason) == [11]
        with daemon.rpc() as (channel, metadata):
            admin = admin_pb2_grpc.AdminStub(channel)
            request = admin_pb2.EvictRequest(all=True)
            assert admin.Evict(request, metadata=metadata, timeout=20).spans == 8
        seen.look(daemon)


def tenants(seen: Seen) -> None:
    """Salts that take slabs, lose them, and have quotas; slabs that may not grow."""
    with running(host_memory="4MiB", slab_size="2MiB", tenants="default=1MiB") as (daemon, faults):
        daemon.wait_populated()
        salts = [bytes([number]) * 32 for number in range(4)]
        with RawClient(daemon.socket_dir) as client, daemon.rpc() as (channel, metadata):
            admin = admin_pb2_grpc.AdminStub(channel)

            def evict() -> None:
                for number in range(4):
                    request = admin_pb2.EvictRequest(keys=key(number))
                    admin.Evict(request, metadata=metadata)

            client.attach_staging(MIB)
            for number in range(2):
                for salt in salts[:2]:
                    assert client.store(key(number), b"x" * 600_000, salt) == 0
            assert client.store(key(3), b"x" * (2 * MIB - 200_000), salts[0]) == 12
            assert client.store(key(3), b"bytes", salts[2]) == 5
            assert client.read(key(1), salts[0]) == b"x" * 600_000
            assert client.read(key(2), salts[0]) == 1
            seen.look(daemon)
            evict()
            wait_for(lambda: client.store(key(3), b"bytes", salts[2]) == 0)
            seen.look(daemon)
            evict()
            with faults.during("wipe"):
                assert client.store(key(3), b"bytes", salts[3]) == 6
                wait_for(lambda: seen.look(daemon)["kmesh_spans_wipe_failed_total"])
    with running(memory_headroom="64TiB") as (daemon, _):
        wait_for(lambda: seen.look(daemon)["kmesh_population_paused"])


def flights(seen: Seen) -> None:
    """Each way in which a flight, and a wait for one, may end."""
    with running() as (daemon, _):
        daemon.wait_populated()
        path = daemon.socket_dir

        def claim(client: RawClient, number: int) -> Any:
            request = flights_pb2.ClaimRequest(keys=key(number), shards=[SHARD])
            return client.call(claim=request)[0]

        def wait(client: RawClient, flight: int) -> None:
            request = {"flight": flight, "covered": 1, "shards": [SHARD]}
            client.send(await_flight=flights_pb2.AwaitRequest(**request))
            client.call(ping={})

        with RawClient(path) as leader, RawClient(path) as other:
            leader.attach_staging(MIB)
            found = claim(leader, 100)
            wait(other, claim(other, 100).flight)
            leader.call(progress=flights_pb2.ProgressRequest(flight=found.flight))
            seen.look(daemon)
            assert leader.store(key(100), b"bytes") == 0
            assert other.receive()[0].await_flight.arrival == flights_pb2.ARRIVAL_LANDED
            for number, cause in ((101, 2), (102, 3), (103, 4)):
                found = claim(leader, number)
                if cause == 2:
                    wait(other, found.flight)
                    leave = flights_pb2.LeaveRequest(flight=found.flight)
                    other.send(leave=leave)
                    other.receive()
                    other.receive()
                land = flights_pb2.LandRequest(flight=found.flight, cause=cause)
                assert leader.call(land=land)[0].ended
        with RawClient(path) as survivor:
            for _ in range(2):
                with RawClient(path) as leader:
                    found = claim(leader, 104)
                    if found.standing == flights_pb2.STANDING_LEAD:
                        second = RawClient(path)
                        wait(second, found.flight)
            arrived = second.receive()[0].await_flight.arrival
            assert arrived == flights_pb2.ARRIVAL_LEAD
            wait(survivor, found.flight)
            second.close()
            assert survivor.receive()[0].await_flight.cause == flights_pb2.FLIGHT_CAUSE_BACK_OFF
            with RawClient(path) as leader:
                claim(leader, 105)
            claim(survivor, 106)
            with daemon.rpc() as (channel, metadata):
                admin = admin_pb2_grpc.AdminStub(channel)
                list(admin.Drain(admin_pb2.DrainRequest(), metadata=metadata, timeout=20))
            seen.look(daemon)


def recipes(seen: Seen) -> None:
    """Families, what is made for them, and what goes wrong with that."""
    with running(host_memory="16MiB") as (daemon, _):
        daemon.wait_populated()
        family_metrics.lives(daemon, seen.look)
    with running(host_memory="16MiB") as (daemon, _):
        daemon.wait_populated()
        family_metrics.spoiled(daemon, seen.look)
    with running(host_memory="4MiB", slab_size="4MiB") as (daemon, _):
        daemon.wait_populated()
        family_metrics.full(daemon, seen.look)
