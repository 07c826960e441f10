"""A bounded memory of keys that are gone: when each ended, and by what."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterator
from typing import NamedTuple

from kmesh_spand.core.codes import Cause
from kmesh_spand.core.tags import splitmix64

KEY_BYTES = 32
_U32 = 0xFFFF_FFFF
_FIRST_WORD = struct.Struct("<Q")


class Ending(NamedTuple):
    """The end of one key in one shard (a code), at a tick of the store."""

    shard: int
    cause: Cause
    tick: int


class Endings:
    """The last ``limit`` endings: a ring, chained by key from the newest to older ones.

    Takes 49 bytes an entry and 4 to 8 for the chains' heads. A link is one more than the count of
    endings before the one that it leads to; one that points behind the ring ends its chain.

    Args:
        limit: 0 remembers nothing.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._count = 0
        self._keys = bytearray(KEY_BYTES * limit)
        self._shard = array("Q", [0]) * limit
        self._tick = array("I", [0]) * limit
        self._cause = bytearray(limit)
        self._older = array("I", [0]) * limit
        self._heads = array("I", [0]) * (1 << max(limit - 1, 0).bit_length())
        self._mask = len(self._heads) - 1

    def __len__(self) -> int:
        return min(self._count, self._limit)

    def add(self, key: bytes, shard: int, cause: Cause, tick: int) -> None:
        """A key of 32 bytes is gone; the oldest ending may be forgotten for it."""
        if not self._limit:
            return
        if self._count == _U32:
            # Links have 32 bits: after so many endings begin again with none.
            self._count = 0
            self._heads = array("I", [0]) * len(self._heads)
        at = self._count % self._limit
        self._keys[at * KEY_BYTES : (at + 1) * KEY_BYTES] = key
        self._shard[at] = shard
        self._tick[at] = tick
        self._cause[at] = cause
        home = self._home(key)
        self._older[at] = self._heads[home]
        self._count += 1
        self._heads[home] = self._count

    def of(self, key: bytes) -> Iterator[Ending]:
        """What is remembered of a key, in all shards, newest first."""
        if not self._limit:
            return
        link = self._heads[self._home(key)]
        while link > max(self._count - self._limit, 0):
            at = (link - 1) % self._limit
            if self._keys[at * KEY_BYTES : (at + 1) * KEY_BYTES] == key:
                yield Ending(self._shard[at], Cause(self._cause[at]), self._tick[at])
            link = self._older[at]

    def last(self, key: bytes, shard: int) -> Ending | None:
        """The newest ending of a key in a shard."""
        return next((ending for ending in self.of(key) if ending.shard == shard), None)

    @property
    def oldest(self) -> int | None:
        """The tick before which endings have been forgotten; None while none has."""
        if self._count <= self._limit:
            return None
        return self._tick[self._count % self._limit] if self._limit else _U32

    def _home(self, key: bytes) -> int:
        return splitmix64(_FIRST_WORD.unpack_from(key)[0]) & self._mask
