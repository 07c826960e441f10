"""Recipes in slabs: made, kept, read and decoded by the worker that has the memory.

The codec is loaded with the first job: a daemon without families goes without it.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from kmesh import _host
from kmesh.errors import RecipeError
from kmesh.layout import Shard
from kmesh_spand import ipc, jobmessages

if TYPE_CHECKING:
    from kmesh.codec import Base, Encoder, Provenance, Recipe, SpanDescription
    from kmesh.kernels.rotary import Rotary

#: Spans that one recipe may refer to: those of a family's base.
MAX_BASES = 512
_ALONE = "it shares nothing with the base that is worth a recipe"


class Memory(Protocol):
    """Slabs, whosesoever memory they are. A range that no span can have is a ValueError."""

    def view(self, slab: int, offset: int, length: int) -> memoryview:
        """A payload's bytes; a copy where this process can't see them."""

    def sums(self, slab: int, offset: int, length: int) -> bytes:
        """A payload's tile sums."""

    def put(self, slab: int, offset: int, data: memoryview) -> int:
        """Bytes into a range, with their sums, whose root it returns."""


class Made(Protocol):
    """A recipe that gave its payload back, as encoders return it."""

    @property
    def data(self) -> bytes: ...
    @property
    def recipe(self) -> Recipe: ...
    @property
    def depends(self) -> bool: ...


class Unloadable(Exception):
    """Modules are not there or half there: this process can't load them any more."""


def load_codec(*more: str) -> None:
    """Loads the codec, at a process's first use of it, and further modules.

    Raises:
        Unloadable: it can't be had; says why.
    """
    try:
        for name in ("kmesh.codec", "kmesh.kernels.rotary", *more):
            importlib.import_module(name)
    except (ImportError, OSError, MemoryError) as lacking:
        cause: BaseException = lacking
        while cause.__cause__ is not None:
            cause = cause.__cause__
        raise Unloadable(f"the codec can't be loaded: {str(cause) or 'no memory'}") from None


