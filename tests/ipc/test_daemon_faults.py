"""Clients and parts of the daemon die, memory runs out, bits flip: what must hold then."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from daemon_process import Daemon, environment, wait_for
from probe import Faults, samples
from rawclient import RawClient

from kmesh import _host, index, layout
from kmesh.mapping import Mapping
from kmesh.v1 import common_pb2, spans_pb2

Start = Callable[..., Daemon]

_CLIENT = """
import sys, time
from pathlib import Path
from rawclient import RawClient
client = RawClient(Path(sys.argv[1]))
client.attach_staging(1 << 20)
what = sys.argv[2]
keys = [bytes([n]) * 32 for n in range(8)]
if what == "leases":
    client.store(b"k" * 32, b"bytes")
    client.acquire([b"k" * 32])
else:
    reserved = list(client.reserve(keys, 100_000).reservation)
    if what == "copy":
        client.send(commit={"reservation": reserved, "staging_offset": [0] * 8})
print("done", flush=True)
time.sleep(600)
"""


@contextmanager
def victim(daemon: Daemon, what: str) -> Iterator[subprocess.Popen[str]]:
    """A client process that has got as far as ``what``."""
    paths = os.pathsep.join([str(Path(__file__).parent), environment()["PYTHONPATH"]])
    process = subprocess.Popen(
        [sys.executable, "-c", _CLIENT, str(daemon.socket_dir), what],
        env={**environment(), "PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "done\n"
            yield process
        finally:
            process.kill()


def assert_all_free(daemon: Daemon) -> None:
    daemon.wait_status(
        lambda s: (s.sessions, s.leases, s.reservations, s.staging_bytes) == (1, 0, 0, 0)
    )


@pytest.mark.parametrize("what", ["reserve", "leases"])
def test_a_killed_client_leaves_nothing(spand: Daemon, what: str) -> None:
    with RawClient(spand.socket_dir) as witness, victim(spand, what) as process:
        before = spand.status()
        assert (before.reservations, before.leases) == ((8, 0) if what == "reserve" else (0, 1))
        assert before.staging_bytes == 1 << 20
        process.kill()
        spand.wait_status(
            lambda s: (s.sessions, s.leases, s.reservations, s.staging_bytes) == (2, 0, 0, 0)
        )
        # Others did not notice.
        assert witness.store(b"w" * 32, b"bytes") == 0
        assert witness.read(b"w" * 32) == b"bytes"
    used = spand.status().slabs[0].used
    assert used == (2 if what == "leases" else 1) * layout.TILE_BYTES


def test_a_client_killed_in_mid_copy_leaves_nothing(spand: Daemon) -> None:
    worker = spand.child("worker")
    os.kill(worker, signal.SIGSTOP)
    with victim(spand, "copy") as process:
        spand.wait_status(lambda s: s.reservations == 8)
        process.kill()
        spand.wait_status(lambda s: s.sessions == 1)
        # The copies still read the staging and write the slab: both are kept until they end.
        status = spand.status()
        assert status.staging_bytes == 1 << 20
        assert status.slabs[0].used > 0
    os.kill(worker, signal.SIGCONT)
    assert_all_free(spand)
    status = spand.status()
    assert (status.spans, status.slabs[0].used) == (0, 0)


def test_a_dead_worker_fails_its_copies_alone(start_spand: Start) -> None:
    daemon = start_spand(errors=True)
    daemon.wait_populated()
    payload = os.urandom(100_000)
    with RawClient(daemon.socket_dir) as client:
        assert client.store(b"a" * 32, payload) == 0
        worker = daemon.child("worker")
        os.kill(worker, signal.SIGSTOP)
        reserved = list(client.reserve([b"b" * 32, b"c" * 32], 100_000).reservation)
        client.send(commit={"reservation": reserved, "staging_offset": [0, 0]})
        wait_for(lambda: samples(daemon)["kmesh_worker_copies"] == 2)
        os.kill(worker, signal.SIGKILL)
        response, _ = client.receive()
        assert list(response.commit.reason) == [common_pb2.REASON_COPY_FAILED] * 2
        # What was stored is served, and the session stores again through the new worker.
        assert client.read(b"a" * 32) == payload
        wait_for(lambda: client.store(b"b" * 32, payload) == 0)
        assert client.read(b"b" * 32) == payload
    status = daemon.status()
    assert (status.worker_restarts, status.control_restarts) == (1, 0)
    assert status.counters["spans_copy_failed"] >= 2


def test_a_wedged_worker_is_replaced(start_spand: Start) -> None:
    daemon = start_spand(errors=True, copy_timeout_ms=400)
    daemon.wait_populated()
    with RawClient(daemon.socket_dir) as client:
        client.attach_staging(1 << 20)
        reserved = list(client.reserve([b"a" * 32], 1000).reservation)
        os.kill(daemon.child("worker"), signal.SIGSTOP)
        assert client.commit(reserved, [0]) == [common_pb2.REASON_COPY_FAILED]
        wait_for(lambda: client.store(b"a" * 32, b"bytes") == 0)
    assert daemon.status().worker_restarts == 1
    assert "restarting the store worker: no answer for 0.4 s" in daemon.log()


def test_control_killed_under_load(start_spand: Start) -> None:
    daemon = start_spand(errors=True, grace_ms=300, host_memory="512MiB")
    daemon.wait_populated()
    payloads = {os.urandom(32): os.urandom(50_000 + n) for n in range(40)}
    with RawClient(daemon.socket_dir) as client:
        for key, payload in payloads.items():
            assert client.store(key, payload) == 0
        handle, fds = client.call(attach_index={})
        epoch = client.epoch
        stop = threading.Event()
        crowd = [threading.Thread(target=_load, args=(daemon.socket_dir, stop)) for _ in range(3)]
        for one in crowd:
            one.start()
        try:
            time.sleep(0.3)
            with Mapping(fds[0], handle.size) as mapping:
                old = index.IndexReader(mapping)
                codes = [layout.Shard(0, 2, 0, 1).code()]
                key = next(iter(payloads))
                assert old.probe(key, codes).hits == 1
                os.kill(daemon.child("control"), signal.SIGKILL)
                with pytest.raises((EOFError, ConnectionResetError)):
                    client.receive()
                wait_for(lambda: old.poisoned)
                assert old.probe(key, codes).hits == 0
            daemon.wait_ready(2)
        finally:
            stop.set()
            for one in crowd:
                one.join()
    with RawClient(daemon.socket_dir) as client:
        assert client.epoch != epoch
        for key, payload in payloads.items():
            wait_for(lambda key=key: client.read(key) != common_pb2.REASON_PENDING)
            assert client.read(key) == payload
        assert client.store(os.urandom(32), b"new") == 0
    status = daemon.wait_status(lambda s: s.sessions == 1)
    assert (status.control_restarts, status.leases, status.reservations) == (1, 0, 0)
    assert status.counters["spans_recovered"] >= 40
    assert status.counters["spans_corrupt"] == 0


def _load(socket_dir: Path, stop: threading.Event) -> None:
    """Stores, reads and leaves leases open until the daemon hangs up, again and again.

    Of 2,000 keys at most (125 MiB), so that three of these never evict what a test looks for.
    """
    left = 2000
    while not stop.is_set() and left:
        try:
            with RawClient(socket_dir) as client:
                while not stop.is_set() and left:
                    left -= 1
                    key = os.urandom(32)
                    if client.store(key, key * 100) == 0:
                        client.acquire([key])
                        client.read(key)
                stop.wait()
        except (OSError, EOFError):
            time.sleep(0.02)


def test_control_killed_before_it_was_ever_ready(start_spand: Start, tmp_path: Path) -> None:
    """It has sessions from early on: what they stored does not end with it."""
    faults = Faults(tmp_path / "faults")
    with faults.during("starting"):
        daemon = start_spand(ready=False, **faults.settings)
        wait_for((daemon.socket_dir / "session.sock").exists, 30)
        with RawClient(daemon.socket_dir) as client:
            wait_for(lambda: client.store(b"k" * 32, b"bytes") == 0, 30)
        assert "ready: " not in daemon.log()
        os.kill(daemon.child("control"), signal.SIGKILL)
    daemon.wait_ready()
    with RawClient(daemon.socket_dir) as client:
        wait_for(lambda: client.read(b"k" * 32) == b"bytes", 30)
    assert daemon.status().control_restarts == 1


def test_a_crash_loop_backs_off(start_spand: Start) -> None:
    daemon = start_spand(errors=True)
    for restart in range(1, 4):
        os.kill(daemon.child("control"), signal.SIGKILL)
        daemon.wait_ready(1 + restart)
    died = daemon.log().count("a process died: killed by SIGKILL")
    assert died == 3
    assert daemon.status().control_restarts == 3


def test_a_flipped_bit_is_reported_and_never_served(spand: Daemon) -> None:
    payload = os.urandom(200_000)
    with RawClient(spand.socket_dir) as client:
        assert client.store(b"a" * 32, payload) == 0
        assert client.store(b"b" * 32, payload) == 0
        lease = client.acquire([b"a" * 32])
        spand.flip(lease.offset[0] + 123_456)
        handle, fd = client.attach_slab(0)
        with Mapping(fd, handle.size) as slab:
            sums = slab.address + handle.sums_offset + lease.offset[0] // layout.TILE_BYTES * 8
            at = slab.address + lease.offset[0]
            assert not _host.verify(at, len(payload), sums, lease.root[0])
            report = spans_pb2.ReportCorruptRequest(lease=lease.lease, entry=[0])
            assert client.call(report_corrupt=report)[0].accepted == 1
            # Out of service at once, and gone when the daemon has looked itself.
            assert client.acquire([b"a" * 32]).reason[0] != 0
        spand.wait_status(lambda s: s.counters["spans_corrupt"] == 1)
        client.release(lease.lease)
        assert client.read(b"a" * 32) == common_pb2.REASON_MISS
        assert client.read(b"b" * 32) == payload
        # It can be stored again.
        assert client.store(b"a" * 32, payload) == 0
        assert client.read(b"a" * 32) == payload


def test_a_false_report_changes_nothing(spand: Daemon) -> None:
    with RawClient(spand.socket_dir) as client:
        client.store(b"a" * 32, b"bytes")
        lease = client.acquire([b"a" * 32])
        client.call(report_corrupt={"lease": lease.lease, "entry": [0]})
        spand.wait_status(lambda s: s.counters["spans_corrupt_false"] == 1)
        assert client.read(b"a" * 32) == b"bytes"


@pytest.mark.parametrize("where", ["payload", "sums"])
def test_a_bit_flipped_before_a_restart_is_never_served(start_spand: Start, where: str) -> None:
    daemon = start_spand(errors=True, grace_ms=200)
    daemon.wait_populated()
    with RawClient(daemon.socket_dir) as client:
        assert client.store(b"a" * 32, os.urandom(100_000)) == 0
        assert client.store(b"b" * 32, b"good") == 0
        found = client.acquire([b"a" * 32])
        tile = found.offset[0] // layout.TILE_BYTES
        sums = layout.sums_offset(32 << 20) + 8 * tile
        daemon.flip(found.offset[0] + 99_999 if where == "payload" else sums)
    os.kill(daemon.child("control"), signal.SIGKILL)
    daemon.wait_ready(2)
    with RawClient(daemon.socket_dir) as client:
        wait_for(lambda: client.read(b"a" * 32) != common_pb2.REASON_PENDING)
        assert client.read(b"a" * 32) == common_pb2.REASON_MISS
        wait_for(lambda: client.read(b"b" * 32) == b"good")
    assert daemon.status().counters["spans_corrupt"] == 1


def test_a_damaged_record_is_dropped_and_counted_once(start_spand: Start) -> None:
    daemon = start_spand(errors=True)
    with RawClient(daemon.socket_dir) as client:
        wait_for(lambda: client.store(b"a" * 32, b"lost") == common_pb2.REASON_OK)
        assert client.store(b"b" * 32, b"good") == 0
    (path,) = daemon.memfds("catalog ")
    path.chmod(0o600)
    with path.open("r+b") as catalog:
        records = catalog.read(1 << 20)
        catalog.seek(records.index(b"a" * 32))
        catalog.write(b"A")
    for life, dropped in ((2, 1), (3, 0)):
        os.kill(daemon.child("control"), signal.SIGKILL)
        daemon.wait_ready(life)
        counters = daemon.status().counters
        assert (counters["spans_recovered"], counters["spans_recovered_dropped"]) == (1, dropped)
        with RawClient(daemon.socket_dir) as client:
            assert client.read(b"a" * 32) == common_pb2.REASON_MISS
            wait_for(lambda: client.read(b"b" * 32) == b"good")


def test_a_full_pool_evicts_what_nobody_leases(spand: Daemon) -> None:
    size = 1 << 20
    with RawClient(spand.socket_dir) as client:
        client.attach_staging(size)
        kept = [os.urandom(32) for _ in range(8)]
        payload = os.urandom(size)
        for key in kept:
            assert client.store(key, payload) == 0
        lease = client.acquire(kept)
        for _ in range(60):
            assert client.store(os.urandom(32), os.urandom(size)) == 0
        assert client.read(kept[0]) == payload
        # Everything leased: nothing can be stored, and serving goes on.
        leases = [lease.lease]
        reasons = []
        for _ in range(40):
            key = os.urandom(32)
            reasons.append(client.store(key, payload))
            if reasons[-1] == 0:
                leases.append(client.acquire([key]).lease)
        assert reasons[-1] == common_pb2.REASON_POOL_FULL
        assert client.read(kept[-1]) == payload
        for number in leases:
            client.release(number)
        assert client.store(os.urandom(32), payload) == 0
        too_large = client.reserve([os.urandom(32)], 64 << 20)
        assert list(too_large.reason) == [common_pb2.REASON_TOO_LARGE]
    counters = spand.status().counters
    assert counters["spans_evicted"] > 30
    assert counters["spans_reserve_pool_full"] >= 1
    assert counters["spans_reserve_too_large"] == 1


def test_staging_whose_answer_came_too_late_is_given_to_who_asks_again(spand: Daemon) -> None:
    control = spand.child("control")
    with RawClient(spand.socket_dir) as client:
        os.kill(control, signal.SIGSTOP)
        try:
            # Whoever waits for these gives up before control goes on; so they ask again.
            numbers = [client.send(attach_staging={"size": 1 << 20}) for _ in range(3)]
        finally:
            os.kill(control, signal.SIGCONT)
        answers = [client.receive() for _ in numbers]
        assert [response.id for response, _ in answers] == numbers
        assert {response.staging.size for response, _ in answers} == {1 << 20}
        client.attach_staging(1 << 20)
        assert len({os.fstat(fd).st_ino for fd in client.fds}) == 1
        assert client.store(os.urandom(32), b"bytes") == 0
        wait_for(lambda: spand.status().staging_bytes == 1 << 20)
    wait_for(lambda: spand.status().staging_bytes == 0)
