"""What does not belong to a family is refused, by its field."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from codec_cases import Geometry, recovered, second_base

from experiments.tokendance import decoder as second
from kmesh.codec import Base, Encoder, Segment, decode
from kmesh.errors import RecipeChecksumError, RecipeError, RecipeMismatch
from kmesh.layout import Shard


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("namespace", b"x" * 32),
        ("dtype", "float16"),
        ("shard", Shard(0, 2, 1, 3)),
        ("shard", Shard(3, 5, 0, 2)),
        ("head_dim", 4),
    ],
)
def test_a_member_of_another_family(field: str, value: object) -> None:
    family = recovered(Geometry(), 1)
    other = dataclasses.replace(family.member, **{field: value})
    state = np.zeros(other.payload_bytes, dtype=np.uint8)
    with pytest.raises(RecipeMismatch) as refused:
        Encoder(family.base, family.rotary).encode(other, state)
    assert refused.value.field == field
    segment = family.base.segments[0]
    moved = dataclasses.replace(other, key=b"o" * 32)
    with pytest.raises(RecipeMismatch) as refused:
        Base([segment, Segment(moved, state)])
    assert refused.value.field == f"segments.{field}"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("key", b"short"),
        ("namespace", b""),
        ("dtype", "int8"),
        ("head_dim", 0),
        ("head_dim", 8193),
        ("tokens", 0),
        ("tokens", 2**31),
        ("position", -1),
        ("position", 2**31 - 50),
        ("generation", 2**64),
    ],
)
def test_descriptions_that_are_none(field: str, value: object) -> None:
    good = recovered(Geometry(), 1).member
    with pytest.raises(RecipeError) as refused:
        dataclasses.replace(good, **{field: value})
    assert refused.value.field == field


def test_payloads_of_another_size() -> None:
    family = recovered(Geometry(), 1)
    raw = family.state.tobytes()
    room = bytearray(len(raw) + 1)
    room[1:] = raw
    for payload in (b"", raw[:-1], raw + b"\0", memoryview(room)[1:]):
        with pytest.raises(RecipeError) as refused:
            Encoder(family.base, family.rotary).encode(family.member, payload)
        assert refused.value.field == "payload"


def test_a_member_is_no_segment_of_its_base() -> None:
    """No recipe refers to itself, and segments are dense: there are no chains."""
    family = recovered(Geometry(), 1)
    (segment,) = family.base
    with pytest.raises(RecipeError) as refused:
        Encoder(family.base).encode(segment.description, segment.rows)
    assert refused.value.field == "key"
    with pytest.raises(RecipeMismatch) as twice:
        Base([segment, segment])
    assert twice.value.field == "segments.key"


def test_a_block_is_one_of_three() -> None:
    with pytest.raises(RecipeError) as refused:
        Encoder(Base(), block_tokens=48)
    assert refused.value.field == "block_tokens"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("key", b"o" * 32),
        ("namespace", b"o" * 32),
        ("shard", Shard(4, 6, 1, 3)),
        ("position", 6),
        ("generation", 6),
        ("dtype", "float16"),
    ],
)
def test_a_base_that_is_another(field: str, value: object) -> None:
    family = recovered(Geometry(), 1)
    data = Encoder(family.base, family.rotary).encode(
        family.member, family.state, family.provenance
    )
    (segment,) = family.base
    described = dataclasses.replace(segment.description, **{field: value})
    other = Base([Segment(described, segment.rows)])
    with pytest.raises(RecipeMismatch) as refused:
        decode(data.data, other)
    assert refused.value.field == f"segments.{field}"
    with pytest.raises(second.Refused):
        second.decode(data.data, second_base(other))


def test_a_master_that_was_stored_again_with_other_bytes() -> None:
    family = recovered(Geometry(), 1)
    data = Encoder(family.base, family.rotary).encode(
        family.member, family.state, family.provenance
    )
    (segment,) = family.base
    payload = segment.rows.copy()
    payload[0, 0, 0, 0] ^= 1
    with pytest.raises(RecipeMismatch) as refused:
        decode(data.data, Base([Segment(segment.description, payload)]))
    assert refused.value.field == "segments.root"
    # Moving bytes about may keep a root, but no digest.
    same_root = Segment(segment.description, payload)
    same_root.__dict__["root"] = segment.root
    with pytest.raises(RecipeMismatch) as refused:
        decode(data.data, Base([same_root]))
    assert refused.value.field == "segments.digest"


def test_a_base_that_changed_behind_its_back_is_noticed() -> None:
    """Sums of a segment are taken once; the payload's are taken of what comes out."""
    family = recovered(Geometry(), 1)
    data = Encoder(family.base, family.rotary).encode(
        family.member, family.state, family.provenance
    )
    (segment,) = family.base
    payload = segment.rows.copy()
    changing = Base([Segment(segment.description, payload)])
    (one,) = changing
    with pytest.raises(ValueError, match="read-only"):
        one.rows[0, 0, 0, 0] ^= 1
    assert payload.flags.writeable
    decode(data.data, changing)
    payload[0, 0, 0, 0] ^= 1
    with pytest.raises(RecipeChecksumError) as refused:
        decode(data.data, changing)
    assert refused.value.field == "payload_root"


def test_a_recipe_of_something_else_than_was_asked_for() -> None:
    family = recovered(Geometry(), 1)
    recipe = Encoder(family.base, family.rotary).encode(
        family.member, family.state, family.provenance
    )
    recipe.recipe.require(family.member)
    for field, value in (("generation", 9), ("key", b"k" * 32), ("position", 0)):
        wanted = dataclasses.replace(family.member, **{field: value})
        with pytest.raises(RecipeMismatch) as refused:
            recipe.recipe.require(wanted)
        assert refused.value.field == field
