"""The passes over one member in a GPU's memory: what a base has too, what is written, and whether
it comes back. Knows addresses and tables; what is made of them is ``kmesh.codec.gpu``'s business.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kmesh import _host
from kmesh.codec.assignment import Piece
from kmesh.codec.description import SpanDescription
from kmesh.codec.memory import address_of
from kmesh.codec.records import HEAD, aligned
from kmesh.codec.segments import Segment
from kmesh.codec.writing import Tables
from kmesh.errors import UnsupportedError
from kmesh.kernels.device import Launcher, Slot
from kmesh.kernels.rotary import ELEMENTS, Rotary
from kmesh.layout import tiles

#: ``struct Encoding`` of ``kernels/encode.cu``.
_JOB = struct.Struct("<16Q28I")
_PIECE = np.dtype(
    [("address", "<u8"), ("tokens", "<u4"), ("shift", "<u4"), ("turn", "<u4"), ("spare", "<u4")]
)
_SOURCE = np.dtype([("address", "<u8"), ("tokens", "<u4"), ("spare", "<u4")])
#: Kernels that come for each size of vector.
_BY_VECTORS = ("compare", "gather", "verify")
_NONE = 0xFFFFFFFF
_ITEM_BYTES = 16384
_ITEM_ROWS = 256
_ROWS = 2**31
_RUN_BYTES = 2**32
_BLOCKS = 4  # of each multiprocessor
_ALIGN = 64
#: Memory of whichever kind; the driver knows from the addresses.
_ANY = 4


@dataclass(frozen=True)
class Found:
    """What a pass told.

    Attributes:
        root: of the payload.
        stored_root: of the literals.
        compared: bytes of the payload.
        equal, worth: [run, words]: a bit for each token that is as it should be, and for each that
            differs so little that a difference is worth it. Bits past the last token are 0.
    """

    root: int
    stored_root: int
    compared: int
    equal: npt.NDArray[np.uint32]
    worth: npt.NDArray[np.uint32]


class Passes:
    """Over one member's payload. One pass at a time; each is waited for.

    Args:
        device, slot, stream: of the GPU; the slot is this one's until the last pass has ended.
        member: what the payload is.
        payload: its address on the GPU.
        rotary: how keys are turned, if they are.

    Raises:
        UnsupportedError: rows that the kernels do not serve; says why.
    """

    def __init__(
        self,
        device: Launcher,
        slot: Slot,
        stream: int,
        member: SpanDescription,
        payload: int,
        rotary: Rotary | None,
    ) -> None:
        self._device, self._slot, self._stream = device, slot, stream
        self._member, self._payload, self._rotary = member, payload, rotary
        row = member.row_bytes
        self._rows = member.runs * member.shard.heads * member.tokens
        if row % 4 or row > _ITEM_BYTES:
            raise UnsupportedError(f"rows of {row} bytes: served are 4 to {_ITEM_BYTES}, by fours")
        if self._rows >= _ROWS or member.run_bytes >= _RUN_BYTES:
            raise UnsupportedError(
                f"{self._rows} rows, {member.run_bytes} bytes of one run: less than {_ROWS} and"
                f" {_RUN_BYTES} are served"
            )
        self._counts_at = 0

    def compare(
        self, expected: tuple[Sequence[Piece], Sequence[Piece]], base: Sequence[Segment],
        turns: Sequence[bytes],
    ) -> Found:  # fmt: skip
        """Which tokens are what they are said to be.

        Args:
            expected: pieces of K and of V.
            base: segments by number, in the GPU's memory.
            turns: angles of each turn, by number from 1.
        """
        member = self._member
        pieces = [*expected[0], *expected[1]]
        table = np.zeros(len(pieces), dtype=_PIECE)
        of_token = np.full((2, member.tokens), _NONE, dtype=np.uint32)
        pairs = len(turns[0]) // 8 if turns else 0
        for number, piece in enumerate(pieces):
            plane = int(number >= len(expected[0]))
            of_token[plane, piece.token : piece.token + piece.tokens] = number
            segment = base[piece.segment]
            shift = (piece.source - piece.token) % 2**32
            turn = (piece.turn - 1) * pairs if piece.turn else _NONE
            table[number] = (segment.address, segment.description.tokens, shift, turn, 0)
        angles = np.frombuffer(b"".join(turns), dtype=np.uint8)
        job = _Job(self._slot, [table, of_token[0], of_token[1], angles], self._sizes(0))
        vector = self._vector([self._payload, *(one.address for one in base)])
        pieces_at, keys_at, values_at, turns_at = job.inputs
        head = self._head(job, pieces=pieces_at, keys=keys_at, values=values_at, turns=turns_at)
        self._start(job, head, ("clear", "compare", "tell"), vector, 0)
        return self._found(0)

    def write(
        self, file: int, middle: bytes, tables: Tables, base: Sequence[Segment],
        differences: npt.NDArray[np.uint32],
    ) -> Found:  # fmt: skip
        """Writes a recipe but for its head, decodes it, and compares.

        Args:
            file: address of the recipe, a multiple of 64; memory of the GPU, or of the host if the
                GPU may write it.
            middle: the bytes between head and literals.
            tables: the same as records.
            base: segments by number, in the GPU's memory.
            differences: [n, 2], runs and numbers of ops in their lists: those that are XOR.

        Returns:
            ``equal`` says which tokens came back.
        """
        offsets, stored = tables.offsets(), tables.literal_bytes
        sources = np.zeros(len(tables.used), dtype=_SOURCE)
        for record, number in zip(sources, tables.used, strict=True):
            record["address"] = base[number].address
            record["tokens"] = base[number].description.tokens
        # What was there before must not look like this one's head.
        front = np.frombuffer(bytes(HEAD.size) + middle, dtype=np.uint8)
        job = _Job(self._slot, [sources, differences, front], self._sizes(stored))
        used = [base[number].address for number in tables.used]
        vector = self._vector([self._payload, file, *used])
        literals = file + offsets["literals"]
        segments_at, differences_at, _ = job.inputs
        head = self._head(
            job, file=file, literals=literals, literal_bytes=stored, segments=segments_at,
            differences=differences_at, differences_count=len(differences),
            lists_at=offsets["lists"], ops_at=offsets["ops"], runs_at=offsets["runs"],
            turns_at=offsets["turns"], turn_bytes=tables.turns.dtype.itemsize,
        )  # fmt: skip
        self.copy(file, job.host_address(2), len(front))
        pack, unpack = (("pack",), ("unpack",)) if len(differences) else ((), ())
        names = ("clear", "gather", *pack, "stored", "verify", *unpack, "tell")
        self._start(job, head, names, vector, stored)
        return self._found(stored)

    def counts(self) -> npt.NDArray[np.uint32]:
        """[run, token]: elements in which the pass that was last found a difference."""
        counts = np.empty((self._member.runs, self._member.tokens), dtype=np.uint32)
        self.copy(address_of(counts), self._slot.job + self._counts_at, counts.nbytes)
        self._slot.record(self._stream)
        self._slot.wait()
        return counts

    def head(self, file: int, head: bytes) -> None:
        """Writes a recipe's head, with which it becomes one."""
        memory = self._slot.reserve(len(head))
        memory[: len(head)] = np.frombuffer(head, dtype=np.uint8)
        self.copy(file, address_of(memory), len(head))
        self._slot.record(self._stream)
        self._slot.wait()

    def copy(self, to: int, source: int, size: int) -> None:
        """Starts to copy bytes, behind what was started."""
        if size:
            self._device.runtime.memcpyAsync(to, source, size, _ANY, self._stream)

    def _sizes(self, stored: int) -> list[int]:
        """Of what the kernels add up: counts, sums of payload and literals, compared bytes."""
        counts = 4 * self._member.runs * self._member.tokens
        return [counts, 8 * tiles(self._member.payload_bytes), 8 * tiles(stored), 8]

    def _vector(self, addresses: Sequence[int]) -> int:
        """How many bytes are moved at once."""
        every = [self._member.row_bytes, *addresses]
        if any(one % 4 for one in every):
            raise UnsupportedError("payload and base must lie at multiples of 4 bytes")
        return 4 if any(one % 16 for one in every) else 16

    def _head(self, job: _Job, **given: int) -> dict[str, int]:
        member, rotary = self._member, self._rotary
        counts, sums, stored_sums, compared = job.outputs
        self._counts_at = counts
        item_rows = min(_ITEM_ROWS, _ITEM_BYTES // member.row_bytes)
        return {
            "payload": self._payload,
            "counts": counts,
            "sums": sums,
            "stored_sums": stored_sums,
            "compared": compared,
            "cleared": counts,
            "cleared_bytes": job.size - counts,
            "runs": member.runs,
            "heads": member.shard.heads,
            "tokens": member.tokens,
            "row_bytes": member.row_bytes,
            "rows": self._rows,
            "item_rows": item_rows,
            "items": -(-self._rows // item_rows),
            "tiles": tiles(member.payload_bytes),
            "worth": worth_limit(member),
            "rotary_dim": rotary.dim if rotary else 0,
            "interleaved": int(rotary.interleaved) if rotary else 0,
            "element": ELEMENTS[member.dtype],
            **given,
        }

    def _start(
        self, job: _Job, head: dict[str, int], names: Sequence[str], vector: int, stored: int
    ) -> None:
        """Starts kernels one behind the other, and waits for them."""
        member = self._member
        head["stored_tiles"] = tiles(stored)
        by = (member.tokens, member.shard.heads, member.row_bytes // vector)
        divisors = [_divisor(value) for value in by]
        values = [head.get(name, 0) for name in _FIELDS]
        job.write_head(_JOB.pack(*values, *(word for one in divisors for word in one)))
        self._slot.upload(job.upload_bytes, self._stream)
        self._slot.expect(self._words(stored))
        blocks = min(head["items"], _BLOCKS * self._device.multiprocessors)
        for name in names:
            way = f"{name}_{vector}" if name in _BY_VECTORS else name
            self._device.launch(
                "encode", f"kmesh_encode_{way}", blocks, 0, self._slot, None, self._stream
            )
        self._slot.record(self._stream)
        self._slot.wait()

    def _words(self, stored: int) -> int:
        """Of what the last kernel tells."""
        masks = self._member.runs * -(-self._member.tokens // 32)
        return 2 * (tiles(self._member.payload_bytes) + tiles(stored) + 1) + 2 * masks

    def _found(self, stored: int) -> Found:
        told = self._slot.results(self._words(stored), np.uint32).copy()
        own, more = tiles(self._member.payload_bytes), tiles(stored)
        sums, masks = told[: 2 * (own + more + 1)].view(np.uint64), told[2 * (own + more + 1) :]
        equal, worth = masks.reshape(2, self._member.runs, -1)
        return Found(
            root=_host.fold(address_of(sums), own),
            stored_root=_host.fold(address_of(sums[own:]), more) if more else 0,
            compared=int(sums[-1]),
            equal=equal,
            worth=worth,
        )


def worth_limit(member: SpanDescription) -> int:
    """The most elements of a token that may differ for a sparse difference to be worth it: it
    takes no more than 7/8 of the token, by ``Planner``'s reckoning."""
    elements, size = member.shard.heads * member.head_dim, member.element_bytes
    return elements * (7 * size - 1) // (8 * size)


_FIELDS = (
    *("payload", "file", "literals", "literal_bytes", "pieces", "keys", "values", "turns"),
    *("segments", "differences", "counts", "sums", "stored_sums", "compared", "cleared"),
    *("cleared_bytes", "runs", "heads", "tokens", "row_bytes", "rows", "item_rows", "items"),
    *("tiles", "stored_tiles", "differences_count", "worth", "lists_at", "ops_at", "runs_at"),
    *("turns_at", "turn_bytes", "rotary_dim", "interleaved", "element"),
)


def _divisor(value: int) -> tuple[int, int, int]:
    """``struct Divisor``: n // value is n · factor >> 32 + shift, for n below 2³¹."""
    if value == 1:
        return 1, 0, 0
    bits = (value - 1).bit_length()
    return value, ((1 << (31 + bits)) + value - 1) // value, bits - 1


class _Job:
    """A job's memory: its head, tables that go in, and room for what kernels add up.

    Attributes:
        inputs, outputs: offsets.
        size, upload_bytes: of all of it, and of what is uploaded.
    """

    def __init__(self, slot: Slot, tables: Sequence[npt.NDArray[Any]], sizes: Sequence[int]):
        at, self.inputs, self.outputs = aligned(_JOB.size, _ALIGN), [], []
        for table in tables:
            self.inputs.append(at)
            at = aligned(at + table.nbytes, _ALIGN)
        self.upload_bytes = at
        for size in sizes:
            self.outputs.append(at)
            at = aligned(at + size, _ALIGN)
        self.size = at
        self._memory = slot.reserve(at)
        for table, begin in zip(tables, self.inputs, strict=True):
            self._memory[begin : begin + table.nbytes] = table.reshape(-1).view(np.uint8)

    def write_head(self, head: bytes) -> None:
        self._memory[: len(head)] = np.frombuffer(head, dtype=np.uint8)

    def host_address(self, number: int) -> int:
        """Of an input, on the host."""
        return address_of(self._memory) + self.inputs[number]
