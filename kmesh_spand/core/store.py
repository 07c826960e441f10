"""Spans in their slabs: every change of a span's state, and what it means for the outside."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kmesh.layout import TILE_BYTES, tiles
from kmesh_spand.core.allocator import QUARANTINE
from kmesh_spand.core.batch import Batch, Rows
from kmesh_spand.core.codes import Cause
from kmesh_spand.core.effects import (
    Effect,
    Publish,
    PutRecord,
    SpanCommitted,
    SpanEnded,
    Unpublish,
)
from kmesh_spand.core.endings import Endings
from kmesh_spand.core.grounds import Grounds
from kmesh_spand.core.policy import Policy
from kmesh_spand.core.record import Record
from kmesh_spand.core.states import EVICTABLE, KEYED, STORED, TRANSITIONS, State, Trigger
from kmesh_spand.core.table import SpanTable
from kmesh_spand.core.tags import shard_of, tag
from kmesh_spand.core.tenants import Tenancy, Tenant, TenantBook
from kmesh_spand.core.watching import Watch

#: A tick is 64 ms: 32 bits of them last eight years.
TICK_SHIFT = 6
_TICKS = 0xFFFF_FFFF
_CAUSES = {
    Trigger.EVICT: Cause.PRESSURE,
    Trigger.BAD: Cause.CORRUPT,
    Trigger.BAD_LEASED: Cause.CORRUPT,
    Trigger.ABORT: Cause.ABORTED,
    Trigger.FAILED: Cause.COPY_FAILED,
}


class SpanStore(Grounds):
    """Owns the table; its slabs and tenants are ``Grounds``.

    ``move`` is the only way in which a span changes state; it carries out what the columns
    "effects" of ``docs/states.md`` say. Effects are appended to ``out`` in the order in which
    the shell must carry them out.

    Attributes:
        evictable: rows that may be evicted now.
        pinned, leased_bytes: spans that at least one lease holds, and their payload bytes.
        published: keys in the index.
        stored_bytes: payload bytes of spans with a catalog record.
        grace: ranges that are freed now must not be reused yet.
        by_state: number of rows in each state (FREE and ALIAS are not counted).
        space_spans, space_bytes: stored spans by namespace number.
        endings: keys that are gone.
        watch: who else wants to know of spans that come and names that go; empty at first.
        policy_faults, place_failures: how often the eviction policy failed, or no room was found
            although something may be evicted, since that last went well; and when last (ms).
    """

    def __init__(
        self,
        max_spans: int,
        policy: Policy,
        counters: dict[str, int],
        endings: Endings,
        tenancy: Tenancy,
        job_ids: Iterator[int],
        batch: Batch | None = None,
    ) -> None:
        super().__init__(TenantBook(tenancy, policy, max_spans, TILE_BYTES), counters, job_ids)
        self.table = SpanTable(max_spans, batch)
        self.tick = 0
        self.evictable = 0
        self.pinned = 0
        self.published = 0
        self.leased_bytes = 0
        self.stored_bytes = 0
        self.grace = False
        self.quarantine: list[tuple[int, int, int]] = []
        self.by_state = [0] * len(State)
        self.space_spans: dict[int, int] = {}
        self.space_bytes: dict[int, int] = {}
        self.endings = endings
        self.watch: Watch | None = None
        self.policy_faults = (0, 0)
        self.place_failures = (0, 0)
        self._first_alias: dict[int, int] = {}

    def begin(self, out: list[Effect], now_ms: int) -> None:
        """Where effects go, and what time it is, from now on."""
        self.out = out
        self.now_ms = now_ms
        self.tick = now_ms >> TICK_SHIFT & _TICKS

    # States

    def tenant_of(self, row: int) -> Tenant:
        """Whose a row is that has a range."""
        tenant = self.slabs[self.table.slab[row]].tenant
        assert tenant is not None
        return tenant

    def move(self, row: int, trigger: Trigger, cause: Cause | None = None) -> State:
        """Change a row's state and do what follows from it; returns the new state.

        Args:
            cause: why its key ends, where the trigger does not say it.
        """
        table = self.table
        old = State(table.state[row])
        new = TRANSITIONS[old, trigger]
        if old == new:
            return new
        idle = not table.pins[row]
        if old in EVICTABLE and new not in EVICTABLE and idle:
            self._disallow([row])
        if old is State.COMMITTED:
            tags, tenant = self.tags(row), self.tenant_of(row)
            self.published -= len(tags)
            self.out.append(Unpublish(row - 1, tags, tenant.group, tenant.tier))
        if old in STORED and new not in STORED:
            self._count_stored(row, -1)
            self._forget_record(row)
        if old in KEYED and new not in KEYED:
            self._end(row, cause or _CAUSES[trigger], recorded=old in STORED)
            self._drop_key(row, recorded=old in STORED)
        table.state[row] = new
        self.by_state[old] -= 1
        self.by_state[new] += 1
        if new in STORED and old not in STORED:
            table.born[row] = table.used[row] = self.tick
            self._count_stored(row, 1)
            if old is not State.FREE:
                self._put_records(row)
        if new is State.COMMITTED:
            tags, tenant = self.tags(row), self.tenant_of(row)
            self.published += len(tags)
            self.out.append(Publish(row - 1, tags, tenant.group, tenant.tier))
            if old in (State.COPYING, State.VERIFYING, State.FETCHING):
                self.out.append(SpanCommitted(*self._about(row)))
            if self.watch:
                self.watch.stored(row)
        if new in EVICTABLE and old not in EVICTABLE and idle:
            self._allow([row])
        if new is State.FREE:
            self._give_range(row, shown=old in STORED or old is State.DOOMED)
            self._give_row(row)
        return new

    def _end(self, row: int, cause: Cause, *, recorded: bool) -> None:
        shard = self.shard(row)
        for name in (row, *self.aliases(row)):
            self.endings.add(self.table.key_of(name), shard, cause, self.tick)
        if self.watch:
            self.watch.gone(row, cause)
        if recorded:
            self.out.append(SpanEnded(*self._about(row), cause))

    def _about(self, row: int) -> tuple[bytes, bytes, int, int, int]:
        table = self.table
        return (
            table.key_of(row),
            table.spaces.value(table.space[row]),
            self.shard(row),
            table.tokens[row],
            table.length[row],
        )

    def _count_stored(self, row: int, sign: int) -> None:
        space, length = self.table.space[row], self.table.length[row]
        tenant = self.tenant_of(row)
        tenant.spans += sign
        tenant.stored_bytes += sign * length
        held = tenant.spaces.setdefault(space, [0, 0])
        held[0] += sign
        held[1] += sign * length
        if not held[0]:
            del tenant.spaces[space]
        self.stored_bytes += sign * length
        self.space_spans[space] = self.space_spans.get(space, 0) + sign
        self.space_bytes[space] = self.space_bytes.get(space, 0) + sign * length
        if not self.space_spans[space]:
            del self.space_spans[space], self.space_bytes[space]

    def _drop_key(self, row: int, *, recorded: bool) -> None:
        for alias in list(self.aliases(row)):
            if recorded:
                self._forget_record(alias)
            self.table.remove(alias)
            self._give_row(alias)
        self._first_alias.pop(row, None)
        self.table.remove(row)

    def _give_row(self, row: int) -> None:
        self.table.scopes.drop(self.table.scope[row])
        self.table.spaces.drop(self.table.space[row])
        self.table.give_row(row)

    def _give_range(self, row: int, *, shown: bool) -> None:
        number, start = self.table.slab[row], self.table.tile[row]
        count = tiles(self.table.length[row])
        self.tenant_of(row).tiles -= count
        if self.grace and shown:
            self.slabs[number].hand_over(start, count, row, QUARANTINE)
            self.quarantine.append((number, start, count))
        else:
            self.slabs[number].free(start, count, row)

    def end_grace(self) -> None:
        """Nobody reads ranges of an earlier epoch any more."""
        self.grace = False
        for number, start, count in self.quarantine:
            self.slabs[number].free(start, count, QUARANTINE)
        self.quarantine.clear()

    # Names and records

    def name(self, row: int, key: bytes, scope: int, namespace: bytes) -> bool:
        """Make a row findable; False when the table has no place for that key."""
        place = self.table.place_for(key, scope)
        if place is None:
            return False
        self.table.space[row] = self.table.spaces.take(namespace)
        self.table.insert(row, key, scope, place)
        return True

    def alias(self, row: int, primary: int, key: bytes, tokens: int) -> bool:
        """Make a free row a further name of a span, for its first ``tokens`` tokens."""
        table = self.table
        where = table.scopes.value(table.scope[primary])
        if not self.name(row, key, where, table.spaces.value(table.space[primary])):
            return False
        table.state[row] = TRANSITIONS[State.FREE, Trigger.NAME]
        table.tokens[row] = tokens
        table.tile[row] = primary
        table.start[row] = self._first_alias.get(primary, 0)
        self._first_alias[primary] = row
        return True

    def aliases(self, row: int) -> Iterator[int]:
        """Rows that are further names of a span."""
        alias = self._first_alias.get(row, 0)
        while alias:
            yield alias
            alias = self.table.start[alias]

    def resolve(self, row: int) -> int:
        """The span that a found row stands for; 0 stays 0."""
        return self.table.tile[row] if self.table.state[row] == State.ALIAS else row

    def shard(self, row: int) -> int:
        """The shard code of a row."""
        return shard_of(self.table.scopes.value(self.table.scope[row]))

    def tags(self, row: int) -> tuple[int, ...]:
        """Index tags of a span: of its key, then of its aliases."""
        shard = self.shard(row)
        return tuple(tag(self.table.key_of(r), shard) for r in (row, *self.aliases(row)))

    def _put_records(self, row: int) -> None:
        for name in (row, *self.aliases(row)):
            self.out.append(PutRecord(name - 1, self.record(name).encode()))

    def _forget_record(self, row: int) -> None:
        record = Record(state=State.FREE, generation=self.table.generation[row])
        self.out.append(PutRecord(row - 1, record.encode()))

    def record(self, row: int) -> Record:
        """What the catalog says of a stored span or of one of its aliases."""
        table = self.table
        span = self.resolve(row)
        return Record(
            state=State.COMMITTED if span == row else State.ALIAS,
            generation=table.generation[row],
            tokens=table.tokens[row],
            start=table.start[span],
            slab=table.slab[span],
            offset=table.tile[span] * TILE_BYTES,
            length=table.length[span],
            shard=self.shard(row),
            root=table.root[span],
            key=table.key_of(row),
            namespace=table.spaces.value(table.space[row]),
            primary=0 if span == row else span,
        )

    # Leases

    def pin(self, rows: Rows) -> None:
        """One lease more on each row (all COMMITTED); a row may occur more than once."""
        table = self.table
        fresh = table.batch.pin(table.pins, rows)
        if fresh:
            self.pinned += len(fresh)
            self.leased_bytes += sum(table.batch.gather(fresh, table.length))
            self._disallow(fresh)

    def unpin(self, rows: Rows) -> None:
        """One lease fewer on each row; a doomed span ends with its last one."""
        table, batch = self.table, self.table.batch
        # Last first: the end of a chain is evicted before its beginning, without which it
        # could not be found.
        idle = batch.unpin(table.pins, rows, table.used, self.tick)
        if not idle:
            return
        self.pinned -= len(idle)
        self.leased_bytes -= sum(batch.gather(idle, table.length))
        if batch.gather_bytes(idle, table.state).count(State.COMMITTED) == len(idle):
            self._allow(idle)
            return
        self._allow([row for row in idle if table.state[row] == State.COMMITTED])
        for row in idle:
            if table.state[row] == State.DOOMED:
                self.move(row, Trigger.RELEASED)

    # Eviction order. The rows of one call are one tenant's.

    def _allow(self, rows: Sequence[int]) -> None:
        if not rows:
            return
        tenant = self.tenant_of(rows[0])
        tenant.evictable += len(rows)
        self.evictable += len(rows)
        try:
            tenant.order.add(rows)
        except Exception:
            self.policy_failed()

    def _disallow(self, rows: Sequence[int]) -> None:
        tenant = self.tenant_of(rows[0])
        tenant.evictable -= len(rows)
        self.evictable -= len(rows)
        try:
            tenant.order.discard(rows)
        except Exception:
            self.policy_failed()

    def policy_failed(self) -> None:
        """The policy raised, or named what it must not."""
        self.counters["policy_faults"] += 1
        self.policy_faults = (self.policy_faults[0] + 1, self.now_ms)

    def place_failed(self, tenant: Tenant) -> None:
        """No room was found. While nothing of the tenant may be evicted, that is as it must be."""
        if tenant.evictable:
            self.place_failures = (self.place_failures[0] + 1, self.now_ms)

    def may_evict(self, row: int) -> bool:
        """Whether a row is a span that nobody leases and no job reads."""
        table = self.table
        return 0 < row <= table.rows and table.state[row] in EVICTABLE and not table.pins[row]

    def evict(self, row: int) -> None:
        """Drop a span that ``may_evict``, to make room."""
        self.counters["evicted"] += 1
        self.counters["evicted_bytes"] += self.table.length[row]
        mine = self.tenant_of(row).counters
        mine["evicted"] += 1
        mine["evicted_bytes"] += self.table.length[row]
        self.move(row, Trigger.EVICT)

    def discard(self, row: int) -> None:
        """Drop a span that ``may_evict``, because an operator wants it gone."""
        self.counters["discarded"] += 1
        self.counters["discarded_bytes"] += self.table.length[row]
        self.move(row, Trigger.EVICT, Cause.OPERATOR)
