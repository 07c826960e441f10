"""The parts of the core, one by one."""

from __future__ import annotations

import random
from array import array

import hypothesis.strategies as st
import pytest
from contents import OTHER_SHARD, SHARD, key
from hypothesis import given, settings

from kmesh import flight
from kmesh.errors import ConfigError
from kmesh.v1 import flights_pb2
from kmesh_spand.control.native import NativeBatch
from kmesh_spand.core import codes
from kmesh_spand.core.allocator import QUARANTINE, Slab
from kmesh_spand.core.batch import Batch
from kmesh_spand.core.check import _check_slab
from kmesh_spand.core.codes import Cause, Code, Reason, Verdict
from kmesh_spand.core.config import CoreConfig
from kmesh_spand.core.intern import Interner
from kmesh_spand.core.policy import LRU
from kmesh_spand.core.record import RECORD_BYTES, Record, decode
from kmesh_spand.core.states import State
from kmesh_spand.core.table import SpanTable
from kmesh_spand.core.tags import scope, splitmix64, tag

u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 1)
fields = dict(
    generation=u32,
    tokens=u32,
    start=u32,
    slab=u32,
    offset=u64,
    length=u32,
    dense=u32,
    shard=u64,
    root=u64,
    key=st.binary(min_size=32, max_size=32),
    namespace=st.binary(min_size=32, max_size=32),
)
records = st.one_of(
    st.builds(Record, state=st.just(State.FREE), **fields),
    st.builds(Record, state=st.just(State.COMMITTED), born=u32, **fields),
    st.builds(Record, state=st.just(State.ALIAS), primary=u32, **fields),
)


@settings(deadline=None)
@given(records)
def test_record_round_trip(record: Record) -> None:
    data = record.encode()
    assert len(data) == RECORD_BYTES
    assert decode(data) == record
    assert decode(memoryview(bytearray(data))) == record


@settings(deadline=None)
@given(records, st.integers(0, RECORD_BYTES - 1), st.integers(1, 255))
def test_a_damaged_record_is_none(record: Record, at: int, change: int) -> None:
    data = bytearray(record.encode())
    data[at] ^= change
    assert decode(data) is None


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_noise_is_no_record(data: bytes) -> None:
    assert decode(data) is None
    assert decode(bytes(RECORD_BYTES)) is None


@pytest.mark.parametrize("state", set(State) - {State.FREE, State.COMMITTED, State.ALIAS})
def test_states_that_are_not_written_are_not_read(state: State) -> None:
    assert decode(Record(state=state, generation=1).encode()) is None


def test_tag_golden() -> None:
    assert splitmix64(0) == 0xE220A8397B1DCDAF
    assert splitmix64(2**64 - 1) == 0xE4D971771B652C20
    assert tag(bytes(32), 0) == 0xE220A8397B1DCDAF
    for low in (0, 1):
        word = splitmix64(SHARD) ^ low
        assert tag(word.to_bytes(8, "little") + bytes(24), SHARD) == 2


@settings(deadline=None)
@given(st.binary(min_size=32, max_size=32), u64)
def test_the_index_has_the_same_tag(name: bytes, shard: int) -> None:
    index = pytest.importorskip("kmesh.index")
    assert tag(name, shard) == index.tag(name, shard)


def test_codes_are_those_of_the_wire() -> None:
    from kmesh.v1 import admin_pb2, common_pb2

    for kind, wire in ((Verdict, admin_pb2.Verdict), (Cause, admin_pb2.Cause)):
        named = {f"{kind.__name__.upper()}_{item.name}": int(item) for item in kind}
        assert {**named, f"{kind.__name__.upper()}_UNSPECIFIED": 0} == dict(wire.items())
    for code in Code:
        assert common_pb2.Code.Value(f"CODE_{code.name}") == code
    assert {f"REASON_{reason.name}": int(reason) for reason in Reason} == dict(
        common_pb2.Reason.items()
    )


def test_numbers_of_flights_are_the_same_in_all_three_rooms() -> None:
    """The core may not import the client's, which has one more for what it is too old for."""
    for ours, theirs, wire, prefix in (
        (codes.Standing, flight.Standing, flights_pb2.Standing, "STANDING_"),
        (codes.Arrival, flight.Arrival, flights_pb2.Arrival, "ARRIVAL_"),
        (codes.FlightCause, flight.FlightCause, flights_pb2.FlightCause, "FLIGHT_CAUSE_"),
    ):
        expected = {name.removeprefix(prefix): number for name, number in wire.items() if number}
        assert {one.name: one.value for one in ours} == expected
        assert {one.name: one.value for one in theirs if one} == expected


@pytest.mark.parametrize(
    "limits",
    [
        {"max_spans": 0},
        {"max_spans": 2**32},
        {"max_spans": 1, "max_batch": 0},
        {"max_spans": 1, "span_tokens": 40},
        {"max_spans": 1, "span_tokens": 65536},
    ],
)
def test_config_names_what_is_wrong(limits: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=list(limits)[-1]):
        CoreConfig(**limits)


# Table


