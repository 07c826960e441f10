"""Fetch flights: a span is read from disk once, for everyone who wants it."""

from __future__ import annotations

import itertools
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from kmesh.layout import TILE_BYTES, tiles
from kmesh_spand.core.batch import Rows
from kmesh_spand.core.codes import Cause, Reason, Trouble
from kmesh_spand.core.config import CoreConfig, DiskConfig
from kmesh_spand.core.effects import DiskOutage, Fetch, Reply
from kmesh_spand.core.eviction import Evictor
from kmesh_spand.core.files import FileBook
from kmesh_spand.core.outage import Outage
from kmesh_spand.core.requests import Acquire
from kmesh_spand.core.results import Result
from kmesh_spand.core.sessions import Session, SessionBook
from kmesh_spand.core.states import FILE_KEYED, FILE_SHOWN, FileState, FileTrigger, State, Trigger
from kmesh_spand.core.store import SpanStore
from kmesh_spand.core.tags import scope

_U32 = 0xFFFF_FFFF


@dataclass(slots=True, eq=False)
class Arrival:
    """An Acquire that is answered when its spans have come.

    Attributes:
        left: flights that have not ended. held: spans in memory that it keeps there, as leases do.
    """

    session: Session
    event: Acquire
    left: dict[int, FetchFlight] = field(default_factory=dict)
    held: list[int] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class FetchFlight:
    """One fetch of one file.

    Attributes:
        row: of the file. host: of the span in memory, while the file is read.
        leader: who asked first of those that are still there; None: nobody is.
        asked: sessions that were told PENDING. arrivals: Acquires that wait.
    """

    id: int
    row: int
    leader: Session | None
    began_ms: int
    asked: dict[int, Session] = field(default_factory=dict)
    arrivals: dict[Arrival, None] = field(default_factory=dict)
    host: int = 0
    job: int = 0

    @property
    def sessions(self) -> Iterator[Session]:
        """Everyone who wants it, in the order in which they came, some twice."""
        return itertools.chain(self.asked.values(), (arrival.session for arrival in self.arrivals))


