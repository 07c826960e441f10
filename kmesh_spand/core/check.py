"""What must always hold inside a core; for tests, and too slow for anything else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from kmesh.layout import tiles
from kmesh_spand.core.allocator import QUARANTINE, Slab
from kmesh_spand.core.flight import Flight, FlightState
from kmesh_spand.core.flights import Flights
from kmesh_spand.core.policy import LRU
from kmesh_spand.core.s3fifo import S3FIFO
from kmesh_spand.core.sessions import SessionBook
from kmesh_spand.core.states import EVICTABLE, KEYED, STORED, State
from kmesh_spand.core.store import SpanStore
from kmesh_spand.core.verify import Verifier
from kmesh_spand.core.writing import Writing

_ENDING = (State.DOOMED, State.RETIRED)
_LEASED = (State.COMMITTED, State.SUSPECT, *_ENDING)


def check(
    store: SpanStore,
    book: SessionBook,
    writing: Writing,
    verifier: Verifier,
    waiting: int,
    arriving: Sequence[int] = (),
) -> None:
    """Raise AssertionError unless every ledger is exact.

    Args:
        waiting: recovered records that are not placed yet; they hold rows.
        arriving: rows that Acquires hold which are not answered yet.
    """
    _check_rows(store, waiting)
    _check_ranges(store)
    _check_tenants(store)
    _check_leases(store, book, arriving)
    _check_jobs(store, book, writing, verifier)


def check_flights(flights: Flights, book: SessionBook) -> None:
    """Raise AssertionError unless flights, their leaders and those who wait fit together."""
    for number, flight in flights.by_id.items():
        assert flight.id == number
        _check_flight(flights, flight, book)
    by_key = flights.promises.by_key
    promised = {(who, key): flight for who, held in by_key.items() for key, flight in held.items()}
    assert all(by_key.values())
    assert promised == {
        (flight.who, key): flight
        for flight in flights.by_id.values()
        for key in flight.keys[flight.begin : flight.end]
    }
    led = sum(flight.leader is not None for flight in flights.by_id.values())
    assert sum(len(session.flights) for session in book.sessions.values()) == led
    waiting = sum(len(flight.waiters) for flight in flights.by_id.values())
    assert sum(len(session.waits) for session in book.sessions.values()) == waiting


def _check_flight(flights: Flights, flight: Flight, book: SessionBook) -> None:
    assert 0 <= flight.begin <= flight.frontier < flight.end <= flight.promised
    assert flight.promised <= len(flight.keys)
    assert flight.left[flight.frontier], "the frontier did not advance"
    assert not any(flight.left[flight.begin : flight.frontier])
    sums = [(0, 0)]
    for at in range(flight.frontier):
        landed = not flight.left[at]
        tokens, size = flight.tokens[at] * landed, flight.sizes[at] * landed
        sums.append((sums[-1][0] + tokens, sums[-1][1] + size))
    assert flight.shared[: flight.frontier + 1] == sums
    pace = flight.pace
    assert flight.begin <= pace.computed <= flight.promised
    assert pace.began_ms <= pace.last_ms
    assert pace.pause_ms <= pace.last_ms - pace.began_ms
    assert flight.state is not FlightState.GONE
    assert (flight.leader is not None) == (flight.state is FlightState.LED)
    if flight.leader is not None:
        assert book.sessions[flight.leader.id] is flight.leader
        assert flight.leader.flights[flight.id] is flight
    else:
        for at in range(flight.frontier, flight.end):
            fits = not flight.left[at] or flights.promises.pending(flight, at)
            assert fits, "it would never land"
    for (session, request), waiter in flight.waiters.items():
        assert waiter.flight is flight
        assert waiter.session is book.sessions[session]
        assert waiter.session.waits[request] is waiter
        assert waiter.session is not flight.leader, "a leader waits for itself"
        assert 0 <= waiter.first < waiter.end <= len(flight.keys)
        assert waiter.end > flight.frontier
    ends = Counter(waiter.end for waiter in flight.waiters.values())
    assert flight.waiting == ends


def _check_rows(store: SpanStore, waiting: int) -> None:
    table = store.table
    rows = range(1, table.rows + 1)
    states = Counter(State(table.state[row]) for row in rows)
    for state in State:
        if state not in (State.FREE, State.ALIAS):
            assert store.by_state[state] == states[state], state
    free = set(table.free_rows())
    assert len(free) == len(table.free_rows())
    assert all(table.state[row] == State.FREE for row in free)
    assert states[State.FREE] == len(free) + waiting
    keyed = [row for row in rows if table.state[row] in {*KEYED, State.ALIAS}]
    assert sorted(table.entries()) == keyed
    assert table.keyed == len(keyed)
    for row in keyed:
        assert table.find(table.key_of(row), table.scopes.value(table.scope[row])) == row
        owner = store.tenant_of(store.resolve(row))
        assert table.scopes.value(table.scope[row]) >> 64 == owner.number
    aliases = [(row, alias) for row in rows for alias in store.aliases(row)]
    assert len(aliases) == states[State.ALIAS]
    for row, alias in aliases:
        assert table.state[row] in KEYED
        assert table.state[alias] == State.ALIAS
        assert store.resolve(alias) == row
        assert table.tokens[alias] < table.tokens[row]
    stored = [row for row in rows if table.state[row] in STORED]
    assert store.stored_bytes == sum(table.length[row] for row in stored)
    spans = Counter(table.space[row] for row in stored)
    assert store.space_spans == spans
    for space in spans:
        size = sum(table.length[row] for row in stored if table.space[row] == space)
        assert store.space_bytes[space] == size
    used = [row for row in rows if table.state[row] != State.FREE]
    for interner, column in ((table.scopes, table.scope), (table.spaces, table.space)):
        holders = Counter(column[row] for row in used)
        assert {number: interner.holders(number) for number, _ in interner} == holders
    published = [row for row in rows if table.state[row] == State.COMMITTED]
    assert store.published == len(published) + sum(
        1 for row in published for _ in store.aliases(row)
    )


def _check_ranges(store: SpanStore) -> None:
    table = store.table
    owned: dict[int, list[tuple[int, int, int]]] = {number: [] for number in store.slabs}
    for row in range(1, table.rows + 1):
        if table.state[row] not in (State.FREE, State.ALIAS):
            owned[table.slab[row]].append((table.tile[row], tiles(table.length[row]), row))
    for number, start, count in store.quarantine:
        owned[number].append((start, count, QUARANTINE))
    for number, slab in store.slabs.items():
        _check_slab(slab, owned[number])
        assert slab.sealed == (number in store.sealed)
        assert slab.used or not slab.sealed, "an empty sealed slab was not given up"
    assert not store.given_up.keys() & store.slabs.keys()


def _check_slab(slab: Slab, owned: list[tuple[int, int, int]]) -> None:
    expected = [0] * slab.tiles
    for start, count, owner in owned:
        assert not any(expected[start : start + count]), "ranges overlap"
        assert start + count <= slab.tiles
        expected[start : start + count] = [owner] * count
    assert slab.owner.tolist() == expected
    assert slab.used == slab.tiles - expected.count(0)
    free = [False] * slab.tiles
    for start, count in slab.free_ranges():
        assert not any(free[start : start + count])
        free[start : start + count] = [True] * count
        assert start == 0 or expected[start - 1], "free neighbours did not coalesce"
        end = start + count
        assert end == slab.populated or expected[end], "free neighbours did not coalesce"
    for tile in range(slab.tiles):
        assert free[tile] == (not expected[tile] and tile < slab.populated and not slab.sealed)
    assert slab.largest == max((count for _, count in slab.free_ranges()), default=0)


def _check_tenants(store: SpanStore) -> None:
    table, tenants = store.table, list(store.tenants)
    assert len({tenant.number for tenant in tenants}) == len(tenants)
    owned = {number: tenant for tenant in tenants for number in tenant.slabs}
    assert sum(len(tenant.slabs) for tenant in tenants) == len(owned) == store.tenants.owned
    assert store.tenants.owners == sum(bool(tenant.slabs) for tenant in tenants)
    assert sorted(store.wipes.values()) == [
        number for number, slab in sorted(store.slabs.items()) if not slab.clean and not slab.lost
    ]
    for number, slab in store.slabs.items():
        assert slab.tenant is owned.get(number)
        if slab.tenant is None:
            assert not slab.used
        else:
            assert slab.clean
            assert slab.group == slab.tenant.group
            assert slab.tier == slab.tenant.tier
    held = [r for r in range(1, table.rows + 1) if table.state[r] not in (State.FREE, State.ALIAS)]
    for tenant in tenants:
        assert store.tenants.find(tenant.group, tenant.salt, tenant.tier) is tenant
        mine = [row for row in held if store.tenant_of(row) is tenant]
        assert tenant.tiles == sum(tiles(table.length[row]) for row in mine)
        assert not tenant.quota or tenant.tiles <= tenant.quota
        mine = [row for row in mine if table.state[row] in STORED]
        assert tenant.spans == len(mine)
        assert tenant.stored_bytes == sum(table.length[row] for row in mine)
        spaces: dict[int, list[int]] = {}
        for row in mine:
            counts = spaces.setdefault(table.space[row], [0, 0])
            counts[0] += 1
            counts[1] += table.length[row]
        assert tenant.spaces == spaces


def _check_leases(store: SpanStore, book: SessionBook, arriving: Sequence[int]) -> None:
    table = store.table
    pins = Counter(arriving)
    for lease in book.leases.values():
        held = [row for row in lease.rows if row]
        pins.update(held)
        assert lease.spans == len(held) > 0
        assert lease.size == sum(table.length[row] for row in held)
        assert book.sessions[lease.session.id].leases[lease.id] is lease
    for row in range(1, table.rows + 1):
        assert table.pins[row] == pins[row]
        if pins[row]:
            assert table.state[row] in _LEASED
        elif table.state[row] in _ENDING and row not in store.holds:
            raise AssertionError("a doomed or retired span outlived what held it")
    assert store.pinned == len(pins)
    assert store.leased_bytes == sum(table.length[row] for row in pins)
    evictable = [
        row
        for row in range(1, table.rows + 1)
        if table.state[row] in EVICTABLE and not table.pins[row] and row not in store.holds
    ]
    assert store.evictable == len(evictable)
    for tenant in store.tenants:
        mine = [row for row in evictable if store.tenant_of(row) is tenant]
        assert tenant.evictable == len(mine)
        assert all(0 < rows <= store.table.rows for rows in tenant.passed.values())
        if type(tenant.order) in (LRU, S3FIFO):
            assert sorted(tenant.order.victims()) == mine
    for session in book.sessions.values():
        leases, reservations = session.leases.values(), session.reservations.values()
        assert session.leased_spans == sum(lease.spans for lease in leases)
        assert session.leased_bytes == sum(lease.size for lease in leases)
        assert session.reserved_bytes == sum(item.length for item in reservations)
    assert sum(len(s.leases) for s in book.sessions.values()) == len(book.leases)
    assert sum(len(s.reservations) for s in book.sessions.values()) == len(book.reservations)


def _check_jobs(store: SpanStore, book: SessionBook, writing: Writing, verifier: Verifier) -> None:
    states = store.table.state
    expected = {State.RESERVED: set[int](), State.COPYING: set[int](), State.ORPHANED: set[int]()}
    for item in book.reservations.values():
        expected[State.RESERVED if item.commit is None else State.COPYING].add(item.row)
    flying = {item.row for item in writing.copies.values()}
    assert len(flying) == len(writing.copies)
    assert expected[State.COPYING] <= flying
    expected[State.ORPHANED] = flying - expected[State.COPYING]
    expected[State.VERIFYING] = {
        row for row in verifier.jobs.values() if states[row] != State.SUSPECT
    }
    waiting = verifier.waiting()
    for tier, rows in waiting.items():
        assert not rows or verifier.full(tier), "nothing would start it"
        assert all(store.slabs[store.table.slab[row]].tier == tier for row in rows)
    waiting_rows = set().union(*waiting.values())
    expected[State.RECOVERED] = {row for row in waiting_rows if states[row] == State.RECOVERED}
    expected[State.SUSPECT] = waiting_rows - expected[State.RECOVERED]
    expected[State.SUSPECT] |= set(verifier.jobs.values()) - expected[State.VERIFYING]
    for state, rows in expected.items():
        found = {row for row in range(1, store.table.rows + 1) if states[row] == state}
        assert found == rows, state
    copies = Counter(item.session.id for item in writing.copies.values())
    for session in book.sessions.values():
        assert session.copies == copies[session.id]
        assert not session.closed
