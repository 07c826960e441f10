"""Making, sealing, re-opening and filling memfds, and how much of that the machine allows."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import stat
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from kmesh import numa
from kmesh.dmabuf import F_SEAL_FUTURE_WRITE
from kmesh.errors import ConfigError
from kmesh_spand.budget import Gate
from kmesh_spand.throttle import be_nice

SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_MADV_POPULATE_WRITE = 23
_CHUNK_BYTES = 32 << 20
#: Of which pages are mapped at a time: nothing else is mapped in the process meanwhile.
_MAP_BYTES = 1 << 20
_THP = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")

_PMD_MAPPED = ("ShmemPmdMapped:", "FilePmdMapped:")

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def make_memfd(name: str, size: int, *, mode: int = 0o400, final: bool = True) -> int:
    """A memfd of ``size`` zero bytes that can neither shrink nor grow; the caller owns it.

    Its mode lets other opens of it only read, unless ``mode`` says otherwise.

    Args:
        final: no further seal may be set.

    Raises:
        OSError: no file descriptor or no memory for it.
    """
    fd = os.memfd_create(f"kmesh-{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size)
        os.fchmod(fd, mode)
        seals = SIZE_SEALS | fcntl.F_SEAL_SEAL if final else SIZE_SEALS
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    except BaseException:
        os.close(fd)
        raise
    return fd


def memfd_flaw(fd: int, size: int, seals: int) -> str:
    """Why this is not a memfd as the daemon makes them, or nothing.

    Args:
        size: bytes that it must have. seals: exactly those it must have.
    """
    state = os.fstat(fd)
    if not stat.S_ISREG(state.st_mode):
        return "is no memory"
    if state.st_size != size:
        return f"has {state.st_size} bytes instead of {size}"
    try:
        found = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        return "is a file, and can't be sealed"
    if found != seals:
        return f"has the seals {found:#x} instead of {seals:#x}"
    if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDWR:
        return "can't be written"
    return ""


def resident(fd: int) -> int:
    """Bytes that a memfd takes now."""
    return os.fstat(fd).st_blocks * 512


def seal_for_good(fd: int) -> None:
    """Nobody can write the memory any more, but through mappings that are writable already.

    Raises:
        OSError: the kernel is older than the seal (5.1).
    """
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL)


def reopen_read_only(fd: int) -> int:
    """The memory behind ``fd``, opened so that a writable mapping of it is refused."""
    return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)


def hugepages_allowed() -> bool:
    """Whether the kernel gives huge pages to shared memory that asks for them."""
    try:
        chosen = _THP.read_text().partition("[")[2].partition("]")[0]
    except OSError:
        return False
    return chosen in ("always", "advise", "within_size", "force")


def advise_hugepages(address: int, length: int) -> bool:
    """Asks for huge pages in a mapping; False if the kernel doesn't know them."""
    return bool(_libc.madvise(address, length, mmap.MADV_HUGEPAGE) == 0)


def hugepages_granted(address: int) -> bool:
    """Whether any huge page is mapped in the mapping that starts at ``address``."""
    inside = False
    start = f"{address:x}-"
    with open("/proc/self/smaps") as maps:
        for line in maps:
            head = line.partition(" ")[0]
            if not head.endswith(":"):
                if inside:
                    return False
                inside = head.lstrip("0").startswith(start)
            elif inside and head in _PMD_MAPPED and int(line.split()[1]) > 0:
                return True
    return False


def place_pages(address: int, size: int, *, huge: bool, node: int) -> bool:
    """Says how large the pages of a mapping are to be, and on which NUMA node (-1: any).

    Returns:
        Whether huge ones were asked for.

    Raises:
        OSError: the kernel does not know the node.
    """
    if node >= 0:
        numa.bind(address, size, node)
    return huge and hugepages_allowed() and advise_hugepages(address, size)


def populate_range(fd: int, address: int, offset: int, length: int, *, huge: bool) -> bool:
    """Puts pages behind a range of a memfd that is mapped at ``address``.

    Returns:
        Whether that was done as asked: False if the kernel can't fill a mapping.

    Raises:
        OSError: there is no memory for it. It would be a SIGBUS later.
    """
    if huge:
        while _libc.madvise(address + offset, length, _MADV_POPULATE_WRITE):
            code = ctypes.get_errno()
            if code == errno.EINVAL:
                break
            if code not in (errno.EAGAIN, errno.EINTR):
                raise OSError(code, os.strerror(code))
        else:
            return True
    os.posix_fallocate(fd, offset, length)
    return not huge


def map_pages(address: int, size: int, wanted: Callable[[], bool]) -> None:
    """Has the kernel map all pages of a mapping, which must be there. A copy into one that was
    never mapped takes several times as long as into one that was.

    Args:
        wanted: asked before each part of it; False: the rest is not.
    """
    be_nice()
    for begin in range(address, address + size, _MAP_BYTES):
        if not wanted():
            return
        length = min(_MAP_BYTES, address + size - begin)
        while _libc.madvise(begin, length, _MADV_POPULATE_WRITE):
            if ctypes.get_errno() not in (errno.EAGAIN, errno.EINTR):
                # Where the kernel can't, whoever comes first maps them.
                return


