"""What makes every metric about families say something."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import ExitStack

from daemon_process import Daemon, wait_for
from household import Household

from kmesh import errors
from kmesh.families import Family
from kmesh.layout import TILE_BYTES
from kmesh.session import ReserveBatch, Role, Session
from kmesh.store import put_spans, read_span
from kmesh.v1.common_pb2 import REASON_MISS


def connect(daemon: Daemon) -> Session:
    return Session.connect(daemon.socket_dir, role=Role.TOOL, timeout=30)


def counted(daemon: Daemon, name: str) -> bool:
    return daemon.status().counters[f"spans_{name}"] > 0


def lives(daemon: Daemon, look: Callable[[Daemon], object]) -> None:
    """Recipes are made, made dense and dropped, and the worker dies at each of that."""
    household = Household()
    one, other = household.siblings
    with connect(daemon) as session:
        staging = session.staging(4 << 20)
        for spans in (household.primer, one, other):
            household.store(session, staging, spans)
        session.families.declare(household.family)
        for spans in (one, other):
            worker = daemon.child("worker")
            os.kill(worker, signal.SIGSTOP)
            household.join(session, spans)
            os.kill(worker, signal.SIGKILL)
            wait_for(lambda gone=worker: daemon.child("worker") != gone)
        wait_for(lambda: counted(daemon, "encode_failed") and counted(daemon, "encode_refused"))
        wait_for(lambda: session.families.describe("round").family.mirrors == 6)
        session.families.fork("round", one.name, "child")
        session.families.list()
        look(daemon)
        worker = daemon.child("worker")
        os.kill(worker, signal.SIGSTOP)
        session.acquire(one.keys, [household.shard], prefix=False).release()
        os.kill(worker, signal.SIGKILL)
        wait_for(lambda: counted(daemon, "densify_failed") and counted(daemon, "densified"))
        with session.acquire(other.keys, [household.shard], recipes=True, prefix=False) as lease:
            number = next(n for n in range(5) if lease.is_recipe(n))
            for base in lease.bases.values():
                daemon.flip(base.offset, base.slab)
            try:
                read_span(session, lease, number)
            except errors.CorruptionError:
                session.report_corrupt(lease, [number])
            wait_for(lambda: counted(daemon, "mirrors_dropped"))
        session.families.dissolve("round")
        for number in range(257):
            fields = (household.namespace, "bfloat16", 64, (household.shard,), bytes(32))
            session.families.declare(Family(f"family {number}", *fields))
        assert counted(daemon, "families_forgotten")
        look(daemon)


def by_processor(daemon: Daemon, look: Callable[[Daemon], object], device: str) -> None:
    """A member on a GPU of which nobody has said where it comes from."""
    household = Household()
    member = household.siblings[0]
    with connect(daemon) as session:
        staging = session.staging(4 << 20)
        for spans in (household.primer, member):
            household.store(session, staging, spans, device)
        session.families.declare(household.family)
        session.families.join("round", member.name, member.keys, household.namespace)
        session.acquire(member.keys, [household.shard], recipes=True, device=device).release()
        wait_for(lambda: daemon.status().counters["fallback_encode"] > 0)
        look(daemon)


def spoiled(daemon: Daemon, look: Callable[[Daemon], object]) -> None:
    """What a recipe was to be made of has changed in memory: it is read again, and goes."""
    household = Household()
    member = household.siblings[0]
    with connect(daemon) as session:
        staging = session.staging(4 << 20)
        for spans in (household.primer, member):
            household.store(session, staging, spans)
        with session.acquire(member.keys, [household.shard]) as lease:
            daemon.flip(lease.offset[0] + 9, lease.slab[0])
        session.families.declare(household.family)
        household.join(session, member)
        wait_for(lambda: counted(daemon, "encode_spoiled") and counted(daemon, "corrupt"))
        with session.acquire(member.keys, [household.shard], recipes=True, prefix=False) as lease:
            assert lease.reason[0] == REASON_MISS
        look(daemon)


def full(daemon: Daemon, look: Callable[[Daemon], object]) -> None:
    """No recipe finds room, and no payload, while everything is leased."""
    household = Household()
    member = household.siblings[0]
    with connect(daemon) as session, ExitStack() as leases:
        staging = session.staging(4 << 20)

        def fill() -> None:
            """Spans of one tile, as many as there is room for; all are leased."""
            while (slab := daemon.status().slabs[0]).used < slab.capacity:
                count = min(8, (slab.capacity - slab.used) // TILE_BYTES)
                keys = os.urandom(32 * count)
                fields = ([64] * count, [0] * count, [TILE_BYTES] * count)
                batch = ReserveBatch(household.namespace, household.shard, keys, *fields)
                assert (
                    put_spans(session, staging, batch, [bytes(TILE_BYTES)] * count) == [0] * count
                )
                leases.enter_context(session.acquire(keys, [household.shard]))

        household.store(session, staging, household.primer)
        household.store(session, staging, member)
        leases.enter_context(session.acquire(household.primer.keys, [household.shard]))
        held = session.acquire(member.keys, [household.shard])
        fill()
        session.families.declare(household.family)
        household.join(session, member)
        wait_for(lambda: counted(daemon, "encode_no_room"))
        held.release()
        keys, name = member.keys, "again"
        session.families.join("round", name, keys, household.namespace, recovered=member.recovered)
        wait_for(lambda: session.families.describe("round").family.mirrors > 0)
        wait_for(lambda: daemon.status().counters["spans_encodes"] > 0)
        leases.enter_context(session.acquire(keys, [household.shard], recipes=True, prefix=False))

        def refused() -> bool:
            fill()
            session.acquire(keys, [household.shard], prefix=False).release()
            return counted(daemon, "densify_no_room")

        wait_for(refused)
        look(daemon)
