"""What the halves of the connector tell each other: plain types only, a few bytes a span."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kmesh import _host
from kmesh.kernels.plan import LEASED

#: One stored span of a load.
SPAN_RECORD = LEASED


def packed_ids(blocks: Sequence[int]) -> bytes:
    """Ids of blocks as int64, one behind the other."""
    return np.frombuffer(_host.token_words(blocks), np.uint32).astype(np.int64).tobytes()


#: Of a load's spans, one that is a recipe: which, and the payload that it gives.
MIRROR_RECORD = np.dtype(
    [
        ("record", np.uint32),  # number of its SPAN_RECORD
        ("dense_length", np.uint64),
        ("dense_root", np.uint64),
    ]
)
#: What the recipes of a load refer to.
BASE_RECORD = np.dtype(
    [
        ("key", np.uint8, 32),
        ("part", np.uint32),  # as of SPAN_RECORD
        ("slab", np.uint32),
        ("offset", np.uint64),
        ("length", np.uint64),
        ("root", np.uint64),
        ("generation", np.uint32),
        ("tokens", np.uint32),
        ("position", np.uint32),
    ]
)


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """Restore tokens [begin, end) of a request.

    Attributes:
        request: vLLM's id of the request.
        epoch: of the daemon that gave the lease.
        tp: the sharding in which the spans were stored.
        spans: packed ``SPAN_RECORD``, in order of position; empty if the lease was lost.
        begin, end: positions in tokens; whole blocks.
        blocks: int64 ids of the blocks that hold [begin, end).
        mirrors, bases: packed ``MIRROR_RECORD`` and ``BASE_RECORD``, if spans are recipes.
        namespace: 32-byte digest, that of the recipes, if spans are recipes.
    """

    request: str
    epoch: int
    tp: int
    spans: bytes
    begin: int
    end: int
    blocks: bytes
    mirrors: bytes = b""
    bases: bytes = b""
    namespace: bytes = bytes(32)

    def records(self) -> npt.NDArray[np.void]:
        """``spans``, unpacked."""
        return np.frombuffer(self.spans, SPAN_RECORD)

    def block_ids(self) -> npt.NDArray[np.int64]:
        """``blocks``, unpacked."""
        return np.frombuffer(self.blocks, np.int64)

    def reads_as(self, other: LoadPlan) -> bool:
        """Whether both read the same for the same positions, and no recipes."""
        mine, theirs = (
            (plan.epoch, plan.tp, plan.begin, plan.end, plan.spans, plan.mirrors)
            for plan in (self, other)
        )
        return mine == theirs and not self.mirrors


@dataclass(frozen=True, slots=True)
class StorePlan:
    """Store spans of a request that are complete when this step has run.

    Attributes:
        namespace: 32-byte digest.
        keys: 32 bytes a span.
        tokens, start: of each span.
        sub_keys: as in ``kmesh.v1.ReserveRequest``.
        first: position of the first token of ``blocks``.
        blocks: int64 ids of the blocks that hold the spans.
        salt: digest of the request's cache salt, or empty.
        request: vLLM's id of the request, which hears of spans that others had reserved; or empty.
    """

    namespace: bytes
    keys: bytes
    tokens: tuple[int, ...]
    start: tuple[int, ...]
    sub_keys: bytes
    first: int
    blocks: bytes
    salt: bytes = field(default=b"", repr=False)
    request: str = ""

    def block_ids(self) -> npt.NDArray[np.int64]:
        """``blocks``, unpacked."""
        return np.frombuffer(self.blocks, np.int64)


@dataclass(slots=True)
class StepPlan:
    """What the workers do in one step.

    Attributes:
        computes: whether the model runs in it.
        number: what workers say when it has run; 0: nothing.
    """

    loads: list[LoadPlan] = field(default_factory=list)
    stores: list[StorePlan] = field(default_factory=list)
    computes: bool = False
    number: int = 0

    def __bool__(self) -> bool:
        return bool(self.loads or self.stores)


@dataclass(slots=True)
class LoadReport:
    """What the scheduler half has to know, of one rank or of several.

    Attributes:
        devices: whose memory can be read: UUIDs of GPUs, and "" for host memory. None: nothing
            new.
        recipes: UUIDs of GPUs out of whose memory recipes are restored. None: nothing new.
        corrupt: lease entries whose bytes did not match their sums, by request.
        failed: positions (first token of the first bad block) of loads that failed, by request.
        reserved: positions (first tokens) of spans that were not stored since somebody else had
            them reserved, by request.
        step: number of the last step that has run, 0 if it has none.
    """

    corrupt: dict[str, list[int]] = field(default_factory=dict)
    failed: dict[str, int] = field(default_factory=dict)
    reserved: dict[str, set[int]] = field(default_factory=dict)
    devices: tuple[str, ...] | None = None
    recipes: tuple[str, ...] | None = None
    step: int = 0

    def __bool__(self) -> bool:
        told = self.corrupt or self.failed or self.reserved or self.step
        return bool(told or self.devices is not None or self.recipes is not None)

    def merge(self, other: LoadReport) -> None:
        """Adds what another rank said."""
        for request, entries in other.corrupt.items():
            mine = self.corrupt.setdefault(request, [])
            mine.extend(entry for entry in entries if entry not in mine)
        for request, position in other.failed.items():
            self.failed[request] = min(position, self.failed.get(request, position))
        for request, starts in other.reserved.items():
            self.reserved.setdefault(request, set()).update(starts)
        self.step = max(self.step, other.step)
        self.devices = _of_both(self.devices, other.devices)
        self.recipes = _of_both(self.recipes, other.recipes)


def _of_both(
    ours: tuple[str, ...] | None, theirs: tuple[str, ...] | None
) -> tuple[str, ...] | None:
    if ours is None or theirs is None:
        return theirs if ours is None else ours
    return tuple(one for one in ours if one in theirs)
