"""Which stored spans an operator's wish names, a bounded part of the table at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from kmesh_spand.core.batch import KEY_BYTES
from kmesh_spand.core.disk import Disk
from kmesh_spand.core.fileorder import FileTenant
from kmesh_spand.core.files import FileBook
from kmesh_spand.core.states import FILE_EVICTABLE, FILE_KEYED, STORED, State
from kmesh_spand.core.store import TICK_SHIFT, SpanStore
from kmesh_spand.core.table import SpanTable
from kmesh_spand.core.tenants import Tenant

_BUSY = frozenset(
    {State.RESERVED, State.COPYING, State.VERIFYING, State.SUSPECT, State.DRAFT, State.FETCHING}
)


@dataclass(slots=True)
class Swept:
    """One part.

    Attributes:
        slots: spans that may be evicted now, and the bytes of their payloads.
        leased, busy: spans that are meant too, but somebody leases them, or a job has them.
        bases: slot and generation of those that mirrors refer to.
        next_slot: where the next part begins; None after the last one.
    """

    slots: list[int] = field(default_factory=list)
    bases: list[tuple[int, int]] = field(default_factory=list)
    size: int = 0
    leased: int = 0
    busy: int = 0
    next_slot: int | None = None


class Sweep:
    """Looks, changes nothing: what ``events.Evict`` is sent with."""

    def __init__(self, store: SpanStore, disk: Disk | None = None) -> None:
        self._store = store
        self._disk = disk

    def part(
        self,
        begin: int,
        count: int,
        namespace: bytes = b"",
        *,
        min_age_ms: int = 0,
        min_idle_ms: int = 0,
        now_ms: int,
        group: int | None = None,
    ) -> Swept:
        """Looks at ``count`` slots from ``begin`` on.

        Args:
            namespace: 32-byte digest, or empty for all.
            min_age_ms, min_idle_ms: only spans committed, and last leased, at least so long ago.
            group: whose; None for all. So it is below.
        """
        table = self._store.table
        swept = Swept()
        end = min(begin + count, table.rows)
        wanted = table.spaces.find(namespace) if namespace else 0
        # A group must not read off the time whether others have the namespace.
        if namespace and not wanted and group is None:
            return swept
        for row in range(begin + 1, end + 1):
            if self._is_of(row, group) and (not namespace or table.space[row] == wanted):
                self._judge(row, swept, min_age_ms, min_idle_ms, now_ms)
        if end < table.rows:
            swept.next_slot = end
        return swept

    def keys(
        self,
        keys: bytes,
        *,
        min_age_ms: int,
        min_idle_ms: int,
        now_ms: int,
        group: int | None = None,
    ) -> Swept:
        """Looks at all spans of these keys (32 bytes each), in every shard."""
        swept = Swept()
        for row in dict.fromkeys(self._rows(keys, group)):
            self._judge(row, swept, min_age_ms, min_idle_ms, now_ms)
        return swept

    def files(
        self, begin: int, count: int, namespace: bytes = b"", group: int | None = None
    ) -> Swept:
        """Looks at ``count`` rows of the disk's table from ``begin`` on; slots are its rows."""
        swept = Swept()
        if self._disk is None:
            return swept
        book, table = self._disk.book, self._disk.book.table
        wanted = table.spaces.find(namespace) if namespace else 0
        if namespace and not wanted and group is None:
            return swept
        end = min(begin + count, table.rows)
        for row in range(begin + 1, end + 1):
            mine = _is_file_of(book, row, group)
            if mine and (not namespace or table.space[row] == wanted):
                _judge_file(book, row, swept)
        if end < table.rows:
            swept.next_slot = end
        return swept

    def files_of(self, keys: bytes, group: int | None = None) -> Swept:
        """Looks at all files of these keys (32 bytes each), in every shard."""
        swept = Swept()
        if self._disk is not None:
            book = self._disk.book
            for where in _scopes(book.table, book.tenants.values(), group):
                for row in book.table.find_all(keys, where)[0]:
                    if row:
                        _judge_file(book, book.resolve(row), swept)
        swept.slots = list(dict.fromkeys(swept.slots))
        return swept

    def _rows(self, keys: bytes, group: int | None) -> Iterator[int]:
        store = self._store
        assert len(keys) % KEY_BYTES == 0
        for where in _scopes(store.table, store.tenants, group):
            yield from (store.resolve(row) for row in store.table.find_all(keys, where)[0] if row)

    def _is_of(self, row: int, group: int | None) -> bool:
        if group is None:
            return True
        free = self._store.table.state[row] in (State.FREE, State.ALIAS)
        return not free and self._store.tenant_of(row).group == group

    def _judge(self, row: int, swept: Swept, min_age_ms: int, min_idle_ms: int, now: int) -> None:
        table, state = self._store.table, self._store.table.state[row]
        if state in STORED:
            tick = now >> TICK_SHIFT
            idle = 0 if table.pins[row] else tick - table.used[row] << TICK_SHIFT
            if tick - table.born[row] << TICK_SHIFT < min_age_ms or idle < min_idle_ms:
                return
            if self._store.may_evict(row):
                swept.slots.append(row - 1)
                swept.size += table.length[row]
                return
        elif min_age_ms or min_idle_ms:
            return
        if state == State.COMMITTED and row in self._store.mirrors.of_base:
            swept.bases.append((row - 1, table.generation[row]))
        elif state in (State.DOOMED, State.RETIRED) or table.pins[row]:
            swept.leased += 1
        elif row in self._store.holds or state in _BUSY:
            swept.busy += 1


def _scopes(
    table: SpanTable, tenants: Iterable[Tenant | FileTenant], group: int | None
) -> list[int]:
    """The scopes of a group's tenants; None: of all."""
    ours = {tenant.number for tenant in tenants if tenant.group == group}
    return [where for _, where in table.scopes if group is None or where >> 64 in ours]


def _is_file_of(book: FileBook, row: int, group: int | None) -> bool:
    if group is None:
        return True
    return book.table.state[row] in FILE_KEYED and book.tenant_of(row).group == group


def _judge_file(book: FileBook, row: int, swept: Swept) -> None:
    state = book.table.state[row]
    if state in FILE_EVICTABLE:
        swept.slots.append(row)
        swept.size += book.table.length[row]
    elif state in FILE_KEYED:
        swept.busy += 1
