"""Who is connected, and what each of them holds."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kmesh_spand.core.fetches import Arrival
    from kmesh_spand.core.flight import Flight, Waiter


@dataclass(slots=True, eq=False)
class Lease:
    """One Acquire's hold on spans.

    Attributes:
        rows: a row for each entry of the answer (trailing misses cut off), 0 for none.
        spans, size: how many entries hold a span, and their payload bytes.
    """

    id: int
    session: Session
    rows: array[int]
    spans: int
    size: int


@dataclass(slots=True, eq=False)
class PendingCommit:
    """A Commit whose copies have not all ended."""

    session: int
    request: int
    reasons: list[int]
    left: int


@dataclass(slots=True, eq=False)
class Reservation:
    """A range that a session may fill once. ``commit`` is set while its copy is in flight."""

    id: int
    session: Session
    row: int
    length: int
    commit: PendingCommit | None = None
    entry: int = 0


@dataclass(slots=True, eq=False)
class Session:
    """One connection. ``copies`` counts jobs that read its staging, also after its end.

    ``hits``, ``misses`` and ``pending`` count entries of Acquire, ``reasons`` those of Reserve and
    Commit that were not OK, ``committed`` its spans that became visible. ``flights`` are those that
    it leads, ``waits`` its Awaits by request, ``arrivals`` its Acquires that wait for the disk.
    """

    id: int
    uid: int
    engine: str
    role: int
    group: int
    leases: dict[int, Lease] = field(default_factory=dict)
    leased_spans: int = 0
    leased_bytes: int = 0
    reservations: dict[int, Reservation] = field(default_factory=dict)
    reserved_bytes: int = 0
    copies: int = 0
    hits: int = 0
    misses: int = 0
    pending: int = 0
    reasons: dict[int, int] = field(default_factory=dict)
    committed: int = 0
    committed_bytes: int = 0
    flights: dict[int, Flight] = field(default_factory=dict)
    waits: dict[int, Waiter] = field(default_factory=dict)
    arrivals: dict[int, Arrival] = field(default_factory=dict)
    closed: bool = False

    @property
    def waiting(self) -> int:
        """Requests that are answered when something has come."""
        return len(self.waits) + len(self.arrivals)

    def refused(self, reason: int) -> None:
        """One entry of Reserve or Commit was not OK."""
        self.reasons[reason] = self.reasons.get(reason, 0) + 1

    def same_engine(self, other: Session) -> bool:
        """Whether both are the same session or belong to one engine of one user."""
        return self is other or (
            self.engine != "" and self.engine == other.engine and self.uid == other.uid
        )


class SessionBook:
    """All open sessions, their leases and reservations, by id. Ids are unique in an epoch."""

    def __init__(self) -> None:
        self.sessions: dict[int, Session] = {}
        self.leases: dict[int, Lease] = {}
        self.reservations: dict[int, Reservation] = {}
        self._last = 0

    def _next(self) -> int:
        self._last += 1
        return self._last

    def lease(self, session: Session, rows: array[int], spans: int, size: int) -> Lease:
        """A new lease; its rows must be pinned by the caller."""
        end = len(rows)
        while end and not rows[end - 1]:
            end -= 1
        lease = Lease(self._next(), session, rows[:end], spans, size)
        self.leases[lease.id] = session.leases[lease.id] = lease
        session.leased_spans += spans
        session.leased_bytes += size
        return lease

    def end_lease(self, lease: Lease) -> None:
        """Forget a lease; its rows must be unpinned by the caller."""
        session = lease.session
        del self.leases[lease.id], session.leases[lease.id]
        session.leased_spans -= lease.spans
        session.leased_bytes -= lease.size

    def reserve(self, session: Session, row: int, length: int) -> Reservation:
        """A new reservation of a row."""
        reservation = Reservation(self._next(), session, row, length)
        self.reservations[reservation.id] = session.reservations[reservation.id] = reservation
        session.reserved_bytes += length
        return reservation

    def end_reservation(self, reservation: Reservation) -> None:
        """Forget a reservation, committed or not."""
        session = reservation.session
        del self.reservations[reservation.id], session.reservations[reservation.id]
        session.reserved_bytes -= reservation.length
