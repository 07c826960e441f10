"""Recipes of members that lie in a GPU's memory, made there: the same bytes as ``Encoder``'s.

The host makes the tables; the GPU writes literals, decodes and compares. What provenance says is
taken for true at first, and what does not come back is looked at then. Needs CuPy (extras
``cuda12`` and ``cuda13``) beside what the codec needs, or CUDA's compiler alone with
``kmesh.kernels.bare``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import numpy as np
import numpy.typing as npt

from kmesh.codec.assignment import XOR
from kmesh.codec.description import SpanDescription
from kmesh.codec.encoder import CLEARLY_SHARED, WORTH, check_family, check_member
from kmesh.codec.judging import AlonePlanner, ExpectingPlanner, JudgingPlanner
from kmesh.codec.memory import address_of, root_of
from kmesh.codec.passes import Found, Passes
from kmesh.codec.planning import expected_pieces
from kmesh.codec.provenance import Provenance
from kmesh.codec.recipe import Recipe
from kmesh.codec.records import BLOCK_TOKENS, CHUNK, RUN_ALIGN, Form
from kmesh.codec.segments import Base, Segment
from kmesh.codec.turning import Turns
from kmesh.codec.writing import Tables, head_of, lay_out
from kmesh.errors import RecipeError, UnsupportedError
from kmesh.kernels.device import Device, Launcher
from kmesh.kernels.rotary import Rotary

_NO_CHUNKS = np.empty(0, dtype=CHUNK)
_ANY = 4


@dataclass(frozen=True, slots=True)
class GpuBytes:
    """A payload in the memory of a GPU: its address there, and bytes."""

    address: int
    size: int


class GpuSegment(Segment):
    """A segment in the memory of a GPU. It must not change while this is used.

    Args:
        description: of the payload; ``position`` is where it was computed.
        payload: as ``docs/layout.md`` orders it.
        digest, root: SHA-256 of the payload, and root of its tile sums.

    Raises:
        RecipeError: the payload is not as long as its description says.
    """

    def __init__(
        self, description: SpanDescription, payload: GpuBytes, *, digest: bytes, root: int
    ) -> None:
        check_size(description, payload)
        self.description = description
        self._address = payload.address
        self.digest = digest
        self.root = root

    @classmethod
    def read(cls, description: SpanDescription, payload: GpuBytes, device: Launcher) -> Self:
        """One of which digest and root are not known: its bytes are brought to the host once.

        Whatever wrote the payload must have ended.
        """
        check_size(description, payload)
        data = _fetch(device, payload.address, payload.size)
        digest = hashlib.sha256(data.data).digest()
        return cls(description, payload, digest=digest, root=root_of(data))

    @property
    def address(self) -> int:
        return self._address


class GpuEncoded:
    """A recipe in a GPU's memory that gave its member back, bit for bit.

    Attributes:
        address, size: where it lies, and its bytes.
        payload_root: of the member.
        refused: runs with tokens that did not come back at first, and are literal now.
        used: numbers of the base's segments that it refers to.
    """

    def __init__(
        self, device: Launcher, address: int, size: int, used: list[int], *, owned: bool
    ) -> None:
        self._device, self._owned = device, owned
        self.address, self.size, self.used = address, size, used
        self.payload_root = self.refused = 0

    @property
    def depends(self) -> bool:
        """Whether a base is needed: if not, nothing that was worth it was shared."""
        return len(self.used) > 0

    @cached_property
    def data(self) -> bytes:
        """The recipe's bytes, brought to the host."""
        return _fetch(self._device, self.address, self.size).tobytes()

    @cached_property
    def recipe(self) -> Recipe:
        """The same, parsed and checked."""
        return Recipe(self.data)

    def close(self) -> None:
        """Frees the memory that was allocated for it; what the host has already stays."""
        with self._device:
            self.free()

    def free(self) -> None:
        """The same, where the device is the current one already."""
        if self._owned:
            self._device.runtime.free(self.address)
            self._owned = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class GpuEncoder:
    """Encodes members of one family against its base, by provenance, in the addressable form.

    Not thread-safe: one thread uses it at a time.

    Args:
        base: of ``GpuSegment``s.
        rotary: how the model turns its keys; without it, keys are never turned.
        device: where base and members are; ordinal as this process counts, or the device itself,
            which then is the caller's to close.
        block_tokens: 16, 32 or 64; is written into recipes.

    Raises:
        RecipeError: block_tokens is none of these, or the rotary is not of the base's elements.
        UnsupportedError: CuPy is not installed, or a segment is not in a GPU's memory.
    """

    def __init__(
        self,
        base: Base,
        rotary: Rotary | None = None,
        *,
        device: int | Launcher = 0,
        block_tokens: int = BLOCK_TOKENS[0],
    ) -> None:
        check_family(base, rotary, block_tokens)
        for number, segment in enumerate(base):
            if not isinstance(segment, GpuSegment):
                raise UnsupportedError(f"segment {number} of the base is not in a GPU's memory")
        self._base, self._rotary, self._block = base, rotary, block_tokens
        self._own = isinstance(device, int)
        self._device = Device(device) if isinstance(device, int) else device

    def encode(
        self,
        member: SpanDescription,
        payload: GpuBytes,
        provenance: Sequence[Provenance],
        stream: int,
        *,
        place: Callable[[int], int] | None = None,
    ) -> GpuEncoded:
        """A recipe from which the payload was made again, every byte of it compared.

        Args:
            member: what the payload is.
            payload: dense, as ``docs/layout.md`` orders it; must not change meanwhile.
            provenance: what its recovery wrote down.
            stream: handle of a CUDA stream of the device. It is waited for.
            place: gives the address for a recipe of so many bytes, a multiple of 64, in memory of
                the GPU or in the host's where the GPU may write it. What is there is a recipe
                when this call has ended well. It is asked once more for each recipe that takes the
                place of one: where provenance was wrong, and where one without a base is smaller.
                By default memory of the GPU is allocated.

        Raises:
            RecipeError: as ``Encoder.encode``; or the payload changed meanwhile.
            UnsupportedError: there is no provenance, or rows and addresses are not such as the
                kernels serve.
        """
        check_size(member, payload)
        check_member(member, self._base)
        if not provenance:
            raise UnsupportedError(
                "what a base shares is looked for by content on the CPU alone: without provenance"
                " a member is encoded by kmesh.codec.Encoder"
            )
        with self._device as device:
            with device.job(stream) as slot:
                passes = Passes(device, slot, stream, member, payload.address, self._rotary)
                turns = Turns(self._rotary)
                expected = expected_pieces(provenance, member, self._base, turns)
                planner = ExpectingPlanner(member, expected, passes)
                writer = _Writer(device, passes, member, self._block, place)
                encoded, tables = writer.write(planner, self._base, turns)
                if encoded.depends and tables.referred < CLEARLY_SHARED:
                    encoded = writer.smaller(encoded)
            device.release(slot)
        return encoded

    def close(self) -> None:
        """Frees what was allocated, but for recipes."""
        if self._own:
            with self._device:
                self._device.close()


