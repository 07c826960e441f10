"""Which part of the KV heads a tensor-parallel rank holds, and who stored spans that cover it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from kmesh.layout import Shard

#: Tensor-parallel sizes whose spans are looked for, beside an engine's own.
COMMON_SIZES = (1, 2, 4, 8)


@dataclass(frozen=True)
class Sharding:
    """A model's KV heads, cut for ``tp`` ranks.

    Where there are more ranks than heads, each head is held by ``tp / heads`` neighbours.

    Raises:
        ValueError: the heads cannot be cut so.
    """

    layers: int
    kv_heads: int
    tp: int

    def __post_init__(self) -> None:
        if self.kv_heads % self.tp and self.tp % self.kv_heads:
            raise ValueError(f"{self.kv_heads} KV heads cannot be cut for {self.tp} ranks")

    @property
    def parts(self) -> int:
        """Different shards; ranks beyond that hold copies."""
        return min(self.tp, self.kv_heads)

    @property
    def part_heads(self) -> int:
        """KV heads of one shard."""
        return self.kv_heads // self.parts

    @cached_property
    def shards(self) -> tuple[Shard, ...]:
        """The different shards, by their heads."""
        step = self.part_heads
        return tuple(
            Shard(0, self.layers, part * step, (part + 1) * step) for part in range(self.parts)
        )

    @cached_property
    def codes(self) -> tuple[int, ...]:
        """``Shard.code`` of each of ``shards``."""
        return tuple(shard.code() for shard in self.shards)

    def part(self, rank: int) -> int:
        """Number of the shard that a rank holds."""
        return rank * self.parts // self.tp

    def shard(self, rank: int) -> Shard:
        """The shard that a rank holds."""
        return self.shards[self.part(rank)]

    def stores(self, rank: int) -> bool:
        """Whether this rank is the first that holds its shard; the others need not store it."""
        return rank == 0 or self.part(rank - 1) != self.part(rank)

    def alternatives(self) -> tuple[Sharding, ...]:
        """This sharding, then the other plausible ones, each of different shards."""
        found = {self.parts: self}
        for size in COMMON_SIZES:
            if size <= self.kv_heads and self.kv_heads % size == 0 and size not in found:
                found[size] = Sharding(self.layers, self.kv_heads, size)
        return tuple(found.values())


@dataclass(frozen=True, slots=True)
class Overlap:
    """Heads that a stored shard gives to a rank: a range in each, of ``heads`` heads."""

    part: int
    src_head_begin: int
    dst_head_begin: int
    heads: int


def overlaps(stored: Sharding, mine: Shard) -> list[Overlap]:
    """What each shard of ``stored`` gives to a rank that holds ``mine``; nothing is left out."""
    found = []
    for number, shard in enumerate(stored.shards):
        begin = max(shard.head_begin, mine.head_begin)
        end = min(shard.head_end, mine.head_end)
        if begin < end:
            found.append(
                Overlap(number, begin - shard.head_begin, begin - mine.head_begin, end - begin)
            )
    return found
