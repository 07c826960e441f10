"""Spans out of recipes: mirrors are made dense for who takes no recipes, and before a base goes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kmesh.layout import TILE_BYTES
from kmesh_spand.core.codes import Cause
from kmesh_spand.core.drafts import Drafts
from kmesh_spand.core.effects import Densify
from kmesh_spand.core.lanes import Lanes
from kmesh_spand.core.rests import Rests
from kmesh_spand.core.states import State, Trigger
from kmesh_spand.core.store import SpanStore
from kmesh_spand.core.tries import Tries
from kmesh_spand.core.verdicts import Verdicts

_ASKED = "it was asked for dense"


@dataclass(frozen=True, slots=True)
class DensifyJob:
    """``drop``: without room, the mirror goes."""

    row: int
    draft: int
    drop: bool


class Densifier:
    """Has mirrors decoded, each into a draft that takes its names over.

    Args:
        lanes, drafts, tries, verdicts: the recoder's.
        rests: told of spans that stay dense for a while, since somebody asked for them.

    Attributes:
        jobs: in flight.
    """

    def __init__(
        self,
        store: SpanStore,
        job_ids: Iterator[int],
        lanes: Lanes,
        drafts: Drafts,
        tries: Tries,
        verdicts: Verdicts,
        rests: Rests,
    ) -> None:
        self._store = store
        self._job_ids = job_ids
        self._lanes = lanes
        self._drafts = drafts
        self._tries = tries
        self._verdicts = verdicts
        self._rests = rests
        self.jobs: dict[int, DensifyJob] = {}

    def ask(self, row: int) -> bool:
        """Have a mirror made dense, soon; False if there is no room for that."""
        if self._under_way(row):
            return True
        if self._lanes.draining:
            return False
        lane = self._lanes.of(row)
        if row in lane.wishes or not self._lanes.may_densify(lane):
            self.want(row)
            return True
        return self.begin(row, drop=False)

    def want(self, row: int, *, drop: bool = False) -> None:
        """Have a mirror made dense when its turn comes.

        Args:
            drop: without room, it goes.
        """
        if self._under_way(row):
            return
        generation = self._store.table.generation[row]
        wishes = self._lanes.of(row).wishes
        earlier = wishes.get(row)
        if earlier is not None and earlier[0] == generation:
            drop |= earlier[1]
        wishes[row] = generation, drop

    def _under_way(self, row: int) -> bool:
        return any(job.row == row for job in self.jobs.values())

    def begin(self, row: int, *, drop: bool) -> bool:
        """Begin a job for a mirror; False if its bases are not served, or there is no room.

        Args:
            drop: without room, it goes.
        """
        store, table = self._store, self._store.table
        mirror = store.mirrors.by_row[row]
        if table.state[row] != State.COMMITTED or not store.mirrors.usable(row):
            self._stays(row)
            return False
        store.hold([row])
        draft = self._drafts.take(row, mirror.length)
        if not draft:
            store.counters["densify_no_room"] += 1
            if not drop:
                self._stays(row)
            store.let_go([row])
            if drop:
                store.mirrors.drop(row, Cause.OPERATOR)
            return False
        job = next(self._job_ids)
        self.jobs[job] = DensifyJob(row, draft, drop)
        self._lanes.of(row).densifies += 1
        read = self._drafts.payload(row)
        bases = [self._drafts.payload(base) for base in mirror.bases]
        at = table.tile[draft] * TILE_BYTES
        store.out.append(
            Densify(job, read, bases, table.slab[draft], at, mirror.length, mirror.root)
        )
        return True

    def _stays(self, row: int) -> None:
        """A mirror stays one, so its base stays too."""
        for base in self._store.mirrors.by_row[row].bases:
            self._store.condemned.pop(base, None)

    def done(self, number: int, good: bool) -> Sequence[int]:
        """A payload lies in its range, or the recipe did not give it.

        Returns:
            Rows whose bytes may be why it did not.
        """
        job = self.jobs.pop(number, None)
        if job is None:
            return ()
        store, table = self._store, self._store.table
        self._lanes.of(job.row).densifies -= 1
        mirror = store.mirrors.by_row[job.row]
        served = table.state[job.row] == State.COMMITTED
        if good and served and store.mirrors.usable(job.row):
            table.root[job.draft] = mirror.root
            store.take_over(job.row, job.draft)
            self._verdicts.add(job.draft, _ASKED, None)
            self._rests.begin(job.draft)
            store.counters["densified"] += 1
        else:
            store.move(job.draft, Trigger.FAILED)
            if not good and served:
                store.counters["corrupt"] += 1
                store.mirrors.drop(job.row, Cause.CORRUPT)
        store.let_go([job.row])
        return () if good else mirror.bases

    def failed(self, number: int) -> None:
        """A job could not be done, for a reason of its own: once more, and then no more."""
        job = self.jobs.pop(number, None)
        if job is None:
            return
        store, generation = self._store, self._store.table.generation[job.row]
        lane = self._lanes.of(job.row)
        lane.densifies -= 1
        store.move(job.draft, Trigger.FAILED)
        store.counters["densify_failed"] += 1
        if self._tries.once_more(job.row, generation):
            lane.wishes[job.row] = generation, job.drop
        else:
            self._stays(job.row)
        store.let_go([job.row])

    def evict_bases(self, spans: Sequence[tuple[int, int]], *, drop: bool) -> None:
        """Bases (slot and generation) go once their mirrors were made dense.

        Args:
            drop: mirrors for which there is no room go too; otherwise they stay, and their base.
        """
        store, table = self._store, self._store.table
        for slot, generation in spans:
            row = slot + 1
            if table.generation[row] != generation:
                continue
            mirrors = store.mirrors.of_base.get(row)
            if mirrors:
                store.condemned[row] = generation
                for mirror in sorted(mirrors):
                    if mirror in store.mirrors.by_row:
                        self.want(mirror, drop=drop)
            elif store.may_evict(row):
                store.discard(row)
