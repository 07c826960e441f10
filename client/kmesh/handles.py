"""Typed, exportable references to slabs."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class HandleKind(enum.IntEnum):
    """What a file descriptor is; numbers as ``kmesh.v1.HandleKind``."""

    MEMFD = 1
    CUDA_VMM_FD = 2
    DMA_BUF = 3


@dataclass(frozen=True, slots=True)
class Handle:
    """A slab as it is exported. The holder of a Handle owns ``fd`` and closes it.

    Attributes:
        kind: what ``fd`` is.
        fd: an open file descriptor.
        size: bytes behind it.
        device: UUID of the GPU that the memory is on; empty for host memory.
    """

    kind: HandleKind
    fd: int
    size: int
    device: str = ""


@dataclass(frozen=True, slots=True)
class Location:
    """A span inside a slab: ``length`` bytes at ``offset``, as of ``generation``."""

    slab: int
    offset: int
    length: int
    generation: int
