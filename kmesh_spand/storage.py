"""The memfds that outlive control and worker, all held by the supervisor."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kmesh.index import capacity_for, index_size, poison
from kmesh.layout import PAGE_BYTES
from kmesh.mapping import Mapping as Region
from kmesh_spand.core.record import RECORD_BYTES
from kmesh_spand.core.tenants import OWNER_BYTES
from kmesh_spand.memory import make_memfd, seal_for_good
from kmesh_spand.settings import Settings


@dataclass(frozen=True, slots=True)
class Memory:
    """A memfd: its fd, and its size in bytes."""

    fd: int
    size: int


@dataclass(frozen=True, slots=True)
class Shared:
    """What one life of control works on; ``indexes`` are by group of uids."""

    slabs: Sequence[Memory]
    catalog: Memory
    indexes: Mapping[int, Memory]
    epoch: int

    @property
    def fds(self) -> list[int]:
        """Every fd: slabs, catalog, indexes."""
        memories = (*self.slabs, self.catalog, *self.indexes.values())
        return [memory.fd for memory in memories]


def owners_offset(settings: Settings) -> int:
    """Where the slabs' owners begin in the catalog: behind the records."""
    return settings.max_spans * RECORD_BYTES


def catalog_bytes(settings: Settings) -> int:
    """Size of the catalog."""
    return _pages(owners_offset(settings) + len(settings.slab_sizes()) * OWNER_BYTES)


def table_bytes(settings: Settings) -> int:
    """Bytes of the catalog and of all indexes."""
    index = index_size(capacity_for(settings.max_spans))
    return catalog_bytes(settings) + len(settings.tenancy().groups) * index


def _pages(size: int) -> int:
    return -(-size // PAGE_BYTES) * PAGE_BYTES


def _make(name: str, size: int) -> Memory:
    memory = Memory(make_memfd(name, size), size)
    os.posix_fallocate(memory.fd, 0, size)
    return memory


class Storage:
    """Slabs and catalog for good, and the indexes of the running epoch.

    Attributes:
        slabs, catalog: owned by this object.
        indexes: one for each group of uids, so that none shows what another stored.
        writable: mappings of the slabs, if nobody can make further ones (``hardened``).
        epoch: random, nonzero; changes with ``new_epoch``.

    Raises:
        OSError: no file descriptors or no memory.
    """

    def __init__(self, settings: Settings) -> None:
        self._entries = settings.max_spans
        self._groups = settings.tenancy().groups
        sizes = settings.slab_sizes()
        self.slabs = [
            Memory(make_memfd(f"slab{number}", size, final=not settings.hardened), size)
            for number, size in enumerate(sizes)
        ]
        # Mapped before the seal: processes forked from this one inherit what no other can have.
        self.writable: list[Region] | None = None
        if settings.hardened:
            self.writable = [Region(slab.fd, slab.size, writable=True) for slab in self.slabs]
            for slab in self.slabs:
                seal_for_good(slab.fd)
        self.catalog = _make("catalog", catalog_bytes(settings))
        self.indexes: dict[int, Memory]
        self.epoch: int
        self._begin()

    def poison(self) -> None:
        """Tells every reader of the index that it is over."""
        for index in self.indexes.values():
            with Region(index.fd, index.size, writable=True) as mapping:
                poison(mapping)

    def drop_writable(self) -> None:
        """Gives up the writable mappings of slabs, in a process that doesn't write them."""
        for mapping in self.writable or ():
            mapping.close()

    def new_epoch(self) -> None:
        """Empty indexes and another epoch; the old indexes must be poisoned."""
        old = self.indexes
        self._begin()
        for index in old.values():
            os.close(index.fd)

    def _begin(self) -> None:
        self.epoch = int.from_bytes(os.urandom(8), "little") or 1
        # Every key has a catalog record of its own, sub-keys too.
        size = index_size(capacity_for(self._entries))
        self.indexes = {group: _make("index", size) for group in self._groups}

    def close(self) -> None:
        """Gives all memory back; readers see that the index is over."""
        self.poison()
        for fd in self.shared.fds:
            os.close(fd)

    @property
    def shared(self) -> Shared:
        """What a control process is given; the fds stay this object's."""
        return Shared(self.slabs, self.catalog, self.indexes, self.epoch)
