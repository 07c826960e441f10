"""DMA-BUFs of host memory: made with ``/dev/udmabuf``, recognised, and read by the CPU.

See ``docs/handles.md``. Whoever holds a DMA-BUF can write through it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kmesh import _host
from kmesh.errors import ProtocolError, UnsupportedError
from kmesh.handles import HandleRefusal
from kmesh.mapping import Mapped

DEVICE = "/dev/udmabuf"
#: Names of exporters, as the kernel says them: of host memory, and of GPU memory.
UDMABUF = "udmabuf"
NVIDIA = "nv_dmabuf"
_PARAMETERS = Path("/sys/module/udmabuf/parameters")
_CREATE = 1 << 30 | 24 << 16 | ord("u") << 8 | 0x42
_CREATE_LIST = 1 << 30 | 8 << 16 | ord("u") << 8 | 0x43
_CLOEXEC = 1
_SYNC = 1 << 30 | 8 << 16 | ord("b") << 8
_READ, _END = 1, 4
#: Of a memfd: no new mapping may be writable.
F_SEAL_FUTURE_WRITE = 0x10
_SCARCE = (errno.ENOMEM, errno.EMFILE, errno.ENFILE)


class NotExported(UnsupportedError):
    """There is no DMA-BUF to be had of this memory.

    Attributes:
        refusal: the reason, by its name on the wire.
    """

    def __init__(self, refusal: HandleRefusal, text: str) -> None:
        super().__init__(text)
        self.refusal = refusal


@dataclass(frozen=True, slots=True)
class Limits:
    """What the module says: bytes of one udmabuf, and ranges. 0 where it says nothing."""

    size: int
    ranges: int

    @classmethod
    def read(cls, parameters: Path = _PARAMETERS) -> Limits:
        return cls(_number(parameters / "size_limit_mb") << 20, _number(parameters / "list_limit"))

    def check(self, size: int, ranges: int = 1) -> None:
        """Raises NotExported, naming the limit: the kernel would only say EINVAL."""
        if self.size and size > self.size:
            raise NotExported(
                HandleRefusal.SIZE_LIMIT,
                f"{-(-size >> 20)} MiB are more than size_limit_mb = {self.size >> 20} of the "
                f"udmabuf module ({_PARAMETERS}/size_limit_mb)",
            )
        if self.ranges and ranges > self.ranges:
            raise NotExported(
                HandleRefusal.SIZE_LIMIT,
                f"{ranges} ranges are more than list_limit = {self.ranges} of the udmabuf module "
                f"({_PARAMETERS}/list_limit)",
            )


def _number(file: Path) -> int:
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return 0


def whole_pages(length: int) -> int:
    """Bytes of the pages that hold so many bytes."""
    return -(-length // mmap.PAGESIZE) * mmap.PAGESIZE


def create(memfd: int, ranges: Sequence[tuple[int, int]]) -> int:
    """A DMA-BUF of whole pages of a memfd, in this order; the caller owns it.

    The memfd must have the seal SHRINK and neither WRITE nor FUTURE_WRITE. Pages that are not
    there yet are made, and count in the caller's control group; all stay while it is open.

    Args:
        ranges: (offset, bytes) of each.

    Raises:
        NotExported: the machine does not do that; says why.
        ValueError: a range is not of whole pages, or not inside the memfd.
    """
    end = os.fstat(memfd).st_size
    for offset, size in ranges:
        if offset < 0 or size <= 0 or offset % mmap.PAGESIZE or size % mmap.PAGESIZE:
            raise ValueError(f"{size} bytes at {offset} are not whole pages")
        if offset + size > end:
            raise ValueError(f"{size} bytes at {offset} end outside of {end} bytes")
    Limits.read().check(sum(size for _, size in ranges), len(ranges))
    items = [struct.pack("=IIQQ", memfd, _CLOEXEC, *ranges[0])]
    request = _CREATE
    if len(ranges) != 1:
        request = _CREATE_LIST
        items = [struct.pack("=II", _CLOEXEC, len(ranges))]
        items += [struct.pack("=IIQQ", memfd, 0, *each) for each in ranges]
    try:
        device = os.open(DEVICE, os.O_RDWR | os.O_CLOEXEC)
    except OSError as failed:
        raise _no_device(failed) from None
    try:
        # A buffer that may be written: only then is the result the new descriptor.
        made: int = fcntl.ioctl(device, request, bytearray(b"".join(items)), True)
        return made
    except OSError as failed:
        raise _refused(failed, memfd) from None
    finally:
        os.close(device)


def probe() -> None:
    """Makes one of a page, and looks at it. Raises NotExported where that does not work."""
    memfd = os.memfd_create("kmesh-probe", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(memfd, mmap.PAGESIZE)
        fcntl.fcntl(memfd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        fd = create(memfd, [(0, mmap.PAGESIZE)])
    finally:
        os.close(memfd)
    try:
        check(fd, mmap.PAGESIZE)
    except ProtocolError as strange:
        raise NotExported(HandleRefusal.NO_DEVICE, f"{DEVICE}: {strange}") from None
    finally:
        os.close(fd)


def _no_device(failed: OSError) -> NotExported:
    if failed.errno in _SCARCE:
        return NotExported(HandleRefusal.NO_MEMORY, f"{DEVICE}: {failed.strerror}")
    if failed.errno in (errno.EACCES, errno.EPERM):
        return NotExported(
            HandleRefusal.NO_ACCESS, f"{DEVICE}: {failed.strerror} for uid {os.geteuid()}"
        )
    return NotExported(
        HandleRefusal.NO_DEVICE,
        f"{DEVICE}: {failed.strerror}: the kernel has no udmabuf, or its module is not loaded",
    )


def _refused(failed: OSError, memfd: int) -> NotExported:
    seals = fcntl.fcntl(memfd, fcntl.F_GET_SEALS)
    if seals & (fcntl.F_SEAL_WRITE | F_SEAL_FUTURE_WRITE):
        return NotExported(HandleRefusal.SEALED, "the memfd is sealed against writing")
    if failed.errno in _SCARCE:
        return NotExported(HandleRefusal.NO_MEMORY, f"{DEVICE}: {failed.strerror}")
    return NotExported(HandleRefusal.NO_DEVICE, f"{DEVICE}: {failed.strerror}")


@dataclass(frozen=True, slots=True)
class Info:
    """What the kernel says of a DMA-BUF: its exporter's name, and its size in bytes."""

    exporter: str
    size: int


