"""A life of two daemons on one directory in which everything happens to the disk."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from daemon_process import Daemon, wait_for
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

from kmesh.session import ReserveBatch, Role, Session
from kmesh.store import put_spans
from kmesh.v1 import admin_pb2, admin_pb2_grpc

Look = Callable[[Daemon], object]


def everything(base: Path, look: Look) -> None:
    """``look`` is called whenever something is to be seen that passes."""
    disk, faults = base / "disk", DiskFaults(base / "faults")
    quota = f"{os.getuid()}=6MiB"
    settings = {**SMALL, **faults.settings, "disk": disk, "disk_threads": 1}
    daemon = Daemon(base / "s", errors=True, disk_tenants=quota, **settings)
    try:
        daemon.wait_populated()
        _first_life(daemon, faults, look)
        daemon.stop()
    finally:
        daemon.kill()
    _damage(disk)
    again = Daemon(base / "s", errors=True, disk_tenants=f"{os.getuid()}=320000", **settings)
    try:
        again.wait_populated()
        _second_life(again, disk)
        look(again)
        again.stop()
    finally:
        again.kill()


def _first_life(daemon: Daemon, faults: DiskFaults, look: Look) -> None:
    with Peer(daemon) as peer:
        peer.cool(6)
        _fetches(daemon, peer, faults, look)
        _no_room(daemon, peer)
        faults.begin("disk-write-slow")
        peer.store(range(2000, 2016))
        daemon.wait_status(lambda s: s.disk.writing == 2 and s.disk.queued, PATIENCE)
        look(daemon)
        faults.end("disk-write-slow")
        daemon.wait_status(lambda s: not (s.disk.writing or s.disk.queued), PATIENCE)
        faults.begin("disk-full")
        peer.store([3000])
        daemon.wait_status(lambda s: s.disk.failing_ms, PATIENCE)
        look(daemon)
        faults.end("disk-full")
        peer.store([3001])
        daemon.wait_status(
            lambda s: not (s.disk.failing_ms or s.disk.queued or s.disk.reading or s.disk.wanted),
            PATIENCE,
        )
        faults.begin("disk-unlink")
        with daemon.rpc() as (channel, metadata):
            stub = admin_pb2_grpc.AdminStub(channel)
            stub.Evict(admin_pb2.EvictRequest(all=True), metadata=metadata, timeout=30)
        daemon.wait_status(lambda s: s.counters["disk_unlink_failed"], PATIENCE)
        look(daemon)
        faults.end("disk-unlink")
        peer.store([1, 2])
        daemon.wait_status(lambda s: s.disk.spans == 2, PATIENCE)


def _fetches(daemon: Daemon, peer: Peer, faults: DiskFaults, look: Look) -> None:
    """One asks first and dies, one waits, one does not wait for long."""
    faults.begin("disk-slow")
    keys = b"".join(map(name, range(4)))
    first = Session.connect(str(daemon.socket_dir), role=Role.TOOL)
    lost = first.acquire_async(keys, [SHARD], wait=40.0, timeout=PATIENCE)
    daemon.wait_status(lambda s: s.disk.reading == 2 and s.disk.waits == 1, PATIENCE)
    with Peer(daemon) as other:
        waits = other.session.acquire_async(keys, [SHARD], wait=40.0, timeout=PATIENCE)
        daemon.wait_status(lambda s: s.disk.waits == 2, PATIENCE)
        look(daemon)
        assert peer.fetch(range(4), wait=0.1) == [None] * 4
        first.close()
        daemon.wait_status(lambda s: s.disk.waits == 1, PATIENCE)
        faults.end("disk-slow")
        with waits.result() as lease:
            assert lease.hits == 4
    assert lost.exception() is not None
    _outage(daemon, peer, faults, look)
    faults.begin("disk-read")
    assert peer.fetch([4]) == [None]
    look(daemon)
    faults.end("disk-read")


def _outage(daemon: Daemon, peer: Peer, faults: DiskFaults, look: Look) -> None:
    """It hangs for so long that nobody waits for it any more, and comes back."""
    faults.begin("disk-slow")
    wait_for(lambda: peer.fetch([5], wait=0.6) == [None] and daemon.status().disk.away_ms, PATIENCE)
    assert peer.fetch([5]) == [None]
    look(daemon)
    faults.end("disk-slow")
    daemon.wait_status(lambda s: not (s.disk.away_ms or s.disk.reading), PATIENCE)


def _no_room(daemon: Daemon, peer: Peer) -> None:
    """Memory is leased, all of it, and somebody wants what is on disk."""
    numbers = [*range(6), *range(1000, 1012)]
    keys = b"".join(map(name, numbers))

    def tried() -> bool:
        with peer.session.acquire(keys, [SHARD], prefix=False):
            assert peer.fetch([5], wait=10.0) in ([None], [payload(5)])
        return bool(daemon.status().counters["disk_fetch_no_room"])

    wait_for(tried, PATIENCE)


def _damage(disk: Path) -> None:
    """One file is cut short, and in the one that was used longest ago a bit is flipped."""
    there = files(disk)
    os.truncate(there[0], 4096)
    os.utime(there[0])
    for at, path in enumerate(there[1:]):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 16
        path.write_bytes(data)
        os.utime(path, (at, at))


def _second_life(daemon: Daemon, disk: Path) -> None:
    """Its quota has room for one file, and for no longer span."""
    written(daemon, 1)
    with Peer(daemon) as peer:
        # Those that could not be removed were found again: it may be any.
        stored = (*range(6), *range(1000, 1012), *range(2000, 2016), *range(3000, 3002))
        (number,) = [n for n in stored if peer.indexed(n)]
        assert peer.fetch([number]) == [None]
        long = LENGTH + 50_000
        with Session.connect(str(daemon.socket_dir), role=Role.TOOL) as session:
            batch = ReserveBatch(NAMESPACE, SHARD, name(9000), [64], [0], [long])
            assert put_spans(session, session.staging(long), batch, [bytes(long)]) == [0]
        daemon.wait_status(lambda s: s.counters["disk_spill_refused"], PATIENCE)
        wait_for(lambda: not files(disk))
