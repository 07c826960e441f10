"""Memory of an earlier daemon, as it comes: file descriptors with names. All is checked here.

Names are ``kmesh-store-`` and what it is: ``manifest``, ``life``, ``catalog``, ``slab-N``,
``index-EPOCH-GROUP``, ``gpu-N-UUID``. Others are not the daemon's memory.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from kmesh import index
from kmesh.dmabuf import F_SEAL_FUTURE_WRITE
from kmesh_spand import manifest as manifests
from kmesh_spand.life import Life
from kmesh_spand.manifest import Manifest, Unfit
from kmesh_spand.memory import SIZE_SEALS, memfd_flaw, resident
from kmesh_spand.settings import Settings
from kmesh_spand.storage import Memory, catalog_bytes

PREFIX = "kmesh-store-"
MANIFEST, LIFE, CATALOG = (PREFIX + what for what in ("manifest", "life", "catalog"))

#: Why hardened memory is not kept although ``dma_buf`` is "slabs".
SEALED = "dma_buf: slabs of an earlier daemon are sealed, and no DMA-BUF can be made of them"

_SEALS = SIZE_SEALS | fcntl.F_SEAL_SEAL


class Named(NamedTuple):
    """A file descriptor and what it is."""

    name: str
    fd: int


def slab_name(slab: int) -> str:
    return f"{PREFIX}slab-{slab}"


def index_name(epoch: int, group: int) -> str:
    return f"{PREFIX}index-{epoch:016x}-{group}"


def gpu_name(slab: int, device: str) -> str:
    return f"{PREFIX}gpu-{slab}-{device}"


def _split(name: str) -> tuple[str, str]:
    kind, _, which = name.removeprefix(PREFIX).partition("-")
    return kind, which


@dataclass(slots=True)
class Inherited:
    """What was checked. The file descriptors are owned until they are taken out.

    Attributes:
        manifest, life: file descriptors; -1 when they were taken out.
        catalog, slabs: of host memory; None, and none, when they were taken out. Slabs are by
            number.
        indexes: file descriptors of indexes of earlier epochs, by name; they are poisoned.
        gpu: memory and the UUID of its GPU, by number of the slab; there may be less of it
            than the settings plan.
        version: of the program that made it.
    """

    manifest: int
    life: int
    catalog: Memory | None
    slabs: dict[int, Memory]
    indexes: dict[str, int]
    gpu: dict[int, tuple[Memory, str]]
    version: str

    @property
    def resident(self) -> int:
        """Bytes of host memory that it takes now."""
        return sum(resident(memory.fd) for memory in self._host())

    def _host(self) -> list[Memory]:
        return [*self.slabs.values(), *([self.catalog] if self.catalog is not None else [])]

    def poison(self) -> None:
        """Tells every reader of an earlier index that it is over."""
        for fd in self.indexes.values():
            index.poison(fd)

    def close_indexes(self) -> None:
        """Gives up the indexes of earlier epochs."""
        for fd in self.indexes.values():
            os.close(fd)
        self.indexes.clear()

    def close(self) -> None:
        """Gives up what was not taken out."""
        self.close_indexes()
        for memory in (*self._host(), *(memory for memory, _ in self.gpu.values())):
            os.close(memory.fd)
        for fd in (self.manifest, self.life):
            if fd >= 0:
                os.close(fd)


def inherit(
    named: Iterable[Named], settings: Settings, version: str, *, runs: bool = False
) -> Inherited:
    """Checks what an earlier daemon left.

    Args:
        named: owned by this function, and by what it returns.
        runs: that daemon goes on with it, if it can't be used here.

    Raises:
        Unfit: it can't be used, and why; nothing is held then. Readers of its indexes, as far as
            there are any, know that they are over, unless that daemon ``runs``.
    """
    items = list(named)
    try:
        return _check(items, settings, version)
    except BaseException as failed:
        for name, fd in items:
            if not runs and _split(name)[0] == "index" and _index_flaw(fd) == "":
                index.poison(fd)
            os.close(fd)
        if isinstance(failed, OSError):
            raise Unfit(str(failed)) from None
        raise


def _check(items: list[Named], settings: Settings, version: str) -> Inherited:
    counts = Counter(name for name, _ in items)
    if MANIFEST not in counts:
        raise Unfit("there is no manifest")
    for name, count in counts.items():
        if count > 1:
            raise Unfit(f"{name.removeprefix(PREFIX)} is there {count} times")
    found = dict(items)
    made = manifests.decode(_read_manifest(found[MANIFEST]))
    made.check(Manifest.of(settings, version, catalog_bytes(settings)))
    if settings.hardened and settings.dma_buf == "slabs":
        raise Unfit(SEALED)
    host = _host_slabs(found, settings)
    wanted = {MANIFEST, LIFE, CATALOG, *map(slab_name, host)}
    if missing := sorted(wanted - found.keys()):
        raise Unfit(f"there is no {missing[0].removeprefix(PREFIX)}")
    gpu = dict(_gpu_slabs(found, settings))
    indexes = {name: fd for name, fd in found.items() if _split(name)[0] == "index"}
    on_gpu = {gpu_name(slab, device) for slab, (_, device) in gpu.items()}
    if extra := sorted(found.keys() - wanted - indexes.keys() - on_gpu):
        raise Unfit(f"nothing is known of {extra[0].removeprefix(PREFIX)}")
    slabs = {number: Memory(found[slab_name(number)], size) for number, size in host.items()}
    catalog = Memory(found[CATALOG], made.catalog)
    seals = _SEALS | F_SEAL_FUTURE_WRITE if settings.hardened else _SEALS
    checked = [(slab_name(number), slab.size, seals) for number, slab in slabs.items()]
    for name, size, wish in (*checked, (CATALOG, catalog.size, _SEALS), (LIFE, 0, _SEALS)):
        if flaw := memfd_flaw(found[name], size, wish):
            raise Unfit(f"{name.removeprefix(PREFIX)} {flaw}")
    for name, fd in indexes.items():
        if flaw := _index_flaw(fd):
            raise Unfit(f"{name.removeprefix(PREFIX)} {flaw}")
    _check_different(found)
    return Inherited(found[MANIFEST], found[LIFE], catalog, slabs, indexes, gpu, made.version)


def _host_slabs(found: dict[str, int], settings: Settings) -> dict[int, int]:
    """Numbers and bytes of the slabs of host memory that must be there.

    A sealed slab has one of two numbers, or is being replaced and not there (``Storage``).
    """
    planned = dict(enumerate(settings.slab_sizes()))
    if not settings.hardened:
        return planned
    sizes: dict[int, int] = {}
    for number, size in planned.items():
        there = [n for n in (number, settings.heir(number)) if slab_name(n) in found]
        if len(there) > 1:
            raise Unfit(f"slab-{there[0]} and slab-{there[1]} are one place's")
        sizes |= dict.fromkeys(there, size)
    return sizes


def _read_manifest(fd: int) -> bytes:
    size = os.fstat(fd).st_size
    if size > manifests.MAX_BYTES:
        raise Unfit(f"the manifest has {size} bytes")
    if flaw := memfd_flaw(fd, size, manifests.SEALS):
        raise Unfit(f"the manifest {flaw}")
    return os.pread(fd, size, 0)


def _gpu_slabs(
    found: dict[str, int], settings: Settings
) -> Iterator[tuple[int, tuple[Memory, str]]]:
    """Those that were made: a daemon may have ended before all were."""
    planned = {plan.slab: plan.size for plan in settings.gpu_slabs()}
    for name, fd in found.items():
        kind, which = _split(name)
        number, _, device = which.partition("-")
        if kind == "gpu" and number.isdigit() and int(number) in planned:
            yield int(number), (Memory(fd, planned[int(number)]), device)


def _index_flaw(fd: int) -> str:
    with contextlib.suppress(OSError):
        size = os.fstat(fd).st_size
        if size < index.HEADER_BYTES:
            return f"has {size} bytes, too few for an index"
        if flaw := memfd_flaw(fd, size, _SEALS):
            return flaw
        if os.pread(fd, len(index.MAGIC), 0) in (index.MAGIC, bytes(len(index.MAGIC))):
            return ""
    return "is no index"


def _check_different(found: dict[str, int]) -> None:
    """No two are one: spans of two slabs would lie over each other."""
    by_file: dict[tuple[int, int], str] = {}
    for name, fd in found.items():
        if _split(name)[0] == "gpu":
            # The driver's file descriptors all belong to one device file.
            continue
        state = os.fstat(fd)
        other = by_file.setdefault((state.st_dev, state.st_ino), name)
        if other != name:
            names = f"{other.removeprefix(PREFIX)} and {name.removeprefix(PREFIX)}"
            raise Unfit(f"{names} are the same memory")


class Estate:
    """What of a daemon's memory outlives it, beside slabs, catalog and indexes.

    Args:
        inherited: has it; it is taken out. None makes another, whose life begins.

    Attributes:
        manifest: file descriptor of what describes it. life: the lock on all of it.

    Raises:
        OSError: no file descriptors or no memory.
    """

    def __init__(self, settings: Settings, version: str, inherited: Inherited | None) -> None:
        if inherited is not None:
            self.life = Life(inherited.life)
            self.manifest = inherited.manifest
            inherited.life = inherited.manifest = -1
            return
        self.life = Life()
        try:
            self.life.begin(0)
            made = Manifest.of(settings, version, catalog_bytes(settings))
            self.manifest = manifests.make(made)
        except BaseException:
            self.life.close()
            raise

    def close(self) -> None:
        os.close(self.manifest)
        self.life.close()
