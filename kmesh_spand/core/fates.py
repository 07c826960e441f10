"""What has become of keys: why each is served, or isn't. Reads, changes nothing.

What is asked here is asked of all tenants together, as an operator does.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kmesh_spand.core.batch import KEY_BYTES
from kmesh_spand.core.codes import Cause, Verdict
from kmesh_spand.core.disk import Disk
from kmesh_spand.core.endings import Endings
from kmesh_spand.core.states import State
from kmesh_spand.core.store import TICK_SHIFT, SpanStore
from kmesh_spand.core.tags import scope, shard_of

_VERDICTS = {
    State.RESERVED: Verdict.WRITING,
    State.COPYING: Verdict.WRITING,
    State.RECOVERED: Verdict.UNVERIFIED,
    State.VERIFYING: Verdict.UNVERIFIED,
    State.COMMITTED: Verdict.SERVED,
    State.SUSPECT: Verdict.SUSPECT,
    State.FETCHING: Verdict.ON_DISK,
}
#: Shards of which keys are looked for when nobody says which.
MAX_SHARDS = 256


@dataclass(frozen=True, slots=True)
class Fate:
    """One key in one shard. ``cause`` and ``ago_ms`` are of an ENDED one."""

    verdict: Verdict
    cause: Cause | None = None
    ago_ms: int = 0
    leases: int = 0


class Fates:
    """Answers from the table of spans and the memory of what ended."""

    def __init__(self, store: SpanStore, endings: Endings, disk: Disk | None = None) -> None:
        self._store = store
        self._endings = endings
        self._disk = disk

    def of(self, key: bytes, shard: int, now_ms: int) -> Fate:
        """What has become of a key of 32 bytes in a shard (a code)."""
        _store, table = self._store, self._store.table
        row = max(self._rows(key, shard), key=self._rank, default=0)
        if row:
            return Fate(_VERDICTS[State(table.state[row])], leases=table.pins[row])
        if self._disk is not None and self._disk.book.has(key, shard):
            return Fate(Verdict.ON_DISK)
        ending = self._endings.last(key, shard)
        if ending is not None:
            return Fate(Verdict.ENDED, ending.cause, self._ago(ending.tick, now_ms))
        forgotten = self._endings.oldest is not None
        return Fate(Verdict.UNKNOWN if forgotten else Verdict.NEVER)

    def served(self, keys: bytes, shard: int) -> int:
        """How many keys (32 bytes each) from the first on are served in a shard."""
        return max((self._served(keys, where) for where in self._scopes(shard)), default=0)

    def _served(self, keys: bytes, where: int) -> int:
        store, states = self._store, self._store.table.state
        for entry, row in enumerate(store.table.find_all(keys, where)[0]):
            if states[store.resolve(row)] != State.COMMITTED:
                return entry
        return len(keys) // KEY_BYTES

    def mirrors(self, keys: bytes, shard: int) -> int:
        """How many of these keys (32 bytes each) are kept as recipes in a shard, at most."""
        known, table = self._store.mirrors.by_row, self._store.table
        if not known or not keys:
            return 0
        found = (table.find_all(keys, where)[0] for where in self._scopes(shard))
        return max((sum(row in known for row in rows) for rows in found), default=0)

    def _scopes(self, shard: int) -> Iterator[int]:
        """A shard, of each tenant."""
        return (scope(tenant.number, shard) for tenant in self._store.tenants)

    def _rows(self, key: bytes, shard: int) -> Iterator[int]:
        store = self._store
        for where in self._scopes(shard):
            if row := store.table.find(key, where):
                yield store.resolve(row)

    def _rank(self, row: int) -> bool:
        return self._store.table.state[row] == State.COMMITTED

    def shards(self, keys: bytes, limit: int) -> list[int]:
        """Codes of at most ``limit`` shards in which any of these keys is, or has ended."""
        table = self._store.table
        found: dict[int, None] = {}
        for tried, (_, where) in enumerate(table.scopes):
            if tried == MAX_SHARDS or len(found) == limit:
                break
            if table.find_all(keys, where)[1]:
                found[shard_of(where)] = None
        if self._disk is not None and len(found) < limit:
            for shard in self._disk.book.shards(keys):
                if len(found) < limit:
                    found[shard] = None
        for at in range(0, len(keys), KEY_BYTES):
            for ending in self._endings.of(keys[at : at + KEY_BYTES]):
                if len(found) < limit:
                    found[ending.shard] = None
        return list(found)

    def remembered_ms(self, now_ms: int) -> int | None:
        """How far back every ending is known; None: all since the core's start."""
        oldest = self._endings.oldest
        return None if oldest is None else self._ago(oldest, now_ms)

    def _ago(self, tick: int, now_ms: int) -> int:
        return max(0, (now_ms >> TICK_SHIFT) - tick) << TICK_SHIFT
