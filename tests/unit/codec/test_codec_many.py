"""Tables of many recipes in one call say what the tables of each say alone."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from codec_cases import Geometry, recovered
from hypothesis import given, settings
from hypothesis import strategies as st

from kmesh import _host
from kmesh.codec import Encoder, Form, ManyTables, RecipeTables
from kmesh.codec.records import HEAD, HEAD_FIELDS, HEAD_RECORD
from kmesh.errors import RecipeError, UnsupportedError


@pytest.fixture(scope="module")
def files() -> list[bytes]:
    """Of different sizes; the last two are right, but cold and with differences."""
    made = []
    for seed, own in enumerate([(5, 9), (20, 3), (64, 64)]):
        family = recovered(Geometry(head_dim=64), seed, own=own, anew=0.2 * seed)
        encoder = Encoder(family.base, family.rotary)
        made.append(encoder.encode(family.member, family.state, family.provenance).data)
    family = recovered(Geometry(head_dim=64), 9)
    cold = Encoder(family.base, family.rotary, form=Form.COLD)
    made.append(cold.encode(family.member, family.state, family.provenance).data)
    # One element of each of some tokens differs, which is written as a sparse difference.
    state = family.state.copy()
    state[:, 1, :, 10:30, 0] ^= 1
    encoder = Encoder(family.base, family.rotary)
    made.append(encoder.encode(family.member, state, family.provenance).data)
    return made


def many(files: list[bytes]) -> tuple[ManyTables, list[np.ndarray]]:
    kept = [np.frombuffer(bytearray(file), np.uint8) for file in files]
    sizes = (np.array(column, np.uint64) for column in zip(*map(place, kept), strict=True))
    return ManyTables(*sizes), kept


def place(file: np.ndarray) -> tuple[int, int]:
    return file.ctypes.data, file.size


def read(address: int, size: int) -> bytes:
    return ctypes.string_at(int(address), size)


def test_they_are_copies_of_heads_and_tables(files: list[bytes]) -> None:
    found, kept = many(files)
    assert found.wrong == {}
    assert found.unsupported.keys() == {3, 4}
    assert "cold" in found.unsupported[3]
    assert "XOR" in found.unsupported[4]
    for file in kept:
        file[:] = 0xAA
    for number, data in enumerate(files[:3]):
        alone = RecipeTables(data)
        assert read(found.addresses[number], len(alone.file)) == alone.file.tobytes()
        head = found.heads[number]
        for name in ("tokens", "head_dim", "payload_root", "file_bytes", "generation"):
            assert head[name] == alone.head[name]
        assert (head["namespace"].tobytes(), head["key"].tobytes()) == (
            alone.head["namespace"],
            alone.head["key"],
        )
    with pytest.raises(UnsupportedError):
        RecipeTables(files[4])


def test_a_head_of_an_array_is_the_head() -> None:
    assert HEAD_RECORD.itemsize == HEAD.size
    assert set(HEAD_FIELDS) <= set(HEAD_RECORD.names or ())
    values = HEAD.unpack(bytes(range(256)))
    record = np.frombuffer(bytes(range(256)), HEAD_RECORD)[0]
    for name, value in zip(HEAD_FIELDS, values, strict=True):
        assert record[name] == (np.void(value) if isinstance(value, bytes) else value)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_changed_and_short_files(files: list[bytes], data: st.DataObject) -> None:
    changed = []
    for file in files:
        what = bytearray(file)
        for _ in range(data.draw(st.integers(0, 2))):
            # In the head, mostly: what is there decides how much is read.
            at = data.draw(st.integers(0, 255) | st.integers(0, len(what) - 1))
            what[at] ^= data.draw(st.sampled_from([1, 0x80, 0xFF]))
        if data.draw(st.integers(0, 4)) == 0:
            del what[data.draw(st.integers(1, len(what))) :]
        changed.append(bytes(what))
    found, _ = many(changed)
    for number, file in enumerate(changed):
        wanted = ""
        try:
            tables = RecipeTables(file)
            # Alone it believes the size that the head says; here the lease says it.
            if tables.head["file_bytes"] != len(file):
                wanted = "file_bytes"
        except UnsupportedError:
            wanted = "unsupported"
        except RecipeError as wrong:
            wanted = "file_bytes" if wrong.field == "file_bytes" else str(wrong.field)
        if wanted == "unsupported":
            assert number in found.unsupported or found.wrong[number] == "file_bytes"
        elif wanted:
            # Where the size is wrong too, that is said in its turn.
            assert found.wrong[number] in (wanted, "file_bytes", "stored_bytes")
        else:
            assert number not in found.wrong
            assert number not in found.unsupported


def test_none_and_tables_larger_than_usual(files: list[bytes]) -> None:
    none = np.zeros(0, np.uint64)
    assert len(ManyTables(none, none).heads) == 0
    family = recovered(Geometry(head_dim=64), 3, segments=(400,), anew=0.5)
    big = Encoder(family.base, family.rotary).encode(family.member, family.state, family.provenance)
    assert len(RecipeTables(big.data).file) > 2 * 4096
    found, _ = many([big.data, files[0]])
    assert not found.wrong
    assert read(found.addresses[0], 64) == big.data[:64]
    assert found.heads[1]["tokens"] == RecipeTables(files[0]).head["tokens"]


@pytest.mark.parametrize("which", ["places", "memory", "offsets", "odd"])
def test_buffers_that_do_not_fit_are_refused(which: str) -> None:
    places, memory, offsets = (np.zeros(n, np.uint64) for n in (4, 64, 2))
    given: dict[str, object] = {"places": places, "memory": memory, "offsets": offsets}
    given["places" if which == "odd" else which] = {
        "places": places.view(np.uint8)[1:-7],
        "odd": places[:3],
        "memory": memory.view(np.uint8)[4:],
        "offsets": offsets[:1],
    }[which]
    with pytest.raises(ValueError, match="places" if which == "odd" else which):
        _host.recipe_tables(*given.values())
