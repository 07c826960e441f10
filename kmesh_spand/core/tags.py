"""What the index calls a (key, shard): the same function as ``kmesh.index.tag``.

It is written twice because the core may not import the index; golden vectors and a test
that reads both keep them equal.
"""

from __future__ import annotations

import functools

_MASK = (1 << 64) - 1


def splitmix64(value: int) -> int:
    """The output of splitmix64 for the state ``value`` (u64 → u64)."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & _MASK
    return value ^ value >> 31


def scope(tenant: int, shard: int) -> int:
    """What a key is looked up under: a tenant's number and a shard code."""
    return tenant << 64 | shard


def shard_of(scope: int) -> int:
    """The shard code of a scope."""
    return scope & _MASK


@functools.lru_cache(4096)
def mix(scope: int) -> int:
    """What the first word of a key is XORed with to find its place in the table."""
    return splitmix64(splitmix64(scope >> 64) ^ scope & _MASK)


def tag(key: bytes, shard: int) -> int:
    """u64 tag of a 32-byte key and a shard code; never 0 (empty) or 1 (tombstone)."""
    return max(2, int.from_bytes(key[:8], "little") ^ splitmix64(shard))
