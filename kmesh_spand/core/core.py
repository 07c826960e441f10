"""The core: one object that knows what is stored, who holds it, and what must happen next."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from kmesh.handles import Location
from kmesh.layout import TILE_BYTES
from kmesh_spand.core import events as ev
from kmesh_spand.core import requests as rq
from kmesh_spand.core.batch import Batch
from kmesh_spand.core.check import check, check_flights
from kmesh_spand.core.check_disk import check_disk
from kmesh_spand.core.checkfamilies import check_families
from kmesh_spand.core.codes import Code
from kmesh_spand.core.config import CoreConfig, DiskConfig
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
from kmesh_spand.core.states import STORED, State
from kmesh_spand.core.store import TICK_SHIFT, SpanStore
from kmesh_spand.core.sweep import Sweep
from kmesh_spand.core.tenants import Tenancy, Tenant, tenant_name
from kmesh_spand.core.verify import Verifier
from kmesh_spand.core.views import (
    CoreStatus,
    FlightRow,
    NamespaceRow,
    SessionRow,
    SlabStatus,
    SpanRow,
    TenantRow,
)
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

    # Views

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

    def status(self) -> CoreStatus:
        """Counts of everything; O(slabs)."""
        store, book, table = self._store, self._book, self._store.table
        return CoreStatus(
            draining=self.draining,
            idle=self.idle,
            spans=sum(store.by_state[state] for state in STORED),
            span_bytes=store.stored_bytes,
            max_spans=self.config.max_spans,
            slots=self.config.max_spans - table.vacant,
            sessions=len(book.sessions),
            leases=len(book.leases),
            leased_spans=store.pinned,
            leased_bytes=store.leased_bytes,
            reservations=len(book.reservations),
            index_entries=store.published + (self.disk.book.published if self.disk else 0),
            families=len(self.families),
            mirrors=store.mirrors.spans,
            mirror_bytes=store.mirrors.stored_bytes,
            mirror_dense_bytes=store.mirrors.dense_bytes,
            mirror_used_bytes=store.mirrors.tiles * TILE_BYTES,
            base_spans=len(store.mirrors.of_base),
            recovering=store.by_state[State.RECOVERED] + store.by_state[State.VERIFYING],
            slabs=tuple(
                SlabStatus(
                    number,
                    slab.tiles * TILE_BYTES,
                    slab.populated * TILE_BYTES,
                    slab.used * TILE_BYTES,
                    _name(slab.tenant) if slab.tenant else "",
                    slab.sealed,
                )
                for number, slab in sorted(store.slabs.items())
            ),
        )

    def spans(
        self,
        after_slot: int = -1,
        limit: int = 1000,
        namespace: bytes = b"",
        *,
        now_ms: int,
        group: int | None = None,
    ) -> list[SpanRow]:
        """Up to ``limit`` spans with a slot above ``after_slot``, by slot.

        Args:
            namespace: 32-byte digest, or empty for all.
            group: whose; None for all.
        """
        found: list[SpanRow] = []
        table = self._store.table
        wanted = table.spaces.find(namespace) if namespace else 0
        if namespace and not wanted:
            return found
        row = after_slot + 1
        while len(found) < limit and row < table.rows:
            row += 1
            if wanted:
                try:
                    row = table.space.index(wanted, row)
                except ValueError:
                    break
            if table.state[row] in (State.FREE, State.ALIAS):
                continue
            if group is None or self._store.tenant_of(row).group == group:
                found.append(self._span_row(row, now_ms))
        return found

    def _span_row(self, row: int, now_ms: int) -> SpanRow:
        table = self._store.table
        tick = now_ms >> TICK_SHIFT
        stored = table.state[row] in STORED
        idle = stored and not table.pins[row]
        mirror = self._store.mirrors.by_row.get(row)
        return SpanRow(
            slot=row - 1,
            key=table.key_of(row),
            namespace=table.spaces.value(table.space[row]),
            slab=table.slab[row],
            offset=table.tile[row] * TILE_BYTES,
            length=table.length[row],
            start=table.start[row],
            tokens=table.tokens[row],
            shard=self._store.shard(row),
            generation=table.generation[row],
            state=State(table.state[row]).name.lower(),
            leases=table.pins[row],
            age_ms=max(0, tick - table.born[row] << TICK_SHIFT) if stored else 0,
            idle_ms=max(0, tick - table.used[row] << TICK_SHIFT) if idle else 0,
            dense=self._store.mirrors.dense(row),
            bases=len(mirror.bases) if mirror else 0,
            mirrors=len(self._store.mirrors.of_base.get(row, ())),
        )

    def tenants(self, group: int | None = None) -> list[TenantRow]:
        """Tenants that have something, or had not long ago, by name.

        Args:
            group: whose; None for all.
        """
        return sorted(
            (
                TenantRow(
                    name=_name(tenant),
                    group=tenant.group,
                    quota=tenant.quota * TILE_BYTES,
                    used=tenant.tiles * TILE_BYTES,
                    spans=tenant.spans,
                    stored_bytes=tenant.stored_bytes,
                    slabs=len(tenant.slabs),
                    counters=dict(tenant.counters),
                )
                for tenant in self._store.tenants
                if group is None or tenant.group == group
            ),
            key=lambda row: row.name,
        )

    def flight_rows(
        self, after: int, limit: int, *, now_ms: int, group: int | None = None
    ) -> list[FlightRow]:
        """Up to ``limit`` flights with a number above ``after``, in order.

        Args:
            group: whose; None for all.
        """
        return [
            FlightRow(
                flight=flight.id,
                state=flight.state.name.lower(),
                tenant=tenant_name(*flight.who),
                leader=flight.leader.id if flight.leader else 0,
                keys=flight.promised - flight.begin,
                landed=flight.frontier - flight.begin,
                waiters=len(flight.waiters),
                deaths=flight.deaths,
                age_ms=max(0, now_ms - flight.pace.began_ms),
                key=flight.keys[flight.frontier],
            )
            for flight in itertools.islice(
                (
                    flight
                    for number, flight in self.flights.by_id.items()
                    if number > after and group in (None, flight.who[0])
                ),
                limit,
            )
        ]

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

    def namespaces(self, group: int | None = None) -> list[NamespaceRow]:
        """All namespaces of which something is in memory or on disk, in no order.

        Args:
            group: whose spans are counted; None for all.
        """
        store = self._store
        held: dict[bytes, tuple[int, int]] = {}
        for tenant in store.tenants:
            for number, (spans, size) in tenant.spaces.items():
                if group in (None, tenant.group):
                    digest = store.table.spaces.value(number)
                    before = held.get(digest, (0, 0))
                    held[digest] = before[0] + spans, before[1] + size
        there = self.disk.book.namespaces(group) if self.disk is not None else {}
        rows = []
        for digest in dict.fromkeys((*held, *there)):
            (spans, size), (files, file_bytes) = held.get(digest, (0, 0)), there.get(digest, (0, 0))
            rows.append(NamespaceRow(digest, spans, size, files, file_bytes))
        return rows

    def session_info(self, session: int) -> SessionRow | None:
        """What an open session holds; None for any other."""
        found = self._book.sessions.get(session)
        if found is None:
            return None
        return SessionRow(
            session=found.id,
            leases=len(found.leases),
            leased_spans=found.leased_spans,
            leased_bytes=found.leased_bytes,
            reservations=len(found.reservations),
            reserved_bytes=found.reserved_bytes,
            copies=found.copies,
            hits=found.hits,
            misses=found.misses,
            pending=found.pending,
            reasons=dict(found.reasons),
            committed=found.committed,
            committed_bytes=found.committed_bytes,
        )


def _name(tenant: Tenant) -> str:
    return tenant_name(tenant.group, tenant.salt, tenant.tier)
