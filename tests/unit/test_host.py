"""Tile sums, roots and copies, against slow references in Python."""

from __future__ import annotations

import mmap
import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_reference import numbers, summed

from kmesh import _host
from kmesh.layout import TILE_BYTES, tiles

U64 = 2**64 - 1


def slow_sums(payload: bytes) -> list[int]:
    sums = []
    for begin in range(0, len(payload), TILE_BYTES):
        tile = payload[begin : begin + TILE_BYTES]
        tile += bytes(-len(tile) % 4)
        sum_ = 0
        for i in range(0, len(tile), 4):
            sum_ += int.from_bytes(tile[i : i + 4], "little", signed=True) * (i // 2 + 1)
        sums.append(sum_ & U64)
    return sums


def slow_root(sums: list[int]) -> int:
    root = 0
    for t, sum_ in enumerate(sums):
        x = (sum_ + (t + 1) * 0x9E3779B97F4A7C15) & U64
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & U64
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & U64
        root += x ^ (x >> 31)
    return root & U64


LENGTHS = [1, 2, 3, 4, 5, 63, 64, 65, 127, 4096, 65535, 65536, 65537, 65600, 131072, 150001]
FILLS = {
    "random": lambda n: numbers(n, n),
    "ones": lambda n: np.full(n, 255, dtype=np.uint8),
    "lowest": lambda n: np.resize(np.array([0, 0, 0, 128], dtype=np.uint8), n),
    "highest": lambda n: np.resize(np.array([255, 255, 255, 127], dtype=np.uint8), n),
}


@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("length", LENGTHS)
def test_sums_and_roots_are_the_documented_function(length: int, fill: str) -> None:
    payload = FILLS[fill](length)
    expected = slow_sums(payload.tobytes())
    root, sums = summed(payload)
    assert sums.tolist() == expected
    assert root == slow_root(expected)
    assert _host.fold(sums.ctypes.data, len(sums)) == root
    assert _host.verify(payload.ctypes.data, length, sums.ctypes.data, root)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize(("to", "of"), [(0, 0), (16, 3), (3, 16), (1, 1)])
def test_copy_with_sums_copies_and_sums(length: int, to: int, of: int) -> None:
    source = numbers(1, length + 32)
    target = np.full(length + 32, 0xEE, dtype=np.uint8)
    sums = np.zeros(tiles(length), dtype=np.uint64)
    root = _host.copy_with_sums(
        target.ctypes.data + to, source.ctypes.data + of, length, sums.ctypes.data
    )
    assert target[to : to + length].tobytes() == source[of : of + length].tobytes()
    assert (target[:to] == 0xEE).all()
    assert (target[to + length :] == 0xEE).all()
    expected = slow_sums(source[of : of + length].tobytes())
    assert (root, sums.tolist()) == (slow_root(expected), expected)


def test_copy_with_sums_sums_what_it_wrote_while_the_source_changes() -> None:
    source, target = numbers(1, 4 << 20), np.zeros(4 << 20, dtype=np.uint8)
    sums = np.zeros(tiles(len(source)), dtype=np.uint64)
    others = [numbers(2, len(source)), numbers(3, len(source))]
    done = threading.Event()

    def churn() -> None:
        while not done.is_set():
            for other in others:
                np.copyto(source, other)

    writer = threading.Thread(target=churn)
    writer.start()
    mixed = 0
    try:
        for _ in range(60):
            root = _host.copy_with_sums(
                target.ctypes.data, source.ctypes.data, len(source), sums.ctypes.data
            )
            assert _host.verify(target.ctypes.data, len(target), sums.ctypes.data, root)
            mixed += not any((target == other).all() for other in others)
    finally:
        done.set()
        writer.join()
    assert mixed, "the source never changed during a copy: nothing was shown"


@settings(max_examples=300)
@given(
    length=st.integers(1, 140_000),
    flips=st.lists(st.integers(0, 2**40), min_size=1, max_size=2, unique=True),
    fill=st.sampled_from(sorted(FILLS)),
)
def test_one_or_two_flipped_bits_are_seen(length: int, flips: list[int], fill: str) -> None:
    payload = FILLS[fill](length).copy()
    root, sums = summed(payload)
    bits = {flip % (8 * length) for flip in flips}
    for bit in bits:
        payload[bit // 8] ^= 1 << bit % 8
    changed_root, changed = summed(payload)
    assert {int(t) for t in np.flatnonzero(changed != sums)} == {
        bit // 8 // TILE_BYTES for bit in bits
    }
    assert changed_root != root
    assert not _host.verify(payload.ctypes.data, length, sums.ctypes.data, root)


def test_verify_wants_payload_sums_and_root_to_agree() -> None:
    payload = numbers(5, 200_000)
    root, sums = summed(payload)
    arguments = payload.ctypes.data, len(payload), sums.ctypes.data
    assert _host.verify(*arguments, root)
    assert not _host.verify(*arguments, root ^ 1)
    # Tiles that change places fold to another root.
    swapped = np.ascontiguousarray(sums[[1, 0, 2, 3]])
    assert _host.fold(swapped.ctypes.data, 4) != root
    sums[3] += 1
    assert not _host.verify(*arguments, root)


def test_bulk_calls_leave_the_gil_to_others() -> None:
    """While one call sums gigabytes of untouched memory, another thread's Python runs."""
    size = 1 << 31
    memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    sums = np.zeros(tiles(size), dtype=np.uint64)
    address = _host.address(memory)

    def runs() -> bool:
        call: list[float] = []

        def work() -> None:
            call.append(time.monotonic())
            _host.tile_sums(address, size, sums.ctypes.data)
            call.append(time.monotonic())

        thread = threading.Thread(target=work)
        thread.start()
        seen = []
        while thread.is_alive():
            seen.append(time.monotonic())
        thread.join()
        begin, end = call
        middle = [t for t in seen if begin + 0.2 * (end - begin) < t < end - 0.2 * (end - begin)]
        return len(middle) > 10

    # The kernel may let this thread wait all the while, but not each time.
    assert any(runs() for _ in range(10))
    memory.close()


def test_addresses_must_be_addresses() -> None:
    for bad in (-1, 1 << 64):
        with pytest.raises(OverflowError):
            _host.fold(bad, 1)
    with pytest.raises(TypeError):
        _host.fold(1.5, 1)
    block = bytes(100)
    assert _host.address(memoryview(block)[7:]) == _host.address(block) + 7


def test_copy_with_sums_takes_back_every_sum_before_a_byte_changes() -> None:
    # The source is the sums themselves, so that what is copied is what they were by then.
    sums = np.arange(1, 2 * TILE_BYTES // 8 + 1, dtype=np.uint64)
    before = sums.copy()
    copied = np.zeros_like(sums)
    _host.copy_with_sums(copied.ctypes.data, sums.ctypes.data, sums.nbytes, sums.ctypes.data)
    assert copied[:2].tolist() == (~before[:2]).tolist()
    assert copied[2:].tolist() == before[2:].tolist()
