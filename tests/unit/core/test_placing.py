"""Records of an earlier epoch, placed many at a time: against a model, by both batches, and against
``move`` for each row."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from contents import OTHER_SHARD, SHARD, key
from hypothesis import given, settings
from hypothesis import strategies as st

from kmesh import _host
from kmesh.layout import TILE_BYTES, tiles
from kmesh_spand.control.native import NativeBatch
from kmesh_spand.core import effects as fx
from kmesh_spand.core import events as ev
from kmesh_spand.core.allocator import QUARANTINE
from kmesh_spand.core.batch import Arrivals, Batch, Ground, Terms
from kmesh_spand.core.config import CoreConfig
from kmesh_spand.core.core import Core
from kmesh_spand.core.policies import make_policy
from kmesh_spand.core.record import RECORD_BYTES, Record
from kmesh_spand.core.records import Records, read
from kmesh_spand.core.states import State, Trigger
from kmesh_spand.core.store import SpanStore
from kmesh_spand.core.tenants import OwnerState, SlabOwner, Tenancy

SPANS, TILES, NOW = 40, 8, 64_000
# The third slab's owner is not known, the fourth never comes, the others are of three tenants.
OWNERS = {
    0: SlabOwner(OwnerState.OWNED, 1),
    1: SlabOwner(OwnerState.OWNED, 1),
    2: None,
    4: SlabOwner(OwnerState.OWNED, 2, b"s" * 32),
    5: SlabOwner(OwnerState.OWNED, 1),
}
TIERS = {5: 1}
TENANT = {0: 1, 1: 1, 4: 2, 5: 3}
# All near one place of the hash, and one elsewhere.
KEYS = [*(bytes([7]) * 8 + bytes([last]) * 24 for last in range(6)), key("A")]


_OBJECTS = {"batch", "scopes", "spaces"}


def mostly(usual: list[int], odd: list[int]) -> st.SearchStrategy[int]:
    return st.one_of(st.sampled_from(usual), st.sampled_from(usual), st.sampled_from(odd + usual))


FIELDS = {
    "generation": st.integers(0, 2**32 - 1),
    "tokens": mostly([64, 64, 48], [0, 8, 16, 65, 80, 2**32 - 1]),
    "start": st.integers(0, 3),
    "slab": mostly([0, 0, 1, 4, 5], [2, 3, 2**32 - 1]),
    "offset": mostly(
        [tile * TILE_BYTES for tile in range(TILES)], [1, 8 * TILE_BYTES, 2**64 - TILE_BYTES]
    ),
    "length": mostly([1, TILE_BYTES, TILE_BYTES], [0, TILE_BYTES + 1, 8 * TILE_BYTES, 2**32 - 1]),
    "shard": mostly([SHARD, SHARD, OTHER_SHARD], [0, 2**64 - 1]),
    "root": st.integers(0, 1),
    "key": st.one_of(st.sampled_from(KEYS), st.integers(0, 200).map(key)),
    "namespace": st.sampled_from([key("one"), key("two")]),
    "dense": mostly([0, 0], [TILE_BYTES]),
}
SPAN = st.builds(
    Record,
    state=st.just(State.COMMITTED),
    born=mostly([0, 999, 1000, 1001], [2**32 - 1]),
    **FIELDS,
)
ALIAS = st.builds(
    Record, state=st.just(State.ALIAS), primary=mostly([1, 2], [0, 41, 2**32 - 1]), **FIELDS
)
FREE = st.builds(Record, state=st.just(State.FREE), generation=st.integers(0, 2**32 - 1))
ODD = st.sampled_from(
    [
        *[{}] * 6,
        {"root": 2},
        {"offset": 5 * TILE_BYTES},
        {"namespace": key("three")},
        {"shard": OTHER_SHARD},
        {"slab": 1},
        {"tokens": 64},
        {"tokens": 0},
    ]
)
CATALOG = st.lists(st.one_of(SPAN, SPAN, SPAN, ALIAS, st.none(), FREE), max_size=SPANS + 2)


def written(catalog: list[Record | None]) -> Records:
    data = b"".join(record.encode() if record else bytes(RECORD_BYTES) for record in catalog)
    return read(memoryview(data), len(catalog))[0]


@dataclass
class Life:
    """A core that took a catalog over."""

    core: Core
    effects: list[fx.Effect]

    @classmethod
    def of(cls, catalog: list[Record | None], batch: Batch, policy: str) -> Life:
        core = Core(
            CoreConfig(max_spans=SPANS),
            make_policy(policy, SPANS, batch),
            Tenancy(groups=(1, 2)),
            batch,
        )
        life = cls(core, [])
        life.send(ev.Recovered(written(catalog)))
        for slab, owner in OWNERS.items():
            life.send(ev.SlabAdded(slab, TILES * TILE_BYTES, owner, TIERS.get(slab, 0)))
        return life

    def send(self, event: ev.Event) -> None:
        self.effects += self.core.handle(event, NOW)
        self.core.check()

    def said(self) -> tuple[object, ...]:
        """All that there is to know of it."""
        store, verifier = self.core._store, self.core._verifier
        table = store.table
        return (
            self.effects,
            self.core.counters,
            {name: each for name, each in vars(table).items() if name not in _OBJECTS},
            (list(table.scopes), list(table.spaces)),
            [(slab.owner, slab.used, dict(slab.free_ranges())) for slab in store.slabs.values()],
            [
                (tenant.tiles, tenant.evictable, tenant.spans, tenant.stored_bytes, tenant.spaces)
                for tenant in store.tenants
            ],
            [list(tenant.order.victims()) for tenant in store.tenants],
            store.by_state,
            (store.space_spans, store.space_bytes, store.stored_bytes, store.evictable),
            (store.recovered_tick, store.quarantine, store.policy_faults),
            (store.mirrors.spans, store.mirrors.dense_bytes, list(store.mirrors.by_row)),
            {tier: list(backlog) for tier, backlog in verifier._backlogs.items()},
        )


def holding(catalog: list[Record | None]) -> tuple[set[int], set[int]]:
    """Slots of spans and of aliases that hold, one after the other, without a table."""
    spans: set[int] = set()
    aliases: set[int] = set()
    owned: set[tuple[int, int]] = set()
    names: set[tuple[int, int, bytes]] = set()
    for slab, tenant in TENANT.items():
        here = [
            (slot, record)
            for slot, record in enumerate(catalog[:SPANS])
            if record is not None and record.slab == slab
        ]
        placed = {}
        for slot, record in here:
            first, uneven = divmod(record.offset, TILE_BYTES)
            end = first + tiles(record.length)
            covers = {(slab, tile) for tile in range(first, min(end, TILES))}
            name = tenant, record.shard, record.key
            if (
                record.state is State.COMMITTED
                and not uneven
                and record.length
                and end <= TILES
                and record.tokens in (16, 48, 64)
                and record.shard in (SHARD, OTHER_SHARD)
                and not covers & owned
                and name not in names
            ):
                owned |= covers
                names.add(name)
                spans.add(slot)
                placed[slot + 1] = record
        for slot, record in here:
            span = placed.get(record.primary)
            name = tenant, record.shard, record.key
            if (
                record.state is State.ALIAS
                and span is not None
                and (span.offset, span.root) == (record.offset, record.root)
                and (span.shard, span.namespace) == (record.shard, record.namespace)
                and record.tokens in (16, 48)
                and record.tokens < span.tokens
                and name not in names
            ):
                names.add(name)
                aliases.add(slot)
    return spans, aliases


def fitting(catalog: list[Record | None], data: st.DataObject) -> list[Record | None]:
    """Many aliases name a span that is there, or all but one thing of it."""
    spans = [
        slot for slot, record in enumerate(catalog) if record and record.state is State.COMMITTED
    ]
    made = list(catalog)
    for slot, record in enumerate(catalog):
        if record and record.state is State.ALIAS and spans and data.draw(st.booleans()):
            at = data.draw(st.sampled_from(spans))
            span = catalog[at]
            assert span is not None
            same = {
                name: getattr(span, name)
                for name in ("slab", "offset", "root", "shard", "namespace")
            }
            other = {name: getattr(record, name) for name in ("generation", "key")}
            fits = {**same, **other, "tokens": 16, "primary": at + 1}
            made[slot] = Record(State.ALIAS, **{**fits, **data.draw(ODD)})
    return made


def one_by_one(store: SpanStore, rows: array[int]) -> None:
    """``recover`` as ``move`` does it."""
    for row in rows:
        born = store.table.born[row]
        store.move(row, Trigger.RECOVER)
        store.table.born[row] = born


@settings(max_examples=300, deadline=None)
@given(CATALOG, st.sampled_from(["lru", "s3-fifo"]), st.data())
def test_what_holds_is_placed(
    catalog: list[Record | None], policy: str, data: st.DataObject
) -> None:
    catalog = fitting(catalog, data)
    plain = Life.of(catalog, Batch(), policy)
    native = Life.of(catalog, NativeBatch(), policy)
    assert native.said() == plain.said()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SpanStore, "recover", one_by_one)
        assert Life.of(catalog, Batch(), policy).said() == plain.said()

    spans, aliases = holding(catalog)
    table = plain.core._store.table
    rows = range(1, SPANS + 1)
    placed = {row - 1 for row in rows if table.state[row] in (State.RECOVERED, State.VERIFYING)}
    assert placed == spans
    assert {row - 1 for row in rows if table.state[row] == State.ALIAS} == aliases
    for slot in spans:
        record, row = catalog[slot], slot + 1
        assert record is not None
        # Of a mirror the record says the payload's length as well.
        assert plain.core._store.record(row) == Record(
            **{name: getattr(record, name) for name in Record.__slots__ if name != "born"},
            born=min(record.born, NOW >> 6),
        )
    plain.send(ev.GraceEnded())
    named = sum(record is not None and record.state is not State.FREE for record in catalog)
    beyond = sum(record is not None for record in catalog[SPANS:])
    beyond -= sum(record is not None and bool(record.state) for record in catalog[SPANS:])
    counters = plain.core.counters
    assert counters["recovered"] == len(spans)
    assert counters["recovered_dropped"] == named + beyond - len(spans) - len(aliases)


def test_what_a_broken_record_names_is_not_taken_from_a_good_one() -> None:
    """The good one comes later, and is placed before the other's range is kept from all."""
    catalog = [
        Record(State.COMMITTED, 1, 65, length=2 * TILE_BYTES, shard=SHARD, key=key("bad")),
        Record(State.COMMITTED, 1, 64, length=TILE_BYTES, shard=SHARD, key=key("good")),
    ]
    life = Life.of([*catalog], NativeBatch(), "lru")
    assert [row.key for row in life.core.views.spans(now_ms=NOW)] == [key("good")]
    assert list(life.core._store.slabs[0].owner[:3]) == [2, QUARANTINE, 0]