@settings(max_examples=60, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("batch", [Batch(), NativeBatch()], ids=["plain", "native"])
def test_table_against_a_dict(batch: Batch, data: st.DataObject) -> None:
    """Few distinct low bits make long clusters, which removal has to keep whole."""
    table = SpanTable(24, batch)
    model: dict[tuple[bytes, int], int] = {}
    names = [bytes([low]) + bytes(7) + key(n)[8:] for n in range(5) for low in (0, 1, 63)]
    for _ in range(data.draw(st.integers(1, 80))):
        name = data.draw(st.sampled_from(names))
        shard = data.draw(st.sampled_from([SHARD, OTHER_SHARD, scope(3, SHARD)]))
        row = model.pop((name, shard), 0)
        if row:
            table.remove(row)
            table.scopes.drop(table.scope[row])
            table.give_row(row)
        elif table.vacant:
            place = table.place_for(name, shard)
            assert place is not None
            row = table.take_row()
            table.insert(row, name, shard, place)
            model[name, shard] = row
        assert table.keyed == len(model)
        assert table.vacant == 24 - len(model)
        for code in (SHARD, OTHER_SHARD, scope(3, SHARD)):
            expected = [model.get((name, code), 0) for name in names]
            assert [table.find(name, code) for name in names] == expected
            rows, found = table.find_all(b"".join(names), code)
            assert (rows.tolist(), found) == (expected, len(expected) - expected.count(0))
    for (name, _), row in model.items():
        assert table.key_of(row) == name


def test_a_crowded_neighbourhood_takes_no_more_keys() -> None:
    table = SpanTable(400)
    for n in range(400):
        name = bytes(8) + key(n)[8:]
        place = table.place_for(name, SHARD)
        if place is None:
            assert n == 256
            assert table.find(name, SHARD) == 0
            assert table.find_all(name, SHARD) == (array("I", [0]), 0)
            return
        table.insert(table.take_row(), name, SHARD, place)
    pytest.fail("no limit on probes")


def test_interner_counts_holders() -> None:
    interner: Interner[str] = Interner(2)
    a, b = interner.take("a"), interner.take("b")
    assert interner.take("a") == a
    assert interner.full("c")
    assert not interner.full("b")
    with pytest.raises(OverflowError):
        interner.take("c")
    interner.drop(b)
    assert interner.find("b") == 0
    assert interner.take("c") == b
    interner.drop(a)
    assert interner.value(a) == "a"
    interner.drop(a)
    with pytest.raises(KeyError):
        interner.value(a)
    with pytest.raises(KeyError):
        interner.value(0)


# Allocator


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_allocator_ledger(data: st.DataObject) -> None:
    slab = Slab(24)
    owned: list[tuple[int, int, int]] = []
    for owner in range(1, data.draw(st.integers(1, 40))):
        match data.draw(st.sampled_from(["allocate", "allocate", "free", "populate", "hand"])):
            case "allocate":
                count = data.draw(st.integers(1, 8))
                fits = slab.largest >= count
                start = slab.allocate(count, owner)
                assert (start is not None) == fits
                if start is not None:
                    owned.append((start, count, owner))
            case "free" if owned:
                slab.free(*owned.pop(data.draw(st.integers(0, len(owned) - 1))))
            case "hand" if owned:
                start, count, was = owned.pop()
                slab.hand_over(start, count, was, QUARANTINE)
                owned.append((start, count, QUARANTINE))
            case "populate":
                slab.populate(data.draw(st.integers(0, 30)))
        _check_slab(slab, owned)


def test_nothing_is_freed_twice_or_by_another() -> None:
    slab = Slab(8)
    slab.populate(8)
    start = slab.allocate(3, 1)
    assert start is not None
    for range_ in ((start, 3, 2), (start, 2 + 2, 1), (start, 0, 1), (start, 3, 0)):
        with pytest.raises(AssertionError):
            slab.free(*range_)
    with pytest.raises(AssertionError):
        slab.hand_over(start, 3, 2, 5)
    slab.free(start, 3, 1)
    with pytest.raises(AssertionError):
        slab.free(start, 3, 1)


def test_the_best_fit_is_taken() -> None:
    slab = Slab(10)
    slab.populate(10)
    assert [slab.allocate(n, 1 + n) for n in (5, 2, 3)] == [0, 5, 7]
    slab.free(0, 5, 6)
    slab.free(7, 3, 4)
    assert slab.allocate(3, 9) == 7


def test_taken_ranges_stay_taken_when_memory_grows_over_them() -> None:
    slab = Slab(10)
    assert slab.take(2, 3, 7)
    assert not slab.take(4, 2, 8)
    assert not slab.take(9, 2, 8)
    assert not slab.take(-1, 2, 8)
    assert not slab.take(0, 0, 8)
    slab.populate(4)
    assert sorted(slab.free_ranges()) == [(0, 2)]
    slab.free(2, 3, 7)
    assert sorted(slab.free_ranges()) == [(0, 4)]
    slab.populate(99)
    assert sorted(slab.free_ranges()) == [(0, 10)]
    assert slab.take(3, 2, 7)
    slab.rescan()
    assert sorted(slab.free_ranges()) == [(0, 3), (5, 5)]


# Policy


@pytest.mark.parametrize("batch", [Batch(), NativeBatch()], ids=["plain", "native"])
def test_lru_against_a_list(batch: Batch) -> None:
    rng = random.Random(3)
    policy, model = LRU(50, batch), list[int]()
    for _ in range(500):
        rows = rng.sample(range(1, 51), 5)
        gone = [row for row in rows if row in model]
        policy.discard(gone)
        model = [row for row in model if row not in gone]
        fresh = [row for row in rows if row not in gone]
        policy.add(fresh)
        model += fresh
        assert list(policy.victims()) == model
    policy.discard(model)
    assert list(policy.victims()) == []