def look(fd: int) -> Info:
    """What a file descriptor is.

    Raises:
        ProtocolError: it is no DMA-BUF.
    """
    fields = {}
    with open(f"/proc/self/fdinfo/{fd}") as lines:
        for line in lines:
            name, _, value = line.partition(":")
            fields[name] = value.strip()
    if "exp_name" not in fields:
        raise ProtocolError("a file descriptor that was called a DMA-BUF is none")
    return Info(fields["exp_name"], os.lseek(fd, 0, os.SEEK_END))


def check(fd: int, size: int, exporter: str = UDMABUF) -> None:
    """Raises ProtocolError unless ``fd`` is a DMA-BUF of that exporter, of exactly that size."""
    seen = look(fd)
    if seen.exporter != exporter:
        raise ProtocolError(f"a DMA-BUF of {seen.exporter!r}, where {exporter!r} was said")
    if seen.size != size:
        raise ProtocolError(f"the DMA-BUF holds {seen.size} bytes, {size} were promised")


class DmaBufMapping(Mapped):
    """A DMA-BUF of host memory, mapped read-only.

    What is read lies between ``reading()`` and its end, so that a device's writes are seen.

    Attributes:
        size: bytes mapped.

    Args:
        fd: stays the caller's; a duplicate is kept until ``close``.

    Raises:
        ProtocolError: it is no DMA-BUF of that size, made by udmabuf.
        OSError: the kernel refused.
    """

    __slots__ = ("_fd",)

    def __init__(self, fd: int, size: int) -> None:
        self._fd = -1
        check(fd, size)
        self.size = size
        self._region = _host.Region(fd, size, False)
        try:
            self._fd = os.dup(fd)
        except BaseException:
            self._region.close()
            raise

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """What is read inside is what devices have written before."""
        _sync(self._fd, _READ)
        try:
            yield
        finally:
            _sync(self._fd, _READ | _END)

    def close(self) -> None:
        super().close()
        self._let_go()

    def __del__(self) -> None:
        self._let_go()

    def _let_go(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def _sync(fd: int, flags: int) -> None:
    while True:
        try:
            fcntl.ioctl(fd, _SYNC, struct.pack("=Q", flags))
            return
        except OSError as failed:
            if failed.errno not in (errno.EINTR, errno.EAGAIN):
                raise
