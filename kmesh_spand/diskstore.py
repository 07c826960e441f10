"""Spans in files: written, read back, removed, found again. Runs in the store worker.

Every path is relative to the directory's file descriptor, and no link is followed.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import re
import stat
import threading
from collections.abc import Iterator
from typing import NamedTuple

from kmesh import _host, layout
from kmesh_spand.core.codes import Trouble
from kmesh_spand.core.diskfile import (
    BLOCK_BYTES,
    BadFile,
    Header,
    SpanFile,
    announced_bytes,
    decode,
    file_bytes,
    header_bytes,
)
from kmesh_spand.diskdir import FOLDERS
from kmesh_spand.hoststore import HostStore

#: Payloads are moved in pieces of this: whole tiles, and what a thread has in its hands.
PIECE_BYTES = 4 << 20
_SUFFIX = ".new"
_NAME = re.compile("[0-9a-f]{16}")
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
_WRITE = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
#: Errors that say that there is no room.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class DiskTrouble(Exception):
    """What went wrong with a file, of whatever kind it is."""

    def __init__(self, kind: Trouble, text: str) -> None:
        super().__init__(text)
        self.kind = kind


class Found(NamedTuple):
    """A file whose header holds."""

    name: int
    span: SpanFile


def path_of(name: int) -> str:
    """Where in the directory a file is: 16 digits, in the folder of the first two."""
    text = f"{name:016x}"
    return f"{text[:2]}/{text}"


@contextlib.contextmanager
def _troubles(what: str) -> Iterator[None]:
    try:
        yield
    except BadFile as bad:
        raise DiskTrouble(Trouble.BAD, f"{what}: {bad}") from None
    except FileNotFoundError:
        raise DiskTrouble(Trouble.BAD, f"{what}: it is gone") from None
    except OSError as failed:
        kind = Trouble.FULL if failed.errno in _FULL else Trouble.IO
        raise DiskTrouble(kind, f"{what}: {failed.strerror or failed}") from None


class DiskStore:
    """Files of one directory, and the slabs that they come from and go to.

    Does several jobs at a time. A payload is read from a slab, and from a file, exactly once:
    what is written, and what is put into a slab, is what was summed.

    Args:
        root: fd of the directory, which stays the caller's.
        directory: 16 bytes that tell it from others; files say them.
        capacity: bytes that its files may take.
        sync: "off", "file" or "all": what must be on the medium before a file counts as written.

    Attributes:
        direct: the file system takes I/O past the page cache.
    """

    def __init__(
        self, root: int, directory: bytes, slabs: HostStore, capacity: int, sync: str
    ) -> None:
        self._root = root
        self._directory = directory
        self._slabs = slabs
        self._capacity = capacity
        self._sync = sync
        self._mine = threading.local()
        self.direct = False

    # The directory

    def prepare(self) -> None:
        """Makes the folders, and finds out what the file system can do.

        Raises:
            DiskTrouble: it can't be written.
        """
        with _troubles("the directory"):
            for folder in FOLDERS:
                try:
                    os.mkdir(folder, 0o700, dir_fd=self._root)
                except FileExistsError:
                    about = os.stat(folder, dir_fd=self._root, follow_symlinks=False)
                    if not stat.S_ISDIR(about.st_mode):
                        raise NotADirectoryError(0, f"{folder} in it is no folder") from None
            self.direct = self._takes_direct()

    def _takes_direct(self) -> bool:
        probe = f"probe{_SUFFIX}"
        with contextlib.suppress(FileNotFoundError):
            os.unlink(probe, dir_fd=self._root)
        try:
            fd = os.open(probe, _WRITE | os.O_DIRECT, 0o600, dir_fd=self._root)
        except OSError as refused:
            if refused.errno in (errno.EINVAL, errno.EOPNOTSUPP):
                return False
            raise
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(probe, dir_fd=self._root)
        try:
            return os.pwritev(fd, [self._buffer(BLOCK_BYTES)], 0) == BLOCK_BYTES
        except OSError as refused:
            if refused.errno in (errno.EINVAL, errno.EOPNOTSUPP):
                return False
            raise
        finally:
            os.close(fd)

    def scan(self) -> Iterator[Found | str]:
        """Every file whose header holds, the least recently used first; else why it was removed.

        Payloads are not read. What an earlier life began to write is removed, and not told. Where
        all files take more than they may, the least recently used are removed.
        """
        entries = sorted(self._entries())
        over = sum(size for _, _, size in entries) - self._capacity
        for _, name, size in entries:
            if size > self._capacity:
                # Nothing of ours, and so no reason to remove what is.
                over -= size
                with contextlib.suppress(DiskTrouble):
                    self.remove(name)
                yield f"{path_of(name)}: larger than the disk tier"
        entries = [entry for entry in entries if entry[2] <= self._capacity]
        for _, name, size in entries:
            if over > 0:
                over -= size
                with contextlib.suppress(DiskTrouble):
                    self.remove(name)
                yield f"{path_of(name)}: the disk tier is smaller than it was"
                continue
            try:
                with _troubles(path_of(name)):
                    yield Found(name, self._header(name).span)
            except DiskTrouble as trouble:
                if trouble.kind is Trouble.BAD:
                    with contextlib.suppress(DiskTrouble):
                        self.remove(name)
                    yield str(trouble)

    def _entries(self) -> Iterator[tuple[int, int, int]]:
        """When each was last used, its name and its bytes."""
        for folder in FOLDERS:
            try:
                fd = os.open(folder, _READ | os.O_DIRECTORY, dir_fd=self._root)
            except OSError:
                continue
            try:
                with os.scandir(fd) as entries:
                    for entry in entries:
                        if entry.name.endswith(_SUFFIX):
                            with contextlib.suppress(OSError):
                                os.unlink(entry.name, dir_fd=fd)
                        elif _NAME.fullmatch(entry.name) and entry.name.startswith(folder):
                            with contextlib.suppress(OSError):
                                about = entry.stat(follow_symlinks=False)
                                yield about.st_mtime_ns, int(entry.name, 16), about.st_size
            finally:
                os.close(fd)

    def _header(self, name: int) -> Header:
        fd = self._open(name, direct=False)
        try:
            first = os.pread(fd, BLOCK_BYTES, 0)
            size = announced_bytes(first)
            rest = os.pread(fd, size - len(first), len(first)) if size > len(first) else b""
            header = decode(first + rest)
            self._check(header, name, os.fstat(fd).st_size)
            return header
        finally:
            os.close(fd)

    def _open(self, name: int, *, direct: bool = True) -> int:
        path = path_of(name)
        if not stat.S_ISREG(os.stat(path, dir_fd=self._root, follow_symlinks=False).st_mode):
            raise BadFile("no file")
        flags = _READ | os.O_NONBLOCK | (os.O_DIRECT if self.direct and direct else 0)
        return os.open(path, flags, dir_fd=self._root)

    def _check(self, header: Header, name: int, size: int) -> None:
        if header.name != name or header.directory != self._directory:
            raise BadFile("it was written under another name")
        if size != header.file_bytes:
            raise BadFile(f"{size} bytes, {header.file_bytes} were written")
        sums = header.sums
        if _host.fold(_host.address(sums), len(sums) // 8) != header.span.root:
            raise BadFile("its sums do not fold to its root")

    # Jobs

    def write(self, slab: int, offset: int, span: SpanFile) -> int:
        """A payload, which must have the span's root, to a new file; returns its name.

        Raises:
            DiskTrouble: there is no such file then.
        """
        name = int.from_bytes(os.urandom(8), "little")
        path = path_of(name)
        with _troubles("a file"):
            fd = self._create(path + _SUFFIX)
            try:
                try:
                    self._fill(fd, name, slab, offset, span)
                    if self._sync != "off":
                        os.fdatasync(fd)
                    elif not self.direct:
                        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                finally:
                    os.close(fd)
                # The name is new: nothing is replaced.
                os.rename(path + _SUFFIX, path, src_dir_fd=self._root, dst_dir_fd=self._root)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(path + _SUFFIX, dir_fd=self._root)
                raise
            if self._sync == "all":
                self._sync_folder(path[:2])
        return name

    def _create(self, path: str) -> int:
        flags = _WRITE | (os.O_DIRECT if self.direct else 0)
        try:
            return os.open(path, flags, 0o600, dir_fd=self._root)
        except FileNotFoundError:
            with contextlib.suppress(FileExistsError):
                os.mkdir(path[:2], 0o700, dir_fd=self._root)
            return os.open(path, flags, 0o600, dir_fd=self._root)

    def _sync_folder(self, folder: str) -> None:
        fd = os.open(folder, _READ | os.O_DIRECTORY, dir_fd=self._root)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def _fill(self, fd: int, name: int, slab: int, offset: int, span: SpanFile) -> None:
        begin = header_bytes(span.length, len(span.names))
        sums = bytearray(8 * layout.tiles(span.length))
        base = _host.address(sums)
        # Room for all of it, or none is taken.
        os.posix_fallocate(fd, 0, file_bytes(span.length, len(span.names)))
        try:
            # Keeps it mapped, should the slab be given back.
            payload = self._slabs.view(slab, offset, span.length)
        except ValueError as gone:
            raise DiskTrouble(Trouble.LOST, str(gone)) from None
        address = _host.address(payload)
        for at in range(0, span.length, PIECE_BYTES):
            size = min(PIECE_BYTES, span.length - at)
            whole = -(-size // BLOCK_BYTES) * BLOCK_BYTES
            piece = self._buffer(whole)
            piece[size:] = bytes(whole - size)
            place = base + at // layout.TILE_BYTES * 8
            _host.copy_with_sums(_host.address(piece), address + at, size, place)
            _write_all(fd, piece, begin + at)
        if _host.fold(base, len(sums) // 8) != span.root:
            raise DiskTrouble(Trouble.LOST, "the range is another span's by now, or damaged")
        # Last, so that a file without a payload has no header either.
        head = self._buffer(begin)
        head[:] = Header(span, name, self._directory, bytes(sums)).encode()
        _write_all(fd, head, 0)

    def read(self, name: int, slab: int, offset: int, span: SpanFile) -> None:
        """A file's payload into a range, with its sums, if it holds that span.

        Raises:
            DiskTrouble: nothing can be said of what the range holds then.
        """
        path = path_of(name)
        with _troubles(path):
            fd = self._open(name)
            try:
                self._take(fd, name, slab, offset, span)
                # What is used goes last, also after a restart.
                with contextlib.suppress(OSError):
                    os.utime(fd)
                if not self.direct:
                    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)

    def _take(self, fd: int, name: int, slab: int, offset: int, span: SpanFile) -> None:
        head = self._buffer(BLOCK_BYTES)
        _read_all(fd, head, 0)
        begin = announced_bytes(head)
        if begin > len(head):
            head = self._buffer(begin)
            _read_all(fd, head, 0)
        header = decode(bytes(head))
        self._check(header, name, os.fstat(fd).st_size)
        if not header.span.serves(span):
            raise BadFile("it holds another span")
        payload, sums = self._slabs.writable(slab, offset, span.length)
        for at in range(0, span.length, PIECE_BYTES):
            length = min(PIECE_BYTES, span.length - at)
            whole = -(-length // BLOCK_BYTES) * BLOCK_BYTES
            piece = self._buffer(whole)
            _read_all(fd, piece, begin + at)
            if any(piece[length:]):
                raise BadFile("there is something behind the payload")
            first = at // layout.TILE_BYTES
            tiles = layout.tiles(length)
            wanted = header.sums[first * 8 : (first + tiles) * 8]
            root = _host.copy_with_sums(
                payload + at, _host.address(piece), length, sums + first * 8
            )
            if root != _host.fold(_host.address(wanted), tiles):
                raise BadFile("the payload's sums differ")

    def remove(self, name: int) -> None:
        """No such file, from here on.

        Raises:
            DiskTrouble: it is still there.
        """
        with _troubles(path_of(name)), contextlib.suppress(FileNotFoundError):
            os.unlink(path_of(name), dir_fd=self._root)

    def _buffer(self, size: int) -> memoryview:
        """The thread's own memory, aligned as direct I/O wants it; what was in it is gone."""
        held: mmap.mmap | None = getattr(self._mine, "buffer", None)
        if held is None or len(held) < size:
            held = self._mine.buffer = mmap.mmap(-1, max(size, PIECE_BYTES))
        return memoryview(held)[:size]


def _write_all(fd: int, data: memoryview, offset: int) -> None:
    written = os.pwritev(fd, [data], offset)
    if written != len(data):
        raise OSError(errno.ENOSPC, f"{written} of {len(data)} bytes were written")


def _read_all(fd: int, data: memoryview, offset: int) -> None:
    count = os.preadv(fd, [data], offset)
    if count != len(data):
        raise BadFile(f"{count} of {len(data)} bytes are there")
