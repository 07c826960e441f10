"""Families as names: what is refused, what is counted, what is forgotten; provenance, cut."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from asking import A, B, C, D, E
from contents import NAMESPACE, OTHER_SHARD, SHARD, key
from hypothesis import given, settings
from mirror_cases import DENSE, declare, join, mirrored, settle
from world import World

from kmesh.layout import TILE_BYTES
from kmesh_spand.core import events as ev
from kmesh_spand.core import requests as rq
from kmesh_spand.core import results as rs
from kmesh_spand.core.codes import Code
from kmesh_spand.core.effects import Piece
from kmesh_spand.core.family import Family, Run
from kmesh_spand.core.provenance import pieces
from kmesh_spand.core.table import SpanTable


@pytest.fixture
def room() -> World:
    return World({0: 40})


def refused(answer: rs.Result | None) -> tuple[int, str]:
    assert isinstance(answer, rs.Refused), answer
    return answer.code, answer.field


@pytest.mark.parametrize(
    ("how", "field"),
    [
        ({"family": ""}, "family"),
        ({"family": "ä" * 65}, "family"),
        ({"family": "a\n"}, "family"),
        ({"salt": b"x"}, "salt"),
        ({"namespace": b"x"}, "namespace"),
        ({"dtype": "int8"}, "dtype"),
        ({"head_dim": 0}, "head_dim"),
        ({"head_dim": 8193}, "head_dim"),
        ({"shards": []}, "shards"),
        ({"shards": [SHARD, SHARD]}, "shards"),
        ({"base": b""}, "base"),
        ({"base": b"x" * 33}, "base"),
        ({"frequencies": (1.0,) * 33}, "rotary.frequencies"),
        ({"frequencies": (float("nan"),)}, "rotary.frequencies"),
        ({"frequencies": (0.0,)}, "rotary.frequencies"),
    ],
)
def test_a_declaration_that_makes_no_sense(room: World, how: dict[str, object], field: str) -> None:
    one = room.connect()
    assert refused(declare(room, one, [A], **how)) == (Code.INVALID_ARGUMENT, field)
    assert not room.core.families.by_id


def test_too_large_a_base(room: World) -> None:
    one = room.connect()
    keys = [key(n) for n in range(513)]
    assert refused(declare(room, one, keys)) == (Code.TOO_LARGE, "base")
    declare(room, one, keys[:400])
    assert refused(declare(room, one, keys[300:])) == (Code.TOO_LARGE, "base")
    assert declare(room, one, keys[350:450]) == rs.DeclareResult(1, False, 50)


@pytest.mark.parametrize(
    ("how", "field"),
    [
        ({"dtype": "float16"}, "dtype"),
        ({"head_dim": 32}, "head_dim"),
        ({"namespace": b"x" * 32}, "namespace"),
        ({"shards": [OTHER_SHARD]}, "shards"),
        ({"frequencies": (0.5,)}, "rotary.frequencies"),
        ({"frequencies": (1.0,), "interleaved": True}, "rotary.interleaved"),
    ],
)
def test_declared_again_otherwise(room: World, how: dict[str, object], field: str) -> None:
    one = room.connect()
    assert declare(room, one, [A], frequencies=(1.0,)) == rs.DeclareResult(1, True, 1)
    assert refused(declare(room, one, [A], **how)) == (Code.INVALID_ARGUMENT, field)
    assert declare(room, one, [A]) == rs.DeclareResult(1, False, 0)
    # What one declaration left open, as that just now, it has not taken back.
    assert refused(declare(room, one, [A], frequencies=(2.0,))) == (
        Code.INVALID_ARGUMENT,
        "rotary.frequencies",
    )


def test_how_keys_are_turned_may_be_said_later(room: World) -> None:
    """Spans that were not worth a recipe without it are looked at again."""
    one = room.connect()
    room.store(one, [A, B], length=DENSE)
    declare(room, one, [A])
    join(room, one, [B])
    (job,) = room.encodes
    room.encode_ends(job, 2 * DENSE)
    join(room, one, [B], "b")
    assert not room.encodes
    assert declare(room, one, [A], frequencies=(1.0, 0.5)) == rs.DeclareResult(1, False, 0)
    ((job, encode),) = room.encodes.items()
    assert encode.frequencies == (1.0, 0.5)
    room.settle()
    assert len(room.mirrors) == 1
    room.check()


def test_a_stored_base_of_another_layout(room: World) -> None:
    one = room.connect()
    room.store(one, [A, B], length=DENSE)
    assert refused(declare(room, one, [A], head_dim=32))[1] == "base[0]"
    assert refused(declare(room, one, [C, A], namespace=b"x" * 32))[1] == "base[1]"
    room.store(one, [D], length=DENSE // 4, tokens=16)
    assert isinstance(declare(room, one, [D]), rs.DeclareResult)


def test_a_stored_member_of_another_layout(room: World) -> None:
    one = room.connect()
    declare(room, one, [A])
    room.store(one, [B], length=TILE_BYTES)
    assert refused(join(room, one, [C, B])) == (Code.INVALID_ARGUMENT, "keys[1]")


def test_a_member_that_is_stored_later_in_another_layout(room: World) -> None:
    one = room.connect()
    room.store(one, [A], length=DENSE)
    declare(room, one, [A])
    join(room, one, [B])
    room.store(one, [B], length=TILE_BYTES)
    (member,) = room.core.family_views.members(room.core.families.by_id[1], 0, 9)
    assert (member.dense, member.refused) == (1, 1)
    assert "layout" in member.refusal


def test_members_that_make_no_sense(room: World) -> None:
    one = room.connect()
    assert refused(join(room, one, [A])) == (Code.NOT_FOUND, "family")
    declare(room, one, [A])
    assert refused(join(room, one, [])) == (Code.INVALID_ARGUMENT, "keys")
    assert refused(join(room, one, [B], ""))[1] == "member"
    assert refused(join(room, one, [B], runs=[Run(0, 1, B, 0)]))[1] == "provenance[0].base"
    assert refused(join(room, one, [B], runs=[Run(0, 0, A, 0)]))[1] == "provenance[0].tokens"
    runs = [Run(5, 5, A, 0), Run(9, 1, A, 0)]
    assert refused(join(room, one, [B], runs=runs))[1] == "provenance[1].position"
    runs = [Run(2**32 - 1, 2**32 - 1, A, 0)]
    assert refused(join(room, one, [B], runs=runs))[1] == "provenance[0].tokens"
    ask = room.ask
    wrong = ask(rq.Join, one, "round", "m", b"x" * 32, B)
    assert refused(wrong) == (Code.INVALID_ARGUMENT, "namespace")
    assert refused(ask(rq.Join, one, "round", "m", NAMESPACE, B, [OTHER_SHARD]))[1] == "shards"
    assert refused(ask(rq.Join, one, "round", "m", NAMESPACE, B[:31]))[1] == "keys"
    join(room, one, [B])
    assert refused(join(room, one, [C, B]))[1] == "member"
    assert refused(ask(rq.Fork, one, "round", "nobody", "m")) == (Code.NOT_FOUND, "parent")
    assert refused(ask(rq.Fork, one, "round", "a", "a"))[1] == "member"
    assert refused(ask(rq.Dissolve, one, "round", 9))[1] == "mirrors"
    assert refused(ask(rq.Dissolve, one, "other", 0)) == (Code.NOT_FOUND, "family")
    room.check()


def test_names_are_a_tenants_own(room: World) -> None:
    one, two = room.connect(uid=1000), room.connect(uid=1001)
    declare(room, one, [A])
    assert refused(join(room, two, [B])) == (Code.NOT_FOUND, "family")
    assert declare(room, two, [A]) == rs.DeclareResult(2, True, 1)
    assert declare(room, one, [A], salt=b"s" * 32) == rs.DeclareResult(3, True, 1)
    assert len(room.core.family_views.rows(0, 10, now_ms=0, group=1000)) == 2


def test_a_family_of_one_and_one_of_a_thousand(room: World) -> None:
    one = room.connect()
    room.store(one, [A], length=DENSE)
    declare(room, one, [A])
    assert join(room, one, [A], "only") == rs.JoinResult(1, 1)
    (only,) = room.core.family_views.members(room.core.families.by_id[1], 0, 10)
    assert (only.master, only.base, only.mirrors) == (True, 1, 0)
    for number in range(999):
        assert join(room, one, [A, key(number)], f"m{number}") == rs.JoinResult(2, 1)
    family = room.core.families.by_id[1]
    assert len(room.core.family_views.members(family, 0, 2000)) == 1000
    assert room.core.family_views.row(family, room.now).spans == 999
    room.check()


def test_a_family_has_limits() -> None:
    world = World({0: 4}, max_members=2, max_family_spans=4)
    one = world.connect()
    declare(world, one, [A])
    join(world, one, [B], "a")
    join(world, one, [C], "b")
    assert refused(join(world, one, [D], "c")) == (Code.EXHAUSTED, "member")
    assert refused(join(world, one, [B, C, D, E], "a")) == (Code.EXHAUSTED, "keys")
    # What the family names already takes no more room.
    assert join(world, one, [B, C, D], "a") == rs.JoinResult(3, 0)
    assert join(world, one, [B, C, D, A], "a") == rs.JoinResult(4, 0)
    assert refused(join(world, one, [C, E], "b")) == (Code.EXHAUSTED, "keys")
    world.check()


def test_the_oldest_families_are_forgotten() -> None:
    """What they made stays; only the group's own go."""
    world = World({0: 40}, max_families=2)
    one = mirrored(world, [A], [B])
    other = world.connect(uid=1001)
    declare(world, other, [A])
    declare(world, one, [C], family="two")
    join(world, one, [D], "late")
    declare(world, one, [C], family="three")
    names = [row.name for row in world.core.family_views.rows(0, 10, now_ms=0)]
    assert names == ["round", "round", "three"]
    assert world.core.counters["families_forgotten"] == 1
    assert len(world.mirrors) == 1
    world.check()


