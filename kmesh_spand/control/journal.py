"""What happened lately, in order and numbered, for those who watch."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Collection
from itertools import islice

from kmesh.layout import Shard
from kmesh.v1 import admin_pb2, common_pb2
from kmesh_spand.control.registry import Member
from kmesh_spand.core import effects
from kmesh_spand.core.codes import Cause

#: Events in one message.
BATCH = 256

_KINDS = {
    Cause.PRESSURE: admin_pb2.EVENT_KIND_SPAN_EVICTED,
    Cause.OPERATOR: admin_pb2.EVENT_KIND_SPAN_EVICTED,
    Cause.CORRUPT: admin_pb2.EVENT_KIND_SPAN_CORRUPT,
    Cause.RECOVERY: admin_pb2.EVENT_KIND_SPAN_DROPPED,
}
_Span = effects.SpanCommitted | effects.SpanEnded


class Journal:
    """A ring of the last events. Readers hold a place in it and nothing else.

    Attributes:
        epoch: in which the events are numbered, from 1.
        last: number of the newest event.

    Args:
        limit: of events that are kept.
    """

    def __init__(self, epoch: int, limit: int) -> None:
        self.epoch = epoch
        self.last = 0
        self._ring: deque[tuple[int, admin_pb2.WatchEvent | _Span]] = deque(maxlen=limit)
        self._news = asyncio.Event()
        self.add(admin_pb2.EVENT_KIND_STARTED)

    def add(self, kind: int, **fields: int | str) -> None:
        """Something other than a span's coming or going; fields of ``WatchEvent``."""
        self._append(admin_pb2.WatchEvent(kind=admin_pb2.EventKind.ValueType(kind), **fields))  # type: ignore[arg-type]

    def span(self, event: _Span) -> None:
        """A span came or went."""
        self._append(event)

    def session_opened(self, member: Member) -> None:
        """A session was let in."""
        self._session(admin_pb2.EVENT_KIND_SESSION_OPENED, member, member.client_name)

    def session_closed(self, member: Member, reason: str) -> None:
        """A session ended."""
        self._session(admin_pb2.EVENT_KIND_SESSION_CLOSED, member, reason)

    def worker_started(self, restarts: int) -> None:
        """There is a new store worker, the first one or after so many restarts."""
        self.add(admin_pb2.EVENT_KIND_WORKER_STARTED, text=f"restart {restarts}")

    def _session(self, kind: int, member: Member, text: str) -> None:
        self.add(kind, session_id=member.id, uid=member.peer.uid, text=text)

    def _append(self, event: admin_pb2.WatchEvent | _Span) -> None:
        self.last += 1
        self._ring.append((time.time_ns() // 1_000_000, event))
        if not self._news.is_set():
            self._news.set()

    async def news(self, after: int) -> None:
        """Returns when there is an event after this one."""
        while self.last <= after:
            # Set once for all that wait; whoever wakes first puts a new one in its place.
            if self._news.is_set():
                self._news = asyncio.Event()
            await self._news.wait()

    def read(self, after: int, kinds: Collection[int] = ()) -> admin_pb2.WatchResponse:
        """Up to ``BATCH`` events after number ``after``, of these kinds or of all."""
        first = self.last - len(self._ring) + 1
        begin = max(after + 1, first)
        answer = admin_pb2.WatchResponse(epoch=self.epoch, lost=begin > after + 1)
        number = begin - 1
        for number, (when, event) in enumerate(
            islice(self._ring, begin - first, begin - first + BATCH), begin
        ):
            made = _message(event)
            if not kinds or made.kind in kinds:
                made.sequence, made.time_ms = number, when
                answer.events.append(made)
        answer.last_sequence = number
        return answer


def _message(event: admin_pb2.WatchEvent | _Span) -> admin_pb2.WatchEvent:
    if isinstance(event, admin_pb2.WatchEvent):
        made = admin_pb2.WatchEvent()
        made.CopyFrom(event)
        return made
    made = admin_pb2.WatchEvent(
        kind=admin_pb2.EVENT_KIND_SPAN_COMMITTED,
        key=event.key,
        namespace=event.namespace,
        shard=shard_message(event.shard),
        tokens=event.tokens,
        length=event.length,
    )
    if isinstance(event, effects.SpanEnded):
        made.kind = _KINDS[Cause(event.cause)]
        made.cause = admin_pb2.Cause.ValueType(event.cause)
    return made


def shard_message(code: int) -> common_pb2.Shard | None:
    """A shard as it is sent; None for a code that is none, as a damaged record may have."""
    try:
        shard = Shard.from_code(code)
    except ValueError:
        return None
    return common_pb2.Shard(
        layer_begin=shard.layer_begin,
        layer_end=shard.layer_end,
        head_begin=shard.head_begin,
        head_end=shard.head_end,
    )
