"""Leases: the right to read spans until they are released or the session ends."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kmesh import _host
from kmesh.handles import Location
from kmesh.keys import KEY_BYTES
from kmesh.layout import Shard
from kmesh.v1 import spans_pb2

REASON_OK = 0
REASON_MISS = 1


def _columns(**kinds: str) -> tuple[tuple[str, int, str, bytes], ...]:
    fields = spans_pb2.AcquireResponse.DESCRIPTOR.fields_by_name
    return tuple(
        (name, fields[name].number, kind, bytes(array(kind).itemsize))
        for name, kind in kinds.items()
    )


#: Name in Lease and in AcquireResponse, number there, type code and a zero of each array.
_COLUMNS = _columns(
    reason="I", slab="I", offset="Q", length="Q", tokens="I", generation="I", root="Q"
)
#: The same, of those that only answers with recipes have.
_RECIPES = _columns(dense_length="Q", dense_root="Q")
#: The same, of those that only answers with positions have.
_POSITIONS = _columns(start="I")


@dataclass(frozen=True, slots=True)
class BasePlace:
    """Where a span lies that recipes refer to; held as long as their lease.

    Attributes:
        key: 32 bytes.
        slab, offset, length, generation: as ``Location``.
        root: fold of its tile sums.
        tokens: that it holds.
        position: of its first token, in the frame in which it was computed.
    """

    key: bytes
    slab: int
    offset: int
    length: int
    generation: int
    root: int
    tokens: int
    position: int


@dataclass(frozen=True, slots=True)
class LeasePart:
    """What one message brought: the daemon's lease id (0: none) and its entries' range."""

    lease: int
    first: int
    count: int


class Lease:
    """Spans under lease. Entry ``i * len(shards) + j`` belongs to key i and shard j.

    Use it as a context manager, or call ``release``; a second release does nothing, and so does
    one after the session has ended. Thread-safe.

    Attributes:
        keys: 32 bytes each, as asked for.
        shards: as asked for.
        reason: ``kmesh.v1.Reason`` of each entry, 0 where it is leased. The other arrays hold
            zeros where it is not 0.
        slab: slab ids.
        offset: bytes from the slab's start.
        length: payload bytes.
        tokens: tokens that the stored span holds, which may be more than a sub-key asked for.
        generation: of the slab's range.
        root: fold of the span's tile sums.
        dense_length: payload bytes that an entry gives that is a recipe; 0 where it is none.
            ``length`` and ``root`` are then of the recipe.
        dense_root: of that payload.
        start: position of the span's first token where it was computed; empty if positions were
            not asked for, or the daemon is too old to say them.
        bases: what recipes refer to, by number of the shard and key; empty without recipes.
        hits: leading keys of which every shard is leased.
    """

    __slots__ = (
        "_discard",
        "bases",
        "dense_length",
        "dense_root",
        "generation",
        "hits",
        "keys",
        "length",
        "offset",
        "parts",
        "reason",
        "root",
        "shards",
        "slab",
        "start",
        "tokens",
    )

    def __init__(
        self, keys: bytes, shards: Sequence[Shard], discard: Callable[[Sequence[int]], None]
    ) -> None:
        self.keys = keys
        self.shards = tuple(shards)
        self.reason = array("I")
        self.slab = array("I")
        self.offset = array("Q")
        self.length = array("Q")
        self.tokens = array("I")
        self.generation = array("I")
        self.root = array("Q")
        self.dense_length = array("Q")
        self.dense_root = array("Q")
        self.start = array("I")
        self.bases: dict[tuple[int, bytes], BasePlace] = {}
        self.hits = 0
        self.parts: list[LeasePart] = []
        self._discard = [discard]

    def __len__(self) -> int:
        """Entries."""
        return len(self.reason)

    def __repr__(self) -> str:
        return f"<Lease {self.hits} of {len(self.keys) // KEY_BYTES} keys, ids {self.ids}>"

    @property
    def ids(self) -> tuple[int, ...]:
        """The daemon's lease ids behind this lease; empty when nothing was leased."""
        return tuple(part.lease for part in self.parts if part.lease)

    @property
    def released(self) -> bool:
        return not self._discard

    def index(self, key: int, shard: int = 0) -> int:
        """Number of the entry of key number ``key`` and shard number ``shard``."""
        if not 0 <= key < len(self.keys) // KEY_BYTES or not 0 <= shard < len(self.shards):
            raise IndexError(f"no key {key}, shard {shard} in this lease")
        return key * len(self.shards) + shard

    def entry(self, key: int, shard: int = 0) -> Location:
        """Where a span lies.

        Raises:
            IndexError: there is no such entry.
            LookupError: that span is not leased; its reason is in ``reason``.
        """
        i = self.index(key, shard)
        if self.reason[i] != REASON_OK:
            raise LookupError(f"key {key}, shard {shard} is not leased: reason {self.reason[i]}")
        return Location(self.slab[i], self.offset[i], self.length[i], self.generation[i])

    def is_recipe(self, key: int, shard: int = 0) -> bool:
        """Whether an entry is a recipe, to be decoded: ``kmesh.store.read_span`` does."""
        return self.dense_length[self.index(key, shard)] > 0

    def release(self) -> None:
        """Gives every span back, without waiting for the daemon's answer."""
        try:
            discard = self._discard.pop()  # One of several threads gets it.
        except IndexError:
            return
        if self.ids:
            discard(self.ids)

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()

    def append(self, answer: spans_pb2.AcquireResponse, entries: int) -> None:
        """Adds what one message brought; ``entries`` is what it was asked for.

        Raises:
            ValueError: the arrays of the answer do not fit together.
        """
        # Protobuf would hand over thousands of numbers one by one.
        message = answer.SerializeToString()
        found = []
        recipes = bool(answer.dense_length or answer.bases)
        if bool(answer.start) != bool(self.start) and self.parts and entries:
            raise ValueError("an Acquire answer that says positions only here and there")
        said = (*_COLUMNS, *(_RECIPES if recipes else ()), *(_POSITIONS if answer.start else ()))
        for name, number, kind, zero in said:
            column = array(kind, zero * entries)
            count = _host.unpack_field(message, number, column, name.endswith("root"))
            if count != entries:
                raise ValueError(f"an Acquire answer without {entries} entries in every array")
            found.append((name, column))
        if not recipes:
            found += [(name, array(kind, zero * entries)) for name, _, kind, zero in _RECIPES]
        bases = {(base.shard, base.key): _place(base) for base in answer.bases}
        if any(not 0 <= shard < len(self.shards) for shard, _ in bases):
            raise ValueError("an Acquire answer with a base of no shard")
        self.parts.append(LeasePart(answer.lease, len(self), entries))
        self.bases.update(bases)
        for name, column in found:
            before = getattr(self, name)
            setattr(self, name, before + column if before else column)

    def fill(self) -> None:
        """Counts ``hits``; entries that were never asked for become misses."""
        missing = len(self.keys) // KEY_BYTES * len(self.shards) - len(self)
        if missing:
            self.reason.extend([REASON_MISS] * missing)
            for name, *_ in (*_COLUMNS[1:], *_RECIPES, *(_POSITIONS if self.start else ())):
                getattr(self, name).extend([0] * missing)
        first_miss = len(self.reason)
        # As bytes it is looked through in no time.
        if self.reason.tobytes().strip(b"\0"):
            first_miss = next(i for i, reason in enumerate(self.reason) if reason)
        self.hits = first_miss // len(self.shards)


def _place(base: spans_pb2.BasePlace) -> BasePlace:
    return BasePlace(
        key=base.key,
        slab=base.slab,
        offset=base.offset,
        length=base.length,
        generation=base.generation,
        root=base.root,
        tokens=base.tokens,
        position=base.position,
    )
