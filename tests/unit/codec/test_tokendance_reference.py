"""The reference recovery, on a small model with random weights: it is what it says."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from experiments.tokendance.reference import CHECK_LAYER, Reference, divergence
from experiments.tokendance.workload import turned
from kmesh.codec import Base, Encoder, Op, Provenance, Segment, SpanDescription, decode
from kmesh.layout import Shard

LAYERS, HEADS, DIM = 3, 2, 16
TOKENS, START, SHARED, MOVED = 60, 13, 40, 9


@pytest.fixture(scope="module")
def causal() -> Qwen3ForCausalLM:
    torch.manual_seed(3)
    config = Qwen3Config(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=HEADS,
        head_dim=DIM,
        max_position_embeddings=256,
        initializer_range=0.3,
    )
    return Qwen3ForCausalLM(config).eval()


@pytest.fixture(scope="module")
def tokens() -> np.ndarray:
    return np.random.default_rng(2).integers(0, 128, TOKENS, dtype=np.uint32)


@pytest.fixture(scope="module")
def own() -> np.ndarray:
    which = np.ones(TOKENS, dtype=np.bool_)
    which[START : START + SHARED] = False
    return which


@pytest.fixture(scope="module")
def segment(causal: Qwen3ForCausalLM, tokens: np.ndarray) -> np.ndarray:
    """The shared tokens as another prompt computed them, ``MOVED`` positions further on."""
    before = np.arange(START + MOVED, dtype=np.uint32)
    prompt = np.concatenate([before, tokens[START : START + SHARED]])
    return Reference(causal).prefill(prompt).state[:, :, :, START + MOVED :]


@pytest.fixture(scope="module")
def cached(causal: Qwen3ForCausalLM, segment: np.ndarray) -> np.ndarray:
    state = np.zeros((LAYERS, 2, HEADS, TOKENS, DIM), dtype=np.uint16)
    part = state[:, :, :, START : START + SHARED]
    part[:, 0] = turned(segment[:, 0], Reference(causal).rotary, -MOVED)
    part[:, 1] = segment[:, 1]
    return state


def test_a_prefill_is_the_models(causal: Qwen3ForCausalLM, tokens: np.ndarray) -> None:
    """The first layer's state to the bit; what follows reads rounded keys and values."""
    computed = Reference(causal).prefill(tokens)
    with torch.inference_mode():
        theirs = causal(torch.from_numpy(tokens.astype(np.int64))[None], use_cache=True)
    layer = theirs.past_key_values.layers[0]
    for plane, wanted in enumerate((layer.keys, layer.values)):
        bits = wanted[0].to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
        np.testing.assert_array_equal(computed.state[0, plane], bits)
    log_probabilities = torch.log_softmax(theirs.logits[0, -1].float(), dim=-1)
    assert (log_probabilities - computed.log_probabilities).abs().max() < 0.25
    assert computed.tokens == TOKENS


def test_all_anew_is_a_prefill(
    causal: Qwen3ForCausalLM, tokens: np.ndarray, own: np.ndarray, cached: np.ndarray
) -> None:
    reference = Reference(causal)
    full = reference.prefill(tokens)
    again = reference.recover(tokens, cached, own, SHARED)
    np.testing.assert_array_equal(again.state, full.state)
    assert divergence(full, again) == 0
    assert divergence(full, reference.recover(tokens, cached, own, 0)) > 0


def test_nothing_anew_leaves_what_was_recovered(
    causal: Qwen3ForCausalLM, tokens: np.ndarray, own: np.ndarray, cached: np.ndarray
) -> None:
    recovered = Reference(causal).recover(tokens, cached, own, 0)
    np.testing.assert_array_equal(recovered.state[:, :, :, ~own], cached[:, :, :, ~own])
    # Before the passage nothing was recovered, so there it is what a prefill gives.
    full = Reference(causal).prefill(tokens)
    np.testing.assert_array_equal(recovered.state[..., :START, :], full.state[..., :START, :])
    assert recovered.tokens == TOKENS - SHARED


def test_the_most_deviating_tokens_are_computed(
    causal: Qwen3ForCausalLM, tokens: np.ndarray, own: np.ndarray, cached: np.ndarray
) -> None:
    reference = Reference(causal)
    recovered = reference.recover(tokens, cached, own, 7)
    differ = (recovered.state != cached).any(axis=(0, 1, 2, 4))
    assert recovered.tokens == TOKENS - SHARED + 7
    assert (differ & ~own).sum() == 7

    def values(state: np.ndarray) -> np.ndarray:
        return (state[CHECK_LAYER, 1].astype(np.uint32) << 16).view(np.float32)

    # Up to the check layer all tokens were computed, so it saw what a prefill has there.
    deviation = np.square(values(reference.prefill(tokens).state) - values(cached)).sum((0, 2))
    most = np.argsort(np.where(own, -1, deviation))[-7:]
    assert sorted(np.flatnonzero(differ & ~own)) == sorted(most)


def test_recovered_state_is_a_recipe(
    causal: Qwen3ForCausalLM,
    tokens: np.ndarray,
    own: np.ndarray,
    cached: np.ndarray,
    segment: np.ndarray,
) -> None:
    """In every layer nothing but computed tokens is written out."""
    reference = Reference(causal)

    def describe(key: bytes, count: int, position: int) -> SpanDescription:
        shard = Shard(0, LAYERS, 0, HEADS)
        return SpanDescription(key * 32, b"n" * 32, "bfloat16", shard, DIM, count, position)

    frame = describe(b"s", SHARED, START + MOVED)
    base = Base([Segment(frame, np.ascontiguousarray(segment))])
    recovered = reference.recover(tokens, cached, own, 0)
    told = Provenance(START, SHARED, frame.key, 0, -MOVED)
    encoded = Encoder(base, reference.rotary).encode(
        describe(b"m", TOKENS, 0), recovered.state, [told]
    )
    ops = encoded.recipe.ops
    assert ops["tokens"][ops["kind"] == Op.LITERAL].tolist() == [START, 7] * 2
    assert decode(encoded.data, base).tobytes() == recovered.state.tobytes()
