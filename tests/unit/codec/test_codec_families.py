"""Families: what is shared is found, what does not belong together is refused by its field."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from codec_cases import Geometry, recovered
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.tokendance import decoder as second
from kmesh.codec import (
    Base,
    DecodePlan,
    Encoder,
    Form,
    Op,
    Provenance,
    Recipe,
    Segment,
    SpanDescription,
    decode,
    sharing,
)
from kmesh.codec.sharing import Finder
from kmesh.errors import RecipeError, RecipeMismatch
from kmesh.kernels.rotary import Rotary
from kmesh.layout import Shard

GEOMETRY = Geometry(layers=1, heads=2, head_dim=16)


def _segments(*counts: int, geometry: Geometry = GEOMETRY) -> tuple[Base, list[np.ndarray]]:
    rng = np.random.default_rng(7)
    states = [geometry.draw(rng, count) for count in counts]
    described = [geometry.describe(b"segment %d" % i, n) for i, n in enumerate(counts)]
    return Base(map(Segment, described, states)), states


def _referred(recipe: Recipe) -> list[tuple[int, int, bytes, int]]:
    """What the first run refers to: token, tokens, key of the segment, source."""
    first, count = recipe.lists[recipe.runs["list"][0]].tolist()
    return [
        (
            int(op["token"]),
            int(op["tokens"]),
            recipe.segments[op["segment"]]["key"].tobytes().rstrip(b"\0"),
            int(op["source"]),
        )
        for op in recipe.ops[first : first + count]
        if op["kind"] == Op.REF
    ]


# ---- sharing that nobody told about ---------------------------------------------------------


@pytest.mark.parametrize("block_tokens", [16, 32, 64])
def test_content_is_found_wherever_it_is(block_tokens: int) -> None:
    base, (one, two) = _segments(100, 150)
    rng = np.random.default_rng(9)
    own = GEOMETRY.draw(rng, 200)
    # Odd places, a part of a segment from its middle, the same part twice, and a run too short.
    parts = [
        own[:, :, :, :7],
        two[:, :, :, 41:133],
        own[:, :, :, 7:10],
        one,
        two[:, :, :, 41 : 41 + block_tokens],
        own[:, :, :, 10:40],
        one[:, :, :, 5 : 4 + block_tokens],
        own[:, :, :, 40:41],
    ]
    state = np.concatenate(parts, axis=3)
    member = GEOMETRY.describe(b"member", state.shape[3])
    encoded = Encoder(base, block_tokens=block_tokens).encode(member, state)
    assert _referred(encoded.recipe) == [
        (7, 92, b"segment 1", 41),
        (102, 100, b"segment 0", 0),
        (202, block_tokens, b"segment 1", 41),
    ]
    assert encoded.recipe.head["block_tokens"] == block_tokens
    assert decode(encoded.data, base).tobytes() == state.tobytes()


def test_planes_are_shared_apart() -> None:
    """Keys at another position are other bytes; values are the same."""
    base, (one,) = _segments(64)
    state = GEOMETRY.draw(np.random.default_rng(1), 64)
    state[:, 1] = one[:, 1]
    encoded = Encoder(base).encode(GEOMETRY.describe(b"member", 64), state)
    keys, values = (encoded.recipe.ops[list_["first"]] for list_ in encoded.recipe.lists)
    assert (keys["kind"], values["kind"]) == (Op.LITERAL, Op.REF)


@settings(max_examples=40, deadline=None)
@given(
    cuts=st.lists(st.tuples(st.integers(0, 90), st.integers(1, 60)), min_size=1, max_size=8),
    alphabet=st.integers(1, 3),
    seed=st.integers(0, 1000),
)
def test_runs_of_few_different_tokens(
    cuts: list[tuple[int, int]], alphabet: int, seed: int
) -> None:
    """Where nearly all tokens look alike, windows match in many places at once."""
    rng = np.random.default_rng(seed)
    letters = GEOMETRY.draw(rng, alphabet)
    source = letters[:, :, :, rng.integers(0, alphabet, 120)]
    base = Base([Segment(GEOMETRY.describe(b"segment", 120), source)])
    state = np.concatenate([source[:, :, :, at : at + count] for at, count in cuts], axis=3)
    member = GEOMETRY.describe(b"member", state.shape[3])
    encoded = Encoder(base).encode(member, state)
    assert decode(encoded.data, base).tobytes() == state.tobytes()


def test_equal_hashes_are_not_equal_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a hash that takes all tokens for equal, bytes still decide."""
    monkeypatch.setattr(
        sharing, "token_hashes", lambda rows: np.ones(rows.shape[1], dtype=np.uint64)
    )
    base, _ = _segments(64)
    rows = np.random.default_rng(1).integers(0, 256, (2, 40, 32), dtype=np.uint8)
    assert Finder(base, 16).find(0, rows, 0, 40) == []
    same = base.segments[0].rows[0]
    (match,) = Finder(base, 16).find(0, same, 0, 64)
    assert (match.token, match.tokens, match.source) == (0, 64, 0)


