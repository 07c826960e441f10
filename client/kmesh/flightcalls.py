"""Calls about flights, as procedures: see ``kmesh.calls``."""

from __future__ import annotations

from collections.abc import Sequence

from google.protobuf.message import Message

from kmesh import errors
from kmesh.calls import Procedure, Welcome, body_of, check_salt, most_keys, shard_message
from kmesh.flight import Arrival, Arrived, Claim, FlightCause, Progress, Standing
from kmesh.keys import KEY_BYTES
from kmesh.layout import Shard
from kmesh.v1 import flights_pb2

#: Causes by which a leader ends its flight.
_ENDS = (
    FlightCause.DONE,
    FlightCause.ABORTED,
    FlightCause.PREEMPTED,
    FlightCause.NOT_STORED,
)


def claim(
    limits: Welcome,
    keys: bytes,
    shards: Sequence[Shard],
    salt: bytes = b"",
    device: str = "",
    place: str = "",
) -> Procedure[Claim]:
    """Raises ConfigError for malformed arguments, else what the daemon says."""
    if not keys or len(keys) % KEY_BYTES:
        raise errors.ConfigError("keys: not a multiple of 32 bytes, or none")
    check_salt(salt)
    messages = [shard_message(shard) for shard in shards]
    # More than a message holds, and than the daemon takes, has no place in one flight.
    most = min(limits.max_batch, most_keys(limits, messages))
    request = flights_pb2.ClaimRequest(
        keys=keys[: most * KEY_BYTES], shards=messages, salt=salt, device=device, place=place
    )
    answer = body_of(flights_pb2.ClaimResponse, (yield request))
    try:
        standing = Standing(answer.standing)
    except ValueError:
        raise errors.ProtocolError(f"a claim's standing {answer.standing}") from None
    return Claim(
        standing=standing,
        flight=answer.flight,
        first=answer.first,
        covered=answer.covered,
        ahead=answer.ahead,
        shards=tuple(shards),
        place=place,
        progress=_progress(answer.progress),
    )


def progress(flight: int, place: str = "", computed: int = 0) -> Procedure[Progress | None]:
    """How far a flight is; None: there is no such flight any more."""
    answer = body_of(flights_pb2.ProgressResponse, (yield progressed(flight, computed, place)))
    return _progress(answer.progress) if answer.HasField("progress") else None


def progressed(flight: int, computed: int, place: str = "") -> Message:
    """A leader's word of how far it is."""
    return flights_pb2.ProgressRequest(flight=flight, computed=computed, place=place)


def _progress(answer: flights_pb2.FlightProgress) -> Progress:
    return Progress(
        begin=answer.begin,
        landed=answer.landed,
        computed=answer.computed,
        age_ms=answer.age_ms,
        quiet_ms=answer.quiet_ms,
        pause_ms=answer.pause_ms,
        beside=answer.beside,
    )


def await_flight(found: Claim, wait: int = 0) -> Procedure[Arrived]:
    """Returns when there is something to say; raises ConfigError for a claim without a flight."""
    if found.standing is not Standing.COMPUTING:
        raise errors.ConfigError(f"claim: {found.standing.name} is nothing to wait for")
    request = flights_pb2.AwaitRequest(
        flight=found.flight,
        first=found.first,
        covered=found.covered,
        shards=[shard_message(shard) for shard in found.shards],
        wait=wait,
        place=found.place,
    )
    answer = body_of(flights_pb2.AwaitResponse, (yield request))
    try:
        return Arrived(Arrival(answer.arrival), FlightCause(answer.cause))
    except ValueError:
        raise errors.ProtocolError(f"a flight's arrival {answer.arrival}") from None


def leave(flight: int, wait: int = 0) -> Message:
    """Ends the session's waits for a flight, or one of them; what ends so ends with LEFT."""
    return flights_pb2.LeaveRequest(flight=flight, wait=wait)


def land(flight: int, cause: FlightCause) -> Message:
    """A leader's own end of its flight."""
    if cause not in _ENDS:
        raise errors.ConfigError(f"cause: {cause.name} is not one that a leader ends by")
    return flights_pb2.LandRequest(
        flight=flight, cause=flights_pb2.FlightCause.ValueType(cause.value)
    )
