"""What one launch restores for a round of siblings, out of dense spans, recipes and their bases.

A job is one block of bytes, as in ``plan``; ``_host_round_job.h`` writes it. Each base is read
once, whoever refers to it. Nothing here knows a GPU: the tests run jobs on the CPU.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kmesh import _host
from kmesh.errors import UnsupportedError
from kmesh.kernels.host import PagedLayout, SpanPart
from kmesh.kernels.plan import RECORD, Bytes, Memory, Request, wanted_record
from kmesh.kernels.rotary import ELEMENTS
from kmesh.layout import TILE_BYTES

if TYPE_CHECKING:
    from kmesh.codec.description import SpanDescription
    from kmesh.codec.recipe import RecipeTables

_OPTIONS = struct.Struct("<4I")
_USE = np.dtype([("owner", "<u4"), ("part", "<u4")])

#: A member, as it is packed. What is of a lower order is read first.
MEMBER = np.dtype([("part", RECORD), ("tables", "<u8"), ("request", "<u8"), ("order", "<u8")])
#: A base, as it is packed.
BASE = np.dtype(
    [
        ("address", "<u8"),
        ("sums_address", "<u8"),
        ("order", "<u8"),
        ("known", "<u8"),
        ("key", "V32"),
        ("digest", "V32"),
        ("root", "<u8"),
        ("generation", "<u8"),
        ("tokens", "<u4"),
        ("position", "<u4"),
        ("reserved", "<u8"),
        ("namespace", "V32"),
        ("layers", "<u2", 2),
        ("heads", "<u2", 2),
        ("head_dim", "<u4"),
        ("dtype", "<u4"),
    ]
)
#: Of what each memory has, the order.
_ORDER = {Memory.HOST: 0, Memory.GPU: 1}


@dataclass(frozen=True, slots=True)
class Place:
    """Bytes that lie where the device reads them, and the sums of their tiles.

    Attributes:
        address: of the first byte. sums_address: of the first sum.
        root: to which the sums fold.
        memory: which memory that is.
    """

    address: int
    sums_address: int
    root: int
    memory: Memory = Memory.HOST


@dataclass(frozen=True, slots=True)
class BaseSpan:
    """A dense span that recipes may refer to.

    Attributes:
        place: of its payload.
        description: of it, in the frame in which it was computed.
        digest: SHA-256 of the payload where that is known; recipes must name the same.
    """

    place: Place
    description: SpanDescription
    digest: bytes | None = None

    def pack(self) -> tuple[object, ...]:
        """As a ``BASE``.

        Raises:
            UnsupportedError: its elements are none that recipes are made of.
        """
        place, what, shard = self.place, self.description, self.description.shard
        if what.dtype not in ELEMENTS:
            raise UnsupportedError(f"recipes over elements of {what.dtype} are not served")
        return (
            place.address, place.sums_address, _ORDER[place.memory], self.digest is not None,
            what.key, self.digest or bytes(32), place.root, what.generation, what.tokens,
            what.position, 0, what.namespace, (shard.layer_begin, shard.layer_end),
            (shard.head_begin, shard.head_end), what.head_dim, ELEMENTS[what.dtype],
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Member:
    """A payload, or a part of one, that a request wants.

    Attributes:
        part: as it would be of a dense payload. Of a recipe, ``address``, ``sums_address``,
            ``root`` and ``length`` are those of its file, and the others of what it gives.
        request: number of the request in the round.
        tables: of the recipe; None: the payload is dense.
        memory: where those bytes are.
    """

    part: SpanPart
    request: int
    tables: RecipeTables | None = None
    memory: Memory = Memory.HOST

    @classmethod
    def mirror(
        cls, tables: RecipeTables, place: Place, request: int, position: int, **changes: int
    ) -> Member:
        """All of what a recipe gives, or a part: ``changes`` are fields of the ``SpanPart``.

        Args:
            place: of the recipe's file.
            position: of the member's token 0 in the request.
        """
        what = tables.description
        whole = {
            "token_begin": 0, "token_end": what.tokens, "src_head_begin": 0, "dst_head_begin": 0,
            "heads": what.shard.heads, "src_layer_begin": 0, "dst_layer_begin": 0,
            "layers": what.shard.layers,
        }  # fmt: skip
        part = SpanPart(
            address=place.address,
            sums_address=place.sums_address,
            root=place.root,
            length=tables.head["file_bytes"],
            tokens=what.tokens,
            position=position,
            src_heads=what.shard.heads,
            src_layers=what.shard.layers,
            **{**whole, **changes},
        )
        return cls(part, request, tables, place.memory)


@dataclass(frozen=True, slots=True, eq=False)
class Round:
    """Members for requests, dense ones and recipes, and the bases that these refer to.

    Attributes:
        bases: an array of ``BASE``.
        members: an array of ``MEMBER``.
        requests: whose pages they are for; none of them turns keys.
        kept: what ``members`` has addresses of tables of.
    """

    bases: npt.NDArray[np.void]
    members: npt.NDArray[np.void]
    requests: Sequence[Request]
    kept: tuple[object, ...] = ()

    @classmethod
    def of(
        cls, bases: Sequence[BaseSpan], members: Sequence[Member], requests: Sequence[Request]
    ) -> Round:
        """From objects.

        Raises:
            UnsupportedError: a request turns keys: a recipe says itself how its keys are turned.
            ValueError: a member names a request that is not there.
        """
        if any(request.delta for request in requests):
            raise UnsupportedError("requests of a round can't turn keys: recipes say how")
        packed = np.zeros(len(members), dtype=MEMBER)
        for number, (record, member) in enumerate(zip(packed, members, strict=True)):
            if not 0 <= member.request < len(requests):
                raise ValueError(f"members[{number}].request is {member.request}: there is none")
            record["part"] = np.frombuffer(member.part.pack(), dtype=RECORD)[0]
            record["tables"] = member.tables.file.ctypes.data if member.tables else 0
            record["request"] = member.request
            record["order"] = _ORDER[member.memory]
        kept = tuple(one.tables for one in members if one.tables is not None)
        return cls(np.array([one.pack() for one in bases], dtype=BASE), packed, requests, kept)


class HostBytes:
    """What of a round lies in host memory, for whoever copies it before it is restored.

    Attributes:
        records: a copy of each, in the order of their addresses, as an array of ``RECORD`` of which
            only address and length mean something.

    Args:
        gap: where one begins on the tile behind another, as in a slab, with so many bytes between
            them or fewer, these are part of the first: they are one copy then.
    """

    def __init__(self, round: Round, gap: int = TILE_BYTES) -> None:
        self._round = round
        reads, numbers = _host.round_reads(round.members.data, round.bases.data, gap)
        found = np.frombuffer(reads, dtype=np.uint64).reshape(-1, 3)
        self.records = np.zeros(len(found), dtype=RECORD)
        self.records["address"], self.records["length"] = found[:, 0], found[:, 1]
        self._numbers = np.frombuffer(numbers, dtype=np.uint32)

    def moved(self, addresses: npt.NDArray[np.uint64]) -> Round:
        """The same round with these addresses for ``records``. Parts of its job that are not
        copies have order 0; a copy's order is its number in ``records``, from 1."""
        round = self._round
        bases, members = round.bases.copy(), round.members.copy()
        split = len(bases)
        _move(bases, self._numbers[:split], addresses, bases)
        _move(members["part"], self._numbers[split:], addresses, members)
        return Round(bases, members, round.requests, round.kept)