def test_members_wait_for_the_whole_base(room: World) -> None:
    one = room.connect()
    room.store(one, [A, C], length=DENSE)
    declare(room, one, [A, B])
    join(room, one, [C])
    assert not room.encodes
    room.store(one, [B], length=DENSE)
    (encode,) = room.encodes.values()
    assert [base.key for base in encode.bases] == [A, B]
    settle(room)
    room.check()


def test_two_families_share_a_master(room: World) -> None:
    one = mirrored(room, [A], [B])
    room.store(one, [C], length=DENSE)
    declare(room, one, [A], family="two")
    room.ask(rq.Join, one, "two", "x", NAMESPACE, B + C)
    settle(room)
    assert len(room.mirrors) == 2
    assert room.core.views.status().base_spans == 1
    views = room.core.family_views
    assert [row.mirrors for row in views.rows(0, 9, now_ms=0)] == [1, 2]
    # The other still has that member: it stays.
    room.ask(rq.Dissolve, one, "two", 0)
    assert len(room.densifies) == 1
    room.settle()
    assert [record.key for record in room.mirrors] == [B]
    room.check()


def test_only_what_was_recovered_is_encoded(room: World) -> None:
    one = room.connect()
    room.store(one, [A, B, C], length=DENSE)
    declare(room, one, [A, B])
    # Spans of the test begin at token 0, 1 and 2, one after the other.
    join(room, one, [C], runs=[Run(500, 10, A, 0)])
    assert not room.encodes
    assert room.core.counters["encode_refused"] == 1
    room.check()


