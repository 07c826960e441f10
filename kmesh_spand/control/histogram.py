"""Counts of values in fixed ranges: cheap enough for every request."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence

#: Upper bounds in seconds, from a call that only looks something up to one that waits.
SECONDS = (
    *(0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0),
)
#: Upper bounds in bytes, from a tile to a slab.
BYTES = tuple(float(1 << shift) for shift in range(16, 31, 2))


class Histogram:
    """How many values were at most each of ``bounds``.

    Attributes:
        sum: of all values.
        count: number of all values.
    """

    __slots__ = ("_counts", "bounds", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.sum = 0.0
        self._counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    @property
    def count(self) -> int:
        return sum(self._counts)

    def cumulative(self) -> Iterator[tuple[str, float]]:
        """(upper bound, values up to it), as Prometheus wants them; the last is ``+Inf``."""
        total = 0
        for bound, count in zip((*self.bounds, None), self._counts, strict=True):
            total += count
            yield "+Inf" if bound is None else f"{bound:g}", float(total)
