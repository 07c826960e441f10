"""What one launch does, written down for the kernels: see ``docs/kernels.md``.

A job is one block of bytes that is uploaded as it is; ``_host_job.h`` writes it. Nothing here
knows a GPU: the tests run jobs on the CPU.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from kmesh import _host
from kmesh.errors import UnsupportedError
from kmesh.kernels.host import PagedLayout, SpanPart
from kmesh.kernels.rotary import ELEMENTS, Rotary, turns

Bytes = npt.NDArray[np.uint8]

STAGE_BYTES = 16384
#: Requests that one read of a payload can serve; more are served by reading it again.
SHARED_BY = 32

_NO_TURNS = 2**32 - 1
_WANTED = struct.Struct("<QQqII")
_GROUP = struct.Struct("<II")
_OPTIONS = struct.Struct("<8I")
_FIELDS = (
    "address", "sums_address", "root", "length", "tokens", "token_begin", "token_end", "position",
    "src_heads", "src_head_begin", "dst_head_begin", "heads",
    "src_layers", "src_layer_begin", "dst_layer_begin", "layers",
)  # fmt: skip
#: A ``SpanPart`` as it is packed.
RECORD = np.dtype([(name, "<u8") for name in _FIELDS])
#: A leased span on its way to be one: where it lies, and which tokens of the request it holds.
LEASED = np.dtype(
    [
        ("slab", np.uint32),
        ("part", np.uint32),  # number of its shard within its sharding
        ("offset", np.uint64),
        ("length", np.uint64),
        ("root", np.uint64),
        ("tokens", np.uint32),  # that the stored span holds
        ("entry", np.uint32),  # of the lease
        ("start", np.uint64),  # position of its first token in the request
    ]
)


class Memory(enum.Enum):
    """Where payloads are."""

    HOST = "host"
    GPU = "gpu"


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """Pages of one request, by block or by slot.

    Attributes:
        pages: int64 ids. By block: of the block of each ``block_tokens`` positions. By slot: of
            the slot of each position, block · block_tokens + slot in it. Ids of positions that no
            part wants may be anything.
        by_slot: which of the two.
        shift: added to every part's position, in tokens.
        delta: positions by which keys are turned further; needs a rotation.
    """

    pages: npt.NDArray[np.int64]
    by_slot: bool = False
    shift: int = 0
    delta: int = 0

    def __post_init__(self) -> None:
        if self.pages.dtype != np.int64 or not self.pages.flags.c_contiguous:
            raise TypeError(f"pages are {self.pages.dtype}, not int64 one behind the other")


def wanted_record(request: Request, turns: int = _NO_TURNS) -> bytes:
    """A request as ``_host`` reads it; ``turns`` is the number of its first cosine."""
    pages = request.pages
    address = _host.address(pages.data)
    return _WANTED.pack(address, len(pages), request.shift, request.by_slot, turns)


@dataclass(frozen=True, slots=True, eq=False)
class Load:
    """Parts of spans, each read once, for all of some requests.

    Attributes:
        records: packed ``SpanPart``s, as an array of ``RECORD``.
        requests: that get them all.
    """

    records: npt.NDArray[np.void]
    requests: Sequence[Request]

    @classmethod
    def of(cls, parts: Sequence[SpanPart], requests: Sequence[Request]) -> Load:
        """From parts one by one."""
        return cls(pack(parts), requests)


def pack(parts: Sequence[SpanPart]) -> npt.NDArray[np.void]:
    """Parts as an array of ``RECORD``."""
    return np.frombuffer(b"".join([part.pack() for part in parts]), dtype=RECORD)


def merged(loads: Sequence[Load]) -> list[Load]:
    """The same loads, those with equal parts as one: what one step restores for siblings."""
    if len(loads) == 1:
        return list(loads)
    # Siblings of one step mostly have the very same array.
    arrays: dict[int, list[Load]] = {}
    for load in loads:
        arrays.setdefault(id(load.records), []).append(load)
    found: dict[bytes, list[Load]] = {}
    for same in arrays.values():
        content = same[0].records.tobytes() if len(arrays) > 1 else b""
        found.setdefault(content, []).extend(same)
    return [
        same[0] if len(same) == 1 else Load(same[0].records, [r for x in same for r in x.requests])
        for same in found.values()
    ]


def check(
    layout: PagedLayout, records: npt.NDArray[np.void], request: Request
) -> npt.NDArray[np.uint8]:
    """``Status`` of each part before anything is read: DONE, BAD_BLOCK or BAD_RECORD."""
    if request.by_slot:
        layout = replace(
            layout,
            num_blocks=layout.num_blocks * layout.block_tokens,
            block_stride=layout.token_stride,
            block_tokens=1,
        )
    if request.shift:
        records = records.copy()
        # A position before 0 becomes one behind all pages, and is refused as such.
        records["position"] += np.uint64(request.shift % 2**64)
    status = np.zeros(len(records), dtype=np.uint8)
    _host.check(layout.packed, records.tobytes(), request.pages.data, status.data)
    return status


@dataclass(slots=True)
class Job:
    """A job that was written, and what its results mean.

    Attributes:
        memory: the job; its first ``upload_bytes`` bytes are to be uploaded.
        vector: bytes of the vectors that it is for, 16 or 4.
        turns: whether any key is turned.
        loads, parts, items, units, tiles: counts.
        read_bytes: of the tiles that are read (or, of a store, summed).
        shared_bytes: of shared memory that a restore's block takes, for items and for units.
    """

    memory: Bytes
    upload_bytes: int
    vector: int
    turns: bool
    loads: int
    parts: int
    items: int
    tiles: int
    read_bytes: int
    shared_bytes: int
    units: int
    _groups: list[tuple[int, int, int]] = field(default_factory=list)
    _checked: bytes = b""

    def statuses(self, results: npt.NDArray[np.uint32]) -> list[list[bytes]]:
        """For each load, for each of its requests: a ``Status`` for each part.

        Args:
            results: of the kernel, one for each part of the job.
        """
        moved = results.astype(np.uint8).tobytes()
        found: list[list[bytes]] = [[] for _ in range(self.loads)]
        begin = at = 0
        good = not any(self._checked)
        for load, parts, requests in self._groups:
            here = moved[begin : begin + parts]
            begin += parts
            if good:
                found[load].extend([here] * requests)
                continue
            for _ in range(requests):
                checked = self._checked[at : at + parts]
                at += parts
                found[load].append(bytes(c or m for c, m in zip(checked, here, strict=True)))
        return found

    def sums(self, results: npt.NDArray[np.uint64]) -> list[npt.NDArray[np.uint64]]:
        """Of a store: each part's sums of its tiles, from the first to the last that was moved."""
        found, parts_at = [], int(self.memory[_PARTS_AT : _PARTS_AT + 8].view(np.uint64)[0])
        for i in range(self.parts):
            at = parts_at + i * _PART_BYTES + RECORD.itemsize
            words = self.memory[at : at + 20].view(np.uint32)
            begin, count = int(words[2]), int(words[4] - words[3])
            found.append(results[begin : begin + count])
        return found


