"""Which spans of a tenant are looked at to make room: those of its policy, a few at a time."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import islice

from kmesh_spand.core.states import EVICTABLE
from kmesh_spand.core.store import SpanStore
from kmesh_spand.core.tenants import Tenant

#: Most victims that are looked at for one allocation.
MAX_TRIES = 256
#: As many times that may be passed over: whoever asks waits for it.
_PASSED = 64


class Victims:
    """Reads tenants' orders of eviction, and never changes them.

    Attributes:
        end: behind which row of the order the last look ended.
    """

    def __init__(self, store: SpanStore) -> None:
        self._store = store
        self._cursor = 1
        self.end = 0

    def of(
        self, tenant: Tenant, *, beyond: int = 0, passing: Collection[int] = ()
    ) -> Iterator[int]:
        """Rows of a tenant that may be evicted, in its policy's order; at most ``MAX_TRIES``.

        A policy that raises, names what may not go, or names nothing although something may
        go, is counted and replaced by a plain walk over the table.

        Args:
            beyond: begins where the last look for so many tiles ended, if that was in vain.
            passing: slabs whose rows are passed over and not counted. More may be added meanwhile.
        """
        store, slab = self._store, self._store.table.slab
        if not tenant.evictable:
            self.end = 0
            return
        begin = tenant.passed.get(beyond, 0)
        if begin >= tenant.evictable:
            begin = 0
        most = _PASSED * MAX_TRIES
        looked, tried, sound, fault = 0, 0, False, False
        try:
            for row in islice(tenant.order.victims(), begin, begin + most):
                if looked == MAX_TRIES:
                    break
                tried += 1
                if not self._may_evict(row, tenant):
                    fault = True
                    # It counts too, as a policy may name nothing else.
                    looked += 1
                    continue
                sound = True
                if slab[row] in passing:
                    continue
                looked += 1
                if not fault:
                    store.policy_faults = (0, 0)
                self.end = begin + tried
                yield row
        except Exception:
            fault = True
        if fault or not sound:
            store.policy_failed()
            yield from self._walk(tenant, passing)
        self.end = begin + tried

    def in_vain(self, tenant: Tenant, count: int, end: int) -> None:
        """What lies before ``end`` made no room for ``count`` tiles: the next look begins there.

        After the end of the order, and far behind its beginning, it begins anew.
        """
        if 0 < end < min(tenant.evictable, _PASSED * MAX_TRIES):
            tenant.passed[count] = end
        else:
            tenant.passed.pop(count, None)

    def in_reach(self, tenant: Tenant, count: int) -> None:
        """The last row that was looked at makes room for ``count`` tiles.

        If looks were in vain before, the next one begins there: it would be in vain again among
        those that these have passed.
        """
        if count in tenant.passed:
            self.in_vain(tenant, count, self.end - 1)

    def _may_evict(self, row: int, tenant: Tenant) -> bool:
        return self._store.may_evict(row) and self._store.tenant_of(row) is tenant

    def _walk(self, tenant: Tenant, passing: Collection[int]) -> Iterator[int]:
        table = self._store.table
        given, end = 0, table.rows + 1
        for begin, stop in ((self._cursor, end), (1, min(self._cursor, end))):
            for row in range(begin, stop):
                if table.state[row] not in EVICTABLE or not self._may_evict(row, tenant):
                    continue
                if table.slab[row] in passing:
                    continue
                self._cursor = row + 1
                given += 1
                yield row
                if given == MAX_TRIES:
                    return
