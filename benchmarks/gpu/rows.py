"""The rows: what is compared runs in turn, in one process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import cupy

from benchmarks.gpu.rig import (
    LARGE,
    SMALL,
    Driver,
    Load,
    Memory,
    Pages,
    Shape,
    Slab,
    new_stream,
    runtime,
    until_done,
)  # fmt: skip
from benchmarks.results import Row, unavailable
from benchmarks.timing import in_turn
from kmesh.kernels.chooser import Route
from kmesh.kernels.cuda import Restorer, Settings

_NO_SUMS = ("-DKM_NO_SUMS",)
_RATIO = "median of a/b"


class Bench:
    """Everything that the rows share.

    Args:
        rounds: samples of a series.
    """

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds
        self.driver = Driver()
        self.slab = Slab(self.driver, LARGE, 1)
        self.pages = Pages(LARGE, 16)
        self.scratch = cupy.empty(2 * LARGE.bytes, dtype=cupy.uint8)

    def restore(
        self,
        pages: Pages,
        loads: list[Load],
        stream: int,
        memory: Memory,
        route: Route | None = Route.KERNEL,
        settings: Settings | None = None,
        options: tuple[str, ...] = (),
    ) -> Callable[[], None]:
        """A restore from the call until its statuses are known, which must be good."""
        restorer = Restorer(pages.layout, settings=settings, options=options)

        def call() -> None:
            done = restorer.restore(loads, stream, memory=memory, route=route).wait()
            if any(any(status) for load in done for status in load):
                raise RuntimeError("a restore went wrong")

        return call

    def checked(self, call: Callable[[], None], pages: Pages, slab: Slab, requests: int) -> str:
        """Runs it once on wiped pages and compares every byte."""
        pages.wipe()
        runtime.deviceSynchronize()
        call()
        if not pages.equal(slab, requests):
            raise RuntimeError("the pages are not what the spans hold")
        return "every byte compared"

    def copy_in(self, stream: int, slab: Slab, shape: Shape) -> Callable[[], None]:
        """The copy engine, of the same bytes, from memory that is registered the same way."""
        return until_done(
            lambda: runtime.memcpyAsync(self.scratch.data.ptr, slab.device, shape.bytes, 1, stream),
            stream,
        )

    def in_turn(self, calls: dict[str, Callable[[], None]]) -> dict[str, list[float]]:
        return in_turn(calls, self.rounds, warm=3)


def host(bench: Bench) -> Iterator[Row]:
    """Spans in host memory to the pages of 1 to 16 requests."""
    parts = bench.slab.parts(bench.slab.device)
    with new_stream() as stream:
        for requests in (1, 2, 4, 8, 16):
            loads = [bench.pages.load(parts, requests)]
            kernel = bench.restore(bench.pages, loads, stream, Memory.HOST)
            copies = bench.restore(bench.pages, loads, stream, Memory.HOST, Route.COPY)
            bench.checked(copies, bench.pages, bench.slab, requests)
            note = bench.checked(kernel, bench.pages, bench.slab, requests)
            taken = bench.in_turn(
                {
                    "copy": bench.copy_in(stream, bench.slab, LARGE),
                    "kernel": kernel,
                    "copies": copies,
                }
            )
            for name in ("kernel", "copies"):
                yield Row(
                    f"host_{requests}_{name}",
                    "ratio",
                    _RATIO,
                    {"copy": taken["copy"], name: taken[name]},
                    f"235 MB, {requests} requests; {note}",
                )
        loads = [bench.pages.load(parts, 16)]
        few = bench.restore(bench.pages, loads, stream, Memory.HOST, settings=Settings(max_ctas=16))
        taken = bench.in_turn({"copy": bench.copy_in(stream, bench.slab, LARGE), "kernel": few})
        yield Row("host_16_few_ctas", "ratio", _RATIO, taken, "at most 16 thread blocks")


def gpu(bench: Bench) -> Iterator[Row]:
    """Spans in the GPU's memory to the pages of 1 and 16 requests."""
    kept, parts = bench.slab.on_gpu()
    size, here = LARGE.bytes, bench.scratch.data.ptr
    with new_stream() as stream:
        one = bench.restore(bench.pages, [bench.pages.load(parts, 1)], stream, Memory.GPU)
        note = bench.checked(one, bench.pages, bench.slab, 1)
        copy = until_done(lambda: runtime.memcpyAsync(here + size, here, size, 3, stream), stream)
        yield Row("gpu_1", "ratio", _RATIO, bench.in_turn({"copy": copy, "kernel": one}), note)
        times = _device_times(bench, parts, stream)
        yield Row("gpu_1_device", "ratio", _RATIO, times, "by events around the launch alone")
        many = bench.restore(bench.pages, [bench.pages.load(parts, 16)], stream, Memory.GPU)
        note = bench.checked(many, bench.pages, bench.slab, 16)
        pages = bench.pages.memory
        fill = until_done(lambda: runtime.memsetAsync(pages.data.ptr, 7, 16 * size, stream), stream)
        yield Row("gpu_16", "ratio", _RATIO, bench.in_turn({"memset": fill, "kernel": many}), note)
        for requests, name in ((1, "gpu_1_sums"), (16, "gpu_16_sums")):
            loads = [bench.pages.load(parts, requests)]
            taken = bench.in_turn(
                {
                    "with": bench.restore(bench.pages, loads, stream, Memory.GPU),
                    "without": bench.restore(
                        bench.pages, loads, stream, Memory.GPU, options=_NO_SUMS
                    ),
                }
            )
            yield Row(name, "ratio", _RATIO, taken, "the same kernel without sums")
        loads = [bench.pages.load(bench.slab.parts(bench.slab.device), 1)]
        taken = bench.in_turn(
            {
                "with": bench.restore(bench.pages, loads, stream, Memory.HOST),
                "without": bench.restore(bench.pages, loads, stream, Memory.HOST, options=_NO_SUMS),
            }
        )
        yield Row("host_1_sums", "ratio", _RATIO, taken, "the same kernel without sums")
    del kept


