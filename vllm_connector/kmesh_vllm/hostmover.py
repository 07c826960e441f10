"""Pages in host memory: one native call for a request, in the thread that asks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kmesh.errors import UnsupportedError
from kmesh.kernels.host import PagedLayout, gather_packed, part_reads, scatter_packed
from kmesh.memory import SlabMapping
from kmesh.session import Session, Staging
from kmesh_vllm.bringing import Brought
from kmesh_vllm.decoding import Payload
from kmesh_vllm.lending import Lent
from kmesh_vllm.movers import Ids, Piece, Records, Slab


@dataclass(frozen=True, slots=True)
class _Moved:
    """Pieces that were restored."""

    results: list[bytes]
    read_bytes: int

    def done(self) -> bool:
        return True

    def statuses(self) -> list[bytes]:
        return self.results


class _Pages:
    """Spans that still lie in the pages."""

    kept = False

    def __init__(self, layout: PagedLayout, records: Records, pages: Ids) -> None:
        self._layout, self._records, self._pages = layout, records, pages
        self.count = len(records)

    def put(self, first: int, offsets: list[int], staging: Staging) -> bytes:
        records = self._records[first : first + len(offsets)].copy()
        records["address"] = np.asarray(offsets, np.uint64) + np.uint64(staging.address)
        return gather_packed(self._layout, records.tobytes(), self._pages.data)

    def drop(self) -> None:
        pass


class HostMover:
    """See ``movers.Mover``. Slabs are mapped; every tile is verified before it is copied."""

    starts_only = False
    moves_recipes = False
    devices = ("",)
    recipes = ()

    def __init__(self, layout: PagedLayout) -> None:
        self._layout = layout

    def attached(self, session: Session, number: int) -> SlabMapping | None:
        return session.mapped(number)

    def attach(self, session: Session, number: int, timeout: float) -> SlabMapping:
        return session.slab(number, timeout)

    def reads_gpu(self, slab: Slab) -> bool:
        return False

    def at_hand(self, slab: Slab) -> SlabMapping:
        assert isinstance(slab, SlabMapping)
        return slab

    readable = at_hand

    def bring(self, addresses: npt.NDArray[np.uint64], lengths: npt.NDArray[np.uint64]) -> Brought:
        raise UnsupportedError("all that is read here is at hand")

    def takes_recipes(self, timeout: float) -> bool:
        return False

    def lend(self, payloads: Sequence[Payload]) -> Lent:
        return Lent(payloads)

    def restore(self, pieces: list[Piece]) -> _Moved:
        packed = [piece.records.tobytes() for piece in pieces]
        return _Moved(
            [
                scatter_packed(self._layout, records, piece.pages.data)
                for piece, records in zip(pieces, packed, strict=True)
            ],
            sum(sum(part_reads(records, self._layout.row_bytes)) for records in packed),
        )

    def ready(self) -> bool:
        return True

    def take(self, records: Records, pages: Ids) -> _Pages:
        return _Pages(self._layout, records, pages)

    def room(self, length: int, timeout: float) -> bool:
        return True

    def prepare_staging(self, staging: Staging) -> None:
        pass

    def touch_staging(self, staging: Staging) -> None:
        staging.touch()

    def begin(self) -> int:
        return 0

    def end(self, load: int) -> None:
        pass

    def close(self) -> None:
        pass