@settings(deadline=None, max_examples=300)
@given(st.data())
def test_provenance_is_cut_token_by_token(data: st.DataObject) -> None:
    """Against a walk over single tokens."""
    table = SpanTable(32)
    bases: list[int] = []
    at = 0
    for _ in range(data.draw(st.integers(1, 5))):
        row = table.take_row()
        at += data.draw(st.sampled_from([0, 0, 0, 7]))
        table.start[row], table.tokens[row] = at, data.draw(st.sampled_from([16, 32, 64]))
        at += table.tokens[row]
        bases.append(row)
    row = table.take_row()
    table.start[row], table.tokens[row] = data.draw(st.integers(0, 200)), 64
    family = Family(1, (0, b""), "f", NAMESPACE, "bfloat16", 64, (SHARD,), (), False, 0)
    family.add_base(key(n) for n in range(len(bases)))
    runs, position = [], 0
    for _ in range(data.draw(st.integers(0, 4))):
        position += data.draw(st.integers(0, 60))
        tokens = data.draw(st.integers(1, 90))
        base = data.draw(st.integers(0, len(bases) - 1))
        runs.append(Run(position, tokens, key(base), data.draw(st.integers(0, 70))))
        position += tokens
    expected: dict[int, tuple[int, int]] = {}
    for run in runs:
        number, source = family.base[run.base], run.source
        for token in range(run.position, run.position + run.tokens):
            while number < len(bases) and source >= table.tokens[bases[number]]:
                here = bases[number]
                source -= table.tokens[here]
                number += 1
                if number < len(bases):
                    behind = table.start[here] + table.tokens[here]
                    if table.start[bases[number]] != behind:
                        number = len(bases)
            if number == len(bases):
                break
            if table.start[row] <= token < table.start[row] + 64:
                expected[token - table.start[row]] = number, source
            source += 1
    found: dict[int, tuple[int, int]] = {}
    cut = pieces(table, row, bases, family, runs)
    for piece in cut:
        assert piece.tokens > 0
        for i in range(piece.tokens):
            assert piece.token + i not in found
            found[piece.token + i] = piece.base, piece.source + i
    assert found == expected
    assert all(isinstance(piece, Piece) for piece in cut)
    assert [piece.token for piece in cut] == sorted(piece.token for piece in cut)


