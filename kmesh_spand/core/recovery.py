"""What a new epoch takes over from the catalog of the one before."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from kmesh.layout import TILE_BYTES, Shard, tiles
from kmesh_spand.core.allocator import QUARANTINE
from kmesh_spand.core.codes import Cause
from kmesh_spand.core.config import CoreConfig
from kmesh_spand.core.effects import PutRecord, SpanEnded
from kmesh_spand.core.record import Record
from kmesh_spand.core.states import State, Trigger
from kmesh_spand.core.store import SpanStore
from kmesh_spand.core.tags import scope
from kmesh_spand.core.tenants import Tenant
from kmesh_spand.core.verify import Verifier


class Recovery:
    """Places recovered records slab by slab, as the slabs become known.

    What does not hold is dropped, counted, and its record erased: impossible geometry, a range
    that another record already has, a key that another record already has, an alias whose
    span is not the one that it names.
    """

    def __init__(self, store: SpanStore, config: CoreConfig, verifier: Verifier) -> None:
        self._store = store
        self._verifier = verifier
        self._config = config
        self._waiting: dict[int, list[tuple[int, Record]]] = {}

    @property
    def waiting(self) -> int:
        """Records of slabs that are not known yet."""
        return sum(map(len, self._waiting.values()))

    def start(self, records: Sequence[tuple[int, Record]]) -> None:
        """Take the catalog over. Once, before anything is reserved."""
        store, table = self._store, self._store.table
        held: list[int] = []
        seen: set[int] = set()
        for slot, record in records:
            if not 0 <= slot < self._config.max_spans or slot in seen:
                store.counters["recovered_dropped"] += 1
                continue
            seen.add(slot)
            table.generation[slot + 1] = record.generation
            if record.state is not State.FREE:
                held.append(slot + 1)
                self._waiting.setdefault(record.slab, []).append((slot + 1, record))
        table.claim_rows(held)
        store.grace = bool(held)
        for number in list(self._waiting):
            if number in store.slabs:
                self.place(number)

    def place(self, number: int) -> None:
        """Place the records of a slab that is known now."""
        waiting = self._waiting.pop(number, [])
        tenant = self._store.slabs[number].tenant
        if tenant is None:
            # Nobody may see bytes of which nobody knows whose they are.
            self._store.slabs[number].lost |= bool(waiting)
            for row, record in waiting:
                self._drop(row, record)
            return
        spans = [item for item in waiting if item[1].state is State.COMMITTED]
        aliases = [item for item in waiting if item[1].state is State.ALIAS]
        placed = {row: record for row, record in spans if self._span(row, record, tenant)}
        self._store.slabs[number].rescan()
        for row, record in aliases:
            self._alias(row, record, placed.get(record.primary), tenant)

    def give_up(self, expected: Collection[int] = ()) -> None:
        """Drop the records of slabs that never came, and are not expected any more."""
        for slab in self._waiting.keys() - set(expected):
            self.drop(slab)

    def drop(self, number: int) -> None:
        """Drop the records of a slab that never comes."""
        for row, record in self._waiting.pop(number, []):
            self._drop(row, record)

    def _span(self, row: int, record: Record, tenant: Tenant) -> bool:
        store, table, config = self._store, self._store.table, self._config
        where = scope(tenant.number, record.shard)
        first, uneven = divmod(record.offset, TILE_BYTES)
        if (
            uneven
            or not 0 < record.length <= 0xFFFF_FFFF
            or not 0 < record.tokens <= config.span_tokens
            or record.tokens % config.sub_tokens
            or not _is_shard(record.shard)
            or table.scopes.full(where)
            or table.find(record.key, where)
            or table.place_for(record.key, where) is None
            or not store.slabs[record.slab].take(first, tiles(record.length), row)
        ):
            return self._drop(row, record)
        tenant.tiles += tiles(record.length)
        store.name(row, record.key, where, record.namespace)
        table.tokens[row] = record.tokens
        table.start[row] = record.start
        table.slab[row] = record.slab
        table.tile[row] = first
        table.length[row] = record.length
        table.root[row] = record.root
        if record.dense:
            store.mirrors.recovered(row, record.dense)
        store.move(row, Trigger.RECOVER)
        table.born[row] = min(record.born, store.tick)
        if not tenant.tier:
            store.recovered_tick = store.tick
        self._verifier.recovered(row)
        store.counters["recovered"] += 1
        return True

    def _alias(self, row: int, record: Record, span: Record | None, tenant: Tenant) -> bool:
        store, table, config = self._store, self._store.table, self._config
        if (
            span is None
            or span.offset != record.offset
            or span.root != record.root
            or span.shard != record.shard
            or span.namespace != record.namespace
            or not 0 < record.tokens < span.tokens
            or record.tokens % config.sub_tokens
            or table.find(record.key, scope(tenant.number, record.shard))
            or not store.alias(row, record.primary, record.key, record.tokens)
        ):
            return self._drop(row, record)
        return True

    def _drop(self, row: int, dropped: Record) -> bool:
        store = self._store
        store.counters["recovered_dropped"] += 1
        slab = store.slabs.get(dropped.slab)
        tenant = slab.tenant if slab is not None else None
        if tenant is None or not store.table.find(dropped.key, scope(tenant.number, dropped.shard)):
            self._tell(dropped)
        if dropped.state is State.COMMITTED and tenant is not None:
            self._quarantine(dropped)
        record = Record(state=State.FREE, generation=store.table.generation[row])
        store.out.append(PutRecord(row - 1, record.encode()))
        store.table.give_row(row)
        return False

    def _tell(self, record: Record) -> None:
        store = self._store
        store.endings.add(record.key, record.shard, Cause.RECOVERY, store.tick)
        if record.state is State.COMMITTED:
            about = record.key, record.namespace, record.shard, record.tokens, record.length
            store.out.append(SpanEnded(*about, Cause.RECOVERY))

    def _quarantine(self, record: Record) -> None:
        """Keep what a dropped record named: an engine of the earlier epoch may read it still."""
        slab = self._store.slabs[record.slab]
        first = record.offset // TILE_BYTES
        for tile in range(first, min(first + tiles(record.length), slab.tiles)):
            if slab.take(tile, 1, QUARANTINE):
                self._store.quarantine.append((record.slab, tile, 1))


def _is_shard(code: int) -> bool:
    try:
        Shard.from_code(code)
    except ValueError:
        return False
    return True
