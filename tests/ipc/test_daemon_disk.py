"""The tier below memory, in real daemons on real files."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from daemon_process import COMMAND, ROOT, Daemon, environment, wait_for
from disks import (
    LENGTH,
    NAMESPACE,
    PATIENCE,
    SHARD,
    SMALL,
    DiskFaults,
    Peer,
    files,
    name,
    payload,
    written,
)

from kmesh.session import Role, Session
from kmesh.v1 import flights_pb2, flights_pb2_grpc
from kmesh_spand.diskdir import MARK

Start = Callable[..., Daemon]


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    return tmp_path / "disk"


@pytest.fixture
def spand(start_spand: Start, disk: Path) -> Daemon:
    return start(start_spand, disk)


def start(start_spand: Start, disk: Path, **more: object) -> Daemon:
    daemon = start_spand(**{**SMALL, "disk": disk, "grace_ms": 1000, **more})
    daemon.wait_populated()
    daemon.wait_status(lambda s: s.disk.ready, PATIENCE)
    return daemon


def test_memory_forgets_and_the_disk_does_not(spand: Daemon, disk: Path) -> None:
    with Peer(spand) as peer:
        peer.cool(10)
        assert spand.status().counters["spans_evicted"] == 10
        assert all(map(peer.indexed, range(10)))
        # Without a wait the answer comes at once, and the span soon.
        with peer.session.acquire(name(9), [SHARD]) as lease:
            assert list(lease.reason) == [2]
        wait_for(lambda: peer.fetch([9], wait=0) == [payload(9)])
        assert peer.fetch(range(5)) == [payload(number) for number in range(5)]
        counters = spand.status().counters
        assert counters["disk_fetched"] == counters["disk_fetch_leads"] == 6
        assert counters["disk_fetched_bytes"] == 6 * LENGTH
        assert counters["disk_corrupt"] == 0
    for path in files(disk):
        assert path.stat().st_mode & 0o777 == 0o600
        assert path.parent.stat().st_mode & 0o777 == 0o700
        assert not any(name(number).hex()[:8] in path.name for number in range(22))
    assert disk.stat().st_mode & 0o777 == 0o700
    status = spand.status()
    assert status.disk.used == sum(path.stat().st_size for path in files(disk))
    assert status.disk.used <= status.disk.capacity


_HERD = """
import sys, threading
from disks import PATIENCE, SHARD, name, payload
from kmesh.session import Role, Session
from kmesh.store import read_span
sessions = [Session.connect(sys.argv[1], role=Role.TOOL) for _ in range(16)]
print("there", flush=True)
sys.stdin.readline()
leases = [
    s.acquire_async(name(0), [SHARD], wait=40.0, timeout=PATIENCE) for s in sessions
]
print("asked", flush=True)
for session, lease in zip(sessions, leases):
    with lease.result() as held:
        assert read_span(session, held, 0) == payload(0)
