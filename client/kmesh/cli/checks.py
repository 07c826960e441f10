"""What a check says, and the checks that need no daemon."""

from __future__ import annotations

import ctypes
import fcntl
import json
import mmap
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from kmesh import _host, dmabuf, numa
from kmesh.cli.render import size
from kmesh.handles import HandleKind
from kmesh.mapping import Mapping, importable

Level = Literal["ok", "warn", "fail", "skip"]

#: Soft limit of open files below which an engine with a session gets into trouble.
_FEW_FILES = 64
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_PATIENCE_SECONDS = 60
_UDMABUF_FIX = (
    "modprobe udmabuf, and let the daemon's user open /dev/udmabuf; needed only for DMA-BUFs, "
    "engines share memory without it"
)
_THP = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")


@dataclass(frozen=True, slots=True)
class Check:
    """One line of ``kmesh doctor``.

    Attributes:
        name: stable, in lower case.
        level: "skip" is a check that could not be made.
        seen: what was seen.
        fix: what mends it; empty if nothing needs to.
    """

    name: str
    level: Level
    seen: str
    fix: str = ""

    def as_json(self) -> dict[str, object]:
        return asdict(self)


def attempt(name: str, check: Callable[[], Check], fix: str = "") -> Check:
    """A check that fails, rather than ending the command, when the machine says no."""
    try:
        return check()
    except Exception as error:
        return Check(name, "fail", f"{type(error).__name__}: {error}", fix)


def native() -> Check:
    """The native module computes a known sum."""
    data = (5).to_bytes(4, "little") + (-3).to_bytes(4, "little", signed=True)
    sums = bytearray(8)
    _host.tile_sums(_host.address(data), len(data), _host.address(sums))
    got = int.from_bytes(sums, "little", signed=True)
    if got != 5 - 3 * 3:
        return Check("native", "fail", f"a known tile sum came out as {got}", "reinstall kmesh")
    return Check("native", "ok", "the native module sums a tile as it should")


def proc() -> Check:
    """``/proc/self/fd`` can be opened through: the read-only re-open needs it."""
    fd = os.open("/proc/self/fd", os.O_RDONLY | os.O_DIRECTORY)
    os.close(fd)
    return Check("proc", "ok", "/proc/self/fd is there")


def memfd() -> Check:
    """A memfd as the daemon makes them: sealed, readable by importers, never writable."""
    pattern = os.urandom(2 * resource.getpagesize())
    with importable(pattern) as importer:
        with Mapping(importer, len(pattern)) as mapping:
            if bytes(mapping.view()) != pattern:
                return Check("memfd", "fail", "a pattern came out of a memfd changed")
        if writable(importer, len(pattern)):
            return Check("memfd", "fail", "a read-only memfd was mapped writable")
        if problem := elsewhere(HandleKind.MEMFD, importer, pattern):
            return Check("memfd", "fail", problem)
    seen = "sealed, re-opened read-only, writable mapping refused; read by a second process"
    return Check("memfd", "ok", seen)


def writable(fd: int, length: int) -> bool:
    """Whether the kernel lets us map ``fd`` writable."""
    try:
        Mapping(fd, length, writable=True).close()
    except PermissionError:
        return False
    return True


def seals(fd: int) -> bool:
    """Whether a memfd can neither shrink, grow nor lose that promise."""
    return fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS == _SEALS


def memlock() -> Check:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limit = "unlimited" if soft == resource.RLIM_INFINITY else size(soft)
    return Check("memlock", "ok", f"limit {limit}; host restores lock no memory")


def open_files() -> Check:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < _FEW_FILES:
        fix = f"ulimit -n {min(1024, hard)}, or LimitNOFILE= in the unit"
        return Check("open files", "warn", f"soft limit {soft}", fix)
    return Check("open files", "ok", f"soft limit {soft}; a session needs 2")


def hugepages() -> Check:
    """What the kernel grants shared memory."""
    if not _THP.exists():
        return Check("hugepages", "warn", "the kernel has no transparent hugepages", "")
    text = _THP.read_text()
    state = text.partition("[")[2].partition("]")[0]
    if state in ("never", "deny"):
        return Check(
            "hugepages",
            "warn",
            f"shmem_enabled is {state}: slabs have small pages",
            f"echo advise > {_THP}",
        )
    return Check("hugepages", "ok", f"shmem_enabled is {state}")


