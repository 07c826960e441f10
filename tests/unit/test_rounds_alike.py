"""Rounds of which most is alike, as siblings' recipes are: what is so is planned once."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import numpy as np
import one_thread
import pytest
from codec.codec_cases import Geometry
from hypothesis import given, settings
from hypothesis import strategies as st
from round_cases import (
    GEOMETRY,
    SLOTS,
    Blob,
    RoundCase,
    Wanted,
    rectangle,
    segments_of,
    sibling,
    tables_of,
)

from kmesh.kernels import round_reference
from kmesh.kernels.plan import Memory, Request
from kmesh.kernels.rounds import RoundJob, write


@st.composite
def families(draw: st.DrawFn) -> RoundCase:
    """Up to three members over the same two to four bases, of few kinds, and some who differ."""
    geometry = Geometry(
        layers=draw(st.integers(1, 3)),
        heads=draw(st.sampled_from([1, 2])),
        head_dim=draw(st.sampled_from([8, 64])),
    )
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    tokens, spans = draw(st.sampled_from([16, 40])), draw(st.integers(2, 4))
    base = segments_of(geometry, [tokens] * spans, rng)
    rotary, room = geometry.rotary(), (geometry.layers + 1, geometry.heads)
    own = draw(st.integers(1, tokens // 2))
    memories = [draw(st.sampled_from(list(Memory))) for _ in range(2)]
    blobs = [Blob(segment.rows, memories[0]) for segment in base]
    bases = [(one.description, blob, one.digest) for one, blob in zip(base, blobs, strict=True)]
    rarely = st.integers(0, 5).map(lambda n: not n)
    members, requests = [], []
    blocks = -(-(spans * tokens + 3) // SLOTS)
    whole = rectangle(draw, geometry, room)
    for number in range(draw(st.integers(1, 3))):
        kind, shift = draw(st.integers(0, 2)), draw(st.sampled_from([0, 0, 3]))
        for copy in range(1 + draw(rarely)):
            requests.append(Request(rng.permutation(blocks) + blocks * len(requests), False, shift))
            if copy:
                members += [
                    replace(one, request=one.request + 1)
                    for one in members
                    if one.request == len(requests) - 2
                ]
                continue
            for span in range(spans):
                at = (kind + draw(rarely)) % 3
                source = (span, at * own // 3, tokens - own)
                pieces = ((-1, 0, own), source) if at == 1 else (source, (-1, 0, own))
                made = sibling(
                    geometry, rotary, base, pieces, rng,
                    position=500 + 40 * number + span * tokens + 7 * draw(rarely),
                    anew=0.2 * draw(rarely), key=b"sibling %d %d" % (number, span),
                )  # fmt: skip
                wanted = Wanted(
                    made.what, Blob(made.data, memories[1]), len(requests) - 1, span * tokens,
                    tables_of(made.data),
                    dict(rectangle(draw, geometry, room) if draw(rarely) else whole),
                )  # fmt: skip
                if draw(rarely):
                    wanted.changes |= {"token_begin": 1, "token_end": tokens - 2}
                members.append(wanted)
    # Masters, whose payloads are the bases, and spans that have nothing to do with them.
    if draw(st.booleans()):
        requests.append(Request(rng.permutation(blocks) + blocks * len(requests)))
        for span in range(spans):
            what, blob, _ = bases[span]
            if draw(st.booleans()):
                blob = Blob(geometry.draw(rng, tokens), memories[1])
            members.append(
                Wanted(what, blob, len(requests) - 1, span * tokens, changes=dict(whole))
            )
    engine = {
        "order": "NHD", "layers": room[0], "heads": room[1], "slots": SLOTS,
        "row": geometry.describe(b"", 1).row_bytes, "gap": 0,
    }  # fmt: skip
    order = draw(st.permutations(range(len(members)))) if draw(st.booleans()) else None
    members = [members[at] for at in order] if order else members
    return RoundCase(engine, blocks * len(requests), bases, members, requests)


@settings(max_examples=60, deadline=None)
@given(case=families(), data=st.data())
def test_those_who_are_alike_get_what_the_reference_gives_them(
    kernels: ctypes.CDLL, case: RoundCase, data: st.DataObject
) -> None:
    damaged = data.draw(st.integers(0, 3)) == 0
    if damaged:
        blobs = [one.blob for one in case.members] + [blob for _, blob, _ in case.bases]
        array = data.draw(st.sampled_from(blobs)).data
        array[data.draw(st.integers(0, array.size - 1))] ^= 4
    engine, expected = case.engine(), case.engine()
    done = one_thread.restore_round(kernels, engine.layout, case.round())
    assert done == round_reference.restore(expected.layout, *case.built())
    if not any(done.members):
        assert engine.image() == expected.image()
        assert damaged or not any(done.bases)


def spans_of(siblings: int, count: int) -> RoundCase:
    """So many spans of each of some siblings, each span over a base of its own."""
    geometry, rng = GEOMETRY, np.random.default_rng(3)
    base = segments_of(geometry, [64] * count, rng)
    members, requests = [], []
    for number in range(siblings):
        requests.append(Request(rng.permutation(4 * count) + 4 * count * number))
        for span in range(count):
            made = sibling(
                geometry, geometry.rotary(), base,
                [(-1, 0, 6), (span, number, 52), (-1, 0, 6)], rng,
                position=500 + 90 * span + 40 * number, key=b"sibling %d %d" % (number, span),
            )  # fmt: skip
            members.append(
                Wanted(made.what, Blob(made.data), number, 64 * span, tables_of(made.data))
            )
    bases = [(s.description, Blob(s.rows, Memory.GPU), s.digest) for s in base]
    sizes = {"order": "NHD", "layers": 3, "heads": 4, "slots": SLOTS, "row": 256, "gap": 0}
    return RoundCase(sizes, 4 * count * len(requests), bases, members, requests)


def planned(case: RoundCase) -> RoundJob:
    return write(case.engine().layout, case.round(), allocate=one_thread.aligned)


@pytest.mark.parametrize("order", ["siblings", "spans"])
def test_siblings_are_planned_once_for_all_their_spans(kernels: ctypes.CDLL, order: str) -> None:
    case = spans_of(3, 5)
    if order == "spans":
        case.members.sort(key=lambda one: one.position)
    job = planned(case)
    # Three siblings' literals, and the first base.
    assert (job.parts, job.drawn) == (5 + 15, 3 + 1)
    engine, expected = case.engine(), case.engine()
    done = one_thread.restore_round(kernels, engine.layout, case.round())
    assert done == round_reference.restore(expected.layout, *case.built())
    assert engine.image() == expected.image()


def test_whoever_differs_is_planned_alone() -> None:
    case = spans_of(2, 4)
    assert planned(case).drawn == 2 + 1
    # Its literals and its base, and those behind it, which are not like the last ones.
    case.members[1].changes = {"token_begin": 5}
    assert planned(case).drawn == 2 + 1 + 2 * 2
    # Of its base it reads other runs than its sibling, which makes that two parts.
    case.members[1].changes = {"src_layer_begin": 1, "layers": 2}
    job = planned(case)
    assert (job.parts, job.drawn) == (4 + 8 + 1, 2 + 1 + 2 * 2 + 1)
