"""Claim, Await, Leave, Land, Progress: one session computes what several want, others wait."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

from kmesh_spand.core.batch import KEY_BYTES
from kmesh_spand.core.checks import check_claim, check_flight_shards, check_place, invalid
from kmesh_spand.core.codes import Arrival, Cause, Code, FlightCause, Standing
from kmesh_spand.core.config import CoreConfig
from kmesh_spand.core.deaths import Deaths
from kmesh_spand.core.effects import Reply
from kmesh_spand.core.flight import Flight, FlightState, Turn, Waiter
from kmesh_spand.core.progress import Pace
from kmesh_spand.core.promises import Promises
from kmesh_spand.core.requests import AskProgress, Await, Claim, Land, Leave
from kmesh_spand.core.results import (
    AwaitResult,
    ClaimResult,
    LandResult,
    LeaveResult,
    Progress,
    ProgressResult,
    Refused,
    Result,
)
from kmesh_spand.core.sessions import Session
from kmesh_spand.core.store import SpanStore
from kmesh_spand.core.tenants import Tenant

_LAND_CAUSES = (
    FlightCause.DONE,
    FlightCause.ABORTED,
    FlightCause.PREEMPTED,
    FlightCause.NOT_STORED,
)
#: Names of the counters of flights that did not land, by cause.
ENDED: dict[FlightCause, str] = {
    cause: f"flight_ended_{cause.name.lower()}"
    for cause in FlightCause
    if cause not in (FlightCause.DONE, FlightCause.LEFT)
}
#: Deaths of a flight's leaders after which nobody is promoted any more.
_MAX_DEATHS = 2


class Flights:
    """All flights, by number and by key. The store tells it what becomes of spans (``Watch``).

    Attributes:
        by_id: every flight that is not gone.
        promises: which flight has promised a key.
        draining: nothing new will be stored, so nobody leads.
        deaths: keys whose leaders died.
    """

    def __init__(self, config: CoreConfig, store: SpanStore) -> None:
        self._config = config
        self._store = store
        self._ids: Iterator[int] = itertools.count(1)
        self.by_id: dict[int, Flight] = {}
        self.promises = Promises(store)
        self.draining = False
        self.deaths = Deaths(
            config.death_memory_ms, config.hold_ms, config.longest_hold_ms, config.remembered_deaths
        )

    def __len__(self) -> int:
        return len(self.by_id)

    # Requests

    def claim(self, session: Session, event: Claim) -> Result:
        """Who computes these keys: the caller itself if nobody does."""
        if refused := check_claim(event, self._config):
            return refused
        keys = [event.keys[i : i + KEY_BYTES] for i in range(0, len(event.keys), KEY_BYTES)]
        at = {key: i for i, key in enumerate(keys)}
        if len(at) < len(keys):
            return invalid("keys", "one occurs twice")
        self._count("flight_claims")
        shards = tuple(event.shards)
        who = session.group, event.salt, event.tier
        if self.draining or self.deaths.held(who, keys[0], self._store.now_ms):
            return ClaimResult(Standing.NONE)
        if not self.promises.missing(who, keys[:1], shards)[0]:
            return ClaimResult(Standing.STORED)
        held = self.promises.held(who)
        flight = held.get(keys[0])
        if flight is not None:
            return self._standing(session, flight, keys, event.place)
        count = next((i for i, key in enumerate(keys) if key in held), len(keys))
        if not self._may_lead(session, count):
            return Refused(Code.EXHAUSTED, "the session leads too many flights", "keys")
        mine = tuple(keys[:count])
        flight = Flight(
            next(self._ids),
            who,
            mine,
            {key: at[key] for key in mine},
            session,
            shards,
            Pace(0, self._store.now_ms),
            event.place,
        )
        flight.move(Turn.LEAD)
        self.by_id[flight.id] = session.flights[flight.id] = flight
        self._promise(flight, 0, count, shards)
        self._count("flight_leads")
        return ClaimResult(Standing.LEAD, flight.id, covered=count)

    def _standing(
        self, session: Session, flight: Flight, keys: list[bytes], place: str
    ) -> ClaimResult:
        first = flight.at[keys[0]]
        if first < flight.frontier:
            return ClaimResult(Standing.STORED)
        if flight.leader is session:
            return ClaimResult(Standing.NONE)
        ours = flight.keys[first : flight.end]
        covered = next(
            (i for i, (a, b) in enumerate(zip(ours, keys, strict=False)) if a != b),
            min(len(ours), len(keys)),
        )
        return ClaimResult(
            Standing.COMPUTING,
            flight.id,
            first,
            covered,
            ahead=first + covered - flight.frontier,
            progress=self._progress(flight, place),
        )

    def wait(self, session: Session, event: Await) -> Result | None:
        """Wait for a flight; None when the answer comes later."""
        if refused := check_flight_shards(event.shards, self._config) or check_place(event.place):
            return refused
        flight = self.by_id.get(event.flight)
        if flight is None or flight.who[0] != session.group:
            # Gone: the caller finds out by another look what it has left behind.
            return AwaitResult(Arrival.LANDED)
        end = event.first + event.covered
        if event.covered < 1 or not 0 <= event.first < end <= len(flight.keys):
            return invalid("covered", f"not within the flight's {len(flight.keys)} keys")
        if flight.leader is session or not max(event.first, flight.frontier) < min(end, flight.end):
            # Nothing to wait for: promoted meanwhile, stored, or given up.
            return AwaitResult(Arrival.LANDED)
        if session.waiting >= self._config.max_waits:
            limit = self._config.max_waits
            return Refused(Code.EXHAUSTED, f"a session waits for at most {limit}", "flight")
        shards = tuple(event.shards)
        waiter = Waiter(
            session, event.request, flight, event.first, end, shards, event.wait, event.place
        )
        session.waits[event.request] = waiter
        flight.join(waiter)
        self._count("flight_joins")
        return None

    def leave(self, session: Session, event: Leave) -> Result:
        """End waits of the session; they are answered."""
        left = [
            waiter
            for waiter in session.waits.values()
            if waiter.flight.id == event.flight
            and event.only in (0, waiter.request)
            and event.wait in (0, waiter.number)
        ]
        for waiter in left:
            waiter.flight.leave(waiter)
            self._answer(waiter, AwaitResult(Arrival.ENDED, FlightCause.LEFT))
        self._count("flight_leaves", len(left))
        return LeaveResult(len(left))

    def land(self, session: Session, event: Land) -> Result:
        """The leader's own end of its flight."""
        if event.cause not in _LAND_CAUSES:
            return invalid("cause", "not one that a leader ends by")
        flight = session.flights.get(event.flight)
        if flight is None:
            return LandResult(False)
        if event.cause in (FlightCause.ABORTED, FlightCause.PREEMPTED):
            self._fail(flight, FlightCause(event.cause))
        else:
            self._finish(flight, FlightCause.NOT_STORED)
        return LandResult(True)

    def progress(self, session: Session, event: AskProgress) -> Result:
        """How far a flight is. Its leader says so, others ask."""
        if refused := check_place(event.place):
            return refused
        flight = self.by_id.get(event.flight)
        if flight is None or flight.who[0] != session.group:
            return ProgressResult(None)
        if flight.leader is session:
            computed = min(flight.begin + event.computed, flight.end)
            if computed > flight.pace.computed:
                flight.pace.computed = computed
                flight.pace.went_on(self._store.now_ms)
        return ProgressResult(self._progress(flight, event.place))

    def _progress(self, flight: Flight, place: str) -> Progress:
        pace, now = flight.pace, self._store.now_ms
        return Progress(
            flight.begin,
            flight.frontier - flight.begin,
            pace.computed - flight.begin,
            now - pace.began_ms,
            now - pace.last_ms,
            pace.pause_ms,
            beside=bool(place) and place == flight.place,
        )

    # What else ends a flight

    def closed(self, session: Session) -> None:
        """A session has ended: so do its waits, and others lead its flights."""
        for waiter in list(session.waits.values()):
            waiter.flight.leave(waiter)
        session.waits.clear()
        for flight in list(session.flights.values()):
            self._fail(flight, FlightCause.CLOSED)

    def drain(self) -> None:
        """Nothing new is stored from now on; what is on its way still lands."""
        self.draining = True
        for flight in list(self.by_id.values()):
            if flight.state is FlightState.LED:
                self._finish(flight, FlightCause.DRAINING)

    def stored(self, row: int) -> None:
        """A span is committed."""
        table = self._store.table
        for flight, key, shard, name in self.promises.touched(row):
            flight.stored(key, shard, table.tokens[name], table.length[row])
            self._advance(flight)

    def gone(self, row: int, cause: Cause) -> None:
        """A name is about to go. One that was being written will not be written again."""
        for flight, key, shard, _ in self.promises.touched(row):
            if shard not in flight.shards:
                continue
            at = flight.at[key]
            landed = not flight.left[at] >> flight.shards.index(shard) & 1
            # While somebody leads, the end of a reservation says nothing: an engine that dies
            # loses its workers' reservations before or after its flight.
            if not landed and (flight.state is FlightState.LANDING or cause is Cause.COPY_FAILED):
                self._cut(flight, at)

    def refused(self, session: Session, tenant: Tenant, key: bytes) -> None:
        """A session's Reserve found no room for a key."""
        flight = self.promises.find(tenant, key)
        if flight is not None and flight.leader is not None:
            at = flight.at[key]
            if at >= flight.frontier and flight.leader.same_engine(session):
                self._cut(flight, at)

    def _cut(self, flight: Flight, at: int) -> None:
        """Keys from here on will not be stored by this flight."""
        self.promises.take_back(flight, at, flight.end)
        flight.end = max(at, flight.frontier)
        if flight.complete:
            self._end(flight, flight.cause)
            return
        for waiter in [w for w in flight.waiters.values() if w.first >= flight.end]:
            flight.leave(waiter)
            self._answer(waiter, AwaitResult(Arrival.ENDED, FlightCause.NOT_STORED))

    def _finish(self, flight: Flight, cause: FlightCause) -> None:
        """The leader stores nothing more: what is neither stored nor pending is given up."""
        self._let_go(flight)
        flight.cause = cause
        flight.move(Turn.FINISH)
        for at in range(flight.frontier, flight.end):
            if flight.left[at] and not self.promises.pending(flight, at):
                self._cut(flight, at)
                return

    def _fail(self, flight: Flight, cause: FlightCause) -> None:
        """The leader failed: the first waiter that can go on does."""
        self._let_go(flight)
        if cause is FlightCause.CLOSED:
            key, now = flight.keys[flight.frontier], self._store.now_ms
            flight.deaths += 1
            self.deaths.add(flight.who, key, now)
            if flight.deaths >= _MAX_DEATHS or self.deaths.held(flight.who, key, now):
                self._end(flight, FlightCause.BACK_OFF)
                return
        while flight.waiters:
            waiter = next(iter(flight.waiters.values()))
            if not self._may_lead(waiter.session, waiter.end - waiter.first):
                flight.leave(waiter)
                self._answer(waiter, AwaitResult(Arrival.ENDED, cause))
            elif self._promote(flight, waiter):
                return
        self._end(flight, cause)

    def _promote(self, flight: Flight, waiter: Waiter) -> bool:
        """Lets a waiter lead, or look again if that leaves it nothing to do."""
        flight.leave(waiter)
        self.promises.take_back(flight, flight.begin, flight.end)
        self._promise(flight, waiter.first, waiter.end, waiter.shards)
        if flight.complete:
            self._answer(waiter, AwaitResult(Arrival.LANDED))
            return False
        flight.move(Turn.PROMOTE)
        flight.pace, flight.place = Pace(flight.begin, self._store.now_ms), waiter.place
        flight.leader = session = waiter.session
        session.flights[flight.id] = flight
        self._count("flight_promotions")
        self._answer(waiter, AwaitResult(Arrival.LEAD))
        # A leader never waits for itself.
        for other in [w for w in session.waits.values() if w.flight is flight]:
            flight.leave(other)
            self._answer(other, AwaitResult(Arrival.LANDED))
        for other in flight.overtaken():
            self._answer(other, AwaitResult(Arrival.LANDED))
        return True

    def _promise(self, flight: Flight, begin: int, end: int, shards: tuple[int, ...]) -> None:
        """A leader's keys; fewer if others have promised some of them meanwhile."""
        end = self.promises.add(flight, begin, end)
        masks = self.promises.missing(flight.who, flight.keys[begin:end], shards)
        flight.promise(begin, end, shards, masks)
        self._told(flight, flight.advance())

    def _end(self, flight: Flight, cause: FlightCause | None) -> None:
        """A flight is gone: landed (None), or for this cause. All who wait are answered."""
        self._let_go(flight)
        self.promises.take_back(flight, flight.begin, flight.end)
        del self.by_id[flight.id]
        flight.move(Turn.LAND if cause is None else Turn.END)
        self._count("flight_landed" if cause is None else ENDED[cause])
        waiters = list(flight.waiters.values())
        for waiter in waiters:
            flight.leave(waiter)
        for waiter in waiters:
            tokens, size = flight.gained(waiter)
            if cause is None or tokens:
                self._shared(waiter, tokens, size)
            else:
                self._answer(waiter, AwaitResult(Arrival.ENDED, cause))

    def _advance(self, flight: Flight) -> None:
        before = flight.frontier
        self._told(flight, flight.advance())
        if flight.frontier > before:
            flight.pace.went_on(self._store.now_ms)
        if flight.complete:
            self._end(flight, None if flight.end == flight.promised else flight.cause)

    # Parts

    def _may_lead(self, session: Session, keys: int) -> bool:
        led = sum(flight.promised - flight.begin for flight in session.flights.values())
        return (
            len(session.flights) < self._config.max_flights
            and led + keys <= self._config.max_flight_keys
        )

    def _told(self, flight: Flight, reached: Iterable[Waiter]) -> None:
        for waiter in reached:
            self._shared(waiter, *flight.gained(waiter))

    def _shared(self, waiter: Waiter, tokens: int, size: int) -> None:
        """A waiter finds what it waited for: so much did not have to be computed again."""
        self._count("flight_shared")
        self._count("flight_shared_tokens", tokens)
        self._count("flight_shared_bytes", size)
        self._answer(waiter, AwaitResult(Arrival.LANDED))

    def _answer(self, waiter: Waiter, result: AwaitResult) -> None:
        """Tells a waiter, which its flight has forgotten already, unless its session is gone."""
        if waiter.session.waits.pop(waiter.request, None) is not None:
            self._store.out.append(Reply(waiter.session.id, waiter.request, result))

    def _let_go(self, flight: Flight) -> None:
        if flight.leader is not None:
            del flight.leader.flights[flight.id]
            flight.leader = None

    def _count(self, name: str, amount: int = 1) -> None:
        self._store.counters[name] += amount
