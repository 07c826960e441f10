"""Keys made in one native call, against BLAKE3 one span at a time."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from kmesh import _host
from kmesh.keys import Extra, KeyChain, chain_root

DIGEST = bytes(range(32))


def chained(parent: bytes, words: bytes, step: int) -> bytes:
    keys = b""
    for begin in range(0, len(words), step):
        parent = blake3(parent + words[begin : begin + step]).digest()
        keys += parent
    return keys


@given(
    st.integers(0, 3),
    # Around the sizes at which a block, a chunk of 1,024 bytes, and a level of the tree end.
    st.one_of(st.integers(1, 400), st.sampled_from([32, 992, 993, 2016, 2017, 4064, 4065, 9000])),
    st.binary(min_size=32, max_size=32),
    st.randoms(use_true_random=False),
)
def test_keys_are_blake3_of_parent_and_run(spans, step, parent, rng) -> None:  # type: ignore[no-untyped-def]
    words = rng.randbytes(spans * step)
    assert _host.chain_keys(parent, words, step) == chained(parent, words, step)


@given(st.integers(0, 4), st.integers(0, 4), st.integers(0, 400), st.sampled_from([0, 7, 255]))
def test_known_keys_are_taken_for_the_spans_that_are_the_same(
    spans: int, known: int, changed: int, flip: int
) -> None:
    """Known keys are marked, so that each shows whether it was taken."""
    words = bytes(i * 7 % 251 for i in range(100 * spans))
    others = bytearray(bytes(i * 7 % 251 for i in range(100 * known)))
    if changed < len(others):
        others[changed] ^= flip
    marked = b"".join(bytes([0xEE, i] * 16) for i in range(known))
    same = 0
    while (same + 1) * 100 <= min(len(words), len(others)) and (
        words[same * 100 : (same + 1) * 100] == others[same * 100 : (same + 1) * 100]
    ):
        same += 1
    keys = marked[: same * 32]
    keys += chained(keys[-32:] or DIGEST, words[same * 100 :], 100)
    assert _host.chain_keys(DIGEST, words, 100, others, marked) == keys


@pytest.mark.parametrize(("words", "keys"), [(63, 32), (128, 31), (0, 32)])
def test_known_keys_without_their_runs_are_refused(words: int, keys: int) -> None:
    with pytest.raises(ValueError, match="known"):
        _host.chain_keys(DIGEST, bytes(128), 64, bytes(words), bytes(keys))


def test_a_long_chain_is_hashed_without_the_gil() -> None:
    words = np.random.default_rng(1).bytes(5 << 18)
    assert _host.chain_keys(DIGEST, words, 256) == chained(DIGEST, words, 256)


@pytest.mark.parametrize(
    ("parent", "words", "step"),
    [(bytes(31), bytes(64), 64), (bytes(32), bytes(65), 64), (bytes(32), b"", 0)],
)
def test_what_is_no_chain_is_refused(parent: bytes, words: bytes, step: int) -> None:
    with pytest.raises(ValueError, match=r"parent|words"):
        _host.chain_keys(parent, words, step)
    with pytest.raises(OverflowError):
        _host.chain_keys(bytes(32), bytes(64), 1 << 64)


def test_token_ids_become_words() -> None:
    ids = [0, 1, 2**32 - 1, 77]
    words = struct.pack("<4I", *ids)
    for same in (ids, tuple(ids), iter(ids), np.array(ids), [np.int64(i) for i in ids]):
        assert _host.token_words(same) == words  # type: ignore[arg-type]
    assert _host.token_words([]) == b""


@pytest.mark.parametrize("wrong", [-1, 2**32, 2**70])
def test_a_token_id_of_more_than_32_bits_is_refused(wrong: int) -> None:
    chain = KeyChain(DIGEST)
    with pytest.raises(OverflowError):
        chain.extend([1, wrong])
    assert (chain.tokens, chain.spans) == (0, 0)
    with pytest.raises(TypeError):
        chain.extend(["1"])  # type: ignore[list-item]


@given(st.integers(0, 300), st.integers(0, 300), st.integers(0, 300), st.booleans(), st.booleans())
def test_a_chain_like_another_has_its_own_keys(
    tokens: int, others: int, same: int, content: bool, other_content: bool
) -> None:
    ids = list(range(tokens))
    extras, other_extras = ([Extra(70, 3, b"x")] * on for on in (content, other_content))
    other = KeyChain(DIGEST, extras=other_extras)
    other.extend([i if i < same else i + 1000 for i in range(others)])
    chain, alone = (KeyChain(DIGEST, extras=extras) for _ in range(2))
    chain.extend(ids, other)
    alone.extend(ids)
    assert chain.keys == alone.keys
    # Of another root or length, none is taken.
    for one in (KeyChain(bytes(32)), KeyChain(DIGEST, span_tokens=32)):
        one.extend(ids, chain)
        assert one.keys[:32] != chain.keys[:32] or not one.spans


class Shrinking:
    """An id whose own code takes the list apart."""

    def __init__(self, ids: list[object]) -> None:
        self._ids = ids

    def __index__(self) -> int:
        self._ids.clear()
        return 5


def test_a_list_that_shrinks_while_it_is_read_is_an_error() -> None:
    ids: list[object] = [1]
    ids += [Shrinking(ids), 2, 3]
    with pytest.raises(IndexError):
        _host.token_words(ids)  # type: ignore[arg-type]


@given(
    st.integers(0, 400),
    st.lists(st.tuples(st.integers(-40, 420), st.integers(0, 150), st.binary(max_size=3))),
    st.lists(st.integers(0, 400), max_size=3),
)
def test_content_beyond_tokens_counts_where_it_is(tokens, extras, cuts) -> None:  # type: ignore[no-untyped-def]
    """However the tokens come, and whichever spans hold more than tokens."""
    ids = [(i * 2654435761) & 0xFFFFFFFF for i in range(tokens)]
    chain = KeyChain(DIGEST, extras=[Extra(*extra) for extra in extras])
    for begin, end in zip([0, *sorted(cuts)], [*sorted(cuts), tokens], strict=True):
        chain.extend(ids[begin:end])
    parent, keys = chain_root(DIGEST), b""
    for span in range(tokens // 64):
        begin = span * 64
        data = parent + struct.pack("<64I", *ids[begin : begin + 64])
        more = b""
        for start, length, identity in sorted(extras, key=lambda e: e[:2]):
            if start < begin + 64 and start + length > begin:
                more += struct.pack("<qqI", start - begin, length, len(identity)) + identity
        if more:
            data += struct.pack("<I", 0xFFFFFFFF) + more
        parent = blake3(data).digest()
        keys += parent
    assert chain.keys == keys