ROWS = 4


def ground(**columns: array[int]) -> Ground:
    def zeros(kind: str, count: int = ROWS) -> array[int]:
        return array(kind, [0] * count)

    words = columns.pop("words", zeros("Q"))
    made = Ground(
        (words, zeros("Q"), zeros("Q"), zeros("Q")),
        zeros("I", 8),
        zeros("I", TILES),
        *(zeros(kind) for kind in "HIHIHIIQII"),
    )
    return made._replace(**columns)


def arrivals(**columns: Any) -> Arrivals:
    record = Record(State.COMMITTED, 1, 64, length=TILE_BYTES, shard=SHARD, key=key("A"))
    made = Arrivals(
        record.encode(),
        array("I", [0]),
        array("I", [0]),
        array("I", [0]),
        array("H", [1]),
        array("Q", [0]),
        array("I", [1]),
    )
    return made._replace(**columns)


TERMS = Terms(0, 64, 16, 256, 1000)
TWO, FAR = array("I", [0, 0]), array("I", [9])


@pytest.mark.parametrize(
    ("columns", "come", "terms", "wrong"),
    [
        ({"places": array("I", [0] * 7)}, {}, {}, "power of two"),
        ({"places": array("I")}, {}, {}, "power of two"),
        ({"places": array("I", [ROWS] * 8)}, {}, {}, "outside"),
        ({"words": array("Q", [0])}, {}, {}, "outside"),
        ({"born": array("I", [0])}, {}, {}, "outside"),
        ({"space": array("H", [0] * ROWS)}, {}, {}, "space: items of a wrong size"),
        ({}, {"slots": array("I", [ROWS - 1])}, {}, "outside"),
        ({}, {"slots": array("I", [2**32 - 1])}, {}, "outside"),
        ({}, {"which": array("I", [1])}, {}, "outside"),
        ({}, {"kinds": array("I", [1])}, {}, "outside"),
        ({}, {"kinds": TWO}, {}, "not one for each slot"),
        ({}, {"data": bytes(RECORD_BYTES - 1)}, {}, "not one for each slot"),
        ({}, {"spaces": TWO}, {}, "not one for each scope"),
        ({}, {"folds": array("Q")}, {}, "not one for each scope"),
        ({}, {"which": TWO}, {}, None),
        ({}, {}, {"slab": 1 << 16}, "slab"),
        ({}, {}, {"span_tokens": 1 << 16}, "tokens"),
        ({}, {}, {"sub_tokens": 0}, "tokens"),
        ({}, {}, {"tick": 1 << 32}, "tick"),
    ],
)
def test_nothing_outside_of_the_columns_is_touched(
    columns: dict[str, array[int]],
    come: dict[str, Any],
    terms: dict[str, int],
    wrong: str | None,
) -> None:
    into = ground(**columns)
    call: Callable[[], object] = lambda: NativeBatch().place(  # noqa: E731
        into, arrivals(**come), TERMS._replace(**terms)
    )
    if wrong is None:
        assert call() == b"\1\0"
        return
    with pytest.raises(ValueError, match=wrong):
        call()
    assert not any(into.owner)


def test_columns_are_all_there_and_writable() -> None:
    into = ground()
    flat = (*into.words, *into[1:])
    for columns in (flat[:-1], [*flat]):
        with pytest.raises(ValueError, match="not a tuple"):
            _host.rows_place(columns, arrivals(), TERMS, bytearray(1))
    with pytest.raises(ValueError, match="not a byte for each"):
        _host.rows_place(flat, arrivals(), TERMS, bytearray(2))
    with pytest.raises(BufferError, match="writable"):
        _host.rows_place((*flat[:-1], bytes(16)), arrivals(), TERMS, bytearray(1))
