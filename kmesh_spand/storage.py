"""The memfds that outlive control and worker, all held by the supervisor."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kmesh import dmabuf
from kmesh.errors import ConfigError
from kmesh.handles import HandleRefusal
from kmesh.index import capacity_for, index_size, poison
from kmesh.layout import whole_pages
from kmesh.mapping import Mapping as Region
from kmesh_spand.budget import shortage
from kmesh_spand.core.record import RECORD_BYTES
from kmesh_spand.core.tenants import OWNER_BYTES
from kmesh_spand.memory import Populator, make_memfd, place_pages, seal_for_good
from kmesh_spand.settings import Settings


@dataclass(frozen=True, slots=True)
class Memory:
    """A memfd: its fd, and its size in bytes."""

    fd: int
    size: int


@dataclass(frozen=True, slots=True)
class DmaBufs:
    """DMA-BUFs of all slabs, made before they were sealed; or why there are none."""

    fds: list[int] = field(default_factory=list)
    refusal: HandleRefusal | None = None
    text: str = ""


@dataclass(frozen=True, slots=True)
class Shared:
    """What one life of control works on; ``indexes`` are by group of uids."""

    slabs: Sequence[Memory]
    catalog: Memory
    indexes: Mapping[int, Memory]
    epoch: int
    dma_bufs: DmaBufs = field(default_factory=DmaBufs)

    @property
    def fds(self) -> list[int]:
        """Every fd: slabs, catalog, indexes, DMA-BUFs."""
        memories = (*self.slabs, self.catalog, *self.indexes.values())
        return [*(memory.fd for memory in memories), *self.dma_bufs.fds]


def owners_offset(settings: Settings) -> int:
    """Where the slabs' owners begin in the catalog: behind the records."""
    return settings.max_spans * RECORD_BYTES


def catalog_bytes(settings: Settings) -> int:
    """Size of the catalog."""
    slabs = len(settings.slab_sizes()) + len(settings.gpu_slabs())
    return whole_pages(owners_offset(settings) + slabs * OWNER_BYTES)


def table_bytes(settings: Settings) -> int:
    """Bytes of the catalog and of all indexes."""
    index = index_size(capacity_for(_entries(settings)))
    return catalog_bytes(settings) + len(settings.tenancy().groups) * index


def _make(name: str, size: int) -> Memory:
    memory = Memory(make_memfd(name, size), size)
    try:
        os.posix_fallocate(memory.fd, 0, size)
    except BaseException:
        os.close(memory.fd)
        raise
    return memory


def _fill(mapping: Region, fd: int, settings: Settings) -> None:
    """Puts pages behind a slab before anything else does: those that are made stay as they are."""
    base, size = mapping.address, mapping.size
    huge = place_pages(base, size, huge=settings.hugepages, node=settings.numa_node)
    filler = Populator(fd, base, [(0, size)], huge=huge, done=lambda _: None)
    filler.run(settings.populate_threads)


def _dma_bufs(slabs: list[Memory], mappings: list[Region], settings: Settings) -> DmaBufs:
    """Makes them all, or none. It fills the slabs with pages, which is all the time it takes.

    Raises:
        ConfigError: the machine has less memory left than that.
        OSError: it has not given it.
    """
    made: list[int] = []
    try:
        dmabuf.probe()
        # The kernel kills whoever takes more than its control group may.
        if short := shortage(sum(slab.size for slab in slabs), settings.memory_headroom):
            raise ConfigError(f"dma_buf: hardened slabs need all of their memory at once: {short}")
        for slab, mapping in zip(slabs, mappings, strict=True):
            dmabuf.Limits.read().check(slab.size)
            _fill(mapping, slab.fd, settings)
            made.append(dmabuf.create(slab.fd, [(0, slab.size)]))
    except BaseException as failed:
        for fd in made:
            os.close(fd)
        if isinstance(failed, dmabuf.NotExported):
            return DmaBufs([], failed.refusal, str(failed))
        raise
    return DmaBufs(made)


def _entries(settings: Settings) -> int:
    """Names that an index may have to hold."""
    return settings.max_spans + (settings.disk_spans if settings.disk else 0)


class Storage:
    """Slabs and catalog for good, and the indexes of the running epoch.

    Args:
        inherited: slabs and catalog of an earlier daemon, which become this object's; None
            makes new ones.

    Attributes:
        slabs, catalog: owned by this object.
        indexes: one for each group of uids, so that none shows what another stored.
        dma_bufs: of the slabs, if they are to be both exported so and sealed.
        writable: mappings of the slabs, if nobody can make further ones (``hardened``).
        epoch: random, nonzero; changes with ``new_epoch``.

    Raises:
        OSError: no file descriptors or no memory; nothing is held then.
        ConfigError: there is no memory for slabs that must have their pages at once.
    """

    def __init__(
        self, settings: Settings, inherited: tuple[list[Memory], Memory] | None = None
    ) -> None:
        self._entries = _entries(settings)
        self._groups = settings.tenancy().groups
        self.writable: list[Region] | None = None
        self.slabs: list[Memory] = []
        self.dma_bufs = DmaBufs()
        self.catalog: Memory
        self.indexes: dict[int, Memory]
        self.epoch: int
        if inherited is not None:
            self.slabs, self.catalog = inherited
            self._begin()
            return
        with contextlib.ExitStack() as undo:
            for number, size in enumerate(settings.slab_sizes()):
                fd = make_memfd(f"slab{number}", size, final=not settings.hardened)
                undo.callback(os.close, fd)
                self.slabs.append(Memory(fd, size))
            # Mapped before the seal: processes forked from this one inherit what no other can
            # have.
            if settings.hardened:
                self.writable = []
                undo.callback(self.drop_writable)
                for slab in self.slabs:
                    self.writable.append(Region(slab.fd, slab.size, writable=True))
                if settings.dma_buf == "slabs":
                    self.dma_bufs = _dma_bufs(self.slabs, self.writable, settings)
                    for fd in self.dma_bufs.fds:
                        undo.callback(os.close, fd)
                for slab in self.slabs:
                    seal_for_good(slab.fd)
            self.catalog = _make("catalog", catalog_bytes(settings))
            undo.callback(os.close, self.catalog.fd)
            self._begin()
            undo.pop_all()

    def poison(self) -> None:
        """Tells every reader of the index that it is over."""
        for index in self.indexes.values():
            poison(index.fd)

    def drop_writable(self) -> None:
        """Gives up the writable mappings of slabs, in a process that doesn't write them."""
        for mapping in self.writable or ():
            mapping.close()

    def new_epoch(self) -> None:
        """Empty indexes and another epoch; the old indexes must be poisoned.

        Raises:
            OSError: as above; the old epoch's indexes are still held, and it may be tried again.
        """
        old = self.indexes
        self._begin()
        for index in old.values():
            os.close(index.fd)

    def _begin(self) -> None:
        # Every key has a catalog record of its own, sub-keys too.
        size = index_size(capacity_for(self._entries))
        made: dict[int, Memory] = {}
        try:
            for group in self._groups:
                made[group] = _make("index", size)
        except BaseException:
            for index in made.values():
                os.close(index.fd)
            raise
        self.epoch = int.from_bytes(os.urandom(8), "little") or 1
        self.indexes = made

    def close(self) -> None:
        """Gives all memory back; readers see that the index is over."""
        self.poison()
        for fd in self.shared.fds:
            os.close(fd)

    @property
    def shared(self) -> Shared:
        """What a control process is given; the fds stay this object's."""
        return Shared(self.slabs, self.catalog, self.indexes, self.epoch, self.dma_bufs)