def test_a_member_that_shares_nothing_depends_on_nothing() -> None:
    base, _ = _segments(64)
    state = GEOMETRY.draw(np.random.default_rng(99), 64)
    member = GEOMETRY.describe(b"member", 64)
    for provenance in ((), (Provenance(0, 64, base.segments[0].description.key, 0, 0),)):
        encoded = Encoder(base).encode(member, state, provenance)
        assert not encoded.depends
        assert decode(encoded.data).tobytes() == state.tobytes()


@pytest.mark.parametrize(("shared", "depends"), [(16, False), (40, True)])
def test_a_base_is_needed_only_where_it_saves_enough(shared: int, depends: bool) -> None:
    """Of 400 tokens, 16 are less than the 5 % for which a member is made to depend on others."""
    base, (one,) = _segments(64)
    state = GEOMETRY.draw(np.random.default_rng(99), 400)
    state[:, :, :, 50 : 50 + shared] = one[:, :, :, 3 : 3 + shared]
    encoded = Encoder(base).encode(GEOMETRY.describe(b"member", 400), state)
    assert encoded.depends is depends
    assert decode(encoded.data, base).tobytes() == state.tobytes()


# ---- provenance --------------------------------------------------------------------------------


def test_keys_turned_by_another_kernel_are_literal() -> None:
    family = recovered(Geometry(), 1)
    (given,) = family.provenance
    other = dataclasses.replace(given, kernel=2)
    encoded = Encoder(family.base, family.rotary).encode(family.member, family.state, [other])
    assert len(encoded.recipe.turns) == 0
    assert {Op.LITERAL, Op.REF} == set(encoded.recipe.ops["kind"])
    assert decode(encoded.data, family.base).tobytes() == family.state.tobytes()


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"segment": b"?" * 32}, "provenance.segment"),
        ({"token": -1}, "provenance.token"),
        ({"tokens": 0}, "provenance.token"),
        ({"tokens": 60}, "provenance.token"),
        ({"token": 6, "source": 2}, "provenance.source"),
        ({"source": -1}, "provenance.source"),
        ({"delta": 1}, "provenance.delta"),
    ],
)
def test_provenance_that_contradicts_itself(changes: dict[str, object], field: str) -> None:
    family = recovered(Geometry(), 1)
    wrong = dataclasses.replace(family.provenance[0], **changes)
    with pytest.raises(RecipeError) as refused:
        Encoder(family.base, family.rotary).encode(family.member, family.state, [wrong])
    assert refused.value.field == field


def test_provenance_that_overlaps() -> None:
    family = recovered(Geometry(), 1)
    with pytest.raises(RecipeError) as refused:
        Encoder(family.base, family.rotary).encode(
            family.member, family.state, family.provenance * 2
        )
    assert refused.value.field == "provenance.token"


def test_turned_keys_need_a_rotary_of_the_family() -> None:
    family = recovered(Geometry(), 1)
    with pytest.raises(RecipeError) as refused:
        Encoder(family.base).encode(family.member, family.state, family.provenance)
    assert refused.value.field == "pairs"
    for rotary, field in (
        (Geometry(dtype="float16").rotary(), "dtype"),
        (Geometry(head_dim=16).rotary(), "pairs"),
    ):
        with pytest.raises(RecipeError) as refused:
            Encoder(family.base, rotary)
        assert refused.value.field == field


# ---- a decoder that does not give the member back ------------------------------------------------


