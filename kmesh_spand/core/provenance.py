"""What a member's recovery wrote down, cut to one of its spans and to those of the base."""

from __future__ import annotations

from collections.abc import Sequence

from kmesh_spand.core.effects import Piece
from kmesh_spand.core.family import Family, Run
from kmesh_spand.core.table import SpanTable


def pieces(
    table: SpanTable, row: int, base: Sequence[int], family: Family, runs: Sequence[Run]
) -> list[Piece]:
    """Tokens of a span that were recovered, and from where.

    A run that ends its base span goes on in the next one, if that is computed for the positions
    behind; otherwise it ends there.

    Args:
        base: rows of the family's base, by number.
        runs: of the member, in order of position.
    """
    begin = table.start[row]
    end = begin + table.tokens[row]
    found: list[Piece] = []
    for run in runs:
        first, last = max(run.position, begin), min(run.position + run.tokens, end)
        if first < last:
            source = run.source + first - run.position
            found += _walk(table, base, family.base[run.base], source, first - begin, last - first)
    return found


def _walk(
    table: SpanTable, base: Sequence[int], number: int, source: int, token: int, left: int
) -> list[Piece]:
    found = []
    while left:
        row = base[number]
        here = table.tokens[row]
        if source < here:
            count = min(left, here - source)
            found.append(Piece(token, count, number, source))
            token, source, left = token + count, source + count, left - count
        source -= here
        number += 1
        follows = number < len(base) and table.start[base[number]] == table.start[row] + here
        if not follows:
            break
    return found
