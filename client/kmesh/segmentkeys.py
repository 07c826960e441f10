"""A prompt's shared segments as spans of their own: their keys, and which of them are stored.

    keyed = keyed_segments(prompt, tokens, namespace, span_tokens=64, sub_tokens=16)
    matches = match_segments(keyed, stored, same, tokens)
    with session.acquire(wanted_keys(matches), shards, prefix=False, positions=True) as lease:
        sources = segment_sources(matches, lease)

The index is a hint here as everywhere: Acquire decides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kmesh.keys import Extra, KeyChain, segment_root
from kmesh.segments import Segment, SegmentedPrompt


@dataclass(frozen=True, slots=True)
class SegmentSpan:
    """A span of a shared segment.

    Attributes:
        key: 32 bytes, of the segment's tokens up to the span's end.
        begin: position in the prompt of its first token.
        tokens: ``span_tokens``, or in a segment's tail a smaller multiple of ``sub_tokens``.
        sub_keys: of a tail, its keys at every ``sub_tokens`` before its end.
    """

    key: bytes
    begin: int
    tokens: int
    sub_keys: bytes = b""

    @property
    def end(self) -> int:
        return self.begin + self.tokens


@dataclass(frozen=True, slots=True)
class KeyedSegment:
    """A shared segment with the keys of its content.

    Attributes:
        segment: in the prompt.
        spans: all of its full spans and one tail. What is left behind that, fewer than
            ``sub_tokens`` tokens, has no key; a short segment may have no span at all.
    """

    segment: Segment
    spans: tuple[SegmentSpan, ...]

    @property
    def covered(self) -> int:
        """Tokens from the segment's start that the keys say."""
        return self.spans[-1].end - self.segment.begin if self.spans else 0


@dataclass(frozen=True, slots=True)
class SegmentMatch:
    """What of a shared segment is stored.

    Attributes:
        found: spans from the segment's start that are stored without a gap.
    """

    keyed: KeyedSegment
    found: tuple[SegmentSpan, ...]

    @property
    def whole(self) -> bool:
        """Whether every span is there, and there is one."""
        return bool(self.found) and len(self.found) == len(self.keyed.spans)

    @property
    def tokens(self) -> int:
        """Tokens from the segment's start that are stored."""
        return sum(span.tokens for span in self.found)


@dataclass(frozen=True, slots=True)
class SegmentSource:
    """A stored span of a shared segment, under lease.

    Attributes:
        span: where it belongs in the prompt.
        position: of its first token where it was computed.
        entry: number of its first shard's entry in the lease.
    """

    span: SegmentSpan
    position: int
    entry: int

    @property
    def distance(self) -> int:
        """Positions from where it was computed to where it belongs."""
        return self.span.begin - self.position


class Leased(Protocol):
    """What is read of a ``kmesh.lease.Lease``."""

    @property
    def shards(self) -> Sequence[object]: ...
    @property
    def reason(self) -> Sequence[int]: ...
    @property
    def start(self) -> Sequence[int]: ...


def keyed_segments(
    prompt: SegmentedPrompt,
    token_ids: Sequence[int],
    namespace_digest: bytes,
    *,
    span_tokens: int,
    sub_tokens: int,
    extras: Iterable[Extra] = (),
) -> list[KeyedSegment]:
    """The shared segments of a prompt, in order, with their keys; each content is hashed once.

    Args:
        prompt: in tokens.
        token_ids: of the whole prompt.
        extras: content of the prompt beyond token ids; it is bound by its place in a segment.
    """
    extras, root = tuple(extras), segment_root(namespace_digest)
    chains: dict[tuple[object, ...], KeyChain] = {}
    keyed = []
    for segment in prompt.shared:
        begin, tokens = segment.begin, tuple(token_ids[segment.begin : segment.end])
        inside = tuple(
            Extra(extra.start - begin, extra.length, extra.identity)
            for extra in extras
            if extra.start < segment.end and extra.start + extra.length > begin
        )
        chain = chains.get((tokens, inside))
        if chain is None:
            chain = KeyChain(
                namespace_digest,
                span_tokens=span_tokens,
                sub_tokens=sub_tokens,
                extras=inside,
                root=root,
            )
            chain.extend(tokens)
            chains[tokens, inside] = chain
        keyed.append(KeyedSegment(segment, _spans(chain, begin, span_tokens, sub_tokens)))
    return keyed


def match_segments(
    keyed: Sequence[KeyedSegment],
    stored: Callable[[bytes], Sequence[bool]],
    same: Callable[[bytes, Sequence[int]], bool],
    token_ids: Sequence[int],
) -> list[SegmentMatch]:
    """What of each shared segment is stored, repeats included.

    Args:
        stored: whether the spans of these keys, 32 bytes each, are there; asked once.
        same: whether the span's own tokens that a key was seen with, if any, are these. Where they
            are not, the hit is a chance one and counts as a miss.
        token_ids: of the whole prompt.
    """
    there = stored(b"".join(span.key for one in keyed for span in one.spans))
    matches, at = [], 0
    for one in keyed:
        hits = there[at : at + len(one.spans)]
        at += len(one.spans)
        found: list[SegmentSpan] = []
        for span, hit in zip(one.spans, hits, strict=True):
            if not hit or not same(span.key, token_ids[span.begin : span.end]):
                break
            found.append(span)
        matches.append(SegmentMatch(one, tuple(found)))
    return matches


def wanted_keys(matches: Sequence[SegmentMatch]) -> bytes:
    """Keys of all spans that were found, 32 bytes each, each once: what to acquire."""
    return b"".join(_numbered(matches))


def segment_sources(matches: Sequence[SegmentMatch], lease: Leased) -> list[list[SegmentSource]]:
    """For each match, its spans that were leased, from the segment's start without a gap.

    Args:
        lease: of ``wanted_keys(matches)``, acquired with ``prefix=False, positions=True``.

    Raises:
        ValueError: the lease says no positions, or is of other keys.
    """
    numbers, shards = _numbered(matches), len(lease.shards)
    if not len(lease.start) == len(lease.reason) == len(numbers) * shards:
        raise ValueError("not a lease of these spans with positions")
    found = []
    for match in matches:
        sources: list[SegmentSource] = []
        for span in match.found:
            entry = numbers[span.key] * shards
            if any(lease.reason[entry : entry + shards]):
                break
            sources.append(SegmentSource(span, lease.start[entry], entry))
        found.append(sources)
    return found


def _numbered(matches: Sequence[SegmentMatch]) -> dict[bytes, int]:
    keys = dict.fromkeys(span.key for match in matches for span in match.found)
    return {key: number for number, key in enumerate(keys)}


def _spans(
    chain: KeyChain, begin: int, span_tokens: int, sub_tokens: int
) -> tuple[SegmentSpan, ...]:
    spans = [
        SegmentSpan(chain.key(number), begin + number * span_tokens, span_tokens)
        for number in range(chain.spans)
    ]
    tail = chain.tokens % span_tokens // sub_tokens * sub_tokens
    if tail:
        *shorter, key = chain.sub_keys(chain.spans, tail)
        at = begin + chain.spans * span_tokens
        spans.append(SegmentSpan(key, at, tail, b"".join(shorter)))
    return tuple(spans)
