"""An engine is killed in every state that it can be in: what it held is free, others go on.

``test_daemon_faults`` has what its end does to others, ``test_ledger`` the same on GPUs.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from daemon_process import ROOT, Daemon, environment, wait_for
from disks import PATIENCE, SHARD, SMALL, DiskFaults, Peer, name, payload
from doomed_engine import FLIGHT
from household import Household

from kmesh.layout import TILE_BYTES, tiles
from kmesh.session import Role, Session
from kmesh.v1 import admin_pb2, admin_pb2_grpc, flights_pb2, flights_pb2_grpc

Start = Callable[..., Daemon]
SCRIPT = Path(__file__).with_name("doomed_engine.py")


class Place:
    """A daemon with a disk: span 0 is in a file alone, and 1005 in memory."""

    def __init__(self, parent: Path) -> None:
        self.faults = DiskFaults(parent / "faults")
        settings = {**SMALL, "disk": parent / "disk", **self.faults.settings}
        self.daemon = Daemon(parent / "s", **settings)
        self.daemon.wait_populated()
        self.daemon.wait_status(lambda s: s.disk.ready)
        with Peer(self.daemon) as peer:
            peer.cool(1)


@pytest.fixture(scope="module")
def place() -> Iterator[Place]:
    parent = Path(tempfile.mkdtemp(prefix="kmesh-"))
    made = None
    try:
        made = Place(parent)
        yield made
        made.daemon.stop()
        made.daemon.check_log()
    finally:
        if made is not None:
            made.daemon.kill()
        shutil.rmtree(parent)


@contextmanager
def engine(daemon: Daemon, state: str) -> Iterator[Callable[[], None]]:
    """One that is ready; the function lets it get into its state."""
    tests = ROOT / "tests"
    path = os.pathsep.join([environment()["PYTHONPATH"], str(tests), str(tests / "ipc")])
    with subprocess.Popen(
        [
            sys.executable,
            str(SCRIPT),
            str(daemon.socket_dir),
            state,
            name(0).hex(),
            name(1005).hex(),
        ],
        env=environment(PYTHONPATH=path),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "ready\n"

            def begin() -> None:
                assert process.stdin is not None
                assert process.stdout is not None
                process.stdin.write("\n")
                process.stdin.flush()
                assert process.stdout.readline() == "there\n"

            yield begin
        finally:
            process.kill()


def held(status: admin_pb2.StatusResponse) -> dict[str, int]:
    """What sessions hold, but for the one that asks."""
    names = ("sessions", "leases", "leased_bytes", "reservations", "staging_bytes")
    found = {name: getattr(status, name) for name in names}
    return {**found, "sessions": status.sessions - 1, "waits": status.disk.waits}


def flights(daemon: Daemon) -> list[tuple[int, int]]:
    """Who waits for each flight; the number of its leader's session."""
    with daemon.rpc() as (channel, metadata):
        stub = flights_pb2_grpc.FlightsStub(channel)
        found = stub.List(flights_pb2.ListFlightsRequest(), metadata=metadata, timeout=20)
    return [(row.waiters, bool(row.leader)) for row in found.flights]


def leaked(daemon: Daemon) -> int:
    """Bytes that are used, and of no span that is listed."""
    with daemon.rpc() as (channel, metadata):
        stub = admin_pb2_grpc.AdminStub(channel)
        status = stub.Status(admin_pb2.StatusRequest(), metadata=metadata, timeout=20)
        spans = stub.List(admin_pb2.ListRequest(limit=1000), metadata=metadata, timeout=20).spans
    used = sum(slab.used for slab in status.slabs)
    return int(used) - sum(tiles(span.length) * TILE_BYTES for span in spans)


def stopped(daemon: Daemon) -> Callable[[], None]:
    """Stops the store worker; the function lets it go on."""
    worker = daemon.child("worker")
    os.kill(worker, signal.SIGSTOP)
    return lambda: os.kill(worker, signal.SIGCONT)


