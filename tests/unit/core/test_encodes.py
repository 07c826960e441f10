"""Recipes being made: what is tried again, what is left alone, and what is not begun."""

from __future__ import annotations

import pytest
from asking import A, B, C, D, reasons
from mirror_cases import DENSE, declare, join, mirrored, settle
from world import World

from kmesh.layout import TILE_BYTES
from kmesh_spand.core import effects as fx
from kmesh_spand.core import events as ev
from kmesh_spand.core import requests as rq
from kmesh_spand.core import results as rs
from kmesh_spand.core.codes import Reason
from kmesh_spand.core.family import Run


def test_a_failed_job_is_tried_once_more(room: World) -> None:
    one = room.connect()
    room.store(one, [A, B], length=DENSE)
    declare(room, one, [A])
    join(room, one, [B])
    for _ in range(2):
        (job,) = room.encodes
        room.encode_ends(job, ok=False)
    assert not room.encodes
    assert room.core.counters["encode_failed"] == 2
    assert reasons(room.acquire(one, [B])) == [Reason.OK]
    (member,) = room.core.family_views.members(room.core.families.by_id[1], 0, 10)
    assert (member.dense, member.refused, member.refusal) == (1, 1, "the job failed")
    room.check()


def test_what_a_later_join_says_counts_for_spans_that_wait(room: World) -> None:
    """Whose turn was yet to come, whose job is begun anew, or that were stored behind it."""
    one = room.connect()
    room.store(one, [A, B, C], length=DENSE)
    declare(room, one, [A])
    join(room, one, [B, C, D])
    (job,) = room.encodes
    assert room.encodes[job].span.key == B
    join(room, one, [B, C, D], runs=[Run(0, 64, A, 0)])
    room.store(one, [D], length=DENSE)
    seen = []
    room.encode_ends(job, ok=False)
    while room.encodes:
        (job,) = room.encodes
        seen.append((room.encodes[job].span.key, room.encodes[job].pieces))
        room.encode_ends(job)
        room.keep_ends(job)
    # They begin at token 1, 2 and 0.
    pieces = [fx.Piece(0, 63, 0, 1), fx.Piece(0, 62, 0, 2), fx.Piece(0, 64, 0, 0)]
    assert seen == [(name, [piece]) for name, piece in zip((B, C, D), pieces, strict=True)]
    room.check()


@pytest.mark.parametrize("length", [0, DENSE], ids=["nothing shared", "too large"])
def test_what_a_job_was_not_told_yet_is_tried_too(room: World, length: int) -> None:
    one = room.connect()
    room.store(one, [A, B], length=DENSE)
    declare(room, one, [A])
    join(room, one, [B])
    (job,) = room.encodes
    join(room, one, [B], runs=[Run(0, 64, A, 0)])
    room.encode_ends(job, length, used=bool(length))
    (job,) = room.encodes
    assert room.encodes[job].pieces
    room.encode_ends(job, length, used=bool(length))
    assert not room.encodes
    assert room.core.counters["encode_refused"] == 1
    room.check()


@pytest.mark.parametrize("spoiled", [A, B])
def test_what_an_encoding_finds_changed_is_read_again(room: World, spoiled: bytes) -> None:
    one = room.connect()
    room.store(one, [A, B], length=DENSE)
    declare(room, one, [A])
    join(room, one, [B])
    (row,) = [row for row in room.core.views.spans(now_ms=0) if row.key == spoiled]
    place = row.slab, row.offset // TILE_BYTES
    room.memory[place] = -1
    room.flipped.add(place)
    (job,) = room.encodes
    room.encode_ends(job)
    assert reasons(room.acquire(one, [A, B])) == [
        Reason.PENDING if name == spoiled else Reason.OK for name in (A, B)
    ]
    room.settle()
    counters = room.core.counters
    assert (counters["encode_spoiled"], counters["corrupt"]) == (1, 1)
    assert reasons(room.acquire(one, [spoiled])) == [Reason.MISS]
    assert not room.core.counters["encodes"]
    room.check()


@pytest.mark.parametrize("written", [False, True])
def test_an_encoding_over_a_base_in_doubt_is_done_again(room: World, written: bool) -> None:
    """The base is reported, wrongly, while a recipe over it is made, or while it is written."""
    one = room.connect()
    room.store(one, [A, B], length=DENSE)
    declare(room, one, [A])
    join(room, one, [B])
    (job,) = room.encodes
    lease = room.acquire(one, [A]).lease
    if written:
        room.encode_ends(job)
    room.ask(rq.ReportCorrupt, one, lease, [0])
    if written:
        room.keep_ends(job)
    else:
        room.encode_ends(job)
    assert not room.encodes
    assert not room.mirrors
    room.check()
    room.settle()
    assert len(room.mirrors) == 1
    assert room.core.counters["corrupt_false"] == 1
    room.check()


def test_an_encoding_that_found_a_good_base_changed_is_done_again_once(room: World) -> None:
    """What it read was wrong, and what lies there is not."""
    one = room.connect()
    room.store(one, [A, B], length=DENSE)
    declare(room, one, [A])
    join(room, one, [B])
    for _ in range(2):
        ((job, _),) = room.encodes.items()
        del room.encodes[job]
        room.send(ev.EncodeSpoiled(job, False, [0]))
        assert not room.encodes
        for verifying in list(room.verifies):
            room.verify_ends(verifying)
    assert not room.encodes
    assert room.core.counters["encode_spoiled"] == 2
    room.check()


def test_a_recipe_that_saves_no_tile_is_not_kept(room: World) -> None:
    one = room.connect()
    room.store(one, [A, B], length=DENSE)
    declare(room, one, [A])
    join(room, one, [B])
    (job,) = room.encodes
    room.encode_ends(job, TILE_BYTES + 1)
    assert not room.keeps
    assert room.core.counters["encode_refused"] == 1
    assert not room.made, "the worker was not told to forget it"
    # Nor is it tried again.
    join(room, one, [B], "b")
    assert not room.encodes
    room.check()


def test_what_changes_under_a_job_is_left_alone(room: World) -> None:
    """The span is reported while it is encoded: it is read again, and then encoded anew."""
    one = room.connect()
    room.store(one, [A, B], length=DENSE)
    declare(room, one, [A])
    join(room, one, [B])
    (job,) = room.encodes
    lease = room.acquire(one, [B]).lease
    room.ask(rq.ReportCorrupt, one, lease, [0])
    room.encode_ends(job)
    assert not room.keeps
    assert not room.made
    assert not room.encodes
    room.check()
    room.settle()
    assert room.core.views.status().mirrors == 1
    room.check()


def test_a_member_that_becomes_base_while_it_is_encoded(room: World) -> None:
    one = room.connect()
    room.store(one, [A, B], length=DENSE)
    declare(room, one, [A])
    join(room, one, [B])
    assert isinstance(declare(room, one, [B], family="other"), rs.DeclareResult)
    settle(room)
    assert not room.mirrors
    room.check()


def test_drain_begins_no_recipe(room: World) -> None:
    one = mirrored(room, [A], [B])
    room.store(one, [C], length=DENSE)
    room.send(ev.Drain())
    join(room, one, [C], "b")
    assert not room.encodes
    assert reasons(room.acquire(one, [B])) == [Reason.MISS]
    room.send(ev.Resume())
    assert len(room.encodes) == 1
    room.check()
