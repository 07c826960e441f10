"""A request's part in compute flights."""

from __future__ import annotations

import enum
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

from kmesh.flight import Arrival, Arrived, Claim, FlightCause, Progress, Standing
from kmesh.session import Session


class Role(enum.Enum):
    """A request's part in flights.

    ::

        CLAIMING ──▶ LEADING          WAITING ──landed──▶ no part: look again
            ├──────▶ WAITING ────────────┼──promoted──▶ LEADING
            └──────▶ ALONE ◀─────────────┘
    """

    CLAIMING = enum.auto()
    WAITING = enum.auto()
    LEADING = enum.auto()
    ALONE = enum.auto()


@dataclass(eq=False, slots=True)
class Part:
    """What a request does about the spans that it misses.

    Attributes:
        session: that was asked; the part ends with it.
        keys: of those spans.
        found, limit: tokens that were there when it was asked, and those that are of use.
        version: of the index then.
        since: when it began to claim or to wait.
        deadline: when it waits no longer for the answer to its claim.
        future: of that answer, or of the flight's end.
        claim: the answer.
        far: how far the flight is, by what the daemon said last; far_at: when it did.
        asked: of the question how far it is, while one is open.
        told: keys that this engine said it had computed.
        wait: the number of its wait.
        think: when to think again about waiting on.
        landing: when it first saw that something had landed.
        settled: steps that were planned behind the end of its prompt.
    """

    role: Role
    session: Session
    keys: tuple[bytes, ...]
    found: int
    limit: int
    version: int
    since: float
    deadline: float
    future: Future[Claim] | Future[Arrived]
    claim: Claim | None = None
    far: Progress = field(default_factory=Progress)
    far_at: float = 0.0
    asked: Future[Progress | None] | None = None
    told: int = 0
    wait: int = 0
    think: float = 0.0
    landing: float | None = None
    settled: int = 0


def give_back(
    session: Session, flight: int = 0
) -> Callable[[Future[Claim] | Future[Arrived]], None]:
    """Ends a flight that comes to a request that is gone."""

    def done(future: Future[Claim] | Future[Arrived]) -> None:
        if future.exception() is not None:
            return
        answer = future.result()
        if isinstance(answer, Claim):
            if answer.standing is Standing.LEAD:
                session.land(answer.flight, FlightCause.ABORTED)
        elif answer.arrival is Arrival.LEAD:
            session.land(flight, FlightCause.ABORTED)

    return done