def test_what_several_members_name_counts_for_each() -> None:
    """Every member keeps its own keys and runs, though spans are the same."""
    world = World({0: 4}, max_family_names=10)
    one = world.connect()
    declare(world, one, [A])
    assert join(world, one, [B, C, D], "a") == rs.JoinResult(3, 0)
    assert join(world, one, [B, C, D], "b", [Run(0, 4, A, 0)]) == rs.JoinResult(3, 0)
    assert refused(join(world, one, [B, C, D, A], "c")) == (Code.EXHAUSTED, "keys")
    assert refused(join(world, one, [B, C], "c", [Run(0, 4, A, 0), Run(4, 4, A, 4)]))[1] == "keys"
    fork = world.ask(rq.Fork, one, "round", "b", "d", b"", [])
    assert refused(fork) == (Code.EXHAUSTED, "keys")
    assert join(world, one, [B, C, D, A], "b", [Run(0, 4, A, 0)]) == rs.JoinResult(4, 0)
    world.check()


def test_families_that_name_too_much_together_are_forgotten() -> None:
    world = World({0: 4}, max_group_names=5)
    one = world.connect()
    declare(world, one, [A])
    join(world, one, [B, C, D])
    declare(world, one, [A], family="two")
    world.ask(rq.Join, one, "two", "a", NAMESPACE, B + C + D, [SHARD], [])
    names = [row.name for row in world.core.family_views.rows(0, 10, now_ms=0)]
    assert names == ["two"]
    world.ask(rq.Dissolve, one, "two", 0, b"")
    assert not world.core.families.group_names
    world.check()


def not_worth(world: World) -> None:
    """The span that is encoded is found to share nothing."""
    (job,) = world.encodes
    del world.encodes[job]
    world.send(ev.NotEncoded(job, "it shares nothing"))


def test_a_span_that_was_refused_is_tried_with_another_base(room: World) -> None:
    one = room.connect()
    room.store(one, [A, B, C, D], length=DENSE)
    declare(room, one, [A])
    join(room, one, [B])
    not_worth(room)
    join(room, one, [B], "b")
    assert not room.encodes, "the same base"
    declare(room, one, [C])
    not_worth(room)
    room.ask(rq.Dissolve, one, "round", 0, b"")
    declare(room, one, [D])
    join(room, one, [B])
    settle(room)
    assert len(room.mirrors) == 1
    room.check()


def test_a_span_that_was_refused_is_tried_with_what_a_member_says_later(room: World) -> None:
    one = room.connect()
    room.store(one, [A, B], length=DENSE)
    declare(room, one, [A])
    join(room, one, [B])
    not_worth(room)
    join(room, one, [B], "a", [Run(1, 4, A, 0)])
    settle(room)
    assert len(room.mirrors) == 1


def test_a_refusal_ends_with_its_span(room: World) -> None:
    """Also where nobody has a family when the span goes."""
    one = room.connect()
    room.store(one, [A, B], length=DENSE)
    declare(room, one, [A])
    join(room, one, [B])
    not_worth(room)
    room.ask(rq.Dissolve, one, "round", 0, b"")
    slots = {row.key: row.slot for row in room.core.views.spans(now_ms=0)}
    room.send(ev.Evict([slots[B]]))
    room.store(one, [C], length=DENSE)
    assert {row.key: row.slot for row in room.core.views.spans(now_ms=0)}[C] == slots[B]
    declare(room, one, [A])
    join(room, one, [C])
    settle(room)
    assert len(room.mirrors) == 1


def test_many_spans_are_looked_at_in_turns() -> None:
    """One request never waits until all spans of another were looked at."""
    world = World({0: 80}, max_spans=128)
    one = world.connect()
    world.store(one, [A], length=DENSE)
    members = [key(("member", n)) for n in range(30)]
    for at in range(0, 30, 10):
        world.store(one, members[at : at + 10], length=DENSE)
    declare(world, one, [A])
    join(world, one, members, "a", [Run(1000, 4, A, 0)])
    looked = [world.core.counters["encode_refused"]]
    while world.core.behind:
        world.send(ev.GoOn())
        looked.append(world.core.counters["encode_refused"])
    assert looked[-1] == 30
    assert all(
        0 <= after - before <= 8 for before, after in zip([0, *looked], looked, strict=False)
    )


def test_members_are_not_looked_through_before_the_base_is_whole(room: World) -> None:
    one = room.connect()
    declare(room, one, [A, B, C])
    room.store(one, [D], length=DENSE)
    join(room, one, [D])
    while room.core.behind:
        room.send(ev.GoOn())
    for name in (A, B):
        room.store(one, [name], length=DENSE)
        assert not room.core.behind
        assert not room.core.families.waiting
    room.store(one, [C], length=DENSE)
    settle(room)
    assert len(room.mirrors) == 1
