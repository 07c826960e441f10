"""Which faults a chaos run has, and when: all of it follows from the seed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

#: How the daemon of a run is made: sealed slabs, two GPUs, or two uids that are kept apart.
SHAPES = ("hardened", "gpus", "uids")
#: Seconds between two faults, in the mean.
GAP = 0.8

_RUDE = ("garbage", "half_closed", "slow", "flood", "hoard", "noise")
#: Kind, target, how many of it in each deck, and the least and most seconds that it lasts.
_CARDS: tuple[tuple[str, str, int, float, float], ...] = (
    ("kill", "client", 9, 0, 0),
    ("stop", "client", 5, 0.2, 3),
    ("kill", "control", 4, 0, 0),
    ("stop", "control", 3, 0.2, 8),
    ("kill", "worker", 4, 0, 0),
    ("stop", "worker", 3, 0.2, 9),
    ("stop", "supervisor", 2, 0.2, 3),
    ("kill", "daemon", 1, 0, 0),
    ("restart", "daemon", 1, 0, 0),
    ("flip", "payload", 6, 0, 0),
    ("flip", "sums", 2, 0, 0),
    ("flip", "record", 2, 0, 0),
    ("damage", "file", 3, 0, 0),
    ("fault", "disk-read", 1, 0.5, 3),
    ("fault", "disk-write", 1, 0.5, 3),
    ("fault", "disk-full", 1, 0.5, 3),
    ("fault", "disk-slow", 1, 0.5, 3),
    ("files", "client", 2, 0.5, 2),
    ("files", "control", 1, 0.5, 2),
    ("files", "worker", 1, 0.5, 2),
    ("files", "supervisor", 1, 0.5, 2),
    ("memory", "worker", 1, 0.5, 2),
    ("file_size", "control", 1, 0.5, 2),
    ("fault", "forward", 1, 0.5, 3),
    ("fault", "back", 1, 0.5, 3),
    ("fault", "policy", 1, 0.5, 2),
    ("fault", "order", 1, 0.5, 2),
    ("fault", "mapping", 1, 0.5, 2),
    ("fault", "space", 1, 0.5, 2),
    *(("rude", what, 2, 0.3, 3) for what in _RUDE),
    ("operator", "evict", 2, 0, 0),
    ("operator", "drain", 1, 0.3, 2),
)
_GPU_CARDS = (
    ("kill", "gpu0", 2, 0.0, 0.0),
    ("kill", "gpu1", 1, 0.0, 0.0),
    ("stop", "gpu0", 1, 0.2, 3.0),
    ("stop", "gpu1", 1, 0.2, 3.0),
)


#: Ways to the next daemon that keep the memory: any death, where a store has its descriptors.
_STORED_CARDS = (("kill", "daemon", 1, 0.0, 0.0), ("restart", "daemon", 2, 0.0, 0.0))
_UPGRADE_CARDS = (("upgrade", "daemon", 3, 0.0, 0.0),)


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault.

    Attributes:
        at: seconds from the run's start.
        kind: what is done. target: to whom, or what of it.
        seconds: how long it lasts; 0: it is done at once.
        draw: decides what is left to decide, such as the place of a flipped bit.
    """

    number: int
    at: float
    kind: str
    target: str
    seconds: float
    draw: int

    @property
    def name(self) -> str:
        return f"{self.kind} {self.target.rstrip('0123456789')}"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def shape_of(seed: int) -> str:
    return SHAPES[seed % len(SHAPES)]


def is_stored(seed: int) -> bool:
    """Whether a stand-in for systemd keeps the daemon's memory; such a daemon has no upgrades."""
    return seed % 2 == 0


def schedule(seed: int, seconds: float, shape: str, clients: int) -> Iterator[Fault]:
    """The faults of a run, in order.

    They are dealt from shuffled decks, so that each kind comes in every deck. The run has no
    faults in its last fifth or its last five seconds, whichever is less: then it recovers.
    """
    rng = random.Random(f"chaos/{seed}")
    ways = _STORED_CARDS if is_stored(seed) else _UPGRADE_CARDS
    cards = [*_CARDS, *ways, *(_GPU_CARDS if shape == "gpus" else ())]
    at, number, last = GAP, 0, seconds - min(seconds / 5, 5)
    while True:
        deck = [card for card in cards for _ in range(card[2])]
        rng.shuffle(deck)
        for kind, target, _, least, most in deck:
            number += 1
            if target == "client":
                target = f"client{rng.randrange(clients)}"
            lasts = round(rng.uniform(least, most), 2)
            draw = rng.getrandbits(48)
            if at > last:
                return
            yield Fault(number, round(at, 2), kind, target, lasts, draw)
            at += min(rng.expovariate(1 / GAP), 4 * GAP)
