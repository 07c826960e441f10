"""Small numbers for long values that many spans share."""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

V = TypeVar("V", bound=Hashable)


class Interner(Generic[V]):
    """Counts the holders of each value and numbers it from 1; 0 means none.

    Args:
        limit: most distinct values at a time.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._ids: dict[V, int] = {}
        self._values: list[V | None] = [None]
        self._holders = array("Q", [0])
        self._unused: list[int] = []

    def __len__(self) -> int:
        return len(self._ids)

    def __iter__(self) -> Iterator[tuple[int, V]]:
        """(number, value) of every value that is held."""
        return ((number, value) for value, number in self._ids.items())

    def find(self, value: V) -> int:
        """The number of a value, or 0 when nobody holds it."""
        return self._ids.get(value, 0)

    def value(self, number: int) -> V:
        """The value of a number that is held; KeyError otherwise."""
        value = self._values[number]
        if value is None:
            raise KeyError(number)
        return value

    def full(self, value: V) -> bool:
        """Whether ``take`` would fail."""
        return len(self._ids) >= self._limit and value not in self._ids

    def take(self, value: V) -> int:
        """One more holder; OverflowError beyond the limit."""
        number = self._ids.get(value, 0)
        if not number:
            if self.full(value):
                raise OverflowError(f"more than {self._limit} distinct values")
            if self._unused:
                number = self._unused.pop()
                self._values[number] = value
            else:
                number = len(self._values)
                self._values.append(value)
                self._holders.append(0)
            self._ids[value] = number
        self._holders[number] += 1
        return number

    def hold(self, number: int, count: int) -> None:
        """So many holders more of a number that is held."""
        self._holders[number] += count

    def drop(self, number: int) -> None:
        """One holder fewer; the number is free again after the last."""
        value = self.value(number)
        self._holders[number] -= 1
        if not self._holders[number]:
            del self._ids[value]
            self._values[number] = None
            self._unused.append(number)

    def holders(self, number: int) -> int:
        """How many hold a number."""
        return self._holders[number]
