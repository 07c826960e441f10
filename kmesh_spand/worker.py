"""The store worker: the only process that writes slabs of host memory.

It copies staged bytes into slabs and sums them, verifies stored payloads, and puts pages behind
the slabs while the daemon already serves.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Mapping
from functools import partial
from typing import NamedTuple, NoReturn

from kmesh import layout
from kmesh.mapping import Mapping as Region
from kmesh_spand import ipc, memory, messages
from kmesh_spand.budget import Gate
from kmesh_spand.diskcrew import DiskCrew, NoDisk
from kmesh_spand.diskdir import Directory
from kmesh_spand.diskstore import DiskStore
from kmesh_spand.hoststore import HostStore, Slab
from kmesh_spand.jobs import Crews, JobWorker, Store
from kmesh_spand.recipes import Recipes
from kmesh_spand.settings import Settings
from kmesh_spand.storage import Storage

logger = logging.getLogger(__name__)

#: Until memory that could not be had is asked for again.
_RETRY_SECONDS = 2.0


class Ground(NamedTuple):
    """What the store worker works on, as it is forked.

    Attributes:
        slabs: fd and size of each, by number; spares too.
        writable: their mappings, inherited, where new ones would be refused.
        sealed: slabs that can only be read. spares: those that are not used yet.
    """

    slabs: dict[int, tuple[int, int]]
    writable: Mapping[int, Region] | None = None
    sealed: frozenset[int] = frozenset()
    spares: frozenset[int] = frozenset()

    @classmethod
    def of(cls, storage: Storage) -> Ground:
        """That of a supervisor's memory."""
        shared, writable = storage.shared, storage.writable
        slabs = {number: (slab.fd, slab.size) for number, slab in shared.slabs.items()}
        return cls(slabs, writable, shared.sealed, shared.spares)


