"""Shared memory of another process, mapped."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from types import TracebackType
from typing import Self

from kmesh import _host
from kmesh.errors import ProtocolError


class Mapped:
    """Shared memory that is mapped; subclasses say of what.

    Attributes:
        size: bytes mapped.
    """

    __slots__ = ("_region", "size")

    _region: _host.Region
    size: int

    @property
    def address(self) -> int:
        """Address of byte 0; ValueError once closed."""
        return self._region.address

    @property
    def closed(self) -> bool:
        return self._region.closed

    def view(self, offset: int = 0, length: int | None = None) -> memoryview:
        """``length`` bytes at ``offset`` (to the end if None).

        A view keeps its memory mapped, also when the mapping is closed.

        Raises:
            ValueError: the range is not inside the mapping, or the mapping is closed.
        """
        if length is None:
            length = self.size - offset
        if offset < 0 or length < 0 or offset + length > self.size:
            raise ValueError(f"bytes {offset}:{offset + length} are not in {self.size}")
        return memoryview(self._region)[offset : offset + length]

    def close(self) -> None:
        """Addresses are invalid from here on. May be called again."""
        self._region.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class Mapping(Mapped):
    """The first ``size`` bytes of a memfd, mapped shared.

    Attributes:
        size: bytes mapped.
        writable: whether it may be written through.

    Args:
        fd: stays the caller's, and may be closed at once: the mapping keeps the memory.

    Raises:
        ProtocolError: fd is no memfd, holds less, or could shrink under the mapping, where
            touching it would be a SIGBUS.
        OSError: the kernel refused, for instance a writable mapping of a read-only fd.
    """

    __slots__ = ("writable",)

    def __init__(self, fd: int, size: int, *, writable: bool = False) -> None:
        try:
            seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        except OSError as error:
            raise ProtocolError("the file descriptor is no memfd") from error
        if not seals & fcntl.F_SEAL_SHRINK:
            raise ProtocolError("the memfd is not sealed against shrinking")
        held = os.fstat(fd).st_size
        if not 0 < size <= held:
            raise ProtocolError(f"the memfd holds {held} bytes, {size} were promised")
        self.size = size
        self.writable = writable
        self._region = _host.Region(fd, size, writable)


@contextlib.contextmanager
def importable(content: bytes) -> Iterator[int]:
    """A memfd with these bytes, sealed as the daemon's are: the fd that an importer gets of it."""
    owner = os.memfd_create("kmesh-proof", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.fchmod(owner, 0o400)
        os.truncate(owner, len(content))
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(owner, fcntl.F_ADD_SEALS, seals)
        os.pwrite(owner, content, 0)
        importer = os.open(f"/proc/self/fd/{owner}", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(owner)
    try:
        yield importer
    finally:
        os.close(importer)
