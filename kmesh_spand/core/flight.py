"""One flight: a run of keys that a session computes, and the requests that wait for it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import TypeAlias

from kmesh_spand.core.codes import FlightCause
from kmesh_spand.core.progress import Pace
from kmesh_spand.core.sessions import Session

#: Group of uids, salt and tier: whose keys a flight's are, as a ``Tenant``'s.
Who: TypeAlias = tuple[int, bytes, int]


class FlightState(IntEnum):
    """What a flight is. ``kmesh flights`` shows the names in lower case."""

    GONE = 0
    LED = 1
    LANDING = 2


class Turn(StrEnum):
    """What moves a flight from one state to another."""

    LEAD = "lead"
    PROMOTE = "promote"
    FINISH = "finish"
    LAND = "land"
    END = "end"


#: ``docs/states.md`` explains them.
FLIGHT_TRANSITIONS: dict[tuple[int, Turn], FlightState] = {
    (FlightState.GONE, Turn.LEAD): FlightState.LED,
    (FlightState.LED, Turn.PROMOTE): FlightState.LED,
    (FlightState.LED, Turn.FINISH): FlightState.LANDING,
    (FlightState.LED, Turn.LAND): FlightState.GONE,
    (FlightState.LED, Turn.END): FlightState.GONE,
    (FlightState.LANDING, Turn.LAND): FlightState.GONE,
    (FlightState.LANDING, Turn.END): FlightState.GONE,
}


@dataclass(slots=True, eq=False)
class Waiter:
    """An Await that is not answered: for keys [first, end) of its flight.

    ``shards`` are the codes in which its session would store, if it came to lead, and ``place``
    what it would compute on; ``number`` is the session's own for it.
    """

    session: Session
    request: int
    flight: Flight
    first: int
    end: int
    shards: tuple[int, ...]
    number: int = 0
    place: str = ""


@dataclass(slots=True, eq=False)
class Flight:
    """The present leader has promised keys [begin, promised), of which those from ``end`` on will
    not be stored; those before ``frontier`` have landed.

    A key has landed when the leader's session, or any other, has stored it in every shard in
    which the leader stores; it stays so for the flight, also when it is evicted.

    Attributes:
        id: unique in an epoch.
        who: whose keys these are.
        keys: 32 bytes each, in chain order; never change, so that positions keep their meaning.
        at: position of each key.
        leader: None once it has computed all.
        shards: codes in which the leader stores; bit i of ``left`` is shard i.
        left: for each key, the shards in which it is still to be stored.
        tokens, sizes: of each key as far as it was stored; bytes over all shards.
        shared: tokens and bytes of the keys [0, i) that have landed, for each i up to frontier.
        pace: of the present leader.
        place: what it computes on, by its own word, or empty.
        cause: why its end was cut back, or what its leader said.
        deaths: leaders whose session ended.
        waiters: by (session, request), in order of arrival.
    """

    id: int
    who: Who
    keys: tuple[bytes, ...]
    at: dict[bytes, int]
    leader: Session | None
    shards: tuple[int, ...]
    pace: Pace
    place: str = ""
    begin: int = 0
    end: int = 0
    promised: int = 0
    state: FlightState = FlightState.GONE
    left: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    frontier: int = 0
    shared: list[tuple[int, int]] = field(default_factory=list)
    cause: FlightCause = FlightCause.NOT_STORED
    deaths: int = 0
    waiters: OrderedDict[tuple[int, int], Waiter] = field(default_factory=OrderedDict)
    _by_end: dict[int, dict[tuple[int, int], Waiter]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        count = len(self.keys)
        self.left = [(1 << len(self.shards)) - 1] * count
        self.tokens, self.sizes = [0] * count, [0] * count
        self.shared = [(0, 0)] * (count + 1)

    def move(self, turn: Turn) -> None:
        """The only way in which its state changes; KeyError would be a bug."""
        self.state = FLIGHT_TRANSITIONS[self.state, turn]

    @property
    def complete(self) -> bool:
        """Whether nothing of what was promised is still to land."""
        return self.frontier >= self.end

    def promise(self, begin: int, end: int, shards: tuple[int, ...], masks: Sequence[int]) -> None:
        """A leader promises keys [begin, end).

        Args:
            masks: for each of these keys the shards, as bits, in which it is not stored.
        """
        for at, mask in zip(range(begin, end), masks, strict=True):
            if self.left[at]:
                self.left[at], self.tokens[at], self.sizes[at] = mask, 0, 0
        self.begin, self.end, self.promised, self.shards = begin, end, end, shards
        self.frontier = begin
        for at in range(begin):
            tokens, size = self.shared[at]
            landed = not self.left[at]
            self.shared[at + 1] = tokens + self.tokens[at] * landed, size + self.sizes[at] * landed

    def stored(self, key: bytes, shard: int, tokens: int, size: int) -> None:
        """A key is stored in a shard."""
        i = self.at[key]
        bit = 1 << self.shards.index(shard) if shard in self.shards else 0
        if self.left[i] & bit:
            self.left[i] &= ~bit
            self.tokens[i] = tokens
            self.sizes[i] += size

    def advance(self) -> list[Waiter]:
        """Moves the frontier as far as keys have landed; takes out the waiters it has reached."""
        before = at = self.frontier
        while at < self.end and not self.left[at]:
            at += 1
        if at == before:
            return []
        for i in range(before, at):
            tokens, size = self.shared[i]
            self.shared[i + 1] = tokens + self.tokens[i], size + self.sizes[i]
        self.frontier = at
        reached: list[Waiter] = []
        for end in range(before + 1, at + 1):
            reached.extend(self._by_end.pop(end, {}).values())
        for waiter in reached:
            del self.waiters[waiter.session.id, waiter.request]
        return reached

    def gained(self, waiter: Waiter) -> tuple[int, int]:
        """Tokens and bytes of what a waiter waited for that have landed, in an unbroken run."""
        reached = max(min(waiter.end, self.frontier), waiter.first)
        if waiter.first > self.frontier:
            return 0, 0
        tokens, size = self.shared[reached]
        before = self.shared[waiter.first]
        return tokens - before[0], size - before[1]

    # Waiters

    def join(self, waiter: Waiter) -> None:
        """One more waits."""
        name = waiter.session.id, waiter.request
        self.waiters[name] = waiter
        self._by_end.setdefault(waiter.end, {})[name] = waiter

    def leave(self, waiter: Waiter) -> None:
        """One waits no longer."""
        name = waiter.session.id, waiter.request
        del self.waiters[name]
        same = self._by_end[waiter.end]
        del same[name]
        if not same:
            del self._by_end[waiter.end]

    @property
    def waiting(self) -> dict[int, int]:
        """How many wait for the keys before each end."""
        return {end: len(waiters) for end, waiters in self._by_end.items()}

    def overtaken(self) -> list[Waiter]:
        """Takes out those who wait for nothing that the present leader promised."""
        found = [
            waiter
            for end in self._by_end
            if end <= self.begin
            for waiter in self._by_end[end].values()
        ]
        for waiter in found:
            self.leave(waiter)
        return found
