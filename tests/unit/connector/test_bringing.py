"""Recipes' tables as they are brought to the host: of any size and number, while a GPU hangs."""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from codec.codec_cases import Geometry, recovered
from fake_gpu_streams import FakeGpu
from mini_engine import WAIT, until

from kmesh.codec import Encoder, ManyTables
from kmesh.codec.many import tables_bytes
from kmesh.errors import CudaError, DeadlineExceeded
from kmesh.layout import TILE_BYTES
from kmesh_vllm import bringing
from kmesh_vllm.bringing import Bringer


class Recipes:
    """Recipes that lie on tiles; the one with ``anew`` has many ops, and so large tables."""

    def __init__(self, count: int, large: int | None = None) -> None:
        self.files = []
        for seed in range(count):
            tokens = 500 if seed == large else 40
            family = recovered(
                Geometry(dtype="bfloat16", layers=1, heads=1, head_dim=4), seed,
                segments=[tokens], own=[3, 2], anew=0.4,
            )  # fmt: skip
            encoder = Encoder(family.base, family.rotary)
            self.files.append(encoder.encode(family.member, family.state, family.provenance).data)
        room = np.zeros((3 * count + 1) * TILE_BYTES, np.uint8)
        self._memory = room[-room.ctypes.data % TILE_BYTES :]
        self.lengths = np.array([len(file) for file in self.files], np.uint64)
        begins = np.arange(count) * 3 * TILE_BYTES
        for begin, file in zip(begins.tolist(), self.files, strict=True):
            self._memory[begin : begin + len(file)] = np.frombuffer(file, np.uint8)
        self.addresses = begins.astype(np.uint64) + np.uint64(self._memory.ctypes.data)


class Loads:
    """Numbers of loads, as a mover counts them."""

    def __init__(self) -> None:
        self.open: set[int] = set()
        self._last = 0

    def begin(self) -> int:
        self._last += 1
        self.open.add(self._last)
        return self._last


@contextmanager
def bringer(gpu: FakeGpu) -> Iterator[tuple[Bringer, Loads]]:
    loads = Loads()
    made = Bringer(gpu, loads.begin, loads.open.remove)
    yield made, loads
    made.close()
    assert not gpu.driver.ledger()["registered"]
    gpu.close()


def same(recipes: Recipes, made: Bringer) -> None:
    """Out of the copies comes what comes out of the recipes."""
    brought = made.tables(recipes.addresses, recipes.lengths)
    assert not np.isin(brought.addresses, recipes.addresses).any()
    found = ManyTables(brought.addresses, recipes.lengths)
    expected = ManyTables(recipes.addresses, recipes.lengths)
    assert (found.heads == expected.heads).all()
    assert found.wrong == expected.wrong
    assert found.unsupported == expected.unsupported
    sizes = tables_bytes(recipes.addresses, recipes.lengths).tolist()
    for one, other, size in zip(found.addresses, expected.addresses, sizes, strict=True):
        assert ctypes.string_at(int(one), size) == ctypes.string_at(int(other), size)


def test_tables_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large ones take a second turn, and none once that is known."""
    recipes, gpu = Recipes(5, large=2), FakeGpu()
    with bringer(gpu) as (made, loads):
        same(recipes, made)
        assert gpu.fetched == [5, 1]
        same(recipes, made)
        assert gpu.fetched == [5, 1, 5]
        monkeypatch.setattr(bringing, "_LAUNCH_BYTES", 20000)
        same(recipes, made)
        assert sum(gpu.fetched[3:]) == 5
        assert len(gpu.fetched) > 4
        assert not loads.open


@pytest.mark.parametrize("length", [0, 1, 255, 256, 300])
def test_what_is_no_recipe_is_found_wrong(length: int) -> None:
    """Of any length; a head that lies reaches nothing but the range."""
    recipes, gpu = Recipes(2), FakeGpu()
    recipes.lengths[0] = length
    recipes._memory[3 * TILE_BYTES + 36 : 3 * TILE_BYTES + 60] = 0xFF
    with bringer(gpu) as (made, _):
        brought = made.tables(recipes.addresses, recipes.lengths)
        assert set(ManyTables(brought.addresses, recipes.lengths).wrong) == {0, 1}


def test_while_the_gpu_hangs_nobody_waits_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it reads is kept until it goes on; other threads are told at once."""
    recipes, gpu = Recipes(2), FakeGpu()
    monkeypatch.setattr(bringing, "_DEVICE_WAIT", 0.01)
    with bringer(gpu) as (made, loads):
        for begin in (
            lambda: made.tables(recipes.addresses, recipes.lengths),
            lambda: made.data(int(recipes.addresses[0]), 512),
        ):
            gpu.held = True
            with pytest.raises(DeadlineExceeded, match="does not end"):
                begin()
            assert made.stuck
            assert len(loads.open) == 1
            asked = len(gpu.fetched)
            with pytest.raises(DeadlineExceeded, match="still hangs"):
                made.tables(recipes.addresses, recipes.lengths)
            assert len(gpu.fetched) == asked
            gpu.held = False
            gpu.run()
            assert not made.stuck
            same(recipes, made)
            assert not loads.open
            assert not gpu.unread
        assert made.data(int(recipes.addresses[0]), 512) == recipes.files[0][:512]


def test_data_of_any_size_comes_through_memory_that_the_gpu_writes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bringing, "_LAUNCH_BYTES", 2 * mmap.PAGESIZE)
    memory, gpu = np.random.default_rng(1).integers(0, 256, 70000, np.uint8), FakeGpu()
    with bringer(gpu) as (made, loads):
        for begin, size in ((0, 1), (5, 8192), (0, 70000), (69000, 1000), (3, 8193)):
            found = made.data(memory.ctypes.data + begin, size)
            assert found == memory[begin : begin + size].tobytes()
        assert gpu.driver.ledger()["registered"] == 2 * mmap.PAGESIZE
        assert not loads.open


def test_data_without_memory_for_it() -> None:
    """Nothing is left of a turn that had none; the next one may have some."""
    memory, gpu = np.arange(100, dtype=np.uint8), FakeGpu()

    def refuse(name: str) -> None:
        if name == "register":
            raise CudaError("cuMemHostRegister_v2", 2, "CUDA_ERROR_OUT_OF_MEMORY")

    with bringer(gpu) as (made, loads):
        gpu.driver.refuse = refuse
        with pytest.raises(CudaError, match="OUT_OF_MEMORY"):
            made.data(memory.ctypes.data, 100)
        assert not loads.open
        gpu.driver.refuse = None
        assert made.data(memory.ctypes.data, 100) == memory.tobytes()


def test_threads_take_turns() -> None:
    recipes, gpu = Recipes(3), FakeGpu()
    wrong: list[BaseException] = []
    with bringer(gpu) as (made, loads):

        def one() -> None:
            try:
                for _ in range(20):
                    same(recipes, made)
            except BaseException as error:
                wrong.append(error)

        threads = [threading.Thread(target=one) for _ in range(3)]
        for thread in threads:
            thread.start()
        until(lambda: not any(thread.is_alive() for thread in threads), WAIT)
        assert not wrong
        assert not loads.open
        assert gpu.fetched == [3] * 60
