"""A CUDA driver without a GPU, behind ``kmesh.cuda.driver.Driver``.

GPU memory is a memfd: what is exported, imported and mapped is shared between processes and lives
as long as a file descriptor or a mapping of it, as with the real driver. It refuses what that one
refuses, and can be made to refuse more.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kmesh.cuda.driver import Attribute
from kmesh.errors import CudaError

MIB = 1 << 20
GRANULARITY = 2 * MIB
_LEFT = 4096
UUIDS = ("GPU-00000000-0000-0000-0000-0000000000a0", "GPU-00000000-0000-0000-0000-0000000000b1")

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int),
    ctypes.c_long,
)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000
_NAME = re.compile(r"/memfd:fake-(?:vram:(GPU-[0-9a-f-]+)|numa:\d+) ")
#: Whose memory of the host is that CUDA made: no GPU's.
_HOST = -1

#: What may be called while another thread captures a graph.
_SAFE = (
    *("version", "device_count", "device_uuid", "device_name", "attribute", "granularity"),
    "can_access_peer",
    *("push_context", "pop_context", "relax_capture"),
)

#: Of attributes that are more than yes or no.
_NUMBERS = {
    Attribute.MULTIPROCESSORS: 3,
    Attribute.COMPUTE_MAJOR: 9,
    Attribute.COMPUTE_MINOR: 0,
}

NAMES = {
    1: "CUDA_ERROR_INVALID_VALUE",
    2: "CUDA_ERROR_OUT_OF_MEMORY",
    200: "CUDA_ERROR_INVALID_IMAGE",
    500: "CUDA_ERROR_NOT_FOUND",
    101: "CUDA_ERROR_INVALID_DEVICE",
    201: "CUDA_ERROR_INVALID_CONTEXT",
    208: "CUDA_ERROR_ALREADY_MAPPED",
    400: "CUDA_ERROR_INVALID_HANDLE",
    712: "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED",
    801: "CUDA_ERROR_NOT_SUPPORTED",
    999: "CUDA_ERROR_UNKNOWN",
}


def _mmap(address: int, size: int, fd: int, protection: int = 0) -> int:
    """Shared memory of ``fd``, or an empty range; at ``address`` if that is not 0."""
    flags = mmap.MAP_SHARED if fd >= 0 else mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    flags |= _MAP_FIXED if address else 0
    at = _libc.mmap(address or None, size, protection, flags, fd, 0)
    if at in (None, ctypes.c_void_p(-1).value):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return int(at)


@dataclass
class Gpu:
    """One GPU. ``attributes`` that are not named are supported; ``peers`` are UUIDs of others
    whose memory it can read."""

    uuid: str = UUIDS[0]
    name: str = "Fake GPU"
    total: int = 256 * MIB
    attributes: dict[Attribute, int] = field(default_factory=lambda: {Attribute.DMA_BUF: 0})
    peers: frozenset[str] = frozenset()


@dataclass
class _Range:
    size: int
    handle_size: int = 0
    owner: int = 0
    readable: bool = False
    writable: bool = False


class FakeDriver:
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
        self.gpus = gpus or (Gpu(),)
        self.launched: list[str] = []
        self._kernels = kernels
        self.refuse = refuse
        self.calls: list[str] = []
        self.relaxed: set[str] = set()
        self.unsafe: set[tuple[str, str]] = set()
        self._contexts: dict[int, int] = {}
        self._current = threading.local()
        self._handles: dict[int, tuple[int, int, bool]] = {}
        self._ranges: dict[int, _Range] = {}
        self._registered: dict[int, int] = {}
        self._allocated: dict[int, tuple[int, int]] = {}
        self._streams: set[int] = set()
        self._modules: dict[int, bytes] = {}
        self._functions: dict[int, str] = {}
        self._last = 0

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if (
            name.startswith("_")
            or name in ("ledger", "end", "refuse", "used", "registered")
            or not callable(found)
        ):
            return found
        self.calls.append(name)
        if name not in _SAFE:
            self.used(name)
        if self.refuse is not None:
            self.refuse(name)
        return found

    def used(self, name: str) -> None:
        """The calling thread calls something that a capture elsewhere does not expect."""
        thread = threading.current_thread().name
        if not getattr(self._current, "relaxed", False):
            self.unsafe.add((thread, name))

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
        for address, found in self._ranges.items():
            _libc.munmap(address, found.size)
        for address, (_, size) in self._allocated.items():
            _libc.munmap(address, size)
        for fd, _, _ in self._handles.values():
            os.close(fd)
        for held in (self._ranges, self._allocated, self._handles, self._registered):
            held.clear()
        self._streams.clear()
        self._modules.clear()
        self._contexts.clear()
        self._stack().clear()

    # Devices and contexts.

    def version(self) -> int:
        return 13000

    def device_count(self) -> int:
        return len(self.gpus)

    def _gpu(self, device: int, call: str) -> Gpu:
        if not 0 <= device < len(self.gpus):
            raise _error(call, 101)
        return self.gpus[device]

    def device_uuid(self, device: int) -> str:
        return self._gpu(device, "cuDeviceGetUuid_v2").uuid

    def device_name(self, device: int) -> str:
        return self._gpu(device, "cuDeviceGetName").name

    def attribute(self, device: int, attribute: Attribute) -> int:
        found = self._gpu(device, "cuDeviceGetAttribute").attributes
        return found.get(attribute, _NUMBERS.get(attribute, 1))

    def can_access_peer(self, device: int, peer: int) -> bool:
        found = self._gpu(device, "cuDeviceCanAccessPeer")
        return device != peer and self._gpu(peer, "cuDeviceCanAccessPeer").uuid in found.peers

    def retain_context(self, device: int) -> int:
        self._gpu(device, "cuDevicePrimaryCtxRetain")
        self._contexts[device] = self._contexts.get(device, 0) + 1
        return 1000 + device

    def release_context(self, device: int) -> None:
        if not self._contexts.get(device):
            raise _error("cuDevicePrimaryCtxRelease_v2", 201)
        self._contexts[device] -= 1

    def _stack(self) -> list[int]:
        if not hasattr(self._current, "stack"):
            self._current.stack = []
        stack: list[int] = self._current.stack
        return stack

    def push_context(self, context: int) -> None:
        if not self._contexts.get(context - 1000):
            raise _error("cuCtxPushCurrent_v2", 201)
        self._stack().append(context - 1000)

    def pop_context(self) -> None:
        self._need("cuCtxPopCurrent_v2")
        self._stack().pop()

    def relax_capture(self) -> None:
        self._need("cuThreadExchangeStreamCaptureMode")
        self._current.relaxed = True
        self.relaxed.add(threading.current_thread().name)

    def _need(self, call: str) -> int:
        """The current context's device."""
        if not self._stack():
            raise _error(call, 201)
        return self._stack()[-1]

    def _used(self, device: int) -> int:
        ours = sum(size for d, size in self._allocated.values() if d == device)
        made = (h for h in self._handles.values() if h[2])
        return ours + sum(os.fstat(fd).st_size for fd, on, _ in made if on == device)

    def memory_info(self) -> tuple[int, int]:
        device = self._need("cuMemGetInfo_v2")
        return self.gpus[device].total - self._used(device), self.gpus[device].total

    # Memory that can be exported.

    def granularity(self, device: int, *, rdma: bool, node: int | None = None) -> int:
        self._gpu(device, "cuMemGetAllocationGranularity")
        return GRANULARITY

    def create(self, device: int, size: int, *, rdma: bool, node: int | None = None) -> int:
        gpu = self._gpu(device, "cuMemCreate")
        if size <= 0 or size % GRANULARITY:
            raise _error("cuMemCreate", 1)
        if rdma and not gpu.attributes.get(Attribute.RDMA_WITH_VMM, 1):
            raise _error("cuMemCreate", 801)
        if node is None and self._used(device) + size > gpu.total:
            raise _error("cuMemCreate", 2)
        name = f"vram:{gpu.uuid}" if node is None else f"numa:{node}"
        fd = os.memfd_create(f"fake-{name}", os.MFD_CLOEXEC)
        os.ftruncate(fd, size)
        # Whoever had it before has left something.
        for at in (0, size // 2, size - _LEFT):
            os.pwrite(fd, b"\xa5" * _LEFT, at)
        return self._handle(fd, device if node is None else _HOST, made=True)

    def _handle(self, fd: int, device: int, *, made: bool) -> int:
        self._last += 1
        self._handles[self._last] = fd, device, made
        return self._last

    def _fd(self, handle: int, call: str) -> int:
        if handle not in self._handles:
            raise _error(call, 400)
        return self._handles[handle][0]

    def release(self, handle: int) -> None:
        os.close(self._fd(handle, "cuMemRelease"))
        del self._handles[handle]

    def export_fd(self, handle: int) -> int:
        return os.dup(self._fd(handle, "cuMemExportToShareableHandle"))

    def import_fd(self, fd: int) -> int:
        try:
            found = _NAME.match(os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:
            found = None
        uuids = [gpu.uuid for gpu in self.gpus]
        if found is None or (found[1] and found[1] not in uuids):
            raise _error("cuMemImportFromShareableHandle", 1)
        owner = uuids.index(found[1]) if found[1] else _HOST
        return self._handle(os.dup(fd), owner, made=False)

    def reserve(self, size: int) -> int:
        self._need("cuMemAddressReserve")
        if size <= 0 or size % GRANULARITY:
            raise _error("cuMemAddressReserve", 1)
        address = _mmap(0, size, -1)
        self._ranges[address] = _Range(size)
        return address

    def _range(self, address: int, size: int, call: str, *, mapped: bool) -> _Range:
        found = self._ranges.get(address)
        if found is None or found.size != size:
            raise _error(call, 1)
        if bool(found.handle_size) != mapped:
            raise _error(call, 1 if mapped or call != "cuMemMap" else 208)
        return found

    def unreserve(self, address: int, size: int) -> None:
        self._range(address, size, "cuMemAddressFree", mapped=False)
        del self._ranges[address]
        _libc.munmap(address, size)

    def map(self, address: int, size: int, handle: int) -> None:
        self._need("cuMemMap")
        found = self._range(address, size, "cuMemMap", mapped=False)
        fd = self._fd(handle, "cuMemMap")
        if os.fstat(fd).st_size < size:
            raise _error("cuMemMap", 1)
        _mmap(address, size, fd)
        found.handle_size, found.owner = size, self._handles[handle][1]

    def unmap(self, address: int, size: int) -> None:
        self._need("cuMemUnmap")
        found = self._range(address, size, "cuMemUnmap", mapped=True)
        _mmap(address, size, -1)
        found.handle_size, found.readable, found.writable = 0, False, False

    def set_access(self, address: int, size: int, device: int, *, writable: bool) -> None:
        self._need("cuMemSetAccess")
        gpu = self._gpu(device, "cuMemSetAccess")
        found = self._range(address, size, "cuMemSetAccess", mapped=True)
        if found.owner not in (device, _HOST) and self.gpus[found.owner].uuid not in gpu.peers:
            raise _error("cuMemSetAccess", 101)
        found.readable, found.writable = True, writable
        _libc.mprotect(address, size, mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0))

    def dma_buf(self, address: int, size: int, *, pcie: bool) -> int:
        device = self._need("cuMemGetHandleForAddressRange")
        if not self.gpus[device].attributes.get(Attribute.DMA_BUF, 1):
            raise _error("cuMemGetHandleForAddressRange", 801)
        self._check(address, size, "cuMemGetHandleForAddressRange", write=True)
        if address % mmap.PAGESIZE or size % mmap.PAGESIZE:
            raise _error("cuMemGetHandleForAddressRange", 1)
        # What is in it is a copy: only the real one aliases.
        fd = os.memfd_create("fake-dma-buf", os.MFD_CLOEXEC)
        os.pwrite(fd, ctypes.string_at(address, size), 0)
        return fd

    # This process's memory.

    def register(self, address: int, size: int, *, read_only: bool) -> None:
        device = self._need("cuMemHostRegister_v2")
        if address in self._registered:
            raise _error("cuMemHostRegister_v2", 712)
        if read_only and not self.gpus[device].attributes.get(Attribute.READ_ONLY_REGISTER, 1):
            raise _error("cuMemHostRegister_v2", 801)
        if not _is_mapped(address, size, writable=not read_only):
            raise _error("cuMemHostRegister_v2", 1)
        self._registered[address] = size

    def unregister(self, address: int) -> None:
        self._need("cuMemHostUnregister")
        if self._registered.pop(address, None) is None:
            raise _error("cuMemHostUnregister", 1)

    def device_pointer(self, address: int) -> int:
        self._need("cuMemHostGetDevicePointer_v2")
        if not self._inside(address, 1, self._registered):
            raise _error("cuMemHostGetDevicePointer_v2", 1)
        return address

    def registered(self, address: int, size: int) -> bool:
        """Not the driver's: whether a range of this process's memory is."""
        return self._inside(address, size, self._registered)

    # Plain memory and copies.

    def allocate(self, size: int) -> int:
        device = self._need("cuMemAlloc_v2")
        if self._used(device) + size > self.gpus[device].total:
            raise _error("cuMemAlloc_v2", 2)
        address = _mmap(0, size, -1, mmap.PROT_READ | mmap.PROT_WRITE)
        self._allocated[address] = device, size
        return address

    def free(self, address: int) -> None:
        self._need("cuMemFree_v2")
        if address not in self._allocated:
            raise _error("cuMemFree_v2", 1)
        _libc.munmap(address, self._allocated.pop(address)[1])

    @staticmethod
    def _inside(address: int, size: int, ranges: dict[int, int]) -> bool:
        return any(at <= address and address + size <= at + n for at, n in ranges.items())

    def _check(self, address: int, size: int, call: str, *, write: bool) -> None:
        self._need(call)
        allowed = {
            at: r.size for at, r in self._ranges.items() if (r.writable if write else r.readable)
        }
        allowed |= {at: n for at, (_, n) in self._allocated.items()}
        if not write:
            allowed |= self._registered
        if size < 1 or not self._inside(address, size, allowed):
            raise _error(call, 1)

    def fill(self, address: int, value: int, size: int) -> None:
        self._check(address, size, "cuMemsetD8_v2", write=True)
        ctypes.memset(address, value, size)

    def write(self, address: int, source: int, size: int) -> None:
        self._check(address, size, "cuMemcpyHtoD_v2", write=True)
        ctypes.memmove(address, source, size)

    def read(self, target: int, address: int, size: int) -> None:
        self._check(address, size, "cuMemcpyDtoH_v2", write=False)
        ctypes.memmove(target, address, size)

    def copy(self, target: int, source: int, size: int) -> None:
        self._check(target, size, "cuMemcpyDtoD_v2", write=True)
        self._check(source, size, "cuMemcpyDtoD_v2", write=False)
        ctypes.memmove(target, source, size)

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
            raise _error(call, 400)

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
            raise _error("cuModuleLoadData", 200)
        self._modules[self._number()] = image
        return self._last

    def unload_module(self, module: int) -> None:
        self._need("cuModuleUnload")
        if self._modules.pop(module, None) is None:
            raise _error("cuModuleUnload", 400)

    def function(self, module: int, name: str) -> int:
        self._need("cuModuleGetFunction")
        if f".text.{name}\0".encode() not in self._modules[module]:
            raise _error("cuModuleGetFunction", 500)
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
            raise _error("cuLaunchKernel", 801)
        job, told = arguments
        there = self._registered | {at: size for at, (_, size) in self._allocated.items()}
        # Only a kernel that tells something needs to know where.
        if not self._inside(job, 8, there) or (
            told and not self._inside(told, 8, self._registered)
        ):
            raise _error("cuLaunchKernel", 1)
        name = self._functions[function]
        self.launched.append(name)
        self._kernels()[name](
            ctypes.c_void_p(job), ctypes.c_void_p(told), ctypes.c_uint32(blocks),
            ctypes.c_uint32(1),
        )  # fmt: skip


def _is_mapped(address: int, size: int, *, writable: bool) -> bool:
    """Whether this process has all of a range mapped, and may write it if it must."""
    at = address
    with open("/proc/self/maps") as maps:
        for line in maps:
            span, rights = line.split(maxsplit=2)[:2]
            begin, end = (int(part, 16) for part in span.split("-"))
            if begin <= at < end and rights[0] == "r" and (rights[1] == "w" or not writable):
                at = end
            if at >= address + size:
                return True
    return False


def _error(call: str, code: int) -> CudaError:
    return CudaError(call, code, NAMES[code])


def refuse_nth(n: int) -> Callable[[str], None]:
    """Makes the n-th call (from 1) fail, and no other."""
    left = [n]

    def refuse(name: str) -> None:
        left[0] -= 1
        if not left[0]:
            raise CudaError(name, 999, NAMES[999])

    return refuse