def _move(
    places: npt.NDArray[np.void], numbers: npt.NDArray[np.uint32],
    addresses: npt.NDArray[np.uint64], records: npt.NDArray[np.void],
) -> None:  # fmt: skip
    """Gives places the addresses of their numbers, and records the orders that follow."""
    which = numbers < len(addresses)
    places["address"][which] = addresses[numbers[which]]
    records["order"] = np.where(which, numbers + np.uint32(1), 0)


@dataclass(frozen=True, slots=True)
class RoundStatuses:
    """What became of a round: one ``Status`` each, one byte each.

    A base that is bad is so in ``bases``, and every member that took bytes of it is, too. A member
    whose recipe is bad is bad alone.
    """

    members: bytes
    bases: bytes


@dataclass(slots=True)
class RoundJob:
    """A job that was written, and what its results mean.

    Attributes:
        memory: the job; its first ``upload_bytes`` bytes are to be uploaded.
        vector: bytes of the vectors that it is for, 16 or 4.
        parts, items, tiles: counts. A part is a payload or a recipe of which something is read.
        read_bytes: that the launch reads, sums left out.
        shared_bytes: of shared memory that a block takes.
        blocks: of the launch, at least 1.
        drawn: of the parts, those that are not like one before them.
        turns: whether any keys are turned.
        orders: of the parts, in which they are one behind the other.
    """

    memory: Bytes
    upload_bytes: int
    vector: int
    parts: int
    items: int
    tiles: int
    read_bytes: int
    shared_bytes: int
    blocks: int
    drawn: int
    turns: bool
    orders: npt.NDArray[np.uint64]
    _uses: npt.NDArray[np.void]
    _checked: npt.NDArray[np.uint8]
    _bases: int

    def statuses(self, results: npt.NDArray[np.uint32]) -> RoundStatuses:
        """What the results of the kernel, one for each part, say of members and bases."""
        members = len(self._checked)
        if not results.any():
            return RoundStatuses(self._checked.tobytes(), bytes(self._bases))
        codes = np.zeros(members + self._bases, dtype=np.uint32)
        np.maximum.at(codes, self._uses["owner"], results[self._uses["part"]])
        found = codes.astype(np.uint8)
        found[:members] = np.where(self._checked, self._checked, found[:members])
        return RoundStatuses(found[:members].tobytes(), found[members:].tobytes())


