"""All that the supervisor holds for the daemon's other processes, and for the daemon after it."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

from kmesh.errors import ConfigError
from kmesh_spand import memory
from kmesh_spand.fdstore import FdStore
from kmesh_spand.inherit import (
    CATALOG,
    LIFE,
    MANIFEST,
    SEALED,
    Estate,
    Inherited,
    Named,
    gpu_name,
    index_name,
    inherit,
    slab_name,
)
from kmesh_spand.manifest import Unfit
from kmesh_spand.place import Place
from kmesh_spand.settings import Settings
from kmesh_spand.storage import Memory, Storage, table_bytes
from kmesh_spand.upgrade import LOCK, SESSIONS, UPGRADES, Predecessor

logger = logging.getLogger(__name__)

#: Processes of a daemon that was killed are gone by then, unless a driver holds them.
_LIFE_SECONDS = 20.0


class Holdings:
    """Place and memory of one daemon.

    Args:
        store: has what an earlier daemon left, and takes what this one will leave.
        upgrade: take all of it from the daemon that runs.

    Attributes:
        place, storage, life, manifest: owned.
        gpu: slabs of GPU memory that were inherited, and the UUIDs of their GPUs; the caller
            takes them over.

    Raises:
        ConfigError: a setting is wrong, or the daemon that runs goes on.
        OSError: no memory, no file descriptors, or no answer.
    """

    def __init__(
        self, settings: Settings, version: str, store: FdStore, *, upgrade: bool = False
    ) -> None:
        self._settings = settings
        self._version = version
        self._store = store
        self._predecessor: Predecessor | None = None
        self.place: Place
        self.storage: Storage
        self.gpu: dict[int, tuple[Memory, str]] = {}
        with contextlib.ExitStack() as undo:
            undo.callback(store.close)
            if upgrade:
                self._take_over(undo)
            else:
                self._start(undo)
            undo.pop_all()
        self.life, self.manifest = self._estate.life, self._estate.manifest

    def _start(self, undo: contextlib.ExitStack) -> None:
        self.place = Place.take(self._settings)
        undo.callback(self.place.close)
        inherited = self._from_store(undo)
        self._check_memory(inherited)
        if inherited is None:
            self.storage = Storage(self._settings)
            undo.callback(self.storage.close)
            undo.callback(self.storage.drop_writable)
            self._estate = Estate(self._settings, self._version, None)
            undo.callback(self._estate.close)
            self._put_all()
            return
        self._use(inherited, undo)
        self._end_indexes(inherited)
        self._put(self._indexes())
        self._put(self._new_slabs())
        self._store.settle()
        logger.info("memory of an earlier daemon, version %s, is used", inherited.version)

    def _from_store(self, undo: contextlib.ExitStack) -> Inherited | None:
        """What is usable of what an earlier daemon left there; the rest is given up."""
        if not self._store.received:
            return None
        names = {name for name, _ in self._store.received}
        received, self._store.received = self._store.received, []
        try:
            with contextlib.ExitStack() as taken:
                inherited = inherit(received, self._settings, self._version)
                taken.callback(inherited.close)
                self._adopt(inherited, taken)
                if not self._estate.life.begin(_LIFE_SECONDS):
                    inherited.poison()
                    raise Unfit("a process of the earlier daemon still runs")
                undo.push(taken.pop_all())
                return inherited
        except (Unfit, OSError) as differs:
            logger.warning("spans of an earlier daemon are given up: %s", differs)
        # Before memory is taken anew.
        for name in sorted(names):
            self._store.remove(name)
        self._store.settle()
        return None

    def _take_over(self, undo: contextlib.ExitStack) -> None:
        self._predecessor = predecessor = Predecessor(self._settings, self._version)
        undo.callback(predecessor.close)
        named, predecessor.memory = predecessor.memory, []
        try:
            inherited = inherit(named, self._settings, self._version, runs=True)
        except Unfit as differs:
            raise ConfigError(f"upgrade: the daemon that runs goes on: {differs}") from None
        undo.callback(inherited.close)
        self._adopt(inherited, undo)
        self._check_memory(inherited)
        self._use(inherited, undo)
        self.place = predecessor.place(self._settings)
        undo.callback(self.place.close)
        if not self.place.locked():
            raise ConfigError("upgrade: the daemon that runs goes on: its lock is not what it was")
        logger.info("upgrade: all memory is here, version %s made it", inherited.version)
        if not predecessor.wait_to_begin(self._estate.life):
            self.place.renew(self._settings)
        self._end_indexes(inherited)
        self._put_all()

    def _adopt(self, inherited: Inherited, undo: contextlib.ExitStack) -> None:
        self._estate = Estate(self._settings, self._version, inherited)
        undo.callback(self._estate.close)

    def _check_memory(self, inherited: Inherited | None) -> None:
        settings, gpus = self._settings, 0
        if settings.gpu_place == "host":
            there = inherited.gpu if inherited is not None else {}
            gpus = sum(plan.size for plan in settings.gpu_slabs() if plan.slab not in there)
        memory.check_memory(
            settings.host_memory,
            settings.staging_memory,
            table_bytes(settings),
            gpus,
            memory.memory_limits(held=inherited.resident if inherited is not None else 0),
        )

    def _use(self, inherited: Inherited, undo: contextlib.ExitStack) -> None:
        assert inherited.catalog is not None
        self.storage = Storage(self._settings, (inherited.slabs, inherited.catalog))
        inherited.slabs, inherited.catalog = {}, None
        undo.callback(self.storage.close)
        undo.callback(self.storage.drop_writable)
        self.gpu = inherited.gpu

    def _end_indexes(self, inherited: Inherited) -> None:
        """No reader believes an index of an earlier daemon from here on."""
        inherited.poison()
        for name in inherited.indexes:
            self._store.remove(name)
        inherited.close_indexes()

    # For the next daemon

    def _put_all(self) -> None:
        settings, store = self._settings, self._store
        if not store.active:
            return
        slabs = len(settings.slab_sizes()) + len(settings.gpu_slabs())
        needed = len((MANIFEST, LIFE, CATALOG)) + slabs + 2 * len(settings.tenancy().groups)
        why = ""
        if settings.hardened and settings.dma_buf == "slabs":
            why = SEALED
        elif store.size < needed:
            why = f"FileDescriptorStoreMax is {store.size}, and {needed} are needed"
        if why:
            logger.warning("spans will not survive a restart of the daemon: %s", why)
            store.active = False
        self._put(self.named())
        # Those that are still to be made are put when they are.
        self._put(Named(gpu_name(n, device), slab.fd) for n, (slab, device) in self.gpu.items())
        store.settle()

    def _put(self, named: Iterator[Named]) -> None:
        for name, fd in named:
            self._store.put(name, fd)

    def named(self) -> Iterator[Named]:
        """What another daemon needs of the memory, but slabs of GPUs; the fds stay ours."""
        yield Named(MANIFEST, self._estate.manifest)
        yield Named(LIFE, self._estate.life.memory)
        yield Named(CATALOG, self.storage.catalog.fd)
        for number, slab in self.storage.slabs.items():
            yield Named(slab_name(number), slab.fd)
        yield from self._indexes()

    def _indexes(self) -> Iterator[Named]:
        for group, index in self.storage.indexes.items():
            yield Named(index_name(self.storage.epoch, group), index.fd)

    def _new_slabs(self) -> Iterator[Named]:
        """Those that are missing in a store from which the others came."""
        for number in self.storage.slabs.keys() - self.storage.sealed:
            if self._settings.hardened:
                yield Named(slab_name(number), self.storage.slabs[number].fd)

    def all_named(self) -> Iterator[Named]:
        """As ``named``, with lock and sockets."""
        yield from self.named()
        yield Named(LOCK, self.place.lock)
        yield Named(SESSIONS, self.place.sessions.fileno())
        yield Named(UPGRADES, self.place.upgrades.fileno())

    def new_epoch(self) -> None:
        """As ``Storage.new_epoch``."""
        old = [name for name, _ in self._indexes()]
        self.storage.new_epoch()
        # First those that are over: a full store refuses, and says nothing.
        for name in old:
            self._store.remove(name)
        self._put(self._indexes())

    def replace(self, slab: int) -> int:
        """As ``Storage.replace``."""
        self._store.remove(slab_name(slab))
        heir = self.storage.replace(slab)
        self._put(iter([Named(slab_name(heir), self.storage.slabs[heir].fd)]))
        return heir

    def serving(self) -> None:
        """The daemon before this one, if it is there, is not needed any more."""
        if self._predecessor is not None:
            self.place.own(self._settings)
            self._predecessor.serving()
            self._predecessor = None

    def close(self) -> None:
        """Gives it all up, but for what the store has."""
        self._store.close()
        self.place.close()
        self.storage.close()
        self._estate.close()
        if self._predecessor is not None:
            self._predecessor.close()
