"""What the daemon writes of an answer against protobuf's own way to make it."""

from __future__ import annotations

from array import array
from dataclasses import asdict, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kmesh import _host
from kmesh.v1 import spans_pb2
from kmesh_spand.control.limits import MAX_MESSAGE_BYTES
from kmesh_spand.control.translate import to_message
from kmesh_spand.core.config import CoreConfig
from kmesh_spand.core.results import AcquireResult, BasePlace

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


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)), max_size=40))
def test_an_acquire_answer_with_recipes(dense: list[tuple[int, int]]) -> None:
    columns: dict[str, Any] = {name: array(kind, [1] * len(dense)) for name, kind in KINDS.items()}
    base = BasePlace(1, b"k" * 32, 2, 65536, 100, 3, 2**64 - 1, 64, 128)
    lengths, roots = (array("Q", [pair[i] for pair in dense]) for i in range(2))
    result = AcquireResult(7, [0] * len(dense), **columns, dense_length=lengths, dense_root=roots)
    made = to_message(replace(result, bases=[base]), "acquire")
    assert isinstance(made, spans_pb2.AcquireResponse)
    assert list(made.dense_length) == list(lengths)
    assert list(made.dense_root) == list(roots)
    assert {f.name: value for f, value in made.bases[0].ListFields()} == asdict(base)


def test_the_largest_answer_with_recipes_fits_a_packet() -> None:
    config = CoreConfig(max_spans=1)
    most = {"slab": 0xFFFF, "offset": 1 << 38, "length": 0xFFFF_FFFF, "tokens": 0xFFFF}
    most |= {"generation": 0xFFFF_FFFF, "root": 2**64 - 1}
    columns: dict[str, Any] = {
        name: array(kind, [most[name]] * config.max_batch) for name, kind in KINDS.items()
    }
    base = BasePlace(255, b"k" * 32, **most, position=2**31)
    dense = array("Q", [0xFFFF_FFFF]) * config.max_batch
    roots = array("Q", [2**64 - 1]) * config.max_batch
    bases = [base] * config.max_bases
    result = AcquireResult(2**63, [0] * config.max_batch, **columns)
    result = replace(result, dense_length=dense, dense_root=roots, bases=bases)
    assert to_message(result, "acquire").ByteSize() < MAX_MESSAGE_BYTES - 256


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