def write(
    layout: PagedLayout,
    round: Round,
    *,
    stages: int = 4,
    shared: int = 1 << 17,
    blocks: int = 396,
    slow_blocks: int = 64,
    allocate: Callable[[int], Bytes] = lambda size: np.empty(size, dtype=np.uint8),
) -> RoundJob:
    """Writes a round's job.

    Args:
        layout: with addresses that the device can write.
        round: with addresses that the device can read, those of tables left out.
        stages: at most, of ``plan.STAGE_BYTES`` and some addresses each.
        shared: bytes of shared memory that a block may have.
        blocks: of the launch, at most.
        slow_blocks: of these, which read what has order 0, as what is in host memory has, if not
            all has; 0: all blocks read everything.
        allocate: gives memory of at least that many bytes, aligned to 16.

    Raises:
        UnsupportedError: sizes, alignments or recipes that the kernel does not serve; says which.
    """
    status = np.zeros(len(round.members), dtype=np.uint8)
    given = (
        layout.packed,
        b"".join([wanted_record(request) for request in round.requests]),
        round.members.tobytes(),
        round.bases.tobytes(),
        _OPTIONS.pack(shared, stages, blocks, slow_blocks),
    )
    memory = allocate(1 << 18)
    try:
        size, *sizes, uses, orders = _host.round(*given, memory.data, status.data)
        if size > len(memory):
            memory = allocate(size)
            size, *sizes, uses, orders = _host.round(*given, memory.data, status.data)
    except ValueError as wrong:
        raise UnsupportedError(str(wrong)) from None
    upload, vector, parts, items, tiles, read, taken, launched, drawn, turns = sizes
    return RoundJob(
        memory=memory,
        upload_bytes=upload,
        vector=vector,
        parts=parts,
        items=items,
        tiles=tiles,
        read_bytes=read,
        shared_bytes=taken,
        blocks=max(launched, 1),
        drawn=drawn,
        turns=bool(turns),
        orders=np.frombuffer(orders, dtype=np.uint64),
        _uses=np.frombuffer(uses, dtype=_USE),
        _checked=status,
        _bases=len(round.bases),
    )
