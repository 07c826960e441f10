"""Spans in a GPU's slabs as the device worker writes, verifies and wipes them."""

from __future__ import annotations

import itertools
import mmap
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from fake_cuda import GRANULARITY, FakeDriver, Gpu
from hypothesis import given, settings
from hypothesis import strategies as st

from kmesh import _host, layout
from kmesh.cuda.device import Device
from kmesh.cuda.memory import DeviceMemory
from kmesh.dmabuf import NotExported
from kmesh.errors import CudaError
from kmesh.handles import HandleRefusal
from kmesh.layout import TILE_BYTES
from kmesh.mapping import Mapping
from kmesh_spand import gpustore
from kmesh_spand.gpustore import Copiers, GpuStore
from kmesh_spand.memory import make_memfd

SIZE = 4 * GRANULARITY
CAPACITY = layout.slab_capacity(SIZE)
SUMS = layout.sums_offset(SIZE)


class Place:
    """One slab, a store over it, and staging."""

    def __init__(self, device: Device) -> None:
        self.memory = DeviceMemory.create(device, SIZE)
        self.store = GpuStore(device, {7: self.memory})
        fd = make_memfd("staging", SIZE)
        self.staging = Mapping(fd, SIZE, writable=True)
        os.close(fd)

    def close(self) -> None:
        self.memory.close()
        self.staging.close()

    def put(self, payload: bytes, offset: int = 0, begin: int = 0) -> int:
        self.staging.view(begin, len(payload))[:] = payload
        return self.store.copy(7, offset, self.staging, begin, len(payload))


@pytest.fixture(scope="module")
def place() -> Iterator[Place]:
    fake = FakeDriver()
    with Device(fake, "0") as device:
        made = Place(device)
        yield made
        made.close()
    fake.end()


def root_of(payload: bytes) -> tuple[int, bytes]:
    """Root and tile sums, by the host's own code."""
    sums = bytearray(8 * layout.tiles(len(payload)))
    root = _host.tile_sums(_host.address(payload), len(payload), _host.address(sums))
    return root, bytes(sums)


