"""A recipe that was read: its fields and tables, all of them checked."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from kmesh import _host
from kmesh.codec import records
from kmesh.codec.cold import thaw
from kmesh.codec.description import SpanDescription
from kmesh.codec.memory import Bytes, address_of, bytes_of
from kmesh.codec.records import Form, Op
from kmesh.errors import (
    RecipeChecksumError,
    RecipeFormatError,
    RecipeMismatch,
    UnsupportedError,
)
from kmesh.kernels.rotary import ELEMENTS
from kmesh.layout import Shard

_ROOTS = ("head_root", "tables_root", "stored_root")
_DTYPES = {number: name for name, number in ELEMENTS.items()}


class _Tables:
    """Head and tables of bytes that were checked, as views of them."""

    def __init__(self, file: npt.NDArray[np.uint8]) -> None:
        self.file = file
        self.head: dict[str, Any] = dict(
            zip(records.HEAD_FIELDS, records.HEAD.unpack_from(file.data), strict=True)
        )
        head, at = self.head, records.HEAD.size
        self.form = Form(head["form"])
        self.segments, at = self._table(at, records.SEGMENT, head["segments"])
        self.turns, at = self._table(at, records.turn_record(head["pairs"]), head["turns"])
        self.lists, at = self._table(at, records.LIST, head["lists"])
        self.ops, at = self._table(at, records.OP, head["ops"])
        self.runs, at = self._table(at, records.RUN, self.description.runs)
        self.chunks, at = self._table(at, records.CHUNK, head["chunks"])
        self.literals_at = records.aligned(at, records.RUN_ALIGN)

    @cached_property
    def description(self) -> SpanDescription:
        """Of the member that comes out."""
        head = self.head
        return SpanDescription(
            key=head["key"],
            namespace=head["namespace"],
            dtype=_DTYPES[head["dtype"]],
            shard=Shard(
                *(head[name] for name in ("layer_begin", "layer_end", "head_begin", "head_end"))
            ),
            head_dim=head["head_dim"],
            tokens=head["tokens"],
            position=head["position"],
            generation=head["generation"],
        )

    def _table(
        self, at: int, record: np.dtype[np.void], count: int
    ) -> tuple[npt.NDArray[np.void], int]:
        end = at + count * record.itemsize
        return self.file[at:end].view(record), end


class Recipe(_Tables):
    """Tables are views of the bytes, so that a kernel can read them as they are.

    Args:
        data: a whole recipe and nothing else. It is copied, unless it is ``bytes``: memory that
            somebody else can write must not change between its check and its use.

    Raises:
        RecipeFormatError: this is no recipe, or one that says what it must not.
        RecipeChecksumError: its bytes were changed.
    """

    def __init__(self, data: Bytes) -> None:
        file = bytes_of(data)
        if not isinstance(data, bytes) or address_of(file) % 8:
            file = file.copy()
        wrong = _host.recipe_check(file.data)
        if wrong is not None:
            raise_wrong(*wrong)
        super().__init__(file)
        self.stored = file[self.literals_at :]

    def require(self, wanted: SpanDescription) -> None:
        """RecipeMismatch names the first field in which the member is not the one wanted."""
        for name in self.description.differing(wanted):
            raise RecipeMismatch("is not what was asked for", field=name)

    def literals(self) -> npt.NDArray[np.uint8]:
        """The literal area as ops see it; decompressed if the recipe is cold.

        Raises:
            RecipeFormatError: a chunk is not what its record says.
        """
        if self.form is Form.ADDRESSABLE:
            return self.stored
        return thaw(self.chunks, self.stored, self.description.element_bytes)

    def plane_bytes(self) -> tuple[int, int]:
        """Stored bytes of literals of all K and of all V; of a cold recipe, as compressed."""
        sizes = self.runs["length"].astype(np.int64)
        if self.form is Form.COLD:
            ends = np.cumsum(self.chunks["raw"], dtype=np.int64)
            stored = self.chunks["stored"].sum(axis=1, dtype=np.int64)
            run = np.searchsorted(self.runs["offset"].astype(np.int64), ends - 1, side="right") - 1
            sizes = np.bincount(run, weights=stored, minlength=len(self.runs)).astype(np.int64)
        return int(sizes[0::2].sum()), int(sizes[1::2].sum())


class RecipeTables(_Tables):
    """Head and tables of a recipe in the addressable form, for whoever moves its literals from
    where they lie (``kmesh.kernels.rounds``). Its literals are not looked at.

    Args:
        data: a recipe, or its first bytes, at least those before the literals. These are copied:
            memory that somebody else can write must not change between its check and its use.

    Raises:
        RecipeFormatError: this is no recipe, or one that says what it must not.
        RecipeChecksumError: its bytes were changed.
        UnsupportedError: it is cold, or has differences: decode it on the host.
    """

    def __init__(self, data: Bytes) -> None:
        given = bytes_of(data)
        if given.size < records.HEAD.size:
            raise_wrong("file_bytes", 0)
        head = dict(zip(records.HEAD_FIELDS, records.HEAD.unpack_from(given.data), strict=True))
        file = given[: max(_tables_end(head), records.HEAD.size)].copy()
        wrong = _host.recipe_check(file.data, head["file_bytes"])
        if wrong is not None:
            raise_wrong(*wrong)
        super().__init__(file)
        if self.form is not Form.ADDRESSABLE:
            raise UnsupportedError("a recipe in the cold form is decoded on the host")
        if (self.ops["kind"] == Op.XOR).any():
            raise UnsupportedError("a recipe with differences (XOR) is decoded on the host")


def _tables_end(head: dict[str, Any]) -> int:
    """Where the literals begin, as a head says that was not checked."""
    layers = head["layer_end"] - head["layer_begin"]
    return records.aligned(
        records.HEAD.size
        + head["segments"] * records.SEGMENT.itemsize
        + head["turns"] * (records.TURN_HEAD + 8 * head["pairs"])
        + head["lists"] * records.LIST.itemsize
        + head["ops"] * records.OP.itemsize
        + 2 * layers * records.RUN.itemsize
        + head["chunks"] * records.CHUNK.itemsize,
        records.RUN_ALIGN,
    )


def raise_wrong(field: str, record: int) -> None:
    """The error for what ``_host`` found."""
    if field in _ROOTS:
        raise RecipeChecksumError("bytes were changed", field=field, record=record)
    raise RecipeFormatError("is not what a recipe may say", field=field, record=record)