print("served", flush=True)
"""


def test_64_clients_and_one_span_on_disk_are_one_read(
    start_spand: Start, disk: Path, tmp_path: Path
) -> None:
    """Four processes with sixteen sessions each."""
    faults = DiskFaults(tmp_path / "faults")
    daemon = start(start_spand, disk, **faults.settings)
    tests = ROOT / "tests"
    path = os.pathsep.join([environment()["PYTHONPATH"], str(tests), str(tests / "ipc")])
    with Peer(daemon) as peer:
        peer.cool(1)
        before = daemon.status().counters
        clients = [
            subprocess.Popen(
                [sys.executable, "-c", _HERD, str(daemon.socket_dir)],
                env=environment(PYTHONPATH=path),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for _ in range(4)
        ]
        try:
            faults.begin("disk-slow")
            for client in clients:
                assert client.stdout is not None
                assert client.stdout.readline() == "there\n"
            for client in clients:
                assert client.stdin is not None
                client.stdin.write("\n")
                client.stdin.flush()
            # All of them wait before the one read goes on.
            daemon.wait_status(lambda s: s.disk.waits == 64, PATIENCE)
            with daemon.rpc() as (channel, metadata):
                stub = flights_pb2_grpc.FlightsStub(channel)
                (row,) = stub.List(
                    flights_pb2.ListFlightsRequest(), metadata=metadata, timeout=20
                ).fetches
            assert (row.state, row.waiters, row.bytes) == ("reading", 64, LENGTH)
            faults.end("disk-slow")
            for client in clients:
                out, _ = client.communicate(timeout=PATIENCE)
                assert out == "asked\nserved\n"
        finally:
            for client in clients:
                client.kill()
                client.wait()
                for end in (client.stdin, client.stdout):
                    assert end is not None
                    end.close()
        after = daemon.status().counters
        changed = {
            what: after[f"disk_fetch{what}"] - before[f"disk_fetch{what}"]
            for what in ("ed", "ed_bytes", "_leads", "_joins", "_shared", "_shared_bytes")
        }
        assert changed == {
            "ed": 1,
            "ed_bytes": LENGTH,
            "_leads": 1,
            "_joins": 63,
            "_shared": 63,
            "_shared_bytes": 63 * LENGTH,
        }


def test_the_one_that_asked_first_dies_and_the_others_are_served(
    start_spand: Start, disk: Path, tmp_path: Path
) -> None:
    faults = DiskFaults(tmp_path / "faults")
    daemon = start(start_spand, disk, disk_threads=1, **faults.settings)
    with Peer(daemon) as peer, Peer(daemon) as other:
        peer.cool(4)
        faults.begin("disk-slow")
        first = Session.connect(str(daemon.socket_dir), role=Role.TOOL)
        keys = b"".join(map(name, range(4)))
        doomed = first.acquire_async(keys, [SHARD], wait=40.0, timeout=PATIENCE)
        daemon.wait_status(lambda s: s.disk.waits == 1, PATIENCE)
        with ThreadPoolExecutor(1) as pool:
            served = pool.submit(other.fetch, range(4))
            daemon.wait_status(lambda s: s.disk.waits == 2, PATIENCE)
            first.close()
            daemon.wait_status(lambda s: s.disk.waits == 1, PATIENCE)
            faults.end("disk-slow")
            assert served.result() == [payload(number) for number in range(4)]
        assert doomed.exception() is not None
        counters = daemon.status().counters
        assert counters["disk_fetched"] == counters["disk_fetch_promotions"] == 4
        assert daemon.status().leases == 0


def test_who_does_not_wait_for_ever_gets_what_is_there(
    start_spand: Start, disk: Path, tmp_path: Path
) -> None:
    faults = DiskFaults(tmp_path / "faults")
    daemon = start(start_spand, disk, **faults.settings)
    with Peer(daemon) as peer:
        peer.cool(1)
        faults.begin("disk-slow")
        assert peer.fetch([1011, 0], wait=0.2) == [payload(1011), None]
        # A wait that is longer than the call's own time ends before that.
        with peer.session.acquire(name(0), [SHARD], wait=900.0, timeout=2.0) as lease:
            assert list(lease.reason) == [2]
        faults.end("disk-slow")
        wait_for(lambda: peer.fetch([0]) == [payload(0)])
        assert daemon.status().counters["disk_hurried"] == 2


def test_a_disk_that_hangs_costs_a_few_requests_their_time_and_no_more(
    start_spand: Start, disk: Path, tmp_path: Path
) -> None:
    faults = DiskFaults(tmp_path / "faults")
    daemon = start(start_spand, disk, **faults.settings)
    daemon.errors = True
    with Peer(daemon) as peer:
        peer.cool(3)
        faults.begin("disk-slow")
        for _ in range(3):
            assert peer.fetch([0], wait=0.7) == [None]
        warnings = {one.name: one.text for one in daemon.status().warnings}
        assert "has been left alone" in warnings["disk"]
        began = time.monotonic()
        for number in range(3):
            assert peer.fetch([number, 1011], wait=30.0) == [None, payload(1011)]
        # One of them may be the one that tries.
        assert time.monotonic() - began < 30.0
        faults.end("disk-slow")
        daemon.wait_status(lambda s: not s.disk.away_ms, PATIENCE)
        wait_for(lambda: peer.fetch([0]) == [payload(0)])
        assert peer.fetch([1, 2]) == [payload(1), payload(2)]
    counters = daemon.status().counters
    assert counters["disk_outages"] == 1
    assert counters["disk_outage_misses"] >= 2
    log = daemon.log()
    assert log.count("the disk tier does not answer") == 1
    assert log.count("the disk tier answers again") == 1


def test_namespaces_are_listed_of_which_only_files_are_left(start_spand: Start, disk: Path) -> None:
    first = start(start_spand, disk)
    with Peer(first) as peer:
        peer.store(range(4))
        written(first, 4)
    first.stop()
    daemon = start(start_spand, disk)
    done = subprocess.run(
        [sys.executable, "-m", "kmesh.cli", "ls", "--namespaces", "--json"],
        env=environment(KMESH_SOCKET_DIR=str(daemon.socket_dir)),
        capture_output=True,
        text=True,
        check=True,
    )
    (space,) = json.loads(done.stdout)["namespaces"]
    assert space == {
        "digest": NAMESPACE.hex(),
        "spans": 0,
        "bytes": 0,
        "disk_spans": 4,
        "disk_bytes": 4 * LENGTH,
        "fields": {},
    }


def test_control_and_worker_die_and_the_files_are_found_again(spand: Daemon) -> None:
    spand.errors = True
    with Peer(spand) as peer:
        peer.cool(5)
        os.kill(spand.child("worker"), signal.SIGKILL)
        spand.wait_status(lambda s: s.worker_restarts == 1 and s.disk.ready, PATIENCE)
        assert peer.fetch(range(2)) == [payload(0), payload(1)]
        os.kill(spand.child("control"), signal.SIGKILL)
        wait_for(lambda: peer.session.closed)
    spand.wait_ready(2)
    written(spand, 17)
    with Peer(spand) as peer:
        assert all(map(peer.indexed, range(5)))
        wait_for(lambda: peer.fetch(range(5)) == [payload(n) for n in range(5)], PATIENCE)
    assert spand.status().counters["disk_found"] == 17


def test_a_daemon_after_a_reboot_serves_the_same_bytes(start_spand: Start, disk: Path) -> None:
    first = start(start_spand, disk)
    with Peer(first) as peer:
        peer.store(range(10))
        # What is not written yet is written before it ends.
        assert first.stop() == 0
    assert len(files(disk)) == 10
    second = start(start_spand, disk)
    written(second, 10)
    with Peer(second) as peer:
        assert second.status().spans == 0
        assert peer.fetch(range(10)) == [payload(number) for number in range(10)]


def test_a_daemon_that_is_killed_leaves_whole_files(start_spand: Start, disk: Path) -> None:
    first = start(start_spand, disk)
    with Peer(first) as peer:
        peer.store(range(12))
    first.kill()
    second = start(start_spand, disk)
    kept = len(files(disk))
    written(second, kept)
    assert not list(disk.glob("??/*.new"))
    with Peer(second) as peer:
        found = peer.fetch(range(12))
        assert sum(one is not None for one in found) == kept
        assert all(one in (None, payload(number)) for number, one in enumerate(found))


def test_damaged_files_are_misses_and_removed(start_spand: Start, disk: Path) -> None:
    first = start(start_spand, disk)
    with Peer(first) as peer:
        peer.cool(6)
    assert first.stop() == 0
    by_content = {path.read_bytes()[LENGTH // 2 : LENGTH // 2 + 64]: path for path in files(disk)}

    def of(number: int) -> Path:
        part = payload(number)
        return next(path for key, path in by_content.items() if key in part)

    # Damage that a scan sees, and damage that only reading finds.
    whole = of(0).read_bytes()
    of(0).write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
    with of(1).open("r+b") as file:
        file.truncate(of(1).stat().st_size - 4096)
    data = bytearray(of(2).read_bytes())
    data[LENGTH // 2] ^= 64
    of(2).write_bytes(data)
    shutil.copyfile(of(5), of(3))
    second = start(start_spand, disk)
    second.errors = True
    status = written(second, 15)
    assert status.counters["disk_removed"] == 3
    with Peer(second) as peer:
        assert [peer.indexed(number) for number in range(6)] == [False] * 2 + [
            True,
            False,
            True,
            True,
        ]
        found = peer.fetch(range(6))
        assert found == [None, None, None, None, payload(4), payload(5)]
        assert second.status().counters["disk_corrupt"] == 1
        wait_for(lambda: len(files(disk)) == 14)
        # It can be stored again.
        peer.store([2])
        written(second, 15)


def test_a_disk_that_gives_errors_costs_nothing_but_its_use(
    start_spand: Start, disk: Path, tmp_path: Path
) -> None:
    faults = DiskFaults(tmp_path / "faults")
    daemon = start(start_spand, disk, errors=True, **faults.settings)
    with Peer(daemon) as peer:
        peer.cool(3)
        faults.begin("disk-read")
        assert peer.fetch([0]) == [None]
        counters = daemon.status().counters
        assert counters["disk_fetch_failed"] == 1
        # Left alone for a while, and then as good as before.
        faults.end("disk-read")
        wait_for(lambda: peer.indexed(0))
        assert peer.fetch([0]) == [payload(0)]
        faults.begin("disk-write")
        peer.store([7])
        status = daemon.wait_status(lambda s: s.counters["disk_spill_failed"] == 1, PATIENCE)
        assert [condition.name for condition in status.warnings if condition.name == "disk"]
        assert not status.not_ready
        faults.end("disk-write")
        peer.store([8])
        written(daemon, 16)
        assert not [c for c in daemon.status().warnings if c.name == "disk"]
        assert not list(disk.glob("??/*.new"))


_TINY = """
set -e
mount -t tmpfs -o size=2m,mode=0700 none "$DISK"
exec "$@"
"""


def _may_mount() -> bool:
    if os.geteuid() != 0:
        return False
    done = subprocess.run(
        ["unshare", "--mount", "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True
    )
    return done.returncode == 0


@pytest.mark.skipif(not _may_mount(), reason="may not mount anything")
def test_a_file_system_that_fills_up_keeps_what_fits(start_spand: Start, disk: Path) -> None:
    """It has 2 MiB, of the 64 that the daemon was told."""
    disk.mkdir(mode=0o700)
    command = ("unshare", "--mount", "sh", "-c", _TINY, "sh", sys.executable, "-m", "kmesh_spand")
    daemon = start(start_spand, disk, errors=True, command=command, env={"DISK": str(disk)})
    with Peer(daemon) as peer:
        peer.store(range(9))
        status = daemon.wait_status(lambda s: s.counters["disk_full"], PATIENCE)
        assert status.disk.spans <= 6
        # It goes on with what there is, when it has waited a little.
        peer.store(range(9, 20))
        wait_for(lambda: daemon.status().counters["disk_spilled"] > 6, PATIENCE)
        there = [number for number in range(20) if peer.indexed(number)]
        found = dict(zip(there, peer.fetch(there), strict=True))
        assert all(one in (None, payload(number)) for number, one in found.items())
        assert not daemon.status().not_ready


def test_an_operator_evicts_files_too(spand: Daemon, disk: Path) -> None:
    with Peer(spand) as peer:
        peer.cool(3)
        kmesh = [sys.executable, "-m", "kmesh.cli", "--socket-dir", str(spand.socket_dir)]
        done = subprocess.run(
            [*kmesh, "evict", "--all", "--yes", "--json"],
            env=environment(),
            capture_output=True,
            text=True,
            check=True,
        )
        assert '"disk_spans": 15' in done.stdout
        wait_for(lambda: not files(disk))
        assert peer.fetch(range(3)) == [None] * 3
        assert not any(map(peer.indexed, range(3)))


def test_a_directory_that_is_not_for_us_is_refused(start_spand: Start, disk: Path) -> None:
    disk.mkdir()
    (disk / "mine.txt").write_text("a file")
    daemon = start_spand(**SMALL, disk=disk, ready=False, errors=True)
    assert daemon.process.wait(PATIENCE) == 2
    last = daemon.log().strip().splitlines()[-1]
    assert f"disk: {disk}: has other files in it, such as mine.txt" in last
    assert (disk / "mine.txt").read_text() == "a file"


def test_a_directory_that_nobody_can_write_is_refused(start_spand: Start) -> None:
    """Not even root can make a directory there."""
    daemon = start_spand(**SMALL, disk="/proc/kmesh", ready=False, errors=True)
    assert daemon.process.wait(PATIENCE) == 2
    assert "disk: /proc/kmesh: " in daemon.log().strip().splitlines()[-1]


#: Waits for a shorter time until whoever has a directory has let go of it.
_IMPATIENT = """
import sys
from kmesh_spand import diskdir
from kmesh_spand.__main__ import main
diskdir._PATIENCE_SECONDS = 0.5
sys.exit(main())
"""


def test_two_daemons_do_not_share_a_directory(spand: Daemon, disk: Path, tmp_path: Path) -> None:
    command = (sys.executable, "-c", _IMPATIENT)
    settings = {"disk": disk, "disk_bytes": "1MiB", "command": command}
    other = Daemon(tmp_path / "other", **settings, ready=False, errors=True)
    try:
        assert other.process.wait(PATIENCE) == 2
        assert f"disk: {disk}: another daemon uses it" in other.log()
    finally:
        other.kill()


def test_a_daemon_that_takes_over_has_the_directory_too(start_spand: Start, disk: Path) -> None:
    old = start(start_spand, disk)
    with Peer(old) as peer:
        peer.cool(4)
    command = (*COMMAND, "--upgrade")
    new = start_spand(**{**SMALL, "disk": disk, "grace_ms": 1000, "command": command})
    assert old.process.wait(PATIENCE) == 0
    new.wait_populated()
    written(new, 16)
    with Peer(new) as peer:
        # At first memory of the daemon before is not given to others.
        wait_for(lambda: peer.fetch(range(4)) == [payload(n) for n in range(4)], PATIENCE)
        peer.store([50])
        written(new, 17)


#: Stops as it is to begin: the other daemon has let go of memory and directory by then.
_STOPS = """
import os, signal, sys
from kmesh_spand.life import Life
from kmesh_spand.__main__ import main
Life.begin = lambda *_: os.kill(os.getpid(), signal.SIGSTOP)
sys.exit(main())
"""


def test_a_directory_that_went_to_another_is_left_alone_until_it_is_back(
    start_spand: Start, disk: Path
) -> None:
    old = start(start_spand, disk, errors=True, command=(sys.executable, "-c", _IMPATIENT))
    with Peer(old) as peer:
        peer.cool(2)
    settings = {**SMALL, "disk": disk, "command": (sys.executable, "-c", _STOPS, "--upgrade")}
    new = start_spand(**settings, ready=False, errors=True)
    lock = os.open(disk / MARK, os.O_RDONLY)
    wait_for(lambda: taken(lock), PATIENCE)
    new.kill()
    old.wait_ready(2)
    assert f"disk: {disk}: another daemon uses it; going on without" in old.log()
    before = files(disk)
    with Peer(old) as peer:
        # Memory is served as ever; nothing is read from there, and nothing written. At first what
        # was in memory before is not given to others.
        wait_for(lambda: peer.put(60) == 0, PATIENCE)
        text = "nothing is written to disk: another daemon uses its directory"
        wait_for(lambda: text in [warning.text for warning in old.status().warnings], PATIENCE)
        assert files(disk) == before
        fcntl.flock(lock, fcntl.LOCK_UN)
        os.close(lock)
        wait_for(lambda: "the disk tier's directory is ours again" in old.log(), PATIENCE)
    # What was stored meanwhile is written now.
    written(old, 15)
    with Peer(old) as peer:
        wait_for(lambda: peer.fetch(range(2)) == [payload(0), payload(1)], PATIENCE)
        peer.store([61])
        written(old, 16)


def taken(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def test_a_daemon_that_can_not_have_the_directory_takes_nothing_over(
    start_spand: Start, disk: Path, tmp_path: Path
) -> None:
    old = start(start_spand, disk, errors=True)
    with Peer(old) as peer:
        peer.cool(2)
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "mine.txt").touch()
    new = start_spand(
        **{**SMALL, "disk": tmp_path / "used", "command": (*COMMAND, "--upgrade")},
        ready=False,
        errors=True,
    )
    assert new.process.wait(PATIENCE) == 2
    old.wait_ready(2)
    written(old, 14)
    with Peer(old) as peer:
        wait_for(lambda: peer.fetch(range(2)) == [payload(0), payload(1)], PATIENCE)
        peer.store([60])
        written(old, 15)