def numa_nodes() -> Check:
    """A page is bound to each NUMA node, and the kernel is asked where it lies."""
    known = numa.nodes()
    if not known:
        return Check("numa", "skip", "the kernel names no NUMA nodes")
    for node in known:
        with mmap.mmap(-1, mmap.PAGESIZE) as page:
            held = ctypes.c_char.from_buffer(page)
            address = ctypes.addressof(held)
            try:
                numa.bind(address, mmap.PAGESIZE, node)
                held.value = b"x"
                lies = numa.node_of(address)
            except OSError as refused:
                return Check("numa", "warn", f"memory can't be placed: {refused.strerror}")
            finally:
                del held
        if lies != node:
            return Check("numa", "fail", f"a page for node {node} lies on node {lies}")
    if len(known) == 1:
        return Check("numa", "ok", f"one node ({known[0]})")
    text = f"nodes {', '.join(map(str, known))}: a page was placed on each"
    return Check("numa", "ok", text, "set numa_node to the node of the engines' GPUs")


def udmabuf() -> Check:
    """A DMA-BUF of a memfd's pages is read by a second process, which looks what it is."""
    pattern = os.urandom(3 * resource.getpagesize())
    owner = os.memfd_create("kmesh-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.truncate(owner, len(pattern))
        fcntl.fcntl(owner, fcntl.F_ADD_SEALS, _SEALS)
        os.pwrite(owner, pattern, 0)
        try:
            fd = dmabuf.create(owner, [(0, len(pattern))])
        except dmabuf.NotExported as missing:
            return Check("udmabuf", "skip", f"{missing}; no DMA-BUF can be made", _UDMABUF_FIX)
    finally:
        os.close(owner)
    # The memfd is closed: the DMA-BUF alone keeps the pages.
    try:
        if problem := elsewhere(HandleKind.DMA_BUF, fd, pattern):
            return Check("udmabuf", "fail", problem)
    finally:
        os.close(fd)
    limit = dmabuf.Limits.read().size
    return Check(
        "udmabuf",
        "ok",
        f"a second process read a pattern from a DMA-BUF of {dmabuf.UDMABUF}; at most "
        f"{size(limit)} each (size_limit_mb)",
    )


def elsewhere(kind: HandleKind, fd: int, expected: bytes) -> str:
    """Lets a second process map what ``fd`` is, by its kind. What went wrong, or nothing."""
    done = subprocess.run(
        [sys.executable, "-m", "kmesh.cli.importer", kind.name, str(fd), str(whole(expected))],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        pass_fds=(fd,),
        timeout=_PATIENCE_SECONDS,
        check=False,
    )
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines()[-1:] or ["no reason"]
        return f"a second process could not map it: {said[0]}"
    if bytes.fromhex(json.loads(done.stdout)["bytes"])[: len(expected)] != expected:
        return "a second process read other bytes"
    return ""


def whole(content: bytes) -> int:
    """Bytes of the pages that hold it."""
    return dmabuf.whole_pages(len(content))


def gpu() -> Check:
    there = os.path.exists("/dev/nvidiactl")
    if there:
        return Check("driver", "ok", "an NVIDIA driver is there; doctor --gpu 0 tries the GPU")
    return Check("driver", "ok", "no NVIDIA driver; host memory needs none")


def cgroup_limit(pid: int | str = "self") -> int | None:
    """The least memory limit over a process's cgroups (v1 or v2) in bytes; None if there is none.

    Raises:
        OSError: its cgroups can't be read.
    """
    limits = []
    for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            root, name = Path("/sys/fs/cgroup"), "memory.max"
        elif "memory" in controllers.split(","):
            root, name = Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"
        else:
            continue
        here = root / path.lstrip("/")
        for folder in (here, *here.parents):
            if root not in (folder, *folder.parents):
                break
            with_limit = folder / name
            text = with_limit.read_text().strip() if with_limit.exists() else "max"
            # Version 1 writes "no limit" as a number near 2**63.
            if text.isdigit() and int(text) < 1 << 60:
                limits.append(int(text))
    return min(limits, default=None)
