"""One family: what its spans have in common, its base and its members."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from kmesh.layout import DTYPE_BYTES, Shard

#: Group of uids and salt: whose names a family's are, in all tiers.
Owner = tuple[int, bytes]


@dataclass(frozen=True, slots=True)
class Run:
    """Tokens that a member took from the base; see ``kmesh.v1.Provenance``."""

    position: int
    tokens: int
    base: bytes
    source: int


@dataclass(frozen=True, slots=True, eq=False)
class Member:
    """``keys`` in order; ``runs`` in order of position; ``parent`` of a fork, or empty."""

    name: str
    keys: tuple[bytes, ...]
    runs: tuple[Run, ...] = ()
    parent: str = ""

    @property
    def named(self) -> int:
        """Keys and runs: what remembering it takes."""
        return len(self.keys) + len(self.runs)


@dataclass(slots=True, eq=False)
class Family:
    """Attributes are those of ``kmesh.v1.DeclareFamilyRequest``, and:

    Attributes:
        id: unique in an epoch.
        owner: whose name it is.
        shards: codes.
        base: number of each base key.
        frequencies: radians a position; none if it is not known how keys are turned.
        spans: keys of members and of the base, each once, times shards.
        named: keys and runs of all members, however often.
        members: by name.
    """

    id: int
    owner: Owner
    name: str
    namespace: bytes
    dtype: str
    head_dim: int
    shards: tuple[int, ...]
    frequencies: tuple[float, ...]
    interleaved: bool
    began_ms: int
    base: dict[bytes, int] = field(default_factory=dict)
    members: dict[str, Member] = field(default_factory=dict)
    spans: int = 0
    named: int = 0

    @property
    def base_keys(self) -> bytes:
        """All base keys, 32 bytes each, in order."""
        return b"".join(self.base)

    def add_base(self, keys: Iterable[bytes]) -> int:
        """Adds those that it does not have; returns how many."""
        before = len(self.base)
        for key in keys:
            self.base.setdefault(key, len(self.base))
        return len(self.base) - before

    def payload_bytes(self, tokens: int, shard: int) -> int:
        """Of a dense span of so many tokens in a shard."""
        return payload_bytes(self.dtype, self.head_dim, tokens, shard)


def payload_bytes(dtype: str, head_dim: int, tokens: int, shard: int) -> int:
    """Of a dense span; ``shard`` is a code."""
    part = Shard.from_code(shard)
    return 2 * part.layers * part.heads * head_dim * DTYPE_BYTES[dtype] * tokens
