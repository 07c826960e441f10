"""Making room: which spans must go so that a range of some length is free."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain

from kmesh.layout import tiles
from kmesh_spand.core.codes import Reason
from kmesh_spand.core.store import SpanStore
from kmesh_spand.core.tenants import Tenant
from kmesh_spand.core.victims import MAX_TRIES, Victims


class Evictor:
    """Finds room in a store's slabs, evicting only what lets the request succeed.

    Args:
        patience_ms: how long after a slab last grew more growth is expected.
    """

    def __init__(self, store: SpanStore, patience_ms: int) -> None:
        self._store = store
        self._patience_ms = patience_ms
        self._victims = Victims(store)

    def place(self, count: int, tenant: Tenant) -> tuple[int, int, int] | Reason:
        """A free row that owns ``count`` tiles: (row, slab, first tile), or why there is none.

        Nothing is evicted unless the answer is a place; what is evicted is the tenant's own.
        """
        store = self._store
        there = [slab.tiles for slab in store.slabs.values() if slab.tier == tenant.tier]
        if not tenant.tier:
            there += [size for _, size in store.given_up.values()]
        if count > max(there, default=count):
            return Reason.TOO_LARGE
        if tenant.quota and count > tenant.quota:
            return Reason.QUOTA
        over = tenant.tiles + count - tenant.quota if tenant.quota else 0
        window: list[int] = []
        slabs = store.slabs
        if all(slabs[number].largest < count for number in tenant.slabs):
            found = self._make_range(count, tenant, full=over > 0)
            if isinstance(found, Reason):
                return found
            window = found
        goners = self._shrink(window, over, tenant)
        if goners is None:
            return Reason.NOT_READY if store.grace else Reason.QUOTA
        self._evict(goners)
        if not self.make_row(tenant):
            return Reason.NOT_READY if store.grace else Reason.CATALOG_FULL
        row = store.table.take_row()
        for number in sorted(tenant.slabs):
            start = slabs[number].allocate(count, row)
            if start is not None:
                tenant.tiles += count
                store.place_failures = (0, 0)
                return row, number, start
        raise AssertionError(f"no range of {count} tiles where one was made")

    def _make_range(self, count: int, tenant: Tenant, *, full: bool) -> list[int] | Reason:
        """What must be evicted so that one of the tenant's slabs has a range, or why there is none.

        A tenant with a full quota doesn't take a further slab while its own will do.
        """
        store = self._store
        window = self.plan(count, tenant) if full and not store.grace else None
        if window is not None:
            return window
        number = self._claim(count, tenant)
        if number is not None:
            store.assign(number, tenant)
            return []
        if self._will_grow(count, tenant):
            return Reason.NOT_READY
        number = self._empty(count, tenant)
        if number is not None:
            store.reclaim(number)
            return Reason.NOT_READY
        if self._empty_sealed(tenant):
            return Reason.NOT_READY
        window = self.plan(count, tenant)
        if window is not None:
            return window
        end = self._victims.end
        if self._empty_sealed(tenant, beyond=count):
            return Reason.NOT_READY
        # What is sealed may go once the memory has come that is awaited.
        if not self._sealed(tenant) or not self._heir_waits(tenant):
            self._victims.in_vain(tenant, count, min(end, self._victims.end))
        store.place_failed(tenant)
        return Reason.POOL_FULL

    def _empty_sealed(self, tenant: Tenant, *, beyond: int = 0) -> bool:
        """Gives up the sealed slab in which the tenant's next victim lies, with all that is there.

        What goes from such a slab makes no room, so that all of it goes or nothing does. False if
        the victims before it do not lie in one, or what is there may not go, or the slab that
        followed the last one has no memory yet.

        Args:
            beyond: as of ``Victims.of``; and those are passed over that do not lie in one.
        """
        store, held = self._store, set[int]()
        if not self._sealed(tenant) or self._heir_waits(tenant):
            return False
        # Rows of a slab that must stay hide no others.
        for row in self._victims.of(tenant, beyond=beyond, passing=held):
            number = store.table.slab[row]
            if number not in store.sealed:
                if beyond:
                    continue
                return False
            if goners := self._all_of(number):
                self._evict(goners)
                store.give_up(number)
                return True
            held.add(number)
        return False

    def _sealed(self, tenant: Tenant) -> set[int]:
        return self._store.sealed & tenant.slabs

    def _evict(self, rows: list[int]) -> None:
        store = self._store
        for row in rows:
            # A base may have gone with its last mirror.
            if store.may_evict(row):
                store.evict(row)

    def _heir_waits(self, tenant: Tenant) -> bool:
        """Whether a slab has no page at all: who maps the one before it keeps its memory."""
        return any(
            slab.tier == tenant.tier
            and not slab.sealed
            and not slab.lost
            and not slab.populated
            and (slab.tenant is tenant or self._open_to(number, tenant))
            for number, slab in self._store.slabs.items()
        )

    def _rows_of(self, number: int) -> list[int]:
        return sorted({row for row in self._store.slabs[number].owner if row})

    def _all_of(self, number: int) -> list[int]:
        """All spans of a slab, each behind the mirrors that refer to it; none if one may not go."""
        store, mirrors = self._store, self._store.mirrors
        rows = self._rows_of(number)
        if not all(store.may_evict(row) or mirrors.removable(row) for row in rows):
            return []
        ordered = ((*sorted(mirrors.of_base.get(row, ())), row) for row in rows)
        return list(dict.fromkeys(chain.from_iterable(ordered)))

    def _shrink(self, window: list[int], over: int, tenant: Tenant) -> list[int] | None:
        """``window`` and what else must go for ``over`` tiles to be the tenant's no more."""
        length = self._store.table.length
        over -= sum(tiles(length[row]) for row in window)
        if over <= 0:
            return window
        if self._store.grace:
            return None
        goners, gone = list(window), set(window)
        for row in self._victims.of(tenant):
            if row not in gone:
                goners.append(row)
                gone.add(row)
                over -= tiles(length[row])
                if over <= 0:
                    return goners
        for row in self._bases(tenant):
            if row not in gone and self._store.mirrors.of_base[row] <= gone:
                goners.append(row)
                gone.add(row)
                over -= tiles(length[row])
                if over <= 0:
                    return goners
        return None

    def _bases(self, tenant: Tenant) -> list[int]:
        """Spans of a tenant that may be evicted with the mirrors that refer to them."""
        store, mirrors = self._store, self._store.mirrors
        found = [
            row
            for row in mirrors.of_base
            if mirrors.removable(row) and store.tenant_of(row) is tenant
        ]
        return sorted(found, key=store.table.used.__getitem__)[:MAX_TRIES]

    def _open_to(self, number: int, tenant: Tenant) -> bool:
        """Whether a slab that is nobody's may become the tenant's.

        A slab that was never used is left for each group of uids that has none.
        """
        slabs, groups = self._store.slabs, self._store.tenants.tenancy.groups
        slab = slabs[number]
        if slab.tenant is not None or slab.lost or slab.group not in (None, tenant.group):
            return False
        if slab.tier != tenant.tier:
            return False
        if slab.group is not None:
            return True
        others = [other for other in slabs.values() if other.tier == tenant.tier]
        taken = {other.group for other in others if other.group is not None}
        if tenant.group not in taken:
            return True
        unused = sum(other.group is None and not other.lost for other in others)
        return unused > len(set(groups) - taken)

    def _claim(self, count: int, tenant: Tenant) -> int | None:
        """A clean slab that may become the tenant's and has room, one of its group's first."""
        if self._store.tenants.owned == len(self._store.slabs):
            return None
        found = [
            (slab.group is None, number)
            for number, slab in self._store.slabs.items()
            if slab.tenant is None
            and slab.clean
            and slab.largest >= count
            and self._open_to(number, tenant)
        ]
        return min(found)[1] if found else None

    def _empty(self, count: int, tenant: Tenant) -> int | None:
        """A slab in which another tenant of the group has nothing any more."""
        tenants = self._store.tenants
        if tenants.owners == bool(tenant.slabs):
            return None
        return next(
            (
                number
                for number, slab in self._store.slabs.items()
                if slab.tenant not in (None, tenant)
                and slab.tier == tenant.tier
                and slab.group == tenant.group
                and not slab.used
                and slab.largest >= count
            ),
            None,
        )

    def _will_grow(self, count: int, tenant: Tenant) -> bool:
        """Whether waiting, rather than evicting, may give ``count`` tiles."""
        store = self._store
        if not tenant.tier and any(
            group in (None, tenant.group) and size >= count
            for group, size in store.given_up.values()
        ):
            return True
        if store.grace or all(slab.tier != tenant.tier for slab in store.slabs.values()):
            return True
        for number, slab in store.slabs.items():
            mine = slab.tenant is tenant or self._open_to(number, tenant)
            if not mine or slab.sealed or slab.tiles < count:
                continue
            growing = store.now_ms - store.grew_ms[number] < self._patience_ms
            if not slab.clean or (slab.populated < slab.tiles and growing):
                return True
        return False

    def make_row(self, tenant: Tenant) -> bool:
        """Have a free row, evicting at most one span of the tenant for it."""
        if self._store.table.vacant:
            return True
        if self._store.grace:
            return False
        row = next(self._victims.of(tenant), 0)
        if row:
            self._store.evict(row)
        return bool(row)

    def plan(self, count: int, tenant: Tenant) -> list[int] | None:
        """Rows whose eviction makes ``count`` neighbouring tiles free, or None.

        Starts from each victim in turn and takes its neighbours along, free ones first, then
        the less recently used one, until the window is wide enough or both sides are held. Where
        that is not enough, spans go with the mirrors that refer to them. Once a request for as much
        has found no room, victims are looked at from where the last one left off.
        """
        store = self._store
        for row in self._victims.of(tenant, beyond=count, passing=store.sealed):
            window = self._window(row, count, store.may_evict)
            if window is not None:
                self._victims.in_reach(tenant, count)
                return window
        of_base, removable = store.mirrors.of_base, store.mirrors.removable
        for row in self._bases(tenant):
            window = self._window(row, count, lambda n: store.may_evict(n) or removable(n))
            if window is not None:
                ordered = ((*sorted(of_base.get(n, ())), n) for n in window)
                return list(dict.fromkeys(chain.from_iterable(ordered)))
        return None

    def _window(self, victim: int, count: int, may_go: Callable[[int], bool]) -> list[int] | None:
        store, table = self._store, self._store.table
        slab = store.slabs[table.slab[victim]]
        if slab.sealed:
            return None
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
            if begin and may_go(slab.owner[begin - 1]):
                sides.append(slab.owner[begin - 1])
            if end < slab.populated and may_go(slab.owner[end]):
                sides.append(slab.owner[end])
            sides = [row for row in sides if self._end(row) <= slab.populated]
            if not sides:
                return None
            row = min(sides, key=table.used.__getitem__)
            rows.append(row)
            begin, end = min(begin, table.tile[row]), max(end, self._end(row))

    def _end(self, row: int) -> int:
        return self._store.table.tile[row] + tiles(self._store.table.length[row])
