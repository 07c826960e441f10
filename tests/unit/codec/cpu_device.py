"""A device whose kernels are run by the CPU, and whose memory is the CPU's."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self

import numpy as np


class Memory:
    """What is allocated; whatever lies between two allocations is nobody's.

    Attributes:
        held: by address.
    """

    def __init__(self) -> None:
        self.held: dict[int, np.ndarray] = {}

    def malloc(self, size: int) -> int:
        memory = np.full(size + 512, 0xC7, dtype=np.uint8)
        address = -(-memory.ctypes.data // 256) * 256
        self.held[address] = memory
        return address

    def free(self, address: int) -> None:
        del self.held[address]

    def memcpy(self, to: int, source: int, size: int, _kind: int) -> None:
        ctypes.memmove(to, source, size)

    def memsetAsync(self, to: int, value: int, size: int, _stream: int) -> None:
        ctypes.memset(to, value, size)

    def memcpyAsync(self, to: int, source: int, size: int, kind: int, _stream: int) -> None:
        self.memcpy(to, source, size, kind)


class Slot:
    """As ``kmesh.kernels.device.Slot``. Job and results are each in a place of their own."""

    def __init__(self, runtime: Memory) -> None:
        self._runtime = runtime
        self._host = self._told = np.zeros(0, dtype=np.uint8)
        self.job = self.host = self.told = 0

    def reserve(self, size: int) -> np.ndarray:
        if size > len(self._host):
            self._host = np.full(size, 0xD3, dtype=np.uint8)
            self.host = self._host.ctypes.data
            if self.job:
                self._runtime.free(self.job)
            self.job = self._runtime.malloc(size)
        return self._host

    def upload(self, size: int, _stream: int) -> None:
        ctypes.memmove(self.job, self.host, size)

    def expect(self, words: int) -> None:
        self._told = np.full(8 * (words // 2 + 1), 0xFF, dtype=np.uint8)
        self.told = self._told.ctypes.data

    def results(self, count: int, dtype: Any) -> np.ndarray:
        return self._told.view(dtype)[:count]

    def record(self, _stream: int) -> None:
        pass

    def wait(self) -> None:
        pass


class CpuDevice:
    """As ``kmesh.kernels.device.Device``, as far as encoding needs it.

    Args:
        threads: of a block, each of which stands for a warp.

    Attributes:
        before: called with each kernel's name before it runs.
        busy: slots of jobs under way.
    """

    def __init__(self, library: ctypes.CDLL, multiprocessors: int = 1, threads: int = 1) -> None:
        self._library, self._threads = library, threads
        self.runtime = Memory()
        self.multiprocessors = multiprocessors
        self.before: Callable[[str], None] = lambda _name: None
        self.busy: list[Slot] = []
        self._current = False

    def __enter__(self) -> Self:
        assert not self._current, "the device before would be forgotten"
        self._current = True
        return self

    def __exit__(self, *_: object) -> None:
        self._current = False

    @contextmanager
    def job(self, stream: int) -> Iterator[Slot]:
        slot = Slot(self.runtime)
        self.busy.append(slot)
        try:
            yield slot
        except BaseException:
            self.release(slot)
            raise

    def release(self, slot: Slot) -> None:
        self.busy.remove(slot)
        if slot.job:
            self.runtime.free(slot.job)

    def launch(
        self, program: str, name: str, blocks: int, shared: int, slot: Slot, parts: None,
        stream: int,
    ) -> None:  # fmt: skip
        assert (program, shared, parts) == ("encode", 0, None)
        assert self._current
        self.before(name)
        self._library[name](
            ctypes.c_void_p(slot.job), ctypes.c_void_p(slot.told), ctypes.c_uint32(blocks),
            ctypes.c_uint32(self._threads),
        )  # fmt: skip
