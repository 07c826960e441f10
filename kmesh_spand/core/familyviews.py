"""What the core shows of families."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

from kmesh.layout import TILE_BYTES, tiles
from kmesh_spand.core.families import FamilyBook
from kmesh_spand.core.family import Family, Member
from kmesh_spand.core.recoder import Recoder
from kmesh_spand.core.store import SpanStore
from kmesh_spand.core.tenants import tenant_name
from kmesh_spand.core.views import FamilyRow, MemberRow


@dataclass(slots=True)
class _Sizes:
    """Bytes that spans would take dense, that they have, and that their recipes have of these;
    tiles that they take."""

    dense: int = 0
    stored: int = 0
    recipes: int = 0
    tiles: int = 0


class FamilyViews:
    """Looks, changes nothing. O(spans of what is shown)."""

    def __init__(self, store: SpanStore, book: FamilyBook, recoder: Recoder) -> None:
        self._store = store
        self._book = book
        self._recoder = recoder

    def find(
        self, *, number: int = 0, name: str = "", salt: bytes = b"", group: int, every: bool
    ) -> Family | None:
        """A family by its number, or by its tenant's name for it.

        Args:
            group: whose.
            every: anybody's, if a number names it.
        """
        if not number:
            return self._book.find((group, salt), name)
        found = self._book.by_id.get(number)
        return found if found and (every or found.owner[0] == group) else None

    def rows(
        self, after: int, limit: int, *, now_ms: int, group: int | None = None, tier: int = 0
    ) -> list[FamilyRow]:
        """Up to ``limit`` families with a number above ``after``, in order.

        Args:
            group: whose; None for all.
            tier: where spans are counted.
        """
        shown = (
            family
            for number, family in self._book.by_id.items()
            if number > after and group in (None, family.owner[0])
        )
        return [self.row(family, now_ms, tier) for family in itertools.islice(shown, limit)]

    def row(self, family: Family, now_ms: int, tier: int = 0) -> FamilyRow:
        """A family as a whole, as it is in a tier: each of its spans there counts once."""
        where, mirrors = self._book.spans, self._store.mirrors.by_row
        base, own = where.base_rows(family, tier=tier), where.rows(family, tier=tier)
        sizes = self._sizes([*base, *own])
        keys = {key for member in family.members.values() for key in member.keys}
        return FamilyRow(
            id=family.id,
            name=family.name,
            tenant=tenant_name(*family.owner),
            namespace=family.namespace,
            dtype=family.dtype,
            head_dim=family.head_dim,
            shards=family.shards,
            base_spans=len(family.base) * len(family.shards),
            base_stored=len(base),
            base_bytes=self._sizes(base).stored,
            members=len(family.members),
            spans=len(keys - family.base.keys()) * len(family.shards),
            mirrors=sum(row in mirrors for row in own),
            dense_bytes=sizes.dense,
            stored_bytes=sizes.stored,
            recipe_bytes=sizes.recipes,
            used_bytes=sizes.tiles * TILE_BYTES,
            age_ms=max(0, now_ms - family.began_ms),
            gpus=[gpu for gpu in where.tiers(family) if gpu and where.there(family, gpu)],
        )

    def members(self, family: Family, first: int, limit: int, tier: int = 0) -> list[MemberRow]:
        """Members from number ``first`` on, in the order in which they joined."""
        found = itertools.islice(family.members.values(), first, first + limit)
        return [self._member(family, member, tier) for member in found]

    def _member(self, family: Family, member: Member, tier: int) -> MemberRow:
        where, mirrors = self._book.spans, self._store.mirrors.by_row
        base = where.base_rows(family, [key for key in member.keys if key in family.base], tier)
        own = where.rows(family, member.keys, tier)
        refusals = [
            why for row in own if row not in mirrors and (why := self._recoder.verdicts.of(row))
        ]
        sizes = self._sizes([*base, *own])
        recipes = sum(row in mirrors for row in own)
        spans = len(member.keys) * len(family.shards)
        return MemberRow(
            name=member.name,
            parent=member.parent,
            master=family.base.keys() <= set(member.keys),
            spans=spans,
            base=len(base),
            mirrors=recipes,
            dense=len(own) - recipes,
            waiting=max(0, spans - len(base) - len(own)),
            refused=len(refusals),
            dense_bytes=sizes.dense,
            stored_bytes=sizes.stored,
            recipe_bytes=sizes.recipes,
            used_bytes=sizes.tiles * TILE_BYTES,
            refusal=refusals[-1] if refusals else "",
        )

    def _sizes(self, rows: Iterable[int]) -> _Sizes:
        length, mirrors = self._store.table.length, self._store.mirrors
        sizes = _Sizes()
        for row in rows:
            sizes.stored += length[row]
            sizes.tiles += tiles(length[row])
            if dense := mirrors.dense(row):
                sizes.recipes += length[row]
            sizes.dense += dense or length[row]
        return sizes
