"""Which handles a session gets, as messages of ``kmesh.v1``."""

from __future__ import annotations

from collections.abc import Iterable

from kmesh.handles import Agreement, HandleKind, HandleRefusal, Offer, Preferences, Tier
from kmesh.v1 import common_pb2, sessions_pb2


def preferences(wanted: Preferences) -> list[sessions_pb2.HandlePreference]:
    """What a client says in Hello."""
    return [
        sessions_pb2.HandlePreference(
            tier=common_pb2.Tier.ValueType(tier),
            kinds=[common_pb2.HandleKind.ValueType(kind) for kind in kinds],
        )
        for tier, kinds in wanted.items()
    ]


def to_message(agreement: Agreement) -> common_pb2.TierHandles:
    """What the daemon says of a tier."""
    return common_pb2.TierHandles(
        tier=common_pb2.Tier.ValueType(agreement.tier),
        chosen=common_pb2.HandleKind.ValueType(agreement.chosen),
        offers=[
            common_pb2.HandleOffer(
                kind=common_pb2.HandleKind.ValueType(offer.kind),
                slabs=offer.slabs,
                spans=offer.spans,
                refusal=common_pb2.HandleRefusal.ValueType(offer.refusal or 0),
                text=offer.text,
            )
            for offer in agreement.offers
        ],
    )


def from_messages(messages: Iterable[common_pb2.TierHandles]) -> dict[Tier, Agreement]:
    """What a client heard; tiers that this version does not know are left out."""
    heard = {}
    for message in messages:
        if int(message.tier) in _TIERS:
            offers = tuple(_offer(offer) for offer in message.offers)
            heard[Tier(message.tier)] = Agreement(message.tier, offers)
    return heard


def known_kind(kind: int) -> bool:
    """Whether this version knows a kind by that number."""
    return kind in _KINDS


def kind_name(kind: int) -> str:
    """Name of a kind, or its number if this version does not know it."""
    return HandleKind(kind).name if known_kind(kind) else str(kind)


def describe(agreement: Agreement) -> str:
    """For people: ``DMA_BUF``, or ``MEMFD (DMA_BUF: why not)``."""
    chosen = kind_name(agreement.chosen) if agreement.chosen else "none"
    missed = agreement.fallback
    return f"{chosen} ({kind_name(missed.kind)}: {missed.text})" if missed else chosen


_TIERS = frozenset(int(tier) for tier in Tier)
_KINDS = frozenset(int(kind) for kind in HandleKind)
_REFUSALS = frozenset(int(refusal) for refusal in HandleRefusal)


def _offer(message: common_pb2.HandleOffer) -> Offer:
    refusal = None
    if message.refusal:
        # A reason that is newer than this version.
        known = message.refusal in _REFUSALS
        refusal = HandleRefusal(message.refusal) if known else HandleRefusal.UNKNOWN
    return Offer(message.kind, message.slabs, message.spans, refusal, message.text)
