"""Room on the disk: which files go so that another fits."""

from __future__ import annotations

from kmesh_spand.core.fileorder import FileTenant
from kmesh_spand.core.files import FileBook
from kmesh_spand.core.states import FILE_BUSY, FILE_EVICTABLE, FileState, FileTrigger
from kmesh_spand.core.store import SpanStore


class FileRoom:
    """Removes files of a book's, so that neither a tenant nor all of them have more than they may.

    Room is there when what was removed is gone.
    """

    def __init__(self, book: FileBook, store: SpanStore) -> None:
        self._book = book
        self._store = store

    def make(self, group: int, salt: bytes, blocks: int) -> bool | None:
        """Whether a tenant may write a file of so many blocks; files are removed for it.

        None: it may when what is on its way has ended.
        """
        book = self._book
        quota, tenant = book.quota(group, salt), book.tenants.get((group, salt))
        if blocks > book.capacity or (quota and blocks > quota):
            return False
        while quota and tenant is not None and tenant.blocks + blocks > quota:
            if not self._evict_one(tenant):
                return self._later()
        while book.used - book.freeing + blocks > book.capacity or not self._vacant:
            # Who has most gives way, so that nobody can push the others out.
            largest = book.largest
            if largest is None or not self._evict_one(largest):
                return self._later()
        if book.used + blocks > book.capacity or not book.table.vacant:
            return None
        return True

    @property
    def _vacant(self) -> int:
        return self._book.table.vacant + self._book.by_state[FileState.REMOVING]

    def _later(self) -> bool | None:
        """Whether something is on its way that may leave room."""
        return None if any(self._book.by_state[state] for state in FILE_BUSY) else False

    def _evict_one(self, tenant: FileTenant) -> bool:
        row = self.victim(tenant)
        if row:
            self.evict(row)
        return bool(row)

    def evict(self, row: int) -> None:
        """Remove a file to make room."""
        book, counters = self._book, self._store.counters
        counters["disk_evicted"] += 1
        counters["disk_evicted_bytes"] += book.table.length[row]
        book.order.evicted(book.tenant_of(row), row)
        book.move(row, FileTrigger.EVICT)

    def victim(self, tenant: FileTenant) -> int:
        """What a tenant loses first, or 0."""
        if not tenant.evictable:
            return 0
        book = self._book
        rows = range(1, book.table.rows + 1)
        return book.order.victim(tenant, lambda row: self._may_evict(row, tenant), rows)

    def _may_evict(self, row: int, tenant: FileTenant) -> bool:
        table = self._book.table
        return (
            0 < row <= table.rows
            and table.state[row] in FILE_EVICTABLE
            and self._book.tenant_of(row) is tenant
        )
