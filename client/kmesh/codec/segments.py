"""What a family's recipes refer to: segments, dense, in the frame in which they were computed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from functools import cached_property

import numpy as np
import numpy.typing as npt

from kmesh.codec.description import SpanDescription
from kmesh.codec.memory import Bytes, address_of, bytes_of, root_of
from kmesh.errors import RecipeError, RecipeMismatch

#: What all spans of a family have in common.
SHARED_FIELDS = ("namespace", "dtype", "shard", "head_dim")


class Segment:
    """A dense payload and what it is. The payload must not change while this is used: ``rows`` is
    a view that can't be written, but whoever else can write the memory still can.

    Args:
        description: of the payload; ``position`` is where it was computed.
        payload: as ``docs/layout.md`` orders it, aligned to its elements.

    Raises:
        RecipeError: the payload is not as long as its description says, or not aligned.
    """

    def __init__(self, description: SpanDescription, payload: Bytes) -> None:
        self.description = description
        self.rows = rows_of(description, payload).view()
        self.rows.flags.writeable = False

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 of the payload."""
        return hashlib.sha256(self.rows.data).digest()

    @cached_property
    def root(self) -> int:
        """Of the payload's tile sums."""
        return root_of(self.rows)

    @property
    def address(self) -> int:
        return address_of(self.rows)


class Base:
    """The segments of one family. Recipes name them by their keys, so each key is there once.

    Raises:
        RecipeMismatch: segments differ in what a family shares, or two have the same key.
    """

    def __init__(self, segments: Iterable[Segment] = ()) -> None:
        self.segments = tuple(segments)
        self._numbers: dict[bytes, int] = {}
        for number, segment in enumerate(self.segments):
            check_shared(segment.description, self.segments[0].description, "segments", number)
            if segment.description.key in self._numbers:
                raise RecipeMismatch("is there twice", field="segments.key", record=number)
            self._numbers[segment.description.key] = number

    def __len__(self) -> int:
        return len(self.segments)

    def __iter__(self) -> Iterator[Segment]:
        return iter(self.segments)

    def find(self, key: bytes) -> Segment | None:
        """The segment of that key."""
        number = self._numbers.get(key)
        return None if number is None else self.segments[number]

    def number(self, key: bytes) -> int | None:
        """Of the segment of that key."""
        return self._numbers.get(key)


def check_shared(
    one: SpanDescription, other: SpanDescription, table: str = "", record: int = 0
) -> None:
    """RecipeMismatch names the first field in which two spans can't be of one family."""
    for name in one.differing(other, *SHARED_FIELDS):
        raise RecipeMismatch(
            f"{_said(one, name)} is not {_said(other, name)}, which the family has",
            field=f"{table}.{name}" if table else name,
            record=record,
        )


def rows_of(description: SpanDescription, payload: Bytes) -> npt.NDArray[np.uint8]:
    """A payload as rows [run, head, token, row_bytes]; RecipeError if it is not one."""
    data = bytes_of(payload)
    if data.size != description.payload_bytes:
        raise RecipeError(
            f"{data.size} bytes are not the {description.payload_bytes} of"
            f" {description.tokens} tokens",
            field="payload",
        )
    if address_of(data) % description.element_bytes:
        raise RecipeError("not aligned to its elements", field="payload")
    return data.reshape(description.shape)


def _said(description: SpanDescription, name: str) -> str:
    value = getattr(description, name)
    return value.hex() if isinstance(value, bytes) else str(value)
