"""The memfds that outlive control and worker, all held by the supervisor."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterable, Mapping
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
    """What one life of control works on; ``indexes`` are by group of uids.

    Attributes:
        slabs: by number, spares too.
        sealed: those that nobody can write. spares: those that are not used yet.
    """

    slabs: Mapping[int, Memory]
    catalog: Memory
    indexes: Mapping[int, Memory]
    epoch: int
    dma_bufs: DmaBufs = field(default_factory=DmaBufs)
    sealed: frozenset[int] = frozenset()
    spares: frozenset[int] = frozenset()

    @property
    def fds(self) -> list[int]:
        """Every fd: slabs, catalog, indexes, DMA-BUFs."""
        memories = (*self.slabs.values(), self.catalog, *self.indexes.values())
        return [*(memory.fd for memory in memories), *self.dma_bufs.fds]


def owners_offset(settings: Settings) -> int:
    """Where the slabs' owners begin in the catalog: behind the records."""
    return settings.max_spans * RECORD_BYTES


def catalog_bytes(settings: Settings) -> int:
    """Size of the catalog."""
    slabs = settings.slab_numbers() + len(settings.gpu_slabs())
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


def _dma_bufs(slabs: Collection[Memory], mappings: Iterable[Region], settings: Settings) -> DmaBufs:
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

    What an earlier daemon has sealed can be written by none of this one's processes. Such a slab
    has a spare: memory without a page, of the same size and under a number of its own, which
    takes its place by ``replace``. So both together never take more than one.

    Args:
        inherited: slabs, by number, and catalog of an earlier daemon, which become this
            object's; None makes new ones.

    Attributes:
        slabs, catalog: owned by this object. Slabs are by number.
        sealed: numbers of slabs that nobody can write.
        spares: memory by number, for the sealed slabs; owned too.
        indexes: one for each group of uids, so that none shows what another stored.
        dma_bufs: of the slabs, if they are to be both exported so and sealed.
        writable: mappings of slabs and spares, by number, if nobody can make further ones
            (``hardened``).
        epoch: random, nonzero; changes with ``new_epoch``.

    Raises:
        OSError: no file descriptors or no memory; nothing is held then.
        ConfigError: there is no memory for slabs that must have their pages at once.
    """

    def __init__(
        self, settings: Settings, inherited: tuple[dict[int, Memory], Memory] | None = None
    ) -> None:
        self._entries = _entries(settings)
        self._groups = settings.tenancy().groups
        self._settings = settings
        self.writable: dict[int, Region] | None = {} if settings.hardened else None
        self.slabs: dict[int, Memory] = {}
        self.spares: dict[int, Memory] = {}
        self.sealed: set[int] = set()
        self.dma_bufs = DmaBufs()
        self.catalog: Memory
        self.indexes: dict[int, Memory]
        self.epoch: int
        with contextlib.ExitStack() as undo:
            undo.callback(self.drop_writable)
            if inherited is not None:
                self._adopt(inherited[0], undo)
                self.catalog = inherited[1]
            else:
                self._make_slabs(enumerate(settings.slab_sizes()), self.slabs, undo)
                self.catalog = _make("catalog", catalog_bytes(settings))
                undo.callback(os.close, self.catalog.fd)
            self._begin()
            undo.pop_all()

    def _adopt(self, slabs: dict[int, Memory], undo: contextlib.ExitStack) -> None:
        """Uses slabs of an earlier daemon, and makes what is to be written if they can't be."""
        self.slabs = dict(slabs)
        if not self._settings.hardened:
            return
        self.sealed = set(slabs)
        sizes = self._settings.slab_sizes()
        heirs = {number: self._settings.heir(number) for number in slabs}
        spares = [(heir, slabs[number].size) for number, heir in heirs.items()]
        self._make_slabs(spares, self.spares, undo)
        # A daemon that was killed as it put one slab in another's place had neither.
        missing = [
            (number, size)
            for number, size in enumerate(sizes)
            if number not in slabs and number not in self.spares
        ]
        self._make_slabs(missing, self.slabs, undo)

    def _make_slabs(
        self,
        sizes: Iterable[tuple[int, int]],
        made: dict[int, Memory],
        undo: contextlib.ExitStack,
    ) -> None:
        """Makes slabs by number and size, without pages."""
        settings, fresh = self._settings, {}
        for number, size in sizes:
            fd = make_memfd(f"slab{number}", size, final=not settings.hardened)
            undo.callback(os.close, fd)
            made[number] = fresh[number] = Memory(fd, size)
        if self.writable is None:
            return
        # Mapped before the seal: processes forked from this one inherit what no other can have.
        for number, slab in fresh.items():
            self.writable[number] = Region(slab.fd, slab.size, writable=True)
        if settings.dma_buf == "slabs":
            self.dma_bufs = _dma_bufs(fresh.values(), self.writable.values(), settings)
            for fd in self.dma_bufs.fds:
                undo.callback(os.close, fd)
        for slab in fresh.values():
            seal_for_good(slab.fd)

    def replace(self, number: int) -> int:
        """Gives a sealed slab back; its spare takes its place, whose number is returned.

        Raises:
            KeyError: it is none.
        """
        self.sealed.remove(number)
        os.close(self.slabs.pop(number).fd)
        heir = self._settings.heir(number)
        self.slabs[heir] = self.spares.pop(heir)
        return heir

    def poison(self) -> None:
        """Tells every reader of the index that it is over."""
        for index in self.indexes.values():
            poison(index.fd)

    def drop_writable(self) -> None:
        """Gives up the writable mappings of slabs, in a process that doesn't write them."""
        for mapping in (self.writable or {}).values():
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
        return Shared(
            {**self.slabs, **self.spares},
            self.catalog,
            self.indexes,
            self.epoch,
            self.dma_bufs,
            frozenset(self.sealed),
            frozenset(self.spares),
        )