class Fetches:
    """Flights by the file that they fetch. ``acquire`` must be set before the first is asked for.

    Attributes:
        flights: by row of the file, the oldest first.
        jobs: flight by job in flight. arrivals: how many Acquires wait.
        acquire: answers an Acquire from what is in memory now.
        outage: whether the disk answers.
    """

    def __init__(
        self,
        config: DiskConfig,
        core: CoreConfig,
        store: SpanStore,
        book: FileBook,
        jobs: Iterator[int],
    ) -> None:
        self.flights: OrderedDict[int, FetchFlight] = OrderedDict()
        self.jobs: dict[int, FetchFlight] = {}
        self.arrivals = 0
        self.acquire: Callable[[Session, Acquire], Result]
        self.outage = Outage(config)
        self._config = config
        self._core = core
        self._store = store
        self._book = book
        self._job_ids = jobs
        self._evictor = Evictor(store, core.patience_ms)
        self._ids = itertools.count(1)
        self._waiting: OrderedDict[int, FetchFlight] = OrderedDict()
        self._by_host: dict[int, FetchFlight] = {}
        self._overtaken: list[int] = []
        # Of files that could not be fetched: how often, and until when they are left alone.
        self._held: dict[tuple[int, int], tuple[int, int]] = {}
        self._failures: dict[tuple[int, int], int] = {}

    # Asking

    def want(self, session: Session, row: int, arrival: Arrival | None = None) -> bool:
        """Join or start the flight of a file; False if it can't be fetched now."""
        state = FileState(self._book.table.state[row])
        if state in FILE_SHOWN and not self.outage.admits(self._store.now_ms):
            self._count("disk_outage_misses")
            return False
        if state is FileState.KEPT:
            if len(self.flights) >= self._config.max_wanted:
                return False
            self._book.move(row, FileTrigger.WANT)
            flight = FetchFlight(next(self._ids), row, session, self._store.now_ms)
            self.flights[row] = self._waiting[row] = flight
            self._count("disk_fetch_leads")
        elif state in (FileState.WANTED, FileState.READING):
            flight = self.flights[row]
            known = any(other is session for other in flight.sessions)
            if flight.leader is None:
                flight.leader = session
            elif not known or arrival is not None:
                self._count("disk_fetch_joins")
        else:
            return False
        if arrival is None:
            flight.asked[session.id] = session
        else:
            flight.arrivals[arrival] = None
            arrival.left[row] = flight
        return True

    def wait(self, session: Session, event: Acquire, rows: Rows, away: Rows | None) -> bool:
        """Keep an Acquire until its spans have come; False if there is nothing to wait for.

        Args:
            rows: of its entries, 0 where memory has nothing; ``away``: files of those.
        """
        store, table = self._store, self._store.table
        if session.waiting >= self._core.max_waits:
            return False
        arrival = Arrival(session, event)
        held = array("I")
        shards = len(event.shards)
        missed = False
        for entry, found in enumerate(rows):
            if event.prefix and missed and entry % shards == 0:
                break
            row = store.resolve(found)
            if not row:
                there = away[entry] if away is not None else 0
                missed |= not (there and self.want(session, there, arrival))
            elif table.state[row] == State.COMMITTED:
                held.append(row)
            elif row in self._by_host:
                self.want(session, self._by_host[row].row, arrival)
        if not arrival.left:
            return False
        if held:
            # What is here must not make room for what comes.
            store.pin(held)
            arrival.held.extend(held)
        session.arrivals[event.request] = arrival
        self.arrivals += 1
        self._count("disk_waits")
        return True

    def hurry(self, session: Session | None, request: int) -> None:
        """An Acquire has waited long enough."""
        arrival = session.arrivals.get(request) if session is not None else None
        if arrival is not None:
            self._count("disk_hurried")
            began = self.outage.late(self._store.now_ms)
            self._hurry(arrival)
            if began:
                self._count("disk_outages")
                self._store.out.append(DiskOutage(True))
                waiting = (each for flight in self.flights.values() for each in flight.arrivals)
                for other in dict.fromkeys(waiting):
                    self._hurry(other)

    def _hurry(self, arrival: Arrival) -> None:
        # Being told PENDING, it still wants what it no longer waits for.
        self._arrived(arrival)
        self._leave(arrival)

    @property
    def away(self) -> bool:
        """Whether the disk is treated as not there."""
        return self.outage.since_ms is not None

    def answered(self) -> None:
        """The disk has done something that it was asked to."""
        if self.outage.answered(self._store.now_ms, busy=bool(self.jobs)):
            self._store.out.append(DiskOutage(False))

    def closed(self, session: Session) -> None:
        """A session has ended: others lead its flights, or nobody does and they are not begun."""
        for arrival in list(session.arrivals.values()):
            del session.arrivals[arrival.event.request]
            self.arrivals -= 1
            self._leave(arrival)
            self._let_go(arrival)
        for flight in list(self.flights.values()):
            if flight.asked.pop(session.id, None) is not None or flight.leader is session:
                self._without(flight, session)

    def _leave(self, arrival: Arrival) -> None:
        flights, arrival.left = arrival.left, {}
        for flight in flights.values():
            del flight.arrivals[arrival]
            self._count("disk_fetch_leaves")
            self._without(flight, arrival.session)

    def _without(self, flight: FetchFlight, session: Session) -> None:
        """Somebody wants it no more: perhaps nobody does."""
        if any(other is session for other in flight.sessions):
            return
        if flight.leader is session:
            flight.leader = next(flight.sessions, None)
            if flight.leader is not None:
                self._count("disk_fetch_promotions")
        # One that is read already comes to be of use to others.
        if flight.leader is None and not flight.job:
            self._book.move(flight.row, FileTrigger.LEAVE)
            self._end(flight)

    def arriving(self, book: SessionBook) -> list[int]:
        """Rows that Acquires hold while they wait, as often as they do; for checks."""
        arrivals = (a for session in book.sessions.values() for a in session.arrivals.values())
        return [row for arrival in arrivals for row in arrival.held]

    # Reading

    def pump(self) -> None:
        """End what is settled otherwise, and start as many reads as may be in flight."""
        while self._overtaken:
            flight = self.flights.get(self._overtaken.pop())
            if flight is not None:
                self._end(flight)
        while self._waiting and len(self.jobs) < self._config.max_reads:
            self._start(next(iter(self._waiting.values())))

    def overtaken(self, row: int) -> None:
        """A span was stored while its file waited for its turn."""
        if row in self._waiting:
            del self._waiting[row]
            self._book.move(row, FileTrigger.LEAVE)
            self._overtaken.append(row)

    def _start(self, flight: FetchFlight) -> None:
        store, table, book = self._store, self._store.table, self._book
        span = book.span(flight.row)
        tenant = store.tenants.open(span.group, span.salt)
        where = scope(tenant.number, span.shard)
        if table.find(span.key, where):
            # It is here, or being written: who asks again is told.
            book.move(flight.row, FileTrigger.LEAVE)
            self._end(flight)
            return
        place: tuple[int, int, int] | Reason = Reason.CATALOG_FULL
        if not (
            table.place_for(span.key, where) is None
            or table.scopes.full(where)
            or table.spaces.full(span.namespace)
        ):
            place = self._evictor.place(tiles(span.length), tenant)
        if isinstance(place, Reason):
            self._count("disk_fetch_no_room")
            self._hold(flight.row)
            book.move(flight.row, FileTrigger.REFUSED)
            self._end(flight)
            return
        row, slab, tile = place
        store.name(row, span.key, where, span.namespace)
        table.generation[row] = table.generation[row] + 1 & _U32
        table.tokens[row], table.start[row] = span.tokens, span.start
        table.slab[row], table.tile[row] = slab, tile
        table.length[row], table.root[row] = span.length, span.root
        store.move(row, Trigger.FETCH)
        for tokens, key in reversed(span.names):
            if (
                not table.find(key, where)
                and table.place_for(key, where) is not None
                and self._evictor.make_row(tenant)
            ):
                store.alias(table.take_row(), row, key, tokens)
        book.move(flight.row, FileTrigger.FETCH)
        del self._waiting[flight.row]
        flight.host, flight.job = row, next(self._job_ids)
        self.jobs[flight.job] = self._by_host[row] = flight
        self.outage.started(store.now_ms)
        name = book.names[flight.row]
        store.out.append(Fetch(flight.job, name, slab, tile * TILE_BYTES, span))

    def fetched(self, job: int) -> None:
        """A file was read, and is what it was to be."""
        flight = self.jobs.pop(job, None)
        if flight is None:
            return
        self.answered()
        store, length = self._store, self._store.table.length[flight.host]
        del self._by_host[flight.host]
        self._failures.pop(self._which(flight.row), None)
        self._count("disk_fetched")
        self._count("disk_fetched_bytes", length)
        shared = max(len({id(other) for other in flight.sessions}) - 1, 0)
        self._count("disk_fetch_shared", shared)
        self._count("disk_fetch_shared_bytes", shared * length)
        self._book.move(flight.row, FileTrigger.FETCHED)
        store.move(flight.host, Trigger.FETCHED)
        for arrival in flight.arrivals:
            # Until all that it waits for is here.
            store.pin(array("I", [flight.host]))
            arrival.held.append(flight.host)
        self._end(flight)

    def failed(self, job: int, trouble: int) -> None:
        """A file could not be read, or does not hold what it should."""
        flight = self.jobs.pop(job, None)
        if flight is None:
            return
        if trouble == Trouble.LOST:
            self.outage.lost(busy=bool(self.jobs))
        else:
            self.answered()
        del self._by_host[flight.host]
        row, which = flight.row, self._which(flight.row)
        failures = self._failures.get(which, 0) + (trouble == Trouble.IO)
        self._count("disk_corrupt" if trouble == Trouble.BAD else "disk_fetch_failed")
        if trouble == Trouble.BAD or failures >= self._config.max_failures:
            self._failures.pop(which, None)
            self._held.pop(which, None)
            self._book.move(row, FileTrigger.BAD)
        else:
            self._failures[which] = failures
            self._hold(row)
            self._book.move(row, FileTrigger.REFUSED)
        self._store.move(flight.host, Trigger.FAILED, Cause.DISK)
        self._end(flight)

    def _end(self, flight: FetchFlight) -> None:
        """A flight is over, however it ended: who waited only for it is answered."""
        del self.flights[flight.row]
        self._waiting.pop(flight.row, None)
        for arrival in list(flight.arrivals):
            del arrival.left[flight.row]
            if not arrival.left:
                self._arrived(arrival)

    def _arrived(self, arrival: Arrival) -> None:
        session, event = arrival.session, arrival.event
        del session.arrivals[event.request]
        self.arrivals -= 1
        result = self.acquire(session, event)
        self._store.out.append(Reply(session.id, event.request, result))
        self._let_go(arrival)

    def _let_go(self, arrival: Arrival) -> None:
        if arrival.held:
            self._store.unpin(array("I", arrival.held))
            arrival.held.clear()

    # Files that could not be fetched

    def _which(self, row: int) -> tuple[int, int]:
        return row, self._book.table.generation[row]

    def _hold(self, row: int) -> None:
        times, _ = self._held.get(self._which(row), (0, 0))
        pause = min(self._config.hold_ms << min(times, 16), self._config.longest_hold_ms)
        self._held[self._which(row)] = times + 1, self._store.now_ms + pause

    def retry(self) -> None:
        """Files that were left alone long enough are found again."""
        table, now = self._book.table, self._store.now_ms
        for which, (_, until) in list(self._held.items()):
            row, generation = which
            there = table.generation[row] == generation and table.state[row] in FILE_KEYED
            if there and table.state[row] == FileState.HELD:
                if now >= until:
                    self._book.move(row, FileTrigger.RETRY)
            elif not there or now >= until + self._config.longest_hold_ms:
                # What did well for so long is no worse than others.
                del self._held[which]
                self._failures.pop(which, None)

    def _count(self, name: str, amount: int = 1) -> None:
        self._store.counters[name] += amount
