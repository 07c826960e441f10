"""How much of a prompt lies in KMesh: the longest hit over all plausible shardings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kmesh.index import Probe
from kmesh.keys import KEY_BYTES, KeyChain
from kmesh_vllm.quarantine import Quarantine
from kmesh_vllm.sharding import Sharding


class Index(Protocol):
    """What is read of ``kmesh.index.IndexReader``."""

    def probe(
        self, keys: bytes, shard_codes: Sequence[int], *, prefix: bool = True, device: str = ""
    ) -> Probe: ...


#: Leading keys that an index has, by keys, shard codes and device.
Known = dict[tuple[bytes, tuple[int, ...], str], int]


class Looked:
    """What was found in an index, as long as it does not change: siblings look for the same."""

    #: Answers that are remembered.
    MOST = 256

    def __init__(self) -> None:
        self._at = (0, 0)
        self._known: Known = {}

    def known(self, epoch: int, version: int) -> Known:
        """What is known of that index at that version, to be added to."""
        if self._at != (epoch, version) or len(self._known) >= self.MOST:
            self._at, self._known = (epoch, version), {}
        return self._known


@dataclass(frozen=True, slots=True)
class Hit:
    """A prefix that lies in KMesh.

    Attributes:
        sharding: in which it was stored.
        spans: full spans from the prompt's start.
        tail: tokens of the span behind them that a sub-key found, or 0.
        device: UUID of the GPU whose memory it is in, or empty: host memory.
    """

    sharding: Sharding
    spans: int
    tail: int
    device: str = ""

    def tokens(self, span_tokens: int) -> int:
        """Tokens of the prefix."""
        return self.spans * span_tokens + self.tail


def longest_hit(
    chain: KeyChain,
    index: Index,
    shardings: Sequence[Sharding],
    *,
    span_tokens: int,
    sub_tokens: int,
    block_tokens: int,
    limit: int,
    avoid: Quarantine,
    devices: Sequence[str] = ("",),
    known: Known | None = None,
) -> Hit | None:
    """The longest hit, the first device's and sharding's where several are as long; None: a miss.

    Args:
        limit: tokens that are of use, whole blocks.
        avoid: keys that must not be used now.
        devices: whose memory is looked in.
        known: what was found in this index before, of full spans; gets what is found now.
    """
    known = {} if known is None else known
    best: Hit | None = None
    # Most shardings have nothing, so that the same parts are asked for again.
    tails: dict[int, tuple[list[int], list[bytes]]] = {}
    count = min(chain.spans, -(-limit // span_tokens))
    keys = chain.keys[: count * KEY_BYTES]
    for device, sharding in ((d, s) for d in devices for s in shardings):
        codes = sharding.codes
        there = known.get((keys, codes, device))
        if there is None:
            there = index.probe(keys, codes, device=device).hits if keys else 0
            known[keys, codes, device] = there
        spans = there
        for i in range(spans if avoid else 0):
            if keys[i * KEY_BYTES : (i + 1) * KEY_BYTES] in avoid:
                spans = i
                break
        if best and (spans + 1) * span_tokens <= best.tokens(span_tokens):
            continue
        if spans not in tails:
            lengths = _tails(chain, spans, span_tokens, sub_tokens, block_tokens, limit)
            tails[spans] = lengths, [chain.key(spans, tokens) for tokens in lengths]
        lengths, parts = tails[spans]
        found = index.probe(b"".join(parts), codes, device=device).hits if parts else 0
        while found and parts[found - 1] in avoid:
            found -= 1
        hit = Hit(sharding, spans, lengths[found - 1] if found else 0, device)
        if hit.tokens(span_tokens) > (best.tokens(span_tokens) if best else 0):
            best = hit
        if best and best.tokens(span_tokens) >= limit:
            break
    return best


def covered(
    keys: bytes, index: Index, shardings: Sequence[Sharding], device: str = ""
) -> list[bool]:
    """Whether each key is stored there, all its shards, in one sharding or another."""
    found = [False] * (len(keys) // KEY_BYTES)
    for sharding in shardings:
        codes = sharding.codes
        slots = index.probe(keys, codes, prefix=False, device=device).slots
        for i in range(len(found)):
            found[i] = found[i] or all(slots[i * len(codes) : (i + 1) * len(codes)])
        if all(found):
            break
    return found


def _tails(
    chain: KeyChain, span: int, span_tokens: int, sub_tokens: int, block_tokens: int, limit: int
) -> list[int]:
    """Lengths of parts of a span that end a block, shortest first; others are of no use.

    Where a longer part is stored, the shorter ones are found too.
    """
    begin = span * span_tokens
    longest = min(span_tokens - 1, chain.tokens - begin, limit - begin)
    return [
        tokens
        for tokens in range(sub_tokens, longest + 1, sub_tokens)
        if (begin + tokens) % block_tokens == 0
    ]
