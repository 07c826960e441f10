"""Catalogs that are read as a whole: the same records as one by one."""

from __future__ import annotations

import zlib
from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kmesh_spand.core import records
from kmesh_spand.core.record import RECORD_BYTES, Record, decode
from kmesh_spand.core.records import Records, read
from kmesh_spand.core.states import State

WORD = st.integers(0, 2**32 - 1)
NAME = st.sampled_from([bytes(32), b"a" * 32, bytes(range(32))])
GOOD = st.builds(
    Record,
    state=st.sampled_from([State.FREE, State.COMMITTED]),
    generation=WORD,
    tokens=WORD,
    start=WORD,
    slab=WORD,
    offset=st.integers(0, 2**64 - 1),
    length=WORD,
    shard=st.sampled_from([0, 1, 2**64 - 1]),
    root=st.integers(0, 2**64 - 1),
    key=NAME,
    namespace=NAME,
    dense=WORD,
).map(Record.encode)
ALIAS = st.builds(Record, state=st.just(State.ALIAS), generation=WORD, primary=WORD).map(
    Record.encode
)


def summed(body: bytes) -> bytes:
    return body + zlib.crc32(body).to_bytes(4, "little")


def changed(data: bytes, at: int, value: int, mend: bool) -> bytes:
    """One byte of a record is another; its sum may be right nevertheless."""
    data = data[:at] + bytes([value]) + data[at + 1 :]
    return summed(data[:-4]) if mend else data


BROKEN = st.builds(
    changed,
    GOOD,
    st.one_of(st.integers(0, 7), st.integers(0, RECORD_BYTES - 1)),
    st.integers(0, 255),
    st.booleans(),
)
SLOT = st.one_of(
    st.just(bytes(RECORD_BYTES)),
    GOOD,
    ALIAS,
    BROKEN,
    st.binary(min_size=RECORD_BYTES, max_size=RECORD_BYTES),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(SLOT, max_size=20), st.integers(1, 8), st.data())
def test_what_is_read_is_what_each_slot_says(
    slots: list[bytes], step: int, data: st.DataObject
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(records, "_STEP", step)
        count = data.draw(st.integers(0, len(slots)))
        found, damaged = read(memoryview(bytearray(b"".join(slots))), count)
    known = {slot: decode(each) for slot, each in enumerate(slots[:count])}
    good = {slot: record for slot, record in known.items() if record is not None}
    assert list(found.slots) == list(good)
    assert [found[number] for number in range(len(found))] == list(good.values())
    assert list(damaged) == [slot for slot in range(count) if slots[slot][0] and slot not in good]
    for number, (slot, record) in enumerate(good.items()):
        assert found.data[number * RECORD_BYTES :][:RECORD_BYTES] == slots[slot]
        assert found.states[number] == record.state
        assert found.generations[number] == record.generation
        assert found.slabs[number] == record.slab
        assert found.dense[number] == record.dense
        assert found.pairs[found.kinds[number]] == (record.shard, record.namespace)
    assert len(set(found.pairs)) == len(found.pairs)
    below = found.below(5)
    assert list(below.slots) == [slot for slot in good if slot < 5]
    assert [below[number] for number in range(len(below))] == [
        record for slot, record in good.items() if slot < 5
    ]


def test_a_record_of_another_version_is_damaged() -> None:
    """Its sum is right: another daemon wrote it."""
    written = bytearray(Record(State.COMMITTED, 1).encode())
    written[4] += 1
    other = summed(bytes(written[:-4]))
    assert decode(other) is None
    found, damaged = read(memoryview(other), 1)
    assert (len(found), damaged) == (0, array("I", [0]))


def test_nothing() -> None:
    assert len(Records()) == 0
    found, damaged = read(memoryview(bytes(RECORD_BYTES * 5000)), 5000)
    assert (len(found), len(damaged)) == (0, 0)
