"""Flights of the fake daemon: as the daemon's, in host memory alone and without drains."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from google.protobuf.message import Message

from kmesh import errors
from kmesh.v1 import flights_pb2 as pb

#: Deaths of a flight's leaders after which nobody is promoted; seconds in which a key is remembered
#: whose leader died, and for which it is left alone after the second death, as the daemon has them.
_MAX_DEATHS = 2
_MEMORY, _HOLD, _LONGEST_HOLD = 60.0, 10.0, 600.0
#: Characters of a place.
_PLACE = 64

#: Answers an Await, or refuses it.
Reply = Callable[[Message | errors.RequestError], None]
#: Whether a key is stored in all of these shards, by their codes; whether it is or is on its way.
Known = Callable[[bytes, Sequence[int], bytes], bool]


@dataclass(eq=False, slots=True)
class _Wait:
    session: int
    first: int
    end: int
    shards: list[int]
    reply: Reply
    until: float
    number: int
    place: str


@dataclass(eq=False, slots=True)
class _Flight:
    """``keys`` [begin, end) are promised by the session ``leader``, 0 when it has computed all.

    ``computed`` is how far it is by its own word; ``last`` when it last went on, ``pause`` the
    longest between two such moments.
    """

    id: int
    salt: bytes
    keys: list[bytes]
    leader: int
    shards: list[int]
    began: float
    place: str
    last: float
    pause: float = 0.0
    computed: int = 0
    begin: int = 0
    end: int = 0
    frontier: int = 0
    deaths: int = 0
    waits: list[_Wait] = field(default_factory=list)


class FakeFlights:
    """Not thread-safe. ``clock`` is in seconds."""

    def __init__(self, stored: Known, pending: Known, clock: Callable[[], float]) -> None:
        self._stored = stored
        self._pending = pending
        self._clock = clock
        self._last = 0
        self.flights: dict[int, _Flight] = {}
        #: By salt and key: when its last leader died, and for how long it is left alone then.
        self._died: dict[tuple[bytes, bytes], tuple[float, float]] = {}

    def claim(
        self, session: int, keys: list[bytes], shards: list[int], salt: bytes, place: str
    ) -> pb.ClaimResponse:
        """Answers Claim."""
        _check_place(place, "claim.place")
        if not keys or len(set(keys)) < len(keys):
            raise errors.InvalidArgument("none, or one that occurs twice", field="claim.keys")
        if self._left_alone(salt, keys[0]):
            return pb.ClaimResponse(standing=pb.STANDING_NONE)
        if self._stored(keys[0], shards, salt):
            return pb.ClaimResponse(standing=pb.STANDING_STORED)
        held = {
            key: flight
            for flight in self.flights.values()
            if flight.salt == salt
            for key in flight.keys[flight.begin : flight.end]
        }
        flight = held.get(keys[0])
        if flight is None:
            count = next((i for i, key in enumerate(keys) if key in held), len(keys))
            self._last += 1
            mine = keys[:count]
            now = self._clock()
            made = _Flight(self._last, salt, mine, session, shards, now, place, now, end=count)
            self.flights[made.id] = made
            self._advance(made)
            return pb.ClaimResponse(
                standing=pb.STANDING_LEAD,
                flight=made.id,
                covered=count,
                progress=pb.FlightProgress(),
            )
        first = flight.keys.index(keys[0])
        if first < flight.frontier:
            return pb.ClaimResponse(standing=pb.STANDING_STORED)
        if flight.leader == session:
            return pb.ClaimResponse(standing=pb.STANDING_NONE)
        ours = flight.keys[first : flight.end]
        pairs = enumerate(zip(ours, keys, strict=False))
        covered = next((i for i, (a, b) in pairs if a != b), min(len(ours), len(keys)))
        return pb.ClaimResponse(
            standing=pb.STANDING_COMPUTING,
            flight=flight.id,
            first=first,
            covered=covered,
            ahead=first + covered - flight.frontier,
            progress=self._progress(flight, place),
        )

    def progress(self, session: int, body: pb.ProgressRequest) -> pb.ProgressResponse:
        """Answers Progress."""
        _check_place(body.place, "progress.place")
        flight = self.flights.get(body.flight)
        if flight is None:
            return pb.ProgressResponse()
        computed = min(flight.begin + body.computed, flight.end)
        if flight.leader == session and computed > flight.computed:
            flight.computed = computed
            self._went_on(flight)
        return pb.ProgressResponse(progress=self._progress(flight, body.place))

    def _progress(self, flight: _Flight, place: str) -> pb.FlightProgress:
        now = self._clock()
        return pb.FlightProgress(
            begin=flight.begin,
            landed=flight.frontier - flight.begin,
            computed=flight.computed - flight.begin,
            age_ms=int((now - flight.began) * 1000),
            quiet_ms=int((now - flight.last) * 1000),
            pause_ms=int(flight.pause * 1000),
            beside=bool(place) and place == flight.place,
        )

    def _went_on(self, flight: _Flight) -> None:
        now = self._clock()
        flight.pause, flight.last = max(flight.pause, now - flight.last), now

    def wait(
        self,
        session: int,
        body: pb.AwaitRequest,
        shards: list[int],
        reply: Reply,
        seconds: float,
    ) -> Message | None:
        """Answers Await, or keeps ``reply`` for later (None), for so many seconds."""
        _check_place(body.place, "await_flight.place")
        flight = self.flights.get(body.flight)
        if flight is None:
            return pb.AwaitResponse(arrival=pb.ARRIVAL_LANDED)
        end = body.first + body.covered
        if not body.covered or end > len(flight.keys):
            raise errors.InvalidArgument("not in the flight", field="await_flight.covered")
        if flight.leader == session or not max(body.first, flight.frontier) < min(end, flight.end):
            return pb.AwaitResponse(arrival=pb.ARRIVAL_LANDED)
        until = self._clock() + seconds
        flight.waits.append(
            _Wait(session, body.first, end, shards, reply, until, body.wait, body.place)
        )
        return None

    @property
    def next_deadline(self) -> float:
        """When ``expire`` has to be called next; infinity if nobody waits."""
        waits = [wait.until for flight in self.flights.values() for wait in flight.waits]
        return min(waits, default=math.inf)

    def expire(self) -> None:
        """Ends the waits whose deadline has passed."""
        now = self._clock()
        for flight in self.flights.values():
            for wait in [wait for wait in flight.waits if wait.until <= now]:
                flight.waits.remove(wait)
                wait.reply(errors.DeadlineExceeded("not done in time"))

    def leave(self, session: int, body: pb.LeaveRequest) -> pb.LeaveResponse:
        """Answers Leave."""
        flight = self.flights.get(body.flight)
        left = [
            wait
            for wait in (flight.waits if flight else ())
            if wait.session == session and body.wait in (0, wait.number)
        ]
        for wait in left:
            assert flight is not None
            flight.waits.remove(wait)
            wait.reply(_ended(pb.FLIGHT_CAUSE_LEFT))
        return pb.LeaveResponse(left=len(left))

    def land(self, session: int, body: pb.LandRequest) -> pb.LandResponse:
        """Answers Land."""
        flight = self.flights.get(body.flight)
        if flight is None or flight.leader != session:
            return pb.LandResponse(ended=False)
        if body.cause in (pb.FLIGHT_CAUSE_ABORTED, pb.FLIGHT_CAUSE_PREEMPTED):
            self._fail(flight, body.cause)
        else:
            flight.leader = 0
            self._cut(flight)
        return pb.LandResponse(ended=True)

    def closed(self, session: int) -> None:
        """A session has ended."""
        for flight in list(self.flights.values()):
            flight.waits = [wait for wait in flight.waits if wait.session != session]
            if flight.leader == session:
                self._fail(flight, pb.FLIGHT_CAUSE_CLOSED)

    def changed(self) -> None:
        """Spans were committed, or reservations ended."""
        for flight in list(self.flights.values()):
            self._advance(flight)
            if flight.id in self.flights and not flight.leader:
                self._cut(flight)

    def refused(self, key: bytes, salt: bytes) -> None:
        """There was no room for a key."""
        for flight in list(self.flights.values()):
            at = flight.keys.index(key) if key in flight.keys else -1
            if flight.salt == salt and flight.frontier <= at < flight.end:
                self._end_at(flight, at)

    def _advance(self, flight: _Flight) -> None:
        before = flight.frontier
        while flight.frontier < flight.end and self._stored(
            flight.keys[flight.frontier], flight.shards, flight.salt
        ):
            flight.frontier += 1
        if flight.frontier > before:
            self._went_on(flight)
        for wait in [wait for wait in flight.waits if wait.end <= flight.frontier]:
            flight.waits.remove(wait)
            wait.reply(pb.AwaitResponse(arrival=pb.ARRIVAL_LANDED))
        if flight.frontier >= flight.end:
            self._end(flight, pb.FLIGHT_CAUSE_NOT_STORED)

    def _cut(self, flight: _Flight) -> None:
        for at in range(flight.frontier, flight.end):
            if not self._pending(flight.keys[at], flight.shards, flight.salt):
                self._end_at(flight, at)
                return

    def _end_at(self, flight: _Flight, at: int) -> None:
        flight.end = at
        if flight.frontier >= at:
            self._end(flight, pb.FLIGHT_CAUSE_NOT_STORED)

    def _left_alone(self, salt: bytes, key: bytes) -> bool:
        at, seconds = self._died.get((salt, key), (0.0, 0.0))
        return self._clock() < at + seconds

    def _leader_died(self, salt: bytes, key: bytes) -> None:
        now = self._clock()
        at, seconds = self._died.get((salt, key), (-math.inf, 0.0))
        known = now < at + seconds + _MEMORY
        self._died[salt, key] = now, min(2 * seconds or _HOLD, _LONGEST_HOLD) if known else 0.0

    def _fail(self, flight: _Flight, cause: pb.FlightCause.ValueType) -> None:
        if cause == pb.FLIGHT_CAUSE_CLOSED:
            key = flight.keys[flight.frontier]
            flight.deaths += 1
            self._leader_died(flight.salt, key)
            if flight.deaths >= _MAX_DEATHS or self._left_alone(flight.salt, key):
                self._end(flight, pb.FLIGHT_CAUSE_BACK_OFF)
                return
        if not flight.waits:
            self._end(flight, cause)
            return
        wait = flight.waits.pop(0)
        flight.leader, flight.shards, flight.place = wait.session, wait.shards, wait.place
        flight.began = flight.last = self._clock()
        flight.pause = 0.0
        flight.begin = flight.frontier = flight.computed = wait.first
        flight.end = wait.end
        wait.reply(pb.AwaitResponse(arrival=pb.ARRIVAL_LEAD))
        self._advance(flight)

    def _end(self, flight: _Flight, cause: pb.FlightCause.ValueType) -> None:
        del self.flights[flight.id]
        for wait in flight.waits:
            landed = wait.first < flight.frontier
            wait.reply(pb.AwaitResponse(arrival=pb.ARRIVAL_LANDED) if landed else _ended(cause))


def _check_place(place: str, field: str) -> None:
    if len(place) > _PLACE:
        raise errors.InvalidArgument("too long", field=field)


def _ended(cause: pb.FlightCause.ValueType) -> pb.AwaitResponse:
    return pb.AwaitResponse(arrival=pb.ARRIVAL_ENDED, cause=cause)
