"""Files of the disk tier, which the store worker finds, writes, reads and removes."""

from __future__ import annotations

from kmesh_spand.core.diskfile import SpanFile
from kmesh_spand.messages import Message


class DiskScan(Message, frozen=True):
    """To the worker: look through the directory; answered by DiskFound, DiskScanned at the end."""


class DiskFound(Message, frozen=True):
    """From the worker: files whose headers hold, by name."""

    files: tuple[tuple[int, SpanFile], ...]


class DiskScanned(Message, frozen=True):
    """From the worker: that was all.

    ``removed`` files were none; ``direct``: they are read and written past the page cache;
    ``error``: why none can be written, or empty.
    """

    removed: int
    direct: bool
    error: str


class DiskWrite(Message, frozen=True):
    """To the worker: a payload to a file; answered by DiskWritten or DiskFailed."""

    job: int
    slab: int
    offset: int
    span: SpanFile


class DiskWritten(Message, frozen=True):
    job: int
    name: int
    seconds: float


class DiskRead(Message, frozen=True):
    """To the worker: a file into a range; answered by DiskTaken or DiskFailed."""

    job: int
    name: int
    slab: int
    offset: int
    span: SpanFile


class DiskTaken(Message, frozen=True):
    job: int
    seconds: float


class DiskRemove(Message, frozen=True):
    """To the worker: answered by DiskRemoved."""

    job: int
    name: int


class DiskRemoved(Message, frozen=True):
    job: int
    ok: bool


class DiskFailed(Message, frozen=True):
    """From the worker: ``trouble`` is a ``codes.Trouble``."""

    job: int
    trouble: int
    error: str


DiskMessage = (
    DiskScan
    | DiskFound
    | DiskScanned
    | DiskWrite
    | DiskWritten
    | DiskRead
    | DiskTaken
    | DiskRemove
    | DiskRemoved
    | DiskFailed
)
