"""The passes over one member in a GPU's memory: what a recipe's tables do not refer to is written,
and all of it is decoded and compared. Knows addresses and tables; what is made of them is
``kmesh.codec.gpu``'s business.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from kmesh import _host
from kmesh.codec.description import SpanDescription
from kmesh.codec.memory import address_of
from kmesh.codec.records import HEAD, aligned
from kmesh.codec.segments import Segment
from kmesh.codec.writing import Tables
from kmesh.errors import UnsupportedError
from kmesh.kernels.device import Launcher, Slot
from kmesh.kernels.rotary import ELEMENTS, Rotary
from kmesh.layout import tiles

#: ``struct Encoding`` of ``kernels/encode.cu``, and what it points to.
_JOB = struct.Struct("<10Q26I")
_SOURCE = struct.Struct("<QII")
_DIFFERENCE = struct.Struct("<II")
_ITEM_BYTES = 16384
_ITEM_ROWS = 256
_ROWS = 2**31
_RUN_BYTES = 2**32
_BLOCKS = 4  # of each multiprocessor
_ALIGN = 64
#: Memory of whichever kind; the driver knows from the addresses.
_ANY = 4


@dataclass(frozen=True, slots=True)
class Found:
    """What a pass found.

    Attributes:
        root: of the payload.
        stored_root: of the literals.
        compared: bytes of the payload.
        differing: elements that did not come back.
    """

    root: int
    stored_root: int
    compared: int
    differing: int


@dataclass(frozen=True, slots=True)
class Marks:
    """Where elements did not come back.

    Attributes:
        equal, worth: [run, words]: a bit for each token that is as it should be, and for each that
            differs so little that a difference is worth it. Bits past the last token are 0.
    """

    equal: npt.NDArray[np.uint32]
    worth: npt.NDArray[np.uint32]


class Passes:
    """Over one member's payload, one at a time.

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
        self._item_rows = min(_ITEM_ROWS, _ITEM_BYTES // row)
        self._items = -(-self._rows // self._item_rows)
        self._blocks = min(self._items, _BLOCKS * device.multiprocessors)
        self._tiles, self._stored_tiles = tiles(member.payload_bytes), 0
        self._counts_at = 0

    def start(
        self, file: int, middle: bytes, tables: Tables, base: Sequence[Segment],
        differences: Sequence[tuple[int, int]],
    ) -> None:  # fmt: skip
        """Starts to write a recipe but for its head, to decode it, and to compare.

        Args:
            file: address of the recipe, a multiple of 64; memory of the GPU, or of the host if the
                GPU may write it.
            middle: the bytes between head and literals.
            tables: the same as records.
            base: segments by number, in the GPU's memory.
            differences: runs and numbers of ops in their lists: those that are XOR.
        """
        slot, runtime = self._slot, self._device.runtime
        used = [base[number] for number in tables.used.tolist()]
        vector = self._vector([self._payload, file, *(one.address for one in used)])
        sources = b"".join(_SOURCE.pack(one.address, one.description.tokens, 0) for one in used)
        which = b"".join(_DIFFERENCE.pack(*one) for one in differences)
        self._stored_tiles = tiles(tables.literal_bytes)
        # What was there before must not look like this one's head.
        front_bytes = HEAD.size + len(middle)
        front_at = aligned(_JOB.size, _ALIGN)
        sources_at = aligned(front_at + front_bytes, _ALIGN)
        differences_at = sources_at + len(sources)
        sums_at = aligned(differences_at + len(which), _ALIGN)
        self._counts_at = counts_at = aligned(sums_at + self._told_bytes, _ALIGN)
        size = counts_at + 4 * self._member.runs * self._member.tokens
        given = (file, tables.literal_bytes, sources_at, differences_at, sums_at, counts_at)
        memory = slot.reserve(size).data
        _JOB.pack_into(memory, 0, *self._head(tables, given, len(differences), vector))
        memory[front_at : front_at + HEAD.size] = bytes(HEAD.size)
        memory[front_at + HEAD.size : front_at + front_bytes] = middle
        memory[sources_at : differences_at + len(which)] = sources + which
        slot.upload(sums_at, self._stream)
        runtime.memsetAsync(slot.job + sums_at, 0, size - sums_at, self._stream)
        self._copy(file, slot.host + front_at, front_bytes)
        names = (f"gather_{vector}", f"verify_{vector}")
        for name in ("pack", *names, "unpack") if differences else names:
            self._launch(name)
        slot.expect(self._told_bytes // 4)
        self._copy(slot.told, slot.job + sums_at, self._told_bytes)
        slot.record(self._stream)

    def finish(self) -> Found:
        """Waits for what was started."""
        self._slot.wait()
        told = self._slot.results(self._told_bytes // 8, np.uint64)
        at, own, more = self._slot.told, self._tiles, self._stored_tiles
        compared, differing = told[-2:].tolist()
        return Found(
            root=_host.fold(at, own),
            stored_root=_host.fold(at + 8 * own, more) if more else 0,
            compared=compared,
            differing=differing,
        )

    def marks(self) -> Marks:
        """Where elements did not come back in the pass that was last."""
        words = -(-self._member.tokens // 32)
        self._slot.expect(2 * self._member.runs * words)
        self._launch("tell")
        self._wait()
        told = self._slot.results(2 * self._member.runs * words, np.uint32).copy()
        return Marks(*told.reshape(2, self._member.runs, words))

    def counts(self) -> npt.NDArray[np.uint32]:
        """[run, token]: elements in which the pass that was last found a difference."""
        counts = np.empty((self._member.runs, self._member.tokens), dtype=np.uint32)
        self._copy(address_of(counts), self._slot.job + self._counts_at, counts.nbytes)
        self._wait()
        return counts

    def head(self, file: int, head: bytes) -> None:
        """Writes a recipe's head, with which it becomes one."""
        self._slot.reserve(len(head)).data[: len(head)] = head
        self._copy(file, self._slot.host, len(head))
        self._wait()

    @property
    def _told_bytes(self) -> int:
        """Of what the kernels sum: tiles, compared bytes, and elements that differ."""
        return 8 * (self._tiles + self._stored_tiles + 2)

    def _wait(self) -> None:
        self._slot.record(self._stream)
        self._slot.wait()

    def _copy(self, to: int, source: int, size: int) -> None:
        """Starts to copy bytes, behind what was started."""
        self._device.runtime.memcpyAsync(to, source, size, _ANY, self._stream)

    def _launch(self, name: str) -> None:
        self._device.launch(
            "encode", f"kmesh_encode_{name}", self._blocks, 0, self._slot, None, self._stream
        )

    def _vector(self, addresses: Sequence[int]) -> int:
        """How many bytes are moved at once."""
        every = [self._member.row_bytes, *addresses]
        if any(one % 4 for one in every):
            raise UnsupportedError("payload and base must lie at multiples of 4 bytes")
        return 4 if any(one % 16 for one in every) else 16

    def _head(
        self, tables: Tables, given: tuple[int, ...], differences: int, vector: int
    ) -> tuple[int, ...]:
        """The fields of ``struct Encoding``."""
        file, stored, sources_at, differences_at, sums_at, counts_at = given
        member, rotary, offsets = self._member, self._rotary, tables.offsets
        stored_sums_at = sums_at + 8 * self._tiles
        return (
            self._payload, file, file + offsets["literals"], stored, sources_at, differences_at,
            sums_at, stored_sums_at, stored_sums_at + 8 * self._stored_tiles, counts_at,
            member.runs, member.shard.heads, member.tokens, member.row_bytes,
            self._rows, self._item_rows, self._items, differences, worth_limit(member),
            offsets["lists"], offsets["ops"], offsets["runs"], offsets["turns"],
            tables.turns.dtype.itemsize,
            rotary.dim if rotary else 0, int(rotary.interleaved) if rotary else 0,
            ELEMENTS[member.dtype],
            *_divisor(member.tokens), *_divisor(member.shard.heads),
            *_divisor(member.row_bytes // vector),
        )  # fmt: skip


def worth_limit(member: SpanDescription) -> int:
    """The most elements of a token that may differ for a sparse difference to be worth it: it
    takes no more than 7/8 of the token, by ``Planner``'s reckoning."""
    elements, size = member.shard.heads * member.head_dim, member.element_bytes
    return elements * (7 * size - 1) // (8 * size)


@lru_cache(maxsize=64)
def _divisor(value: int) -> tuple[int, int, int]:
    """``struct Divisor``: n // value is n · factor >> 32 + shift, for n below 2³¹."""
    if value == 1:
        return 1, 0, 0
    bits = (value - 1).bit_length()
    return value, ((1 << (31 + bits)) + value - 1) // value, bits - 1
