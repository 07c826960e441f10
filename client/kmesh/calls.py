"""Calls as procedures: generators that yield request messages and are sent their answers.

A procedure knows batches, limits and what to give back when it fails half-way; it knows neither
sockets nor threads. ``Session`` and ``AsyncSession`` drive the same ones. Those about flights are
in ``kmesh.flightcalls``, those about families in ``kmesh.families``.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from google.protobuf.message import Message

from kmesh import errors, negotiation
from kmesh.handles import Agreement, HandleKind, Tier
from kmesh.keys import KEY_BYTES
from kmesh.layout import Shard
from kmesh.lease import Lease
from kmesh.v1 import common_pb2, sessions_pb2, spans_pb2
from kmesh.wire import Answer

T = TypeVar("T")
Procedure = Generator[Message, Answer, T]
#: Sends a message whose answer nobody waits for; does nothing when the session is over.
Forget = Callable[[Message], None]

logger = logging.getLogger("kmesh")

_TIERS = {Tier.HOST: "host memory", Tier.GPU: "GPU memory"}

#: No kernel sends a larger packet unless it was tuned for it.
_MAX_MESSAGE_BYTES = 16 << 20
#: Bytes of a packet left to the frame around a batch.
_FRAME_BYTES = 256


@dataclass(frozen=True, slots=True)
class Welcome:
    """What the daemon said at connect; sizes in bytes, counts in tokens or spans.

    Attributes:
        handle_kinds: in which whole slabs of the host are given, best first.
        handles: what was agreed for each tier; empty with a daemon that is too old to agree.
    """

    session_id: int
    token: str = field(repr=False)
    daemon_version: str
    max_message_bytes: int
    max_batch: int
    span_tokens: int
    sub_tokens: int
    tile_bytes: int
    max_staging_bytes: int
    slab_count: int
    handle_kinds: tuple[HandleKind, ...]
    handles: Mapping[Tier, Agreement] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ReserveBatch:
    """Spans of one shard to be stored; parallel, entry i of each belongs to span i.

    Attributes:
        namespace: 32-byte digest.
        shard: what part of the model every span holds.
        keys: 32 bytes each.
        tokens: of each span; a multiple of sub_tokens, at most span_tokens.
        start: position of each span's first token.
        length: payload bytes of each span.
        sub_keys: for each span shorter than span_tokens, in order, its keys at every sub_tokens
            before its end: 32 bytes x (tokens / sub_tokens - 1).
        salt: digest of the request's salt, 32 bytes, or empty; with the uid, it is the tenant.
        device: UUID of the GPU on which to store, or empty: in host memory.

    Raises:
        ConfigError: the fields do not fit together.
    """

    namespace: bytes
    shard: Shard
    keys: bytes
    tokens: Sequence[int]
    start: Sequence[int]
    length: Sequence[int]
    sub_keys: bytes = b""
    salt: bytes = field(default=b"", repr=False)
    device: str = ""

    def __post_init__(self) -> None:
        if len(self.namespace) != 32:
            raise errors.ConfigError("namespace: not a digest of 32 bytes")
        check_salt(self.salt)
        if len(self.keys) != KEY_BYTES * len(self.tokens):
            raise errors.ConfigError("keys: not 32 bytes for each entry of tokens")
        if not len(self.tokens) == len(self.start) == len(self.length):
            raise errors.ConfigError("tokens, start, length: not of one length")

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, slots=True)
class Reservations:
    """One entry for each span: why not (``kmesh.v1.Reason``, 0 is OK), and the reservation."""

    reason: list[int]
    reservation: list[int]


def hello(message: sessions_pb2.Hello) -> Procedure[Welcome]:
    """Raises VersionMismatch, NamespaceMismatch or PermissionDenied, as the daemon says."""
    body = body_of(sessions_pb2.Welcome, (yield message))
    handles = negotiation.from_messages(body.tiers)
    for agreement in handles.values():
        _tell(agreement)
    kinds = []
    for number in body.handle_kinds:
        try:
            kinds.append(HandleKind(number))
        except ValueError:
            continue  # A kind that this client is too old for: never chosen.
    if not (body.max_batch and body.span_tokens and body.sub_tokens and body.max_message_bytes):
        raise errors.ProtocolError("Welcome: a limit is zero")
    if body.max_message_bytes > _MAX_MESSAGE_BYTES:
        raise errors.ProtocolError(f"Welcome: packets of {body.max_message_bytes} bytes")
    return Welcome(
        session_id=body.session_id,
        token=body.token,
        daemon_version=body.daemon_version,
        max_message_bytes=body.max_message_bytes,
        max_batch=body.max_batch,
        span_tokens=body.span_tokens,
        sub_tokens=body.sub_tokens,
        tile_bytes=body.tile_bytes,
        max_staging_bytes=body.max_staging_bytes,
        slab_count=body.slab_count,
        handle_kinds=tuple(kinds),
        handles=handles,
    )


_told: set[str] = set()
#: What its milliseconds fit into 32 bits with.
_MAX_WAIT = 1e6


def _tell(agreement: Agreement) -> None:
    """A lesser kind than was asked for is worth a line, once in a process."""
    text = f"{_TIERS[Tier(agreement.tier)]}: {negotiation.describe(agreement)}"
    if agreement.fallback is not None and text not in _told:
        _told.add(text)
        logger.warning("handles of %s", text)


def acquire(
    limits: Welcome,
    keys: bytes,
    shards: Sequence[Shard],
    prefix: bool,
    forget: Forget,
    salt: bytes = b"",
    device: str = "",
    recipes: bool = False,
    positions: bool = False,
    wait: float = 0.0,
) -> Procedure[Lease]:
    """Raises ConfigError for malformed arguments, else what the daemon says."""
    if len(keys) % KEY_BYTES:
        raise errors.ConfigError("keys: not a multiple of 32 bytes")
    check_salt(salt)
    if not 0 <= wait <= _MAX_WAIT:
        raise errors.ConfigError(f"wait: not between 0 and {_MAX_WAIT:.0f} seconds")
    if not 0 < len(shards) <= limits.max_batch:
        raise errors.ConfigError(f"shards: {len(shards)}, not between 1 and {limits.max_batch}")

    def discard(ids: Sequence[int]) -> None:
        for at in range(0, len(ids), limits.max_batch):
            forget(spans_pb2.ReleaseRequest(leases=ids[at : at + limits.max_batch]))

    lease = Lease(keys, shards, discard)
    messages = [shard_message(shard) for shard in shards]
    step = min(limits.max_batch // len(shards), most_keys(limits, messages)) * KEY_BYTES
    try:
        for at in range(0, len(keys), step):
            part = keys[at : at + step]
            request = spans_pb2.AcquireRequest(
                keys=part,
                shards=messages,
                prefix=prefix,
                salt=salt,
                device=device,
                recipes=recipes,
                positions=positions,
                wait_ms=math.ceil(wait * 1000),
            )
            answer = body_of(spans_pb2.AcquireResponse, (yield request))
            try:
                lease.append(answer, len(part) // KEY_BYTES * len(shards))
            except ValueError as wrong:
                if answer.lease:
                    discard([answer.lease])
                raise errors.ProtocolError(str(wrong)) from None
            if prefix and any(answer.reason):
                break
    except BaseException:
        lease.release()
        raise
    lease.fill()
    return lease


def reserve(limits: Welcome, batch: ReserveBatch, forget: Forget) -> Procedure[Reservations]:
    """Raises ConfigError when ``sub_keys`` has not the size that ``tokens`` asks for."""
    done = Reservations([], [])
    shard = shard_message(batch.shard)
    try:
        for first, last, sub_keys in _reserve_parts(limits, batch):
            request = spans_pb2.ReserveRequest(
                namespace=batch.namespace,
                shard=shard,
                keys=batch.keys[first * KEY_BYTES : last * KEY_BYTES],
                tokens=batch.tokens[first:last],
                start=batch.start[first:last],
                length=batch.length[first:last],
                sub_keys=sub_keys,
                salt=batch.salt,
                device=batch.device,
            )
            answer = body_of(spans_pb2.ReserveResponse, (yield request))
            done.reservation.extend(answer.reservation)
            done.reason.extend(answer.reason)
            if len(done.reason) != last or len(done.reservation) != last:
                raise errors.ProtocolError("a Reserve answer of the wrong length")
    except BaseException:
        held = [r for r in done.reservation if r]
        for at in range(0, len(held), limits.max_batch):
            forget(spans_pb2.AbortRequest(reservation=held[at : at + limits.max_batch]))
        raise
    return done


def commit(
    limits: Welcome, reservations: Sequence[int], offsets: Sequence[int]
) -> Procedure[list[int]]:
    """Reasons, one for each reservation. What an earlier part committed stays committed."""
    if len(reservations) != len(offsets):
        raise errors.ConfigError("reservations, offsets: not of one length")
    reasons: list[int] = []
    for at in range(0, len(reservations), limits.max_batch):
        end = at + limits.max_batch
        request = spans_pb2.CommitRequest(
            reservation=reservations[at:end], staging_offset=offsets[at:end]
        )
        answer = body_of(spans_pb2.CommitResponse, (yield request))
        if len(answer.reason) != len(request.reservation):
            raise errors.ProtocolError("a Commit answer of the wrong length")
        reasons.extend(answer.reason)
    return reasons


def abort(limits: Welcome, reservations: Sequence[int]) -> Procedure[int]:
    """How many reservations were ended."""
    aborted = 0
    for at in range(0, len(reservations), limits.max_batch):
        part = reservations[at : at + limits.max_batch]
        answer = yield spans_pb2.AbortRequest(reservation=part)
        aborted += body_of(spans_pb2.AbortResponse, answer).aborted
    return aborted


def report_corrupt(limits: Welcome, lease: Lease, entries: Sequence[int]) -> Procedure[int]:
    """How many reports the daemon took up. ``entries`` count over the whole lease."""
    accepted = 0
    for part in lease.parts:
        mine = [e - part.first for e in entries if part.first <= e < part.first + part.count]
        if not part.lease:
            continue
        for at in range(0, len(mine), limits.max_batch):
            request = spans_pb2.ReportCorruptRequest(
                lease=part.lease, entry=mine[at : at + limits.max_batch]
            )
            accepted += body_of(spans_pb2.ReportCorruptResponse, (yield request)).accepted
    return accepted


def ping() -> Procedure[None]:
    """Returns when the daemon has answered."""
    body_of(sessions_pb2.Pong, (yield sessions_pb2.Ping()))


def _reserve_parts(
    limits: Welcome, batch: ReserveBatch
) -> Generator[tuple[int, int, bytes], None, None]:
    """(first, last, sub-keys) of each message, none over the limits."""
    if any(n % limits.sub_tokens or not 0 < n <= limits.span_tokens for n in batch.tokens):
        raise errors.ConfigError(
            f"tokens: not all multiples of {limits.sub_tokens} up to {limits.span_tokens}"
        )
    counts = [0 if n == limits.span_tokens else n // limits.sub_tokens - 1 for n in batch.tokens]
    if len(batch.sub_keys) != KEY_BYTES * sum(counts):
        raise errors.ConfigError(f"sub_keys: not {KEY_BYTES * sum(counts)} bytes")
    room = limits.max_message_bytes - _FRAME_BYTES
    first = sub_begin = sub_end = size = 0
    for i, count in enumerate(counts):
        # A varint takes at most ten bytes, and there are three for each span.
        cost = KEY_BYTES * (1 + count) + 30
        if i > first and (i - first == limits.max_batch or size + cost > room):
            yield first, i, batch.sub_keys[sub_begin:sub_end]
            first, sub_begin, size = i, sub_end, 0
        size += cost
        sub_end += KEY_BYTES * count
    if counts:
        yield first, len(counts), batch.sub_keys[sub_begin:sub_end]


def most_keys(limits: Welcome, shards: Sequence[common_pb2.Shard]) -> int:
    """How many keys a message takes, beside these shards."""
    room = limits.max_message_bytes - _FRAME_BYTES - sum(m.ByteSize() + 2 for m in shards)
    return max(room // KEY_BYTES, 1)


def check_salt(salt: bytes) -> None:
    """Raises ConfigError unless it is empty or a digest."""
    if len(salt) not in (0, 32):
        raise errors.ConfigError("salt: not a digest of 32 bytes")


def shard_message(shard: Shard) -> common_pb2.Shard:
    """A shard on the wire."""
    return common_pb2.Shard(
        layer_begin=shard.layer_begin,
        layer_end=shard.layer_end,
        head_begin=shard.head_begin,
        head_end=shard.head_end,
    )


M = TypeVar("M", bound=Message)


def body_of(kind: type[M], answer: Answer) -> M:
    """An answer's body; ProtocolError if it is of another kind."""
    if not isinstance(answer.body, kind):
        raise errors.ProtocolError(f"expected {kind.__name__}")
    return answer.body