def _device_times(bench: Bench, parts: Any, stream: int) -> dict[str, list[float]]:
    """Seconds on the device between events right before and right behind the launch."""
    restorer = Restorer(bench.pages.layout)
    begin, end = runtime.eventCreate(), runtime.eventCreate()
    launch, loads, here = restorer._launch, [bench.pages.load(parts, 1)], bench.scratch.data.ptr

    def timed(*arguments: Any) -> None:
        runtime.eventRecord(begin, stream)
        launch(*arguments)
        runtime.eventRecord(end, stream)

    restorer._launch = timed  # type: ignore[method-assign]
    taken: dict[str, list[float]] = {"copy": [], "kernel": []}
    for number in range(-3, bench.rounds):
        restorer.restore(loads, stream, memory=Memory.GPU).wait()
        kernel = runtime.eventElapsedTime(begin, end) / 1e3
        runtime.eventRecord(begin, stream)
        runtime.memcpyAsync(here + LARGE.bytes, here, LARGE.bytes, 3, stream)
        runtime.eventRecord(end, stream)
        runtime.eventSynchronize(end)
        if number >= 0:
            taken["kernel"].append(kernel)
            taken["copy"].append(runtime.eventElapsedTime(begin, end) / 1e3)
    return taken


def small(bench: Bench) -> Iterator[Row]:
    """A short span of a small model to four requests."""
    slab, pages = Slab(bench.driver, SMALL, 2), Pages(SMALL, 4)
    loads = [pages.load(slab.parts(slab.device), 4)]
    with new_stream() as stream:
        call = bench.restore(pages, loads, stream, Memory.HOST)
        note = bench.checked(call, pages, slab, 4)
        taken = bench.in_turn({"kernel": call, "copy": bench.copy_in(stream, slab, SMALL)})
    microseconds = {name: [1e6 * t for t in values] for name, values in taken.items()}
    yield Row("small_4", "µs", "median", microseconds, f"6.3 MB, 4 requests; {note}")
    slab.close()


_DECODE = r"""
extern "C" __global__ void decode(const uint4 *weights, unsigned long long count, unsigned *out) {
    unsigned sum = 0;
    for (unsigned long long i = blockIdx.x * (unsigned long long)blockDim.x + threadIdx.x;
         i < count; i += (unsigned long long)gridDim.x * blockDim.x) {
        uint4 v = weights[i];
        sum += v.x ^ v.y ^ v.z ^ v.w;
    }
    if (sum == 12345u) *out = sum;
}
"""


