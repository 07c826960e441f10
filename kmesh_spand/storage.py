"""The memfds that outlive control and worker, all held by the supervisor."""

from __future__ import annotations

import os
from dataclasses import dataclass

from kmesh.index import capacity_for, index_size, poison
from kmesh.layout import PAGE_BYTES
from kmesh.mapping import Mapping
from kmesh_spand.core.record import RECORD_BYTES
from kmesh_spand.memory import make_memfd
from kmesh_spand.settings import Settings


@dataclass(frozen=True, slots=True)
class Memory:
    """A memfd: its fd, and its size in bytes."""

    fd: int
    size: int


def _pages(size: int) -> int:
    return -(-size // PAGE_BYTES) * PAGE_BYTES


def _make(name: str, size: int) -> Memory:
    memory = Memory(make_memfd(name, size), size)
    os.posix_fallocate(memory.fd, 0, size)
    return memory


class Storage:
    """Slabs and catalog for good, and the index of the running epoch.

    Attributes:
        slabs, catalog, index: owned by this object.
        epoch: random, nonzero; changes with ``new_epoch``.

    Raises:
        OSError: no file descriptors or no memory.
    """

    def __init__(self, settings: Settings) -> None:
        self._entries = settings.max_spans
        self.slabs = [
            Memory(make_memfd(f"slab{number}", size), size)
            for number, size in enumerate(settings.slab_sizes())
        ]
        self.catalog = _make("catalog", _pages(settings.max_spans * RECORD_BYTES))
        self.index: Memory
        self.epoch: int
        self._begin()

    def poison(self) -> None:
        """Tells every reader of the index that it is over."""
        with Mapping(self.index.fd, self.index.size, writable=True) as mapping:
            poison(mapping)

    def new_epoch(self) -> None:
        """An empty index and another epoch; the old index must be poisoned."""
        old = self.index.fd
        self._begin()
        os.close(old)

    def _begin(self) -> None:
        self.epoch = int.from_bytes(os.urandom(8), "little") or 1
        # Every key has a catalog record of its own, sub-keys too.
        self.index = _make("index", index_size(capacity_for(self._entries)))

    def close(self) -> None:
        """Gives all memory back; readers see that the index is over."""
        self.poison()
        for fd in self.fds:
            os.close(fd)

    @property
    def fds(self) -> list[int]:
        """Every fd that is held."""
        return [*(slab.fd for slab in self.slabs), self.catalog.fd, self.index.fd]
