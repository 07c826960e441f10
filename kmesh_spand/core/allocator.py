"""Ranges of a slab, in tiles of 64 KiB."""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kmesh_spand.core.tenants import Tenant

#: Owner of a range that nobody may reuse yet.
QUARANTINE = 0xFFFF_FFFF


class Slab:
    """Who owns each tile of one slab, and the free ranges among the populated tiles.

    An owner is a positive u32; 0 is nobody. Allocation is best fit; neighbours coalesce.
    Only tiles below ``populated`` are handed out, since those above have no pages yet.

    Args:
        tiles: capacity.
        tier: 0 is host memory, the others are GPUs.
        sealed: it can't be written, so that no range of it is ever free to be handed out.

    Attributes:
        tenant: whose ranges may be here.
        group: that may map it, for good; None while it was nobody's.
        clean: nothing of an earlier tenant is in it. lost: it is not used.
    """

    def __init__(self, tiles: int, tier: int = 0, *, sealed: bool = False) -> None:
        self.tiles = tiles
        self.tier = tier
        self.sealed = sealed
        self.populated = 0
        self.used = 0
        self.tenant: Tenant | None = None
        self.group: int | None = None
        self.clean = True
        self.lost = False
        self.owner = array("I", [0]) * tiles
        self._size_at: dict[int, int] = {}
        self._start_before: dict[int, int] = {}
        self._starts: dict[int, dict[int, None]] = {}
        self._sizes: list[int] = []

    def allocate(self, tiles: int, owner: int) -> int | None:
        """The first tile of a range that is now the owner's, or None when none fits."""
        at = bisect_left(self._sizes, tiles)
        if at == len(self._sizes):
            return None
        size = self._sizes[at]
        start, _ = self._starts[size].popitem()
        self._forget(start, size)
        if size > tiles:
            self._insert(start + tiles, size - tiles)
        self._mark(start, tiles, owner)
        return start

    def take(self, start: int, tiles: int, owner: int) -> bool:
        """Own a given range if it is in the slab and nobody's; ``rescan`` must follow."""
        if start < 0 or tiles < 1 or start + tiles > self.tiles:
            return False
        if any(self.owner[start : start + tiles]):
            return False
        self._mark(start, tiles, owner)
        return True

    def free(self, start: int, tiles: int, owner: int) -> None:
        """Give a whole range back; AssertionError unless all of it is the owner's."""
        held = self.owner[start : start + tiles]
        if not owner or tiles < 1 or held.count(owner) != tiles:
            raise AssertionError(f"tiles {start}:{start + tiles} are not of owner {owner}")
        self.owner[start : start + tiles] = array("I", [0]) * tiles
        self.used -= tiles
        self._coalesce(start, min(start + tiles, self.populated))

    def hand_over(self, start: int, tiles: int, owner: int, heir: int) -> None:
        """Change the owner of a range; AssertionError as for ``free``."""
        if not heir or self.owner[start : start + tiles].count(owner) != tiles:
            raise AssertionError(f"tiles {start}:{start + tiles} are not of owner {owner}")
        self.owner[start : start + tiles] = array("I", [heir]) * tiles

    def populate(self, tiles: int) -> None:
        """The first ``tiles`` tiles have pages; never fewer than before."""
        before, self.populated = self.populated, max(self.populated, min(tiles, self.tiles))
        self._scan(before, self.populated)

    def recount(self) -> int:
        """``used``, counted anew after owners were written from outside; ``rescan`` must follow."""
        self.used = self.tiles - self.owner.count(0)
        return self.used

    def rescan(self) -> None:
        """Find the free ranges anew, after ``take``."""
        self._size_at.clear()
        self._start_before.clear()
        self._starts.clear()
        self._sizes.clear()
        self._scan(0, self.populated)

    @property
    def largest(self) -> int:
        """Tiles of the largest free range."""
        return self._sizes[-1] if self._sizes else 0

    def free_around(self, begin: int, end: int) -> tuple[int, int]:
        """[begin, end) grown by the free ranges that touch it."""
        return self._start_before.get(begin, begin), end + self._size_at.get(end, 0)

    def free_ranges(self) -> Iterator[tuple[int, int]]:
        """(start, tiles) of every free range below ``populated``, in no order."""
        return iter(self._size_at.items())

    def _mark(self, start: int, tiles: int, owner: int) -> None:
        self.owner[start : start + tiles] = array("I", [owner]) * tiles
        self.used += tiles

    def _scan(self, begin: int, end: int) -> None:
        owner = self.owner
        while begin < end:
            if owner[begin]:
                begin += 1
                continue
            stop = begin + 1
            while stop < end and not owner[stop]:
                stop += 1
            self._coalesce(begin, stop)
            begin = stop

    def _coalesce(self, begin: int, end: int) -> None:
        if begin >= end or self.sealed:
            return
        left, right = self.free_around(begin, end)
        if left < begin:
            self._remove(left, begin - left)
        if right > end:
            self._remove(end, right - end)
        self._insert(left, right - left)

    def _insert(self, start: int, size: int) -> None:
        self._size_at[start] = size
        self._start_before[start + size] = start
        starts = self._starts.get(size)
        if starts is None:
            self._starts[size] = {start: None}
            insort(self._sizes, size)
        else:
            starts[start] = None

    def _remove(self, start: int, size: int) -> None:
        del self._starts[size][start]
        self._forget(start, size)

    def _forget(self, start: int, size: int) -> None:
        del self._size_at[start]
        del self._start_before[start + size]
        if not self._starts[size]:
            del self._starts[size]
            del self._sizes[bisect_left(self._sizes, size)]
