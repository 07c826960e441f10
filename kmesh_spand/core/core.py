"""The core: one object that knows what is stored, who holds it, and what must happen next."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from kmesh.handles import Location
from kmesh_spand.core import events as ev
from kmesh_spand.core import requests as rq
from kmesh_spand.core.batch import Batch
from kmesh_spand.core.check import check, check_flights
from kmesh_spand.core.check_disk import check_disk
from kmesh_spand.core.checkfamilies import check_families
from kmesh_spand.core.codes import Code
from kmesh_spand.core.config import CoreConfig, DiskConfig
from kmesh_spand.core.coreviews import CoreViews
from kmesh_spand.core.counters import COUNTERS
from kmesh_spand.core.disk import Disk
from kmesh_spand.core.effects import Effect, Reply
from kmesh_spand.core.endings import Endings
from kmesh_spand.core.families import FamilyBook
from kmesh_spand.core.familyviews import FamilyViews
from kmesh_spand.core.fates import Fates
from kmesh_spand.core.flights import Flights
from kmesh_spand.core.policy import LRU, Policy
from kmesh_spand.core.reading import Reading
from kmesh_spand.core.recoder import Recoder
from kmesh_spand.core.recovery import Recovery
from kmesh_spand.core.results import Refused, Result
from kmesh_spand.core.sessions import Session, SessionBook
from kmesh_spand.core.store import SpanStore
from kmesh_spand.core.sweep import Sweep
from kmesh_spand.core.tenants import Tenancy
from kmesh_spand.core.verify import Verifier
from kmesh_spand.core.writing import Writing


class Core:
    """Events in, effects out. Not thread-safe; ``handle`` never raises for what a client sends.

    Args:
        config: limits.
        policy: order of eviction, used by this core alone; LRU by default.
        tenancy: who shares with whom; each uid is by itself by default.
        batch: operations over many rows; plain Python by default.
        disk: limits of the disk tier; None: there is none.

    Attributes:
        counters: see ``counters.COUNTERS``; they only grow.
        fates: what has become of keys.
        sweep: which spans an operator's wish names.
        flights: who computes what is not stored.
        disk: the tier below host memory, or None.
        views: how all of it is shown, but for families and the disk.
        families, family_views: which spans are to be recipes over which, and how that is shown.
    """

    def __init__(
        self,
        config: CoreConfig,
        policy: Policy | None = None,
        tenancy: Tenancy | None = None,
        batch: Batch | None = None,
        disk: DiskConfig | None = None,
    ) -> None:
        self.config = config
        self.tenancy = tenancy or Tenancy()
        self.counters: dict[str, int] = dict.fromkeys(COUNTERS, 0)
        jobs = itertools.count(1)
        endings = Endings(config.remembered_keys)
        self._store = SpanStore(
            config.max_spans,
            policy or LRU(config.max_spans, batch),
            self.counters,
            endings,
            self.tenancy,
            jobs,
            batch,
        )
        self.disk: Disk | None = None
        if disk is not None:
            self.disk = Disk(disk, config, self._store, self.tenancy, jobs, batch)
        self.fates = Fates(self._store, endings, self.disk)
        self.sweep = Sweep(self._store, self.disk)
        self._book = SessionBook()
        self._verifier = Verifier(self._store, config.max_verify, jobs)
        self._recoder = Recoder(config, self._store, jobs)
        self.families = FamilyBook(config, self._store, self._recoder)
        self.family_views = FamilyViews(self._store, self.families, self._recoder)
        self._reading = Reading(
            config, self._store, self._book, self._verifier, self._recoder, self.disk
        )
        self.flights = Flights(config, self._store)
        self._store.watches = [self.flights, self.families]
        if self.disk is not None:
            self._store.watches.append(self.disk)
        self._writing = Writing(config, self._store, self._book, self._verifier, jobs, self.flights)
        self._recovery = Recovery(self._store, config, self._verifier)
        self.views = CoreViews(
            config.max_spans,
            self._store,
            self._book,
            self._writing,
            self.flights,
            self.families,
            self.disk,
        )
        self._requests: dict[type, Callable[..., Result | None]] = {
            rq.Acquire: self._reading.acquire,
            rq.Release: self._reading.release,
            rq.ReportCorrupt: self._reading.report,
            rq.Reserve: self._writing.reserve,
            rq.Commit: self._writing.commit,
            rq.Abort: self._writing.abort,
            rq.Claim: self.flights.claim,
            rq.Await: self.flights.wait,
            rq.Leave: self.flights.leave,
            rq.Land: self.flights.land,
            rq.AskProgress: self.flights.progress,
            rq.Declare: self.families.declare,
            rq.Join: self.families.join,
            rq.Fork: self.families.fork,
            rq.Dissolve: self.families.dissolve,
        }

    def handle(self, event: ev.Event, now_ms: int) -> list[Effect]:
        """What must be done because of ``event``, in order."""
        out: list[Effect] = []
        self._store.begin(out, now_ms)
        request = self._requests.get(type(event))
        if request is None:
            self._note(event)
        else:
            assert isinstance(event, rq.Request)
            session = self._book.sessions.get(event.session)
            result: Result | None
            if session is None:
                result = Refused(Code.UNAUTHENTICATED, "no such session")
            else:
                result = request(session, event)
            if isinstance(result, Refused):
                self.counters["refused"] += 1
            if result is not None:
                out.append(Reply(event.session, event.request, result))
        self._recoder.pump()
        if self.disk is not None:
            self.disk.pump()
        if self._store.sealed:
            self._store.give_up_empty()
        return out

    @property
    def behind(self) -> bool:
        """Whether work was left for a GoOn, so that others are served first."""
        return self._recoder.behind

    @property
    def waits(self) -> bool:
        """Whether something comes with time alone, so that ticks are needed."""
        return self.disk is not None or len(self._recoder.rests) > 0

    def _note(self, event: ev.Event) -> None:
        store = self._store
        match event:
            case ev.CopyDone(job, root):
                self._writing.copy_ended(job, root)
            case ev.CopyFailed(job):
                self._writing.copy_ended(job, None)
            case ev.VerifyDone(job, good, facts):
                self._verifier.done(job, good, facts)
                self._verifier.pump()
            case ev.Encoded(job, length, used):
                self._recoder.encoded(job, length, used)
            case ev.NotEncoded(job, why):
                self._recoder.not_encoded(job, why)
            case ev.EncodeSpoiled(job, span, bases):
                self._doubt(self._recoder.spoiled(job, bases, span=span))
            case ev.RecipeKept(job, root):
                self._recoder.kept(job, root)
            case ev.Densified(job, ok):
                self._doubt(self._recoder.densifier.done(job, ok))
            case ev.RecodeFailed(job):
                self._recoder.failed(job)
            case ev.SessionOpened(session, uid, engine, role):
                group = self.tenancy.group(uid)
                self._book.sessions[session] = Session(session, uid, engine, role, group)
            case ev.SessionClosed(session):
                self._close(session)
            case ev.SlabAdded(slab, capacity, owner, tier, sealed, replaces):
                if replaces is not None:
                    # What is said of this number is of memory that another daemon had.
                    self._recovery.drop(slab)
                store.add_slab(slab, capacity, owner, tier, sealed=sealed, replaces=replaces)
                self._recovery.place(slab)
                self._verifier.pump()
            case ev.WipeDone(job, ok):
                store.wiped(job, ok)
            case ev.Populated(slab, capacity):
                store.populate(slab, capacity)
            case ev.Recovered(records):
                self._recovery.start(records)
                self._verifier.pump()
            case ev.GraceEnded(expected):
                self._recovery.give_up(expected)
                store.end_grace()
            case ev.Evict(slots):
                for slot in slots:
                    if store.may_evict(slot + 1):
                        store.discard(slot + 1)
            case ev.EvictBases(spans, drop):
                self._recoder.densifier.evict_bases(spans, drop=drop)
            case ev.Drain():
                self._writing.draining = self._recoder.lanes.draining = True
                self.flights.drain()
            case ev.GoOn():
                pass
            case ev.Tick() if self.disk is None:
                pass
            case ev.Resume():
                self._writing.draining = self._recoder.lanes.draining = False
                self.flights.draining = False
            case _ if self.disk is not None:
                self._note_disk(self.disk, event)

    def _doubt(self, rows: Sequence[int]) -> None:
        for row in rows:
            self._verifier.doubt(row)
        self._verifier.pump()

    def _note_disk(self, disk: Disk, event: ev.Event) -> None:
        match event:
            case ev.Spilled(job, name):
                disk.spilled(job, name)
            case ev.SpillFailed(job, trouble):
                disk.spill_failed(job, trouble)
            case ev.Fetched(job):
                disk.fetches.fetched(job)
            case ev.FetchFailed(job, trouble):
                disk.fetches.failed(job, trouble)
            case ev.Unlinked(job, ok):
                disk.unlinked(job, ok=ok)
            case ev.Hurry(session, request):
                disk.fetches.hurry(self._book.sessions.get(session), request)
            case ev.DiskFound(files):
                disk.found(files)
            case ev.DiskReady():
                disk.ready = True
                disk.fetches.answered()
            case ev.DiskGone():
                disk.ready = False
            case ev.Forget(rows):
                disk.forget(rows)
            case ev.Tick():
                disk.fetches.retry()

    def _close(self, number: int) -> None:
        session = self._book.sessions.pop(number, None)
        if session is None:
            return
        session.closed = True
        for lease in list(session.leases.values()):
            self._reading.end_lease(lease)
        for reservation in list(session.reservations.values()):
            self._writing.end_reservation(reservation)
        self.flights.closed(session)
        if self.disk is not None:
            self.disk.fetches.closed(session)
        self._writing.drop_staging(session)

    def check(self) -> None:
        """Raise AssertionError unless every ledger is exact. O(everything), for tests."""
        held = self.disk.fetches.arriving(self._book) if self.disk is not None else ()
        check(self._store, self._book, self._writing, self._verifier, self._recovery.waiting, held)
        check_flights(self.flights, self._book)
        check_families(self._store, self._recoder, self.families)
        if self.disk is not None:
            check_disk(self.disk, self._store, self._book)

    @property
    def idle(self) -> bool:
        """Whether no copy is in flight, and nothing that is to be kept waits for the disk."""
        return not self._writing.copies and (self.disk is None or self.disk.settled)

    @property
    def copies(self) -> int:
        """Copies in flight."""
        return len(self._writing.copies)

    @property
    def draining(self) -> bool:
        """Whether new reservations are refused."""
        return self._writing.draining

    @property
    def policy_faults(self) -> tuple[int, int]:
        """How often the eviction policy failed since it last did well, and when last (ms)."""
        return self._store.policy_faults

    @property
    def place_failures(self) -> tuple[int, int]:
        """How often no room was found since some was, although spans may be evicted; and when
        last (ms)."""
        return self._store.place_failures

    def may_map(self, slab: int, uid: int) -> bool:
        """Whether a slab holds, and only ever held, what processes of a uid may see."""
        found = self._store.slabs.get(slab)
        return found is not None and not found.lost and found.group == self.tenancy.group(uid)

    def has_slab(self, slab: int) -> bool:
        """Whether there is such a slab."""
        return slab in self._store.slabs

    def populated(self, slab: int) -> bool:
        """Whether a slab's payload area has all of its pages."""
        found = self._store.slabs.get(slab)
        return found is not None and found.populated == found.tiles

    def place(self, session: int, lease: int, entry: int) -> Location | None:
        """Where a span lies that an open session's engine leases; None for any other."""
        found = self._book.sessions.get(session)
        return None if found is None else self._reading.place(found, lease, entry)
