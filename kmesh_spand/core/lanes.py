"""What waits to be made a recipe, or dense again: each tier has its own."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from kmesh_spand.core.config import CoreConfig
from kmesh_spand.core.family import Family
from kmesh_spand.core.store import SpanStore


@dataclass(frozen=True, slots=True)
class Candidate:
    """A dense span, of that generation, that may be worth a recipe. ``member``: the name of one
    that has it, of which more may be known by the time that its turn comes."""

    row: int
    generation: int
    family: Family
    member: str


@dataclass(slots=True)
class Lane:
    """One tier's.

    Attributes:
        encodes, densifies: jobs in flight.
        ready: what is to be looked at, by row and number of the family.
        again: what a job was for that has failed.
        wishes: mirrors that wait to be made dense: generation, and whether they may be dropped.
    """

    encodes: int = 0
    densifies: int = 0
    ready: OrderedDict[tuple[int, int], Candidate] = field(default_factory=OrderedDict)
    again: list[Candidate] = field(default_factory=list)
    wishes: OrderedDict[int, tuple[int, bool]] = field(default_factory=OrderedDict)

    def next(self) -> Candidate:
        """What comes first of those that wait for a recipe."""
        return self.again.pop() if self.again else self.ready.popitem(last=False)[1]


class Lanes:
    """All tiers'. One whose worker is down keeps its own waiting, and no others.

    Attributes:
        draining: nothing new begins in any.
    """

    def __init__(self, config: CoreConfig, store: SpanStore) -> None:
        self._config = config
        self._store = store
        self._of_tier: dict[int, Lane] = {}
        self.draining = False

    def of(self, row: int) -> Lane:
        """That of a row with a range."""
        return self.of_tier(self._store.tier_of(row))

    def of_tier(self, tier: int) -> Lane:
        """That of a tier."""
        return self._of_tier.setdefault(tier, Lane())

    def offer(self, candidate: Candidate) -> None:
        """A span is to be looked at."""
        lane = self.of(candidate.row)
        name = candidate.row, candidate.family.id
        known = lane.ready.get(name)
        if known is None or known.generation != candidate.generation:
            lane.ready[name] = candidate

    def to_densify(self) -> Lane | None:
        """One with a wish that may be fulfilled now."""
        return self._first(lambda lane: bool(lane.wishes) and self.may_densify(lane))

    def to_encode(self) -> Lane | None:
        """One with a candidate that may be encoded now."""
        return self._first(lambda lane: bool(lane.again or lane.ready) and self._may_encode(lane))

    def may_densify(self, lane: Lane) -> bool:
        """Whether it has fewer such jobs in flight than it may have."""
        return lane.densifies < self._config.max_densify

    def _may_encode(self, lane: Lane) -> bool:
        return lane.encodes < self._config.max_encodes

    def idle(self, tier: int) -> bool:
        """Whether a tier could encode more than is known to wait there."""
        lane = self.of_tier(tier)
        return self._may_encode(lane) and not (lane.again or lane.ready)

    def _first(self, good: Callable[[Lane], bool]) -> Lane | None:
        return next((lane for lane in self._of_tier.values() if good(lane)), None)

    def check(self, encodes: list[int], densifies: list[int]) -> None:
        """AssertionError unless these rows' jobs are those that are counted; for tests."""
        for tier, lane in self._of_tier.items():
            assert lane.encodes == sum(self._store.tier_of(row) == tier for row in encodes)
            assert lane.densifies == sum(self._store.tier_of(row) == tier for row in densifies)
            assert lane.encodes <= self._config.max_encodes
            assert lane.densifies <= self._config.max_densify
