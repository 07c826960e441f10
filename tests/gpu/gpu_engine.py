"""Test engines and spans, moved to a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from paged_reference import Engine, Stored

from kmesh.kernels.cuda import Memory
from kmesh.kernels.host import PagedLayout
from kmesh.kernels.plan import Load


class GpuEngine:
    """An engine's buffers on the GPU, filled as the engine's are."""

    def __init__(self, cupy: Any, engine: Engine) -> None:
        self._buffers = [cupy.asarray(buffer) for buffer in engine.buffers]
        shifts = [
            new.data.ptr - old.ctypes.data
            for old, new in zip(engine.buffers, self._buffers, strict=True)
        ]
        layout = engine.layout
        self.layout: PagedLayout = replace(
            layout,
            k_base=tuple(a + s for a, s in zip(layout.k_base, shifts, strict=True)),
            v_base=tuple(a + s for a, s in zip(layout.v_base, shifts, strict=True)),
        )

    def image(self) -> bytes:
        return b"".join(buffer.get().tobytes() for buffer in self._buffers)


class Payloads:
    """Copies of spans where a GPU reads them: in its memory, or pinned on the host."""

    def __init__(self, cupy: Any, memory: Memory) -> None:
        self._cupy, self._memory = cupy, memory
        self._kept: list[Any] = []

    def put(self, data: np.ndarray) -> int:
        data = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        if self._memory is Memory.GPU:
            made = self._cupy.asarray(data)
            self._kept.append(made)
            return int(made.data.ptr)
        pinned = self._cupy.cuda.alloc_pinned_memory(data.nbytes)
        np.frombuffer(pinned, dtype=np.uint8, count=data.nbytes)[:] = data
        self._kept.append(pinned)
        return int(pinned.ptr)

    def loads(self, loads: Sequence[Load], spans: Sequence[Stored]) -> list[Load]:
        """The same loads, of copies. All payloads lie in one allocation, as in a slab."""
        starts, size = [], 0
        for span in spans:
            starts.append(size)
            size += -(-span.array.nbytes // 64) * 64
        slab = np.zeros(size, dtype=np.uint8)
        for span, start in zip(spans, starts, strict=True):
            slab[start : start + span.array.nbytes] = span.array.reshape(-1).view(np.uint8)
        base = self.put(slab)
        at = {
            span.array.ctypes.data: (base + start, self.put(span.sums))
            for span, start in zip(spans, starts, strict=True)
        }
        made = []
        for load in loads:
            records = load.records.copy()
            for record in records:
                record["address"], record["sums_address"] = at[int(record["address"])]
            made.append(Load(records, load.requests))
        return made

    def read(self, address: int, size: int) -> bytes:
        """What is there now."""
        out = np.zeros(size, dtype=np.uint8)
        self._cupy.cuda.runtime.memcpy(out.ctypes.data, address, size, 4)
        return out.tobytes()
