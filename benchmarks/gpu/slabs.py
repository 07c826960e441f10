"""What an engine pays for the daemon's memory, and what waits while that grows."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator

import grpc

from benchmarks.results import Row, unavailable
from benchmarks.spand import Spand, serve
from kmesh.calls import ReserveBatch
from kmesh.cuda.device import Device
from kmesh.cuda.memory import Registration
from kmesh.cuda.slabs import DeviceSlabs
from kmesh.errors import KMeshError
from kmesh.keys import Namespace
from kmesh.layout import TILE_BYTES, Shard
from kmesh.mapping import Mapping
from kmesh.session import Role
from kmesh.store import put_spans
from kmesh.v1 import common_pb2
from kmesh_spand import memory

GIB = 1 << 30
_SETTING = "/sys/kernel/mm/transparent_hugepage/shmem_enabled"
_NO_HUGE = f"the kernel gives shared memory no huge pages ({_SETTING} says {{said}})"
_START_SECONDS = 120.0
_GROWING = common_pb2.REASON_NOT_READY
_NAMESPACE = Namespace("bench", "w", "bfloat16", layers=1, kv_heads=1, head_dim=128)


def no_huge_pages() -> str:
    """Why this machine has no huge pages for slabs."""
    try:
        with open(_SETTING) as setting:
            said = setting.read().strip()
    except OSError as wrong:
        said = str(wrong)
    return _NO_HUGE.format(said=said)


def registration(device: Device, rounds: int, size: int = GIB) -> Iterator[Row]:
    """What an importer pays once for a slab of host memory."""
    for name, huge in (("register_4k", False), ("register_huge", True)):
        taken = [_registered(device, size, huge) for _ in range(rounds)]
        series = {
            "register": [1e3 * one[1] for one in taken if one],
            "populate": [1e3 * one[0] for one in taken if one],
        }
        if not all(taken):
            yield unavailable(name, "ms", no_huge_pages())
            continue
        what = f"{size >> 20} MiB, mapped to be read, its pages asked for, registered read-only"
        yield Row(name, "ms", "median", series, what)


def _registered(device: Device, size: int, huge: bool) -> tuple[float, float] | None:
    """Seconds to put pages behind a fresh memfd as the daemon does, and to register a mapping as
    engines do; None: the kernel gave no huge pages."""
    fd = memory.make_memfd("bench", size)
    try:
        with Mapping(fd, size, writable=True) as mapping:
            asked = memory.place_pages(mapping.address, size, huge=huge, node=-1)
            filler = memory.Populator(
                fd, mapping.address, [(0, size)], huge=asked, done=lambda _: None
            )
            begin = time.perf_counter()
            filler.run(len(os.sched_getaffinity(0)))
            filled = time.perf_counter() - begin
            if huge and not (asked and memory.hugepages_granted(mapping.address)):
                return None
        with Mapping(fd, size) as mapping:
            begin = time.perf_counter()
            seen = Registration(device, mapping.address, size)
            took = time.perf_counter() - begin
            seen.close()
            return filled, took
    finally:
        os.close(fd)


def imports(device: Device) -> Iterator[Row]:
    """Slabs on the GPU, of a daemon: from asking for one until the GPU reads it here."""
    slabs = {"gpu": device.uuid, "gpu_memory": "1GiB", "gpu_slab_size": "64MiB"}
    with serve(host_memory="64MiB", **slabs) as spand, spand.connect() as session:
        numbers = [slab.slab for slab in spand.status().slabs if slab.device]
        with DeviceSlabs(session, device) as found:
            taken = []
            for number in numbers:
                begin = time.perf_counter()
                found.slab(number)
                taken.append(1e3 * (time.perf_counter() - begin))
    # With the first one comes the proof that its kind works.
    what = "64 MiB of GPU memory: the daemon's answer, import and mapping"
    yield Row("import_slab", "ms", "median", {"import": taken[1:], "first": taken[:1]}, what)


def pool(rounds: int, mib: int = 8 << 10) -> Iterator[Row]:
    """How long a daemon takes until all of its host memory is there, for each GiB of it."""
    for name, pages in (("pool_ready_4k", "off"), ("pool_ready_huge", "auto")):
        taken, granted = [], True
        for _ in range(rounds):
            begin = time.perf_counter()
            with serve(wait=False, host_memory=f"{mib}MiB", hugepages=pages) as spand:
                taken.append(1e3 * (_grown(spand) - begin) * 1024 / mib)
                granted &= all(slab.hugepages for slab in spand.status().slabs)
        if pages == "auto" and not granted:
            yield unavailable(name, "ms", no_huge_pages())
            continue
        what = f"a GiB of {mib / 1024:g}, from the daemon's command until all is there"
        yield Row(name, "ms", "median", {"pool": taken}, what)


def starts(rounds: int, mib: int = 32 << 10) -> Iterator[Row]:
    """What an engine waits for the daemon at its start, while the pool grows and when it is there.

    That is two sessions with the index, staging, a first span stored and leased.
    """
    beside: list[float] = []
    with serve(wait=False, host_memory=f"{mib}MiB", staging_memory="1GiB") as spand:
        _serves(spand)
        while len(beside) < rounds and not _whole(spand):
            beside.append(1e3 * _started(spand, len(beside)))
        if _whole(spand) and beside:
            # It may have begun in a pool that grew, and ended in one that did not.
            beside.pop()
        spand.settle()
        after = [1e3 * _started(spand, rounds + i) for i in range(rounds)]
    name, what = "start_beside_growth", "an engine's first calls, beside growth over after it"
    if not beside:
        yield unavailable(name, "ratio", f"{mib} MiB were there before an engine had started")
        return
    series = {"growing": beside, "whole": after}
    yield Row(name, "ratio", "median a / median b", series, f"{what}; a pool of {mib} MiB")


def _started(spand: Spand, number: int) -> float:
    begin = time.perf_counter()
    key = (b"%d" % number).ljust(32, b"\0")
    shard = Shard(0, 1, 0, 1)
    with (
        spand.connect(Role.SCHEDULER, f"engine-{number}", _NAMESPACE) as asking,
        spand.connect(Role.WORKER, f"engine-{number}", _NAMESPACE) as storing,
    ):
        batch = ReserveBatch(_NAMESPACE.digest(), shard, key, [64], [0], [TILE_BYTES])
        staging = storing.staging(64 << 20)
        # As long as no page is there, nothing has room.
        while (reasons := put_spans(storing, staging, batch, [bytes(TILE_BYTES)])) == [_GROWING]:
            time.sleep(0.001)
        if any(reasons):
            raise RuntimeError(f"a span was not stored: {reasons}")
        lease = asking.acquire(key, [shard])
        if not lease.hits:
            raise RuntimeError("a span that was just stored is not there")
        lease.release()
        return time.perf_counter() - begin


def _serves(spand: Spand) -> None:
    until = time.monotonic() + _START_SECONDS
    while time.monotonic() < until:
        with contextlib.suppress(KMeshError):
            spand.connect().close()
            return
        time.sleep(0.002)
    raise TimeoutError("the daemon does not serve")


def _whole(spand: Spand) -> bool:
    try:
        slabs = spand.status().slabs
    except grpc.RpcError:
        # It answers sessions first.
        return False
    return bool(slabs) and all(slab.populated >= slab.capacity for slab in slabs)


def _grown(spand: Spand) -> float:
    """When all memory of a daemon that has just been started is there."""
    _serves(spand)
    until = time.monotonic() + _START_SECONDS
    while not _whole(spand):
        if time.monotonic() > until:
            raise TimeoutError("the pool does not grow")
        time.sleep(0.01)
    return time.perf_counter()
