"""What is stored in a chaos run: keys, and payloads that follow from them.

Whoever reads a span can tell by itself whether its bytes are right, without having seen them
before: they are a function of who stored it, where, and under which name.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from kmesh.keys import Namespace
from kmesh.layout import Shard

NAMESPACE = Namespace("chaos", "weights", "float32", layers=4, kv_heads=2, head_dim=8)
SHARDS = (Shard(0, 2, 0, 2), Shard(2, 4, 0, 2))
#: Salts of requests: none, and one.
SALTS = (b"", hashlib.sha256(b"chaos").digest())
#: Full spans and families of tails; more than the pools of these runs hold.
FULL, FAMILIES = 64, 12
SPAN_TOKENS, SUB_TOKENS = 64, 16
MAX_BYTES = 200_000
#: Groups of spans that differ little, one base and members each; numbered behind the tails.
GROUPS, GROUP = 6, 4
#: Elements of a head, and tokens that a member has for itself. A span of a group takes two tiles.
HEAD_DIM, OWN_TOKENS = 64, 16
_ROW = HEAD_DIM * 4
_KIN = FULL + FAMILIES


@dataclass(frozen=True, slots=True)
class Name:
    """One name of a span.

    Attributes:
        number: of the run of tokens; families of tails have numbers of their own.
        tokens: how many of them, 64 for a full span.
        salt: number of the request's salt.
    """

    number: int
    tokens: int = SPAN_TOKENS
    salt: int = 0

    @property
    def key(self) -> bytes:
        """32 bytes."""
        text = f"{self.number}/{self.tokens}/{self.salt}"
        return hashlib.blake2b(text.encode(), digest_size=32).digest()


def kin(group: int, number: int, salt: int) -> Name:
    """One of a group; number 0 is its base."""
    return Name(_KIN + group * GROUP + number, SPAN_TOKENS, salt)


def tail(family: int, tokens: int, salt: int) -> Name:
    return Name(FULL + family, tokens, salt)


def payload(uid: int, place: str, name: Name, shard: int) -> bytes:
    """The bytes of a span, of 1 to ``MAX_BYTES``.

    Args:
        place: UUID of the GPU that it is on; empty: host memory.
        shard: number of the shard.
    """
    text = f"{uid}/{place}/{name.number}/{name.tokens}/{name.salt}/{shard}"
    if name.number >= _KIN:
        base = name.number - (name.number - _KIN) % GROUP
        shared = f"{uid}/{place}/{base}/{name.tokens}/{name.salt}/{shard}"
        return _kin_payload(shared, text)
    maker = hashlib.shake_128(text.encode())
    draw = int.from_bytes(maker.digest(4), "little")
    # Most take a tile or two, some take less than one.
    length = 1 + draw % (4000 if draw >> 30 == 0 else MAX_BYTES)
    return maker.digest(length)


def _kin_payload(shared: str, own: str) -> bytes:
    """The base's bytes, but for the last tokens of each run of a head."""
    part = SHARDS[0]
    run, kept = SPAN_TOKENS * _ROW, (SPAN_TOKENS - OWN_TOKENS) * _ROW
    runs = 2 * part.layers * part.heads
    base = hashlib.shake_128(shared.encode()).digest(runs * run)
    if shared == own:
        return base
    rest = hashlib.shake_128(own.encode()).digest(runs * (run - kept))
    size = run - kept
    return b"".join(
        base[at * run : at * run + kept] + rest[at * size : (at + 1) * size] for at in range(runs)
    )


def difference(found: bytes, expected: bytes) -> str:
    """Where two payloads differ, for a person."""
    if len(found) != len(expected):
        return f"{len(found)} bytes instead of {len(expected)}"
    at = [n for n, (a, b) in enumerate(zip(found, expected, strict=True)) if a != b]
    return f"{len(at)} of {len(found)} bytes, the first at {at[0]}, the last at {at[-1]}"
