"""What the benchmarks work with: spans, in registered host memory or on the GPU, and pages."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import cupy
import numpy as np

from kmesh import _host
from kmesh.kernels.cuda import Load, Memory, Request
from kmesh.kernels.host import PagedLayout, SpanPart
from kmesh.layout import TILE_BYTES, sums_offset, tiles

#: cuMemHostRegister: portable, mapped, and of a mapping that may only be read.
_READ_ONLY = 1 | 2 | 8

runtime = cupy.cuda.runtime


@dataclass(frozen=True)
class Shape:
    """A model and how much of a prompt is shared. Elements have two bytes."""

    layers: int
    heads: int
    head_dim: int
    tokens: int
    span_tokens: int = 64
    block_tokens: int = 16

    @property
    def row_bytes(self) -> int:
        return 2 * self.head_dim

    @property
    def span_bytes(self) -> int:
        return self.layers * 2 * self.heads * self.span_tokens * self.row_bytes

    @property
    def spans(self) -> int:
        return self.tokens // self.span_tokens

    @property
    def bytes(self) -> int:
        return self.spans * self.span_bytes


#: 28 layers of 4 · 128: Qwen2 7B. 235 MB.
LARGE = Shape(28, 4, 128, 4096)
#: 24 layers of 2 · 64: Qwen2 0.5B. 6.3 MB.
SMALL = Shape(24, 2, 64, 512)


class Driver:
    """The few calls of the driver that CuPy does not have."""

    def __init__(self) -> None:
        self._cuda = ctypes.CDLL("libcuda.so.1")
        # The driver's calls are about the current context; this makes one.
        runtime.free(0)

    def register(self, address: int, size: int) -> int:
        """Registers memory that may only be read; returns its address on the device."""
        self._call("cuMemHostRegister_v2", ctypes.c_void_p(address), ctypes.c_size_t(size),
                   ctypes.c_uint(_READ_ONLY))  # fmt: skip
        device = ctypes.c_uint64()
        self._call("cuMemHostGetDevicePointer_v2", ctypes.byref(device), ctypes.c_void_p(address),
                   ctypes.c_uint(0))  # fmt: skip
        return device.value

    def unregister(self, address: int) -> None:
        self._call("cuMemHostUnregister", ctypes.c_void_p(address))

    def version(self) -> str:
        number = ctypes.c_int()
        self._call("cuDriverGetVersion", ctypes.byref(number))
        return f"{number.value // 1000}.{number.value % 1000 // 10}"

    def _call(self, name: str, *arguments: object) -> None:
        status = getattr(self._cuda, name)(*arguments)
        if status:
            raise OSError(f"{name} gave {status}")


@dataclass(frozen=True)
class Filled:
    """A file with spans as the daemon lays them out, for any process to open.

    Attributes:
        size: bytes of all, sums included. step: bytes from one span to the next.
        roots: of the spans.
    """

    path: str
    size: int
    step: int
    roots: list[int]


def fill(fd: int, shape: Shape, seed: int) -> Filled:
    """Writes spans into a memfd of this process, which must stay open."""
    step = tiles(shape.span_bytes) * TILE_BYTES
    payload = shape.spans * step
    size = payload + 2 * TILE_BYTES + payload // TILE_BYTES * 8
    size = -(-size // TILE_BYTES) * TILE_BYTES
    os.ftruncate(fd, size)
    with mmap.mmap(fd, size) as writable:
        memory = np.frombuffer(writable, dtype=np.uint8)
        memory[:payload].view(np.uint64)[:] = np.random.default_rng(seed).integers(
            0, 2**63, payload // 8, dtype=np.uint64
        )
        sums, base = sums_offset(size), memory.ctypes.data
        roots = [
            _host.tile_sums(
                base + i * step, shape.span_bytes, base + sums + i * step // TILE_BYTES * 8
            )
            for i in range(shape.spans)
        ]
        del memory
    return Filled(f"/proc/{os.getpid()}/fd/{fd}", size, step, roots)


class Slab:
    """Spans as the daemon lays them out, mapped to be read, and registered.

    Args:
        filled: by another process; without it, the slab is made here, of random bytes.
    """

    def __init__(
        self, driver: Driver, shape: Shape, seed: int, filled: Filled | None = None
    ) -> None:
        self._driver = driver
        if filled is None:
            self._fd = os.memfd_create("kmesh-bench")
            filled = fill(self._fd, shape, seed)
        else:
            self._fd = os.open(filled.path, os.O_RDONLY)
        self.size, self.roots, self._step = filled.size, filled.roots, filled.step
        self._region = _host.Region(self._fd, self.size, False)
        self.address = self._region.address
        self.device = driver.register(self.address, self.size)
        self._shape, self._sums = shape, sums_offset(self.size)

    def payload(self) -> np.ndarray:
        """All spans: [span, layer, plane, head, token, dim] of u16."""
        s = self._shape
        memory = np.frombuffer(self._region, dtype=np.uint8)[: s.spans * self._step]
        rows = memory.reshape(s.spans, self._step)[:, : s.span_bytes]
        return rows.view(np.uint16).reshape(
            s.spans, s.layers, 2, s.heads, s.span_tokens, s.head_dim
        )

    def parts(self, base: int) -> list[SpanPart]:
        """Parts whose payloads begin at ``base``; their sums are in the host's memory."""
        s = self._shape
        return [
            SpanPart(
                address=base + i * self._step,
                sums_address=self.device + self._sums + i * self._step // TILE_BYTES * 8,
                root=root,
                length=s.span_bytes,
                tokens=s.span_tokens,
                token_begin=0,
                token_end=s.span_tokens,
                position=i * s.span_tokens,
                src_heads=s.heads,
                src_head_begin=0,
                dst_head_begin=0,
                heads=s.heads,
                src_layers=s.layers,
                src_layer_begin=0,
                dst_layer_begin=0,
                layers=s.layers,
            )
            for i, root in enumerate(self.roots)
        ]

    def on_gpu(self) -> tuple[Any, list[SpanPart]]:
        """A copy of the whole slab on the GPU, and parts of it: sums there too."""
        copy = cupy.empty(self.size, dtype=cupy.uint8)
        return copy, self.copied_to(copy.data.ptr)

    def copied_to(self, address: int) -> list[SpanPart]:
        """Parts of a copy of the whole slab, which is made at an address of a GPU."""
        runtime.memcpy(address, self.address, self.size, 1)
        parts = self.parts(address)
        for part in parts:
            part.sums_address += address - self.device
        return parts

    def close(self) -> None:
        self._driver.unregister(self.address)
        self._region.close()
        os.close(self._fd)


