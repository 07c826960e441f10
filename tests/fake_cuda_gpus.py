"""GPUs and contexts of a CUDA driver without a GPU, and who calls it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kmesh.cuda.driver import Attribute
from kmesh.errors import CudaError

MIB = 1 << 20
UUIDS = ("GPU-00000000-0000-0000-0000-0000000000a0", "GPU-00000000-0000-0000-0000-0000000000b1")

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


@dataclass
class Gpu:
    """One GPU. ``attributes`` that are not named are supported; ``peers`` are UUIDs of others
    whose memory it can read."""

    uuid: str = UUIDS[0]
    name: str = "Fake GPU"
    total: int = 256 * MIB
    attributes: dict[Attribute, int] = field(default_factory=lambda: {Attribute.DMA_BUF: 0})
    peers: frozenset[str] = frozenset()


def error(call: str, code: int) -> CudaError:
    """What a call of the driver raises."""
    return CudaError(call, code, NAMES[code])


class FakeGpus:
    """The part of ``kmesh.cuda.driver.Driver`` about GPUs and contexts.

    Attributes: see ``fake_cuda.FakeDriver``.
    """

    def __init__(self, gpus: tuple[Gpu, ...], refuse: Callable[[str], None] | None) -> None:
        self.gpus = gpus or (Gpu(),)
        self.refuse = refuse
        self.calls: list[str] = []
        self.relaxed: set[str] = set()
        self.unsafe: set[tuple[str, str]] = set()
        self._contexts: dict[int, int] = {}
        self._current = threading.local()

    def end(self) -> None:
        self._contexts.clear()
        self._stack().clear()

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

    def version(self) -> int:
        return 13000

    def device_count(self) -> int:
        return len(self.gpus)

    def _gpu(self, device: int, call: str) -> Gpu:
        if not 0 <= device < len(self.gpus):
            raise error(call, 101)
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
            raise error("cuDevicePrimaryCtxRelease_v2", 201)
        self._contexts[device] -= 1

    def _stack(self) -> list[int]:
        if not hasattr(self._current, "stack"):
            self._current.stack = []
        stack: list[int] = self._current.stack
        return stack

    def push_context(self, context: int) -> None:
        if not self._contexts.get(context - 1000):
            raise error("cuCtxPushCurrent_v2", 201)
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
            raise error(call, 201)
        return self._stack()[-1]
