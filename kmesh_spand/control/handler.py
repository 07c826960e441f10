"""One handler behind the session socket and gRPC: requests in, exactly one answer each."""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from google.protobuf.message import Message

from kmesh import errors, layout, negotiation
from kmesh.v1 import common_pb2, families_pb2, flights_pb2, sessions_pb2, spans_pb2
from kmesh_spand import logs
from kmesh_spand.control import broker as brokers
from kmesh_spand.control import families, limits, translate
from kmesh_spand.control.applier import Applier
from kmesh_spand.control.broker import Broker, Exported, Make
from kmesh_spand.control.journal import Journal
from kmesh_spand.control.observer import Call, Observer
from kmesh_spand.control.registry import Member, Peer, Registry
from kmesh_spand.control.staging import StagingPool
from kmesh_spand.core import effects, events, requests, results
from kmesh_spand.core.core import Core
from kmesh_spand.settings import Settings

logger = logging.getLogger(__name__)

#: Told the answer's body and the fd that goes with it (-1: none; it stays the handler's), or
#: what went wrong. Called exactly once.
Done = Callable[[Message | None, int, errors.RequestError | None], None]


def _refused(code: int) -> str:
    name = common_pb2.Code.Name(common_pb2.Code.ValueType(code))
    return "refused_" + name.removeprefix("CODE_").lower()


#: Codes that only clients give: for what moved under them, or is gone.
_CLIENTS_OWN = (common_pb2.CODE_STALE, common_pb2.CODE_UNAVAILABLE)

#: A part of its deadline that an Acquire waits for the disk at most.
_LAST_MOMENT = 0.9

_REQUESTS = {name: f"requests_{name}" for name in translate.NAMES.values()}
_COUNTERS = (
    "connections_refused",
    "protocol_errors",
    "sessions_opened",
    "sessions_closed",
    *brokers.COUNTERS,
    *_REQUESTS.values(),
    # The daemon itself never answers these two.
    *(_refused(c) for c in common_pb2.Code.values() if c not in (0, *_CLIENTS_OWN)),
)


@dataclass(slots=True)
class _Pending:
    session: int
    name: str
    done: Done
    call: Call
    timer: asyncio.TimerHandle | None = None
    hurry: asyncio.TimerHandle | None = None
    late: bool = False


