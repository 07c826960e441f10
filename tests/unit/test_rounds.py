"""The round kernel's code, run by one CPU thread, against the reference and the codec's decoder."""

from __future__ import annotations

import copy
import ctypes
import functools
from dataclasses import replace

import numpy as np
import one_thread
import pytest
from codec.codec_cases import Geometry
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_reference import Engine
from round_cases import (
    GEOMETRY,
    Blob,
    RoundCase,
    Wanted,
    rounds,
    segments_of,
    sibling,
    siblings,
    tables_of,
)

from kmesh import _host
from kmesh.codec import Base, Encoder, Form, Provenance, RecipeTables, Segment, decode
from kmesh.errors import RecipeChecksumError, RecipeFormatError, UnsupportedError
from kmesh.kernels import round_reference
from kmesh.kernels.host import Status
from kmesh.kernels.plan import Memory, Request, wanted_record
from kmesh.kernels.rounds import _OPTIONS, MEMBER, Round, RoundJob, write
from kmesh.layout import TILE_BYTES


@settings(max_examples=40, deadline=None)
@given(case=rounds(), blocks=st.integers(1, 7), slow=st.integers(1, 4), stages=st.integers(1, 4))
def test_rounds_move_what_the_reference_moves(
    kernels: ctypes.CDLL, case: RoundCase, blocks: int, slow: int, stages: int
) -> None:
    engine, expected = case.engine(), case.engine()
    done = one_thread.restore_round(
        kernels, engine.layout, case.round(), blocks=blocks, slow_blocks=slow, stages=stages
    )
    assert done.members == bytes(len(case.members))
    assert round_reference.restore(expected.layout, *case.built()) == done
    assert engine.image() == expected.image()


@settings(max_examples=25, deadline=None)
@given(case=rounds(), data=st.data())
def test_a_changed_byte_fails_those_who_took_bytes_of_its_source(
    kernels: ctypes.CDLL, case: RoundCase, data: st.DataObject
) -> None:
    blob = data.draw(
        st.sampled_from([one.blob for one in case.members] + [b for _, b, _ in case.bases])
    )
    array = blob.sums.view(np.uint8) if data.draw(st.integers(0, 4)) == 0 else blob.data
    array[data.draw(st.integers(0, array.size - 1))] ^= 1 << data.draw(st.integers(0, 7))
    engine, expected = case.engine(), case.engine()
    done = one_thread.restore_round(kernels, engine.layout, case.round())
    assert done == round_reference.restore(expected.layout, *case.built())
    for number, member in enumerate(case.members):
        if done.members[number] == Status.DONE:
            assert pages_of(engine, case, member) == pages_of(expected, case, member)


