"""Typed, exportable references to slabs and spans, and what was agreed on them."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType


class HandleKind(enum.IntEnum):
    """What a file descriptor is; numbers as ``kmesh.v1.HandleKind``."""

    MEMFD = 1
    CUDA_VMM_FD = 2
    DMA_BUF = 3


class Tier(enum.IntEnum):
    """Where memory lies; numbers as ``kmesh.v1.Tier``."""

    HOST = 1
    GPU = 2


class HandleRefusal(enum.IntEnum):
    """Why a kind is not given; numbers as ``kmesh.v1.HandleRefusal``."""

    NOT_ALLOWED = 1
    NO_TIER = 2
    NO_DEVICE = 3
    NO_ACCESS = 4
    SIZE_LIMIT = 5
    NO_MEMORY = 6
    SEALED = 7
    UNKNOWN = 8


@dataclass(frozen=True, slots=True)
class Handle:
    """A slab as it is exported. The holder of a Handle owns ``fd`` and closes it.

    Attributes:
        kind: what ``fd`` is.
        fd: an open file descriptor.
        size: bytes behind it.
        device: UUID of the GPU that the memory is on, or for; empty for host memory.
        in_host: it is memory of the host that CUDA made for that GPU.
    """

    kind: HandleKind
    fd: int
    size: int
    device: str = ""
    in_host: bool = False


@dataclass(frozen=True, slots=True)
class SpanHandle(Handle):
    """One span's pages: ``length`` bytes of payload from the first byte on, in ``size`` bytes."""

    length: int = 0


@dataclass(frozen=True, slots=True)
class Location:
    """A span inside a slab: ``length`` bytes at ``offset``, as of ``generation``."""

    slab: int
    offset: int
    length: int
    generation: int


#: Kinds for each tier, best first.
Preferences = Mapping[Tier, Sequence[HandleKind]]

#: What every client can use.
COMMON: Preferences = MappingProxyType({Tier.HOST: (HandleKind.MEMFD,), Tier.GPU: ()})


@dataclass(frozen=True, slots=True)
class Offer:
    """What becomes of one kind in one tier.

    Attributes:
        kind: number of a ``HandleKind``; one that this version does not know stays a number.
        slabs, spans: whole slabs, or single spans, are given so.
        refusal: why slabs are not; None where they are.
        text: one sentence on that.
    """

    kind: int
    slabs: bool = False
    spans: bool = False
    refusal: HandleRefusal | None = None
    text: str = ""


@dataclass(frozen=True, slots=True)
class Agreement:
    """What was agreed for one tier: ``offers`` are best first, as the client named them."""

    tier: int
    offers: tuple[Offer, ...]

    @property
    def chosen(self) -> int:
        """The first kind in which slabs are given, 0 if there is none."""
        return next((offer.kind for offer in self.offers if offer.slabs), 0)

    @property
    def fallback(self) -> Offer | None:
        """The best kind, where it was asked for and another, or none, was chosen."""
        first = self.offers[0] if self.offers else None
        return first if first is not None and not first.slabs else None


def agree(tier: int, kinds: Sequence[int], offered: Sequence[Offer]) -> Agreement:
    """Puts what is offered in the order of who asks.

    Args:
        kinds: best first; those that nobody offers are refused.
        offered: all that the daemon has to say on this tier.
    """
    known = {offer.kind: offer for offer in offered}
    refusal, text = HandleRefusal.UNKNOWN, "not a kind of this tier"
    if not offered:
        refusal, text = HandleRefusal.NO_TIER, "the daemon has no memory of this tier"
    strange = Offer(0, refusal=refusal, text=text)
    return Agreement(
        tier,
        tuple(
            known.get(kind) or Offer(kind, refusal=strange.refusal, text=strange.text)
            for kind in dict.fromkeys(kinds)
        ),
    )
