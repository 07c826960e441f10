"""Recipes out of spans, and spans out of recipes: a few jobs at a time, off every hot path.

A recipe lies in the tier of its span and of its base, and that tier's worker makes it.

A job reads what it holds and writes a range of its own, a *draft*. When it is done, the draft takes
the names of the span over that it was made of; that one ends with its last lease.

The way back is the ``Densifier``'s; whose turn it is, is decided here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from kmesh.layout import TILE_BYTES, tiles
from kmesh_spand.core.batch import Rows
from kmesh_spand.core.config import CoreConfig
from kmesh_spand.core.densifier import Densifier
from kmesh_spand.core.drafts import Drafts
from kmesh_spand.core.effects import Encode, ForgetRecipe, KeepRecipe
from kmesh_spand.core.family import Family, Run
from kmesh_spand.core.lanes import Candidate, Lanes
from kmesh_spand.core.provenance import pieces
from kmesh_spand.core.rests import Rests
from kmesh_spand.core.states import State, Trigger
from kmesh_spand.core.store import SpanStore
from kmesh_spand.core.tenants import Tenant
from kmesh_spand.core.tries import Tries
from kmesh_spand.core.verdicts import Verdicts

#: Candidates that are looked at in one go: each takes as long as its family's base is large.
_TURN = 8
_U32 = 0xFFFF_FFFF
#: Characters that are kept of what a worker says.
_WHY_LENGTH = 200
_U64 = (1 << 64) - 1
_PRIVATE = "nothing of it was recovered"
_LARGE = "a recipe would not be smaller by 64 KiB"
_FAILED = "the job failed"


class Source(Protocol):
    """Knows which spans are worth looking at."""

    @property
    def waiting(self) -> Iterable[int]:
        """Tiers in which it has something to look through."""
        ...

    def look(self, tier: int) -> None:
        """Looks through a part of that, and offers what it finds."""
        ...

    def knows(self, family: Family) -> bool: ...
    def is_base(self, row: int) -> bool: ...
    def base(self, family: Family, shard: int, tier: int) -> Rows | None: ...
    def starved(self, family: Family, tier: int) -> None: ...
    def stored(self, row: int) -> None: ...
    def decodes(self, tenant: Tenant) -> None: ...

    def doubted(self, candidate: Candidate) -> None:
        """A base of it is not served now: it is to be looked at again when that is over."""


@dataclass(slots=True)
class EncodeJob:
    """``runs``: of the member, as it was begun with. ``bases``: rows that are held for it.
    ``draft``: 0 until there is a recipe."""

    candidate: Candidate
    runs: Sequence[Run]
    bases: Sequence[int]
    draft: int = 0


class Recoder:
    """Encodes what its source names, and begins what is to be made dense.

    Attributes:
        encodes: jobs in flight.
        densifier: makes spans of recipes.
        lanes: what waits, by tier.
        verdicts: on spans that stay dense.
        rests: spans that stay so for a while, since somebody asked for them.
        source: what may be worth a recipe.
    """

    source: Source

    def __init__(self, config: CoreConfig, store: SpanStore, job_ids: Iterator[int]) -> None:
        self._config = config
        self._store = store
        self._job_ids = job_ids
        self._drafts = Drafts(store, config.patience_ms)
        self._tries = Tries()
        self.encodes: dict[int, EncodeJob] = {}
        self.lanes = Lanes(config, store)
        self.verdicts = Verdicts(store.table)
        self.rests = Rests(store, config.dense_rest_ms)
        self.densifier = Densifier(
            store, job_ids, self.lanes, self._drafts, self._tries, self.verdicts, self.rests
        )

    @property
    def behind(self) -> bool:
        """Whether ``pump`` has left something undone that needs nothing but time."""
        if self.lanes.draining:
            return False
        lanes = self.lanes
        return bool(lanes.to_densify() or lanes.to_encode()) or self._to_look() is not None

    def _to_look(self) -> int | None:
        """A tier that has nothing else to do than to look for more."""
        return next((tier for tier in self.source.waiting if self.lanes.idle(tier)), None)

    def pump(self) -> None:
        """Begins as many jobs as may be in flight; looks at a few spans for that."""
        mirrors, table = self._store.mirrors.by_row, self._store.table
        for _ in range(_TURN):
            if row := self.rests.over():
                self.verdicts.gone(row)
                if table.state[row] == State.COMMITTED:
                    self.source.stored(row)
        for _ in range(_TURN):
            if self.lanes.draining:
                return
            if lane := self.lanes.to_densify():
                row, (generation, drop) = lane.wishes.popitem(last=False)
                if row in mirrors and table.generation[row] == generation:
                    self.densifier.begin(row, drop=drop)
            elif lane := self.lanes.to_encode():
                self._encode(lane.next())
            elif (tier := self._to_look()) is not None:
                self.source.look(tier)
            else:
                return

    # Recipes

    def _refuse(self, candidate: Candidate, why: str) -> None:
        self.verdicts.add(candidate.row, why, candidate.family)
        self._store.counters["encode_refused"] += 1

    def _judge(self, job: EncodeJob, why: str) -> None:
        """A job's span stays dense, unless more is known of it by now than the job was told."""
        candidate = job.candidate
        if candidate.family.members[candidate.member].runs == job.runs:
            self._refuse(candidate, why)

    def _is(self, row: int, generation: int) -> bool:
        """Whether a row is still that span, served and dense, and nothing refers to it."""
        store, table = self._store, self._store.table
        return (
            table.state[row] == State.COMMITTED
            and table.generation[row] == generation
            and row not in store.mirrors.by_row
            and row not in store.mirrors.of_base
            and not self.source.is_base(row)
        )

    def _encode(self, candidate: Candidate) -> None:
        store, table, family = self._store, self._store.table, candidate.family
        row = candidate.row
        if not self.source.knows(family) or not self._is(row, candidate.generation):
            return
        if self.verdicts.of(row, family):
            return
        if any(job.candidate.row == row for job in self.encodes.values()):
            return
        shard, tier = store.shard(row), store.tier_of(row)
        base = self.source.base(family, shard, tier)
        if base is None:
            self.source.starved(family, tier)
            return
        space = table.spaces.value(table.space[row])
        token = family.payload_bytes(1, shard)
        for number in (row, *base):
            sized = table.tokens[number] * token
            if table.length[number] != sized or table.space[number] != table.space[row]:
                self._refuse(candidate, f"its layout, or that of the base, is not {family.dtype}'s")
                return
        if space != family.namespace:
            self._refuse(candidate, "it is of another namespace")
            return
        if tiles(table.length[row]) < 2:
            self._refuse(candidate, _LARGE)
            return
        runs = family.members[candidate.member].runs
        rows, found = list(base), pieces(table, row, base, family, runs)
        if runs:
            if not found:
                self._refuse(candidate, _PRIVATE)
                return
            numbers = {number: i for i, number in enumerate(sorted({p.base for p in found}))}
            rows = [base[number] for number in numbers]
            found = [piece.of(numbers) for piece in found]
        job = next(self._job_ids)
        self.encodes[job] = EncodeJob(candidate, runs, rows)
        self.lanes.of(row).encodes += 1
        store.hold((row, *rows))
        store.out.append(
            Encode(
                job,
                self._drafts.payload(row),
                family.namespace,
                family.dtype,
                family.head_dim,
                shard,
                [self._drafts.payload(number) for number in rows],
                family.frequencies,
                family.interleaved,
                found,
            )
        )

    def encoded(self, number: int, length: int, used: Sequence[int]) -> None:
        """There is a recipe: it gets a range, if it is still wanted and small enough."""
        job = self.encodes.get(number)
        if job is None or job.draft:
            return
        store, table, row = self._store, self._store.table, job.candidate.row
        count = len(job.bases)
        good = 0 < length <= _U32 and bool(used) and all(0 <= base < count for base in used)
        if not good or not self._stands(job):
            self._end_encode(number, forget=True)
            if good:
                self._doubted(job.candidate)
            return
        if tiles(length) >= tiles(table.length[row]):
            self._judge(job, _LARGE)
            self._end_encode(number, forget=True)
            return
        kept = [job.bases[base] for base in sorted(set(used))]
        store.hold(kept)
        store.let_go(job.bases)
        job.bases = kept
        job.draft = self._drafts.take(row, length)
        if not job.draft:
            store.counters["encode_no_room"] += 1
            self._end_encode(number, forget=True)
            return
        at = table.tile[job.draft] * TILE_BYTES
        store.out.append(KeepRecipe(number, table.slab[job.draft], at, length))

    def _stands(self, job: EncodeJob) -> bool:
        states = self._store.table.state
        return (
            not self.lanes.draining
            and self._is(job.candidate.row, job.candidate.generation)
            and all(states[base] == State.COMMITTED for base in job.bases)
        )

    def not_encoded(self, number: int, why: str) -> None:
        """A payload stays as it is."""
        job = self.encodes.get(number)
        if job is not None:
            if self._is(job.candidate.row, job.candidate.generation):
                self._judge(job, why[:_WHY_LENGTH])
            self._end_encode(number)

    def spoiled(self, number: int, bases: Sequence[int], *, span: bool) -> Sequence[int]:
        """What a recipe was to be made of has changed since it was stored.

        Returns:
            Rows whose bytes are not what they were.
        """
        job = self.encodes.get(number)
        if job is None:
            return ()
        rows = [job.candidate.row] if span else []
        rows += [job.bases[base] for base in bases if 0 <= base < len(job.bases)]
        lane = self.lanes.of(job.candidate.row)
        self._end_encode(number)
        self._store.counters["encode_spoiled"] += 1
        candidate = job.candidate
        if not span and self._tries.once_more(candidate.row, candidate.generation):
            lane.again.append(candidate)
        return rows

    def kept(self, number: int, root: int) -> None:
        """A recipe lies in its range: it takes over, if what it was made of still stands."""
        job = self.encodes.get(number)
        if job is None or not job.draft:
            return
        store, table, row = self._store, self._store.table, job.candidate.row
        if self._stands(job):
            draft, job.draft = job.draft, 0
            table.root[draft] = root & _U64
            store.mirrors.add(draft, table.length[row], table.root[row], job.bases)
            store.take_over(row, draft)
            store.counters["encodes"] += 1
            self._end_encode(number)
        else:
            self._end_encode(number)
            self._doubted(job.candidate)

    def _doubted(self, candidate: Candidate) -> None:
        """A job was for nothing: not for ever, if the span is still what it was."""
        if not self.lanes.draining and self._is(candidate.row, candidate.generation):
            self.source.doubted(candidate)

    def _end_encode(self, number: int, *, forget: bool = False) -> None:
        store, job = self._store, self.encodes.pop(number)
        self.lanes.of(job.candidate.row).encodes -= 1
        if job.draft:
            store.move(job.draft, Trigger.FAILED)
        if forget:
            store.out.append(ForgetRecipe(number, store.table.slab[job.candidate.row]))
        store.let_go((job.candidate.row, *job.bases))

    # Spans

    def wanted(self, tenant: Tenant) -> None:
        """Somebody asks for a tenant's recipes in a tier; on a GPU none are made before that."""
        if not tenant.decodes:
            tenant.decodes = True
            if tenant.tier:
                self.source.decodes(tenant)

    # Failures

    def failed(self, number: int) -> None:
        """A job could not be done, for a reason of its own: once more, and then no more."""
        job = self.encodes.get(number)
        if job is None:
            self.densifier.failed(number)
            return
        candidate, lane = job.candidate, self.lanes.of(job.candidate.row)
        self._end_encode(number)
        self._store.counters["encode_failed"] += 1
        if self._tries.once_more(candidate.row, candidate.generation):
            lane.again.append(candidate)
        elif self._is(candidate.row, candidate.generation):
            self.verdicts.add(candidate.row, _FAILED, candidate.family)
