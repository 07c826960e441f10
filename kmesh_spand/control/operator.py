"""What an operator does to a running daemon: asks why, evicts, drains, watches."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass

from kmesh import errors
from kmesh.keys import KEY_BYTES
from kmesh.v1 import admin_pb2
from kmesh_spand.control.explain import MAX_KEYS, Explainer
from kmesh_spand.control.families import seen_by
from kmesh_spand.control.handler import Handler
from kmesh_spand.control.registry import Member
from kmesh_spand.core import events
from kmesh_spand.core.sweep import Swept

logger = logging.getLogger(__name__)

MAX_WATCHERS = 64
#: Slots, or keys, that one turn of an eviction looks at before others are served.
_TURN = 512
_POLL_SECONDS = 0.02
#: A watcher gets what happens within this time in one message.
_GATHER_SECONDS = 0.01
_LOOK_SECONDS = 1.0
#: Filtered events after which a watcher is told where it is.
_QUIET = 1024
#: What callers of Drain have to read that the daemon ends now.
_GOODBYE_SECONDS = 0.1


@dataclass(slots=True)
class _Drain:
    """One drain. Times are of the loop's clock."""

    began: float
    until: float
    stop: bool
    done: bool = False
    late: bool = False
    stopping: bool = False

    @property
    def over(self) -> bool:
        return self.done or self.late