@pytest.mark.parametrize("form", Form)
def test_what_does_not_come_back_is_literal(form: Form, monkeypatch: pytest.MonkeyPatch) -> None:
    """A decoder with a fault in two tokens of what is referred to is believed, not the encoder."""
    family = recovered(Geometry(layers=2), 1)
    honest = DecodePlan.run

    def faulty(self: DecodePlan, begin: int, end: int, out: np.ndarray) -> None:
        honest(self, begin, end, out)
        recipe = self.recipe
        first, count = recipe.lists[recipe.runs["list"][begin]].tolist()
        for op in recipe.ops[first : first + count]:
            for token in (10, 11):
                at = token - int(op["token"])
                if begin == 1 and op["kind"] != Op.LITERAL and 0 <= at < op["tokens"]:
                    out[1, token, 3] ^= 0x80

    monkeypatch.setattr(DecodePlan, "run", faulty)
    encoded = Encoder(family.base, family.rotary, form=form).encode(
        family.member, family.state, family.provenance
    )
    monkeypatch.undo()
    assert encoded.refused == 1
    recipe = encoded.recipe
    first, count = recipe.lists[recipe.runs["list"][1]].tolist()
    assert recipe.ops[first : first + count]["tokens"].tolist() == [5, 5, 2, 33, 9]
    assert recipe.ops[first : first + count]["kind"].tolist() == [1, 2, 1, 2, 1]
    assert decode(encoded.data, family.base).tobytes() == family.state.tobytes()


def test_a_decoder_that_loses_literals_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    family = recovered(Geometry(), 1)
    honest = DecodePlan.run

    def faulty(self: DecodePlan, begin: int, end: int, out: np.ndarray) -> None:
        honest(self, begin, end, out)
        out[0, 0, 0] ^= 1

    monkeypatch.setattr(DecodePlan, "run", faulty)
    with pytest.raises(RecipeError, match="payload_root"):
        Encoder(family.base, family.rotary).encode(family.member, family.state, family.provenance)


# ---- sizes of families ------------------------------------------------------------------------


def test_two_families_that_share_a_master() -> None:
    base, (one, two) = _segments(64, 48)
    families = (Base(base.segments), Base(base.segments[:1]))
    for number, family in enumerate(families):
        member = GEOMETRY.describe(b"member %d" % number, 64)
        encoded = Encoder(family).encode(member, one)
        for other in families:
            assert decode(encoded.data, other).tobytes() == one.tobytes()
    late = Encoder(families[0]).encode(GEOMETRY.describe(b"late", 48), two)
    with pytest.raises(RecipeMismatch) as refused:
        decode(late.data, families[1])
    assert refused.value.field == "segments.key"


def test_a_family_of_one_and_members_of_one_token() -> None:
    state = GEOMETRY.draw(np.random.default_rng(3), 1)
    for form in Form:
        encoded = Encoder(Base(), form=form).encode(GEOMETRY.describe(b"alone", 1), state)
        assert decode(encoded.data).tobytes() == state.tobytes()
        assert second.decode(encoded.data, {})[1] == state.tobytes()


def test_a_thousand_members() -> None:
    geometry = Geometry(layers=1, heads=1, head_dim=16)
    rng = np.random.default_rng(5)
    shared = geometry.draw(rng, 64)
    base = Base([Segment(geometry.describe(b"segment", 64, 3), shared)])
    rotary = Rotary((1.0, 0.5), interleaved=False, dtype="bfloat16")
    encoder = Encoder(base, rotary)
    stored = 0
    for number in range(1000):
        own = geometry.draw(rng, 8)
        state = np.concatenate([own, shared], axis=3)
        state[:, 0, :, 8:] = own[:, 0, :, :1]
        member = geometry.describe(b"member %d" % number, 72, number)
        told = Provenance(8, 64, base.segments[0].description.key, 0, number + 5)
        encoded = encoder.encode(member, state, [told])
        stored += len(encoded.data)
        if number % 100 == 0:
            assert decode(encoded.data, base).tobytes() == state.tobytes()
    assert stored < 1000 * state.nbytes


@pytest.mark.parametrize("position", [0, 1])
def test_descriptions_say_what_a_payload_takes(position: int) -> None:
    described = SpanDescription(b"k" * 32, b"n" * 32, "float32", Shard(0, 3, 0, 2), 5, 7, position)
    assert described.payload_bytes == 3 * 2 * 2 * 7 * 5 * 4
    assert described.shape == (6, 2, 7, 20)
    assert described.runs * described.run_bytes == described.payload_bytes
