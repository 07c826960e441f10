"""The tier below host memory: what is written to files, and what becomes of the files."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from kmesh.layout import TILE_BYTES
from kmesh_spand.core.batch import Batch
from kmesh_spand.core.checks import is_shard
from kmesh_spand.core.codes import Cause, Trouble
from kmesh_spand.core.config import CoreConfig, DiskConfig
from kmesh_spand.core.diskfile import BLOCK_BYTES, SpanFile, file_bytes
from kmesh_spand.core.effects import Spill
from kmesh_spand.core.fetches import Fetches
from kmesh_spand.core.fileroom import FileRoom
from kmesh_spand.core.files import FileBook
from kmesh_spand.core.states import FILE_EVICTABLE, FILE_SHOWN, FileState, FileTrigger, State
from kmesh_spand.core.store import SpanStore
from kmesh_spand.core.tenants import Tenancy
from kmesh_spand.core.views import DiskStatus, DiskTenantRow, FetchRow

_U64 = (1 << 64) - 1


class Disk:
    """Writes every span of host memory to a file soon after it is committed.

    A span that is evicted later is then only forgotten by memory: no one waits for a write. One
    that is evicted before is lost, and counted.

    Attributes:
        book: the files. fetches: how they come back. room: which of them go for others.
        ready: the directory is known, so that files may be written.
        writes: row of ``book.table`` by job in flight.
        failing_since_ms: since when no file could be written; None: the last one could.
    """

    def __init__(
        self,
        config: DiskConfig,
        core: CoreConfig,
        store: SpanStore,
        tenancy: Tenancy,
        jobs: Iterator[int],
        batch: Batch | None = None,
    ) -> None:
        self.config = config
        self.book = FileBook(config, store, tenancy, jobs, core.max_spans, batch)
        self.room = FileRoom(self.book, store)
        self.fetches = Fetches(config, core, store, self.book, jobs)
        self.ready = False
        self.writes: dict[int, int] = {}
        self.failing_since_ms: int | None = None
        self._core = core
        self._store = store
        self._jobs = jobs
        self._queue: deque[tuple[int, int]] = deque()
        self._resume_ms = 0
        self._pause_ms = 0

    def __len__(self) -> int:
        return 1

    @property
    def queued(self) -> int:
        """Spans that wait to be written."""
        return len(self._queue)

    @property
    def settled(self) -> bool:
        """Whether nothing is being written, and nothing will be before something happens."""
        waits = self.ready and self._queue and self._store.now_ms >= self._resume_ms
        return not self.writes and not waits

    # What becomes of spans in host memory

    def stored(self, row: int) -> None:
        """A span is committed: a file with other bytes under its key is out of date."""
        store, book = self._store, self.book
        tenant = store.tenant_of(row)
        if tenant.tier:
            return
        book.cover(row)
        if row in store.mirrors.by_row:
            # Its file, if there is one, has the payload that the recipe gives.
            return
        found = self._file_of(row)
        if found:
            self.fetches.overtaken(found)
            book.covered(found)
            same = (book.table.root[found], book.table.length[found]) == (
                store.table.root[row],
                store.table.length[row],
            )
            if same:
                return
            self._outdated(found)
        self._queue.append((row, store.table.generation[row]))
        if len(self._queue) > 2 * self._core.max_spans:
            queued = dict.fromkeys(self._queue)
            self._queue = deque(item for item in queued if self._is_there(*item))

    def gone(self, row: int, cause: Cause) -> None:
        """A span's names are about to go: its file, if there is one, is all that is left."""
        if not self._store.tenant_of(row).tier:
            self.book.uncover(row)
            if found := self._file_of(row):
                table = self._store.table
                # What was used in an earlier life is not known.
                unused = max(table.born[row], self._store.recovered_tick)
                self.book.uncovered(found, used=table.used[row] > unused)

    def _file_of(self, row: int) -> int:
        """The file whose own key a span has, or 0."""
        store, tenant = self._store, self._store.tenant_of(row)
        key = store.table.key_of(row)
        found = self.book.find(tenant.group, tenant.salt, key, store.shard(row))
        return found if self.book.table.state[found] != FileState.ALIAS else 0

    def _outdated(self, row: int) -> None:
        state = FileState(self.book.table.state[row])
        if state is FileState.WRITING:
            self.book.move(row, FileTrigger.ABANDON)
        elif state in FILE_EVICTABLE:
            self.book.move(row, FileTrigger.EVICT)
        # Nothing else: a span whose file is wanted, or read, is not stored otherwise meanwhile.

    def _is_there(self, row: int, generation: int) -> bool:
        table = self._store.table
        return (
            table.state[row] == State.COMMITTED
            and table.generation[row] == generation
            and row not in self._store.mirrors.by_row
        )

    # Writing

    def pump(self) -> None:
        """Start what may be started."""
        self.fetches.pump()
        if self._queue and self.ready and self._store.now_ms >= self._resume_ms:
            self._spill()

    def _spill(self) -> None:
        counters = self._store.counters
        # What a scan found too much takes room until it is gone.
        while (
            not self.book.removals.strays
            and self._queue
            and len(self.writes) < self.config.max_writes
        ):
            row, generation = self._queue[0]
            if not self._is_there(row, generation):
                # Evicted: if not by a damage that was found, it is lost.
                counters["disk_spill_missed"] += 1
            elif not self._file_of(row) and not self._other_name(row):
                span = self._describe(row)
                blocks = file_bytes(span.length, len(span.names)) // BLOCK_BYTES
                room = self.room.make(span.group, span.salt, blocks)
                if room is None:
                    return
                if not room or not self._write(row, span):
                    counters["disk_spill_refused"] += 1
            self._queue.popleft()

    def _other_name(self, row: int) -> bool:
        """Whether a file has a span's key as a further name: it is found by that."""
        store, tenant = self._store, self._store.tenant_of(row)
        key = store.table.key_of(row)
        return bool(self.book.find(tenant.group, tenant.salt, key, store.shard(row)))

    def _describe(self, row: int) -> SpanFile:
        store, table, tenant = self._store, self._store.table, self._store.tenant_of(row)
        return SpanFile(
            group=tenant.group,
            salt=tenant.salt,
            key=table.key_of(row),
            namespace=table.spaces.value(table.space[row]),
            shard=store.shard(row),
            tokens=table.tokens[row],
            start=table.start[row],
            length=table.length[row],
            root=table.root[row],
            names=tuple((table.tokens[name], table.key_of(name)) for name in store.aliases(row)),
        )

    def _write(self, row: int, span: SpanFile) -> bool:
        file = self.book.enter(span, FileTrigger.SPILL)
        if not file:
            return False
        job = next(self._jobs)
        self.writes[job] = file
        table = self._store.table
        self._store.out.append(Spill(job, table.slab[row], table.tile[row] * TILE_BYTES, span))
        return True

    def spilled(self, job: int, name: int) -> None:
        """A file is written, under this name."""
        row = self.writes.pop(job, 0)
        if not row:
            return
        self.failing_since_ms, self._pause_ms = None, 0
        counters = self._store.counters
        counters["disk_spilled"] += 1
        counters["disk_spilled_bytes"] += self.book.table.length[row]
        self.book.names[row] = name
        self.book.move(row, FileTrigger.WRITTEN)

    def spill_failed(self, job: int, trouble: int) -> None:
        """A file could not be written: its span is not tried again, and others later."""
        row = self.writes.pop(job, 0)
        if not row:
            return
        store, book = self._store, self.book
        tenant, blocks = book.tenant_of(row), book.table.tile[row]
        book.move(row, FileTrigger.FAILED)
        if trouble == Trouble.LOST:
            store.counters["disk_spill_missed"] += 1
            return
        store.counters["disk_spill_failed"] += 1
        if self.failing_since_ms is None:
            self.failing_since_ms = store.now_ms
        self._pause_ms = min(self._pause_ms * 2 or self.config.hold_ms, self.config.longest_hold_ms)
        self._resume_ms = store.now_ms + self._pause_ms
        if trouble == Trouble.FULL:
            # Others fill the file system: what the next file needs is taken from our own.
            store.counters["disk_full"] += 1
            while blocks > 0 and (victim := self.room.victim(tenant)):
                blocks -= book.table.tile[victim]
                self.room.evict(victim)

    # The directory

    def found(self, files: Sequence[tuple[int, SpanFile]]) -> None:
        """Files of an earlier epoch. What there is no room for, or is there twice, is removed."""
        book, counters = self.book, self._store.counters
        for name, span in files:
            there = book.find(span.group, span.salt, span.key, span.shard)
            if there and book.table.state[there] == FileState.ALIAS:
                there = 0
            if (there and book.names[there] == name) or name in book.removals.names:
                continue
            row = 0
            blocks = file_bytes(span.length, len(span.names)) // BLOCK_BYTES
            known = book.find(span.group, span.salt, span.key, span.shard)
            if not known and self._fits(span, blocks):
                row = book.enter(span, FileTrigger.FIND, name)
            if row:
                counters["disk_found"] += 1
            else:
                counters["disk_found_dropped"] += 1
                book.removals.remove(0, name)

    def _fits(self, span: SpanFile, blocks: int) -> bool:
        book = self.book
        tenant, quota = book.tenants.get((span.group, span.salt)), book.quota(span.group, span.salt)
        mine = tenant.blocks if tenant else 0
        return (
            book.used + blocks <= book.capacity
            and book.may_come(span.group)
            and is_shard(span.shard)
            and all(0 < tokens < span.tokens for tokens, _ in span.names)
            and not (quota and mine + blocks > quota)
            and 0 < span.tokens <= self._core.span_tokens
            and span.tokens % self._core.sub_tokens == 0
        )

    def unlinked(self, job: int, *, ok: bool) -> None:
        """A file is gone, or could not be removed: the next scan finds it again."""
        if not ok:
            self._store.counters["disk_unlink_failed"] += 1
        if row := self.book.removals.ended(job):
            self.book.move(row, FileTrigger.REMOVED)

    def forget(self, rows: Sequence[int]) -> None:
        """Remove files that an operator wants gone; those that are in use stay."""
        book = self.book
        for row in rows:
            if 0 < row <= book.table.rows and book.table.state[row] in FILE_EVICTABLE:
                self._store.counters["disk_discarded"] += 1
                book.move(row, FileTrigger.EVICT)

    # Views

    def status(self) -> DiskStatus:
        """Counts of everything."""
        book, states = self.book, self.book.by_state
        failing, away = self.failing_since_ms, self.fetches.outage.since_ms
        return DiskStatus(
            capacity=book.capacity * BLOCK_BYTES,
            used=book.used * BLOCK_BYTES,
            spans=sum(states[state] for state in (*FILE_SHOWN, FileState.HELD)),
            span_bytes=book.payload,
            writing=len(self.writes),
            queued=self.queued,
            reading=states[FileState.READING],
            wanted=states[FileState.WANTED],
            waits=self.fetches.arrivals,
            held=states[FileState.HELD],
            ready=self.ready,
            failing_ms=0 if failing is None else max(1, self._store.now_ms - failing),
            away_ms=0 if away is None else max(1, self._store.now_ms - away),
        )

    def tenant_rows(self, group: int | None = None) -> list[DiskTenantRow]:
        """Tenants that have files, by name; ``group``: whose, None for all."""
        rows = [
            DiskTenantRow(
                tenant.name, tenant.quota * BLOCK_BYTES, tenant.blocks * BLOCK_BYTES, tenant.files
            )
            for tenant in self.book.tenants.values()
            if group in (None, tenant.group)
        ]
        return sorted(rows, key=lambda row: row.name)

    def fetch_rows(self, limit: int, now_ms: int, group: int | None = None) -> list[FetchRow]:
        """The oldest fetches, at most ``limit``; ``group``: whose, None for all."""
        table = self.book.table
        rows: list[FetchRow] = []
        for flight in self.fetches.flights.values():
            tenant = self.book.tenant_of(flight.row)
            if group in (None, tenant.group) and len(rows) < limit:
                rows.append(
                    FetchRow(
                        fetch=flight.id,
                        state=FileState(table.state[flight.row]).name.lower(),
                        tenant=tenant.name,
                        leader=flight.leader.id if flight.leader else 0,
                        waiters=len(flight.arrivals),
                        length=table.length[flight.row],
                        age_ms=max(0, now_ms - flight.began_ms),
                        key=table.key_of(flight.row),
                    )
                )
        return rows
