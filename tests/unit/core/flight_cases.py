"""What tests of flights in the core ask and compare."""

from __future__ import annotations

from world import World

from kmesh_spand.core import results as rs
from kmesh_spand.core.codes import Arrival, FlightCause, Standing

LANDED = rs.AwaitResult(Arrival.LANDED)
LEAD = rs.AwaitResult(Arrival.LEAD)


def ended(cause: FlightCause) -> rs.AwaitResult:
    return rs.AwaitResult(Arrival.ENDED, cause)


def join(world: World, session: int, keys: list[bytes], salt: bytes = b"") -> int:
    """Claims what another computes, and waits for it; the Await's number."""
    found = world.claim(session, keys, salt=salt)
    assert found.standing == Standing.COMPUTING
    assert world.wait(session, found) is None
    return world.request


def answer(world: World, session: int, request: int) -> rs.Result | None:
    return world.answered.get((session, request))
