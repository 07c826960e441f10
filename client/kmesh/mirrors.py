"""Payloads out of recipes that lie in the daemon's memory, verified.

Needs the extra ``codec``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kmesh import _host, errors
from kmesh.codec import Base, Recipe, Segment, SpanDescription, decode
from kmesh.codec.description import beside
from kmesh.lease import BasePlace, Lease


class Slab(Protocol):
    """What is read of ``kmesh.memory.SlabMapping``."""

    @property
    def slab(self) -> int: ...
    def sums_address(self, offset: int) -> int: ...
    def contains(self, offset: int, length: int) -> bool: ...
    def view(self, offset: int, length: int) -> memoryview: ...


@dataclass(frozen=True, slots=True)
class RecipePlace:
    """A leased recipe: where it lies, and the payload that it must give.

    Attributes:
        slab, offset, length: of the recipe; ``root`` folds its tile sums.
        dense_length, dense_root: of the payload.
    """

    slab: int
    offset: int
    length: int
    root: int
    dense_length: int
    dense_root: int


class MirrorReader:
    """Decodes the recipes of one lease; what several refer to is verified once.

    Only to be used while the lease is held.

    Args:
        slab_of: a slab of host memory, mapped, by its number.
    """

    def __init__(self, slab_of: Callable[[int], Slab]) -> None:
        self._slab_of = slab_of
        self._segments: dict[tuple[BasePlace, bytes, str, object, int], Segment] = {}

    def read(self, place: RecipePlace, bases: Mapping[bytes, BasePlace]) -> npt.NDArray[np.uint8]:
        """A payload of ``place.dense_length`` bytes.

        Args:
            bases: what the lease holds for recipes of this shard, by key.

        Raises:
            CorruptionError: the recipe, or what it refers to, is not what was stored, or gave
                other bytes. Report the entry.
            ProtocolError: the daemon named bytes that no span can have.
        """
        slab = self._slab(place.slab, place.offset, place.length)
        # The view keeps the sums mapped too.
        view = slab.view(place.offset, place.length)
        data = bytes(view)
        sums = slab.sums_address(place.offset)
        if not _host.verify(_host.address(data), len(data), sums, place.root):
            raise errors.CorruptionError("a recipe: its bytes do not match their sums")
        try:
            recipe = Recipe(data)
            like = recipe.description
            if like.payload_bytes != place.dense_length:
                raise errors.RecipeChecksumError("gives another length", field="tokens")
            if recipe.head["payload_root"] != place.dense_root:
                raise errors.RecipeChecksumError("is another span's", field="payload_root")
            segments = []
            for number, key in enumerate(recipe.segments["key"]):
                base = bases.get(key.tobytes())
                if base is None:
                    raise errors.RecipeMismatch(
                        "is not in the lease", field="segments.key", record=number
                    )
                segments.append(self._segment(base, like))
            return decode(recipe, Base(segments), max_bytes=place.dense_length)
        except errors.CorruptionError:
            raise
        except errors.RecipeError as wrong:
            raise errors.RecipeChecksumError(
                str(wrong), field=wrong.field, record=wrong.record
            ) from wrong

    def _slab(self, number: int, offset: int, length: int) -> Slab:
        slab = self._slab_of(number)
        if slab.slab != number or not slab.contains(offset, length) or not length:
            raise errors.ProtocolError(f"no span can lie at {offset} in slab {number}")
        return slab

    def _segment(self, base: BasePlace, like: SpanDescription) -> Segment:
        name = base, like.namespace, like.dtype, like.shard, like.head_dim
        found = self._segments.get(name)
        if found is None:
            slab = self._slab(base.slab, base.offset, base.length)
            view = slab.view(base.offset, base.length)
            sums = slab.sums_address(base.offset)
            if not _host.verify(_host.address(view), base.length, sums, base.root):
                raise errors.CorruptionError(
                    f"span {base.key.hex()}, to which a recipe refers: its bytes do not match"
                    " their sums"
                )
            of = beside(like, base.key, base.tokens, base.position, base.generation)
            found = self._segments[name] = Segment(of, view)
        return found


def place_of(lease: Lease, key: int, shard: int = 0) -> RecipePlace:
    """Where an entry's recipe lies; see ``Lease.entry`` for what is raised."""
    span, at = lease.entry(key, shard), lease.index(key, shard)
    return RecipePlace(
        span.slab,
        span.offset,
        span.length,
        lease.root[at],
        lease.dense_length[at],
        lease.dense_root[at],
    )


def bases_of(lease: Lease, shard: int = 0) -> dict[bytes, BasePlace]:
    """What a lease holds for recipes of a shard, by key."""
    return {key: base for (number, key), base in lease.bases.items() if number == shard}
