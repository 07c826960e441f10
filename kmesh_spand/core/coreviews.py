"""What the core shows of spans, sessions, tenants and flights."""

from __future__ import annotations

import itertools

from kmesh.layout import TILE_BYTES
from kmesh_spand.core.disk import Disk
from kmesh_spand.core.families import FamilyBook
from kmesh_spand.core.flights import Flights
from kmesh_spand.core.sessions import SessionBook
from kmesh_spand.core.states import STORED, State
from kmesh_spand.core.store import TICK_SHIFT, SpanStore
from kmesh_spand.core.tenants import Tenant, tenant_name
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


class CoreViews:
    """Looks, changes nothing.

    Args:
        max_spans: that the catalog has room for.
        disk: the tier below host memory, or None.
    """

    def __init__(
        self,
        max_spans: int,
        store: SpanStore,
        book: SessionBook,
        writing: Writing,
        flights: Flights,
        families: FamilyBook,
        disk: Disk | None,
    ) -> None:
        self._max_spans = max_spans
        self._store = store
        self._book = book
        self._writing = writing
        self._flights = flights
        self._families = families
        self._disk = disk

    def status(self) -> CoreStatus:
        """Counts of everything; O(slabs)."""
        store, book, table = self._store, self._book, self._store.table
        return CoreStatus(
            draining=self._writing.draining,
            spans=sum(store.by_state[state] for state in STORED),
            span_bytes=store.stored_bytes,
            max_spans=self._max_spans,
            slots=self._max_spans - table.vacant,
            sessions=len(book.sessions),
            leases=len(book.leases),
            leased_spans=store.pinned,
            leased_bytes=store.leased_bytes,
            reservations=len(book.reservations),
            index_entries=store.published + (self._disk.book.published if self._disk else 0),
            families=len(self._families),
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
                    for number, flight in self._flights.by_id.items()
                    if number > after and group in (None, flight.who[0])
                ),
                limit,
            )
        ]

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
        there = self._disk.book.namespaces(group) if self._disk is not None else {}
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
