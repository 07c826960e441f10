"""Acquire, Release, ReportCorrupt: how spans are read."""

from __future__ import annotations

from collections.abc import Sequence

from kmesh.layout import TILE_BYTES
from kmesh_spand.core.checks import check_acquire, too_many
from kmesh_spand.core.codes import Code, Reason
from kmesh_spand.core.config import CoreConfig
from kmesh_spand.core.effects import (
    AcquireResult,
    Refused,
    ReleaseResult,
    ReportCorruptResult,
    Result,
)
from kmesh_spand.core.events import Acquire, Release, ReportCorrupt
from kmesh_spand.core.sessions import Lease, Session, SessionBook
from kmesh_spand.core.states import State, Trigger
from kmesh_spand.core.store import SpanStore
from kmesh_spand.core.table import KEY_BYTES, gather
from kmesh_spand.core.tags import scope
from kmesh_spand.core.verify import Verifier

_COMMITTED = int(State.COMMITTED)


class Reading:
    """Leases on committed spans, and what happens to spans that readers distrust."""

    def __init__(
        self, config: CoreConfig, store: SpanStore, book: SessionBook, verifier: Verifier
    ) -> None:
        self._config = config
        self._store = store
        self._book = book
        self._verifier = verifier

    def acquire(self, session: Session, event: Acquire) -> Result:
        """Lease what is committed; a lease belongs to the session that asked."""
        if refused := check_acquire(event, self._config):
            return refused
        config = self._config
        if (
            len(session.leases) >= config.max_leases
            or session.leased_spans >= config.max_leased_spans
        ):
            return Refused(Code.EXHAUSTED, "too many open leases", "keys")
        counters, table = self._store.counters, self._store.table
        tenant = self._store.tenants.find(session.group, event.salt, event.tier)
        rows = self._find(event, tenant.number if tenant else 0)
        columns = (
            table.slab,
            table.tile,
            table.length,
            table.tokens,
            table.generation,
            table.root,
        )
        states, *values = gather(rows, table.state, *columns)
        reasons: Sequence[int]
        if states.count(_COMMITTED) == len(rows):
            reasons, held, missing = [0] * len(rows), rows, 0
        else:
            reasons = self._sort_out(rows, len(event.shards), event.prefix)
            held = [row for row in rows if row]
            missing = reasons.count(Reason.MISS)
            values = gather(rows, *columns)
        entries = len(event.keys) // KEY_BYTES * len(event.shards)
        pending = len(rows) - len(held) - missing
        missing += entries - len(rows)
        counters["acquires"] += 1
        counters["hits"] += len(held)
        counters["pending"] += pending
        counters["misses"] += missing
        if tenant is not None:
            tenant.counters["acquires"] += 1
            tenant.counters["hits"] += len(held)
            tenant.counters["misses"] += missing
        session.hits += len(held)
        session.pending += pending
        session.misses += missing
        slab, tile, length, tokens, generation, root = values
        lease = 0
        if held:
            self._store.pin(held)
            lease = self._book.lease(session, rows, len(held), sum(length)).id
        rest = entries - len(tile)
        zeros = (0,) * rest
        return AcquireResult(
            lease,
            [*reasons, *[Reason.MISS] * rest] if rest else reasons,
            slab + zeros,
            [at * TILE_BYTES for at in tile] + [0] * rest,
            length + zeros,
            tokens + zeros,
            generation + zeros,
            root + zeros,
        )

    def _find(self, event: Acquire, tenant: int) -> list[int]:
        """Rows of all entries, key-major; for a prefix, up to the first key not found."""
        find = self._store.table.find_all
        runs = [find(event.keys, scope(tenant, code)) for code in event.shards]
        if event.prefix:
            known = min(run.index(0) + 1 if 0 in run else len(run) for run in runs)
            runs = [run[:known] for run in runs]
        return (
            runs[0] if len(runs) == 1 else [row for key in zip(*runs, strict=True) for row in key]
        )

    def _sort_out(self, rows: list[int], shards: int, prefix: bool) -> list[int]:
        """Reasons of all rows; what can't be leased becomes 0 in ``rows``."""
        store, states = self._store, self._store.table.state
        reasons: list[int] = []
        for entry, found in enumerate(rows):
            if not found:
                reasons.append(Reason.MISS)
                continue
            row = store.resolve(found)
            state = states[row]
            if state == State.COMMITTED:
                rows[entry] = row
                reasons.append(Reason.OK)
                continue
            if state == State.RECOVERED:
                self._verifier.want(row)
            reasons.append(Reason.PENDING)
            rows[entry] = 0
        if prefix:
            bad = next((i for i, reason in enumerate(reasons) if reason), len(rows))
            first = bad - bad % shards
            for entry in range(first, len(rows)):
                if entry >= first + shards or not reasons[entry]:
                    reasons[entry] = Reason.MISS
                rows[entry] = 0
        self._verifier.pump()
        return reasons

    def release(self, session: Session, event: Release) -> Result:
        """End leases; what is unknown, ended or another session's is refused, and counted."""
        if refused := too_many("leases", len(event.leases), self._config.max_batch):
            return refused
        released, bad = 0, []
        for number in event.leases:
            lease = session.leases.get(number)
            if lease is None:
                bad.append(number)
            else:
                self.end_lease(lease)
                released += 1
        self._store.counters["released"] += released
        self._store.counters["release_refused"] += len(bad)
        return ReleaseResult(released, bad)

    def end_lease(self, lease: Lease) -> None:
        """End a lease, whoever asks."""
        self._book.end_lease(lease)
        rows: Sequence[int] = lease.rows
        if lease.spans != len(rows):
            rows = [row for row in rows if row]
        self._store.unpin(rows)

    def report(self, session: Session, event: ReportCorrupt) -> Result:
        """Take reported spans out of service until they have been read again."""
        if refused := too_many("entry", len(event.entries), self._config.max_batch):
            return refused
        lease = self._book.leases.get(event.lease)
        if lease is None or not lease.session.same_engine(session):
            return Refused(Code.NOT_FOUND, "no such lease of this engine", "lease")
        store, accepted = self._store, 0
        for entry in event.entries:
            row = lease.rows[entry] if 0 <= entry < len(lease.rows) else 0
            if not row:
                continue
            accepted += 1
            if store.table.state[row] == State.COMMITTED:
                store.move(row, Trigger.REPORT)
                self._verifier.want(row)
        store.counters["reported"] += accepted
        self._verifier.pump()
        return ReportCorruptResult(accepted)
