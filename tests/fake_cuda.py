"""A CUDA driver without a GPU, behind ``kmesh.cuda.driver.Driver``.

GPU memory is a memfd: what is exported, imported and mapped is shared between processes and lives
as long as a file descriptor or a mapping of it, as with the real driver. It refuses what that one
refuses, and can be made to refuse more.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

from fake_cuda_gpus import MIB, NAMES, UUIDS, Gpu, error
from fake_cuda_memory import GRANULARITY, FakeMemory

from kmesh.errors import CudaError

__all__ = ["GRANULARITY", "MIB", "NAMES", "UUIDS", "FakeDriver", "Gpu", "refuse_nth"]


class FakeDriver(FakeMemory):
    """See ``kmesh.cuda.driver.Driver`` for the methods.

    Attributes:
        calls: names of the methods that were called.
        refuse: called with a method's name before it does anything; raises what it likes.
        relaxed: names of threads that have called ``relax_capture``.
        unsafe: (thread, method) of calls that would break a graph captured by another thread.
        launched: names of kernels that were started.

    Args:
        kernels: gives the kernels that encode, compiled for the CPU; None: there are none, and
            a launch fails.
    """

    def __init__(
        self,
        *gpus: Gpu,
        refuse: Callable[[str], None] | None = None,
        kernels: Callable[[], ctypes.CDLL] | None = None,
    ) -> None:
        super().__init__(gpus, refuse)
        self.launched: list[str] = []
        self._kernels = kernels
        self._streams: set[int] = set()
        self._modules: dict[int, bytes] = {}
        self._functions: dict[int, str] = {}

    def ledger(self) -> dict[str, int]:
        """How much of each thing is held; all zero when nothing is."""
        return {
            "contexts": sum(self._contexts.values()),
            "current": len(self._stack()),
            "handles": len(self._handles),
            "ranges": len(self._ranges),
            "mapped": sum(bool(r.handle_size) for r in self._ranges.values()),
            "registered": sum(self._registered.values()),
            "allocated": len(self._allocated),
            "streams": len(self._streams),
            "modules": len(self._modules),
        }

    def end(self) -> None:
        """What the end of the process would do: everything is given back."""
        self._streams.clear()
        self._modules.clear()
        super().end()

    # Kernels. What is started is done at once.

    def _number(self) -> int:
        self._last += 1
        return self._last

    def create_stream(self) -> int:
        self._need("cuStreamCreate")
        self._streams.add(self._number())
        return self._last

    def _stream(self, stream: int, call: str) -> None:
        self._need(call)
        if stream not in self._streams:
            raise error(call, 400)

    def destroy_stream(self, stream: int) -> None:
        self._stream(stream, "cuStreamDestroy_v2")
        self._streams.remove(stream)

    def synchronize(self, stream: int) -> None:
        self._stream(stream, "cuStreamSynchronize")

    def copy_async(self, target: int, source: int, size: int, stream: int) -> None:
        self._stream(stream, "cuMemcpyAsync")
        ctypes.memmove(target, source, size)

    def fill_async(self, address: int, value: int, size: int, stream: int) -> None:
        self._stream(stream, "cuMemsetD8Async")
        ctypes.memset(address, value, size)

    def load_module(self, image: bytes) -> int:
        self._need("cuModuleLoadData")
        if image[:4] != b"\x7fELF":
            raise error("cuModuleLoadData", 200)
        self._modules[self._number()] = image
        return self._last

    def unload_module(self, module: int) -> None:
        self._need("cuModuleUnload")
        if self._modules.pop(module, None) is None:
            raise error("cuModuleUnload", 400)

    def function(self, module: int, name: str) -> int:
        self._need("cuModuleGetFunction")
        if f".text.{name}\0".encode() not in self._modules[module]:
            raise error("cuModuleGetFunction", 500)
        self._functions[self._number()] = name
        return self._last

    def launch(
        self,
        function: int,
        blocks: int,
        threads: int,
        shared: int,
        stream: int,
        arguments: Sequence[int],
    ) -> None:
        self._stream(stream, "cuLaunchKernel")
        if self._kernels is None or not (blocks and threads):
            raise error("cuLaunchKernel", 801)
        job, told = arguments
        there = self._registered | {at: size for at, (_, size) in self._allocated.items()}
        # Only a kernel that tells something needs to know where.
        if not self._inside(job, 8, there) or (
            told and not self._inside(told, 8, self._registered)
        ):
            raise error("cuLaunchKernel", 1)
        name = self._functions[function]
        self.launched.append(name)
        self._kernels()[name](
            ctypes.c_void_p(job), ctypes.c_void_p(told), ctypes.c_uint32(blocks),
            ctypes.c_uint32(1),
        )  # fmt: skip


def refuse_nth(n: int) -> Callable[[str], None]:
    """Makes the n-th call (from 1) fail, and no other."""
    left = [n]

    def refuse(name: str) -> None:
        left[0] -= 1
        if not left[0]:
            raise CudaError(name, 999, NAMES[999])

    return refuse