class Recipes:
    """Answers jobs. What was encoded is kept until it is written or forgotten.

    Args:
        store: the slabs. Ranges are checked by it.
    """

    def __init__(self, store: Memory) -> None:
        self._store = store
        self._made: dict[int, bytes] = {}
        self._encoding = threading.Lock()
        # Of the family that was encoded last: its base is searched once.
        self._encoder: tuple[object, Encoder] | None = None

    def encode(self, job: jobmessages.Encode) -> ipc.AnyMessage:
        """A recipe that gave its payload back, or why there is none."""
        load_codec()
        from kmesh.codec import Provenance

        try:
            with self._encoding:
                provenance = [
                    Provenance(
                        token,
                        tokens,
                        job.bases[number].key,
                        source,
                        job.span.position + token - job.bases[number].position - source,
                    )
                    for token, tokens, number, source in job.pieces
                ]
                made = self._make(job, describe(job.span, job), provenance)
        except RecipeError as wrong:
            return jobmessages.NotEncoded(job.job, str(wrong))
        if not made.depends:
            return jobmessages.NotEncoded(job.job, _ALONE)
        numbers = {place.key: number for number, place in enumerate(job.bases)}
        used = [numbers[segment.tobytes()] for segment in made.recipe.segments["key"]]
        roots = made.recipe.segments["root"].tolist()
        other = made.recipe.head["payload_root"] != job.span.root
        each = zip(used, roots, strict=True)
        changed = [number for number, root in each if job.bases[number].root != root]
        if other or changed:
            return jobmessages.EncodeSpoiled(job.job, other, changed)
        self._made[job.job] = made.data
        return jobmessages.Encoded(job.job, len(made.data), used)

    def keep(self, job: jobmessages.KeepRecipe) -> jobmessages.RecipeKept:
        """A recipe into its range, with its sums."""
        data = self._made.pop(job.job)
        if len(data) != job.length:
            raise ValueError(f"the recipe has {len(data)} bytes, not {job.length}")
        return jobmessages.RecipeKept(
            job.job, self._store.put(job.slab, job.offset, memoryview(data))
        )

    def forget(self, job: int) -> None:
        """A recipe is not wanted."""
        self._made.pop(job, None)

    def let_go(self, slab: int) -> None:
        """Nothing of a slab is kept that is given back."""
        with self._encoding:
            self._encoder = None

    def densify(self, job: jobmessages.Densify) -> jobmessages.Densified:
        """A payload into its range, if its recipe gives it."""
        load_codec()
        from kmesh.codec import decode

        try:
            recipe = self._read(job.mirror)
            if recipe is None or recipe.description.payload_bytes != job.length:
                return jobmessages.Densified(job.job, False)
            found = decode(recipe, self._base(job.bases, recipe.description), max_bytes=job.length)
        except RecipeError:
            return jobmessages.Densified(job.job, False)
        root = self._store.put(job.slab, job.offset, found.data)
        return jobmessages.Densified(job.job, root == job.root)

    def facts(self, job: jobmessages.Verify) -> jobmessages.Verified:
        """What a recipe says whose bytes match their sums."""
        load_codec()
        from kmesh.codec import Recipe

        try:
            recipe = Recipe(bytes(self._store.view(job.slab, job.offset, job.length)))
        except RecipeError:
            return jobmessages.Verified(job.job, False)
        if not 0 < len(recipe.segments) <= MAX_BASES:
            return jobmessages.Verified(job.job, False)
        names = ("key", "generation", "root", "tokens", "position")
        rows = zip(*(recipe.segments[name].tolist() for name in names), strict=True)
        bases = [jobmessages.Fact(*row) for row in rows]
        length = recipe.description.payload_bytes
        return jobmessages.Verified(job.job, True, length, recipe.head["payload_root"], bases)

    def _make(
        self, job: jobmessages.Encode, span: SpanDescription, provenance: Sequence[Provenance]
    ) -> Made:
        """A recipe, or what is as well kept dense; RecipeError if there can be none."""
        return self._encoder_of(job).encode(span, self._view(job.span), provenance)

    def _encoder_of(self, job: jobmessages.Encode) -> Encoder:
        from kmesh.codec import Encoder

        same = family_of(job)
        if self._encoder is None or self._encoder[0] != same:
            base = self._base(job.bases, describe(job.span, job))
            self._encoder = same, Encoder(base, rotary_of(job))
        return self._encoder[1]

    def _base(self, places: Sequence[jobmessages.Payload], like: SpanDescription) -> Base:
        from kmesh.codec import Base, Segment
        from kmesh.codec.description import beside

        return Base(
            Segment(
                beside(like, place.key, place.tokens, place.position, place.generation),
                self._view(place),
            )
            for place in places
        )

    def _read(self, place: jobmessages.Payload) -> Recipe | None:
        """A recipe, unless its bytes do not match their sums. RecipeError if it is none."""
        from kmesh.codec import Recipe

        data = bytes(self._view(place))
        sums = self._store.sums(place.slab, place.offset, place.length)
        if not _host.verify(_host.address(data), len(data), _host.address(sums), place.root):
            return None
        return Recipe(data)

    def _view(self, place: jobmessages.Payload) -> memoryview:
        return self._store.view(place.slab, place.offset, place.length)


def family_of(job: jobmessages.Encode) -> tuple[object, ...]:
    """What jobs have in common that one encoder can do."""
    shape = job.namespace, job.dtype, job.head_dim, job.shard
    return *shape, job.bases, job.frequencies, job.interleaved


def rotary_of(job: jobmessages.Encode) -> Rotary | None:
    """How keys are turned, if that is known."""
    from kmesh.kernels.rotary import Rotary

    if not job.frequencies:
        return None
    return Rotary(tuple(job.frequencies), job.interleaved, job.dtype)


def describe(place: jobmessages.Payload, job: jobmessages.Encode) -> SpanDescription:
    """A span of a job, in the codec's words."""
    from kmesh.codec import SpanDescription

    return SpanDescription(
        key=place.key,
        namespace=job.namespace,
        dtype=job.dtype,
        shard=Shard.from_code(job.shard),
        head_dim=job.head_dim,
        tokens=place.tokens,
        position=place.position,
        generation=place.generation,
    )
