"""Spans in their slabs: every change of a span's state, and what it means for the outside."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kmesh.layout import TILE_BYTES, tiles
from kmesh_spand.core.allocator import QUARANTINE, Slab
from kmesh_spand.core.effects import Effect, Publish, PutOwner, PutRecord, Unpublish, Wipe
from kmesh_spand.core.policy import Policy
from kmesh_spand.core.record import Record
from kmesh_spand.core.states import EVICTABLE, KEYED, STORED, TRANSITIONS, State, Trigger
from kmesh_spand.core.table import SpanTable, gather
from kmesh_spand.core.tags import shard_of, tag
from kmesh_spand.core.tenants import OwnerState, SlabOwner, Tenancy, Tenant, TenantBook

#: A tick is 64 ms: 32 bits of them last eight years.
TICK_SHIFT = 6
_TICKS = 0xFFFF_FFFF


class SpanStore:
    """Owns the table, the slabs and their tenants.

    ``move`` is the only way in which a span changes state; it carries out what the columns
    "effects" of ``docs/states.md`` say. Effects are appended to ``out`` in the order in which
    the shell must carry them out.

    Attributes:
        tenants: whose spans these are. wipes: slab by wipe job in flight.
        evictable: rows that may be evicted now.
        pinned, leased_bytes: spans that at least one lease holds, and their payload bytes.
        published: keys in the index.
        stored_bytes: payload bytes of spans with a catalog record.
        grace: ranges that are freed now must not be reused yet.
        grew_ms: when each slab was last seen growing.
        by_state: number of rows in each state (FREE and ALIAS are not counted).
        space_spans, space_bytes: stored spans by namespace number.
        policy_faults, place_failures: how often the eviction policy failed, or no room was found
            although something may be evicted, since that last went well; and when last (ms).
    """

    def __init__(
        self,
        max_spans: int,
        policy: Policy,
        counters: dict[str, int],
        tenancy: Tenancy,
        job_ids: Iterator[int],
    ) -> None:
        self.table = SpanTable(max_spans)
        self.slabs: dict[int, Slab] = {}
        self.tenants = TenantBook(tenancy, policy, max_spans, TILE_BYTES)
        self.wipes: dict[int, int] = {}
        self.counters = counters
        self._job_ids = job_ids
        self.out: list[Effect] = []
        self.now_ms = 0
        self.tick = 0
        self.evictable = 0
        self.pinned = 0
        self.published = 0
        self.leased_bytes = 0
        self.stored_bytes = 0
        self.grace = False
        self.quarantine: list[tuple[int, int, int]] = []
        self.grew_ms: dict[int, int] = {}
        self.by_state = [0] * len(State)
        self.space_spans: dict[int, int] = {}
        self.space_bytes: dict[int, int] = {}
        self.policy_faults = (0, 0)
        self.place_failures = (0, 0)
        self._first_alias: dict[int, int] = {}

    def begin(self, out: list[Effect], now_ms: int) -> None:
        """Where effects go, and what time it is, from now on."""
        self.out = out
        self.now_ms = now_ms
        self.tick = now_ms >> TICK_SHIFT & _TICKS

    def add_slab(self, number: int, capacity: int, owner: SlabOwner | None = None) -> None:
        """A slab of ``capacity`` bytes, none of them populated; ValueError if it can't be."""
        if number in self.slabs or not 0 <= number <= 0xFFFF or capacity < TILE_BYTES:
            raise ValueError(f"slab {number} of {capacity} bytes is known already, or none")
        slab = self.slabs[number] = Slab(capacity // TILE_BYTES)
        self.grew_ms[number] = self.now_ms
        groups = self.tenants.tenancy.groups
        if owner is None:
            slab.group = groups[0] if len(groups) == 1 else None
            return
        slab.group, slab.lost = owner.group, owner.state is OwnerState.LOST
        if owner.state is OwnerState.OWNED:
            slab.tenant = self.tenants.open(owner.group, owner.salt)
            self.tenants.own(slab.tenant, number)
        elif owner.state is OwnerState.DIRTY:
            self._wipe(number)

    # Tenants

    def tenant_of(self, row: int) -> Tenant:
        """Whose a row is that has a range."""
        tenant = self.slabs[self.table.slab[row]].tenant
        assert tenant is not None
        return tenant

    def assign(self, number: int, tenant: Tenant) -> None:
        """Give a clean slab of nobody to a tenant."""
        slab = self.slabs[number]
        assert (slab.tenant, slab.clean, slab.lost, slab.used) == (None, True, False, 0)
        assert slab.group in (None, tenant.group)
        slab.tenant, slab.group = tenant, tenant.group
        self.tenants.own(tenant, number)
        owner = SlabOwner(OwnerState.OWNED, tenant.group, tenant.salt)
        self.out.append(PutOwner(number, owner.encode()))

    def reclaim(self, number: int) -> None:
        """Take an empty slab from its tenant, and have it wiped."""
        slab = self.slabs[number]
        assert slab.tenant is not None
        assert not slab.used
        self.tenants.lose(slab.tenant, number)
        slab.tenant = None
        self._put_owner(number, OwnerState.DIRTY)
        self._wipe(number)

    def _wipe(self, number: int) -> None:
        self.slabs[number].clean = False
        job = next(self._job_ids)
        self.wipes[job] = number
        self.out.append(Wipe(job, number))

    def wiped(self, job: int, ok: bool) -> None:
        """A wipe has ended."""
        number = self.wipes.pop(job, None)
        if number is None:
            return
        if ok:
            self.counters["wiped"] += 1
            self.slabs[number].clean = True
            self._put_owner(number, OwnerState.CLEAN)
        else:
            self.counters["wipe_failed"] += 1
            self.slabs[number].lost = True

    def _put_owner(self, number: int, state: OwnerState) -> None:
        group = self.slabs[number].group
        assert group is not None
        self.out.append(PutOwner(number, SlabOwner(state, group).encode()))

    def populate(self, number: int, capacity: int) -> None:
        """The first ``capacity`` bytes of a slab have pages."""
        self.slabs[number].populate(capacity // TILE_BYTES)
        self.grew_ms[number] = self.now_ms

    # States

    def move(self, row: int, trigger: Trigger) -> State:
        """Change a row's state and do what follows from it; returns the new state."""
        table = self.table
        old = State(table.state[row])
        new = TRANSITIONS[old, trigger]
        if old == new:
            return new
        idle = not table.pins[row]
        if old in EVICTABLE and new not in EVICTABLE and idle:
            self._disallow([row])
        if old is State.COMMITTED:
            tags = self.tags(row)
            self.published -= len(tags)
            self.out.append(Unpublish(row - 1, tags, self.tenant_of(row).group))
        if old in STORED and new not in STORED:
            self._count_stored(row, -1)
            self._forget_record(row)
        if old in KEYED and new not in KEYED:
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
            tags = self.tags(row)
            self.published += len(tags)
            self.out.append(Publish(row - 1, tags, self.tenant_of(row).group))
        if new in EVICTABLE and old not in EVICTABLE and idle:
            self._allow([row])
        if new is State.FREE:
            self._give_range(row, shown=old in STORED or old is State.DOOMED)
            self._give_row(row)
        return new

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

    def pin(self, rows: Sequence[int]) -> None:
        """One lease more on each row (all COMMITTED); a row may occur more than once."""
        pins = self.table.pins
        fresh: list[int] = []
        for row in rows:
            count = pins[row]
            if not count:
                fresh.append(row)
            pins[row] = count + 1
        if fresh:
            self.pinned += len(fresh)
            self.leased_bytes += sum(gather(fresh, self.table.length)[0])
            self._disallow(fresh)

    def unpin(self, rows: Sequence[int]) -> None:
        """One lease fewer on each row; a doomed span ends with its last one."""
        table = self.table
        pins, used, tick = table.pins, table.used, self.tick
        idle: list[int] = []
        # Last first: the end of a chain is evicted before its beginning, without which it
        # could not be found.
        for row in reversed(rows):
            count = pins[row] - 1
            pins[row] = count
            if not count:
                idle.append(row)
                used[row] = tick
        if not idle:
            return
        states, lengths = gather(idle, table.state, table.length)
        self.pinned -= len(idle)
        self.leased_bytes -= sum(lengths)
        if states.count(State.COMMITTED) == len(idle):
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
        """Drop a span that ``may_evict``."""
        self.counters["evicted"] += 1
        self.counters["evicted_bytes"] += self.table.length[row]
        mine = self.tenant_of(row).counters
        mine["evicted"] += 1
        mine["evicted_bytes"] += self.table.length[row]
        self.move(row, Trigger.EVICT)
