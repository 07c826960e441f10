"""One GPU through CuPy: compiled kernels, launches, and the memory of jobs under way."""

from __future__ import annotations

import ctypes
import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from kmesh.errors import UnsupportedError
from kmesh.kernels import batches, sources

logger = logging.getLogger(__name__)

#: Of a block, by program; the last warp of a restore brings what the others move.
THREADS = {"restore": 288, "round": 288, "store": 256, "encode": 256}
#: Of a block that restores in units: more warps bring them, and some only sum.
UNIT_THREADS = 640

_RESERVED = 1024  # of a multiprocessor's shared memory, for each block
_TO_DEVICE = 1
#: By what the addresses are: memory of the host may be CUDA's own or registered.
_BY_ADDRESS = 4
_NO_TIMING = 2
_NOT_READY = 600
_SMALLEST = 1 << 18
_UPLOAD_BLOCKS = 32


def cupy() -> Any:
    """CuPy.

    Raises:
        UnsupportedError: it is not installed.
    """
    try:
        import cupy as module
    except ImportError:
        raise UnsupportedError(
            "KV state on a GPU needs CuPy: install '.[cuda12]' or '.[cuda13]', as the driver is, in"
            " a clone of KMesh"
        ) from None
    return module


@lru_cache(maxsize=64)
def _function(device: int, program: str, name: str, options: tuple[str, ...]) -> Any:
    """A kernel, compiled at its first use and kept by CuPy on disk."""
    module = _module(device, program, options)
    function = module.get_function(name)
    # What the others need of it is fixed, and counts against the same limit.
    if program in ("restore", "round"):
        function.max_dynamic_shared_size_bytes = _most_shared(device)
    return function


@lru_cache(maxsize=16)
def _module(device: int, program: str, options: tuple[str, ...]) -> Any:
    return cupy().RawModule(
        code=sources.text(program), options=(*sources.OPTIONS, *options), backend="nvrtc"
    )


@lru_cache(maxsize=16)
def _most_shared(device: int) -> int:
    return int(cupy().cuda.Device(device).attributes["MaxSharedMemoryPerBlockOptin"])


class Slot:
    """Memory of one job: pinned on the host, where it is written, and its copy on the device.

    Attributes:
        host, job: where these are; 0 before anything was reserved.
        told: where a kernel tells its results, on the host.
    """

    def __init__(self, runtime: Any, allocate_pinned: Any) -> None:
        self._runtime = runtime
        self._allocate_pinned = allocate_pinned
        self._event = runtime.eventCreateWithFlags(_NO_TIMING)
        self._pinned: Any = None
        self._host: npt.NDArray[np.uint8] = np.zeros(0, dtype=np.uint8)
        self._told_pinned: Any = None
        self._told: npt.NDArray[np.uint32] = np.zeros(0, dtype=np.uint32)
        self.job = 0
        self.host = 0
        self.told = 0
        self._values = (ctypes.c_uint64 * 3)()
        first = ctypes.addressof(self._values)
        self._pointers = (ctypes.c_void_p * 3)(first, first + 8, first + 16)
        self._pointers_at = ctypes.addressof(self._pointers)

    def reserve(self, size: int) -> npt.NDArray[np.uint8]:
        """Pinned memory for a job of that size or more; as much room on the device.

        Raises:
            RuntimeError: there is no memory for it; what was there before still is.
        """
        if size > len(self._host):
            room = max(_SMALLEST, 1 << (size - 1).bit_length())
            pinned = self._allocate_pinned(room)
            job = self._runtime.malloc(room)
            if self.job:
                self._runtime.free(self.job)
            self.job, self._pinned, self.host = job, pinned, pinned.ptr
            self._host = np.frombuffer(pinned, dtype=np.uint8, count=room)
        return self._host

    def upload(self, size: int, stream: int) -> None:
        """Starts to copy the job's first ``size`` bytes."""
        self._runtime.memcpyAsync(self.job, self.host, size, _TO_DEVICE, stream)

    def expect(self, words: int) -> None:
        """Room for that many 32-bit words of results, which say 'not done' until they come."""
        if words > len(self._told):
            room = max(1024, 1 << (words - 1).bit_length())
            self._told_pinned = self._allocate_pinned(4 * room)
            self._told = np.frombuffer(self._told_pinned, dtype=np.uint32, count=room)
            self.told = self._told_pinned.ptr
        self._told[:words] = 0xFF

    def results(self, count: int, dtype: Any) -> npt.NDArray[Any]:
        """What the kernel told."""
        told: npt.NDArray[Any] = self._told.view(dtype)
        return told[:count]

    def arguments(self, parts: tuple[int, int] = (0, 0), told: int = 0) -> int:
        """Address of what ``launchKernel`` takes for a kernel of job and results, or of job,
        results (``told``, if that is not 0) and parts. It copies them."""
        begin, end = parts
        self._values[0], self._values[1] = self.job, told or self.told
        self._values[2] = begin | end << 32
        return self._pointers_at

    def record(self, stream: int) -> None:
        """What was started on the stream up to now is what ``done`` and ``wait`` are about."""
        self._runtime.eventRecord(self._event, stream)

    def done(self) -> bool:
        """Whether that has ended, well or not."""
        return bool(self._runtime.eventQuery(self._event) != _NOT_READY)

    def wait(self) -> None:
        """Waits for it."""
        self._runtime.eventSynchronize(self._event)

    def close(self) -> None:
        """Waits and frees."""
        self.wait()
        self._runtime.eventDestroy(self._event)
        if self.job:
            self._runtime.free(self.job)
            self.job = 0
        self._pinned = self._told_pinned = None


