"""Keys of shared segments, and what of them an index has."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kmesh.keys import Extra, KeyChain, segment_root
from kmesh.layout import Shard
from kmesh.segmentkeys import (
    KeyedSegment,
    keyed_segments,
    match_segments,
    segment_sources,
    wanted_keys,
)
from kmesh.segments import SegmentedPrompt, split
from kmesh.session import ReserveBatch, Role, Session
from kmesh.store import put_spans
from kmesh.testing import FakeDaemon

DIGEST = b"d" * 32
SHARD = Shard(0, 1, 0, 1)


def keyed(
    prompt: SegmentedPrompt, tokens: Sequence[int], extras: Sequence[Extra] = ()
) -> list[KeyedSegment]:
    return keyed_segments(prompt, tokens, DIGEST, span_tokens=64, sub_tokens=16, extras=extras)


def never(key: bytes, tokens: Sequence[int]) -> bool:
    return True


def test_a_segment_has_the_keys_of_its_own_chain() -> None:
    tokens = list(range(500))
    prompt = SegmentedPrompt().with_private(5).with_shared(183, "a").with_shared(312)
    first, second = keyed(prompt, tokens)
    chain = KeyChain(DIGEST, root=segment_root(DIGEST))
    chain.extend(tokens[5:188])
    assert [span.key for span in first.spans] == [chain.key(0), chain.key(1), chain.key(2, 48)]
    assert [(span.begin, span.tokens) for span in first.spans] == [(5, 64), (69, 64), (133, 48)]
    assert first.spans[2].sub_keys == chain.key(2, 16) + chain.key(2, 32)
    assert first.spans[2].end == 181
    # Seven tokens behind the last multiple of 16 have no key.
    assert first.covered == 176
    assert second.covered == 304
    assert [segment.segment for segment in (first, second)] == list(prompt.shared)


@given(
    st.lists(st.integers(0, 2), min_size=1, max_size=150),
    st.integers(0, 70),
    st.integers(0, 70),
)
def test_where_a_segment_stands_does_not_matter(tokens: list[int], at: int, other: int) -> None:
    def keys(before: int) -> list[bytes]:
        prompt = SegmentedPrompt().with_private(before) if before else SegmentedPrompt()
        ids = [7] * before + tokens
        (found,) = keyed(prompt.with_shared(len(tokens)), ids)
        assert found.covered == len(tokens) // 16 * 16
        return [span.key for span in found.spans]

    assert keys(at) == keys(other)


def test_private_segments_and_short_ones_have_no_keys() -> None:
    prompt = SegmentedPrompt().with_private(100).with_shared(15).with_shared(16)
    short, whole = keyed(prompt, list(range(131)))
    assert short.spans == ()
    assert short.covered == 0
    assert len(whole.spans) == 1
    assert keyed(SegmentedPrompt().with_private(100), list(range(100))) == []


def test_pictures_are_bound_by_their_place_in_the_segment() -> None:
    def keys(before: int, *extras: Extra) -> tuple[bytes, ...]:
        prompt = SegmentedPrompt().with_private(before).with_shared(64)
        (found,) = keyed(prompt, [1] * (before + 64), extras)
        return tuple(span.key for span in found.spans)

    assert keys(10, Extra(20, 4, b"cat")) == keys(30, Extra(40, 4, b"cat"))
    assert keys(10, Extra(20, 4, b"cat")) != keys(10, Extra(20, 4, b"dog"))
    assert keys(10, Extra(20, 4, b"cat")) != keys(10, Extra(21, 4, b"cat"))
    # One that lies elsewhere says nothing of it; one that reaches into it does.
    assert keys(10, Extra(2, 4, b"cat")) == keys(10)
    assert keys(10, Extra(2, 12, b"cat")) != keys(10)
    # The same tokens with and without it in one prompt are two segments.
    prompt = SegmentedPrompt().with_shared(64).with_shared(64)
    one, other = keyed(prompt, [1] * 128, [Extra(0, 1, b"cat")])
    assert one.spans[0].key != other.spans[0].key


def stored_by(session: Session, one: KeyedSegment, count: int) -> None:
    """Stores the first spans of a segment."""
    spans = one.spans[:count]
    batch = ReserveBatch(
        DIGEST,
        SHARD,
        b"".join(span.key for span in spans),
        [span.tokens for span in spans],
        [span.begin for span in spans],
        [64 * span.tokens for span in spans],
        sub_keys=b"".join(span.sub_keys for span in spans),
    )
    payloads = [bytes(64 * span.tokens) for span in spans]
    assert put_spans(session, session.staging(1 << 20), batch, payloads) == [0] * len(spans)


def test_what_is_stored_is_found_through_the_index_at_any_position() -> None:
    minutes, notes = list(range(1000, 1200)), list(range(3000, 3100))
    first = SegmentedPrompt().with_private(7).with_shared(200).with_shared(100)
    with FakeDaemon() as daemon, daemon.connect(role=Role.TOOL) as session:
        one, other = keyed(first, [*range(7), *minutes, *notes])
        stored_by(session, one, len(one.spans))
        with daemon.connect(role=Role.TOOL) as second:
            stored_by(second, other, 1)

        def stored(keys: bytes) -> list[bool]:
            return [bool(s) for s in session.index.probe(keys, [SHARD.code()], prefix=False).slots]

        # Notes first, and the minutes twice.
        prompt = SegmentedPrompt().with_shared(100).with_shared(200).with_private(3)
        prompt = prompt.with_shared(200).with_shared(64)
        tokens = [*notes, *minutes, 1, 2, 3, *minutes, *range(64)]
        found = match_segments(keyed(prompt, tokens), stored, never, tokens)
        # The same spans again, with where they were computed.
        keys = wanted_keys(found)
        assert len(keys) == 32 * 4, "a repeat is asked for once"
        with session.acquire(keys, [SHARD], prefix=False, positions=True) as lease:
            sources = segment_sources(found, lease)
        with session.acquire(keys, [SHARD], prefix=False) as lease:
            assert not lease.start
            with pytest.raises(ValueError, match="positions"):
                segment_sources(found, lease)
        with pytest.raises(ValueError, match="not a lease of these"):
            segment_sources(found[:1], lease)
    assert [[(s.position, s.distance) for s in one] for one in sources] == [
        [(207, -207)],
        [(7, 93), (71, 93), (135, 93)],
        [(7, 296), (71, 296), (135, 296)],
        [],
    ]
    assert [[s.entry for s in one] for one in sources] == [[0], [1, 2, 3], [1, 2, 3], []]
    assert [match.tokens for match in found] == [64, 192, 192, 0]
    assert [match.whole for match in found] == [False, True, True, False]
    assert [match.found[0].begin for match in found[:3]] == [0, 100, 303]


def test_a_span_behind_a_missing_one_is_not_found() -> None:
    tokens = list(range(200))
    segments = keyed(SegmentedPrompt().with_shared(200), tokens)
    (match,) = match_segments(segments, lambda keys: [True, False, True, True], never, tokens)
    assert match.tokens == 64


def test_a_hit_with_other_tokens_is_a_miss() -> None:
    tokens = list(range(200))
    segments = keyed(SegmentedPrompt().with_shared(200), tokens)
    seen = {segments[0].spans[1].key: [0] * 64}

    def same(key: bytes, ids: Sequence[int]) -> bool:
        return seen.get(key, ids) == ids

    (match,) = match_segments(segments, lambda keys: [True] * (len(keys) // 32), same, tokens)
    assert match.tokens == 64


def test_separators_give_the_keys_that_counts_give() -> None:
    """What is behind the contract can't know which of them was used."""
    tokens = [*range(100, 164), 9, *range(300, 380), 9, 1]
    by_separator = split(tokens, {9})
    by_count = SegmentedPrompt().with_shared(65).with_shared(81).with_shared(1)
    assert by_separator == by_count
    assert by_separator is not None
    assert keyed(by_separator, tokens) == keyed(by_count, tokens)
