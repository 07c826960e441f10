"""Every metric of a daemon is seen at a value that means something, and is written down."""

from __future__ import annotations

import json
import os
import re
import signal
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import disk_metrics
import family_metrics
import grpc
import pytest
import yaml
from daemon_process import COMMAND, Daemon, wait_for
from fake_cuda import UUIDS
from gpus import Faults as GpuFaults
from probe import Faults, get, readiness, samples, wait_for_reasons
from rawclient import DIGEST, SHARD, RawClient, Refused, engine

from kmesh.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    common_pb2,
    flights_pb2,
    sessions_pb2,
    spans_pb2,
)
from kmesh_spand.core.record import RECORD_BYTES

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
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


def reserve_request(of: bytes) -> spans_pb2.ReserveRequest:
    return spans_pb2.ReserveRequest(
        namespace=DIGEST, shard=SHARD, keys=of, tokens=[64], start=[0], length=[1000]
    )


def copy_a_record(daemon: Daemon) -> None:
    """The catalog says the same thing twice, as a broken machine might."""
    for path in Path(f"/proc/{daemon.pid}/fd").iterdir():
        if os.readlink(path).startswith("/memfd:kmesh-catalog "):
            path.chmod(0o600)
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            record = os.pread(fd, RECORD_BYTES, 0)
            os.pwrite(fd, record, 100 * RECORD_BYTES)
            os.close(fd)
            return
    raise AssertionError("no catalog")


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


def disks(seen: Seen) -> None:
    with tempfile.TemporaryDirectory(prefix="kmesh-") as base:
        disk_metrics.everything(Path(base), seen.look)


#: Each with daemons of its own, the longest first.
PARTS = (
    poor_machines, ordinary_use, recipes, disks, full_pools, tenants, sealed, gpus, restarts,
    flights,
)  # fmt: skip


@pytest.fixture(scope="module")
def seen() -> Seen:
    """Three parts at a time: most of their time they wait for what a daemon does in its time."""
    found = Seen()
    with ThreadPoolExecutor(3) as threads:
        for done in [threads.submit(part, found) for part in PARTS]:
            done.result()
    return found


def test_every_metric_says_something(seen: Seen) -> None:
    assert len(seen.values) > 100
    assert not {name for name, value in seen.values.items() if not value}


def families(values: dict[str, float]) -> set[str]:
    """Names as documents write them: no prefix, no labels, no ending of a counter."""
    found = set()
    for name in values:
        short = name.partition("{")[0].removeprefix("kmesh_")
        found.add(re.sub(r"_(total|sum|count)$", "", short))
    return found


def test_every_metric_is_written_down(seen: Seen) -> None:
    text = (ROOT / "docs" / "metrics.md").read_text()
    written = set(re.findall(r"`([a-z_]+)`", text))
    for name in families(seen.values):
        assert name in written or name.startswith(("requests_", "refused_")), name
    for reason in re.findall(r'reason="(\w+)"', " ".join(seen.values)):
        assert reason in written, reason


def test_documented_metrics_exist(seen: Seen) -> None:
    text = (ROOT / "docs" / "metrics.md").read_text().partition("## The connector's")[0]
    rows = re.findall(r"^\| (`[^|]+) \|", text, re.MULTILINE)
    known = families(seen.values) | set(re.findall(r'reason="(\w+)"', " ".join(seen.values)))
    for name in re.findall(r"`([a-z_]+)`", " ".join(rows)):
        assert name in known, name


def _names_in(text: str) -> set[str]:
    return set(re.findall(r"\bkmesh_[a-z_]+", text))


def _exported(seen: Seen) -> set[str]:
    plain = {name.partition("{")[0] for name in seen.values}
    return plain | {name[: -len("count")] + "bucket" for name in plain if name.endswith("_count")}


def test_the_dashboard_shows_what_exists(seen: Seen) -> None:
    board = json.loads((ROOT / "deploy" / "grafana-dashboard.json").read_text())
    queries = [t["expr"] for panel in board["panels"] for t in panel.get("targets", ())]
    assert len(queries) > 15
    named = _names_in(" ".join(queries))
    assert named
    assert named <= _exported(seen)
    assert all(any(_names_in(query)) for query in queries)
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])


def test_the_alerts_ask_for_what_exists(seen: Seen) -> None:
    rules = yaml.safe_load((ROOT / "deploy" / "prometheus-rules.yaml").read_text())
    alerts = [rule for group in rules["groups"] for rule in group["rules"]]
    names = _names_in(" ".join(alert["expr"] for alert in alerts))
    assert names <= _exported(seen)
    assert {"kmesh_ready", "kmesh_spans_corrupt_total", "kmesh_worker_restarts_total"} <= names
    for alert in alerts:
        assert alert["labels"]["severity"] in ("critical", "warning")
        assert set(re.findall(r"\$labels\.(\w+)", str(alert["annotations"]))) <= {
            "instance",
            "reason",
            "slab",
        }
