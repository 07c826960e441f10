"""Files of the disk tier: whose they are, what room they take, by which names they are found."""

from __future__ import annotations

from array import array
from collections.abc import Iterator

from kmesh_spand.core.batch import Batch, Rows
from kmesh_spand.core.config import DiskConfig
from kmesh_spand.core.diskfile import BLOCK_BYTES, SpanFile, file_bytes
from kmesh_spand.core.effects import Publish, Unpublish
from kmesh_spand.core.fileorder import FileOrder, FileTenant, Largest
from kmesh_spand.core.removals import Removals
from kmesh_spand.core.states import (
    FILE_EVICTABLE,
    FILE_KEYED,
    FILE_SHOWN,
    FILE_STORED,
    FILE_TRANSITIONS,
    FileState,
    FileTrigger,
    State,
)
from kmesh_spand.core.store import SpanStore
from kmesh_spand.core.table import SpanTable
from kmesh_spand.core.tags import scope, shard_of, tag
from kmesh_spand.core.tenants import Tenancy


class FileBook:
    """Every file, in a table of its own; ``move`` is the only way in which one changes state.

    A tenant's name is in the index where a file has it and no span in host memory is served
    under it.

    Attributes:
        table: a row for each file and each further name of one; ``tile`` is blocks.
        names: by row, of the files themselves.
        used, freeing: blocks of all files; of those that are being removed.
        removals: files that are to go.
        published: names in the index.
        tenants: by group and salt. order: in which their files go.
    """

    def __init__(
        self,
        config: DiskConfig,
        store: SpanStore,
        tenancy: Tenancy,
        jobs: Iterator[int],
        base: int,
        batch: Batch | None = None,
    ) -> None:
        self.config = config
        self.capacity = config.capacity // BLOCK_BYTES
        self.table = SpanTable(config.max_files, batch)
        self.names = array("Q", [0]) * (config.max_files + 1)
        self.used = self.freeing = self.published = self.payload = 0
        self.by_state = [0] * len(FileState)
        self.removals = Removals(store, jobs, config.max_removals)
        self.tenants: dict[tuple[int, bytes], FileTenant] = {}
        self._store = store
        # Quotas of the disk are its own; who shares with whom is not.
        self._tenancy = Tenancy(tenancy.groups, tenancy.shared, config.quotas, config.default_quota)
        self._base = base
        self._shown = bytearray(config.max_files + 1)
        self._first_alias: dict[int, int] = {}
        self._numbers: dict[int, FileTenant] = {}
        self._largest = Largest()
        self.order = FileOrder(config, batch, store.policy_failed)

    # Tenants

    def tenant_of(self, row: int) -> FileTenant:
        """Whose a file is."""
        return self._numbers[self.table.scopes.value(self.table.scope[row]) >> 64]

    def _open(self, group: int, salt: bytes) -> FileTenant:
        found = self.tenants.get((group, salt))
        if found is None:
            found = self.order.open(group, salt, self.quota(group, salt))
            self.tenants[group, salt] = self._numbers[found.number] = found
        return found

    def may_come(self, group: int) -> bool:
        """Whether anybody can ask for what a group stored: settings change between lives."""
        return not self._tenancy.groups or group in self._tenancy.groups

    def quota(self, group: int, salt: bytes) -> int:
        """Blocks that a tenant may keep, 0 for no limit."""
        return -(-self._tenancy.quota(group, salt) // BLOCK_BYTES)

    def _close(self, tenant: FileTenant) -> None:
        if not tenant.files:
            del self.tenants[tenant.group, tenant.salt], self._numbers[tenant.number]
            self.order.close(tenant)

    @property
    def largest(self) -> FileTenant | None:
        """Who loses a file first when the disk is full."""
        return self._largest.find(self._numbers)

    # Names

    def find(self, group: int, salt: bytes, key: bytes, shard: int) -> int:
        """The row of a name, or 0; ``resolve`` gives its file's."""
        tenant = self.tenants.get((group, salt))
        return self.table.find(key, scope(tenant.number, shard)) if tenant else 0

    def find_all(self, group: int, salt: bytes, keys: bytes, shard: int) -> Rows | None:
        """Rows of names that may be fetched, 0 where there is none; None: there is none at all."""
        tenant = self.tenants.get((group, salt))
        if tenant is None:
            return None
        rows, found = self.table.find_all(keys, scope(tenant.number, shard))
        if not found:
            return None
        for entry, row in enumerate(rows):
            if row:
                there = self.resolve(row)
                rows[entry] = there if self.table.state[there] in FILE_SHOWN else 0
        return rows

    def has(self, key: bytes, shard: int) -> bool:
        """Whether any tenant has a file of that name, written or not."""
        return any(self.find(*who, key, shard) for who in self.tenants)

    def shards(self, keys: bytes) -> Iterator[int]:
        """Codes of shards in which any of these keys names a file, of whichever tenant."""
        for _, where in self.table.scopes:
            if self.table.find_all(keys, where)[1]:
                yield shard_of(where)

    def resolve(self, row: int) -> int:
        """The file that a found row stands for; 0 stays 0."""
        return self.table.tile[row] if self.table.state[row] == FileState.ALIAS else row

    def aliases(self, row: int) -> Iterator[int]:
        """Rows that are further names of a file."""
        alias = self._first_alias.get(row, 0)
        while alias:
            yield alias
            alias = self.table.start[alias]

    def shard(self, row: int) -> int:
        """The shard code of a row."""
        return shard_of(self.table.scopes.value(self.table.scope[row]))

    def span(self, row: int) -> SpanFile:
        """What a file holds."""
        table, tenant = self.table, self.tenant_of(row)
        return SpanFile(
            group=tenant.group,
            salt=tenant.salt,
            key=table.key_of(row),
            namespace=table.spaces.value(table.space[row]),
            shard=self.shard(row),
            tokens=table.tokens[row],
            start=table.start[row],
            length=table.length[row],
            root=table.root[row],
            names=tuple((table.tokens[name], table.key_of(name)) for name in self.aliases(row)),
        )

    def enter(self, span: SpanFile, trigger: FileTrigger, name: int = 0) -> int:
        """A row for a file whose key nobody has; 0 if there is no place in the table."""
        table, tenant = self.table, self._open(span.group, span.salt)
        where = scope(tenant.number, span.shard)
        place = table.place_for(span.key, where)
        if (
            not table.vacant
            or place is None
            or table.scopes.full(where)
            or table.spaces.full(span.namespace)
        ):
            self._close(tenant)
            return 0
        row = table.take_row()
        table.space[row] = table.spaces.take(span.namespace)
        table.insert(row, span.key, where, place)
        table.generation[row] = table.generation[row] + 1 & 0xFFFF_FFFF
        table.tokens[row], table.start[row] = span.tokens, span.start
        table.length[row], table.root[row] = span.length, span.root
        table.tile[row] = file_bytes(span.length, len(span.names)) // BLOCK_BYTES
        self.names[row] = name
        self.used += table.tile[row]
        self.payload += span.length
        tenant.blocks += table.tile[row]
        self._largest.changed(tenant, self._numbers)
        tenant.files += 1
        for tokens, key in reversed(span.names):
            self._alias(row, key, tokens, where)
        self.order.enter(tenant, row, table.name_of(row))
        self.move(row, trigger)
        return row

    def _alias(self, row: int, key: bytes, tokens: int, where: int) -> None:
        table = self.table
        place = table.place_for(key, where)
        if not table.vacant or place is None or table.find(key, where):
            return
        alias = table.take_row()
        table.space[alias] = table.spaces.take(table.spaces.value(table.space[row]))
        table.insert(alias, key, where, place)
        table.state[alias] = FILE_TRANSITIONS[FileState.GONE, FileTrigger.NAME]
        table.tokens[alias], table.tile[alias] = tokens, row
        table.start[alias] = self._first_alias.get(row, 0)
        self._first_alias[row] = alias

    # States

    def move(self, row: int, trigger: FileTrigger) -> FileState:
        """Change a file's state and do what follows from it; returns the new state."""
        table, tenant = self.table, self.tenant_of(row)
        old = FileState(table.state[row])
        new = FILE_TRANSITIONS[old, trigger]
        if old in FILE_EVICTABLE and new not in FILE_EVICTABLE:
            tenant.evictable -= 1
            self.order.disallow(tenant, row)
        if old in FILE_SHOWN and new not in FILE_SHOWN:
            self._hide(row)
        if old in FILE_KEYED and new not in FILE_KEYED:
            self._drop_names(row)
        if (old in FILE_STORED) != (new in FILE_STORED):
            self._count(row, tenant, 1 if new in FILE_STORED else -1)
        table.state[row] = new
        self.by_state[old] -= old is not FileState.GONE
        self.by_state[new] += new is not FileState.GONE
        if new in FILE_SHOWN and old not in FILE_SHOWN:
            self._show(row, (row, *self.aliases(row)))
        if new in FILE_EVICTABLE and old not in FILE_EVICTABLE:
            tenant.evictable += 1
            if tenant.evictable == 1:
                self._largest.changed(tenant, self._numbers)
            self.order.allow(tenant, row, covered=self._in_memory(row, tenant))
        if new is FileState.REMOVING:
            self._remove(row, tenant)
        if new is FileState.GONE:
            self._give(row, tenant, removed=old is FileState.REMOVING)
        return new

    def _count(self, row: int, tenant: FileTenant, sign: int) -> None:
        space = self.table.space[row]
        held = tenant.spaces.setdefault(space, [0, 0])
        held[0] += sign
        held[1] += sign * self.table.length[row]
        if not held[0]:
            del tenant.spaces[space]

    def namespaces(self, group: int | None = None) -> dict[bytes, tuple[int, int]]:
        """Files and bytes of their payloads by namespace; ``group``: whose, None for all."""
        found: dict[bytes, tuple[int, int]] = {}
        for tenant in self.tenants.values():
            if group in (None, tenant.group):
                for number, (files, size) in tenant.spaces.items():
                    digest = self.table.spaces.value(number)
                    before = found.get(digest, (0, 0))
                    found[digest] = before[0] + files, before[1] + size
        return found

    def _remove(self, row: int, tenant: FileTenant) -> None:
        self.freeing += self.table.tile[row]
        tenant.blocks -= self.table.tile[row]
        self._largest.changed(tenant, self._numbers)
        self.removals.remove(row, self.names[row])

    def _give(self, row: int, tenant: FileTenant, *, removed: bool) -> None:
        blocks = self.table.tile[row]
        self.used -= blocks
        self.payload -= self.table.length[row]
        if removed:
            self.freeing -= blocks
        else:
            tenant.blocks -= blocks
            self._largest.changed(tenant, self._numbers)
        tenant.files -= 1
        self._give_row(row)
        self._close(tenant)

    def _give_row(self, row: int) -> None:
        self.table.scopes.drop(self.table.scope[row])
        self.table.spaces.drop(self.table.space[row])
        self.names[row] = 0
        self.table.give_row(row)

    def _drop_names(self, row: int) -> None:
        for alias in list(self.aliases(row)):
            self.table.remove(alias)
            self._give_row(alias)
        self._first_alias.pop(row, None)
        self.table.remove(row)

    def _in_memory(self, row: int, tenant: FileTenant) -> bool:
        """Whether host memory has a file's span, or will have it soon."""
        store = self._store
        there = store.tenants.find(tenant.group, tenant.salt)
        if there is None:
            return False
        host = store.table.find(self.table.key_of(row), scope(there.number, self.shard(row)))
        return bool(host) and store.table.state[host] != State.ALIAS

    def covered(self, row: int) -> None:
        """Memory has a file's span from now on."""
        allowed = self.table.state[row] in FILE_EVICTABLE
        self.order.cover(self.tenant_of(row), row, allowed=allowed)

    def uncovered(self, row: int, *, used: bool) -> None:
        """Memory has a file's span no more; ``used``: it was leased while it had."""
        allowed = self.table.state[row] in FILE_EVICTABLE
        self.order.uncover(self.tenant_of(row), row, allowed=allowed, used=used)

    # The index

    def _show(self, row: int, names: tuple[int, ...]) -> None:
        table, tenant, shard = self.table, self.tenant_of(row), self.shard(row)
        tags = []
        for name in names:
            key = table.key_of(name)
            if not self._shown[name] and not self._served(tenant, key, shard):
                self._shown[name] = 1
                tags.append(tag(key, shard))
        if tags:
            self.published += len(tags)
            slot = self._base + row - 1
            self._store.out.append(Publish(slot, tuple(tags), tenant.group, 0))

    def _hide(self, row: int) -> None:
        table, shard = self.table, self.shard(row)
        tags = []
        for name in (row, *self.aliases(row)):
            if self._shown[name]:
                self._shown[name] = 0
                tags.append(tag(table.key_of(name), shard))
        if tags:
            self.published -= len(tags)
            slot, group = self._base + row - 1, self.tenant_of(row).group
            self._store.out.append(Unpublish(slot, tuple(tags), group, 0))

    def shown(self, row: int) -> bool:
        """Whether the index has a name of a file's."""
        return bool(self._shown[row])

    def _served(self, tenant: FileTenant, key: bytes, shard: int) -> bool:
        store = self._store
        there = store.tenants.find(tenant.group, tenant.salt)
        row = store.table.find(key, scope(there.number, shard)) if there else 0
        return store.table.state[store.resolve(row)] == State.COMMITTED

    def _names_of(self, host: int) -> Iterator[int]:
        """Rows of files' names that a span in host memory has too."""
        store, tenant = self._store, self._store.tenant_of(host)
        if (tenant.group, tenant.salt) in self.tenants:
            shard = store.shard(host)
            for name in (host, *store.aliases(host)):
                key = store.table.key_of(name)
                if row := self.find(tenant.group, tenant.salt, key, shard):
                    yield row

    def cover(self, host: int) -> None:
        """A span in host memory was published: what the index had of its names is no more."""
        for row in self._names_of(host):
            self.published -= self._shown[row]
            self._shown[row] = 0

    def uncover(self, host: int) -> None:
        """A span in host memory is about to go: files with its names are found instead."""
        # Its own names still lead to it: it has left the index already.
        for row in self._names_of(host):
            there = self.resolve(row)
            if self.table.state[there] in FILE_SHOWN and not self._shown[row]:
                self._shown[row] = 1
                self.published += 1
                name = tag(self.table.key_of(row), self.shard(row))
                group, slot = self.tenant_of(there).group, self._base + there - 1
                self._store.out.append(Publish(slot, (name,), group, 0))
