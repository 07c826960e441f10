"""What was encoded comes back bit for bit, from both decoders."""

from __future__ import annotations

import numpy as np
import pytest
from codec_cases import ODD, Geometry, geometries, recovered
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from experiments.tokendance import decoder as second
from kmesh import _host
from kmesh.codec import BLOCK_TOKENS, Base, Encoder, Form, Op, XorCode, decode
from kmesh.kernels.reference import turn
from kmesh.kernels.rotary import ELEMENTS, turns
from kmesh.layout import DTYPE_BYTES

MANY = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@MANY
@given(
    geometry=geometries(),
    seed=st.integers(0, 2**32),
    segments=st.lists(st.integers(1, 70), min_size=0, max_size=3),
    own=st.lists(st.integers(0, 30), min_size=4, max_size=4),
    anew=st.sampled_from([0.0, 0.1, 0.9]),
    interleaved=st.booleans(),
    form=st.sampled_from(Form),
    block_tokens=st.sampled_from(BLOCK_TOKENS),
    told=st.booleans(),
)
def test_any_member_comes_back(
    geometry: Geometry,
    seed: int,
    segments: list[int],
    own: list[int],
    anew: float,
    interleaved: bool,
    form: Form,
    block_tokens: int,
    told: bool,
) -> None:
    own = [max(own[0], 1), *own[1:]]
    pairs = 1 + seed % (geometry.head_dim // 2)
    rotary = geometry.rotary(interleaved=interleaved, pairs=pairs)
    family = recovered(geometry, seed, segments=segments, own=own, anew=anew, rotary=rotary)
    encoder = Encoder(family.base, rotary, block_tokens=block_tokens, form=form)
    provenance = family.provenance if told else ()
    encoded = encoder.encode(family.member, family.state, provenance)
    assert decode(encoded.data, family.base).tobytes() == family.state.tobytes()
    recipe, payload = second.decode(encoded.data, family.second_base)
    assert payload == family.state.tobytes()
    assert recipe.head["key"] == family.member.key
    assert encoded.refused == 0
    assert encoded.recipe.description == family.member


@pytest.mark.parametrize("form", Form)
def test_what_was_turned_is_not_written_out(form: Form) -> None:
    geometry = Geometry(head_dim=64, layers=3)
    family = recovered(geometry, 1, segments=[200, 80], own=[20, 7, 9])
    encoded = Encoder(family.base, family.rotary, form=form).encode(
        family.member, family.state, family.provenance
    )
    recipe = encoded.recipe
    literal = recipe.ops[recipe.ops["kind"] == Op.LITERAL]
    assert literal["tokens"].tolist() == [20, 7, 9] * 2
    assert set(recipe.ops["kind"]) == {Op.LITERAL, Op.REF, Op.REF_ROT}
    # Two lists for six runs: one of all K, one of all V.
    assert recipe.runs["list"].tolist() == [0, 1] * 3
    assert sorted(recipe.turns["delta"].tolist()) == [
        one.delta for one in sorted(family.provenance, key=lambda one: one.delta)
    ]


def test_k_and_v_share_a_list_when_their_ops_are_equal() -> None:
    family = recovered(Geometry(), 1, segments=[40], own=[5, 9], position=7 - 5)
    assert family.provenance[0].delta == 0
    encoded = Encoder(family.base).encode(family.member, family.state, family.provenance)
    assert encoded.recipe.runs["list"].tolist() == [0] * 4


@pytest.mark.parametrize("share", [0.0, 0.05, 0.15])
def test_overhead_is_at_most_a_hundredth_at_512_tokens(share: float) -> None:
    """Of what tokens take whose bits differ; figures of the issue's geometry."""
    geometry = Geometry(layers=24, head_dim=64)
    family = recovered(geometry, 3, segments=[416], own=[60, 36], anew=share)
    encoded = Encoder(family.base, family.rotary).encode(
        family.member, family.state, family.provenance
    )
    literal = sum(encoded.recipe.plane_bytes())
    assert literal % (24 * 2 * 256) == 0
    assert literal >= 96 * 24 * 2 * 256
    assert len(encoded.data) <= 1.01 * literal


def test_a_base_that_is_kept_cold_is_a_recipe_without_segments() -> None:
    family = recovered(Geometry(head_dim=64), 1, segments=[100])
    (segment,) = family.base
    encoded = Encoder(Base(), form=Form.COLD).encode(segment.description, segment.rows)
    assert not encoded.depends
    assert decode(encoded.data).tobytes() == segment.rows.tobytes()
    assert len(encoded.data) < segment.rows.nbytes


# ---- differences -----------------------------------------------------------------------


def _nearly(geometry: Geometry, changed: int, seed: int = 5):
    """A member whose shared tokens all differ a little from what they were recovered from."""
    family = recovered(geometry, seed, segments=[64], own=[3, 4])
    rng = np.random.default_rng(seed)
    part = family.state[:, :, :, 3:67]
    for layer in range(geometry.layers):
        for plane in (0, 1):
            for token in range(64):
                at = rng.choice(geometry.heads * geometry.head_dim, changed, replace=False)
                head, dim = np.divmod(at, geometry.head_dim)
                part[layer, plane, head, token, dim] ^= 1
    return family


@pytest.mark.parametrize("dtype", sorted(DTYPE_BYTES))
@pytest.mark.parametrize(("form", "code"), [(Form.ADDRESSABLE, 1), (Form.COLD, 0)])
def test_small_differences_are_stored_as_such(dtype: str, form: Form, code: int) -> None:
    family = _nearly(Geometry(dtype=dtype, head_dim=64), 6)
    encoded = Encoder(family.base, family.rotary, form=form).encode(
        family.member, family.state, family.provenance
    )
    ops = encoded.recipe.ops
    assert set(ops["code"][ops["kind"] == Op.XOR]) == {XorCode(code)}
    assert ops["turn"][ops["kind"] == Op.XOR].any()
    assert len(encoded.data) < family.state.nbytes / 2
    assert decode(encoded.data, family.base).tobytes() == family.state.tobytes()
    assert second.decode(encoded.data, family.second_base)[1] == family.state.tobytes()


def test_large_differences_are_literal() -> None:
    family = _nearly(Geometry(head_dim=64), 127)
    encoded = Encoder(family.base, family.rotary).encode(
        family.member, family.state, family.provenance
    )
    assert not encoded.depends
    assert set(encoded.recipe.ops["kind"]) == {Op.LITERAL}


# ---- turned keys -----------------------------------------------------------------------


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", sorted(ELEMENTS))
def test_turned_rows_have_the_references_bits(dtype: str, interleaved: bool) -> None:
    size = DTYPE_BYTES[dtype]
    rng = np.random.default_rng(4)
    bits = np.frombuffer(rng.bytes(3 * 65536 * size), dtype=f"<u{size}").copy()
    if size == 2:
        bits[:65536] = rng.permutation(65536).astype(np.uint16)
    bits[-len(ODD[dtype]) :] = ODD[dtype]
    for head_dim, pairs in ((64, 32), (96, 24), (12, 5)):
        rotary = Geometry(dtype=dtype, head_dim=head_dim).rotary(
            interleaved=interleaved, pairs=pairs
        )
        rows = bits[: len(bits) // head_dim * head_dim].reshape(-1, head_dim).view(np.uint8)
        out = np.empty_like(rows)
        for delta in (1, -37, 100_000):
            _host.turn_rows(
                out.data,
                rows.data,
                rows.shape[1],
                turns(rotary, delta),
                interleaved,
                ELEMENTS[dtype],
            )
            np.testing.assert_array_equal(out, turn(rows, rotary, delta))