@settings(max_examples=30, deadline=None)
@given(
    length=st.integers(1, 5 * TILE_BYTES + 3) | st.just(gpustore._BUFFER_BYTES + 12_345),
    tile=st.integers(0, 20),
    begin=st.integers(0, 100).map(lambda n: 64 * n),
)
def test_what_is_copied_is_there_with_its_sums(
    place: Place, length: int, tile: int, begin: int
) -> None:
    payload, offset = os.urandom(length), tile * TILE_BYTES
    root, sums = root_of(payload)
    assert place.put(payload, offset, begin) & (1 << 64) - 1 == root & (1 << 64) - 1
    assert place.memory.read(offset, length) == payload
    assert place.memory.read(SUMS + 8 * tile, len(sums)) == sums
    assert place.store.verify(7, offset, length, root)
    assert not place.store.verify(7, offset, length, root ^ 1)
    for at in {0, length // 2, length - 1}:
        byte = place.memory.read(offset + at, 1)[0]
        place.memory.write(bytes([byte ^ 16]), offset + at)
        assert not place.store.verify(7, offset, length, root)
        place.memory.write(bytes([byte]), offset + at)
    assert place.store.verify(7, offset, length, root)


def test_old_sums_are_gone_before_a_new_byte_is_there(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.put(b"old" * 30_000)
    old = place.memory.read(SUMS, 16)
    seen: list[tuple[bool, bytes]] = []
    write = DeviceMemory.write

    def watched(memory: DeviceMemory, data: bytes, offset: int = 0) -> None:
        seen.append((offset >= SUMS, memory.read(SUMS, 16)))
        write(memory, data, offset)

    monkeypatch.setattr(DeviceMemory, "write", watched)
    place.put(b"new" * 30_000)
    inverted = bytes(byte ^ 0xFF for byte in old)
    assert seen == [(True, old), (False, inverted), (True, inverted)]
    assert place.memory.read(SUMS, 16) == root_of(b"new" * 30_000)[1]


def test_what_changes_in_staging_meanwhile_changes_nothing(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = _host.copy_with_sums

    def racing(target: int, source: int, length: int, sums: int) -> int:
        root = inner(target, source, length, sums)
        place.staging.view(0, length)[:] = bytes(length)
        return root

    monkeypatch.setattr(_host, "copy_with_sums", racing)
    payload = os.urandom(100_000)
    root = place.put(payload)
    assert place.memory.read(0, len(payload)) == payload
    assert place.store.verify(7, 0, len(payload), root)


@pytest.mark.parametrize(
    ("offset", "length"),
    [(-TILE_BYTES, 1), (1, 1), (0, 0), (0, -1), (CAPACITY, 1), (0, CAPACITY + 1)],
)
def test_ranges_that_no_span_can_have_are_refused(place: Place, offset: int, length: int) -> None:
    with pytest.raises(ValueError, match=r"no span|outside the slab"):
        place.store.copy(7, offset, place.staging, 0, length)
    with pytest.raises(ValueError, match=r"no span|outside the slab"):
        place.store.verify(7, offset, length, 0)


def test_sources_outside_of_staging_and_unknown_slabs_are_refused(place: Place) -> None:
    for begin, length in ((-1, 1), (SIZE - 5, 6)):
        with pytest.raises(ValueError, match="outside of"):
            place.store.copy(7, 0, place.staging, begin, length)
    with pytest.raises(ValueError, match="no slab 8 here"):
        place.store.wipe(8)


def test_a_wipe_leaves_nothing(place: Place) -> None:
    place.put(os.urandom(mmap.PAGESIZE), TILE_BYTES)
    place.store.wipe(7)
    assert place.memory.read(0, SIZE) == bytes(SIZE)


@pytest.mark.parametrize("lives", [True, False])
def test_an_export_that_is_refused_is_told_from_a_context_that_is_gone(lives: bool) -> None:
    fake = FakeDriver(Gpu(attributes={}))
    with Device(fake, "0") as device:
        made = Place(device)
        fd = made.store.export(7, 0, 4096)
        os.close(fd)

        def refuse(name: str) -> None:
            if name == "dma_buf" or (name == "memory_info" and not lives):
                raise CudaError("cuMemGetHandleForAddressRange", 719, "CUDA_ERROR_LAUNCH_FAILED")

        fake.refuse = refuse
        # The worker looks at the one and goes on; by the other it ends.
        with pytest.raises(NotExported if lives else CudaError, match="LAUNCH_FAILED") as failed:
            made.store.export(7, 0, 4096)
        if isinstance(failed.value, NotExported):
            assert failed.value.refusal is HandleRefusal.NO_DEVICE
        fake.refuse = lambda name: None
        made.close()
    fake.end()


def test_as_many_are_copied_at_a_time_as_there_are_stores(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each through a buffer of its own, and one more than that after another one."""
    device = place.store._device
    together, write, calls = threading.Barrier(2), DeviceMemory.write, itertools.count()

    def waits(memory: DeviceMemory, *rest: object) -> None:
        # The first write waits until another copy has begun its own.
        if next(calls) < 2:
            together.wait(20)
        write(memory, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(DeviceMemory, "write", waits)
    copiers = Copiers(GpuStore(device, {7: place.memory}) for _ in range(2))
    payloads = [os.urandom(3 * TILE_BYTES + number) for number in range(12)]
    step = 4 * TILE_BYTES

    def copied(number: int) -> int:
        begin = number % 4 * step
        return copiers.copy(7, number * step, place.staging, begin, len(payloads[number]))

    for first in range(0, len(payloads), 4):
        numbers = range(first, first + 4)
        for number in numbers:
            place.staging.view(number % 4 * step, len(payloads[number]))[:] = payloads[number]
        with ThreadPoolExecutor(3) as crew:
            roots = list(crew.map(copied, numbers))
        for number, root in zip(numbers, roots, strict=True):
            wanted, sums = root_of(payloads[number])
            assert (root - wanted) % (1 << 64) == 0
            assert place.memory.read(number * step, len(payloads[number])) == payloads[number]
            assert place.memory.read(SUMS + 8 * 4 * number, len(sums)) == sums
    with pytest.raises(ValueError, match="no slab 8"):
        copiers.copy(8, 0, place.staging, 0, 1)
    # One that failed is there for the next copy.
    assert copiers._idle.qsize() == 2
