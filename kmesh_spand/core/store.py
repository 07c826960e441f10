"""Spans in their slabs: every change of a span's state, and what it means for the outside."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

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
from kmesh_spand.core.holding import TICK_SHIFT, Holding
from kmesh_spand.core.mirrors import Mirrors
from kmesh_spand.core.policy import Policy
from kmesh_spand.core.record import Record
from kmesh_spand.core.states import (
    EVICTABLE,
    HANDED_ON,
    KEYED,
    STORED,
    TRANSITIONS,
    State,
    Trigger,
)
from kmesh_spand.core.tags import shard_of, tag
from kmesh_spand.core.tenants import Tenancy, Tenant, TenantBook

__all__ = ["TICK_SHIFT", "SpanStore", "Watch"]

_TICKS = 0xFFFF_FFFF
#: Was served once, and may be read still.
_ENDING = frozenset({State.DOOMED, State.RETIRED})
_CAUSES = {
    Trigger.EVICT: Cause.PRESSURE,
    Trigger.BAD: Cause.CORRUPT,
    Trigger.BAD_LEASED: Cause.CORRUPT,
    Trigger.ABORT: Cause.ABORTED,
    Trigger.FAILED: Cause.COPY_FAILED,
}


class Watch(Protocol):
    """Told what becomes of rows, while it is not empty."""

    def __len__(self) -> int: ...

    def stored(self, row: int) -> None:
        """A row is committed."""

    def gone(self, row: int, cause: Cause) -> None:
        """A row's names are about to go."""


