"""Mirrors: spans whose ranges hold recipes, and the dense spans that these refer to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kmesh.layout import tiles
from kmesh_spand.core.codes import Cause
from kmesh_spand.core.states import STORED, State, Trigger

if TYPE_CHECKING:
    from kmesh_spand.core.store import SpanStore


@dataclass(frozen=True, slots=True)
class BaseFact:
    """A span as a recipe names it: see ``docs/recipe-format.md``, "Segments"."""

    key: bytes
    generation: int
    root: int
    tokens: int
    position: int


@dataclass(frozen=True, slots=True)
class RecipeFacts:
    """What was read in a recipe: bytes and root of the payload that it gives, and its base."""

    length: int
    root: int
    bases: Sequence[BaseFact]


@dataclass(slots=True, eq=False)
class Mirror:
    """What is known of a recipe.

    Attributes:
        length, root: of the payload that it gives; the root is 0 until the recipe was read.
        bases: rows that it refers to, each held for it; none until it was read.
        lost: one of them turned out bad, so it will not be served any more.
    """

    length: int
    root: int = 0
    bases: tuple[int, ...] = ()
    lost: bool = False


class Mirrors:
    """All rows that hold recipes. A base is never one of them, so there are no chains.

    Attributes:
        by_row: the mirrors.
        of_base: for each row that mirrors refer to, which.
        spans, stored_bytes, dense_bytes, tiles: of mirrors with a catalog record.
    """

    def __init__(self, store: SpanStore) -> None:
        self._store = store
        self.by_row: dict[int, Mirror] = {}
        self.of_base: dict[int, set[int]] = {}
        self.spans = 0
        self.stored_bytes = 0
        self.dense_bytes = 0
        self.tiles = 0

    def among(self, rows: Iterable[int]) -> bool:
        """Whether one of these rows is a mirror."""
        return bool(self.by_row) and not self.by_row.keys().isdisjoint(rows)

    def dense(self, row: int) -> int:
        """Payload bytes that a row's recipe gives; 0: it holds no recipe."""
        mirror = self.by_row.get(row)
        return mirror.length if mirror else 0

    def usable(self, row: int) -> bool:
        """Whether all that a mirror refers to is served itself."""
        states = self._store.table.state
        return all(states[base] == State.COMMITTED for base in self.by_row[row].bases)

    # How they come and go. The store tells of counts and of rows that are free.

    def add(self, row: int, length: int, root: int, bases: Sequence[int]) -> None:
        """A row holds a recipe over these rows, which it holds from now on."""
        assert not self.among(bases), "a recipe refers to a recipe"
        mirror = self.by_row[row] = Mirror(length, root)
        self._refer(row, mirror, bases)

    def recovered(self, row: int, length: int) -> None:
        """A row of an earlier epoch holds a recipe, which nobody has read yet."""
        self.by_row[row] = Mirror(length)

    def settle(self, row: int, facts: RecipeFacts | None) -> bool:
        """A recipe was read. False: it can't be served, since what it names is not there."""
        mirror = self.by_row[row]
        if facts is None or mirror.lost or facts.length != mirror.length:
            return False
        found = [self._find(row, fact) for fact in facts.bases]
        if not found or not all(found) or len(set(found)) < len(found):
            return False
        if not mirror.bases:
            mirror.root = facts.root
            self._refer(row, mirror, found)
        return mirror.root == facts.root and sorted(mirror.bases) == sorted(found)

    def _find(self, row: int, fact: BaseFact) -> int:
        table = self._store.table
        base = table.find(fact.key, table.scopes.value(table.scope[row]))
        if (
            table.state[base] not in STORED
            or base in self.by_row
            or base == row
            or table.generation[base] != fact.generation
            or table.root[base] != fact.root
            or table.tokens[base] != fact.tokens
            or table.start[base] != fact.position
        ):
            return 0
        return base

    def _refer(self, row: int, mirror: Mirror, bases: Sequence[int]) -> None:
        mirror.bases = tuple(bases)
        for base in bases:
            self.of_base.setdefault(base, set()).add(row)
        self._store.hold(bases)

    def count(self, row: int, sign: int) -> None:
        """A row begins (1) or ceases (-1) to have a catalog record."""
        mirror = self.by_row.get(row)
        if mirror:
            self.spans += sign
            length = self._store.table.length[row]
            self.stored_bytes += sign * length
            self.tiles += sign * tiles(length)
            self.dense_bytes += sign * mirror.length

    def freed(self, row: int) -> None:
        """A row is no span any more."""
        mirror = self.by_row.pop(row, None)
        if mirror is None:
            return
        for base in mirror.bases:
            others = self.of_base[base]
            others.remove(row)
            if not others:
                del self.of_base[base]
        self._store.let_go(mirror.bases)

    def base_lost(self, row: int) -> None:
        """A row's bytes are bad: what refers to it is not served any more."""
        store = self._store
        for mirror in sorted(self.of_base.get(row, ())):
            self.by_row[mirror].lost = True
            if store.table.state[mirror] in (State.COMMITTED, State.RECOVERED):
                self.drop(mirror, Cause.CORRUPT)

    def drop(self, row: int, cause: Cause) -> None:
        """A mirror is not served any more; it ends with its last lease."""
        store = self._store
        store.counters["mirrors_dropped"] += 1
        store.move(row, Trigger.BAD_LEASED if store.held(row) else Trigger.BAD, cause)

    # Making room

    def removable(self, row: int) -> bool:
        """Whether a row may be evicted once the mirrors that hold it were."""
        store = self._store
        mirrors = self.of_base.get(row, ())
        return (
            bool(mirrors)
            and store.table.state[row] == State.COMMITTED
            and not store.table.pins[row]
            and store.holds[row] == len(mirrors)
            and all(map(store.may_evict, mirrors))
        )
