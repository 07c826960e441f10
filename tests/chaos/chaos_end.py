"""The end of a chaos run: faults are over, and everything must be as if there had been none."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import grpc
from chaos_cast import SLACK
from chaos_house import RECOVERY, House
from chaos_watch import (
    LOAD,
    Broken,
    admin,
    check_empty,
    check_rest,
    check_spans,
    check_status,
    list_all,
    require,
)

from kmesh.layout import tiles
from kmesh.v1 import admin_pb2

if TYPE_CHECKING:
    from chaos_storm import Storm


def finish(storm: Storm) -> None:
    """All clients go, and what they leave is looked at: nothing held, every byte right, no leak."""
    storm.calm()
    house = storm.house
    house.troubled = time.monotonic()
    storm.events.add("calm")
    storm.wait(lambda: house.look(False) is not None, RECOVERY, "an answer")
    for client in storm.clients:
        # A client that is started at this moment would not know the signal yet.
        storm.wait(client.began, 60, f"the beginning of {client.name}")
        if client.pid:
            os.kill(client.pid, signal.SIGTERM)
    assert storm.rude is not None
    storm.rude.end()
    for client in storm.clients:
        storm.wait(lambda client=client: not client.pid, 60, f"the end of {client.name}")
    storm.wait(lambda: storm.rude and storm.rude.process.poll() is not None, 90, "the rude client")
    storm.turn(looking=False)
    storm.events.add("clients gone")
    # The driver of a GPU takes its time. What load does to readiness ends with the audit's stores.
    storm.wait(lambda: _serves(house), RECOVERY, "serving")
    _until(storm, lambda call: _at_rest(storm, call), "nothing is held")
    for at, uid in enumerate(storm.uids()):
        audit = storm.client(-1 - at, uid)
        audit.start("--audit")
        storm.wait(lambda audit=audit: not audit.pid, 120, "the audit")
        storm.turn(looking=False)
    storm.events.add("audited")
    storm.wait(lambda: house.look(False) == set(), RECOVERY, "readiness")
    _until(storm, lambda call: _exact(storm, call), "the ledger is exact")
    house.status()
    _until(storm, lambda call: _evict_all(storm, call), "everything was evicted")
    house.status()
    storm.wait(lambda: not house.grown_descriptors(), SLACK, _Grown(storm))
    family = house.family()
    house.signal(signal.SIGTERM)
    daemon = house.daemon
    assert daemon is not None
    storm.wait(lambda: daemon.process.poll() is not None, SLACK, "the daemon's end")
    require(daemon.process.returncode == 0, f"the daemon ended with {daemon.process.returncode}")
    for handle in family:
        os.close(handle)
    require(not list(house.sockets.glob("*.sock")), "it left its sockets")
    house.ended()
    storm.events.add("end")


def _serves(house: House) -> bool:
    why = house.look(False)
    return why is not None and why <= LOAD


class _Grown:
    """Says which descriptors are too many, when that is asked for."""

    def __init__(self, storm: Storm) -> None:
        self._storm = storm

    def __str__(self) -> str:
        return f"descriptors as at first: {self._storm.house.grown_descriptors()}"

    __format__ = lambda self, _: str(self)  # noqa: E731


Call = Callable[[str, object], object]


def _status(call: Call) -> admin_pb2.StatusResponse:
    status = call("Status", admin_pb2.StatusRequest())
    assert isinstance(status, admin_pb2.StatusResponse)
    check_status(status)
    return status


def _at_rest(storm: Storm, call: Call) -> None:
    status = _status(call)
    check_rest(status)
    storm.ledger |= {
        "leases": status.leases,
        "reservations": status.reservations,
        "staging_bytes": status.staging_bytes,
        "leased_bytes": status.leased_bytes,
    }


def _exact(storm: Storm, call: Call) -> None:
    status, spans = _status(call), list_all(call)
    check_rest(status)
    check_spans(status, spans)
    storm.ledger |= {
        "spans": status.spans,
        "span_bytes": status.span_bytes,
        "used_bytes": sum(slab.used for slab in status.slabs),
        "listed_spans": len(spans),
        "listed_bytes": sum(span.length for span in spans),
        "listed_tiles": sum(tiles(span.length) for span in spans),
    }


def _evict_all(storm: Storm, call: Call) -> None:
    call("Evict", admin_pb2.EvictRequest(all=True))
    status = _status(call)
    check_empty(status)
    storm.ledger["used_bytes_of_nothing"] = sum(slab.used for slab in status.slabs)


def _until(storm: Storm, check: Callable[[Call], None], what: str) -> None:
    """What must hold soon; says what did not if it never does."""
    last: list[Exception] = [Broken(what)]

    def holds() -> bool:
        try:
            with admin(storm.house.sockets) as call:
                check(call)
        except (Broken, OSError, EOFError, grpc.RpcError) as failed:
            last[:] = [failed]
            return False
        return True

    try:
        storm.wait(holds, SLACK, what)
    except Broken as never:
        raise Broken(f"{never}: {last[0]}") from None
