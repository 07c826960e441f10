"""Whether a kind of memory works here: proved by moving a pattern, before anything relies on it."""

from __future__ import annotations

import os
import threading

from kmesh import _host
from kmesh.cuda.device import Device
from kmesh.cuda.memory import DeviceMemory, Registration
from kmesh.errors import UnsupportedError
from kmesh.handles import HandleKind
from kmesh.mapping import Mapping, importable

_PATTERN_BYTES = 1 << 16

_lock = threading.Lock()
_proved: set[tuple[str, HandleKind, int | None, bool]] = set()


def prove(
    device: Device, kind: HandleKind, peer: int | None = None, *, in_host: bool = False
) -> None:
    """Proves a kind on a GPU, once in a process.

    Args:
        peer: ordinal of the GPU whose memory is read, if not of ``device``.
        in_host: it is memory of the host that CUDA made.

    Raises:
        UnsupportedError: it does not work here; says why.
        CudaError: the driver refuses.
    """
    with _lock:
        if (device.uuid, kind, peer, in_host) in _proved:
            return
        pattern = os.urandom(_PATTERN_BYTES)
        if kind == HandleKind.CUDA_VMM_FD:
            node = device.host_node if in_host else None
            seen = through_export(device, pattern, peer, node)
        elif kind == HandleKind.MEMFD:
            seen = through_registration(device, pattern)
        else:
            raise UnsupportedError(f"{device.name} reads no {kind.name}")
        if seen != pattern:
            raise UnsupportedError(f"{kind.name}: {device.name} read other bytes than were written")
        _proved.add((device.uuid, kind, peer, in_host))


def through_export(
    device: Device, pattern: bytes, peer: int | None = None, node: int | None = None
) -> bytes:
    """The pattern as it comes through an export and a read-only import."""
    with DeviceMemory.create(device, device.granularity_on(node), peer, node) as made:
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
