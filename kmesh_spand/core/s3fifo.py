"""S3-FIFO: what is used once passes through a small queue, and pushes out nothing that was used."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from enum import IntEnum
from itertools import chain

from kmesh_spand.core.batch import Batch
from kmesh_spand.core.policy import LRU, Policy

#: Of all rows, how many the small queue may have before it is the one that loses: one in ten.
_SMALL_SHARE = 10
#: Uses that are counted.
_MAX_USES = 3
#: Rows that go round for one victim, at most: whoever asks waits for it.
_MAX_ROUNDS = 256
#: Places of a ghost's name, a power of two.
_WAYS = 8


class Place(IntEnum):
    """Where a row is. ``AWAY``: in use; it comes back to the main queue."""

    NEW = 0
    SMALL = 1
    MAIN = 2
    AWAY = 3


class Ghosts:
    """Names of what left the small queue not long ago, in 12 bytes each.

    A name has eight places, by its value, and takes that of the oldest that it finds there. So what
    is forgotten early is old: were it any of them, long prompts would come back with gaps.

    Args:
        room: how many should find a place.
    """

    def __init__(self, room: int) -> None:
        places = 1 << max(room - 1, _WAYS - 1).bit_length()
        self._names = array("Q", [0]) * places
        self._when = array("I", [0]) * places
        self._mask = places - _WAYS
        self._now = 0

    def add(self, name: int) -> None:
        """Something of this name has left."""
        self._now = self._now + 1 & 0xFFFF_FFFF
        names, when, now = self._names, self._when, self._now
        oldest, most = name & self._mask, -1
        for place in range(oldest, oldest + _WAYS):
            if not names[place]:
                oldest = place
                break
            age = now - when[place] & 0xFFFF_FFFF
            if age > most:
                oldest, most = place, age
        names[oldest], when[oldest] = name, now

    def take(self, name: int, latest: int) -> bool:
        """Whether it was among the ``latest`` that left; it is not any more."""
        first = name & self._mask
        for place in range(first, first + _WAYS) if name else ():
            if self._names[place] == name:
                self._names[place] = 0
                return (self._now - self._when[place] & 0xFFFF_FFFF) < latest
        return False


class S3FIFO(Policy):
    """Two queues and a memory of names (Yang et al., "FIFO queues are all you need", SOSP 2023).

    What is new enters the small queue, and the main one if it left the small one not long ago. In
    the main queue what was used goes round again, as often as it was used, at most three times.
    Something in use is in no queue, where the original leaves it in its place: so what was used
    leaves the small queue at once, and comes back to the end of the main one.

    Args:
        max_rows: highest row.
        batch: operations over many rows.
    """

    def __init__(self, max_rows: int, batch: Batch | None = None) -> None:
        self._small = LRU(max_rows, batch)
        self._main = self._small.another()
        self._place = bytearray(max_rows + 1)
        self._uses = bytearray(max_rows + 1)
        self._names = array("Q", [0]) * (max_rows + 1)
        self._ghosts = Ghosts(max_rows)
        self._smalls = self._mains = 0

    def another(self) -> S3FIFO:
        """Queues in the same columns: a row is in one of them at a time."""
        made = S3FIFO.__new__(S3FIFO)
        made._small, made._main = self._small.another(), self._small.another()
        made._place, made._uses, made._names = self._place, self._uses, self._names
        made._ghosts = self._ghosts
        made._smalls = made._mains = 0
        return made

    def enter(self, row: int, name: int) -> None:
        """It is new, whatever the row held before."""
        self._place[row] = Place.NEW
        self._uses[row] = 0
        self._names[row] = name

    def used(self, row: int) -> None:
        """It goes to the main queue next."""
        self._place[row] = Place.AWAY

    def evicted(self, row: int) -> None:
        """What comes back soon was evicted too early, so its name is kept."""
        if self._place[row] == Place.SMALL:
            self._ghosts.add(self._names[row])

    def add(self, rows: Sequence[int]) -> None:
        """O(len(rows)); a row must be in no queue."""
        small, main = array("I"), array("I")
        for row in rows:
            if self._place[row] == Place.AWAY:
                self._uses[row] = min(self._uses[row] + 1, _MAX_USES)
                main.append(row)
            elif self._ghosts.take(self._names[row], self._smalls + self._mains):
                main.append(row)
            else:
                small.append(row)
                self._place[row] = Place.SMALL
                continue
            self._place[row] = Place.MAIN
        if small:
            self._small.add(small)
            self._smalls += len(small)
        if main:
            self._main.add(main)
            self._mains += len(main)

    def discard(self, rows: Sequence[int]) -> None:
        """O(len(rows)); a row must be in a queue."""
        self._small.discard(rows)
        for row in rows:
            if self._place[row] == Place.SMALL:
                self._smalls -= 1
            else:
                self._mains -= 1
            self._place[row] = Place.AWAY

    def victims(self) -> Iterator[int]:
        """From the queue that has too much; then the other one.

        What was used since goes round before: O(1) for each use, and where much was used, for a
        while, only so many for each victim.
        """
        small = self._smalls * _SMALL_SHARE >= self._smalls + self._mains
        if small or not self._mains:
            yield from chain(self._small.victims(), self._main.victims())
            return
        for _ in range(_MAX_ROUNDS):
            row = next(self._main.victims())
            if not self._uses[row]:
                break
            self._uses[row] -= 1
            self._main.discard([row])
            self._main.add([row])
        yield from chain(self._main.victims(), self._small.victims())
