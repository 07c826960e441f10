"""Long repeated fields, packed and unpacked natively, against protobuf."""

from __future__ import annotations

import contextlib
from array import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kmesh import _host
from kmesh.v1 import spans_pb2

FIELDS = spans_pb2.AcquireResponse.DESCRIPTOR.fields_by_name
u32s = st.lists(st.integers(0, 2**32 - 1), max_size=20)
u64s = st.lists(st.integers(0, 2**64 - 1), max_size=20)


@given(u32s, u64s, u64s)
def test_what_protobuf_wrote_is_read(slab: list[int], offset: list[int], root: list[int]) -> None:
    data = spans_pb2.AcquireResponse(
        lease=7, slab=slab, offset=offset, root=root
    ).SerializeToString()
    columns: dict[str, tuple[str, list[int]]] = {
        "slab": ("I", slab),
        "offset": ("Q", offset),
        "root": ("Q", root),
        "tokens": ("I", []),
    }
    for name, (kind, values) in columns.items():
        out = array(kind, [0] * len(values))
        found = _host.unpack_field(data, FIELDS[name].number, out, name == "root")
        assert (found, out.tolist()) == (len(values), values)
        if values:
            with pytest.raises(ValueError, match="room"):
                _host.unpack_field(data, FIELDS[name].number, out[1:], name == "root")


@given(u64s)
def test_what_is_packed_is_unpacked(values: list[int]) -> None:
    column = array("Q", values)
    for fixed in (False, True):
        out = array("Q", bytes(8 * len(values)))
        packed = _host.pack_field(6, column, fixed)
        assert _host.unpack_field(packed, 6, out, fixed) == len(values)
        assert out == column


def test_values_one_by_one_are_a_column_too() -> None:
    """Protobuf lets a repeated field be written so."""
    data = b"\x18\x05\x18\xac\x02" + b"\x41" + bytes(range(8))
    out = array("I", [0, 0])
    assert _host.unpack_field(data, 3, out, False) == 2
    assert out.tolist() == [5, 300]
    assert _host.unpack_field(data, 8, array("Q", [0]), True) == 1


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b"\x18", "Q"),
        (b"\x1a\x05\x01", "Q"),
        (b"\x1a\x01\x80", "Q"),
        (b"\x41\x01\x02", "Q"),
        (b"\x1b\x01", "Q"),
        (b"\x1a\x0b" + b"\xff" * 11, "Q"),
        (b"\x1a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", "Q"),
        (b"\x1a\x03\xff\xff\x7f", "H"),
    ],
)
def test_what_is_no_message_is_refused(data: bytes, kind: str) -> None:
    with pytest.raises(ValueError, match="no message"):
        _host.unpack_field(data, 3, array(kind, [0] * 20), False)


@given(st.binary(max_size=60), st.integers(0, 20), st.sampled_from("BHIQ"), st.booleans())
def test_bytes_of_any_kind_are_survived(data: bytes, room: int, kind: str, fixed: bool) -> None:
    memory: Any = array(kind, [7] * (room + 2))
    with contextlib.suppress(ValueError):
        assert _host.unpack_field(data, 1, memoryview(memory)[1 : room + 1], fixed) <= room
    assert (memory[0], memory[-1]) == (7, 7)