def beside(bench: Bench) -> Iterator[Row]:
    """Restores while another stream does what decoding does most: read weights."""
    weights = cupy.ones(1 << 28, dtype=cupy.uint64)
    out = cupy.zeros(1, dtype=cupy.uint32)
    decode = cupy.RawKernel(_DECODE, "decode")
    loads = [bench.pages.load(bench.slab.parts(bench.slab.device), 1)]
    working = cupy.cuda.Stream(non_blocking=True)

    def start() -> None:
        with working:
            for _ in range(24):
                decode((132 * 8,), (256,), (weights, weights.size // 2, out))

    def alone() -> None:
        start()
        working.synchronize()

    with new_stream() as stream:
        for name, route in (("kernel", Route.KERNEL), ("copies", Route.COPY)):
            restore = bench.restore(bench.pages, loads, stream, Memory.HOST, route)
            taken: dict[str, list[float]] = {n: [] for n in ("both", "decode", "beside", "restore")}
            for number in range(-2, bench.rounds // 2):
                samples = {}
                began = time.perf_counter()
                alone()
                samples["decode"] = time.perf_counter() - began
                began = time.perf_counter()
                restore()
                samples["restore"] = time.perf_counter() - began
                began = time.perf_counter()
                start()
                inside = time.perf_counter()
                restore()
                samples["beside"] = time.perf_counter() - inside
                working.synchronize()
                samples["both"] = time.perf_counter() - began
                if number >= 0:
                    for key, value in samples.items():
                        taken[key].append(value)
            yield Row(
                f"beside_decode_{name}", "ratio", _RATIO,
                {"beside": taken["beside"], "restore": taken["restore"]},
                "a restore beside reads of 2 GiB of weights, against one alone",
            )  # fmt: skip
            yield Row(
                f"beside_restore_{name}", "ratio", _RATIO,
                {"both": taken["both"], "decode": taken["decode"]},
                "24 such reads with a restore beside them, against without",
            )  # fmt: skip


def memory(bench: Bench) -> Iterator[Row]:
    """What an engine pays for the daemon's memory."""
    from benchmarks.gpu import slabs
    from kmesh.cuda.device import Device
    from kmesh.cuda.driver import load

    few = 2 if bench.rounds < 20 else 3
    with Device(load(), "0") as device:
        yield from slabs.registration(device, few)
        yield from slabs.imports(device)
    yield from slabs.pool(few)
    yield from slabs.starts(4 * few)


def hits(bench: Bench) -> Iterator[Row]:
    """Hits with all that belongs to one: the connector and a daemon, without an engine."""
    from benchmarks.gpu.serving import hitting

    with hitting(bench) as engine:
        for requests in (1, 8):
            note = bench.checked(engine.calls(requests), bench.pages, bench.slab, requests)
            taken = bench.in_turn({"all": engine.calls(requests)})["all"]
            yield Row(
                f"hit_{requests}", "ms", "median", {"all": [1e3 * t for t in taken]},
                f"keys, look-up, Acquire, restore, report and release; {note}",
            )  # fmt: skip


#: Of the peer's results, in milliseconds: what it takes alone, and with its look-ups.
_PEER = {"": "ms_p50", "_all": "lookup_plus_retrieve_ms"}


def peer(bench: Bench, results: list[dict[str, Any]]) -> Iterator[Row]:
    """LMCache's multiprocess server, measured on the same machine just before.

    Args:
        results: of its benchmark, for the same bytes.
    """
    from benchmarks.gpu.serving import hitting

    parts = bench.slab.parts(bench.slab.device)
    theirs = {
        (requests, kind): [
            one[name] / 1e3
            for one in results
            if one["what"] == "retrieve" and one["tokens"] == LARGE.tokens
            and one["conc"] == requests and one["bytes_equal"] and name in one
        ]
        for requests in (1, 8) for kind, name in _PEER.items()
    }  # fmt: skip
    with new_stream() as stream, hitting(bench) as engine:
        for (requests, kind), taken in theirs.items():
            if not taken:
                yield unavailable(f"peer_{requests}{kind}", "ratio", "the peer gave no result")
                continue
            loads = [bench.pages.load(parts, requests)]
            alone = bench.restore(bench.pages, loads, stream, Memory.HOST, None)
            call = engine.calls(requests) if kind else alone
            bench.checked(call, bench.pages, bench.slab, requests)
            what = "look-ups and retrieve; ours from tokens to report" if kind else "retrieve"
            yield Row(
                f"peer_{requests}{kind}", "ratio", "median a / median b",
                {"peer": taken, "ours": bench.in_turn({"ours": call})["ours"]},
                f"LMCache 0.5.6's median {what}; the same bytes, one for each order of blocks",
            )  # fmt: skip


def encode(bench: Bench) -> Iterator[Row]:
    """Encoding; the codec's libraries are needed for it alone."""
    from benchmarks.gpu import encoding

    yield from encoding.encode(bench)


def rounds(bench: Bench) -> Iterator[Row]:
    """Rounds of mirrors; as ``encode``."""
    from benchmarks.gpu import rounds as families

    yield from families.rounds(bench)


ROWS: dict[str, Callable[[Bench], Iterator[Row]]] = {
    "host": host,
    "gpu": gpu,
    "small": small,
    "beside": beside,
    "encode": encode,
    "hits": hits,
    "memory": memory,
    "rounds": rounds,
}
