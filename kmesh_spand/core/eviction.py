"""Making room: which spans must go so that a range of some length is free."""

from __future__ import annotations

from collections.abc import Iterator

from kmesh.layout import tiles
from kmesh_spand.core.codes import Reason
from kmesh_spand.core.states import EVICTABLE
from kmesh_spand.core.store import SpanStore

#: Most victims that are looked at for one allocation.
MAX_TRIES = 256


class Evictor:
    """Finds room in a store's slabs, evicting only what lets the request succeed.

    Args:
        patience_ms: how long after a slab last grew more growth is expected.
    """

    def __init__(self, store: SpanStore, patience_ms: int) -> None:
        self._store = store
        self._patience_ms = patience_ms
        self._cursor = 1

    def victims(self) -> Iterator[int]:
        """Rows that may be evicted, in the policy's order; at most ``MAX_TRIES``.

        A policy that raises, names what may not go, or names nothing although something may
        go, is counted and replaced by a plain walk over the table.
        """
        store = self._store
        if not store.evictable:
            return
        given, fault = 0, False
        try:
            for tried, row in enumerate(store.policy.victims()):
                if tried == MAX_TRIES:
                    break
                if store.may_evict(row):
                    given += 1
                    if not fault:
                        store.policy_faults = (0, 0)
                    yield row
                else:
                    fault = True
        except Exception:
            fault = True
        if fault or not given:
            store.policy_failed()
            yield from self._walk()

    def _walk(self) -> Iterator[int]:
        store, states = self._store, self._store.table.state
        given, end = 0, store.table.rows + 1
        for begin, stop in ((self._cursor, end), (1, min(self._cursor, end))):
            for row in range(begin, stop):
                if states[row] in EVICTABLE and store.may_evict(row):
                    self._cursor = row + 1
                    given += 1
                    yield row
                    if given == MAX_TRIES:
                        return

    def place(self, count: int) -> tuple[int, int, int] | Reason:
        """A free row that owns ``count`` tiles: (row, slab, first tile), or why there is none.

        Nothing is evicted unless the answer is a place.
        """
        store = self._store
        if count > max((slab.tiles for slab in store.slabs.values()), default=count):
            return Reason.TOO_LARGE
        if all(slab.largest < count for slab in store.slabs.values()):
            if self._will_grow(count):
                return Reason.NOT_READY
            window = self.plan(count)
            if window is None:
                store.place_failed()
                return Reason.POOL_FULL
            for row in window:
                store.evict(row)
        if not self.make_row():
            return Reason.NOT_READY if store.grace else Reason.CATALOG_FULL
        row = store.table.take_row()
        for number, slab in store.slabs.items():
            start = slab.allocate(count, row)
            if start is not None:
                store.place_failures = (0, 0)
                return row, number, start
        raise AssertionError(f"no range of {count} tiles where one was made")

    def _will_grow(self, count: int) -> bool:
        """Whether waiting, rather than evicting, may give ``count`` tiles."""
        store = self._store
        return (
            store.grace
            or not store.slabs
            or any(
                slab.populated < slab.tiles
                and slab.tiles >= count
                and store.now_ms - store.grew_ms[number] < self._patience_ms
                for number, slab in store.slabs.items()
            )
        )

    def make_row(self) -> bool:
        """Have a free row, evicting at most one span for it."""
        if self._store.table.vacant:
            return True
        if self._store.grace:
            return False
        row = next(self.victims(), 0)
        if row:
            self._store.evict(row)
        return bool(row)

    def plan(self, count: int) -> list[int] | None:
        """Rows whose eviction makes ``count`` neighbouring tiles free, or None.

        Starts from each victim in turn and takes its neighbours along, free ones first, then
        the less recently used one, until the window is wide enough or both sides are held.
        """
        for row in self.victims():
            window = self._window(row, count)
            if window is not None:
                return window
        return None

    def _window(self, victim: int, count: int) -> list[int] | None:
        store, table = self._store, self._store.table
        slab = store.slabs[table.slab[victim]]
        begin = table.tile[victim]
        end = begin + tiles(table.length[victim])
        if end > slab.populated:
            return None
        rows = [victim]
        while True:
            begin, end = slab.free_around(begin, end)
            if end - begin >= count:
                return rows
            sides = []
            if begin and store.may_evict(slab.owner[begin - 1]):
                sides.append(slab.owner[begin - 1])
            if end < slab.populated and store.may_evict(slab.owner[end]):
                sides.append(slab.owner[end])
            sides = [row for row in sides if self._end(row) <= slab.populated]
            if not sides:
                return None
            row = min(sides, key=table.used.__getitem__)
            rows.append(row)
            begin, end = min(begin, table.tile[row]), max(end, self._end(row))

    def _end(self, row: int) -> int:
        return self._store.table.tile[row] + tiles(self._store.table.length[row])
