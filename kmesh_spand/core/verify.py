"""Which payloads are read again, and when: reported and wanted ones first."""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterator

from kmesh.layout import TILE_BYTES
from kmesh_spand.core.batch import Rows
from kmesh_spand.core.codes import Cause
from kmesh_spand.core.effects import Verify
from kmesh_spand.core.mirrors import RecipeFacts
from kmesh_spand.core.states import State, Trigger
from kmesh_spand.core.store import SpanStore

#: A payload that could not be read this often, for a reason of its own, counts as bad.
MAX_LOST = 3


class _Backlog:
    """Rows in the order in which they came, as machine integers: there may be millions."""

    def __init__(self) -> None:
        self._rows = array("I")
        self._first = 0

    def __bool__(self) -> bool:
        return self._first < len(self._rows)

    def __iter__(self) -> Iterator[int]:
        return iter(self._rows[self._first :])

    def add(self, rows: Rows) -> None:
        self._rows += rows

    def take(self) -> int:
        row = self._rows[self._first]
        self._first += 1
        if not self:
            self._rows, self._first = array("I"), 0
        return row


class Verifier:
    """Keeps a bounded number of verifications in flight.

    A tier whose worker is down keeps its own waiting, and no others.

    Args:
        limit: of jobs in flight, for each tier.
        job_ids: where job numbers come from.

    Attributes:
        jobs: row by job in flight.
    """

    def __init__(self, store: SpanStore, limit: int, job_ids: Iterator[int]) -> None:
        self._store = store
        self._limit = limit
        self._job_ids = job_ids
        self._backlogs: dict[int, _Backlog] = {}
        self._urgent: dict[int, OrderedDict[int, None]] = {}
        self._lost: dict[tuple[int, int], int] = {}
        self._rows: set[int] = set()
        self._busy: Counter[int] = Counter()
        self.jobs: dict[int, int] = {}

    def recovered(self, rows: Rows) -> None:
        """Rows of one slab became RECOVERED: they are verified when their turn comes."""
        if rows:
            self._backlogs.setdefault(self._tier(rows[0]), _Backlog()).add(rows)

    def want(self, row: int) -> None:
        """Verify a RECOVERED or SUSPECT row before those that nobody asked for."""
        if row not in self._rows:
            self._urgent.setdefault(self._tier(row), OrderedDict())[row] = None

    def pump(self) -> None:
        """Start as many verifications as may be in flight."""
        store, table = self._store, self._store.table
        while row := self._next():
            if table.state[row] == State.RECOVERED:
                store.move(row, Trigger.VERIFY)
            job = next(self._job_ids)
            self.jobs[job] = row
            self._rows.add(row)
            self._busy[self._tier(row)] += 1
            offset = table.tile[row] * TILE_BYTES
            recipe = row in store.mirrors.by_row
            store.out.append(
                Verify(job, table.slab[row], offset, table.length[row], table.root[row], recipe)
            )

    def _tier(self, row: int) -> int:
        return self._store.slabs[self._store.table.slab[row]].tier

    def _next(self) -> int:
        states = self._store.table.state
        for tier, urgent in self._urgent.items():
            while urgent and self._busy[tier] < self._limit:
                row, _ = urgent.popitem(last=False)
                # A wanted span may have been evicted since, and its row given to another.
                if states[row] in (State.RECOVERED, State.SUSPECT) and self._tier(row) == tier:
                    return row
        for tier, backlog in self._backlogs.items():
            while backlog and self._busy[tier] < self._limit:
                row = backlog.take()
                # It may have been wanted, or evicted and its row given to another, since.
                if states[row] == State.RECOVERED:
                    return row
        return 0

    def waiting(self) -> dict[int, set[int]]:
        """RECOVERED and SUSPECT rows whose turn comes, by tier. O(rows), for checks."""
        states = self._store.table.state
        found: dict[int, set[int]] = {}
        for tier, backlog in self._backlogs.items():
            found[tier] = {row for row in backlog if states[row] == State.RECOVERED}
        for tier, urgent in self._urgent.items():
            found.setdefault(tier, set()).update(
                row
                for row in urgent
                if states[row] in (State.RECOVERED, State.SUSPECT) and self._tier(row) == tier
            )
        return found

    def full(self, tier: int) -> bool:
        """Whether as many of a tier are in flight as may be."""
        return self._busy[tier] >= self._limit

    def doubt(self, row: int) -> None:
        """A row is not served before it has been read again."""
        if self._store.table.state[row] == State.COMMITTED:
            self._store.move(row, Trigger.REPORT)
            self.want(row)

    def done(self, job: int, good: bool | None, facts: RecipeFacts | None = None) -> None:
        """What a verification said; None when the payload could not be read.

        Args:
            facts: what was read in it, if it is a good recipe.
        """
        row = self.jobs.pop(job, 0)
        if not row:
            return
        self._rows.remove(row)
        self._busy[self._tier(row)] -= 1
        store, table, counters = self._store, self._store.table, self._store.counters
        tenant = row, table.generation[row]
        if good is None:
            lost = self._lost[tenant] = self._lost.get(tenant, 0) + 1
            if lost < MAX_LOST:
                store.move(row, Trigger.LOST)
                self.want(row)
                return
        self._lost.pop(tenant, None)
        mirrors = store.mirrors
        if good and row in mirrors.by_row:
            if not mirrors.settle(row, facts):
                mirrors.drop(row, Cause.RECOVERY)
                return
            for base in mirrors.by_row[row].bases:
                if table.state[base] == State.RECOVERED:
                    self.want(base)
        if good:
            reported = table.state[row] == State.SUSPECT
            counters["corrupt_false" if reported else "verified"] += 1
            store.move(row, Trigger.GOOD)
        else:
            counters["corrupt"] += 1
            store.move(row, Trigger.BAD_LEASED if store.held(row) else Trigger.BAD)
            mirrors.base_lost(row)
