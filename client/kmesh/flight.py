"""Flights as a client sees them: who computes spans that nobody has stored yet."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from kmesh.layout import Shard


class Standing(enum.IntEnum):
    """What a claim found; numbers as ``kmesh.v1.Standing``."""

    LEAD = 1
    COMPUTING = 2
    STORED = 3
    NONE = 4


class Arrival(enum.IntEnum):
    """How a wait ended; numbers as ``kmesh.v1.Arrival``."""

    LANDED = 1
    LEAD = 2
    ENDED = 3


class FlightCause(enum.IntEnum):
    """Why a flight, or a wait for one, ended; numbers as ``kmesh.v1.FlightCause``."""

    UNKNOWN = 0
    DONE = 1
    ABORTED = 2
    PREEMPTED = 3
    NOT_STORED = 4
    CLOSED = 5
    BACK_OFF = 6
    DRAINING = 7
    LEFT = 8

    @classmethod
    def _missing_(cls, value: object) -> FlightCause:
        """A cause that this client is too old for."""
        return cls.UNKNOWN


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a flight is.

    Attributes:
        begin: position in the flight of its present leader's first key.
        landed: keys that this leader has landed, from there on.
        computed: … that it has computed, as far as it has said so.
        age_ms: since it began.
        quiet_ms: since either number last rose, or it began.
        pause_ms: the longest that both stood still until then.
        beside: it computes on what the caller named as its own place.
    """

    begin: int = 0
    landed: int = 0
    computed: int = 0
    age_ms: int = 0
    quiet_ms: int = 0
    pause_ms: int = 0
    beside: bool = False


@dataclass(frozen=True, slots=True)
class Claim:
    """The answer to a claim of keys.

    Attributes:
        standing: LEAD: compute and store, the flight is yours. COMPUTING: another session does.
            STORED: the first key is there by now, look again. NONE: compute, and tell nobody.
        flight: its number, unique in an epoch; 0 unless LEAD or COMPUTING.
        first: position of the first claimed key in the flight.
        covered: leading keys that the flight brings.
        ahead: keys that have yet to land until all of those have (COMPUTING).
        shards, place: as claimed.
        progress: of the flight (LEAD, COMPUTING).
    """

    standing: Standing
    flight: int
    first: int
    covered: int
    ahead: int
    shards: tuple[Shard, ...]
    place: str = ""
    progress: Progress = Progress()


@dataclass(frozen=True, slots=True)
class Arrived:
    """The end of a wait.

    Attributes:
        arrival: LANDED: look again. LEAD: the leader failed and the flight is yours. ENDED:
            nothing came of it, compute.
        cause: why, for ENDED.
    """

    arrival: Arrival
    cause: FlightCause