class Handler:
    """Sessions and their requests. Everything runs on the event loop.

    Attributes:
        epoch: of this control process.
        version: of the daemon.
        counters: what happened to requests and connections, by name.
        journal: what those who watch are told.
        draining: no new session and no new reservation.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        settings: Settings,
        version: str,
        core: Core,
        staging: StagingPool,
        exported: Exported,
        make: Make,
        epoch: int,
        observer: Observer,
    ) -> None:
        self.observer = observer
        self.epoch = epoch
        self.settings = settings
        self.version = version
        self.core = core
        self.registry = Registry()
        self.staging = staging
        self.counters: Counter[str] = Counter(dict.fromkeys(_COUNTERS, 0))
        self.draining = False
        self.journal = Journal(epoch, settings.watch_events)
        self.applier: Applier
        self._loop = loop
        self._indexes = exported.indexes
        self.broker = Broker(settings, exported, make, self.counters)
        self._pending: dict[int, _Pending] = {}
        self._of_session: dict[int, set[int]] = {}
        self._last = 0
        self._going_on = False

    @staticmethod
    def now_ms() -> int:
        """Milliseconds of the core's clock."""
        return time.monotonic_ns() // 1_000_000

    def event(self, event: events.Event) -> None:
        """Lets the core see something and does what it wants done."""
        self.applier.apply(self.core.handle(event, self.now_ms()))
        if self.core.behind and not self._going_on:
            self._going_on = True
            self._loop.call_soon(self._go_on)

    def _go_on(self) -> None:
        self._going_on = False
        self.event(events.GoOn())

    # Sessions.

    def open(self, hello: sessions_pb2.Hello, peer: Peer) -> Member:
        """Lets a session in.

        Raises:
            RequestError: Hello is refused.
        """
        if self.draining:
            raise errors.Draining("the daemon is stopping")
        agreed = self.broker.agree(hello.handles)
        member = self.registry.open(hello, peer, self.now_ms())
        self.broker.opened(member.id, agreed)
        engine = f"{peer.uid}:{member.engine_id}" if member.engine_id else ""
        self.event(events.SessionOpened(member.id, peer.uid, engine, member.role))
        self.counters["sessions_opened"] += 1
        self.journal.session_opened(member)
        logger.info(
            "session opened",
            extra={
                "session": member.id,
                "uid": peer.uid,
                "peer": peer.pid,
                "client": member.client_name,
                "engine": member.engine_id,
            },
        )
        return member

    def welcome(self, member: Member) -> sessions_pb2.Welcome:
        """What a new session is told."""
        return sessions_pb2.Welcome(
            session_id=member.id,
            token=member.token,
            daemon_version=self.version,
            max_message_bytes=limits.MAX_MESSAGE_BYTES,
            max_batch=limits.MAX_BATCH,
            span_tokens=self.settings.span_tokens,
            sub_tokens=layout.SUB_TOKENS,
            tile_bytes=layout.TILE_BYTES,
            max_staging_bytes=self.staging.each,
            handle_kinds=[common_pb2.HandleKind.ValueType(k) for k in self.broker.kinds()],
            slab_count=self.broker.slab_count(),
            tiers=[negotiation.to_message(a) for a in self.broker.agreed(member.id)],
        )

    def close(self, session: int, reason: str) -> None:
        """A session ended: all that it held ends."""
        ended = [self._take(number) for number in list(self._of_session.get(session, ()))]
        member = self.registry.members.get(session)
        self.registry.close(session)
        self.broker.closed(session)
        if member is not None:
            self.journal.session_closed(member, reason)
        with logs.about(session):
            self.event(events.SessionClosed(session))
        self.counters["sessions_closed"] += 1
        logger.info("session closed", extra={"session": session, "reason": reason})
        # Its own connection is gone, but a gRPC call still waits.
        for pending in ended:
            if pending is not None:
                self.observer.drop(pending.call)
                pending.done(None, -1, errors.Unauthenticated("the session has ended"))

    # Requests.

    def call(
        self, session: int, body: Message, deadline_ms: int, done: Done, wire: int = 0
    ) -> None:
        """Answers a request of an open session through ``done``, at once or later.

        Args:
            wire: the number that the client gave the request, for the log.

        Never raises: what goes wrong here is answered with CODE_INTERNAL and logged.
        """
        self._last += 1
        number = self._last
        name = translate.NAMES[type(body)]
        call = self.observer.begin(name, session, number, wire, body)
        pending = _Pending(session, name, done, call)
        self._pending[number] = pending
        numbers = self._of_session.setdefault(session, set())
        numbers.add(number)
        self.counters[_REQUESTS[name]] += 1
        try:
            if len(numbers) > limits.MAX_PENDING:
                raise errors.Exhausted(f"{limits.MAX_PENDING} requests are pending")
            with logs.about(session, number):
                self._start(session, number, body)
        except errors.RequestError as refused:
            self._answer(number, None, -1, refused)
        except Exception:
            self._broke(number)
        if number in self._pending:
            seconds = (deadline_ms or self.settings.deadline_ms) / 1000
            pending.timer = self._loop.call_later(seconds, self._too_late, number, body)
            if isinstance(body, spans_pb2.AcquireRequest):
                # With what is there by then, rather than with nothing when it is too late.
                wait = min(body.wait_ms / 1000, seconds * _LAST_MOMENT)
                hurry = events.Hurry(session, number)
                pending.hurry = self._loop.call_later(wait, self.event, hurry)

    def owes(self, session: int) -> bool:
        """Whether requests of a session wait for their answer."""
        return session in self._of_session

    def _start(self, session: int, number: int, body: Message) -> None:
        match body:
            case sessions_pb2.Ping():
                self._answer(number, sessions_pb2.Pong())
            case sessions_pb2.AttachIndex():
                group = self.core.tenancy.group(self._uid(session))
                fd, size = self._indexes[group]
                handle = sessions_pb2.IndexHandle(kind=common_pb2.HANDLE_KIND_MEMFD, size=size)
                self._answer(number, handle, fd)
            case sessions_pb2.AttachSlab():
                self._attach_slab(session, number, body)
            case sessions_pb2.ExportSpan():
                self._export_span(session, number, body)
            case sessions_pb2.AttachStaging():
                self._attach_staging(session, number, body.size)
            case families_pb2.DescribeFamilyRequest():
                uid, now = self._uid(session), self.now_ms()
                self._answer(number, families.describe(self.core, body, uid, now, self.broker.gpus))
            case families_pb2.ListFamiliesRequest():
                uid, now = self._uid(session), self.now_ms()
                self._answer(number, families.list_all(self.core, body, uid, now, self.broker.gpus))
            case _:
                size = self.staging.size(session)
                self.event(translate.to_event(session, number, body, size, self._tier(body)))

    def _tier(self, body: Message) -> int:
        match body:
            case spans_pb2.AcquireRequest():
                return self.broker.gpus.tier(body.device, "acquire.device")
            case spans_pb2.ReserveRequest():
                return self.broker.gpus.tier(body.device, "reserve.device")
            case flights_pb2.ClaimRequest():
                return self.broker.gpus.tier(body.device, "claim.device")
        return 0

    def _uid(self, session: int) -> int:
        return self.registry.members[session].peer.uid

    def _attach_slab(self, session: int, number: int, body: sessions_pb2.AttachSlab) -> None:
        if body.slab >= self.broker.slab_count():
            raise errors.NotFound(f"there is no slab {body.slab}", field="attach_slab.slab")
        answer = functools.partial(self._answer, number)
        if self.broker.gpus.planned(body.slab):
            # Whoever may connect is of one group: ``config`` sees to that.
            self.broker.gpu_slab(session, body.slab, body.kind, answer)
            return
        if not self.core.has_slab(body.slab):
            raise errors.NotFound(f"there is no slab {body.slab} now", field="attach_slab.slab")
        # A mapping can't be taken back, so a slab that may become another's is not shown either.
        if not self.core.may_map(body.slab, self._uid(session)):
            raise errors.PermissionDenied(
                f"slab {body.slab} holds nothing of uid {self._uid(session)}",
                field="attach_slab.slab",
            )
        whole = self.core.populated(body.slab)
        self.broker.slab(session, body.slab, body.kind, whole, answer)

    def _export_span(self, session: int, number: int, body: sessions_pb2.ExportSpan) -> None:
        find = functools.partial(self.core.place, session, body.lease, body.entry)
        self.broker.span(session, body.kind, find, functools.partial(self._answer, number))

    def _attach_staging(self, session: int, number: int, size: int) -> None:
        if self.draining:
            raise errors.Draining("the daemon is stopping")

        def made(fd: int, failed: errors.RequestError | None) -> None:
            if failed is None:
                handle = sessions_pb2.StagingHandle(kind=common_pb2.HANDLE_KIND_MEMFD, size=size)
                self._answer(number, handle, fd)
            else:
                self._answer(number, None, -1, failed)

        self.staging.attach(session, size, made)

    def reply(self, reply: effects.Reply) -> None:
        """An answer of the core."""
        pending = self._pending.get(reply.request)
        if pending is None:
            return
        if pending.late and isinstance(reply.result, results.AcquireResult) and reply.result.lease:
            # Nobody learns of it.
            unheard = requests.Release(reply.session, 0, [reply.result.lease])
            self._loop.call_soon(self.event, unheard)
        try:
            body = translate.to_message(reply.result, pending.name)
        except errors.RequestError as refused:
            self._answer(reply.request, None, -1, refused)
        except Exception:
            self._broke(reply.request)
        else:
            self._answer(reply.request, body)

    def _too_late(self, number: int, body: Message) -> None:
        """The deadline of a request passed: nothing may stay held."""
        pending = self._pending.get(number)
        if pending is None:
            return
        pending.late = True
        try:
            with logs.about(pending.session, number):
                self._end_late(pending, number, body)
        except Exception:
            logger.exception("ending a late request failed", extra={"request": number})
        self._answer(number, None)

    def _end_late(self, pending: _Pending, number: int, body: Message) -> None:
        if pending.name == "commit":
            # Not a request of anyone: no answer to it is expected.
            self.event(requests.Abort(pending.session, 0, tuple(body.reservation)))  # type: ignore[attr-defined]
        elif isinstance(body, sessions_pb2.AttachStaging):
            self.staging.late(pending.session)
        elif isinstance(body, spans_pb2.AcquireRequest):
            self.event(events.Hurry(pending.session, number))
        elif isinstance(body, flights_pb2.AwaitRequest):
            self.event(requests.Leave(pending.session, 0, body.flight, number))

    def _broke(self, number: int) -> None:
        pending = self._pending.get(number)
        extra: dict[str, object] = {"request": number}
        if pending is not None:
            extra |= {"session": pending.session, "kind": pending.name, "wire": pending.call.wire}
        logger.exception("a request failed", extra=extra)
        self._answer(number, None, -1, errors.InternalError("a bug in the daemon, see its log"))

    def _answer(
        self,
        number: int,
        body: Message | None,
        fd: int = -1,
        failed: errors.RequestError | None = None,
    ) -> None:
        pending = self._take(number)
        if pending is None:
            return
        if pending.late:
            body, fd, failed = None, -1, errors.DeadlineExceeded("not done in time")
        if failed is not None:
            self.count_refusal(failed)
        try:
            pending.done(body, fd, failed)
        except Exception:
            logger.exception(
                "an answer could not be sent", extra={"request": number, "session": pending.session}
            )
        self.observer.end(pending.call, body, failed)

    def count_refusal(self, failed: errors.RequestError) -> None:
        """Something was refused, with this code."""
        self.counters[_refused(failed.code)] += 1

    def _take(self, number: int) -> _Pending | None:
        pending = self._pending.pop(number, None)
        if pending is None:
            return None
        for timer in (pending.timer, pending.hurry):
            if timer is not None:
                timer.cancel()
        numbers = self._of_session[pending.session]
        numbers.discard(number)
        if not numbers:
            del self._of_session[pending.session]
        return pending
