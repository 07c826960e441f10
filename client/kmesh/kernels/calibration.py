"""What this machine does with payloads of host memory: the chooser's rates, measured in a moment.

Restores of zeros are timed, from the call to the end, each a few times, and the least counts: what
else the machine does only adds. Takes some hundredths of a second, 72 MiB of the GPU beside the
copy engine's buffers and 32 MiB of pinned memory, which are given back.
"""

from __future__ import annotations

import ctypes
import logging
import math
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

import numpy as np

from kmesh import _host
from kmesh.kernels.chooser import Rates, Route
from kmesh.kernels.cuda import H200, Restorer, Settings
from kmesh.kernels.device import Device, cupy
from kmesh.kernels.host import PagedLayout, SpanPart
from kmesh.kernels.plan import Load, Memory, Request
from kmesh.layout import tiles

logger = logging.getLogger("kmesh.kernels")

_LAYERS, _HEADS, _ROW, _BLOCK, _SPAN = 4, 8, 256, 16, 64
_SPAN_BYTES = _LAYERS * 2 * _HEADS * _SPAN * _ROW
_PAGE_BYTES = 2 * _HEADS * _BLOCK * _ROW
_PER_SPAN = _SPAN // _BLOCK
#: Requests of the restores that say how fast pages are written, and how often in one launch.
_REQUESTS, _TIMES = 8, 8
_FEW_BLOCKS = 4
#: Free bytes of the GPU without which nothing is measured: an engine that starts needs them.
_SPARE_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of restores.

    Attributes:
        small, large: bytes of payloads.
        kernel, copies: of both sizes, by each route, to one request; ``copies`` is None where the
            GPU had no memory for their buffers.
        one_block: of ``small``, by the kernel with one block.
        pages: bytes that are written to pages by ``written`` and by ``few``, first in one round and
            then in ``rounds``.
        written, few: from the GPU's memory, with all blocks, and with ``few_blocks``.
    """

    small: int
    large: int
    kernel: tuple[float, float]
    copies: tuple[float, float] | None
    one_block: float
    pages: int
    rounds: int
    written: tuple[float, float]
    few: tuple[float, float]
    few_blocks: int


def fitted(times: Times, before: Rates) -> Rates:
    """The rates of which the times follow.

    Args:
        before: gives what was not measured.

    Raises:
        ValueError: a larger restore was not slower than a smaller one, so that something else was
            measured.
    """
    more = times.large - times.small
    kernel = more / _positive(times.kernel[1] - times.kernel[0])
    kernel_start = max(times.kernel[0] - times.small / kernel, 0.0)
    again = (times.rounds - 1) * times.pages
    write = again / _positive(times.written[1] - times.written[0])
    write_block = again / _positive(times.few[1] - times.few[0]) / times.few_blocks
    found = replace(
        before,
        kernel=kernel,
        kernel_block=min(times.small / _positive(times.one_block - kernel_start), kernel),
        kernel_start=kernel_start,
        write=write,
        write_block=min(write_block, write),
    )
    if times.copies is None:
        return found
    # Of each, the last chunk is scattered when nothing is copied any more.
    small, large = (
        taken - min(size, before.copy_chunk) / write
        for taken, size in zip(times.copies, (times.small, times.large), strict=True)
    )
    copy = more / _positive(large - small)
    return replace(found, copy=copy, copy_start=max(small - times.small / copy, 0.0))


def _positive(value: float) -> float:
    if not (value > 0 and math.isfinite(value)):
        raise ValueError(f"a restore took {value:.2g} s more than one of less")
    return value


class _Bench:
    """Pages, spans in pinned memory and on the GPU, and what restores them."""

    def __init__(self, ordinal: int, spans: int, repeats: int, undo: ExitStack) -> None:
        module = cupy()
        runtime = module.cuda.runtime
        self._ordinal, self._repeats, self._undo = ordinal, repeats, undo
        undo.enter_context(Device(ordinal))
        free = runtime.memGetInfo()[0]
        if free < _SPARE_BYTES:
            raise MemoryError(f"only {free >> 20} MiB of its memory are free")
        self._stream = runtime.streamCreateWithFlags(1)
        undo.callback(runtime.streamDestroy, self._stream)
        blocks = max(_REQUESTS * self.part(spans), spans) * _PER_SPAN
        pages = runtime.malloc(_LAYERS * blocks * _PAGE_BYTES)
        undo.callback(runtime.free, pages)
        k_base = tuple(pages + layer * blocks * _PAGE_BYTES for layer in range(_LAYERS))
        self._layout = PagedLayout(
            k_base=k_base,
            v_base=tuple(base + _ROW for base in k_base),
            block_stride=_PAGE_BYTES,
            head_stride=2 * _ROW,
            token_stride=2 * _ROW * _HEADS,
            block_tokens=_BLOCK,
            num_blocks=blocks,
            heads=_HEADS,
            row_bytes=_ROW,
        )
        self._ids = np.arange(blocks, dtype=np.int64)
        size = spans * _SPAN_BYTES
        # All spans are alike, and so are their sums.
        sums = 8 * tiles(_SPAN_BYTES)
        # Past CuPy's pool, which would keep it page-locked for as long as the process lives.
        self._host = runtime.hostAlloc(size + sums + 8, 0)
        undo.callback(runtime.freeHost, self._host)
        ctypes.memset(self._host, 0, size)
        self._sums = self._host + -(-size // 8) * 8
        self._root = _host.tile_sums(self._host, _SPAN_BYTES, self._sums)
        self._gpu = runtime.malloc(self.part(spans) * _SPAN_BYTES)
        undo.callback(runtime.free, self._gpu)
        runtime.memcpyAsync(self._gpu, self._host, self.part(spans) * _SPAN_BYTES, 1, self._stream)
        runtime.streamSynchronize(self._stream)

    @staticmethod
    def part(spans: int) -> int:
        """Of so many spans, those that are written to several requests."""
        return max(spans // 4, 1)

    def restorer(self, max_ctas: int | None = None) -> Restorer:
        made = Restorer(self._layout, device=self._ordinal, settings=Settings(max_ctas=max_ctas))
        self._undo.callback(made.close)
        return made

    def load(self, spans: int, requests: int, base: int) -> Load:
        parts = [
            SpanPart(
                address=base + i * _SPAN_BYTES, sums_address=self._sums, root=self._root,
                length=_SPAN_BYTES, tokens=_SPAN, token_begin=0, token_end=_SPAN,
                position=i * _SPAN, src_heads=_HEADS, src_head_begin=0, dst_head_begin=0,
                heads=_HEADS, src_layers=_LAYERS, src_layer_begin=0, dst_layer_begin=0,
                layers=_LAYERS,
            )
            for i in range(spans)
        ]  # fmt: skip
        each = spans * _PER_SPAN
        return Load.of(parts, [Request(self._ids[i * each :][:each]) for i in range(requests)])

    def host(self, restorer: Restorer, spans: int, route: Route) -> float | None:
        """Seconds to one request; None: it went another way."""
        loads = [self.load(spans, 1, self._host)]
        return self._least(restorer, loads, Memory.HOST, route)

    def gpu(self, restorer: Restorer, spans: int, times: int) -> float:
        """Seconds to several requests, ``times`` over in one launch."""
        loads = [self.load(spans, _REQUESTS, self._gpu)] * times
        took = self._least(restorer, loads, Memory.GPU, Route.KERNEL)
        assert took is not None
        return took

    def _least(
        self, restorer: Restorer, loads: Sequence[Load], memory: Memory, route: Route
    ) -> float | None:
        least = math.inf
        # The first allocates.
        for number in range(self._repeats + 1):
            begin = time.perf_counter()
            pending = restorer.restore(loads, self._stream, memory=memory, route=route)
            statuses = pending.wait()
            took = time.perf_counter() - begin
            if any(any(status) for load in statuses for status in load):
                raise ValueError("a restore went wrong")
            if pending.route is not route:
                return None
            least = min(least, took) if number else least
        return least


def timed(ordinal: int, *, spans: int = 32, repeats: int = 5) -> Times:
    """Times restores on a GPU.

    Args:
        ordinal: as this process counts.
        spans: of 1 MiB, that are restored at most.

    Raises:
        Exception: the GPU has no memory for it, or refuses.
    """
    few = 1
    with ExitStack() as undo:
        bench = _Bench(ordinal, spans, repeats, undo)
        usual, one, some = (bench.restorer(n) for n in (None, 1, _FEW_BLOCKS))

        def host(restorer: Restorer, count: int) -> float:
            took = bench.host(restorer, count, Route.KERNEL)
            assert took is not None
            return took

        copies = [bench.host(usual, count, Route.COPY) for count in (few, spans)]
        part = bench.part(spans)
        return Times(
            small=few * _SPAN_BYTES,
            large=spans * _SPAN_BYTES,
            kernel=(host(usual, few), host(usual, spans)),
            copies=None if None in copies else (copies[0], copies[1]),  # type: ignore[arg-type]
            one_block=host(one, few),
            pages=part * _SPAN_BYTES * _REQUESTS,
            rounds=_TIMES,
            written=(bench.gpu(usual, part, 1), bench.gpu(usual, part, _TIMES)),
            few=(bench.gpu(some, part, 1), bench.gpu(some, part, _TIMES)),
            few_blocks=_FEW_BLOCKS,
        )


_known: dict[tuple[str, int], Rates | None] = {}
_lock = threading.Lock()


def rates(ordinal: int, uuid: str, version: int) -> Rates | None:
    """The rates of a GPU, measured once in a process for each GPU and driver; waits for it.

    Args:
        version: of the driver.

    Returns:
        None: they could not be measured, which is logged; ``H200`` serves.
    """
    with _lock:
        if (uuid, version) not in _known:
            _known[uuid, version] = _measured(ordinal, uuid)
        return _known[uuid, version]


def _measured(ordinal: int, uuid: str) -> Rates | None:
    begin = time.perf_counter()
    try:
        found = fitted(timed(ordinal), H200)
    except Exception as wrong:
        logger.warning(
            "%s: its restores are chosen by the rates of an H200, as its own can't be measured: %s",
            uuid, wrong,
        )  # fmt: skip
        return None
    logger.info(
        "%s: from host memory the kernel reads %.1f GB/s (%.1f with one block, %.0f µs more for"
        " each restore), copies bring %.1f GB/s (%.0f µs more), pages take %.0f GB/s;"
        " measured in %.0f ms",
        uuid, found.kernel / 1e9, found.kernel_block / 1e9, found.kernel_start * 1e6,
        found.copy / 1e9, found.copy_start * 1e6, found.write / 1e9,
        (time.perf_counter() - begin) * 1e3,
    )  # fmt: skip
    return found
