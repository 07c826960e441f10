"""Finds runs of tokens that a base holds too, wherever they are in it: by content, not position."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from kmesh import _host
from kmesh.codec.segments import Base

_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_INVERSE = np.uint64(pow(0x9E3779B97F4A7C15, -1, 2**64))


@dataclass(frozen=True, slots=True)
class Match:
    """Tokens [token, token + tokens) of a member, and where a segment has the same bytes."""

    token: int
    tokens: int
    segment: int
    source: int


@dataclass(frozen=True, slots=True)
class _Windows:
    """All windows of one run of a base, ordered by hash, and the hashes of its tokens."""

    hashes: npt.NDArray[np.uint64]
    segment: npt.NDArray[np.int64]
    source: npt.NDArray[np.int64]
    tokens: list[npt.NDArray[np.uint64]]
    #: Which first bits of hashes there are: most of what is not here is told by this alone.
    heads: npt.NDArray[np.bool_]
    shift: np.uint64

    def look_up(
        self, wanted: npt.NDArray[np.uint64]
    ) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
        """Which of the hashes are there, and the first window of each."""
        maybe = np.flatnonzero(self.heads[wanted >> self.shift])
        at = np.minimum(np.searchsorted(self.hashes, wanted[maybe]), len(self.hashes) - 1)
        hits = self.hashes[at] == wanted[maybe]
        return maybe[hits], at[hits]


class Finder:
    """What a base's runs hold, hashed when first asked for and kept.

    Args:
        base: must stay as it is.
        block_tokens: tokens that have to be the same in a row before they count as shared.
    """

    def __init__(self, base: Base, block_tokens: int) -> None:
        self._base = base
        self._block = block_tokens
        self._runs: dict[int, _Windows] = {}

    def find(self, run: int, rows: npt.NDArray[np.uint8], begin: int, end: int) -> list[Match]:
        """Matches among tokens [begin, end) of a run [head, token, row_bytes], byte for byte.

        Edges are at any token. Every match holds at least ``block_tokens`` tokens, and hashes
        have only proposed it: rows that differ after all are none.
        """
        if end - begin < self._block or not len(self._base):
            return []
        windows = self._windows(run)
        if not len(windows.hashes):
            return []
        part = np.ascontiguousarray(rows[:, begin:end])
        tokens = token_hashes(part)
        mine = _window_hashes(tokens, self._block)
        hits, at = windows.look_up(mine)
        found, token = [], 0
        while (hit := int(np.searchsorted(hits, token))) < len(hits):
            token = int(hits[hit])
            segment, source = int(windows.segment[at[hit]]), int(windows.source[at[hit]])
            count = _same(tokens[token:], windows.tokens[segment][source:])
            match = Match(begin + token, count, segment, source)
            if bool(equal_tokens(self._base.segments[segment].rows[run], rows, match).all()):
                found.append(match)
                token += count
            else:
                token += 1
        return found

    def _windows(self, run: int) -> _Windows:
        found = self._runs.get(run)
        if found is None:
            tokens = [token_hashes(segment.rows[run]) for segment in self._base]
            parts = [_window_hashes(one, self._block) for one in tokens]
            hashes = np.concatenate(parts)
            # Stable, so that of equal windows the first one is found.
            order = np.argsort(hashes, kind="stable")
            segment = np.repeat(np.arange(len(parts)), [len(one) for one in parts])
            source = np.concatenate([np.arange(len(one)) for one in parts])
            bits = max(12, len(hashes).bit_length() + 3)
            shift = np.uint64(64 - bits)
            heads = np.zeros(1 << bits, dtype=np.bool_)
            heads[hashes >> shift] = True
            found = _Windows(hashes[order], segment[order], source[order], tokens, heads, shift)
            self._runs[run] = found
        return found


def token_hashes(rows: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint64]:
    """One hash for each token of a contiguous run [head, token, row_bytes]."""
    out = np.empty(rows.shape[1], dtype=np.uint64)
    _host.token_hashes(rows.data, rows.shape[0], out.data)
    return out


def equal_tokens(
    source: npt.NDArray[np.uint8], rows: npt.NDArray[np.uint8], match: Match
) -> npt.NDArray[np.bool_]:
    """Which of a match's tokens have the same bytes in all heads."""
    equal = np.ones(match.tokens, dtype=np.uint8)
    for head in range(rows.shape[0]):
        _host.rows_equal(
            source[head, match.source : match.source + match.tokens].data,
            rows[head, match.token : match.token + match.tokens].data,
            equal.data,
        )
    return equal.view(np.bool_)


def _window_hashes(tokens: npt.NDArray[np.uint64], block: int) -> npt.NDArray[np.uint64]:
    """Σ token[w + i]·f^i for each window of ``block`` tokens, out of one running sum."""
    if len(tokens) < block:
        return np.empty(0, dtype=np.uint64)
    powers, back = _powers(len(tokens) + 1)
    sums = np.zeros(len(tokens) + 1, dtype=np.uint64)
    np.cumsum(tokens * powers[:-1], out=sums[1:])
    hashes: npt.NDArray[np.uint64] = (sums[block:] - sums[:-block]) * back[
        : len(tokens) - block + 1
    ]
    return hashes


@lru_cache(maxsize=32)
def _powers(count: int) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
    """f^0, f^1, … and their inverses, mod 2^64."""
    steps = np.full((2, count), [[_FACTOR], [_INVERSE]], dtype=np.uint64)
    steps[:, 0] = 1
    powers = np.multiply.accumulate(steps, axis=1)
    return powers[0], powers[1]


def _same(one: npt.NDArray[np.uint64], other: npt.NDArray[np.uint64]) -> int:
    """How many hashes are the same from the beginning."""
    step, at, most = 64, 0, min(len(one), len(other))
    while at < most:
        end = min(at + step, most)
        differ = np.flatnonzero(one[at:end] != other[at:end])
        if len(differ):
            return at + int(differ[0])
        at, step = end, 2 * step
    return most
