"""Tenants that have files, and the order in which their files make room."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from kmesh_spand.core.batch import Batch
from kmesh_spand.core.config import DiskConfig
from kmesh_spand.core.policies import make_policy
from kmesh_spand.core.policy import LRU, Policy
from kmesh_spand.core.tenants import tenant_name

#: Entries that are out of date and are not worth making a heap anew.
_SLACK = 1024


@dataclass(slots=True, eq=False)
class FileTenant:
    """A group and a salt that have files.

    Attributes:
        number: unique among those that have any.
        order, covered: of eviction; of files whose spans host memory has too, which go last.
        quota: blocks, 0 for no limit. blocks: of files that are not being removed.
        files, evictable: how many there are, and may be removed now.
        spaces: files, and bytes of their payloads, by namespace number; of those that are whole.
    """

    number: int
    group: int
    salt: bytes = field(repr=False)
    quota: int
    order: Policy
    covered: Policy
    blocks: int = 0
    files: int = 0
    evictable: int = 0
    spaces: dict[int, list[int]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """How people call it."""
        return tenant_name(self.group, self.salt)


class Largest:
    """Which tenant has most, of those that may lose something; O(log n) for each change.

    A heap with an entry for each change: those that are out of date are left out when they come up.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, int]] = []

    def changed(self, tenant: FileTenant, tenants: Mapping[int, FileTenant]) -> None:
        """Its blocks are others now, or it has something to lose that had not; all, by number."""
        if tenant.evictable:
            heapq.heappush(self._heap, (-tenant.blocks, tenant.number))
        if len(self._heap) > 2 * len(tenants) + _SLACK:
            self._heap = [(-one.blocks, n) for n, one in tenants.items() if one.evictable]
            heapq.heapify(self._heap)

    def find(self, tenants: Mapping[int, FileTenant]) -> FileTenant | None:
        """The one that has most; None if none may lose anything."""
        while self._heap:
            blocks, number = self._heap[0]
            tenant = tenants.get(number)
            if tenant is not None and tenant.evictable and tenant.blocks == -blocks:
                return tenant
            heapq.heappop(self._heap)
        return None


class FileOrder:
    """What policies are told of files. Whatever they raise is counted and survived.

    Covered files are in an order of their own: what memory has was used after everything that it
    has let go of.

    Args:
        failed: told of each failure of a policy.
    """

    def __init__(self, config: DiskConfig, batch: Batch | None, failed: Callable[[], None]) -> None:
        policy = make_policy(config.policy, config.max_files, batch)
        self._first: tuple[Policy, Policy] = policy, LRU(config.max_files, batch)
        self._unused: list[tuple[int, Policy, Policy]] = [(1, *self._first)]
        self._last = 1
        self._covered = bytearray(config.max_files + 1)
        self._failed = failed

    def open(self, group: int, salt: bytes, quota: int) -> FileTenant:
        """A tenant without files."""
        if not self._unused:
            self._last += 1
            order, covered = self._first
            self._unused.append((self._last, order.another(), covered.another()))
        number, order, covered = self._unused.pop()
        return FileTenant(number, group, salt, quota, order, covered)

    def close(self, tenant: FileTenant) -> None:
        """It has no files any more."""
        self._unused.append((tenant.number, tenant.order, tenant.covered))

    def enter(self, tenant: FileTenant, row: int, name: int) -> None:
        """A row is a new file's."""
        self._covered[row] = False
        self._tell(tenant.order.enter, row, name)

    def allow(self, tenant: FileTenant, row: int, *, covered: bool) -> None:
        """A file may be removed from now on."""
        self._covered[row] = covered
        self._tell(self._of(tenant, row).add, [row])

    def disallow(self, tenant: FileTenant, row: int) -> None:
        """A file may not be removed any more."""
        self._tell(self._of(tenant, row).discard, [row])

    def cover(self, tenant: FileTenant, row: int, *, allowed: bool) -> None:
        """Memory has a file's span from now on; ``allowed``: the file may be removed."""
        if not self._covered[row]:
            self._change(tenant, row, allowed=allowed)

    def uncover(self, tenant: FileTenant, row: int, *, allowed: bool, used: bool) -> None:
        """Memory has a file's span no more; ``used``: it was leased while it had."""
        if self._covered[row]:
            if used:
                self._tell(tenant.order.used, row)
            self._change(tenant, row, allowed=allowed)

    def evicted(self, tenant: FileTenant, row: int) -> None:
        """A file is about to be removed to make room."""
        if not self._covered[row]:
            self._tell(tenant.order.evicted, row)

    def covered(self, row: int) -> bool:
        """Whether a file goes after others, since memory has its span too."""
        return bool(self._covered[row])

    def victim(self, tenant: FileTenant, may: Callable[[int], bool], rows: Iterable[int]) -> int:
        """What a tenant loses first; 0 if there is nothing.

        Args:
            may: whether a row may be removed, and is the tenant's.
            rows: where to look when the policy has failed.
        """
        try:
            row = next(tenant.order.victims(), 0) or next(tenant.covered.victims(), 0)
            if may(row):
                return row
        except Exception:
            row = 0
        self._failed()
        return next(filter(may, rows), 0)

    def _of(self, tenant: FileTenant, row: int) -> Policy:
        return tenant.covered if self._covered[row] else tenant.order

    def _change(self, tenant: FileTenant, row: int, *, allowed: bool) -> None:
        if allowed:
            self.disallow(tenant, row)
        self._covered[row] = not self._covered[row]
        if allowed:
            self._tell(self._of(tenant, row).add, [row])

    def _tell(self, what: Callable[..., None], *about: object) -> None:
        try:
            what(*about)
        except Exception:
            self._failed()