class Operator:
    """Answers Admin's calls that change something or go on for long.

    Args:
        restarts: how often control was started again.
        stop: asks for the end of the whole daemon.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        handler: Handler,
        restarts: int,
        stop: Callable[[], None],
    ) -> None:
        self._loop = loop
        self._handler = handler
        self._stop = stop
        self._explainer = Explainer(handler, restarts)
        self._watchers = 0
        self._drain: _Drain | None = None
        self._task: asyncio.Task[None] | None = None
        # Of several at once each would have a turn before others are served.
        self._evicting = asyncio.Lock()

    async def explain(self, request: admin_pb2.ExplainRequest) -> admin_pb2.ExplainResponse:
        """Answer of Admin.Explain. RequestError names the field at fault."""
        return await self._explainer.explain(request)

    # Evict.

    async def evict(
        self, member: Member, request: admin_pb2.EvictRequest
    ) -> admin_pb2.EvictResponse:
        """Answer of Admin.Evict; one at a time, and others are served between its turns.

        Only what the member may see is chosen, and counted.

        Raises:
            RequestError: nothing, or two things at once, were chosen.
        """
        _check_evict(request)
        async with self._evicting:
            return await self._evict(member, request)

    async def _evict(
        self, member: Member, request: admin_pb2.EvictRequest
    ) -> admin_pb2.EvictResponse:
        group = seen_by(self._handler.core.tenancy, member.peer.uid)
        answer = admin_pb2.EvictResponse()
        bases: list[tuple[int, int]] = []
        for swept in self._chosen(request, group):
            answer.spans += len(swept.slots)
            answer.bytes += swept.size
            answer.leased += swept.leased
            answer.busy += swept.busy
            bases += swept.bases
            if swept.slots and not request.dry_run:
                self._handler.event(events.Evict(swept.slots))
            await asyncio.sleep(0)
        answer.held = len(bases)
        for at in range(0, 0 if request.dry_run else len(bases), _TURN):
            # Their mirrors may have been chosen too, and are gone by now.
            part = bases[at : at + _TURN]
            self._handler.event(events.EvictBases(part, request.drop_mirrors))
        for swept in self._chosen_files(request, group):
            answer.disk_spans += len(swept.slots)
            answer.disk_bytes += swept.size
            answer.busy += swept.busy
            if swept.slots and not request.dry_run:
                self._handler.event(events.Forget(swept.slots))
            await asyncio.sleep(0)
        if not request.dry_run:
            logger.info(
                "evicted by an operator",
                extra={
                    "session": member.id,
                    "uid": member.peer.uid,
                    "spans": answer.spans,
                    "bytes": answer.bytes,
                    "leased": answer.leased,
                    "files": answer.disk_spans,
                },
            )
        return answer

    def _chosen(self, request: admin_pb2.EvictRequest, group: int | None) -> Iterator[Swept]:
        sweep = self._handler.core.sweep
        age, idle = request.min_age_ms, request.min_idle_ms
        if request.keys:
            keys = [
                request.keys[at : at + KEY_BYTES] for at in range(0, len(request.keys), KEY_BYTES)
            ]
            keys = list(dict.fromkeys(keys))
            for at in range(0, len(keys), _TURN):
                part = b"".join(keys[at : at + _TURN])
                now = self._handler.now_ms()
                yield sweep.keys(part, min_age_ms=age, min_idle_ms=idle, now_ms=now, group=group)
            return
        slot: int | None = 0
        while slot is not None:
            swept = sweep.part(
                slot,
                _TURN,
                request.namespace,
                min_age_ms=age,
                min_idle_ms=idle,
                now_ms=self._handler.now_ms(),
                group=group,
            )
            yield swept
            slot = swept.next_slot

    def _chosen_files(self, request: admin_pb2.EvictRequest, group: int | None) -> Iterator[Swept]:
        """Files go with their spans. Of what is only in files neither age nor use is known."""
        sweep = self._handler.core.sweep
        if request.min_age_ms or request.min_idle_ms:
            return
        if request.keys:
            for at in range(0, len(request.keys), _TURN * KEY_BYTES):
                yield sweep.files_of(request.keys[at : at + _TURN * KEY_BYTES], group)
            return
        row: int | None = 0
        while row is not None:
            swept = sweep.files(row, _TURN, request.namespace, group)
            yield swept
            row = swept.next_slot

    # Drain.

    async def drain(
        self, member: Member, request: admin_pb2.DrainRequest
    ) -> AsyncIterator[admin_pb2.DrainProgress]:
        """Answers of Admin.Drain. The drain itself does not depend on who listens.

        Raises:
            Draining: it is too late to cancel.
        """
        who = {"session": member.id, "uid": member.peer.uid}
        if request.cancel:
            self._cancel()
            logger.info("drain cancelled", extra=who)
            yield self._progress()
            return
        if not self._handler.draining:
            self._begin(request)
            logger.info("draining", extra={**who, "stop": request.stop})
        last = None
        while True:
            progress = self._progress()
            elapsed, progress.elapsed_ms = progress.elapsed_ms, 0
            if progress != last:
                last = admin_pb2.DrainProgress()
                last.CopyFrom(progress)
                progress.elapsed_ms = elapsed
                yield progress
            over = progress.done or progress.late
            stops = self._drain is not None and self._drain.stop
            if self._drain is None or (over and (progress.stopping or not stops)):
                return
            await asyncio.sleep(_POLL_SECONDS)

    def _begin(self, request: admin_pb2.DrainRequest) -> None:
        now = self._loop.time()
        until = now + (request.deadline_ms or self._handler.settings.shutdown_timeout_ms) / 1000
        known = self._drain
        if known is not None and not known.over:
            known.stop |= request.stop
            if request.deadline_ms:
                known.until = until
            return
        self._drain = _Drain(now, until, request.stop)
        if not self._handler.core.draining:
            self._handler.event(events.Drain())
            self._handler.journal.add(admin_pb2.EVENT_KIND_DRAIN_STARTED, text="by an operator")
        self._task = self._loop.create_task(self._see_through(self._drain))

    async def _see_through(self, drain: _Drain) -> None:
        while True:
            core = self._handler.core
            if core.idle and not core.views.status().reservations:
                drain.done = True
                break
            if self._loop.time() >= drain.until:
                drain.late = True
                break
            await asyncio.sleep(_POLL_SECONDS)
        text = "drained" if drain.done else "late"
        self._handler.journal.add(admin_pb2.EVENT_KIND_DRAIN_ENDED, text=text)
        if drain.stop:
            drain.stopping = True
            await asyncio.sleep(_GOODBYE_SECONDS)
            self._stop()

    def _cancel(self) -> None:
        if self._handler.draining or (self._drain is not None and self._drain.stop):
            raise errors.Draining("the daemon is stopping")
        if self._task is not None:
            self._task.cancel()
        if self._handler.core.draining:
            self._handler.event(events.Resume())
            self._handler.journal.add(admin_pb2.EVENT_KIND_DRAIN_ENDED, text="cancelled")
        self._drain = None

    def _progress(self) -> admin_pb2.DrainProgress:
        core, drain = self._handler.core, self._drain
        status = core.views.status()
        progress = admin_pb2.DrainProgress(
            draining=core.draining or self._handler.draining,
            reservations=status.reservations,
            copies=core.copies,
            leases=status.leases,
            sessions=status.sessions,
            stopping=self._handler.draining,
        )
        if drain is not None:
            progress.done, progress.late = drain.done, drain.late
            progress.stopping = progress.stopping or drain.stopping
            progress.elapsed_ms = int((self._loop.time() - drain.began) * 1000)
        return progress

    def stopping(self) -> None:
        """The whole daemon is told to stop; those who watch hear of it."""
        self._handler.journal.add(admin_pb2.EVENT_KIND_DRAIN_STARTED, text="the daemon is stopping")

    def close(self) -> None:
        """Ends what runs in the background."""
        if self._task is not None:
            self._task.cancel()

    # Watch.

    async def watch(
        self, member: Member, request: admin_pb2.WatchRequest
    ) -> AsyncIterator[admin_pb2.WatchResponse]:
        """Answers of Admin.Watch; the first one at once, with events or without.

        Raises:
            RequestError: the place to go on from is none, or too many watch already.
            Unauthenticated: the session has ended.
        """
        journal = self._handler.journal
        after, lost = request.after_sequence, False
        if request.epoch and request.epoch != journal.epoch:
            after, lost = 0, True
        if request.only_new:
            after = journal.last
        if after > journal.last:
            raise errors.InvalidArgument(
                f"the newest event is {journal.last}", field="after_sequence"
            )
        if self._watchers == MAX_WATCHERS:
            raise errors.Exhausted(f"{MAX_WATCHERS} watch already")
        self._watchers += 1
        kinds = frozenset(request.kinds)
        told: int | None = None
        try:
            while True:
                answer = journal.read(after, kinds)
                answer.lost = answer.lost or lost
                lost, after = False, answer.last_sequence
                if answer.events or answer.lost or told is None or after - told >= _QUIET:
                    told = after
                    yield answer
                if after == journal.last:
                    try:
                        async with asyncio.timeout(_LOOK_SECONDS):
                            await journal.news(after)
                    except TimeoutError:
                        pass
                    await asyncio.sleep(_GATHER_SECONDS)
                else:
                    await asyncio.sleep(0)
                if member.id not in self._handler.registry.members:
                    raise errors.Unauthenticated("the session has ended", field="kmesh-session")
        finally:
            self._watchers -= 1


def _check_evict(request: admin_pb2.EvictRequest) -> None:
    chosen = [name for name in ("namespace", "keys", "all") if getattr(request, name)]
    if len(chosen) > 1:
        raise errors.InvalidArgument(f"{chosen[0]} is chosen already", field=chosen[1])
    if not (chosen or request.min_age_ms or request.min_idle_ms):
        raise errors.InvalidArgument("nothing is chosen", field="all")
    if len(request.namespace) not in (0, KEY_BYTES):
        raise errors.InvalidArgument(f"not {KEY_BYTES} bytes", field="namespace")
    if len(request.keys) % KEY_BYTES:
        raise errors.InvalidArgument(f"no multiple of {KEY_BYTES} bytes", field="keys")
    if len(request.keys) > MAX_KEYS * KEY_BYTES:
        raise errors.TooLarge(f"at most {MAX_KEYS} keys", field="keys")
