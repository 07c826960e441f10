"""The core's batches in plain Python and the native ones: same answers, same columns."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kmesh import _host
from kmesh_spand.control.native import NativeBatch
from kmesh_spand.core.batch import Batch

ROWS = 12
PLAIN, NATIVE = Batch(), NativeBatch()
rows_of = st.lists(st.integers(0, ROWS - 1), max_size=40).map(lambda found: array("I", found))
seldom = settings(max_examples=200, deadline=None)


def column(kind: str, most: int) -> st.SearchStrategy[array[int]]:
    found = st.lists(st.integers(0, most), min_size=ROWS, max_size=ROWS)
    return found.map(lambda values: array(kind, values))


def both(call: Callable[[Batch, list[Any]], object], *columns: Any) -> object:
    """What both say, having left the same columns behind."""
    plain, native = [each[:] for each in columns], [each[:] for each in columns]
    said = call(PLAIN, plain)
    assert call(NATIVE, native) == said
    assert native == plain
    return said


@seldom
@given(st.data())
def test_find(data: st.DataObject) -> None:
    """Few first words and few places: neighbours, wrapping, keys that differ late."""
    words = tuple(data.draw(column("Q", 3)) for _ in range(4))
    scopes = data.draw(column("H", 2))
    places = data.draw(st.sampled_from([1, 2, 8, 16]))
    index = array(
        "I", data.draw(st.lists(st.integers(0, ROWS - 1), min_size=places, max_size=places))
    )
    part = st.integers(0, 3)
    wanted = data.draw(st.lists(st.tuples(part, part, part, part), max_size=30))
    if data.draw(st.booleans()):
        wanted = [tuple(each[row] for each in words) for row in range(ROWS)]
    keys = b"".join(array("Q", key).tobytes() for key in wanted)
    fold, number = data.draw(st.integers(0, 2**64 - 1)), data.draw(st.integers(0, 2))
    limit = data.draw(st.integers(1, 20))
    said = both(
        lambda batch, c: batch.find(c[0], tuple(c[1:5]), c[5], keys, fold, number, limit),
        index,
        *words,
        scopes,
    )
    rows, found = said  # type: ignore[misc]
    assert found == sum(row > 0 for row in rows)


@seldom
@given(rows_of, st.sampled_from("BHIQ"), st.data())
def test_gather(rows: array[int], kind: str, data: st.DataObject) -> None:
    values = data.draw(column(kind, 2 ** (8 * array(kind).itemsize) - 1))
    found = both(lambda batch, c: batch.gather(rows, c[0]), values)
    assert found == array(kind, [values[row] for row in rows])
    small = data.draw(column("I", 2**32 - 1))
    wide = both(lambda batch, c: batch.gather(rows, c[0], "Q", 1 << 16), small)
    assert wide == array("Q", [small[row] << 16 for row in rows])
    states = bytearray(data.draw(column("B", 255)))
    assert both(lambda batch, c: batch.gather_bytes(rows, c[0]), states) == bytes(
        states[row] for row in rows
    )


@seldom
@given(column("I", 2), rows_of, column("I", 9), st.integers(0, 2**32 - 1))
def test_pin_and_unpin(pins: array[int], rows: array[int], used: array[int], tick: int) -> None:
    fresh = both(lambda batch, c: batch.pin(c[0], rows), pins)
    assert fresh == array("I", [row for row in dict.fromkeys(rows) if not pins[row]])
    PLAIN.pin(pins, rows)
    both(lambda batch, c: batch.unpin(c[0], rows, c[1], tick), pins, used)


@seldom
@given(st.permutations(range(ROWS - 1)), st.data())
def test_lists(order: list[int], data: st.DataObject) -> None:
    head = ROWS - 1
    after, before = array("I", [head] * ROWS), array("I", [head] * ROWS)
    kept = data.draw(st.integers(0, len(order)))
    both(lambda batch, c: batch.link(c[0], c[1], head, order), after, before)
    PLAIN.link(after, before, head, order)
    gone = array("I", order[kept:])
    both(lambda batch, c: batch.unlink(c[0], c[1], gone), after, before)


COLUMN, KEY = array("I", [0] * ROWS), bytes(32)
WORDS = tuple(array("Q", [0] * ROWS) for _ in range(4))
SCOPES, INDEX = array("H", [0] * ROWS), array("I", [0] * 8)
OUTSIDE, ONE, TWO = array("I", [ROWS]), array("I", [1]), array("I", [0, 0])


@pytest.mark.parametrize(
    ("call", "wrong"),
    [
        (lambda: _host.rows_gather(COLUMN, OUTSIDE, array("I", [0]), 1), "outside"),
        (lambda: _host.rows_gather(COLUMN, ONE, TWO, 1), "one item for each row"),
        (lambda: _host.rows_gather(COLUMN, array("H", [1]), ONE, 1), "wrong size"),
        (
            lambda: _host.rows_gather(COLUMN, memoryview(bytes(9))[1:5].cast("I"), TWO[:1], 1),
            "size",
        ),
        (lambda: _host.rows_gather(COLUMN, ONE, memoryview(bytes(4)).cast("I"), 1), "writable"),
        (lambda: _host.rows_pin(COLUMN, OUTSIDE, array("I", [0])), "outside"),
        (lambda: _host.rows_pin(COLUMN, TWO, array("I", [0])), "too short"),
        (lambda: _host.rows_unpin(COLUMN, ONE, COLUMN, 1, array("I", [0])), "no pin"),
        (lambda: _host.rows_unpin(COLUMN, ONE, COLUMN, 1 << 32, array("I", [0])), "tick"),
        (lambda: _host.rows_unpin(COLUMN, OUTSIDE, COLUMN, 1, array("I", [0])), "outside"),
        (lambda: _host.rows_unpin(COLUMN, ONE, array("I"), 1, array("I", [0])), "outside"),
        (lambda: _host.rows_unpin(COLUMN, TWO, COLUMN, 1, array("I", [0])), "too short"),
        (lambda: _host.rows_link(COLUMN[:], COLUMN[:], ROWS, ONE), "head"),
        (lambda: _host.rows_link(COLUMN[:], COLUMN[:], 0, OUTSIDE), "outside"),
        (lambda: _host.rows_link(COLUMN[:], array("I", [99] * ROWS), 0, ONE), "leads out"),
        (lambda: _host.rows_unlink(array("I", [99] * ROWS), COLUMN[:], ONE), "leads out"),
        (lambda: _host.rows_find(INDEX, WORDS, SCOPES, KEY, 0, 0, 9, TWO), "32 bytes"),
        (lambda: _host.rows_find(INDEX[:7], WORDS, SCOPES, KEY, 0, 0, 9, ONE[:]), "power of two"),
        (lambda: _host.rows_find(INDEX[:0], WORDS, SCOPES, KEY, 0, 0, 9, ONE[:]), "power of two"),
        (lambda: _host.rows_find(INDEX, WORDS, SCOPES, KEY, 0, 1 << 16, 9, ONE[:]), "scope"),
        (
            lambda: _host.rows_find(array("I", [ROWS] * 8), WORDS, SCOPES, KEY, 0, 0, 9, ONE[:]),
            "outside",
        ),
        (
            lambda: _host.rows_find(
                array("I", [5] * 8), (*WORDS[:3], array("Q", [0])), SCOPES, KEY, 0, 0, 9, ONE[:]
            ),
            "outside",
        ),
    ],
)
def test_nothing_outside_of_the_columns_is_touched(call: Callable[[], object], wrong: str) -> None:
    with pytest.raises((ValueError, BufferError), match=wrong):
        call()
    assert array("I", [0] * ROWS) == COLUMN
