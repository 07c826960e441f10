"""A daemon whose parts fail on demand: while a file of a fault's name lies in a directory.

Run instead of ``-m kmesh_spand``. Nothing in the daemon knows of it: parts are replaced before
the supervisor forks, and its children inherit that.
"""

from __future__ import annotations

import asyncio
import errno
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from kmesh import dmabuf
from kmesh.handles import HandleRefusal
from kmesh.index import IndexWriter
from kmesh_spand import diskstore, hoststore, jobs, memory, storage, worker
from kmesh_spand.__main__ import main
from kmesh_spand.control import process
from kmesh_spand.control.handler import Handler
from kmesh_spand.control.readiness import Readiness
from kmesh_spand.core.codes import Trouble
from kmesh_spand.core.flights import Flights
from kmesh_spand.core.policy import LRU

DIRECTORY = "KMESH_TEST_FAULTS"
COMMAND = (sys.executable, __file__)
#: How far the system clock jumps, in seconds.
YEARS = 10 * 365 * 86400


def broken(name: str) -> bool:
    return Path(os.environ[DIRECTORY], name).exists()


def _replace(owner: Any, name: str, fault: str, instead: Any) -> None:
    """While ``fault`` is there, ``instead`` is called with the same arguments."""
    inner = getattr(owner, name)

    def chosen(*arguments: Any, **named: Any) -> Any:
        return (instead if broken(fault) else inner)(*arguments, **named)

    setattr(owner, name, chosen)


def _throw(*_: Any) -> Iterator[int]:
    raise RuntimeError("a policy that throws")


def _no_memory(*_: Any, **__: Any) -> bool:
    raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))


def _no_space(*_: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _only_the_first(owner: Any) -> Any:
    inner = owner._populate_slab

    def populate(self: Any, number: int, *arguments: Any) -> Any:
        return _no_memory() if number else inner(self, number, *arguments)

    return populate


def _bug(*_: Any) -> None:
    raise RuntimeError("a bug that a test put here")


def _shift() -> int:
    """Seconds by which the system clock is wrong."""
    return YEARS * (broken("forward") - broken("back"))


def _set_clock() -> None:
    """What ``date -s`` would do to this daemon alone."""
    seconds, nanoseconds = time.time, time.time_ns
    time.time = lambda: seconds() + _shift()
    time.time_ns = lambda: nanoseconds() + _shift() * 10**9


def _memfd(_: int, ranges: Sequence[tuple[int, int]]) -> int:
    """In place of a DMA-BUF, which not every machine makes."""
    fd = os.memfd_create("kmesh-pretended", os.MFD_CLOEXEC)
    os.ftruncate(fd, sum(size for _, size in ranges))
    return fd


def _no_export(*_: Any) -> int:
    raise dmabuf.NotExported(HandleRefusal.NO_MEMORY, "a fault that a test put here")


def _no_io(*_: Any) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def _no_removal(*_: Any) -> None:
    raise diskstore.DiskTrouble(Trouble.IO, "a fault that a test put here")


def _slow_disk(inner: Any, fault: str) -> Any:
    def act(*arguments: Any) -> None:
        while broken(fault):
            time.sleep(0.005)
        inner(*arguments)

    return act


async def _while(fault: str) -> None:
    while broken(fault):  # noqa: ASYNC110
        await asyncio.sleep(0.02)


async def _hang(*_: Any) -> None:
    await _while("loop")


def _slow_to_start() -> tuple[Any, Any]:
    made, page = _load()

    class Slow(made):  # type: ignore[misc, valid-type]
        async def start(self) -> None:
            await _while("starting")
            await super().start()

    return Slow, page


def install() -> None:
    """Puts every fault in place."""
    _replace(LRU, "victims", "policy", _throw)
    _replace(LRU, "add", "order", _throw)
    _replace(LRU, "discard", "order", _throw)
    _replace(memory, "populate_range", "populate", _no_memory)
    _replace(worker.Worker, "_populate_slab", "second", _only_the_first(worker.Worker))
    _replace(Handler, "_attach_slab", "internal", _bug)
    _replace(IndexWriter, "insert", "index", lambda *_: False)
    _replace(IndexWriter, "remove", "remove", lambda *_: None)
    _replace(Flights, "claim", "claim", _bug)
    _replace(process.Control, "_tell_health", "loop", _hang)
    _replace(Readiness, "turn", "turn", _bug)
    _replace(hoststore.HostStore, "copy", "copy", _bug)
    _replace(hoststore.HostStore, "wipe", "wipe", _bug)
    _replace(process, "Mapping", "mapping", _no_memory)
    for room in (hoststore, jobs):
        _replace(room, "Mapping", "mapping", _no_memory)
    _replace(storage, "_make", "space", _no_space)
    _replace(diskstore, "_read_all", "disk-read", _no_io)
    _replace(diskstore, "_write_all", "disk-write", _no_io)
    _replace(diskstore, "_write_all", "disk-full", _no_space)
    _replace(diskstore.DiskStore, "remove", "disk-unlink", _no_removal)
    for method, fault in (("_take", "disk-slow"), ("_fill", "disk-write-slow")):
        inner = getattr(diskstore.DiskStore, method)
        setattr(diskstore.DiskStore, method, _slow_disk(inner, fault))
    _replace(dmabuf, "create", "pretend", _memfd)
    _replace(dmabuf, "check", "pretend", lambda *_: None)
    _replace(dmabuf, "create", "export", _no_export)
    process._load = _slow_to_start
    _set_clock()
    if broken("huge"):
        # A kernel that gives huge pages, but can't fill a mapping.
        memory.hugepages_allowed = lambda: True
        memory.advise_hugepages = lambda *_: True
        memory.hugepages_granted = lambda *_: True
        memory._MADV_POPULATE_WRITE = 12345
    if broken("no-huge"):
        # A kernel that gives none to shared memory.
        memory.hugepages_allowed = lambda: False
    if broken("small"):
        # One that would, and has none left.
        memory.hugepages_allowed = lambda: True
        memory.advise_hugepages = lambda *_: True
        memory.hugepages_granted = lambda *_: False


_load = process._load

if __name__ == "__main__":
    install()
    sys.exit(main())
