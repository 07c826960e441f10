"""The daemon's behaviour as a small model: requests in, answers out, all in dictionaries.

For ``kmesh.testing``; it knows no sockets. It evicts nothing and copies in place, otherwise it
answers as the daemon does, which the contract tests hold it to.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterable, Sequence

from google.protobuf.message import Message

from kmesh import errors, keys, layout, negotiation
from kmesh.fake_families import FakeFamilies, add_recipe
from kmesh.fake_flights import FakeFlights, Reply
from kmesh.fake_memory import FakeMemory
from kmesh.fake_state import FakeRecipe, Limits, Peer, Span
from kmesh.handles import HandleKind, HandleRefusal, Offer, Tier, agree
from kmesh.layout import STAGING_ALIGN
from kmesh.v1 import common_pb2, families_pb2, flights_pb2, sessions_pb2, spans_pb2

_OFFERED: dict[int, tuple[Offer, ...]] = {
    Tier.HOST: (
        Offer(HandleKind.MEMFD, slabs=True),
        Offer(
            HandleKind.DMA_BUF,
            refusal=HandleRefusal.NOT_ALLOWED,
            text="the fake has memfds",
        ),
    )
}
OK, MISS, PENDING, CORRUPT, EXISTS = 0, 1, 2, 3, 4
POOL_FULL, TOO_LARGE, STALE = 5, 7, 8
SCHEDULER, WORKER, TOOL = 1, 2, 3


class Model:
    """One boot of a daemon. Not thread-safe. Whoever makes it calls ``close``."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.epoch = secrets.randbits(63) | 1
        self.peers: dict[int, Peer] = {}
        self.spans: dict[tuple[bytes, int], Span] = {}
        self._last = 0
        self.flights = FakeFlights(self._stored, self._known, time.monotonic)
        self.families = FakeFamilies(self._committed)
        self._memory = FakeMemory(limits, self.epoch)
        self.slabs = self._memory.slabs

    def close(self) -> None:
        """The end of this boot: its index holds nothing any more."""
        for peer in list(self.peers):
            self.end(peer)
        self._memory.close()

    def hello(self, body: sessions_pb2.Hello) -> tuple[Peer, sessions_pb2.Welcome]:
        for name, mine in (
            ("protocol_version", layout.PROTOCOL_VERSION),
            ("layout_version", layout.LAYOUT_VERSION),
        ):
            theirs = getattr(body, name)
            if theirs != mine:
                raise errors.VersionMismatch(f"{theirs} is not {mine}", field=f"hello.{name}")
        if body.role not in (SCHEDULER, WORKER, TOOL):
            raise errors.InvalidArgument("not a role", field="hello.role")
        if body.role != TOOL and not body.engine_id:
            raise errors.InvalidArgument("an engine has an id", field="hello.engine_id")
        namespace = dict(body.namespace)
        for other in self.peers.values():
            if body.engine_id and other.engine == body.engine_id:
                for name in sorted(namespace.keys() | other.namespace.keys()):
                    if namespace.get(name) != other.namespace.get(name):
                        raise errors.NamespaceMismatch(
                            "sessions of one engine disagree", field=f"hello.namespace.{name}"
                        )
        peer = Peer(self._next(), body.role, body.engine_id, namespace)
        self.peers[peer.id] = peer
        return peer, sessions_pb2.Welcome(
            session_id=peer.id,
            token=secrets.token_urlsafe(),
            daemon_version="fake",
            max_message_bytes=self.limits.max_message_bytes,
            max_batch=self.limits.max_batch,
            span_tokens=self.limits.span_tokens,
            sub_tokens=self.limits.sub_tokens,
            tile_bytes=layout.TILE_BYTES,
            max_staging_bytes=self.limits.max_staging_bytes,
            handle_kinds=[common_pb2.HANDLE_KIND_MEMFD],
            slab_count=len(self.slabs),
            tiers=[
                negotiation.to_message(agree(p.tier, list(p.kinds), _OFFERED.get(p.tier, ())))
                for p in body.handles
            ],
        )

    def end(self, session: int) -> None:
        """The connection ended: so does all that it held."""
        peer = self.peers.pop(session, None)
        if peer is None:
            return
        for span in peer.reservations.values():
            self._drop(span)
        for lease in list(peer.leases):
            self._release(peer, lease)
        if peer.staging is not None:
            peer.staging.close()
            os.close(peer.staging_fd)
        self.flights.closed(session)

    def handle(
        self, peer: Peer, body: Message, reply: Reply, seconds: float
    ) -> tuple[Message | None, int]:
        """The answer and the descriptor to go with it (-1: none; the caller closes it).

        No answer: it comes later, through ``reply``, within so many seconds.
        """
        if isinstance(body, sessions_pb2.AttachIndex):
            return self._memory.attach_index()
        if isinstance(body, sessions_pb2.AttachSlab):
            return self._memory.attach_slab(body.slab, body.kind)
        if isinstance(body, sessions_pb2.ExportSpan):
            raise errors.PermissionDenied("the fake has no DMA-BUF", field="export_span.kind")
        if isinstance(body, sessions_pb2.AttachStaging):
            used = sum(p.staging.size for p in self.peers.values() if p.staging)
            return self._memory.attach_staging(peer, body.size, used)
        if isinstance(body, sessions_pb2.Ping):
            return sessions_pb2.Pong(), -1
        if isinstance(body, spans_pb2.AcquireRequest):
            return self._acquire(peer, body), -1
        if isinstance(body, spans_pb2.ReleaseRequest):
            refused = [lease for lease in body.leases if not self._release(peer, lease)]
            released = len(body.leases) - len(refused)
            return spans_pb2.ReleaseResponse(released=released, refused=refused), -1
        if isinstance(body, spans_pb2.ReserveRequest):
            return self._reserve(peer, body), -1
        if isinstance(body, spans_pb2.CommitRequest):
            return self._commit(peer, body), -1
        if isinstance(body, spans_pb2.AbortRequest):
            ended = [s for r in body.reservation if (s := peer.reservations.pop(r, None))]
            for span in ended:
                self._drop(span)
            return spans_pb2.AbortResponse(aborted=len(ended)), -1
        if isinstance(body, spans_pb2.ReportCorruptRequest):
            return self._report_corrupt(peer, body), -1
        if isinstance(body, flights_pb2.ClaimRequest):
            _host_only(body.device, "claim.device")
            shards = _shards(body.shards)
            keys = _split(body.keys, "claim.keys")
            self._batch(len(keys), "claim.keys")
            return self.flights.claim(peer.id, keys, shards, body.salt, body.place), -1
        if isinstance(body, flights_pb2.AwaitRequest):
            shards = _shards(body.shards)
            return self.flights.wait(peer.id, body, shards, reply, seconds), -1
        if isinstance(body, flights_pb2.LeaveRequest):
            return self.flights.leave(peer.id, body), -1
        if isinstance(body, flights_pb2.LandRequest):
            return self.flights.land(peer.id, body), -1
        if isinstance(body, flights_pb2.ProgressRequest):
            return self.flights.progress(peer.id, body), -1
        if isinstance(body, families_pb2.DescribeFamilyRequest):
            _host_only(body.device, "describe_family.device")
        if isinstance(body, families_pb2.ListFamiliesRequest):
            _host_only(body.device, "list_families.device")
        answer = self.families.handle(body)
        if answer is not None:
            return answer, -1
        raise errors.InvalidArgument("no such request", field="body")

    def _committed(self, key: bytes, shard: int, salt: bytes) -> Span | None:
        span = self.spans.get((key, shard))
        return span if span is not None and span.committed and span.salt == salt else None

    def _stored(self, key: bytes, shards: Sequence[int], salt: bytes) -> bool:
        found = [self.spans.get((key, shard)) for shard in shards]
        return all(span and span.committed and span.salt == salt for span in found)

    def _known(self, key: bytes, shards: Sequence[int], salt: bytes) -> bool:
        found = [self.spans.get((key, shard)) for shard in shards]
        return all(span and span.salt == salt for span in found)

    def _next(self) -> int:
        self._last += 1
        return self._last

    def _batch(self, count: int, name: str) -> None:
        if count > self.limits.max_batch:
            raise errors.TooLarge(f"{count} spans are too many", field=name)

    def _acquire(self, peer: Peer, body: spans_pb2.AcquireRequest) -> Message:
        _host_only(body.device, "acquire.device")
        shards = _shards(body.shards)
        ids = _split(body.keys, "acquire.keys")
        self._batch(len(ids) * len(shards), "acquire.keys")
        answer = spans_pb2.AcquireResponse()
        held: list[Span | None] = []
        stopped = False
        for key in ids:
            found = [self.spans.get((key, shard)) for shard in shards]
            for stored in found:
                span = stored if stored is not None and stored.salt == body.salt else None
                reason = OK if span is not None and not stopped else MISS
                if reason == OK and span is not None and not span.committed:
                    reason = PENDING
                held.append(span if reason == OK else None)
                answer.reason.append(reason)
            stopped = stopped or (body.prefix and None in held[-len(shards) :])
        recipes = any(span and span.recipe for span in held) and body.recipes
        for entry, span in enumerate(held):
            place: Span | FakeRecipe | None = span
            if recipes:
                place = span.recipe or span if span else None
                add_recipe(answer, span, entry % len(shards))
            answer.slab.append(place.slab if place else 0)
            answer.offset.append(place.offset if place else 0)
            answer.length.append(place.length if place else 0)
            answer.tokens.append(span.tokens if span else 0)
            answer.generation.append(span.generation if span else 0)
            answer.root.append(place.root if place else 0)
            if body.positions:
                answer.start.append(span.start if span else 0)
        if any(held):
            answer.lease = self._next()
            self._owner(peer).leases[answer.lease] = held
            for span in held:
                if span:
                    span.leases += 1
        return answer

    def _owner(self, peer: Peer) -> Peer:
        """Read leases of an engine belong to its scheduler's session."""
        if peer.role != WORKER:
            return peer
        for other in self.peers.values():
            if other.engine == peer.engine and other.role == SCHEDULER:
                return other
        return peer

    def _release(self, peer: Peer, lease: int) -> bool:
        held = peer.leases.pop(lease, None)
        for span in held or ():
            if span:
                span.leases -= 1
                if span.dropped and not span.leases:
                    self._memory.give(span)
        return held is not None

    def _reserve(self, peer: Peer, body: spans_pb2.ReserveRequest) -> Message:
        _host_only(body.device, "reserve.device")
        shard = _shards([body.shard])[0]
        ids = _split(body.keys, "reserve.keys")
        self._batch(len(ids), "reserve.keys")
        if not len(ids) == len(body.tokens) == len(body.start) == len(body.length):
            raise errors.InvalidArgument("not parallel", field="reserve.tokens")
        subs = _split(body.sub_keys, "reserve.sub_keys")
        answer = spans_pb2.ReserveResponse()
        fields = zip(ids, body.tokens, body.start, body.length, strict=True)
        for key, tokens, start, length in fields:
            count = tokens // self.limits.sub_tokens - 1
            mine = subs[:count] if tokens < self.limits.span_tokens else []
            subs = subs[len(mine) :]
            reason, reservation = self._reserve_one(peer, [key, *mine], shard, tokens, length)
            if reservation:
                peer.reservations[reservation].salt = body.salt
                peer.reservations[reservation].start = start
            elif reason in (POOL_FULL, TOO_LARGE):
                self.flights.refused(key, body.salt)
            answer.reason.append(reason)
            answer.reservation.append(reservation)
        return answer

    def _reserve_one(
        self, peer: Peer, ids: list[bytes], shard: int, tokens: int, length: int
    ) -> tuple[int, int]:
        there = self.spans.get((ids[0], shard))
        if there is not None:
            return (EXISTS if there.committed else PENDING), 0
        if length > layout.slab_capacity(self.limits.slab_bytes):
            return TOO_LARGE, 0
        for number, slab in enumerate(self.slabs):
            offset = slab.take(length)
            if offset is not None:
                span = Span(self._next(), ids, shard, tokens, number, offset, length, peer.id)
                self.spans[ids[0], shard] = span
                peer.reservations[span.slot] = span
                return OK, span.slot
        return POOL_FULL, 0

    def _commit(self, peer: Peer, body: spans_pb2.CommitRequest) -> Message:
        self._batch(len(body.reservation), "commit.reservation")
        if len(body.reservation) != len(body.staging_offset):
            raise errors.InvalidArgument("not parallel", field="commit.staging_offset")
        size = peer.staging.size if peer.staging else 0
        for reservation, offset in zip(body.reservation, body.staging_offset, strict=True):
            if offset % STAGING_ALIGN:
                raise errors.InvalidArgument("not aligned", field="commit.staging_offset")
            span = peer.reservations.get(reservation)
            if span and offset + span.length > size:
                raise errors.InvalidArgument(
                    "outside of the staging", field="commit.staging_offset"
                )
        answer = spans_pb2.CommitResponse()
        for reservation, offset in zip(body.reservation, body.staging_offset, strict=True):
            span = peer.reservations.pop(reservation, None)
            answer.reason.append(STALE if span is None else OK)
            if span is not None and peer.staging is not None:
                self._memory.copy(span, peer.staging.address + offset)
                span.committed = True
                for key in span.keys:
                    self.spans.setdefault((key, span.shard), span)
                self._memory.publish(span, span.keys)
        self._memory.bump()
        self.flights.changed()
        return answer

    def _report_corrupt(self, peer: Peer, body: spans_pb2.ReportCorruptRequest) -> Message:
        held = self._owner(peer).leases.get(body.lease)
        if held is None:
            raise errors.NotFound("no such lease", field="report_corrupt.lease")
        if any(entry >= len(held) for entry in body.entry):
            raise errors.InvalidArgument("no such entry", field="report_corrupt.entry")
        reported = [span for entry in body.entry if (span := held[entry])]
        for span in reported:
            if not self._memory.intact(span) and not span.dropped:
                self._drop(span)
        return spans_pb2.ReportCorruptResponse(accepted=len(reported))

    def _drop(self, span: Span) -> None:
        mine = [key for key in span.keys if self.spans.get((key, span.shard)) is span]
        for key in mine:
            del self.spans[key, span.shard]
        self._memory.unpublish(span, mine)
        self._memory.bump()
        self.flights.changed()
        span.dropped = True
        if not span.leases:
            self._memory.give(span)


def _host_only(device: str, field: str) -> None:
    if device:
        raise errors.InvalidArgument("the daemon has no memory on this GPU", field=field)


def _split(packed: bytes, name: str) -> list[bytes]:
    if len(packed) % keys.KEY_BYTES:
        raise errors.InvalidArgument("not a multiple of 32 bytes", field=name)
    return [packed[i : i + keys.KEY_BYTES] for i in range(0, len(packed), keys.KEY_BYTES)]


def _shards(messages: Iterable[common_pb2.Shard]) -> list[int]:
    try:
        shards = [
            layout.Shard(m.layer_begin, m.layer_end, m.head_begin, m.head_end).code()
            for m in messages
        ]
    except ValueError as wrong:
        raise errors.InvalidArgument(str(wrong), field="shards") from None
    if not shards:
        raise errors.InvalidArgument("no shard", field="shards")
    return shards