class Pages:
    """Pages as vLLM has them: [block, token, head, K and V] for each layer, blocks shuffled."""

    def __init__(self, shape: Shape, requests: int, order: str = "NHD") -> None:
        self._shape = s = shape
        blocks = s.tokens // s.block_tokens
        self.count = requests * blocks + 1
        inner = (s.block_tokens, s.heads) if order == "NHD" else (s.heads, s.block_tokens)
        self._order = order
        self.memory = cupy.full(
            (s.layers, self.count, *inner, 2, s.head_dim), 0xEEEE, dtype=cupy.uint16
        )
        cell = 2 * s.row_bytes
        layer = self.count * s.block_tokens * s.heads * cell
        bases = [self.memory.data.ptr + i * layer for i in range(s.layers)]
        near, far = cell, cell * inner[1]
        self.layout = PagedLayout(
            k_base=tuple(bases),
            v_base=tuple(base + s.row_bytes for base in bases),
            block_stride=cell * s.block_tokens * s.heads,
            head_stride=near if order == "NHD" else far,
            token_stride=far if order == "NHD" else near,
            block_tokens=s.block_tokens,
            num_blocks=self.count,
            heads=s.heads,
            row_bytes=s.row_bytes,
        )
        ids = np.random.default_rng(1).permutation(self.count - 1).astype(np.int64) + 1
        self.requests = [Request(ids[i * blocks : (i + 1) * blocks]) for i in range(requests)]

    def load(self, parts: list[SpanPart], requests: int) -> Load:
        return Load.of(parts, self.requests[:requests])

    def wipe(self) -> None:
        self.memory.fill(0xEEEE)

    def equal(self, slab: Slab, requests: int) -> bool:
        """Whether these requests have the slab's spans in their pages, all bytes compared."""
        expected = cupy.asarray(slab.payload())
        return all(self.holds(request, expected) for request in self.requests[:requests])

    def holds(self, request: Request, expected: Any) -> bool:
        """Whether a request has these spans: [span, layer, plane, head, token, dim] on the GPU."""
        s = self._shape
        for layer in range(s.layers):
            got = self.memory[layer][cupy.asarray(request.pages)]
            if self._order == "NHD":
                got = got.transpose(0, 2, 1, 3, 4)
            # [block, head, token, plane, dim] → [span, plane, head, token, dim]
            per = s.span_tokens // s.block_tokens
            got = got.reshape(s.spans, per, s.heads, s.block_tokens, 2, s.head_dim)
            got = got.transpose(0, 4, 2, 1, 3, 5).reshape(
                s.spans, 2, s.heads, s.span_tokens, s.head_dim
            )
            if not bool((got == expected[:, layer]).all()):
                return False
        return True


@contextmanager
def new_stream() -> Iterator[int]:
    """A stream of its own."""
    stream = cupy.cuda.Stream(non_blocking=True)
    yield stream.ptr
    stream.synchronize()


def until_done(start: Callable[[], Any], stream: int) -> Callable[[], None]:
    """A call that starts something on a stream and comes back when the stream is done."""

    def call() -> None:
        start()
        runtime.streamSynchronize(stream)

    return call


def kernel_seconds(start: Callable[[], Any], stream: int) -> float:
    """Seconds of the device alone between the first and the last thing that ``start`` starts."""
    begin, end = runtime.eventCreate(), runtime.eventCreate()
    runtime.eventRecord(begin, stream)
    start()
    runtime.eventRecord(end, stream)
    runtime.eventSynchronize(end)
    took = runtime.eventElapsedTime(begin, end) / 1e3
    runtime.eventDestroy(begin)
    runtime.eventDestroy(end)
    return float(took)


__all__ = [
    "LARGE", "SMALL", "Driver", "Load", "Memory", "Pages", "Shape", "Slab", "kernel_seconds",
    "new_stream", "runtime", "until_done",
]  # fmt: skip
