"""What the daemon writes of an answer against protobuf's own way to make it."""

from __future__ import annotations

from array import array
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kmesh import _host
from kmesh.v1 import spans_pb2
from kmesh_spand.control.translate import to_message
from kmesh_spand.core.effects import AcquireResult

KINDS = {"slab": "H", "offset": "Q", "length": "I", "tokens": "H", "generation": "I", "root": "Q"}


@settings(max_examples=200, deadline=None)
@given(st.data(), st.integers(0, 2**64 - 1), st.integers(0, 300))
def test_an_acquire_answer(data: st.DataObject, lease: int, count: int) -> None:
    reason = [(i * 3 + count) % 10 for i in range(count)]
    columns: dict[str, Any] = {}
    for name, kind in KINDS.items():
        most = 2 ** (8 * array(kind).itemsize) - 1
        some = [0, most, *(min(most, data.draw(st.integers(0, 2**64 - 1))) for _ in range(3))]
        columns[name] = array(kind, [some[(i * 7 + len(name)) % 5] for i in range(count)])
    made = to_message(AcquireResult(lease, reason, **columns), "acquire")
    plain = {name: list(column) for name, column in columns.items()}
    assert made == spans_pb2.AcquireResponse(lease=lease, reason=reason, **plain)


@pytest.mark.parametrize("number", [0, 1 << 29])
def test_a_field_has_a_number(number: int) -> None:
    with pytest.raises(ValueError, match="number"):
        _host.pack_field(number, b"", True)


@given(st.binary(max_size=300), st.sampled_from([1, 15, 16, 2047, 2048, (1 << 29) - 1]))
def test_a_field_of_bytes(data: bytes, number: int) -> None:
    packed = _host.pack_field(number, data, True)
    assert packed.endswith(data)
    head = int.from_bytes(packed[:1], "little")
    assert head & 7 == 2
    if number == 1:
        assert spans_pb2.AcquireRequest.FromString(packed).keys == data
