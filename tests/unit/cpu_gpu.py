"""CuPy and a GPU, as far as restores need them: memory is the process's, streams do things at once,
and kernels are those that ``one_thread`` has compiled."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from one_thread import Range

from kmesh.kernels import batches
from kmesh.kernels import device as devices

NOT_READY = 600


@contextmanager
def instead_of_cupy(found: object, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What ``kmesh.kernels.device`` takes for CuPy; nothing compiled before or here is kept."""
    monkeypatch.setattr(devices, "cupy", lambda: found)
    # Also where there is a driver.
    monkeypatch.setattr(batches, "find", lambda: getattr(found, "batch", None))
    cached = (devices._function, devices._module, devices._most_shared)
    for cache in cached:
        cache.cache_clear()
    yield
    for cache in cached:
        cache.cache_clear()


class Pinned(np.ndarray):
    """Host memory that knows where it is."""

    @property
    def ptr(self) -> int:
        return int(self.ctypes.data)


class Gpu:
    """What ``kmesh.kernels.device.cupy`` gives.

    Attributes:
        launched: name, blocks and parts of each launch.
        batch: in place of the driver's call for many copies; None: it has none.
        copied: bytes of each copy to the GPU.
        pooled: of each allocation of pinned memory that its pool keeps.
    """

    def __init__(self, kernels: ctypes.CDLL, multiprocessors: int = 4) -> None:
        self._kernels = kernels
        self._memory: dict[int, np.ndarray] = {}
        self.batch: batches.Batch | None = None
        self.launched: list[tuple[str, int, tuple[int, int]]] = []
        self.copied: list[int] = []
        self.pooled: list[int] = []
        self.room = self.free = 1 << 40
        attributes = {
            "MultiProcessorCount": multiprocessors,
            "MaxSharedMemoryPerMultiprocessor": 200_000,
            "MaxSharedMemoryPerBlockOptin": 200_000,
        }
        runtime = SimpleNamespace(
            malloc=self._malloc, free=self._memory.pop, memcpyAsync=self._copy,
            hostAlloc=lambda size, _: self._kept(size), freeHost=self._memory.pop,
            getDevice=lambda: 0, streamCreateWithFlags=lambda _: 1, streamDestroy=lambda _: None,
            eventCreateWithFlags=lambda _: 1, eventDestroy=lambda _: None,
            eventRecord=lambda *_: None, eventSynchronize=lambda _: None, eventQuery=lambda _: 0,
            streamWaitEvent=lambda *_: None, streamSynchronize=lambda _: None,
            memGetInfo=lambda: (self.free, 1 << 40),
        )  # fmt: skip
        self.cuda = SimpleNamespace(
            runtime=runtime,
            driver=SimpleNamespace(launchKernel=self._launch),
            alloc_pinned_memory=self._pool,
            Device=lambda _: SimpleNamespace(attributes=attributes),
        )

    @property
    def held(self) -> int:
        """Allocations that were not given back."""
        return len(self._memory)

    def RawModule(self, **_: Any) -> Any:
        def function(name: str) -> Any:
            return SimpleNamespace(kernel=SimpleNamespace(ptr=name))

        return SimpleNamespace(get_function=function)

    def _malloc(self, size: int) -> int:
        if size > self.room:
            refused = RuntimeError("out of memory")
            refused.status = 2  # type: ignore[attr-defined]
            raise refused
        return self._kept(size)

    def _kept(self, size: int) -> int:
        memory = _aligned(size)
        self._memory[memory.ctypes.data] = memory
        return int(memory.ctypes.data)

    def _pool(self, size: int) -> Pinned:
        self.pooled.append(size)
        return _aligned(size).view(Pinned)

    def _copy(self, to: int, source: int, size: int, _kind: int, _stream: int) -> None:
        ctypes.memmove(to, source, size)
        self.copied.append(size)

    def together(self, copies: np.ndarray, stream: int) -> int:
        """A call of the driver for many copies, in whatever order."""
        for to, source, size in reversed(copies.tolist()):
            assert size > 0
            self._copy(to, source, size, 4, stream)
        return 0

    def _launch(self, name: str, blocks: int, *rest: Any) -> None:
        pointers = (ctypes.c_void_p * 3).from_address(rest[7])
        job, told = (ctypes.c_uint64.from_address(pointers[i]).value for i in (0, 1))
        parts = Range.from_address(pointers[2])
        self.launched.append((name, blocks, (parts.begin, parts.end)))
        self._kernels[name](
            ctypes.c_void_p(job), ctypes.c_void_p(told), ctypes.c_uint32(blocks), parts
        )


def _aligned(size: int) -> np.ndarray:
    memory = np.full(size + 256, 0xC7, dtype=np.uint8)
    return memory[-memory.ctypes.data % 256 :][:size]
