"""What tests of the core store and lease, as its clients know it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from kmesh.layout import Shard
from kmesh_spand.core.mirrors import RecipeFacts

SHARD = Shard(0, 4, 0, 2).code()
OTHER_SHARD = Shard(4, 8, 0, 2).code()
NAMESPACE = hashlib.blake2b(b"namespace", digest_size=32).digest()
#: A tenant: its group of uids, and its salt.
Who = tuple[int, bytes]
# What a tile holds when it was damaged, or is being written.
FLIPPED, PARTIAL = -1, -2


def key(name: object) -> bytes:
    """A key of 32 bytes that only ``name`` has."""
    return hashlib.blake2b(repr(name).encode(), digest_size=32).digest()


def heir_of(slab: int) -> int:
    """The other number of a slab's place."""
    return slab ^ 8


@dataclass(frozen=True)
class Wanted:
    """What a reservation is for."""

    session: int
    key: bytes
    sub_keys: tuple[bytes, ...]
    shard: int
    length: int
    tokens: int
    who: Who
    tier: int = 0


@dataclass(frozen=True)
class Recipe:
    """A recipe's content: which it gives, and which spans it names."""

    dense: int
    facts: RecipeFacts


@dataclass(frozen=True)
class Held:
    """One leased entry, as its client knows it."""

    slab: int
    tile: int
    count: int
    root: int
