"""What must always hold of the disk tier inside a core; for tests."""

from __future__ import annotations

from kmesh_spand.core.disk import Disk
from kmesh_spand.core.diskfile import BLOCK_BYTES, file_bytes
from kmesh_spand.core.files import FileBook
from kmesh_spand.core.sessions import SessionBook
from kmesh_spand.core.states import (
    FILE_EVICTABLE,
    FILE_KEYED,
    FILE_SHOWN,
    FILE_STORED,
    FileState,
    State,
)
from kmesh_spand.core.store import SpanStore
from kmesh_spand.core.tags import scope


def check_disk(disk: Disk, store: SpanStore, sessions: SessionBook) -> None:
    """Raise AssertionError unless files, their names, their room and their flights fit together."""
    _check_files(disk.book)
    _check_names(disk.book, store)
    _check_flights(disk, store, sessions)


def _check_files(book: FileBook) -> None:
    table = book.table
    rows = [r for r in range(1, table.rows + 1) if table.state[r] not in (0, FileState.ALIAS)]
    for state in FileState:
        if state not in (FileState.GONE, FileState.ALIAS):
            assert book.by_state[state] == sum(table.state[row] == state for row in rows), state
    assert book.used == sum(table.tile[row] for row in rows) <= book.capacity
    assert book.payload == sum(table.length[row] for row in rows)
    removing = {row for row in rows if table.state[row] == FileState.REMOVING}
    going = book.removals.rows
    assert set(going) == removing
    assert len(going) == len(removing)
    flying = book.removals.flying
    assert flying == min(len(going) + book.removals.strays, book.config.max_removals)
    assert len(book.removals.names) == len(going) + book.removals.strays
    assert {book.names[row] for row in going} <= book.removals.names
    assert book.freeing == sum(table.tile[row] for row in removing)
    for tenant in book.tenants.values():
        mine = [row for row in rows if book.tenant_of(row) is tenant]
        assert tenant.files == len(mine) > 0
        assert tenant.blocks == sum(table.tile[row] for row in mine if row not in removing)
        assert not tenant.quota or tenant.blocks <= tenant.quota
        stored = [row for row in mine if table.state[row] in FILE_STORED]
        assert tenant.spaces == {
            space: [
                sum(table.space[row] == space for row in stored),
                sum(table.length[row] for row in stored if table.space[row] == space),
            ]
            for space in {table.space[row] for row in stored}
        }
        evictable = [row for row in mine if table.state[row] in FILE_EVICTABLE]
        assert tenant.evictable == len(evictable)
        covered = [row for row in evictable if book.order.covered(row)]
        assert sorted(tenant.covered.victims()) == covered
        assert sorted(tenant.order.victims()) == sorted(set(evictable) - set(covered))
    losers = [tenant.blocks for tenant in book.tenants.values() if tenant.evictable]
    largest = book.largest
    assert (largest.blocks if largest else None) == max(losers, default=None)
    for row in rows:
        names = list(book.aliases(row))
        assert all(table.tile[name] == row for name in names)
        size = file_bytes(table.length[row], len(names))
        # A name that somebody else has is left out, after the file was measured.
        assert table.tile[row] * BLOCK_BYTES >= size


def _check_names(book: FileBook, store: SpanStore) -> None:
    table, published = book.table, 0
    keyed = {r for r in range(1, table.rows + 1) if table.state[r] in FILE_KEYED}
    aliases = {a for row in keyed for a in book.aliases(row)}
    assert aliases == {r for r in range(1, table.rows + 1) if table.state[r] == FileState.ALIAS}
    assert set(table.entries()) == keyed | aliases
    for row in keyed | aliases:
        file = book.resolve(row)
        tenant, shard, key = book.tenant_of(file), book.shard(row), table.key_of(row)
        assert book.find(tenant.group, tenant.salt, key, shard) == row
        there = store.tenants.find(tenant.group, tenant.salt)
        host = store.table.find(key, scope(there.number, shard)) if there else 0
        state = store.table.state[store.resolve(host)]
        shown = book.shown(row)
        published += shown
        assert shown <= (table.state[file] in FILE_SHOWN)
        if table.state[file] in FILE_SHOWN and state != State.SUSPECT:
            assert shown == (state != State.COMMITTED)
        if row in keyed and table.state[file] in FILE_EVICTABLE:
            # What is only being stored is not known yet.
            own = host if store.table.state[host] != State.ALIAS else 0
            assert book.order.covered(row) >= (store.table.state[own] == State.COMMITTED)
            assert own or not book.order.covered(row)
    assert book.published == published


def _check_flights(disk: Disk, store: SpanStore, sessions: SessionBook) -> None:
    fetches, table = disk.fetches, disk.book.table
    rows = range(1, table.rows + 1)
    wanted = {row for row in rows if table.state[row] == FileState.WANTED}
    reading = {row for row in rows if table.state[row] == FileState.READING}
    assert set(fetches.flights) == wanted | reading
    assert {flight.row for flight in fetches.jobs.values()} == reading
    assert len(reading) <= disk.config.max_reads
    assert not wanted or len(reading) == disk.config.max_reads, "nothing would start it"
    hosts = {flight.host for flight in fetches.jobs.values()}
    states = store.table.state
    assert hosts == {r for r in range(1, store.table.rows + 1) if states[r] == State.FETCHING}
    waiting = 0
    for row, flight in fetches.flights.items():
        assert flight.row == row
        there = list(flight.sessions)
        assert all(sessions.sessions[session.id] is session for session in there)
        assert flight.leader in there or (flight.leader is None and not there)
        assert flight.leader is not None or flight.job, "nobody wants it"
        for arrival in flight.arrivals:
            assert arrival.left[row] is flight
            assert arrival.session.arrivals[arrival.event.request] is arrival
    for session in sessions.sessions.values():
        waiting += len(session.arrivals)
        for arrival in session.arrivals.values():
            assert arrival.left, "nothing would answer it"
            assert all(fetches.flights[row] is flight for row, flight in arrival.left.items())
    assert fetches.arrivals == waiting
    written = {row for row in rows if table.state[row] in (FileState.WRITING, FileState.ABANDONED)}
    assert set(disk.writes.values()) == written
    assert len(disk.writes) == len(written) <= disk.config.max_writes
