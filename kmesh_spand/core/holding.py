"""Who keeps spans from going: leases, and those that need them for something else."""

from __future__ import annotations

from abc import abstractmethod
from array import array
from collections.abc import Iterable, Iterator, Sequence

from kmesh_spand.core.batch import Batch, Rows
from kmesh_spand.core.grounds import Grounds
from kmesh_spand.core.states import EVICTABLE, State, Trigger
from kmesh_spand.core.table import SpanTable
from kmesh_spand.core.tenants import Tenant, TenantBook

#: A tick is 64 ms: 32 bits of them last eight years.
TICK_SHIFT = 6
#: Ends with what holds it last.
_ENDING = frozenset({State.DOOMED, State.RETIRED})


class Holding(Grounds):
    """Leases, holds, and the order of eviction.

    A *hold* is as a lease, but nobody's: of a recipe on the spans that it refers to, or of a job on
    what it reads.

    Attributes:
        table: of all rows. tick: what time it is.
        evictable: rows that may be evicted now.
        pinned, leased_bytes: spans that at least one lease holds, and their payload bytes.
        holds: how often each row is held, of those that are.
        condemned: generation of each held row that is dropped when nothing holds it any more.
        policy_faults, place_failures: how often the eviction policy failed, or no room was found
            although something may be evicted, since that last went well; and when last (ms).
    """

    def __init__(
        self,
        tenants: TenantBook,
        counters: dict[str, int],
        job_ids: Iterator[int],
        max_spans: int,
        batch: Batch | None,
    ) -> None:
        super().__init__(tenants, counters, job_ids)
        self.table = SpanTable(max_spans, batch)
        self.tick = 0
        self.evictable = 0
        self.pinned = 0
        self.leased_bytes = 0
        self.holds: dict[int, int] = {}
        self.condemned: dict[int, int] = {}
        self.policy_faults = (0, 0)
        self.place_failures = (0, 0)

    @abstractmethod
    def move(self, row: int, trigger: Trigger) -> State:
        """See ``SpanStore``."""

    @abstractmethod
    def discard(self, row: int) -> None:
        """See ``SpanStore``."""

    def tenant_of(self, row: int) -> Tenant:
        """Whose a row is that has a range."""
        tenant = self.slabs[self.table.slab[row]].tenant
        assert tenant is not None
        return tenant

    def tier_of(self, row: int) -> int:
        """Where a row is that has a range: 0 is host memory, the others are GPUs."""
        return self.slabs[self.table.slab[row]].tier

    def held(self, row: int) -> bool:
        """Whether a lease or a hold keeps a row from going."""
        return self.table.pins[row] > 0 or row in self.holds

    # Leases and holds

    def pin(self, rows: Rows) -> None:
        """One lease more on each row (all COMMITTED); a row may occur more than once."""
        table = self.table
        fresh = table.batch.pin(table.pins, rows)
        if fresh:
            self.pinned += len(fresh)
            self.leased_bytes += sum(table.batch.gather(fresh, table.length))
            self._disallow([row for row in fresh if row not in self.holds] if self.holds else fresh)

    def unpin(self, rows: Rows) -> None:
        """One lease fewer on each row; a doomed span ends with its last one."""
        table, batch = self.table, self.table.batch
        # Last first: the end of a chain is evicted before its beginning, without which it
        # could not be found.
        idle = batch.unpin(table.pins, rows, table.used, self.tick)
        if not idle:
            return
        self.pinned -= len(idle)
        self.leased_bytes -= sum(batch.gather(idle, table.length))
        if self.holds:
            idle = array("I", [row for row in idle if row not in self.holds])
        if batch.gather_bytes(idle, table.state).count(State.COMMITTED) == len(idle):
            self._allow(idle)
            return
        self._allow([row for row in idle if table.state[row] == State.COMMITTED])
        for row in idle:
            if table.state[row] in _ENDING:
                self.move(row, Trigger.RELEASED)

    def hold(self, rows: Iterable[int]) -> None:
        """Keep rows as a lease would; a row may be held several times."""
        for row in rows:
            count = self.holds.get(row, 0)
            if not count and self.may_evict(row):
                self._disallow([row])
            self.holds[row] = count + 1

    def let_go(self, rows: Iterable[int]) -> None:
        """One hold fewer on each row."""
        for row in rows:
            count = self.holds.pop(row) - 1
            if count:
                self.holds[row] = count
                continue
            condemned = self.condemned.pop(row, None)
            if self.may_evict(row):
                self._allow([row])
                if condemned == self.table.generation[row]:
                    self.discard(row)
            elif self.table.state[row] in _ENDING and not self.table.pins[row]:
                self.move(row, Trigger.RELEASED)

    # Eviction order. The rows of one call are one tenant's.

    def _allow(self, rows: Sequence[int]) -> None:
        if not rows:
            return
        tenant = self.tenant_of(rows[0])
        tenant.evictable += len(rows)
        self.evictable += len(rows)
        try:
            tenant.order.add(rows)
        except Exception:
            self.policy_failed()

    def _disallow(self, rows: Sequence[int]) -> None:
        if not rows:
            return
        tenant = self.tenant_of(rows[0])
        tenant.evictable -= len(rows)
        self.evictable -= len(rows)
        try:
            tenant.order.discard(rows)
        except Exception:
            self.policy_failed()

    def _enter(self, rows: Sequence[int]) -> None:
        try:
            self.tenant_of(rows[0]).order.enter_all(rows, self.table.name_of)
        except Exception:
            self.policy_failed()

    def _evicted(self, row: int) -> None:
        try:
            self.tenant_of(row).order.evicted(row)
        except Exception:
            self.policy_failed()

    def policy_failed(self) -> None:
        """The policy raised, or named what it must not."""
        self.counters["policy_faults"] += 1
        self.policy_faults = (self.policy_faults[0] + 1, self.now_ms)

    def place_failed(self, tenant: Tenant) -> None:
        """No room was found. While nothing of the tenant may be evicted, that is as it must be."""
        if tenant.evictable:
            self.place_failures = (self.place_failures[0] + 1, self.now_ms)

    def may_evict(self, row: int) -> bool:
        """Whether a row is a span that nobody leases and nothing holds."""
        table = self.table
        return 0 < row <= table.rows and table.state[row] in EVICTABLE and not self.held(row)
