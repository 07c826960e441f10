"""The daemon itself: memory at rest, how soon it serves, how fast its pool gets its pages."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator

from benchmarks.results import Row, unavailable
from benchmarks.spand import pss, serve
from kmesh.errors import KMeshError
from kmesh.mapping import Mapping
from kmesh_spand import memory

GIB = 1 << 30


def at_rest(rounds: int) -> Iterator[Row]:
    """Proportional set size of all processes of a daemon with its default settings."""
    with serve() as spand:
        total, slabs = [], []
        for _ in range(rounds):
            time.sleep(0.5)
            by_mapping = pss(spand.processes())
            mapped = sum(size for name, size in by_mapping.items() if name.startswith("kmesh-slab"))
            total.append((sum(by_mapping.values()) - mapped) / 1e6)
            slabs.append(mapped / 1e6)
        count = len(spand.processes())
    what = (
        f"{count} processes, pool of 1 GiB all there, but not counted ({slabs[-1]:.0f} MB mapped)"
    )
    yield Row("daemon_idle", "MB", "median", {"rest": total, "slabs": slabs}, what)


def serving_after(size: str) -> float:
    """Seconds from starting the command until a session is open."""
    begin = time.perf_counter()
    with serve(wait=False, host_memory=size) as spand:
        deadline = begin + 30
        while time.perf_counter() < deadline:
            with contextlib.suppress(KMeshError):
                spand.connect().close()
                return time.perf_counter() - begin
            time.sleep(0.002)
    raise TimeoutError(f"no session after 30 s, with {size}")


def start(rounds: int) -> Iterator[Row]:
    """Time to serving, small and large in turn."""
    taken: dict[str, list[float]] = {"1GiB": [], "8GiB": []}
    for number in range(rounds + 1):
        for size, times in taken.items():
            took = serving_after(size)
            if number:
                times.append(took)
    note = "from the command to an open session"
    yield Row("start_1gib", "s", "median", {"1GiB": taken["1GiB"]}, note)
    yield Row("start_8gib", "s", "median", {"8GiB": taken["8GiB"]}, note)


def populate(size: int, threads: int, *, huge: bool) -> float | None:
    """GiB/s at which a new slab gets its pages; None if the kernel gives no huge ones."""
    fd = memory.make_memfd("bench", size)
    try:
        with Mapping(fd, size, writable=True) as mapping:
            asked = huge and memory.advise_hugepages(mapping.address, size)
            filler = memory.Populator(
                fd, mapping.address, [(0, size)], huge=asked, done=lambda _: None
            )
            begin = time.perf_counter()
            filler.run(threads)
            took = time.perf_counter() - begin
            if huge and not (asked and memory.hugepages_granted(mapping.address)):
                return None
    finally:
        os.close(fd)
    return size / GIB / took


def pages(rounds: int, size: int) -> Iterator[Row]:
    """Pages of a pool, 4 KiB and huge ones, with one thread and with one for each CPU."""
    cpus = len(os.sched_getaffinity(0))
    for huge in (False, True):
        for name, threads in (("one", 1), ("all", cpus)):
            row = f"pool_{'huge' if huge else '4k'}_{name}"
            rates = [populate(size, threads, huge=huge) for _ in range(rounds + 1)][1:]
            good = [rate for rate in rates if rate is not None]
            if len(good) == rounds:
                what = f"{size >> 20} MiB, {threads} threads"
                yield Row(row, "GiB/s", "median", {"rate": good}, what)
            else:
                setting = "/sys/kernel/mm/transparent_hugepage/shmem_enabled"
                why = f"the kernel gives shared memory no huge pages ({setting})"
                yield unavailable(row, "GiB/s", why)


def run(quick: bool) -> Iterator[Row]:
    """Rows of this file."""
    yield from at_rest(2 if quick else 5)
    yield from start(2 if quick else 7)
    yield from pages(1 if quick else 5, GIB // 4 if quick else GIB)
