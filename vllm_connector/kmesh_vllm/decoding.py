"""Spans of a load that are recipes: their payloads, in memory of this process's own."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec

import numpy as np
import numpy.typing as npt

from kmesh import _host
from kmesh.errors import CorruptionError
from kmesh.layout import tiles
from kmesh.lease import BasePlace
from kmesh_vllm.metadata import BASE_RECORD, MIRROR_RECORD, LoadPlan
from kmesh_vllm.movers import Readable

logger = logging.getLogger("kmesh_vllm")

#: Whether recipes can be read: the codec needs this.
AVAILABLE = find_spec("zstandard") is not None

_WHERE = ("slab", "offset", "length", "root")
_PLACE = ("slab", "offset", "length", "generation", "root", "tokens", "position")


@dataclass(frozen=True, slots=True)
class Payload:
    """A payload with its tile sums, as if it lay in a slab."""

    data: npt.NDArray[np.uint8]
    sums: npt.NDArray[np.uint64]
    root: int

    @classmethod
    def of(cls, data: npt.NDArray[np.uint8], root: int) -> Payload:
        sums = np.empty(tiles(data.size), np.uint64)
        _host.tile_sums(data.ctypes.data, data.size, sums.ctypes.data)
        return cls(data, sums, root)


def decode_mirrors(
    plan: LoadPlan, wanted: npt.NDArray[np.bool_], slab_of: Callable[[int], Readable]
) -> dict[int, Payload]:
    """Payloads of a plan's recipes, by number of their record.

    One that can't be had is zeros under sums that do not fold to its root: whoever moves it finds
    it corrupt, as any span whose bytes are wrong.

    Args:
        wanted: which of the plan's records are.
        slab_of: slabs, by number.

    Raises:
        ProtocolError: the plan names bytes that no span can have.
    """
    from kmesh.mirrors import MirrorReader, RecipePlace

    reader = MirrorReader(slab_of)
    bases: dict[int, dict[bytes, BasePlace]] = {}
    for record in np.frombuffer(plan.bases, BASE_RECORD):
        base = BasePlace(record["key"].tobytes(), *(int(record[name]) for name in _PLACE))
        bases.setdefault(int(record["part"]), {})[base.key] = base
    spans, found = plan.records(), {}
    for mirror in np.frombuffer(plan.mirrors, MIRROR_RECORD):
        number = int(mirror["record"])
        if not wanted[number]:
            continue
        span = spans[number]
        length, root = int(mirror["dense_length"]), int(mirror["dense_root"])
        slab, offset, size, sums = (int(span[name]) for name in _WHERE)
        place = RecipePlace(slab, offset, size, sums, length, root)
        try:
            data = reader.read(place, bases.get(int(span["part"]), {}))
        except CorruptionError as wrong:
            logger.warning("a span could not be decoded: %s", str(wrong))
            data = np.zeros(length, np.uint8)
        found[number] = Payload.of(data, root)
    return found
