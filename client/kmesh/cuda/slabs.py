"""A daemon's slabs, as a GPU of this process sees them."""

from __future__ import annotations

import os
import threading
from types import TracebackType

from kmesh.cuda.device import Device
from kmesh.cuda.memory import DeviceMemory, Registration
from kmesh.cuda.proof import prove
from kmesh.errors import UnsupportedError
from kmesh.handles import Handle, HandleKind
from kmesh.layout import TILE_BYTES, sums_offset
from kmesh.mapping import Mapping
from kmesh.session import Session


class _Registered:
    """A host slab, mapped and registered; ``users`` share it."""

    def __init__(self, device: Device, handle: Handle) -> None:
        self.mapping = Mapping(handle.fd, handle.size)
        try:
            self.seen = Registration(device, self.mapping.address, handle.size)
        except BaseException:
            self.mapping.close()
            raise
        self.users = 0

    def close(self) -> None:
        self.seen.close()
        self.mapping.close()


#: Registering takes long and pins pages: once a process for each slab, whoever asks, and also
#: when a session has ended and the next one is given the same slab.
_registered: dict[tuple[Device, int, int], _Registered] = {}
_lock = threading.Lock()


class _Laid:
    """A slab that begins at an address."""

    __slots__ = ("address", "size", "slab")

    def __init__(self, slab: int, size: int, address: int) -> None:
        self.slab = slab
        self.size = size
        self.address = address

    def sums_address(self, offset: int) -> int:
        """Address of the first tile sum of the span at ``offset``, one u64 for each tile."""
        return self.address + sums_offset(self.size) + offset // TILE_BYTES * 8

    def contains(self, offset: int, length: int) -> bool:
        """Whether a span may lie at ``offset``: on a tile, and before the sums."""
        end = offset + length
        return offset >= 0 <= length and not offset % TILE_BYTES and end <= sums_offset(self.size)


class HostSide(_Laid):
    """A slab of host memory as this process itself reads it; addresses are the process's."""

    __slots__ = ("_mapping",)

    def __init__(self, slab: int, mapping: Mapping) -> None:
        super().__init__(slab, mapping.size, mapping.address)
        self._mapping = mapping

    def view(self, offset: int, length: int) -> memoryview:
        """Read-only bytes; ValueError if no span can lie there."""
        if not self.contains(offset, length):
            raise ValueError(f"no span of {length} bytes can lie at {offset}")
        return self._mapping.view(offset, length)


class DeviceSlab(_Laid):
    """One slab. It may be read as long as the ``DeviceSlabs`` is open that it came from.

    Attributes:
        slab: its id. kind: what it was made of.
        in_host: the GPU reaches its memory over the bus.
        address: of byte 0, as the GPU sees it.
        size: bytes, payloads and sums.
        host: the same memory for this process; None where this process can't read it.
    """

    __slots__ = ("host", "in_host", "kind")

    def __init__(
        self, slab: int, handle: Handle, address: int, mapping: Mapping | None = None
    ) -> None:
        super().__init__(slab, handle.size, address)
        self.kind = handle.kind
        self.in_host = handle.in_host or not handle.device
        self.host = None if mapping is None else HostSide(slab, mapping)


class DeviceSlabs:
    """Imports GPU slabs and registers host slabs, each when it is first asked for. Thread-safe.

    Nothing can be written through it. A slab of host memory that is still growing gets the rest of
    its pages by being registered.

    It can't know what the GPU reads, so it lets go of nothing by itself. A slab that the daemon
    has given up keeps its memory until ``drop`` or ``close``: whoever keeps this object for longer
    than some leases calls ``drop`` for each of ``Session.slabs_gone`` when nothing reads it any
    more, told by ``Session.on_slabs_gone``.

    Args:
        session: gives the slabs; may end before this object is closed.
        device: stays the caller's, and must be closed later.
    """

    def __init__(self, session: Session, device: Device) -> None:
        self._session = session
        self._device = device
        self._slabs: dict[int, DeviceSlab] = {}
        self._imported: list[DeviceMemory] = []
        self._shared: dict[int, tuple[Device, int, int]] = {}
        self._attaching = threading.Lock()

    def slab(self, number: int, timeout: float | None = None) -> DeviceSlab:
        """A slab; later calls cost a dictionary look-up.

        Raises:
            NotFound: there is no such slab, or it is not made yet.
            UnsupportedError: it is on a GPU that this one can't read, or of a kind; says why.
            CudaError: the driver refuses.
        """
        found = self._slabs.get(number)
        if found is None:
            with self._attaching:
                found = self._slabs.get(number)
                if found is None:
                    found = self._attach(number, timeout)
                    self._slabs[number] = found
        return found

    def _attach(self, number: int, timeout: float | None) -> DeviceSlab:
        handle = self._session.export_slab(number, timeout)
        if handle.kind == HandleKind.DMA_BUF:
            # CUDA takes no DMA-BUF; another kind has the same pages.
            os.close(handle.fd)
            same = HandleKind.CUDA_VMM_FD if handle.device else HandleKind.MEMFD
            handle = self._session.export_slab(number, timeout, same)
        try:
            peer = self._peer(handle.device, number)
            prove(self._device, handle.kind, peer, in_host=handle.in_host)
            if handle.kind == HandleKind.MEMFD:
                shared = self._share(number, handle)
                return DeviceSlab(number, handle, shared.seen.address, shared.mapping)
            memory = DeviceMemory.open(self._device, handle.fd, handle.size)
            self._imported.append(memory)
            return DeviceSlab(number, handle, memory.address)
        finally:
            os.close(handle.fd)

    def _peer(self, uuid: str, number: int) -> int | None:
        """Ordinal of the GPU that a slab is on, if that is another one."""
        if uuid in ("", self._device.uuid):
            return None
        peer = self._device.peers().get(uuid)
        if peer is None:
            raise UnsupportedError(
                f"slab {number} is on {uuid}, which {self._device.uuid} can't read here"
            )
        return peer

    def _share(self, number: int, handle: Handle) -> _Registered:
        file = os.fstat(handle.fd)
        key = self._device, file.st_dev, file.st_ino
        with _lock:
            found = _registered.get(key)
            if found is None:
                found = _registered[key] = _Registered(self._device, handle)
            found.users += 1
        self._shared[number] = key
        return found

    def drop(self, number: int) -> None:
        """Lets go of a slab of host memory, which the GPU must not read any more."""
        with self._attaching:
            self._slabs.pop(number, None)
            key = self._shared.pop(number, None)
        if key is not None:
            _let_go(key)

    def close(self) -> None:
        """The GPU must not read any of it any more. May be called again."""
        with self._attaching:
            imported, self._imported = self._imported, []
            shared, self._shared = self._shared, {}
            self._slabs.clear()
        for memory in imported:
            memory.close()
        for key in shared.values():
            _let_go(key)

    def __enter__(self) -> DeviceSlabs:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _let_go(key: tuple[Device, int, int]) -> None:
    """One user less of a registered slab."""
    with _lock:
        found = _registered[key]
        found.users -= 1
        if not found.users:
            del _registered[key]
            found.close()
