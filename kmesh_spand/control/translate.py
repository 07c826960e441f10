"""Messages of ``kmesh.v1`` to events of the core, and its results back to messages.

The core checks batches; only what an event cannot even express is refused here.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import asdict

from google.protobuf.message import Message

from kmesh import _host, errors
from kmesh.layout import Shard
from kmesh.v1 import common_pb2, families_pb2, flights_pb2, sessions_pb2, spans_pb2
from kmesh_spand.control import families
from kmesh_spand.control.limits import MAX_BATCH
from kmesh_spand.core import events, requests, results

#: Name in ``kmesh.v1.Request`` of each request but Hello.
NAMES: dict[type[Message], str] = {
    sessions_pb2.AttachIndex: "attach_index",
    sessions_pb2.AttachSlab: "attach_slab",
    sessions_pb2.AttachStaging: "attach_staging",
    sessions_pb2.Ping: "ping",
    sessions_pb2.ExportSpan: "export_span",
    spans_pb2.AcquireRequest: "acquire",
    spans_pb2.ReleaseRequest: "release",
    spans_pb2.ReserveRequest: "reserve",
    spans_pb2.CommitRequest: "commit",
    spans_pb2.AbortRequest: "abort",
    spans_pb2.ReportCorruptRequest: "report_corrupt",
    flights_pb2.ClaimRequest: "claim",
    flights_pb2.AwaitRequest: "await_flight",
    flights_pb2.LeaveRequest: "leave",
    flights_pb2.LandRequest: "land",
    flights_pb2.ProgressRequest: "progress",
    families_pb2.DeclareFamilyRequest: "declare_family",
    families_pb2.JoinFamilyRequest: "join_family",
    families_pb2.ForkMemberRequest: "fork_member",
    families_pb2.DissolveFamilyRequest: "dissolve_family",
    families_pb2.DescribeFamilyRequest: "describe_family",
    families_pb2.ListFamiliesRequest: "list_families",
}


@functools.lru_cache(1024)
def _code(layer_begin: int, layer_end: int, head_begin: int, head_end: int) -> int:
    return Shard(layer_begin, layer_end, head_begin, head_end).code()


def shard_code(shard: common_pb2.Shard, field: str) -> int:
    """The code of a shard. InvalidArgument names ``field`` if it is none."""
    try:
        return _code(shard.layer_begin, shard.layer_end, shard.head_begin, shard.head_end)
    except ValueError as failed:
        raise errors.InvalidArgument(str(failed), field=field) from None


def _codes(shards: Sequence[common_pb2.Shard], field: str) -> list[int]:
    if len(shards) > MAX_BATCH:
        # Here already: the core would see as many objects first.
        raise errors.TooLarge(
            f"{len(shards)} entries, at most {MAX_BATCH} are allowed", field=field
        )
    return [shard_code(shard, f"{field}[{i}]") for i, shard in enumerate(shards)]


def to_event(
    session: int, request: int, body: Message, staging_size: int, tier: int = 0
) -> events.Event:
    """The event that a span request is.

    Args:
        tier: the core's, for the device that Acquire, Reserve or Claim names.

    Raises:
        InvalidArgument: a shard is none; ``field`` names it.
        TooLarge: there are more shards than entries in a batch.
    """
    match body:
        case spans_pb2.AcquireRequest():
            shards = _codes(body.shards, "acquire.shards")
            return requests.Acquire(
                session,
                request,
                body.keys,
                shards,
                body.prefix,
                body.salt,
                tier,
                body.recipes,
                body.positions,
                bool(body.wait_ms),
            )
        case spans_pb2.ReleaseRequest():
            return requests.Release(session, request, tuple(body.leases))
        case spans_pb2.ReserveRequest():
            return requests.Reserve(
                session,
                request,
                body.namespace,
                shard_code(body.shard, "reserve.shard"),
                body.keys,
                tuple(body.tokens),
                tuple(body.start),
                tuple(body.length),
                body.sub_keys,
                body.salt,
                tier,
            )
        case spans_pb2.CommitRequest():
            return requests.Commit(
                session,
                request,
                tuple(body.reservation),
                tuple(body.staging_offset),
                staging_size,
            )
        case spans_pb2.AbortRequest():
            return requests.Abort(session, request, tuple(body.reservation))
        case spans_pb2.ReportCorruptRequest():
            return requests.ReportCorrupt(session, request, body.lease, tuple(body.entry))
        case flights_pb2.ClaimRequest():
            shards = _codes(body.shards, "claim.shards")
            return requests.Claim(session, request, body.keys, shards, body.salt, tier, body.place)
        case flights_pb2.AwaitRequest():
            shards = _codes(body.shards, "await_flight.shards")
            return requests.Await(
                session,
                request,
                body.flight,
                body.first,
                body.covered,
                shards,
                body.wait,
                body.place,
            )
        case flights_pb2.LeaveRequest():
            return requests.Leave(session, request, body.flight, wait=body.wait)
        case flights_pb2.LandRequest():
            return requests.Land(session, request, body.flight, body.cause)
        case flights_pb2.ProgressRequest():
            return requests.AskProgress(session, request, body.flight, body.computed, body.place)
    if isinstance(body, families_pb2.DeclareFamilyRequest | families_pb2.JoinFamilyRequest):
        given = tuple(_codes(body.shards, f"{NAMES[type(body)]}.shards"))
    else:
        given = ()
    event = families.to_event(session, request, body, given)
    if event is None:
        raise TypeError(f"{type(body).__name__} is no request to the core")
    return event


_FIELDS = spans_pb2.AcquireResponse.DESCRIPTOR.fields_by_name
_VARINTS = tuple(
    (name, _FIELDS[name].number) for name in ("slab", "offset", "length", "tokens", "generation")
)
_REASON, _ROOT = _FIELDS["reason"].number, _FIELDS["root"].number
_DENSE_LENGTH, _DENSE_ROOT, _START = (
    _FIELDS[name].number for name in ("dense_length", "dense_root", "start")
)


def _leased(result: results.AcquireResult) -> spans_pb2.AcquireResponse:
    """An answer of thousands of numbers, which protobuf would take one by one."""
    pack = _host.pack_field
    parts = [pack(_REASON, bytes(result.reason), False)]
    parts += [pack(number, getattr(result, name), False) for name, number in _VARINTS]
    parts.append(pack(_ROOT, result.root, True))
    if result.dense_length:
        parts.append(pack(_DENSE_LENGTH, result.dense_length, False))
        parts.append(pack(_DENSE_ROOT, result.dense_root, True))
    if result.start:
        parts.append(pack(_START, result.start, False))
    answer = spans_pb2.AcquireResponse.FromString(b"".join(parts))
    answer.lease = result.lease
    answer.bases.extend(spans_pb2.BasePlace(**asdict(base)) for base in result.bases)
    return answer


def _progress(far: results.Progress) -> flights_pb2.FlightProgress:
    return flights_pb2.FlightProgress(**asdict(far))


def to_message(result: results.Result, name: str) -> Message:
    """The answer's body.

    Args:
        name: of the request, which fields of a refusal are prefixed with.

    Raises:
        RequestError: the core refused the call.
    """
    match result:
        case results.Refused():
            field = f"{name}.{result.field}" if result.field else ""
            raise errors.from_code(result.code, result.message, field)
        case results.AcquireResult():
            return _leased(result)
        case results.ReleaseResult():
            return spans_pb2.ReleaseResponse(released=result.released, refused=result.refused)
        case results.ReserveResult():
            return spans_pb2.ReserveResponse(
                reason=result.reason,
                reservation=result.reservation,
            )
        case results.CommitResult():
            return spans_pb2.CommitResponse(reason=result.reason)
        case results.AbortResult():
            return spans_pb2.AbortResponse(aborted=result.aborted)
        case results.ReportCorruptResult():
            return spans_pb2.ReportCorruptResponse(accepted=result.accepted)
        case results.ClaimResult():
            claimed = flights_pb2.ClaimResponse(
                standing=flights_pb2.Standing.ValueType(result.standing),
                flight=result.flight,
                first=result.first,
                covered=result.covered,
                ahead=result.ahead,
            )
            if result.flight:
                claimed.progress.CopyFrom(_progress(result.progress))
            return claimed
        case results.AwaitResult():
            return flights_pb2.AwaitResponse(
                arrival=flights_pb2.Arrival.ValueType(result.arrival),
                cause=flights_pb2.FlightCause.ValueType(result.cause),
            )
        case results.LeaveResult():
            return flights_pb2.LeaveResponse(left=result.left)
        case results.LandResult():
            return flights_pb2.LandResponse(ended=result.ended)
        case results.ProgressResult():
            far = result.progress
            return flights_pb2.ProgressResponse(progress=_progress(far) if far else None)
    answer = families.to_message(result, name)
    assert answer is not None
    return answer
