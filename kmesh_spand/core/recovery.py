"""What a new epoch takes over from the catalog of the one before."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Collection, Iterable
from itertools import compress

from kmesh.layout import TILE_BYTES, Shard, tiles
from kmesh_spand.core.allocator import QUARANTINE
from kmesh_spand.core.batch import Arrivals, Rows, Terms
from kmesh_spand.core.codes import Cause
from kmesh_spand.core.config import CoreConfig
from kmesh_spand.core.effects import PutRecord, SpanEnded
from kmesh_spand.core.record import Record
from kmesh_spand.core.records import Records
from kmesh_spand.core.states import State
from kmesh_spand.core.store import SpanStore
from kmesh_spand.core.table import PROBE_LIMIT
from kmesh_spand.core.tags import mix, scope
from kmesh_spand.core.tenants import Tenant
from kmesh_spand.core.verify import Verifier

# Tables for ``bytes.translate``: which states are of spans and of aliases, and what is 0.
_SPANS = bytes(state == State.COMMITTED for state in range(256))
_ALIASES = bytes(state == State.ALIAS for state in range(256))
_OTHERS = bytes(value == 0 for value in range(256))


class Recovery:
    """Places recovered records slab by slab, as the slabs become known.

    What does not hold is dropped, counted, and its record erased: impossible geometry, a range
    that another record already has, a key that another record already has, an alias whose
    span is not the one that it names. In each slab the spans come first, in order of their slots,
    then what does not hold of them is dropped, then aliases come.

    Spans are placed many at a time (``Batch.place``); only what is dropped, and aliases, become
    objects.
    """

    def __init__(self, store: SpanStore, config: CoreConfig, verifier: Verifier) -> None:
        self._store = store
        self._verifier = verifier
        self._config = config
        self._records = Records()
        self._dense: list[int] = []
        # By kind of record, while its slab's are placed: numbers of scope and namespace, and what
        # keys are XORed with. Scope 0 is none.
        self._scopes, self._folds, self._spaces = array("H"), array("Q"), array("I")
        # Numbers of records by slab.
        self._waiting: dict[int, Rows] = {}

    @property
    def waiting(self) -> int:
        """Records of slabs that are not known yet."""
        return sum(map(len, self._waiting.values()))

    def start(self, found: Records) -> None:
        """Take the catalog over. Once, before anything is reserved."""
        store, table = self._store, self._store.table
        self._records = records = found.below(self._config.max_spans)
        store.counters["recovered_dropped"] += len(found) - len(records)
        dense = records.dense
        self._dense = dense if any(dense) else []
        kinds = len(records.pairs)
        self._scopes = array("H", bytes(2 * kinds))
        self._folds = array("Q", bytes(8 * kinds))
        self._spaces = array("I", bytes(4 * kinds))
        held = array("I")
        columns = zip(
            records.slots, records.generations, records.states, records.slabs, strict=True
        )
        for number, (slot, generation, state, slab) in enumerate(columns):
            table.generation[slot + 1] = generation
            if state:
                held.append(slot + 1)
                waiting = self._waiting.get(slab)
                if waiting is None:
                    waiting = self._waiting[slab] = array("I")
                waiting.append(number)
        table.claim_rows(held)
        store.grace = bool(held)
        for number in list(self._waiting):
            if number in store.slabs:
                self.place(number)
        self._forget()

    def place(self, number: int) -> None:
        """Place the records of a slab that is known now."""
        waiting = self._waiting.pop(number, None)
        if waiting is None:
            return
        slab = self._store.slabs[number]
        if slab.tenant is None:
            # Nobody may see bytes of which nobody knows whose they are.
            slab.lost = True
            self._drop_all(waiting)
        else:
            self._place(number, waiting, slab.tenant)
        self._forget()

    def give_up(self, expected: Collection[int] = ()) -> None:
        """Drop the records of slabs that never came, and are not expected any more."""
        for slab in self._waiting.keys() - set(expected):
            self.drop(slab)

    def drop(self, number: int) -> None:
        """Drop the records of a slab that never comes."""
        self._drop_all(self._waiting.pop(number, ()))
        self._forget()

    def _forget(self) -> None:
        if not self._waiting:
            self._records, self._dense = Records(), []

    def _place(self, number: int, waiting: Rows, tenant: Tenant) -> None:
        states = self._store.table.batch.gather_bytes(waiting, self._records.states)
        spans = array("I", compress(waiting, states.translate(_SPANS)))
        held = self._spans(number, spans, tenant)
        self._drop_all(compress(spans, held.translate(_OTHERS)))
        self._store.slabs[number].rescan()
        for each in compress(waiting, states.translate(_ALIASES)):
            self._alias(each, tenant)

    def _spans(self, number: int, spans: Rows, tenant: Tenant) -> bytearray:
        """Places spans of a slab; returns which of them hold."""
        store, table, records = self._store, self._store.table, self._records
        batch, slab = table.batch, store.slabs[number]
        kinds = batch.gather(spans, records.kinds)
        known = self._take_names(kinds, tenant)
        arrivals = Arrivals(
            records.data,
            records.slots,
            records.kinds,
            spans,
            self._scopes,
            self._folds,
            self._spaces,
        )
        config = self._config
        terms = Terms(number, config.span_tokens, config.sub_tokens, PROBE_LIMIT, store.tick)
        held = batch.place(table.ground(slab.owner), arrivals, terms)
        self._give_names(known, Counter(compress(kinds, held)))
        tenant.tiles += slab.recount()
        placed = array("I", compress(spans, held))
        rows = array("I", [slot + 1 for slot in batch.gather(placed, records.slots)])
        if self._dense:
            for row, each in zip(rows, placed, strict=True):
                if self._dense[each]:
                    store.mirrors.recovered(row, self._dense[each])
        table.keyed += len(rows)
        store.recover(rows)
        if rows and not tenant.tier:
            store.recovered_tick = store.tick
        self._verifier.recovered(rows)
        store.counters["recovered"] += len(rows)
        return held

    def _take_names(self, kinds: Iterable[int], tenant: Tenant) -> list[int]:
        """Gives scope and namespace of each kind a number, until ``_give_names``.

        Returns kinds that have one. Others name an impossible shard, or one too many.
        """
        table, known = self._store.table, []
        for kind in dict.fromkeys(kinds):
            shard, namespace = self._records.pairs[kind]
            where = scope(tenant.number, shard)
            if _is_shard(shard) and not table.scopes.full(where):
                self._scopes[kind] = table.scopes.take(where)
                self._spaces[kind] = table.spaces.take(namespace)
                self._folds[kind] = mix(where)
                known.append(kind)
        return known

    def _give_names(self, known: Iterable[int], holders: Counter[int]) -> None:
        """Numbers are held by rows now, so many of each kind."""
        table = self._store.table
        for kind in known:
            for names, numbers in ((table.scopes, self._scopes), (table.spaces, self._spaces)):
                names.hold(numbers[kind], holders[kind])
                names.drop(numbers[kind])
            self._scopes[kind] = 0

    def _alias(self, number: int, tenant: Tenant) -> None:
        store, table, config = self._store, self._store.table, self._config
        record, row = self._records[number], self._records.slots[number] + 1
        span = record.primary
        if (
            span > config.max_spans
            # All of this slab's that are in this state were placed just now.
            or table.state[span] != State.RECOVERED
            or table.slab[span] != record.slab
            or table.tile[span] * TILE_BYTES != record.offset
            or table.root[span] != record.root
            or store.shard(span) != record.shard
            or table.spaces.value(table.space[span]) != record.namespace
            or not 0 < record.tokens < table.tokens[span]
            or record.tokens % config.sub_tokens
            or table.find(record.key, scope(tenant.number, record.shard))
            or not store.alias(row, span, record.key, record.tokens)
        ):
            self._drop(number)

    def _drop_all(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self._drop(number)

    def _drop(self, number: int) -> None:
        store = self._store
        dropped, row = self._records[number], self._records.slots[number] + 1
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

    def _tell(self, record: Record) -> None:
        store = self._store
        store.endings.add(record.key, record.shard, Cause.RECOVERY, store.tick)
        if record.state is State.COMMITTED:
            about = record.key, record.namespace, record.shard, record.tokens, record.length
            store.out.append(SpanEnded(*about, Cause.RECOVERY))

    def _quarantine(self, record: Record) -> None:
        """Keep what a dropped record named: an engine of the earlier epoch may read it still, until
        grace has ended."""
        if not self._store.grace:
            return
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