#: What an engine has in a state, more than its session.
HELD = {
    "staging": {"staging_bytes": 1 << 20},
    "reserved": {"staging_bytes": 1 << 20, "reservations": 2},
    "copying": {"staging_bytes": 1 << 20, "reservations": 2},
    "leased": {"leases": 1, "leased_bytes": len(payload(0))},
    "leads": {},
    "waits_for_a_flight": {},
    # With what is there already.
    "waits_for_a_fetch": {"waits": 1, "leased_bytes": len(payload(0))},
}


@pytest.mark.parametrize("state", HELD)
def test_what_a_killed_engine_held_is_free(place: Place, state: str) -> None:
    daemon, goes_on = place.daemon, lambda: None
    with Session.connect(daemon.socket_dir, role=Role.TOOL) as other:
        mine = other.claim(FLIGHT, [SHARD]).flight
        before = held(daemon.status())
        assert before == {**dict.fromkeys(before, 0), "sessions": 1}
        with engine(daemon, state) as begin:
            if state == "copying":
                goes_on = stopped(daemon)
            elif state == "waits_for_a_fetch":
                place.faults.begin("disk-slow")
                goes_on = lambda: place.faults.end("disk-slow")  # noqa: E731
            begin()
            wait_for(lambda: held(daemon.status()) == {**before, "sessions": 2, **HELD[state]})
            led = {"leads": [(0, True), (0, True)], "waits_for_a_flight": [(1, True)]}
            wait_for(lambda: flights(daemon) == led.get(state, [(0, True)]))
        goes_on()
        # Nobody has to do anything for it, and others see nothing of it.
        wait_for(lambda: held(daemon.status()) == before)
        wait_for(lambda: flights(daemon) == [(0, True)])
        wait_for(lambda: leaked(daemon) == 0)
        with other.acquire(name(1005), [SHARD]) as lease:
            assert lease.hits == 1
        other.land(mine)
        # A session that ends with it would be a leader that died, and of two nobody waits any more.
        wait_for(lambda: not flights(daemon))


@pytest.mark.parametrize("state", ["encoded", "made_dense"])
def test_what_is_made_for_a_killed_engine_is_free(start_spand: Start, state: str) -> None:
    """Recipes are made of what it stored, or a recipe is made dense as it asked for."""
    household = Household()
    daemon = start_spand(host_memory="16MiB")
    daemon.wait_populated()
    with Session.connect(daemon.socket_dir, role=Role.TOOL) as other:
        staging = other.staging(4 << 20)
        household.store(other, staging, household.primer)
        other.families.declare(household.family)
        for sibling in household.siblings:
            household.store(other, staging, sibling)
        if state == "made_dense":
            for sibling in household.siblings:
                household.join(other, sibling)
            daemon.wait_status(lambda s: s.mirrors == 6, PATIENCE)
        before = held(daemon.status())
        with engine(daemon, state) as begin:
            # The job is on its way, and does not end before the engine has.
            goes_on = stopped(daemon)
            begin()
            wait_for(lambda: held(daemon.status())["sessions"] == 2)
        wait_for(lambda: held(daemon.status())["sessions"] == 1)
        goes_on()
        # It ends by itself, and what it had in hand is nobody's.
        done = {"encoded": ("spans_encodes", 6), "made_dense": ("spans_densified", 3)}[state]
        daemon.wait_status(lambda s: s.counters[done[0]] == done[1], PATIENCE)
        wait_for(lambda: held(daemon.status()) == before)
        wait_for(lambda: leaked(daemon) == 0)
    with daemon.rpc() as (channel, metadata):
        operator, request = admin_pb2_grpc.AdminStub(channel), admin_pb2.EvictRequest(all=True)

        def empty() -> bool:
            # What a recipe's last step still has in hand is passed over.
            operator.Evict(request, metadata=metadata, timeout=20)
            status = daemon.status()
            return not status.spans and not any(slab.used for slab in status.slabs)

        wait_for(empty)
