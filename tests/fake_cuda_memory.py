"""Memory of a CUDA driver without a GPU: that of GPUs is memfds, that of this process is itself."""

from __future__ import annotations

import ctypes
import mmap
import os
import re
from collections.abc import Callable
from dataclasses import dataclass

from fake_cuda_gpus import MIB, FakeGpus, Gpu, error

from kmesh.cuda.driver import Attribute

GRANULARITY = 2 * MIB
_LEFT = 4096

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


def _mmap(address: int, size: int, fd: int, protection: int = 0) -> int:
    """Shared memory of ``fd``, or an empty range; at ``address`` if that is not 0."""
    flags = mmap.MAP_SHARED if fd >= 0 else mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    flags |= _MAP_FIXED if address else 0
    at = _libc.mmap(address or None, size, protection, flags, fd, 0)
    if at in (None, ctypes.c_void_p(-1).value):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return int(at)


@dataclass
class _Range:
    size: int
    handle_size: int = 0
    owner: int = 0
    readable: bool = False
    writable: bool = False


class FakeMemory(FakeGpus):
    """The part of ``kmesh.cuda.driver.Driver`` about memory, and copies that end at once."""

    def __init__(self, gpus: tuple[Gpu, ...], refuse: Callable[[str], None] | None) -> None:
        super().__init__(gpus, refuse)
        self._handles: dict[int, tuple[int, int, bool]] = {}
        self._ranges: dict[int, _Range] = {}
        self._registered: dict[int, int] = {}
        self._allocated: dict[int, tuple[int, int]] = {}
        self._last = 0

    def end(self) -> None:
        for address, found in self._ranges.items():
            _libc.munmap(address, found.size)
        for address, (_, size) in self._allocated.items():
            _libc.munmap(address, size)
        for fd, _, _ in self._handles.values():
            os.close(fd)
        for held in (self._ranges, self._allocated, self._handles, self._registered):
            held.clear()
        super().end()

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
            raise error("cuMemCreate", 1)
        if rdma and not gpu.attributes.get(Attribute.RDMA_WITH_VMM, 1):
            raise error("cuMemCreate", 801)
        if node is None and self._used(device) + size > gpu.total:
            raise error("cuMemCreate", 2)
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
            raise error(call, 400)
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
            raise error("cuMemImportFromShareableHandle", 1)
        owner = uuids.index(found[1]) if found[1] else _HOST
        return self._handle(os.dup(fd), owner, made=False)

    def reserve(self, size: int) -> int:
        self._need("cuMemAddressReserve")
        if size <= 0 or size % GRANULARITY:
            raise error("cuMemAddressReserve", 1)
        address = _mmap(0, size, -1)
        self._ranges[address] = _Range(size)
        return address

    def _range(self, address: int, size: int, call: str, *, mapped: bool) -> _Range:
        found = self._ranges.get(address)
        if found is None or found.size != size:
            raise error(call, 1)
        if bool(found.handle_size) != mapped:
            raise error(call, 1 if mapped or call != "cuMemMap" else 208)
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
            raise error("cuMemMap", 1)
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
            raise error("cuMemSetAccess", 101)
        found.readable, found.writable = True, writable
        _libc.mprotect(address, size, mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0))

    def dma_buf(self, address: int, size: int, *, pcie: bool) -> int:
        device = self._need("cuMemGetHandleForAddressRange")
        if not self.gpus[device].attributes.get(Attribute.DMA_BUF, 1):
            raise error("cuMemGetHandleForAddressRange", 801)
        self._check(address, size, "cuMemGetHandleForAddressRange", write=True)
        if address % mmap.PAGESIZE or size % mmap.PAGESIZE:
            raise error("cuMemGetHandleForAddressRange", 1)
        # What is in it is a copy: only the real one aliases.
        fd = os.memfd_create("fake-dma-buf", os.MFD_CLOEXEC)
        os.pwrite(fd, ctypes.string_at(address, size), 0)
        return fd

    # This process's memory.

    def register(self, address: int, size: int, *, read_only: bool) -> None:
        device = self._need("cuMemHostRegister_v2")
        if address in self._registered:
            raise error("cuMemHostRegister_v2", 712)
        if read_only and not self.gpus[device].attributes.get(Attribute.READ_ONLY_REGISTER, 1):
            raise error("cuMemHostRegister_v2", 801)
        if not _is_mapped(address, size, writable=not read_only):
            raise error("cuMemHostRegister_v2", 1)
        self._registered[address] = size

    def unregister(self, address: int) -> None:
        self._need("cuMemHostUnregister")
        if self._registered.pop(address, None) is None:
            raise error("cuMemHostUnregister", 1)

    def device_pointer(self, address: int) -> int:
        self._need("cuMemHostGetDevicePointer_v2")
        if not self._inside(address, 1, self._registered):
            raise error("cuMemHostGetDevicePointer_v2", 1)
        return address

    def registered(self, address: int, size: int) -> bool:
        """Not the driver's: whether a range of this process's memory is."""
        return self._inside(address, size, self._registered)

    # Plain memory and copies.

    def allocate(self, size: int) -> int:
        device = self._need("cuMemAlloc_v2")
        if self._used(device) + size > self.gpus[device].total:
            raise error("cuMemAlloc_v2", 2)
        address = _mmap(0, size, -1, mmap.PROT_READ | mmap.PROT_WRITE)
        self._allocated[address] = device, size
        return address

    def free(self, address: int) -> None:
        self._need("cuMemFree_v2")
        if address not in self._allocated:
            raise error("cuMemFree_v2", 1)
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
            raise error(call, 1)

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
