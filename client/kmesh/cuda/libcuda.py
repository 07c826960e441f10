"""The CUDA driver (``libcuda.so.1``) through ctypes: no package of CUDA's is needed."""

from __future__ import annotations

import ctypes
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from ctypes import POINTER, byref, c_char, c_char_p, c_int, c_size_t, c_uint, c_ulonglong, c_void_p
from typing import Any

from kmesh.cuda.driver import Attribute
from kmesh.errors import CudaError, UnsupportedError

_LIBRARY = "libcuda.so.1"
#: CUDA 11.3: the first with exports of VMM memory and read-only registration.
_OLDEST = 11030

_PINNED = 1
_POSIX_FD = 1
_ON_DEVICE, _ON_HOST_NODE = 1, 3
_READ, _READ_WRITE = 1, 3
_DMA_BUF_FD = 1
_OVER_PCIE = 1
_CAPTURE_RELAXED = 2
_NON_BLOCKING = 1
_PORTABLE, _DEVICE_MAP, _READ_ONLY = 1, 2, 8


class _Location(ctypes.Structure):
    _fields_ = (("type", c_int), ("id", c_int))


class _Flags(ctypes.Structure):
    _fields_ = (
        ("compression", ctypes.c_ubyte),
        ("rdma", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    )


class _Allocation(ctypes.Structure):
    _fields_ = (
        ("type", c_int),
        ("handle_types", c_int),
        ("location", _Location),
        ("win32", c_void_p),
        ("flags", _Flags),
    )


class _Access(ctypes.Structure):
    _fields_ = (("location", _Location), ("flags", c_int))


_Address = c_ulonglong
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuInit": (c_uint,),
    "cuDriverGetVersion": (POINTER(c_int),),
    "cuGetErrorName": (c_int, POINTER(c_char_p)),
    "cuDeviceGetCount": (POINTER(c_int),),
    "cuDeviceGet": (POINTER(c_int), c_int),
    "cuDeviceGetUuid_v2": (c_char * 16, c_int),
    "cuDeviceGetName": (c_char_p, c_int, c_int),
    "cuDeviceGetAttribute": (POINTER(c_int), c_int, c_int),
    "cuDeviceCanAccessPeer": (POINTER(c_int), c_int, c_int),
    "cuDevicePrimaryCtxRetain": (POINTER(c_void_p), c_int),
    "cuDevicePrimaryCtxRelease_v2": (c_int,),
    "cuCtxPushCurrent_v2": (c_void_p,),
    "cuCtxPopCurrent_v2": (POINTER(c_void_p),),
    "cuCtxGetCurrent": (POINTER(c_void_p),),
    "cuThreadExchangeStreamCaptureMode": (POINTER(c_int),),
    "cuMemGetInfo_v2": (POINTER(c_size_t), POINTER(c_size_t)),
    "cuMemGetAllocationGranularity": (POINTER(c_size_t), POINTER(_Allocation), c_int),
    "cuMemCreate": (POINTER(c_ulonglong), c_size_t, POINTER(_Allocation), c_ulonglong),
    "cuMemRelease": (c_ulonglong,),
    "cuMemExportToShareableHandle": (POINTER(c_int), c_ulonglong, c_int, c_ulonglong),
    "cuMemImportFromShareableHandle": (POINTER(c_ulonglong), c_void_p, c_int),
    "cuMemAddressReserve": (POINTER(_Address), c_size_t, c_size_t, _Address, c_ulonglong),
    "cuMemAddressFree": (_Address, c_size_t),
    "cuMemMap": (_Address, c_size_t, c_size_t, c_ulonglong, c_ulonglong),
    "cuMemUnmap": (_Address, c_size_t),
    "cuMemSetAccess": (_Address, c_size_t, POINTER(_Access), c_size_t),
    "cuMemGetHandleForAddressRange": (POINTER(c_int), _Address, c_size_t, c_int, c_ulonglong),
    "cuMemHostRegister_v2": (c_void_p, c_size_t, c_uint),
    "cuMemHostUnregister": (c_void_p,),
    "cuMemHostGetDevicePointer_v2": (POINTER(_Address), c_void_p, c_uint),
    "cuMemAlloc_v2": (POINTER(_Address), c_size_t),
    "cuMemFree_v2": (_Address,),
    "cuMemcpyAsync": (_Address, _Address, c_size_t, c_void_p),
    "cuMemsetD8Async": (_Address, ctypes.c_ubyte, c_size_t, c_void_p),
    "cuStreamCreate": (POINTER(c_void_p), c_uint),
    "cuStreamDestroy_v2": (c_void_p,),
    "cuStreamSynchronize": (c_void_p,),
    "cuModuleLoadData": (POINTER(c_void_p), c_char_p),
    "cuModuleUnload": (c_void_p,),
    "cuModuleGetFunction": (POINTER(c_void_p), c_void_p, c_char_p),
    "cuLaunchKernel": (c_void_p, *[c_uint] * 7, c_void_p, POINTER(c_void_p), c_void_p),
}


