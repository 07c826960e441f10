"""Whether a kind of memory works here: proved by moving a pattern, before anything relies on it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from kmesh import _host
from kmesh.cuda.device import Device
from kmesh.cuda.memory import DeviceMemory, Registration
from kmesh.errors import UnsupportedError
from kmesh.handles import HandleKind
from kmesh.mapping import Mapping, importable

_PATTERN_BYTES = 1 << 16

_lock = threading.Lock()
_proved: set[tuple[str, HandleKind]] = set()


def prove(device: Device, kind: HandleKind) -> None:
    """Proves a kind on a GPU, once in a process.

    Raises:
        UnsupportedError: it does not work here; says why.
        CudaError: the driver refuses.
    """
    with _lock:
        if (device.uuid, kind) in _proved:
            return
        moves = _MOVES.get(kind)
        if moves is None:
            raise UnsupportedError(f"{device.name} reads no {kind.name}")
        pattern = os.urandom(_PATTERN_BYTES)
        if moves(device, pattern) != pattern:
            raise UnsupportedError(f"{kind.name}: {device.name} read other bytes than were written")
        _proved.add((device.uuid, kind))


def through_export(device: Device, pattern: bytes) -> bytes:
    """The pattern as it comes through an export and a read-only import."""
    with DeviceMemory.create(device, device.granularity) as made:
        made.write(pattern)
        fd = made.export()
        try:
            with DeviceMemory.open(device, fd, made.size) as opened:
                return opened.read(0, len(pattern))
        finally:
            os.close(fd)


def through_registration(device: Device, pattern: bytes) -> bytes:
    """The pattern as the GPU reads it from a memfd that is mapped read-only, and registered."""
    with importable(pattern) as fd, Mapping(fd, len(pattern)) as mapping:
        seen = Registration(device, mapping.address, mapping.size)
        try:
            return fetch(device, seen.address, len(pattern))
        finally:
            seen.close()


def fetch(device: Device, address: int, length: int) -> bytes:
    """Bytes as the GPU sees them: moved by it into memory of its own, and read from there."""
    data = bytearray(length)
    with device.current() as driver:
        scratch = driver.allocate(length)
        try:
            driver.copy(scratch, address, length)
            driver.read(_host.address(data), scratch, length)
        finally:
            driver.free(scratch)
    return bytes(data)


_MOVES: dict[HandleKind, Callable[[Device, bytes], bytes]] = {
    HandleKind.CUDA_VMM_FD: through_export,
    HandleKind.MEMFD: through_registration,
}
