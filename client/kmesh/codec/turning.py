"""Distances by which a recipe turns keys, as a table that is written into it."""

from __future__ import annotations

import struct
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from kmesh import _host
from kmesh.codec.records import TURN_KERNEL, turn_record
from kmesh.errors import RecipeError
from kmesh.kernels.rotary import ELEMENTS, Rotary, turns

#: A record of ``turn_record`` in front of its table.
_TURN = struct.Struct("<iHBx")
_record_of = lru_cache(maxsize=16)(turn_record)


class Turns:
    """The turns of one recipe, each distance once; ops name them by number, from 1."""

    def __init__(self, rotary: Rotary | None) -> None:
        self._rotary = rotary
        self._numbers: dict[int, int] = {}

    def number(self, delta: int) -> int:
        """Of the turn by ``delta`` positions; RecipeError if nothing says how keys are turned."""
        if self._rotary is None:
            raise RecipeError("keys are turned, but no rotary says how", field="pairs")
        return self._numbers.setdefault(delta, len(self._numbers) + 1)

    def turn(self, number: int, keys: npt.NDArray[np.uint8], out: npt.NDArray[np.uint8]) -> None:
        """Rows [n, row_bytes] turned; both are contiguous and do not overlap."""
        assert self._rotary is not None
        delta = list(self._numbers)[number - 1]
        _host.turn_rows(
            out.data,
            keys.data,
            keys.shape[-1],
            turns(self._rotary, delta),
            self._rotary.interleaved,
            ELEMENTS[self._rotary.dtype],
        )

    def angles(self) -> list[bytes]:
        """Cosine and sine of each pair, of all turns in the order of their numbers."""
        if self._rotary is None:
            return []
        return [turns(self._rotary, delta) for delta in self._numbers]

    def records(self, used: npt.NDArray[np.uint16]) -> npt.NDArray[np.void]:
        """The table with the turns of those numbers alone."""
        if self._rotary is None:
            return np.empty(0, dtype=turn_record(0))
        rotary, deltas = self._rotary, list(self._numbers)
        written: list[bytes] = []
        for number in used.tolist():
            delta = deltas[number - 1]
            written += (_TURN.pack(delta, TURN_KERNEL, rotary.interleaved), turns(rotary, delta))
        return np.frombuffer(b"".join(written), dtype=_record_of(len(rotary.frequencies)))