def _allocation(device: int, rdma: bool, node: int | None) -> _Allocation:
    place = _Location(_ON_DEVICE, device) if node is None else _Location(_ON_HOST_NODE, node)
    # NICs need no leave to reach host memory.
    return _Allocation(_PINNED, _POSIX_FD, place, None, _Flags(0, rdma and node is None))


def _last(streams: list[int]) -> int:
    """Taken out, in whatever thread; 0: there is none."""
    try:
        return streams.pop()
    except IndexError:
        return 0


class LibCuda:
    """``driver.Driver`` over the real one; see there for the methods.

    Raises:
        UnsupportedError, CudaError: as ``driver.load``.
    """

    def __init__(self) -> None:
        try:
            library = ctypes.CDLL(_LIBRARY)
        except OSError as failed:
            raise UnsupportedError(f"there is no CUDA driver: {failed}") from None
        self._calls: dict[str, Callable[..., int]] = {}
        self._contexts: dict[int, int] = {}
        #: Streams that nobody uses, by their context.
        self._idle: dict[int, list[int]] = {}
        for name, types in _SIGNATURES.items():
            try:
                call = library[name]
            except AttributeError:
                raise UnsupportedError(f"the CUDA driver is too old: it has no {name}") from None
            call.argtypes = types
            call.restype = c_int
            self._calls[name] = call
        self._call("cuInit", 0)
        if self.version() < _OLDEST:
            raise UnsupportedError(f"the CUDA driver is too old: {self.version()} < {_OLDEST}")

    def _call(self, name: str, *arguments: object) -> None:
        code = self._calls[name](*arguments)
        if code:
            text = c_char_p()
            self._calls["cuGetErrorName"](code, byref(text))
            raise CudaError(name, code, (text.value or b"").decode())

    def version(self) -> int:
        value = c_int()
        self._call("cuDriverGetVersion", byref(value))
        return value.value

    def device_count(self) -> int:
        value = c_int()
        self._call("cuDeviceGetCount", byref(value))
        return value.value

    def device_uuid(self, device: int) -> str:
        raw = (c_char * 16)()
        self._call("cuDeviceGetUuid_v2", raw, device)
        return f"GPU-{uuid.UUID(bytes=raw.raw)}"

    def device_name(self, device: int) -> str:
        text = ctypes.create_string_buffer(256)
        self._call("cuDeviceGetName", text, len(text), device)
        return text.value.decode(errors="replace")

    def attribute(self, device: int, attribute: Attribute) -> int:
        value = c_int()
        self._call("cuDeviceGetAttribute", byref(value), int(attribute), device)
        return value.value

    def can_access_peer(self, device: int, peer: int) -> bool:
        value = c_int()
        self._call("cuDeviceCanAccessPeer", byref(value), device, peer)
        return bool(value.value)

    def retain_context(self, device: int) -> int:
        context = c_void_p()
        self._call("cuDevicePrimaryCtxRetain", byref(context), device)
        self._contexts[device] = found = context.value or 0
        return found

    def release_context(self, device: int) -> None:
        context = self._contexts.get(device, 0)
        if idle := self._idle.get(context):
            # In a context that is broken they can't be destroyed, and end with it.
            with suppress(CudaError):
                self.push_context(context)
                try:
                    while stream := _last(idle):
                        self.destroy_stream(stream)
                finally:
                    self.pop_context()
            idle.clear()
        self._call("cuDevicePrimaryCtxRelease_v2", device)

    def push_context(self, context: int) -> None:
        self._call("cuCtxPushCurrent_v2", context)

    def pop_context(self) -> None:
        self._call("cuCtxPopCurrent_v2", byref(c_void_p()))

    def relax_capture(self) -> None:
        # In: the thread's new mode; out: the one it had.
        self._call("cuThreadExchangeStreamCaptureMode", byref(c_int(_CAPTURE_RELAXED)))

    def memory_info(self) -> tuple[int, int]:
        free, total = c_size_t(), c_size_t()
        self._call("cuMemGetInfo_v2", byref(free), byref(total))
        return free.value, total.value

    def granularity(self, device: int, *, rdma: bool, node: int | None = None) -> int:
        value = c_size_t()
        wanted = _allocation(device, rdma, node)
        self._call("cuMemGetAllocationGranularity", byref(value), byref(wanted), 0)
        return value.value

    def create(self, device: int, size: int, *, rdma: bool, node: int | None = None) -> int:
        handle = c_ulonglong()
        wanted = _allocation(device, rdma, node)
        self._call("cuMemCreate", byref(handle), size, byref(wanted), 0)
        return handle.value

    def release(self, handle: int) -> None:
        self._call("cuMemRelease", handle)

    def export_fd(self, handle: int) -> int:
        fd = c_int(-1)
        self._call("cuMemExportToShareableHandle", byref(fd), handle, _POSIX_FD, 0)
        return fd.value

    def import_fd(self, fd: int) -> int:
        handle = c_ulonglong()
        self._call("cuMemImportFromShareableHandle", byref(handle), c_void_p(fd), _POSIX_FD)
        return handle.value

    def reserve(self, size: int) -> int:
        address = _Address()
        self._call("cuMemAddressReserve", byref(address), size, 0, 0, 0)
        return address.value

    def unreserve(self, address: int, size: int) -> None:
        self._call("cuMemAddressFree", address, size)

    def map(self, address: int, size: int, handle: int) -> None:
        self._call("cuMemMap", address, size, 0, handle, 0)

    def unmap(self, address: int, size: int) -> None:
        self._call("cuMemUnmap", address, size)

    def set_access(self, address: int, size: int, device: int, *, writable: bool) -> None:
        access = _Access(_Location(_ON_DEVICE, device), _READ_WRITE if writable else _READ)
        self._call("cuMemSetAccess", address, size, byref(access), 1)

    def dma_buf(self, address: int, size: int, *, pcie: bool) -> int:
        fd = c_int(-1)
        flags = _OVER_PCIE if pcie else 0
        self._call("cuMemGetHandleForAddressRange", byref(fd), address, size, _DMA_BUF_FD, flags)
        return fd.value

    def register(self, address: int, size: int, *, read_only: bool) -> None:
        flags = _PORTABLE | _DEVICE_MAP | (_READ_ONLY if read_only else 0)
        self._call("cuMemHostRegister_v2", address, size, flags)

    def unregister(self, address: int) -> None:
        self._call("cuMemHostUnregister", address)

    def device_pointer(self, address: int) -> int:
        pointer = _Address()
        self._call("cuMemHostGetDevicePointer_v2", byref(pointer), address, 0)
        return pointer.value

    def allocate(self, size: int) -> int:
        address = _Address()
        self._call("cuMemAlloc_v2", byref(address), size)
        return address.value

    def free(self, address: int) -> None:
        self._call("cuMemFree_v2", address)

    def fill(self, address: int, value: int, size: int) -> None:
        with self._stream() as stream:
            self.fill_async(address, value, size, stream)

    def write(self, address: int, source: int, size: int) -> None:
        self.copy(address, source, size)

    def read(self, target: int, address: int, size: int) -> None:
        self.copy(target, address, size)

    def copy(self, target: int, source: int, size: int) -> None:
        with self._stream() as stream:
            self.copy_async(target, source, size, stream)

    @contextmanager
    def _stream(self) -> Iterator[int]:
        """A stream of the current context that nobody else uses; what was started on it is done
        in the end.

        To wait for all of a context, or for its default stream, would end a CUDA graph that
        another thread captures.
        """
        context = c_void_p()
        self._call("cuCtxGetCurrent", byref(context))
        idle = self._idle.setdefault(context.value or 0, [])
        stream = _last(idle) or self.create_stream()
        try:
            yield stream
            self.synchronize(stream)
        finally:
            idle.append(stream)

    def create_stream(self) -> int:
        stream = c_void_p()
        self._call("cuStreamCreate", byref(stream), _NON_BLOCKING)
        return stream.value or 0

    def destroy_stream(self, stream: int) -> None:
        self._call("cuStreamDestroy_v2", stream)

    def synchronize(self, stream: int) -> None:
        self._call("cuStreamSynchronize", stream)

    def copy_async(self, target: int, source: int, size: int, stream: int) -> None:
        self._call("cuMemcpyAsync", target, source, size, stream)

    def fill_async(self, address: int, value: int, size: int, stream: int) -> None:
        self._call("cuMemsetD8Async", address, value, size, stream)

    def load_module(self, image: bytes) -> int:
        module = c_void_p()
        self._call("cuModuleLoadData", byref(module), image)
        return module.value or 0

    def unload_module(self, module: int) -> None:
        self._call("cuModuleUnload", module)

    def function(self, module: int, name: str) -> int:
        function = c_void_p()
        self._call("cuModuleGetFunction", byref(function), module, name.encode())
        return function.value or 0

    def launch(
        self,
        function: int,
        blocks: int,
        threads: int,
        shared: int,
        stream: int,
        arguments: Sequence[int],
    ) -> None:
        values = [c_ulonglong(argument) for argument in arguments]
        pointers = (c_void_p * len(values))(*map(ctypes.addressof, values))
        grid, block = (blocks, 1, 1), (threads, 1, 1)
        self._call("cuLaunchKernel", function, *grid, *block, shared, stream, pointers, None)
