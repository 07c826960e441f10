"""Reserve, Commit, Abort, and the copies between them: how spans come to be."""

from __future__ import annotations

from collections.abc import Iterator

from kmesh.layout import TILE_BYTES, tiles
from kmesh_spand.core.batch import KEY_BYTES
from kmesh_spand.core.checks import check_commit, check_reserve, invalid, sub_key_count, too_many
from kmesh_spand.core.codes import Code, Reason
from kmesh_spand.core.config import CoreConfig
from kmesh_spand.core.effects import Copy, DropStaging, Reply
from kmesh_spand.core.eviction import Evictor
from kmesh_spand.core.flights import Flights
from kmesh_spand.core.requests import Abort, Commit, Reserve
from kmesh_spand.core.results import AbortResult, CommitResult, Refused, ReserveResult, Result
from kmesh_spand.core.sessions import PendingCommit, Reservation, Session, SessionBook
from kmesh_spand.core.states import State, Trigger
from kmesh_spand.core.store import SpanStore
from kmesh_spand.core.tags import scope
from kmesh_spand.core.tenants import Tenant
from kmesh_spand.core.verify import Verifier

_U32 = 0xFFFF_FFFF
_U64 = (1 << 64) - 1


class Writing:
    """Two-phase stores.

    Attributes:
        copies: reservation by copy job in flight, also of reservations that have ended.
    """

    def __init__(
        self,
        config: CoreConfig,
        store: SpanStore,
        book: SessionBook,
        verifier: Verifier,
        job_ids: Iterator[int],
        flights: Flights,
    ) -> None:
        self._config = config
        self._store = store
        self._flights = flights
        self._book = book
        self._verifier = verifier
        self._job_ids = job_ids
        self._evictor = Evictor(store, config.patience_ms)
        self.draining = False
        self.copies: dict[int, Reservation] = {}

    # Reserve

    def reserve(self, session: Session, event: Reserve) -> Result:
        """Ranges for keys that nobody has stored or is storing."""
        if refused := check_reserve(event, self._config):
            return refused
        if self.draining:
            return Refused(Code.DRAINING, "the daemon takes no new spans now")
        count = len(event.tokens)
        if len(session.reservations) + count > self._config.max_reservations:
            limit = self._config.max_reservations
            return Refused(Code.EXHAUSTED, f"at most {limit} open reservations", "keys")
        tenant = self._store.tenants.open(session.group, event.salt, event.tier)
        reasons, numbers, sub_key = [], [], 0
        hopeless: tuple[int, Reason] = _U64, Reason.POOL_FULL
        for entry in range(count):
            key = event.keys[entry * KEY_BYTES : (entry + 1) * KEY_BYTES]
            subs = sub_key_count(event.tokens[entry], self._config)
            reason, number = self._reserve(
                session, tenant, event, entry, key, sub_key, subs, hopeless
            )
            if reason in (Reason.POOL_FULL, Reason.NOT_READY, Reason.QUOTA):
                # No range becomes free during this call, so nothing longer fits either.
                hopeless = min(hopeless, (tiles(event.length[entry]), reason))
            sub_key += subs
            reasons.append(reason)
            numbers.append(number)
            self._store.counters[f"reserve_{Reason(reason).name.lower()}"] += 1
            if reason in (Reason.POOL_FULL, Reason.QUOTA):
                tenant.counters[f"reserve_{reason.name.lower()}"] += 1
            if reason:
                session.refused(reason)
            if self._flights and reason not in (Reason.OK, Reason.EXISTS, Reason.PENDING):
                self._flights.refused(session, tenant, key)
        self._verifier.pump()
        return ReserveResult(reasons, numbers)

    def _reserve(
        self,
        session: Session,
        tenant: Tenant,
        event: Reserve,
        entry: int,
        key: bytes,
        sub_key: int,
        subs: int,
        hopeless: tuple[int, Reason],
    ) -> tuple[Reason, int]:
        store, table = self._store, self._store.table
        where = scope(tenant.number, event.shard)
        found = store.resolve(table.find(key, where))
        if found:
            if table.state[found] == State.COMMITTED:
                return Reason.EXISTS, 0
            if table.state[found] == State.RECOVERED:
                self._verifier.want(found)
            return Reason.PENDING, 0
        length = event.length[entry]
        if length > _U32:
            return Reason.TOO_LARGE, 0
        if tiles(length) >= hopeless[0]:
            return hopeless[1], 0
        if (
            table.place_for(key, where) is None
            or table.scopes.full(where)
            or table.spaces.full(event.namespace)
        ):
            return Reason.CATALOG_FULL, 0
        place = self._evictor.place(tiles(length), tenant)
        if isinstance(place, Reason):
            return place, 0
        row, slab, tile = place
        store.name(row, key, where, event.namespace)
        table.generation[row] = table.generation[row] + 1 & _U32
        table.tokens[row] = event.tokens[entry]
        table.start[row] = event.start[entry]
        table.slab[row] = slab
        table.tile[row] = tile
        table.length[row] = length
        store.move(row, Trigger.RESERVE)
        for sub in range(subs):
            at = (sub_key + sub) * KEY_BYTES
            self._alias(row, tenant, where, event.sub_keys[at : at + KEY_BYTES], sub + 1)
        return Reason.OK, self._book.reserve(session, row, length).id

    def _alias(self, row: int, tenant: Tenant, where: int, key: bytes, steps: int) -> None:
        """One more name, where that is possible: without it a tail is only found less often."""
        table = self._store.table
        if (
            not table.find(key, where)
            and table.place_for(key, where) is not None
            and self._evictor.make_row(tenant)
        ):
            tokens = steps * self._config.sub_tokens
            self._store.alias(table.take_row(), row, key, tokens)

    # Commit

    def commit(self, session: Session, event: Commit) -> Result | None:
        """Start the copies; None when the answer has to wait for them."""
        numbers, offsets = event.reservations, event.offsets
        if refused := too_many("reservation", len(numbers), self._config.max_batch):
            return refused
        if len(offsets) != len(numbers):
            return invalid("staging_offset", f"{len(offsets)} values for {len(numbers)}")
        found = [session.reservations.get(number) for number in numbers]
        lengths = [item.length if item else 0 for item in found]
        if refused := check_commit(offsets, lengths, event.staging_size):
            return refused
        table = self._store.table
        pending = PendingCommit(session.id, event.request, [Reason.STALE] * len(found), 0)
        for entry, (item, offset) in enumerate(zip(found, offsets, strict=True)):
            if item is None or item.commit is not None:
                self._store.counters["commit_stale"] += 1
                session.refused(Reason.STALE)
                continue
            item.commit, item.entry = pending, entry
            pending.left += 1
            session.copies += 1
            job = next(self._job_ids)
            self.copies[job] = item
            self._store.move(item.row, Trigger.COMMIT)
            start = table.tile[item.row] * TILE_BYTES
            slab = table.slab[item.row]
            self._store.out.append(Copy(job, session.id, offset, slab, start, item.length))
        return None if pending.left else CommitResult(pending.reasons)

    def copy_ended(self, job: int, root: int | None) -> None:
        """A copy was done, with this root, or failed (None)."""
        item = self.copies.pop(job, None)
        if item is None or item.commit is None:
            return
        store, session, pending = self._store, item.session, item.commit
        if store.table.state[item.row] == State.ORPHANED:
            store.move(item.row, Trigger.FAILED if root is None else Trigger.COPIED)
            reason = Reason.ABORTED
            store.counters["commit_aborted"] += 1
        else:
            self._book.end_reservation(item)
            if root is None:
                store.move(item.row, Trigger.FAILED)
                reason = Reason.COPY_FAILED
                store.counters["copy_failed"] += 1
            else:
                store.table.root[item.row] = root & _U64
                store.move(item.row, Trigger.COPIED)
                reason = Reason.OK
                store.counters["committed"] += 1
                store.tenant_of(item.row).counters["committed"] += 1
                session.committed += 1
                session.committed_bytes += item.length
        if reason:
            session.refused(reason)
        pending.reasons[item.entry] = reason
        pending.left -= 1
        session.copies -= 1
        if session.closed:
            self.drop_staging(session)
        elif not pending.left:
            result = CommitResult(pending.reasons)
            store.out.append(Reply(pending.session, pending.request, result))

    def drop_staging(self, session: Session) -> None:
        """Let a closed session's staging go, unless a copy still reads it."""
        if not session.copies:
            self._store.out.append(DropStaging(session.id))

    # Abort

    def abort(self, session: Session, event: Abort) -> Result:
        """End reservations; those that are unknown, ended or foreign are not counted."""
        numbers = event.reservations
        if refused := too_many("reservation", len(numbers), self._config.max_batch):
            return refused
        found = [session.reservations.get(number) for number in dict.fromkeys(numbers)]
        for item in found:
            if item is not None:
                self.end_reservation(item)
        return AbortResult(len(found) - found.count(None))

    def end_reservation(self, item: Reservation) -> None:
        """End a reservation that is not committed. Its key is free at once, its range too
        unless a copy is still writing there."""
        self._book.end_reservation(item)
        self._store.move(item.row, Trigger.ABORT)
        self._store.counters["aborted"] += 1