class Worker(JobWorker):
    """One life of the store worker.

    Args:
        ground: its slabs.
        disk: where files are; None: there are none, or another daemon has them.

    Raises:
        OSError: a slab can't be mapped.
    """

    def __init__(
        self,
        settings: Settings,
        control: socket.socket,
        ground: Ground,
        disk: Directory | None = None,
    ) -> None:
        super().__init__(control, settings.verify_rate)
        self._settings = settings
        writable = ground.writable or {}
        made = {
            number: Slab(fd, size, writable.get(number), sealed=number in ground.sealed)
            for number, (fd, size) in ground.slabs.items()
        }
        self._spares = {number: made.pop(number) for number in ground.spares}
        self._slabs = made
        self._store = HostStore(self._slabs, settings.memory_headroom)
        self._recipes = Recipes(self._store)
        self._files = disk
        self._disk: DiskCrew | NoDisk | None = None
        self._gate = Gate(settings.memory_headroom, self._paused)
        self._filler = threading.Thread(target=self._populate, name="populate", daemon=True)

    def run(self) -> NoReturn:
        """The process's life."""
        try:
            crews = Crews.hired(self._settings.copy_threads)
            if self._files is not None:
                self._disk = self._disk_crew(self._files)
            elif self._settings.disk:
                self._disk = NoDisk(self._send)
        except RuntimeError as lacking:
            self._lacks(lacking)
        self.serve(crews)

    def _disk_crew(self, files: Directory) -> DiskCrew:
        store = DiskStore(
            files.fd,
            files.id,
            self._store,
            self._settings.disk_bytes,
            self._settings.disk_sync,
        )
        return DiskCrew(store, self._settings.disk_threads, self._send)

    def stores(self) -> tuple[Store, Store]:
        return self._store, self._store

    def recipes(self) -> Recipes:
        return self._recipes

    def take(self, message: ipc.AnyMessage, fd: int | None, crews: Crews) -> None:
        if isinstance(message, messages.Replaced):
            self._replace(message)
            crews.recode(self._recipes.let_go, message.slab)
        elif self._disk is None or not self._disk.take(message):
            super().take(message, fd, crews)

    def _replace(self, message: messages.Replaced) -> None:
        """A spare is used, and the slab before it given up, of which no job is told any more."""
        heir = self._spares.pop(message.heir, None)
        if heir is None:
            # This process began after it.
            return
        old = self._slabs.pop(message.slab)
        old.mapping.close()
        os.close(old.fd)
        self._slabs[message.heir] = heir
        if self._filler.ident is not None:
            name = f"populate {message.heir}"
            self._start(
                threading.Thread(
                    target=self._populate, args=({message.heir: heir},), name=name, daemon=True
                )
            )

    def heard(self) -> None:
        if self._filler.ident is None:
            # Before, control needs the processors more than the pool does.
            self._start(self._filler)

    def _start(self, thread: threading.Thread) -> None:
        try:
            thread.start()
        except RuntimeError as lacking:
            self._lacks(lacking)

    @staticmethod
    def _lacks(lacking: RuntimeError) -> NoReturn:
        logger.error("the store worker has not what it needs: %s", lacking)
        os._exit(1)

    def _populate(self, slabs: Mapping[int, Slab] | None = None) -> None:
        """Puts pages behind slabs: these, or all of them. When they are there they are mapped."""
        started = time.monotonic()
        waiting = dict(self._slabs if slabs is None else slabs)
        filled = {number: slab for number, slab in waiting.items() if not slab.sealed}
        while waiting:
            for number, slab in list(waiting.items()):
                if slab.sealed:
                    # It stays as it is, with all that was ever written.
                    self._send(messages.Populated(number, slab.capacity, False))
                    del waiting[number]
                    continue
                try:
                    granted = self._populate_slab(number, slab)
                except OSError as failed:
                    self._send(messages.PopulateFailed(number, str(failed.strerror)))
                    continue
                del waiting[number]
                self._send(messages.Populated(number, slab.capacity, granted))
            if waiting:
                # What is missing now may be there later.
                time.sleep(_RETRY_SECONDS)
        logger.info("memory is populated", extra={"seconds": round(time.monotonic() - started, 3)})
        for number, slab in filled.items():
            there = partial(self._has, number, slab)
            memory.map_pages(slab.mapping.address, slab.mapping.size, there)

    def _has(self, number: int, slab: Slab) -> bool:
        """Whether it was not given up."""
        return self._slabs.get(number) is slab

    def _populate_slab(self, number: int, slab: Slab) -> bool:
        base, size = slab.mapping.address, slab.mapping.size
        huge, node = self._settings.hugepages, self._settings.numa_node
        asked = memory.place_pages(base, size, huge=huge, node=node)
        sums = (slab.sums, size - slab.sums)

        def report(filled: int) -> None:
            done = min(filled - sums[1], slab.capacity) // layout.TILE_BYTES * layout.TILE_BYTES
            if 0 < done < slab.capacity:
                self._send(messages.Populated(number, done, False))

        # The sums first: a payload is of no use without them.
        ranges = (sums, (0, slab.sums))
        # Pages that an earlier worker made need no room.
        gate = None if slab.populated() else self._gate
        filler = memory.Populator(slab.fd, base, ranges, huge=asked, done=report, gate=gate)
        filler.run(self._settings.populate_threads)
        if filler.fell_back:
            self._send(messages.Fallback("populate", number))
        granted = asked and memory.hugepages_granted(base)
        if asked and not granted:
            self._send(messages.Fallback("hugepages", number))
        return granted

    def _paused(self, reason: str | None) -> None:
        if reason is None:
            logger.info("memory grows again")
        else:
            logger.warning("memory does not grow for now: %s", reason)
        self._send(messages.PopulatePaused(reason or ""))


def run(
    settings: Settings,
    channel: socket.socket,
    ground: Ground,
    disk: Directory | None = None,
) -> int:
    """Entry of the process; arguments as of ``Worker``."""
    try:
        worker = Worker(settings, channel, ground, disk)
    except OSError as failed:
        logger.error("slabs can't be mapped: %s", failed.strerror)
        return 1
    worker.run()
