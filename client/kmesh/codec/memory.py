"""Bytes as numpy sees them, and their root."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from typing_extensions import Buffer

from kmesh import _host
from kmesh.layout import tiles

#: What holds bytes. For Python 3.11 an array is no ``Buffer`` to a type checker.
Bytes: TypeAlias = Buffer | npt.NDArray[Any]


def bytes_of(data: Bytes) -> npt.NDArray[np.uint8]:
    """A flat view; a copy only of an array that is not contiguous."""
    if isinstance(data, np.ndarray):
        return data.reshape(-1).view(np.uint8)
    return np.frombuffer(memoryview(data).cast("B"), dtype=np.uint8)


def address_of(data: npt.NDArray[Any]) -> int:
    """Of a contiguous array's first byte."""
    return int(data.ctypes.data)


def root_of(data: Bytes) -> int:
    """The root of the bytes' tile sums (``docs/layout.md``); 0 of nothing."""
    view = bytes_of(data)
    if not view.size:
        return 0
    sums = np.empty(tiles(view.size), dtype=np.uint64)
    return _host.tile_sums(address_of(view), view.size, address_of(sums))