#: In a job: where the offset of its parts is, and how large one is.
_PARTS_AT = 32
_PART_BYTES = 192


def write(
    layout: PagedLayout,
    loads: Sequence[Load],
    *,
    rotary: Rotary | None = None,
    stages: int = 4,
    shared: int = 1 << 17,
    unit_stages: int = 0,
    unit_shared: int = 1 << 17,
    burst: int = 1,
    allocate: Callable[[int], Bytes] = lambda size: np.empty(size, dtype=np.uint8),
) -> Job:
    """Writes a job.

    Args:
        layout: with addresses that the device can write.
        loads: with payload addresses that the device can read.
        rotary: how keys are turned, where a request asks for it.
        stages: at most, of ``STAGE_BYTES`` and some addresses each.
        shared: bytes of shared memory that a block may have.
        unit_stages, unit_shared: the same for what can be moved in units; 0: nothing is.
        burst: units that are asked for together.
        allocate: gives memory of at least that many bytes, aligned to 16.

    Raises:
        UnsupportedError: sizes or alignments that the kernels do not serve; says which.
        ValueError: keys are to be turned, and nothing says how.
    """
    groups = [
        (number, load.records, load.requests[begin : begin + SHARED_BY])
        for number, load in enumerate(loads)
        for begin in range(0, len(load.requests), SHARED_BY)
    ]
    angles: dict[int, int] = {}
    wanted = []
    for _, _, requests in groups:
        for one in requests:
            at = _NO_TURNS
            if one.delta:
                if rotary is None:
                    raise ValueError("keys are to be turned, but nothing says how")
                at = angles.setdefault(one.delta, len(angles) * (rotary.dim // 2))
            wanted.append(wanted_record(one, at))
    limits = (shared, stages, unit_shared, unit_stages, burst)
    table, options = b"", _OPTIONS.pack(*limits, 0, 0, 0)
    if rotary and angles:
        if rotary.dim * (4 if rotary.dtype == "float32" else 2) > layout.row_bytes:
            raise UnsupportedError(
                f"{rotary.dim} rotated elements do not fit rows of {layout.row_bytes} bytes"
            )
        table = b"".join([turns(rotary, delta) for delta in angles])
        element = ELEMENTS[rotary.dtype]
        options = _OPTIONS.pack(*limits, rotary.dim, rotary.interleaved, element)
    status = bytearray(sum(len(records) * len(requests) for _, records, requests in groups))
    given = (
        layout.packed,
        b"".join([r.tobytes() for _, r, _ in groups]),
        b"".join([_GROUP.pack(len(records), len(requests)) for _, records, requests in groups]),
        b"".join(wanted),
        table,
        options,
    )
    memory = allocate(1 << 18)
    try:
        size, *sizes = _host.job(*given, memory.data, status)
        if size > len(memory):
            memory = allocate(size)
            size, *sizes = _host.job(*given, memory.data, status)
    except ValueError as wrong:
        raise UnsupportedError(str(wrong)) from None
    upload, vector, parts, items, tiles, read_bytes, shared, units, unit_shared = sizes
    return Job(
        memory=memory,
        upload_bytes=upload,
        vector=vector,
        turns=bool(angles),
        loads=len(loads),
        parts=parts,
        items=items,
        tiles=tiles,
        read_bytes=read_bytes,
        shared_bytes=max(shared if items or not units else 0, unit_shared),
        units=units,
        _groups=[(number, len(records), len(requests)) for number, records, requests in groups],
        _checked=bytes(status),
    )
