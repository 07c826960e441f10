"""Spans in one slab of either memory, and what makes recipes of them."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod

from fake_cuda import GRANULARITY, FakeDriver

from kmesh.cuda.device import Device
from kmesh.cuda.memory import DeviceMemory
from kmesh.layout import Shard
from kmesh_spand import ipc, jobmessages, messages
from kmesh_spand.gpurecipes import GpuRecipes
from kmesh_spand.gpustore import GpuStore
from kmesh_spand.hoststore import HostStore, Slab
from kmesh_spand.memory import make_memfd
from kmesh_spand.recipes import Recipes

SIZE = GRANULARITY
SHARD = Shard(0, 2, 0, 2)
#: A span of 64 tokens, whose heads have 64 elements of bfloat16.
LENGTH = 2 * 2 * 2 * 64 * 2 * 64
NAMESPACE = b"n" * 32


class Bench(ABC):
    """One slab with spans in it, and what works on them."""

    store: HostStore | GpuStore
    recipes: Recipes
    jobs = 0

    def put(self, name: bytes, offset: int, payload: bytes) -> jobmessages.Payload:
        root = self.store.put(0, offset, memoryview(payload))
        return jobmessages.Payload(name.ljust(32), 0, offset, len(payload), 3, root, 64, 0)

    @abstractmethod
    def damage(self, at: int, data: bytes) -> None:
        """Other bytes, behind everybody's back."""

    @abstractmethod
    def close(self) -> None: ...

    def encode(
        self,
        span: jobmessages.Payload,
        base: list[jobmessages.Payload],
        pieces: tuple[tuple[int, ...], ...] = (),
        frequencies: tuple[float, ...] = (),
    ) -> ipc.AnyMessage:
        self.jobs += 1
        return self.recipes.encode(
            jobmessages.Encode(
                self.jobs,
                span,
                NAMESPACE,
                "bfloat16",
                64,
                SHARD.code(),
                base,
                list(frequencies),
                False,
                list(pieces),  # type: ignore[arg-type]
            )
        )

    def verify(self, mirror: jobmessages.Payload) -> jobmessages.Verified:
        return self.recipes.facts(
            jobmessages.Verify(1, 0, mirror.offset, mirror.length, mirror.root, True)
        )


class HostBench(Bench):
    def __init__(self) -> None:
        fd = make_memfd("kmesh-test", SIZE)
        self.slab = Slab(fd, SIZE, None)
        self.store = HostStore({0: self.slab}, 0)
        self.recipes = Recipes(self.store)

    def damage(self, at: int, data: bytes) -> None:
        self.slab.mapping.view(at, len(data))[:] = data

    def close(self) -> None:
        # What was encoded last sees its base in the slab.
        self.recipes.let_go(0)
        self.slab.mapping.close()
        os.close(self.slab.fd)


class GpuBench(Bench):
    """On a GPU that is not there.

    Attributes:
        fallbacks: what was encoded by the processor.
    """

    recipes: GpuRecipes

    def __init__(self, driver: FakeDriver) -> None:
        self.driver = driver
        self.device = Device(driver, "0")
        self.memory = DeviceMemory.create(self.device, SIZE)
        self.store = GpuStore(self.device, {0: self.memory})
        self.fallbacks: list[messages.Fallback] = []
        self.recipes = GpuRecipes(self.device, self.store, self.fallbacks.append)

    def damage(self, at: int, data: bytes) -> None:
        self.memory.write(data, at)

    def close(self) -> None:
        self.recipes.close()
        self.memory.close()
        self.device.close()
        self.driver.end()