class _Writer:
    """Writes recipes of one member until what was written comes back."""

    def __init__(
        self,
        device: Launcher,
        passes: Passes,
        member: SpanDescription,
        block_tokens: int,
        place: Callable[[int], int] | None,
    ) -> None:
        self._device, self._passes, self._place = device, passes, place
        self._member, self._block = member, block_tokens
        self._root: int | None = None

    def write(self, planner: JudgingPlanner, base: Base, turns: Turns) -> tuple[GpuEncoded, Tables]:
        """The recipe by these plans, or others where something does not come back."""
        plans = planner.plans()
        while True:
            tables = lay_out(plans, base, turns)
            encoded = self._allocated(tables)
            try:
                found = self._written(encoded, tables, base)
                if not found.differing:
                    encoded.payload_root, encoded.refused = found.root, len(planner.literal)
                    return encoded, tables
                plans = planner.again(plans, self._passes.marks())
            except BaseException:
                encoded.free()
                raise
            encoded.free()

    def smaller(self, encoded: GpuEncoded) -> GpuEncoded:
        """This one, or a recipe that refers to nothing if that is as well."""
        alone, nothing = AlonePlanner(self._member), Base()
        turns = Turns(None)
        if encoded.size <= WORTH * _size(lay_out(alone.plans(), nothing, turns)):
            return encoded
        encoded.free()
        return self.write(alone, nothing, turns)[0]

    def _allocated(self, tables: Tables) -> GpuEncoded:
        size, owned = _size(tables), self._place is None
        address = self._place(size) if self._place else self._device.runtime.malloc(size)
        if address % RUN_ALIGN:
            raise RecipeError(f"{address:#x} is no multiple of {RUN_ALIGN}", field="place")
        return GpuEncoded(self._device, address, size, tables.used.tolist(), owned=owned)

    def _written(self, encoded: GpuEncoded, tables: Tables, base: Base) -> Found:
        """Writes it, with a head if all came back."""
        member, middle = self._member, tables.tobytes(_NO_CHUNKS)
        self._passes.start(encoded.address, middle, tables, base.segments, _differences(tables))
        # While the GPU works: what is needed afterwards.
        tables_root, _ = root_of(middle), tables.referred
        found = self._passes.finish()
        if self._root not in (None, found.root):
            raise RecipeError("the payload changed while it was encoded", field="payload_root")
        self._root = found.root
        if found.compared != member.payload_bytes:
            raise RecipeError(
                f"{found.compared} of {member.payload_bytes} bytes were compared", field="tokens"
            )
        if not found.differing:
            given = (tables.literal_bytes, found.root, tables_root, found.stored_root)
            head = head_of(member, tables, Form.ADDRESSABLE, self._block, len(middle), 0, *given)
            self._passes.head(encoded.address, head)
        return found


def check_size(description: SpanDescription, payload: GpuBytes) -> None:
    """RecipeError if a payload is not as long as its description says."""
    if payload.size != description.payload_bytes:
        raise RecipeError(
            f"{payload.size} bytes are not the {description.payload_bytes} of"
            f" {description.tokens} tokens",
            field="payload",
        )


def _differences(tables: Tables) -> list[tuple[int, int]]:
    """Runs, and numbers of ops in their lists, that are differences."""
    at = np.flatnonzero(tables.ops["kind"] == XOR)
    if not len(at):
        return []
    of_list = np.searchsorted(tables.lists["first"], at, side="right") - 1
    number = at - tables.lists["first"][of_list]
    return [
        (run, op)
        for run, used in enumerate(tables.runs["list"].tolist())
        for op in number[of_list == used].tolist()
    ]


def _size(tables: Tables) -> int:
    """Of the file."""
    return tables.offsets["literals"] + tables.literal_bytes


def _fetch(device: Launcher, address: int, size: int) -> npt.NDArray[np.uint8]:
    data = np.empty(size, dtype=np.uint8)
    with device:
        device.runtime.memcpy(address_of(data), address, size, _ANY)
    return data