class SpanStore(Holding):
    """Owns the table; its slabs and tenants are ``Grounds``, leases and eviction ``Holding``.

    ``move`` is the only way in which a span changes state; it carries out what the columns
    "effects" of ``docs/states.md`` say. Effects are appended to ``out`` in the order in which
    the shell must carry them out.

    Attributes:
        published: keys in the index.
        stored_bytes: payload bytes of spans with a catalog record.
        grace: ranges that are freed now must not be reused yet.
        recovered_tick: when host memory's last record of an earlier life was taken over.
        by_state: number of rows in each state (FREE and ALIAS are not counted).
        space_spans, space_bytes: stored spans by namespace number.
        endings: keys that are gone.
        watches: who else wants to know of spans that come and names that go.
        mirrors: spans that are kept as recipes.
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
        tenants = TenantBook(tenancy, policy, max_spans, TILE_BYTES)
        super().__init__(tenants, counters, job_ids, max_spans, batch)
        self.published = 0
        self.stored_bytes = 0
        self.grace = False
        self.recovered_tick = 0
        self.quarantine: list[tuple[int, int, int]] = []
        self.by_state = [0] * len(State)
        self.space_spans: dict[int, int] = {}
        self.space_bytes: dict[int, int] = {}
        self.endings = endings
        self.watches: list[Watch] = []
        self.mirrors = Mirrors(self)
        self._first_alias: dict[int, int] = {}

    def begin(self, out: list[Effect], now_ms: int) -> None:
        """Where effects go, and what time it is, from now on."""
        self.out = out
        self.now_ms = now_ms
        self.tick = now_ms >> TICK_SHIFT & _TICKS

    # States

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
        idle, handed_on = not self.held(row), trigger in HANDED_ON
        if old in EVICTABLE and new not in EVICTABLE and idle:
            self._disallow([row])
        if old is State.COMMITTED and not handed_on:
            tags, tenant = self.tags(row), self.tenant_of(row)
            self.published -= len(tags)
            self.out.append(Unpublish(row - 1, tags, tenant.group, tenant.tier))
        if old in STORED and new not in STORED:
            self._count_stored(row, -1)
            self._forget_record(row)
        if old in KEYED and new not in KEYED and not handed_on:
            self._end(row, cause or _CAUSES[trigger], recorded=old in STORED)
            self._drop_key(row, recorded=old in STORED)
        table.state[row] = new
        self.by_state[old] -= 1
        self.by_state[new] += 1
        if new in STORED and old not in STORED:
            if not handed_on:
                table.born[row] = table.used[row] = self.tick
            self._enter([row])
            self._count_stored(row, 1)
            if old is not State.FREE:
                self._put_records(row)
        if new is State.COMMITTED:
            tags, tenant = self.tags(row), self.tenant_of(row)
            self.published += len(tags)
            self.out.append(Publish(row - 1, tags, tenant.group, tenant.tier))
            if old in (State.COPYING, State.VERIFYING, State.FETCHING):
                self.out.append(SpanCommitted(*self._about(row)))
            for watch in () if handed_on else self.watches:
                if watch:
                    watch.stored(row)
        if new in EVICTABLE and old not in EVICTABLE and idle:
            self._allow([row])
        if new is State.FREE:
            self._give_range(row, shown=old in STORED or old in _ENDING)
            self._give_row(row)
            self.mirrors.freed(row)
        return new

    def recover(self, rows: Rows) -> None:
        """``move`` free rows with RECOVER: spans of one slab that were just placed."""
        if not rows:
            return
        table, batch = self.table, self.table.batch
        assert batch.gather_bytes(rows, table.state).count(State.FREE) == len(rows)
        new = TRANSITIONS[State.FREE, Trigger.RECOVER]
        for row in rows:
            table.state[row] = new
        self.by_state[State.FREE] -= len(rows)
        self.by_state[new] += len(rows)
        self._enter(rows)
        lengths, spaces = batch.gather(rows, table.length), batch.gather(rows, table.space)
        stored: dict[int, list[int]] = {}
        for space, length in zip(spaces, lengths, strict=True):
            stored.setdefault(space, []).append(length)
        for space, each in stored.items():
            self._count(self.tenant_of(rows[0]), space, len(each), sum(each))
        if self.mirrors.by_row:
            for row in rows:
                self.mirrors.count(row, 1)
        self._allow(rows)

    def take_over(self, old: int, new: int) -> None:
        """A draft becomes what a committed span was: under its names, at once for who looks."""
        table = self.table
        self.published -= len(self.tags(old))
        for alias in self.aliases(old):
            table.tile[alias] = new
        if first := self._first_alias.pop(old, 0):
            self._first_alias[new] = first
        table.remove(old)
        place = table.place_for(table.key_of(new), table.scopes.value(table.scope[new]))
        assert place is not None, "its neighbour has just gone"
        table.list(new, place)
        table.born[new], table.used[new] = table.born[old], table.used[old]
        self.move(new, Trigger.TAKE_OVER)
        self.move(old, Trigger.RETIRE_LEASED if self.held(old) else Trigger.RETIRE)

    def _end(self, row: int, cause: Cause, *, recorded: bool) -> None:
        shard = self.shard(row)
        for name in (row, *self.aliases(row)):
            self.endings.add(self.table.key_of(name), shard, cause, self.tick)
        for watch in self.watches:
            if watch:
                watch.gone(row, cause)
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
        self._count(self.tenant_of(row), space, sign, sign * length)
        self.mirrors.count(row, sign)

    def _count(self, tenant: Tenant, space: int, spans: int, size: int) -> None:
        tenant.spans += spans
        tenant.stored_bytes += size
        held = tenant.spaces.setdefault(space, [0, 0])
        held[0] += spans
        held[1] += size
        if not held[0]:
            del tenant.spaces[space]
        self.stored_bytes += size
        self.space_spans[space] = self.space_spans.get(space, 0) + spans
        self.space_bytes[space] = self.space_bytes.get(space, 0) + size
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
            dense=self.mirrors.dense(span),
            born=table.born[span] if span == row else 0,
        )

    # Ends

    def evict(self, row: int) -> None:
        """Drop a span that ``may_evict``, to make room."""
        self.counters["evicted"] += 1
        self.counters["evicted_bytes"] += self.table.length[row]
        tenant = self.tenant_of(row)
        tenant.evicting()
        tenant.counters["evicted"] += 1
        tenant.counters["evicted_bytes"] += self.table.length[row]
        self._evicted(row)
        self.move(row, Trigger.EVICT)

    def discard(self, row: int) -> None:
        """Drop a span that ``may_evict``, because an operator wants it gone."""
        self.counters["discarded"] += 1
        self.counters["discarded_bytes"] += self.table.length[row]
        self.move(row, Trigger.EVICT, Cause.OPERATOR)
