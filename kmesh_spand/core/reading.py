"""Acquire, Release, ReportCorrupt: how spans are read."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import chain

from kmesh.handles import Location
from kmesh.layout import TILE_BYTES
from kmesh_spand.core.batch import KEY_BYTES, Rows
from kmesh_spand.core.checks import check_acquire, too_many
from kmesh_spand.core.codes import Code, Reason
from kmesh_spand.core.config import CoreConfig
from kmesh_spand.core.disk import Disk
from kmesh_spand.core.recoder import Recoder
from kmesh_spand.core.requests import Acquire, Release, ReportCorrupt
from kmesh_spand.core.results import (
    AcquireResult,
    BasePlace,
    Refused,
    ReleaseResult,
    ReportCorruptResult,
    Result,
)
from kmesh_spand.core.sessions import Lease, Session, SessionBook
from kmesh_spand.core.states import State
from kmesh_spand.core.store import SpanStore
from kmesh_spand.core.tags import scope
from kmesh_spand.core.verify import Verifier

_COMMITTED, _FREE = int(State.COMMITTED), int(State.FREE)


class Reading:
    """Leases on committed spans, and what happens to spans that readers distrust.

    Args:
        disk: where spans may be that memory has not; None: there is none.
    """

    def __init__(
        self,
        config: CoreConfig,
        store: SpanStore,
        book: SessionBook,
        verifier: Verifier,
        recoder: Recoder,
        disk: Disk | None = None,
    ) -> None:
        self._recoder = recoder
        self._config = config
        self._store = store
        self._batch = store.table.batch
        self._book = book
        self._verifier = verifier
        self._disk = disk
        if disk is not None:
            disk.fetches.acquire = self._answer_late

    def acquire(self, session: Session, event: Acquire) -> Result | None:
        """Lease what is committed; a lease belongs to the session that asked.

        None when the answer comes later, with what is fetched from disk for it.
        """
        if refused := check_acquire(event, self._config):
            return refused
        if refused := self._too_many_leases(session):
            return refused
        if event.wait and self._disk is not None and not event.tier:
            rows, away = self._find(session, event)
            if self._disk.fetches.wait(session, event, rows, away):
                return None
        return self._answer(session, event)

    def _too_many_leases(self, session: Session) -> Refused | None:
        config = self._config
        if (
            len(session.leases) < config.max_leases
            and session.leased_spans < config.max_leased_spans
        ):
            return None
        return Refused(Code.EXHAUSTED, "too many open leases", "keys")

    def _answer_late(self, session: Session, event: Acquire) -> Result:
        """What an Acquire gets that has waited: others of its session may have come meanwhile."""
        refused = self._too_many_leases(session)
        if refused is None:
            return self._answer(session, event)
        self._store.counters["refused"] += 1
        return refused

    def _answer(self, session: Session, event: Acquire) -> AcquireResult:
        """What memory has now; what only the disk has is wanted from here on."""
        counters, table, gather = self._store.counters, self._store.table, self._batch.gather
        tenant = self._store.tenants.find(session.group, event.salt, event.tier)
        rows, away = self._find(session, event)
        states = self._batch.gather_bytes(rows, table.state)
        reasons: Sequence[int]
        hits, absent = states.count(_COMMITTED), states.count(_FREE)
        mirrors, wanted = self._store.mirrors.among(rows), list[tuple[int, int]]()
        if hits == len(rows) and not mirrors:
            reasons, held = [0] * len(rows), rows
        else:
            if hits + absent == len(rows) and away is None and not mirrors:
                reasons = self._miss(rows, len(event.shards), event.prefix)
            else:
                reasons, wanted = self._sort_out(session, rows, away, event)
            held = array("I", filter(None, rows))
        if held:
            # Before room is made for anything else.
            self._store.pin(held)
        if wanted:
            reasons = self._densify(reasons, wanted)
        if not event.recipes:
            self._recoder.rests.read(rows)
        elif tenant is not None:
            self._recoder.wanted(tenant)
        missing = reasons.count(Reason.MISS)
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
        # What was not looked for is a miss like any other: row 0 has zeros for it.
        rows.frombytes(bytes(rows.itemsize * (entries - len(rows))))
        length = gather(rows, table.length)
        lease = 0
        if held:
            lease = self._book.lease(session, rows, len(held), sum(length)).id
        recipes = self._recipes(rows, len(event.shards)) if event.recipes else ()
        return AcquireResult(
            lease,
            [*reasons, *[Reason.MISS] * (entries - len(reasons))],
            gather(rows, table.slab),
            gather(rows, table.tile, "Q", TILE_BYTES),
            length,
            gather(rows, table.tokens),
            gather(rows, table.generation),
            gather(rows, table.root),
            gather(rows, table.start) if event.positions else array("I"),
            *recipes,
        )

    def _recipes(
        self, rows: Rows, shards: int
    ) -> tuple[()] | tuple[array[int], array[int], list[BasePlace]]:
        """Of entries that are recipes: length and root of their payloads, and their bases."""
        mirrors, table = self._store.mirrors, self._store.table
        if not mirrors.among(rows):
            return ()
        found = [mirrors.by_row.get(row) for row in rows]
        bases: dict[int, int] = {}
        for entry, mirror in enumerate(found):
            for base in mirror.bases if mirror else ():
                bases.setdefault(base, entry % shards)
        places = [
            BasePlace(
                shard,
                table.key_of(row),
                table.slab[row],
                table.tile[row] * TILE_BYTES,
                table.length[row],
                table.generation[row],
                table.root[row],
                table.tokens[row],
                table.start[row],
            )
            for row, shard in bases.items()
        ]
        lengths = array("Q", [mirror.length if mirror else 0 for mirror in found])
        return lengths, array("Q", [mirror.root if mirror else 0 for mirror in found]), places

    def _find(self, session: Session, event: Acquire) -> tuple[Rows, Rows | None]:
        """Rows of all entries, key-major; for a prefix, up to the first key not found.

        And the disk's files of those that memory has not, or None.
        """
        tenant = self._store.tenants.find(session.group, event.salt, event.tier)
        number, find = tenant.number if tenant else 0, self._store.table.find_all
        runs: list[Rows] = []
        files: list[Rows | None] = []
        known = len(event.keys) // KEY_BYTES
        for code in event.shards:
            run, found = find(event.keys, scope(number, code))
            away = None
            if found < len(run):
                away = self._away(session, event, code)
                if event.prefix:
                    known = min(known, _end(run, away))
            runs.append(run)
            files.append(away)
        rows = runs[0][:known] if len(runs) == 1 else _interleaved(runs, known)
        if not any(files):
            return rows, None
        nowhere = array("I", bytes(known * rows.itemsize))
        there = _interleaved([nowhere if away is None else away for away in files], known)
        return rows, there

    def _away(self, session: Session, event: Acquire, shard: int) -> Rows | None:
        if self._disk is None or event.tier:
            return None
        return self._disk.book.find_all(session.group, event.salt, event.keys, shard)

    def _miss(self, rows: Rows, shards: int, prefix: bool) -> list[Reason]:
        """Reasons of rows that are committed or 0; what can't be leased becomes 0."""
        if prefix:
            whole = rows.index(0) // shards * shards
            rows[whole:] = array("I", bytes(rows.itemsize * (len(rows) - whole)))
            return [Reason.OK] * whole + [Reason.MISS] * (len(rows) - whole)
        return [Reason.OK if row else Reason.MISS for row in rows]

    def _sort_out(
        self, session: Session, rows: Rows, away: Rows | None, event: Acquire
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Reasons of all rows; what can't be leased becomes 0 in ``rows``.

        Also (entry, row) of mirrors that were asked for dense; their reason is PENDING.
        """
        store, states = self._store, self._store.table.state
        shards, mirrors = len(event.shards), self._store.mirrors.by_row
        reasons: list[int] = []
        wanted: list[tuple[int, int]] = []
        bases: set[int] = set()
        for entry, found in enumerate(rows):
            if not found:
                there = away[entry] if away is not None else 0
                comes = there and self._disk and self._disk.fetches.want(session, there)
                reasons.append(Reason.PENDING if comes else Reason.MISS)
                continue
            row = store.resolve(found)
            state = states[row]
            if state == State.COMMITTED and row in mirrors:
                reason = self._mirror(row, event.recipes, bases)
                reasons.append(reason)
                rows[entry] = 0 if reason else row
                if not event.recipes and reason == Reason.PENDING:
                    wanted.append((entry, row))
                continue
            if state == State.COMMITTED:
                rows[entry] = row
                reasons.append(Reason.OK)
                continue
            if state == State.RECOVERED:
                self._verifier.want(row)
            hangs = state == State.FETCHING and self._disk and self._disk.fetches.away
            reasons.append(Reason.MISS if hangs else Reason.PENDING)
            rows[entry] = 0
        if event.prefix:
            bad = next((i for i, reason in enumerate(reasons) if reason), len(rows))
            first = bad - bad % shards
            for entry in range(first, len(rows)):
                if entry >= first + shards or not reasons[entry]:
                    reasons[entry] = Reason.MISS
                rows[entry] = 0
        self._verifier.pump()
        return reasons, wanted

    def _mirror(self, row: int, recipes: bool, bases: set[int]) -> Reason:
        """What is said of a mirror; ``bases`` are those of the answer so far."""
        mirrors, states = self._store.mirrors, self._store.table.state
        mirror = mirrors.by_row[row]
        if not mirrors.usable(row):
            for base in mirror.bases:
                if states[base] == State.RECOVERED:
                    self._verifier.want(base)
            return Reason.PENDING
        if not recipes:
            return Reason.PENDING
        if len(bases.union(mirror.bases)) > self._config.max_bases:
            return Reason.MISS
        bases.update(mirror.bases)
        return Reason.OK

    def _densify(self, reasons: Sequence[int], wanted: list[tuple[int, int]]) -> list[int]:
        """Has mirrors made dense that were asked for so; those without room are misses."""
        reasons, mirrors = list(reasons), self._store.mirrors
        for entry, row in wanted:
            # Room for one may have cost another.
            there = row in mirrors.by_row and self._store.table.state[row] == State.COMMITTED
            if there and mirrors.usable(row) and self._recoder.densifier.ask(row):
                continue
            if not there or mirrors.usable(row):
                reasons[entry] = Reason.MISS
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
        rows = lease.rows
        if lease.spans != len(rows):
            rows = array("I", filter(None, rows))
        self._store.unpin(rows)

    def place(self, session: Session, number: int, entry: int) -> Location | None:
        """Where a span lies that the session's engine leases; None if it does not, or not now."""
        lease = self._book.leases.get(number)
        if lease is None or not lease.session.same_engine(session):
            return None
        row = lease.rows[entry] if 0 <= entry < len(lease.rows) else 0
        table = self._store.table
        # One that a recipe has taken over lies there as long as it is leased.
        if not row or table.state[row] not in (State.COMMITTED, State.RETIRED):
            return None
        offset = table.tile[row] * TILE_BYTES
        return Location(table.slab[row], offset, table.length[row], table.generation[row])

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
            mirror = store.mirrors.by_row.get(row)
            for suspect in (row, *(mirror.bases if mirror else ())):
                self._verifier.doubt(suspect)
        store.counters["reported"] += accepted
        self._verifier.pump()
        return ReportCorruptResult(accepted)


def _end(run: Rows, away: Rows | None) -> int:
    """How many keys there are up to the first that is found neither here nor there."""
    if away is None:
        return run.index(0) + 1
    return next((i for i, row in enumerate(run, 1) if not row and not away[i - 1]), len(run))


def _interleaved(runs: Sequence[Rows], known: int) -> Rows:
    """The first ``known`` of several runs, key-major."""
    return array("I", chain.from_iterable(zip(*(run[:known] for run in runs), strict=True)))
