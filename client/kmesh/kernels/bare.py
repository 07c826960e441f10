"""One GPU through the CUDA driver alone, for processes without CuPy: compiled kernels, launches,
and the memory of jobs under way."""

from __future__ import annotations

import mmap
from contextlib import AbstractContextManager, suppress
from typing import Any, Self

import numpy as np

from kmesh import _host
from kmesh.cuda import device as cuda
from kmesh.cuda.driver import Attribute
from kmesh.cuda.memory import Registration
from kmesh.cuda.nvrtc import Compiler
from kmesh.errors import CudaError, UnsupportedError
from kmesh.kernels import sources
from kmesh.kernels.device import THREADS, Launcher, Slot


class BareDevice(Launcher):
    """As ``kmesh.kernels.device.Device``, for programs whose kernels take no parts.

    Attributes:
        stream: of its own, for jobs.

    Args:
        device: the GPU; stays the caller's, and must outlive this.

    Raises:
        UnsupportedError: there is no compiler, or it can't make code for this GPU.
        CudaError: the driver refuses.
    """

    def __init__(self, device: cuda.Device) -> None:
        self._device = device
        driver, ordinal = device.driver, device.ordinal
        major, minor = (
            driver.attribute(ordinal, which)
            for which in (Attribute.COMPUTE_MAJOR, Attribute.COMPUTE_MINOR)
        )
        self._options = (*sources.OPTIONS, f"--gpu-architecture=sm_{major}{minor}")
        self._compiler = Compiler(driver.version())
        self._unloaded: dict[str, bytes] = {}
        self._modules: dict[str, int] = {}
        self._functions: dict[tuple[str, str], int] = {}
        self._entered: list[AbstractContextManager[object]] = []
        self.multiprocessors = driver.attribute(ordinal, Attribute.MULTIPROCESSORS)
        with device.current():
            self.stream = driver.create_stream()
        super().__init__(_Runtime(device, self.stream), self._pinned)

    def prepare(self, program: str) -> None:
        """Compiles a program and loads it, if that was not done yet: some seconds. What is
        compiled and could not be loaded is kept for the next call.

        Raises:
            UnsupportedError, CudaError: as for this object.
        """
        if program in self._modules:
            return
        code = self._unloaded.get(program)
        if code is None:
            code = self._compiler.compile(sources.text(program), f"{program}.cu", self._options)
            self._unloaded[program] = code
        with self._device.current() as driver:
            self._modules[program] = driver.load_module(code)
        del self._unloaded[program]

    def launch(
        self,
        program: str,
        name: str,
        blocks: int,
        shared: int,
        slot: Slot,
        parts: tuple[int, int] | None,
        stream: int,
        threads: int = 0,
        told: int = 0,
    ) -> None:
        if parts is not None:
            raise ValueError(f"{name} takes parts")
        self.prepare(program)
        driver = self._device.driver
        function = self._functions.get((program, name))
        if function is None:
            function = driver.function(self._modules[program], name)
            self._functions[program, name] = function
        driver.launch(
            function, blocks, threads or THREADS[program], shared, stream, (slot.job, slot.told)
        )

    def _pinned(self, size: int) -> _Pinned:
        return _Pinned.of(self._device, size)

    def __enter__(self) -> Self:
        current = self._device.current()
        current.__enter__()
        self._entered.append(current)
        return self

    def __exit__(self, *_: object) -> None:
        self._entered.pop().__exit__(None, None, None)

    def close(self) -> None:
        with self:
            super().close()
            driver, stream, self.stream = self._device.driver, self.stream, 0
            modules, self._modules = self._modules, {}
            self._functions.clear()
            if stream:
                driver.destroy_stream(stream)
            for module in modules.values():
                driver.unload_module(module)


class _Pinned(np.ndarray[Any, Any]):
    """Bytes of the host that the GPU reaches, as long as somebody sees them; at ``ptr`` there."""

    ptr: int
    _registration: Registration | None = None

    @classmethod
    def of(cls, device: cuda.Device, size: int) -> _Pinned:
        memory = mmap.mmap(-1, size)
        made = np.frombuffer(memory, dtype=np.uint8).view(cls)
        made._registration = Registration(device, _host.address(memory), size, writable=True)
        made.ptr = made._registration.address
        if made.ptr != _host.address(memory):
            # Results are read where the GPU was told to put them.
            raise UnsupportedError(f"{device.name} sees registered memory at another address")
        return made

    def __del__(self) -> None:
        if self._registration is not None:
            # After most errors of the driver it refuses this too.
            with suppress(CudaError):
                self._registration.close()


class _Runtime:
    """What ``Slot`` and the encoder ask of CUDA's runtime. There is one stream: events are waited
    for by waiting for all that was started on it."""

    def __init__(self, device: cuda.Device, stream: int) -> None:
        self._driver, self._stream = device.driver, stream

    def malloc(self, size: int) -> int:
        return self._driver.allocate(size)

    def free(self, address: int) -> None:
        self._driver.free(address)

    def memcpyAsync(self, to: int, source: int, size: int, _kind: int, stream: int) -> None:
        self._driver.copy_async(to, source, size, stream)

    def memsetAsync(self, to: int, value: int, size: int, stream: int) -> None:
        self._driver.fill_async(to, value, size, stream)

    def memcpy(self, to: int, source: int, size: int, _kind: int) -> None:
        self._driver.copy_async(to, source, size, self._stream)
        self._driver.synchronize(self._stream)

    def eventCreateWithFlags(self, _flags: int) -> int:
        return 0

    def eventDestroy(self, _event: int) -> None:
        pass

    def eventRecord(self, _event: int, stream: int) -> None:
        assert stream == self._stream

    def eventSynchronize(self, _event: int) -> None:
        self._driver.synchronize(self._stream)