class Starting:
    """As a context a slot, whose job is started. A generator takes several times as long."""

    __slots__ = ("_launcher", "_slot", "_stream")

    def __init__(self, launcher: Launcher, slot: Slot, stream: int) -> None:
        self._launcher, self._slot, self._stream = launcher, slot, stream

    def __enter__(self) -> Slot:
        return self._slot

    def __exit__(self, wrong: type[BaseException] | None, *_: object) -> None:
        slot = self._slot
        if wrong is None:
            try:
                slot.record(self._stream)
                return
            except BaseException:
                self._give_up()
                raise
        self._give_up()

    def _give_up(self) -> None:
        self._slot.record(self._stream)
        self._slot.wait()
        self._launcher.release(self._slot)


class Launcher(ABC):
    """One GPU, which as a context is the current one: launches, and memory of jobs.

    Attributes:
        runtime: allocates and copies.
        multiprocessors: that the GPU has.
        batch: the driver's call for many copies; None: they are asked for one by one.

    Args:
        allocate_pinned: gives host memory of so many bytes that the GPU reaches, at its ``ptr``.
    """

    multiprocessors: int
    batch: batches.Batch | None = None

    def __init__(self, runtime: Any, allocate_pinned: Any) -> None:
        self.runtime = runtime
        self._allocate_pinned = allocate_pinned
        self._free: list[Slot] = []
        self._busy: set[Slot] = set()

    @abstractmethod
    def __enter__(self) -> Self: ...

    @abstractmethod
    def __exit__(self, *_: object) -> None: ...

    @abstractmethod
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
        """Starts a kernel on a slot's job.

        Args:
            parts: of the job, half-open, for a kernel that takes them.
            threads: of a block; 0: as ``THREADS`` says.
            told: address for the kernel, of a kernel that takes parts; 0: of the slot's results.
        """

    def bring(
        self, program: str, slot: Slot, size: int, stream: int, most: int | None = None
    ) -> None:
        """Starts to bring a job's first ``size`` bytes, by a kernel of the program that reads them
        where they were written. The copy engine would bring them behind all that it has been asked
        for, on whatever stream.

        Args:
            most: thread blocks; None: as many as are of use.
        """
        vectors = (0, -(-size // 16))
        name, blocks = f"kmesh_{program}_upload", min(most or _UPLOAD_BLOCKS, _UPLOAD_BLOCKS)
        self.launch(program, name, blocks, 0, slot, vectors, stream, told=slot.host)

    def copy(self, copies: npt.NDArray[np.uint64], stream: int) -> None:
        """Starts copies on a stream that is not the default one.

        Args:
            copies: [number, (to, from, bytes)].
        """
        copies = copies[copies[:, 2] > 0]
        if self.batch is not None and len(copies) > 1:
            status = self.batch(copies, stream)
            if not status:
                return
            # One by one the same bytes go to the same places, and what is wrong is raised.
            logger.warning("cuMemcpyBatchAsync: error %d: copies are asked for one by one", status)
            self.batch = None
        for to, source, size in copies.tolist():
            self.runtime.memcpyAsync(to, source, size, _BY_ADDRESS, stream)

    @contextmanager
    def slot(self) -> Iterator[Slot]:
        """Memory for one job while it is written, for ``job``. When that fails, nothing was
        started, so that nothing is waited for."""
        slot = self._take()
        try:
            yield slot
        except BaseException:
            self.release(slot)
            raise

    def job(self, stream: int, slot: Slot | None = None) -> Starting:
        """Memory for one job that is started on a stream, until ``release``.

        When starting it fails, it waits for what was started and takes the memory back.

        Args:
            slot: in which the job was written; by default it is given one.
        """
        return Starting(self, slot or self._take(), stream)

    def reserve(self, size: int = 1) -> None:
        """Has memory for a job of usual size, or of ``size`` bytes, so that the first one does not
        wait for it.

        Raises:
            MemoryError: there is none now.
        """
        if not self._free:
            self._free.append(Slot(self.runtime, self._allocate_pinned))
        try:
            self._free[-1].reserve(size)
            self._free[-1].expect(1)
        except RuntimeError as lacking:
            raise MemoryError(str(lacking)) from lacking

    def _take(self) -> Slot:
        slot = self._free.pop() if self._free else Slot(self.runtime, self._allocate_pinned)
        self._busy.add(slot)
        return slot

    def release(self, slot: Slot) -> None:
        """Its job has ended, and its results were read; or it was never started."""
        self._busy.discard(slot)
        self._free.append(slot)

    def close(self) -> None:
        """Waits for all jobs and frees their memory."""
        for slot in [*self._busy, *self._free]:
            slot.close()
        self._busy.clear()
        self._free.clear()


class Device(Launcher):
    """One GPU through CuPy.

    Args:
        ordinal: as this process counts.
        options: for the compiler, beside those that every kernel has.
    """

    def __init__(self, ordinal: int, options: tuple[str, ...] = ()) -> None:
        module = cupy()
        super().__init__(module.cuda.runtime, module.cuda.alloc_pinned_memory)
        self._driver = module.cuda.driver
        self.batch = batches.find()
        self.ordinal = ordinal
        self.options = options
        self._before = 0
        self._kernels: dict[tuple[str, str], tuple[Any, int]] = {}
        with self:
            attributes = module.cuda.Device(ordinal).attributes
            self._most_shared = _most_shared(ordinal)
        self.multiprocessors = int(attributes["MultiProcessorCount"])
        self._shared = int(attributes["MaxSharedMemoryPerMultiprocessor"])

    def __enter__(self) -> Self:
        self._before = self.runtime.getDevice()
        if self._before != self.ordinal:
            self.runtime.setDevice(self.ordinal)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before != self.ordinal:
            self.runtime.setDevice(self._before)

    def shared(self, blocks: int) -> int:
        """Bytes of shared memory for each of so many blocks on one multiprocessor."""
        return min(self._shared // blocks - _RESERVED, self._most_shared)

    def prepare(self, program: str, name: str) -> None:
        """Compiles a kernel, if that was not done before."""
        _function(self.ordinal, program, name, self.options)

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
        known = self._kernels.get((program, name))
        if known is None:
            function = _function(self.ordinal, program, name, self.options)
            known = self._kernels[program, name] = function, function.kernel.ptr
        arguments = slot.arguments() if parts is None else slot.arguments(parts, told)
        self._driver.launchKernel(
            known[1], blocks, 1, 1, threads or THREADS[program], 1, 1, shared, stream, arguments, 0
        )
