"""Memory that a GPU sees: mapped on it, or this process's own and registered.

Each object undoes what it did, also when a later step of its making fails.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import ExitStack
from types import TracebackType

from kmesh import _host
from kmesh.cuda.device import Device
from kmesh.cuda.driver import Attribute
from kmesh.errors import ConfigError, CudaError, UnsupportedError
from kmesh.pages import touch

#: New drivers refuse registrations of 512 GiB and more.
REGISTER_BYTES = 64 << 30


@contextlib.contextmanager
def _steps() -> Iterator[ExitStack]:
    """Steps that are undone, last first, unless all of them were done."""
    with ExitStack() as undo:
        yield undo
        undo.pop_all()


class DeviceMemory:
    """Memory of a GPU, mapped on it, or on another one that can read it (``Device.peers``); or
    memory of the host that CUDA made for it.

    Attributes:
        device: that it is mapped on.
        size: bytes. address: of byte 0, as that GPU sees it.
        writable: whether the mapping may be written. Read-only contains mistakes: whoever has the
            file descriptor could as well map it writable.
    """

    def __init__(self, device: Device, size: int, handle: int, *, writable: bool) -> None:
        """Maps ``handle``, which the object owns from now on, also if this fails."""
        self.device = device
        self.size = size
        self.writable = writable
        self._handle: int | None = handle
        with _steps() as given:
            given.callback(device.driver.release, handle)
            with device.current() as driver, _steps() as undo:
                self.address = driver.reserve(size)
                undo.callback(driver.unreserve, self.address, size)
                driver.map(self.address, size, handle)
                undo.callback(driver.unmap, self.address, size)
                driver.set_access(self.address, size, device.ordinal, writable=writable)

    @classmethod
    def create(
        cls, device: Device, size: int, peer: int | None = None, node: int | None = None
    ) -> DeviceMemory:
        """New memory, mapped writable.

        Args:
            peer: ordinal of the GPU whose memory it is, if not of ``device``.
            node: NUMA node of the host in whose memory it is made (``Device.host_node``); None: it
                is the GPU's.

        Raises:
            ConfigError: the size is no multiple of ``device.granularity``.
            CudaError: the driver refuses, for instance for want of memory.
        """
        step = device.granularity_on(node)
        if size <= 0 or size % step:
            raise ConfigError(f"{size} bytes are no multiple of {step}, as {device.uuid} wants")
        owner = device.ordinal if peer is None else peer
        handle = device.driver.create(owner, size, rdma=device.rdma, node=node)
        return cls(device, size, handle, writable=True)

    @classmethod
    def open(cls, device: Device, fd: int, size: int, *, writable: bool = False) -> DeviceMemory:
        """Memory of another process.

        Args:
            fd: stays the caller's, and may be closed at once.

        Raises:
            CudaError: ``fd`` stands for no GPU memory, or for less.
        """
        handle = device.driver.import_fd(fd)
        return cls(device, size, handle, writable=writable)

    def export(self) -> int:
        """A file descriptor of all of it; the caller owns it, and it keeps the memory alive."""
        if self._handle is None:
            raise ValueError("the memory is closed")
        return self.device.driver.export_fd(self._handle)

    def dma_buf(self, offset: int = 0, length: int | None = None) -> int:
        """A DMA-BUF of ``length`` bytes (to the end if None) at ``offset``, for NICs and storage.

        Both are whole pages of the host. Whoever has it can write the memory; the caller owns it.

        Raises:
            UnsupportedError: this machine has none.
            CudaError: the driver refuses.
        """
        length = self.size - offset if length is None else length
        address = self._place(offset, length)
        if not self.device.can(Attribute.DMA_BUF):
            raise UnsupportedError(f"{self.device.name} or its driver has no DMA-BUF")
        with self.device.current() as driver:
            try:
                return driver.dma_buf(address, length, pcie=False)
            except CudaError:
                return driver.dma_buf(address, length, pcie=True)

    def fill(self, value: int, offset: int = 0, length: int | None = None) -> None:
        """Sets ``length`` bytes (to the end if None) at ``offset``."""
        length = self.size - offset if length is None else length
        address = self._place(offset, length)
        with self.device.current() as driver:
            driver.fill(address, value, length)

    def write(self, data: bytes | bytearray | memoryview, offset: int = 0) -> None:
        """Bytes of this process into the GPU's memory."""
        address = self._place(offset, len(data))
        with self.device.current() as driver:
            driver.write(address, _host.address(data), len(data))

    def read(self, offset: int, length: int) -> bytes:
        """A copy of ``length`` bytes at ``offset``."""
        data = bytearray(max(length, 0))
        self.fetch(_host.address(data), offset, length)
        return bytes(data)

    def fetch(self, target: int, offset: int, length: int) -> None:
        """``length`` bytes at ``offset`` into host memory at the address ``target``."""
        address = self._place(offset, length)
        with self.device.current() as driver:
            driver.read(target, address, length)

    def _place(self, offset: int, length: int) -> int:
        if offset < 0 or length < 1 or offset + length > self.size or self._handle is None:
            raise ValueError(f"bytes {offset}:{offset + length} are not in {self.size}")
        return self.address + offset

    @property
    def closed(self) -> bool:
        return self._handle is None

    def close(self) -> None:
        """Its address is invalid from here on. May be called again."""
        handle, self._handle = self._handle, None
        if handle is None:
            return
        # Each is tried, also when one before it fails.
        with self.device.current() as driver, ExitStack() as undo:
            undo.callback(driver.release, handle)
            undo.callback(driver.unreserve, self.address, self.size)
            undo.callback(driver.unmap, self.address, self.size)

    def __enter__(self) -> DeviceMemory:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class Registration:
    """Memory that is mapped in this process, so that a GPU can reach it by itself.

    Attributes:
        address: of its first byte, as the GPU sees it.

    Args:
        address, size: whole pages; the mapping must outlive this object.
        chunk: most bytes that are registered in one call.
        writable: the GPU may write it too, and so may this process; otherwise it is mapped
            read-only.

    Raises:
        UnsupportedError: the GPU can't read memory that is mapped read-only, or sees the pieces
            of a large one apart.
        CudaError: the driver refuses.
    """

    def __init__(
        self,
        device: Device,
        address: int,
        size: int,
        *,
        chunk: int = REGISTER_BYTES,
        writable: bool = False,
    ) -> None:
        if not writable and not device.can(Attribute.READ_ONLY_REGISTER):
            raise UnsupportedError(f"{device.name} can't register memory that is mapped read-only")
        self._device = device
        self._parts: list[int] = []
        # The driver takes several times as long for pages that this mapping has not touched yet.
        touch(address, size, writable=writable)
        with device.current() as driver, _steps() as undo:
            undo.callback(self._parts.clear)
            for part in range(address, address + size, chunk):
                length = min(chunk, address + size - part)
                driver.register(part, length, read_only=not writable)
                undo.callback(driver.unregister, part)
                self._parts.append(part)
            seen = [driver.device_pointer(part) - part for part in self._parts]
            if len(set(seen)) != 1:
                raise UnsupportedError(f"{device.name} sees the pieces of one mapping apart")
            self.address = address + seen[0]

    def close(self) -> None:
        """The GPU must not read it any more. May be called again."""
        parts, self._parts = self._parts, []
        if not parts:
            return
        with self._device.current() as driver, ExitStack() as undo:
            for part in parts:
                undo.callback(driver.unregister, part)