class Populator:
    """Fills ranges of one memfd from several threads, in chunks.

    Args:
        gate: asked before a chunk, told after it.
        done: told how many bytes from the first range's start, counted through the ranges in
            order, are filled without a gap; from any of the threads, growing.

    Attributes:
        fell_back: some range was filled through the file instead of its mapping.
    """

    def __init__(
        self,
        fd: int,
        address: int,
        ranges: Iterable[tuple[int, int]],
        *,
        huge: bool,
        done: Callable[[int], None],
        gate: Gate | None = None,
    ) -> None:
        self._fd = fd
        self._gate = gate
        self._address = address
        self._huge = huge
        self._done = done
        self._chunks = [
            (begin, min(_CHUNK_BYTES, offset + length - begin))
            for offset, length in ranges
            for begin in range(offset, offset + length, _CHUNK_BYTES)
        ]
        self.fell_back = False
        self._next = 0
        self._finished = [False] * len(self._chunks)
        self._leading = 0
        self._filled = 0
        self._lock = threading.Lock()
        self._failed: OSError | None = None

    def run(self, threads: int) -> None:
        """Returns when all is filled.

        Raises:
            OSError: as ``populate_range``; what was reported before stays filled.
        """
        crew = [
            threading.Thread(target=self._work, name=f"populate-{n}")
            for n in range(min(threads, len(self._chunks)))
        ]
        started: list[threading.Thread] = []
        for one in crew:
            try:
                one.start()
            except RuntimeError as lacking:
                if not started:
                    raise OSError(errno.EAGAIN, str(lacking)) from None
                # Those that are there do all of it.
                break
            started.append(one)
        for one in started:
            one.join()
        if self._failed is not None:
            raise self._failed

    def _work(self) -> None:
        be_nice()
        while True:
            with self._lock:
                if self._failed is not None or self._next == len(self._chunks):
                    return
                number = self._next
                self._next += 1
            offset, length = self._chunks[number]
            if self._gate is not None:
                self._gate.enter(length)
            try:
                as_asked = populate_range(self._fd, self._address, offset, length, huge=self._huge)
            except OSError as failed:
                with self._lock:
                    self._failed = failed
                return
            finally:
                if self._gate is not None:
                    self._gate.leave(length)
            with self._lock:
                self._finished[number] = True
                self.fell_back |= not as_asked
                before = self._filled
                while self._leading < len(self._chunks) and self._finished[self._leading]:
                    self._filled += self._chunks[self._leading][1]
                    self._leading += 1
                if self._filled > before:
                    self._done(self._filled)


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """``size`` bytes, as ``source`` (a file) says."""

    size: int
    source: str


def memory_limits(root: Path = Path("/"), held: int = 0) -> list[MemoryLimit]:
    """The limits that hold for this process: control groups (v2 and v1) and free memory.

    Args:
        root: where /proc and /sys are looked for.
        held: bytes that this process has already, and that are not free because of that.
    """
    found = []
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            found += _group_limits(root / "sys/fs/cgroup", path, "memory.max")
        elif "memory" in controllers.split(","):
            found += _group_limits(root / "sys/fs/cgroup/memory", path, "memory.limit_in_bytes")
    for line in _lines(root / "proc/meminfo"):
        if line.startswith("MemAvailable:"):
            free = (int(line.split()[1]) << 10) + held
            found.append(MemoryLimit(free, "/proc/meminfo, MemAvailable"))
    return found


def _group_limits(mount: Path, path: str, file: str) -> list[MemoryLimit]:
    """A group's limit and its parents'. In a container the path may only exist outside."""
    found = []
    group = mount / path.lstrip("/")
    while True:
        for text in _lines(group / file):
            # v1 writes "no limit" as the largest whole number of pages.
            if text.isdigit() and int(text) < 1 << 60:
                found.append(MemoryLimit(int(text), str(group / file)))
        if group == mount:
            return found
        group = group.parent


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except OSError:
        return []


def check_memory(
    host: int, staging: int, tables: int, gpus: int, limits: Iterable[MemoryLimit]
) -> None:
    """Refuses to promise memory that the machine doesn't give.

    Args:
        tables: bytes of catalog and indexes.
        gpus: bytes that device workers are still to make of the host's memory, all together.

    Raises:
        ConfigError: names the setting, the limit and the file that sets it.
    """
    for limit in limits:
        if host > limit.size:
            name, size = "host_memory", host
        elif host + staging > limit.size:
            name, size = "staging_memory", host + staging
        elif host + staging + tables > limit.size:
            name, size = "max_spans", host + staging + tables
        elif host + staging + tables + gpus > limit.size:
            name, size = "gpu_memory", host + staging + tables + gpus
        else:
            continue
        what = {
            "host_memory": "",
            "staging_memory": "with host_memory ",
            "max_spans": "catalog and indexes with host_memory and staging_memory ",
            "gpu_memory": "that of all GPUs in the host's memory, with all else, ",
        }[name]
        raise ConfigError(
            f"{name}: {what}{size >> 20} MiB is more than the {limit.size >> 20} MiB "
            f"that {limit.source} allows"
        )
