"""Spans of which it was found out that they stay dense, and why."""

from __future__ import annotations

from dataclasses import dataclass

from kmesh_spand.core.family import Family
from kmesh_spand.core.table import SpanTable


@dataclass(frozen=True, slots=True)
class _Verdict:
    """``base``: number of the family whose base was tried, how many keys that had, and whether it
    was known how keys are turned; None: whatever the base, the span stays dense."""

    generation: int
    why: str
    base: tuple[int, int, bool] | None


class Verdicts:
    """The last one on each row; it says nothing of a span that has the row later."""

    def __init__(self, table: SpanTable) -> None:
        self._generations = table.generation
        self._of: dict[int, _Verdict] = {}

    def add(self, row: int, why: str, family: Family | None) -> None:
        """A span stays dense; ``family`` as for ``of``, or None: whatever the base."""
        base = None if family is None else _base(family)
        self._of[row] = _Verdict(self._generations[row], why, base)

    def of(self, row: int, family: Family | None = None) -> str:
        """Why a span stays dense; empty if that is not known.

        Args:
            family: with whose base, as it is now; None: with any.
        """
        found = self._of.get(row)
        if found is None or found.generation != self._generations[row]:
            return ""
        other = found.base is not None and family is not None and found.base != _base(family)
        return "" if other else found.why

    def reconsider(self, row: int) -> None:
        """More is known of a span than when it was looked at."""
        found = self._of.get(row)
        if found is not None and found.base is not None:
            del self._of[row]

    def gone(self, row: int) -> None:
        """A row is another span's from now on."""
        self._of.pop(row, None)


def _base(family: Family) -> tuple[int, int, bool]:
    return family.id, len(family.base), bool(family.frequencies)