def pages_of(engine: Engine, case: RoundCase, member: Wanted) -> list[bytes]:
    """All pages that a member's request has, which nobody else has."""
    request = case.requests[member.request]
    ids = np.unique(request.pages // (engine.layout.block_tokens if request.by_slot else 1))
    return [plane[ids].tobytes() for layer in engine.views for plane in layer]


def restored(engine: Engine, request: Request) -> bytes:
    """What a request's pages hold, as a payload."""
    planes = []
    for layer in engine.views:
        for plane in layer:
            # [block, head, slot, byte] → [head, token, byte]
            taken = plane[request.pages].transpose(1, 0, 2, 3)
            planes.append(taken.reshape(taken.shape[0], -1, taken.shape[3]))
    return np.stack(planes).tobytes()


@pytest.mark.parametrize("memory", list(Memory))
def test_siblings_get_their_own_bytes(kernels: ctypes.CDLL, memory: Memory) -> None:
    """Independent of the reference: what the encoder was given is what lies in the pages."""
    case, payloads = siblings(memory=memory)
    engine = case.engine()
    done = one_thread.restore_round(kernels, engine.layout, case.round())
    assert done.members == bytes(3)
    base = Base(Segment(what, blob.data) for what, blob, _ in case.bases)
    for member, request, payload in zip(case.members, case.requests, payloads, strict=True):
        assert restored(engine, request) == payload.tobytes()
        assert decode(member.blob.data, base).tobytes() == payload.tobytes()


def planned(case: RoundCase, **more: int) -> RoundJob:
    return write(case.engine().layout, case.round(), allocate=one_thread.aligned, **more)


def test_a_base_is_read_once_for_all_who_take_it() -> None:
    case, _ = siblings(8)
    job = planned(case)
    files = sum(len(member.blob.data) for member in case.members)
    # Of the recipes' files the first tile has tables, and is read for its sum.
    assert job.read_bytes == len(case.bases[0][1].data) + files
    assert job.parts == 9
    # A master, whose payload the base is, costs nothing more.
    what, blob, _ = case.bases[0]
    master = Wanted(what, blob, len(case.requests), 0)
    case.members.append(master)
    case.requests.append(Request(np.arange(4) + case.blocks))
    case.blocks += 4
    again = planned(case)
    assert (again.read_bytes, again.parts) == (job.read_bytes, 9)


def test_siblings_of_one_recipe_read_it_once(kernels: ctypes.CDLL) -> None:
    case, payloads = siblings(1)
    case.members *= 5
    case.members = [replace(one, request=i) for i, one in enumerate(case.members)]
    case.requests = [Request(np.arange(4) + 4 * i) for i in range(5)]
    case.blocks = 20
    assert planned(case).parts == 2
    engine = case.engine()
    assert one_thread.restore_round(kernels, engine.layout, case.round()).members == bytes(5)
    for request in case.requests:
        assert restored(engine, request) == payloads[0].tobytes()


def test_more_takers_than_a_stage_has_addresses_for(kernels: ctypes.CDLL) -> None:
    case, payloads = siblings(40, tokens=32)
    engine = case.engine()
    assert one_thread.restore_round(kernels, engine.layout, case.round()).members == bytes(40)
    for request, payload in zip(case.requests, payloads, strict=True):
        assert restored(engine, request) == payload.tobytes()


@pytest.mark.parametrize(
    ("blocks", "slow", "launched"),
    [(396, 64, 21 + 24), (396, 7, 7 + 24), (20, 7, 20), (20, 64, 20), (2, 64, 2), (1, 1, 1)],
)
def test_what_is_in_host_memory_has_blocks_of_its_own(
    kernels: ctypes.CDLL, blocks: int, slow: int, launched: int
) -> None:
    case, payloads = siblings(3, memory=Memory.GPU)
    # Six runs of 64 KiB lie in the GPU's memory; six of each recipe and its tables in the host's.
    job = planned(case, blocks=blocks, slow_blocks=slow)
    assert job.items == 24 + 3 * 7
    assert job.blocks == launched
    engine = case.engine()
    done = one_thread.restore_round(
        kernels, engine.layout, case.round(), blocks=blocks, slow_blocks=slow
    )
    assert done.members == bytes(3)
    assert restored(engine, case.requests[1]) == payloads[1].tobytes()


# What is wrong.


def test_a_bad_base_fails_its_members_and_a_bad_recipe_its_own(kernels: ctypes.CDLL) -> None:
    for which in ("base", "unused base", "literal", "tables", "base root", "recipe root"):
        case, _ = siblings()
        # A fourth member is dense, and has nothing to do with any of it.
        what = GEOMETRY.describe(b"dense", 64)
        dense = Blob(GEOMETRY.draw(np.random.default_rng(1), 64))
        case.members.append(Wanted(what, dense, 3, 0))
        case.requests.append(Request(np.arange(4) + 12))
        case.blocks += 4
        recipe = case.members[1].blob
        base, unused = case.bases[0][1], case.bases[1][1]
        members, bases = [Status.DONE] * 4, [Status.DONE] * 2
        if which == "base":
            base.data[base.data.size // 2] ^= 4
            members[:3], bases[0] = [Status.BAD_TILE] * 3, Status.BAD_TILE
        elif which == "unused base":
            unused.data[5] ^= 1
        elif which == "literal":
            recipe.data[-1] ^= 1
            members[1] = Status.BAD_TILE
        elif which == "tables":
            # The CPU has its own copy of them; the tile is read for the literals beside them.
            recipe.data[3] ^= 1
            members[1] = Status.BAD_TILE
        elif which == "base root":
            base.sums[0] ^= 1
            members[:3], bases[0] = [Status.BAD_ROOT] * 3, Status.BAD_ROOT
        else:
            recipe.sums[-1] ^= 1
            members[1] = Status.BAD_ROOT
        engine = case.engine()
        done = one_thread.restore_round(kernels, engine.layout, case.round())
        assert (list(done.members), list(done.bases)) == (members, bases), which


@pytest.mark.parametrize("field", ["generation", "position", "key", "namespace", "tokens"])
def test_members_of_another_base_are_bad_records(kernels: ctypes.CDLL, field: str) -> None:
    case, payloads = siblings()
    what, blob, digest = case.bases[0]
    old = getattr(what, field)
    other = old + 1 if isinstance(old, int) else bytes(32)
    case.bases[0] = (replace(what, **{field: other}), blob, digest)
    engine = case.engine()
    done = one_thread.restore_round(kernels, engine.layout, case.round())
    assert list(done.members) == [Status.BAD_RECORD] * 3
    assert engine.image() == case.engine().image()
    # The right one beside the wrong one is found.
    case.bases.append((what, blob, digest))
    done = one_thread.restore_round(kernels, engine.layout, case.round())
    assert done.members == bytes(3)
    assert restored(engine, case.requests[2]) == payloads[2].tobytes()


def test_a_base_with_another_digest_is_another_base(kernels: ctypes.CDLL) -> None:
    case, _ = siblings(1)
    engine = case.engine()
    what, blob, _ = case.bases[0]
    for digest, code in ((None, Status.DONE), (bytes(32), Status.BAD_RECORD)):
        case.bases[0] = (what, blob, digest)
        done = one_thread.restore_round(kernels, engine.layout, case.round())
        assert list(done.members) == [code]


HUGE = st.sampled_from([0, 1, 2, 3, 63, 64, 65, 2**31, 2**32, 2**56, 2**63 - 1, 2**63, 2**64 - 1])
CHANGED = [n for n in MEMBER["part"].names if n not in ("address", "sums_address")]


@functools.cache
def two_siblings() -> RoundCase:
    return siblings(2)[0]


@settings(max_examples=80, deadline=None)
@given(
    changes=st.dictionaries(st.sampled_from(CHANGED), HUGE, min_size=1),
    pages=st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(-1, 7), max_size=6),
    by_slot=st.booleans(),
    shift=st.integers(-70, 70) | st.sampled_from([-(2**63), 2**63 - 1]),
    dense=st.booleans(),
)
def test_contradictory_members_stay_inside_what_was_named(
    kernels: ctypes.CDLL, changes: dict[str, int], pages: list[int], by_slot: bool, shift: int,
    dense: bool,
) -> None:  # fmt: skip
    case = copy.copy(two_siblings())
    case.blocks, case.members, case.requests = 8, [*case.members], [*case.requests]
    if dense:
        what, blob, _ = case.bases[0]
        case.members[0] = Wanted(what, blob, 0, 0)
    case.requests[0] = Request(np.array(pages, dtype=np.int64), by_slot, shift)
    engine, wanted = case.engine(), case.round()
    for name, value in changes.items():
        wanted.members["part"][name][0] = value
    done = one_thread.restore_round(kernels, engine.layout, wanted)
    assert done.members[0] in list(Status)
    assert done.members[1] == Status.DONE
    for buffer in engine.buffers:
        assert (buffer[:64] == 0xEE).all()
        assert (buffer[-64:] == 0xEE).all()


def test_recipes_that_are_decoded_on_the_host_say_so() -> None:
    case, payloads = siblings(1)
    base = Base(Segment(what, blob.data) for what, blob, _ in case.bases)
    cold = Encoder(base, form=Form.COLD).encode(case.members[0].what, payloads[0]).data
    with pytest.raises(UnsupportedError, match="cold"):
        RecipeTables(cold)
    # One element of each token differs, which is written as a sparse difference.
    changed = np.frombuffer(bytearray(base.segments[0].rows), dtype=np.uint16)
    changed = changed.reshape(3, 2, 4, 64, 128)
    changed[:, 1, :, 20:40, 0] ^= 1
    what = replace(base.segments[0].description, key=b"other".ljust(32), position=11)
    whole = [Provenance(0, 64, base.segments[0].description.key, 0, 0)]
    sparse = Encoder(base, GEOMETRY.rotary()).encode(what, changed, whole).data
    with pytest.raises(UnsupportedError, match="XOR"):
        RecipeTables(sparse)


def test_recipes_that_turn_keys_in_different_ways() -> None:
    case, _ = siblings(2)
    rng = np.random.default_rng(1)
    base = Base(Segment(what, blob.data) for what, blob, _ in case.bases)
    other = sibling(
        GEOMETRY, GEOMETRY.rotary(interleaved=True), base, [(0, 0, 60), (-1, 0, 4)], rng,
        position=900,
    )  # fmt: skip
    case.members[1] = Wanted(other.what, Blob(other.data), 1, 0, tables_of(other.data))
    with pytest.raises(UnsupportedError, match="in different ways"):
        planned(case)


def test_requests_that_turn_keys_or_are_not_there() -> None:
    case, _ = siblings(1)
    turning = replace(case.requests[0], delta=3)
    bases, members, requests = case.built()
    with pytest.raises(UnsupportedError, match="can't turn keys"):
        Round.of(bases, members, [turning])
    with pytest.raises(ValueError, match=r"members\[0\].request is 1"):
        Round.of(bases, [replace(members[0], request=1)], requests)


def test_layouts_that_are_not_served_say_so() -> None:
    case, _ = siblings(1)
    layout = case.engine().layout
    for change, said in (
        ({"row_bytes": 6}, "by fours"),
        ({"head_stride": 4098}, "multiples of 4"),
        ({"v_base": (*layout.v_base[:2], layout.v_base[2] + 2**48)}, "2\\^47"),
    ):
        with pytest.raises(UnsupportedError, match=said):
            write(replace(layout, **change), case.round())


def test_nothing_to_do(kernels: ctypes.CDLL) -> None:
    case, _ = siblings(1)
    bases, members, requests = case.built()
    engine = case.engine()
    layout = engine.layout
    for wanted in (Round.of([], [], []), Round.of(bases, [], requests)):
        done = one_thread.restore_round(kernels, layout, wanted)
        assert (done.members, done.bases) == (b"", bytes(len(wanted.bases)))
    members[0].part.token_end = 0
    assert one_thread.restore_round(
        kernels, layout, Round.of(bases, members, requests)
    ).members == bytes(1)


# Tables.


def test_tables_without_their_literals_are_all_that_is_needed() -> None:
    case, _ = siblings(1)
    file = case.members[0].blob.data.tobytes()
    tables = RecipeTables(file)
    assert len(tables.file) == tables.literals_at < len(file)
    assert RecipeTables(file[: tables.literals_at]).head == tables.head
    with pytest.raises(RecipeFormatError):
        RecipeTables(file[: tables.literals_at - 1])
    with pytest.raises(RecipeFormatError):
        RecipeTables(file[:100])


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_tables_with_a_flipped_bit_are_refused(data: st.DataObject) -> None:
    file = small_file()
    at = data.draw(st.integers(0, tables_of(file).literals_at - 1))
    bad = bytearray(file)
    bad[at] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises((RecipeFormatError, RecipeChecksumError)):
        RecipeTables(bytes(bad))


@functools.cache
def small_file() -> bytes:
    geometry, rng = Geometry(), np.random.default_rng(3)
    base = segments_of(geometry, [20, 20], rng)
    return sibling(geometry, geometry.rotary(), base, [(0, 0, 20), (-1, 0, 5)], rng).data


def test_buffers_of_a_round_that_do_not_fit_are_refused() -> None:
    case, _ = siblings(1)
    wanted = case.round()
    layout, memory = case.engine().layout, one_thread.aligned(1 << 16)
    requests = b"".join(map(wanted_record, wanted.requests))
    options, bases = _OPTIONS.pack(1 << 17, 4, 10, 2), wanted.bases.tobytes()
    good = [
        layout.packed, requests, wanted.members.tobytes(), bases, options, memory.data,
        bytearray(1),
    ]  # fmt: skip
    size, *_ = _host.round(*good)
    assert 0 < size <= len(memory)
    short = memory[: size - 16]
    before = memory[size - 16 :].tobytes()
    assert _host.round(*good[:5], short.data, bytearray(1))[0] == size
    assert memory[size - 16 :].tobytes() == before
    other = wanted.members.copy()
    other["request"] = 1
    odd = wanted.members.copy()
    odd["tables"] += 4
    wrong = [
        (0, layout.packed[:-8]), (0, b""), (1, requests[:-1]), (2, wanted.members.tobytes()[:-1]),
        (2, other.tobytes()), (2, odd.tobytes()), (3, bases[:-1]), (4, options[:-4]),
        (4, _OPTIONS.pack(1000, 4, 10, 2)), (5, memory[1:].data), (6, bytearray(2)),
    ]  # fmt: skip
    for place, bad in wrong:
        given = [*good]
        given[place] = bad
        with pytest.raises(ValueError, match=r"."):
            _host.round(*given)


def test_tiles_of_which_nothing_is_wanted_are_not_looked_at(kernels: ctypes.CDLL) -> None:
    """A layer of the base is bad that not all want."""
    case, _ = siblings()
    engine, base = case.engine(), case.bases[0][1].data
    assert base.size == 6 * TILE_BYTES
    base[4 * TILE_BYTES + 9] ^= 1
    for layer, code in ((0, Status.DONE), (2, Status.BAD_TILE)):
        for member in case.members:
            member.changes = {"src_layer_begin": layer, "layers": 1}
        done = one_thread.restore_round(kernels, engine.layout, case.round())
        assert list(done.members) == [code] * 3
