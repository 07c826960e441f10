"""What the processor does for a round before and while its bytes move, on a GPU that does nothing.

Eight mirrors of 4,096 tokens of a 28-layer model, 64 recipes each; their base is in the GPU's
memory and their recipes in host memory, as in the row ``round_gpu`` of ``benchmarks.gpu``. For work
on rounds where there is no GPU:

    python -m benchmarks.round_planning [--quick] [--json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np

from benchmarks.gpu.siblings import Siblings, Sizes
from kmesh.codec import ManyTables
from kmesh.kernels import device, rounds
from kmesh.kernels.chooser import Route
from kmesh.kernels.cuda_rounds import RoundRestorer
from kmesh.kernels.host import PagedLayout
from kmesh.kernels.plan import Memory, Request
from kmesh.kernels.rounds import HostBytes

SIZES = Sizes(layers=28, heads=4, head_dim=128, spans=64, span_tokens=64, own=12, members=8)
BLOCK = 16
#: More than the processor's caches hold.
_EVICT_BYTES = 96 << 20


class _Gpu:
    """What ``kmesh.kernels.device.cupy`` gives: memory of the host's, and nothing that is done.

    Attributes:
        started: when each copy and each launch was asked for: which it was, and at which
            ``thread_time``. The copy engine's job is not among them.
    """

    def __init__(self) -> None:
        self.started: list[tuple[str, float]] = []
        self._memory: list[np.ndarray] = []
        attributes = {
            "MultiProcessorCount": 132,
            "MaxSharedMemoryPerMultiprocessor": 233_472,
            "MaxSharedMemoryPerBlockOptin": 232_448,
        }
        nothing = lambda *_: 0  # noqa: E731
        runtime = SimpleNamespace(
            malloc=lambda size: self._pinned(size).ptr, free=nothing, getDevice=nothing,
            streamCreateWithFlags=nothing, streamDestroy=nothing, streamWaitEvent=nothing,
            streamSynchronize=nothing, eventCreateWithFlags=nothing, eventDestroy=nothing,
            eventRecord=nothing, eventSynchronize=nothing, eventQuery=nothing,
            memcpyAsync=lambda *_: self._start("copy"),
        )  # fmt: skip
        launch = SimpleNamespace(launchKernel=lambda *_: self._start("launch"))
        self.cuda: Any = SimpleNamespace(
            runtime=runtime, driver=launch, alloc_pinned_memory=self._pinned,
            Device=lambda _: SimpleNamespace(attributes=attributes),
        )  # fmt: skip

    def RawModule(self, **_: Any) -> Any:
        kernel = SimpleNamespace(kernel=SimpleNamespace(ptr=0))
        return SimpleNamespace(get_function=lambda _: kernel)

    def _start(self, what: str) -> None:
        self.started.append((what, time.thread_time()))

    def _pinned(self, size: int) -> Any:
        memory = np.zeros(size + 16, np.uint8)
        self._memory.append(memory)
        found = memory[-memory.ctypes.data % 16 :][:size].view(_Pinned)
        return found


class _Pinned(np.ndarray):
    """Host memory that knows where it is."""

    @property
    def ptr(self) -> int:
        return int(self.ctypes.data)


class Bench:
    """A round whose tables are copied as a connector copies them, and a restorer for it."""

    def __init__(self, sizes: Sizes, gpu: _Gpu) -> None:
        self._gpu = gpu
        self._siblings = siblings = Siblings(sizes, dense=False)
        blocks = sizes.spans * sizes.span_tokens // BLOCK
        ids = np.random.default_rng(1).permutation(blocks * sizes.members)
        requests = [Request(one) for one in ids.reshape(sizes.members, blocks)]
        base, recipes = (1 << 44, Memory.GPU), (siblings.recipes.address, Memory.HOST)
        self.round = siblings.round(requests, base, recipes)
        self.places = self.round.members["part"]["address"], self.round.members["part"]["length"]
        self.tables = ManyTables(*self.places)
        self.round.members["tables"] = self.tables.addresses
        row = sizes.head_dim * 2
        block = 2 * row * sizes.heads * BLOCK
        k = tuple((1 << 45) + layer * block * len(ids) for layer in range(sizes.layers))
        self.layout = PagedLayout(
            k_base=k, v_base=tuple(at + row for at in k), block_stride=block,
            head_stride=2 * row, token_stride=2 * row * sizes.heads, block_tokens=BLOCK,
            num_blocks=len(ids), heads=sizes.heads, row_bytes=row,
        )  # fmt: skip
        self._restorer = RoundRestorer(self.layout)
        self._memory = gpu._pinned(1 << 24)

    def reads(self) -> None:
        HostBytes(self.round)

    def read_tables(self) -> None:
        ManyTables(*self.places)

    def plan(self) -> None:
        rounds.write(self.layout, self.round, allocate=lambda _: self._memory)

    def restore(self) -> dict[str, float]:
        """Seconds of this thread from the call until each step of a round by the copy engine."""
        started = self._gpu.started
        started.clear()
        began = time.thread_time()
        pending = self._restorer.restore(self.round, 0, route=Route.COPY)
        ended = time.thread_time()
        copies = [at for what, at in started if what == "copy"]
        launches = [at for what, at in started if what == "launch"]
        before = [at for at in copies if at < launches[0]]
        pending.wait()
        return {
            "first copy": copies[0] - began, "buffers full": before[-1] - began,
            "job up": launches[0] - began, "first chunk": launches[1] - began,
            "returned": ended - began,
        }  # fmt: skip


def seconds(call: Callable[[], None]) -> float:
    began = time.thread_time()
    call()
    return time.thread_time() - began


def measured(count: int) -> Iterator[tuple[str, dict[str, list[float]]]]:
    """Microseconds of each step, with caches warm and cold."""
    gpu = _Gpu()
    with mock.patch.object(device, "cupy", return_value=gpu):
        bench = Bench(SIZES, gpu)
        other = np.zeros(_EVICT_BYTES, np.uint8)
        for caches, size in (("warm", 0), ("cold", len(other))):
            samples: dict[str, list[float]] = {}
            for number in range(-3, count):
                took = {}
                for name, call in (
                    ("tables", bench.read_tables), ("reads", bench.reads), ("plan", bench.plan),
                ):  # fmt: skip
                    other[:size] += 1
                    took[name] = seconds(call)
                other[:size] += 1
                took |= bench.restore()
                if number >= 0:
                    for name, taken in took.items():
                        samples.setdefault(name, []).append(1e6 * taken)
            yield caches, samples


def main() -> None:
    """Prints medians, and the fastest and slowest sample."""
    arguments = argparse.ArgumentParser(description="What the processor does for a round.")
    arguments.add_argument("--quick", action="store_true", help="few samples")
    arguments.add_argument("--json", action="store_true", help="all samples")
    chosen = arguments.parse_args()
    found = dict(measured(10 if chosen.quick else 100))
    if chosen.json:
        print(json.dumps(found))
        return
    print("µs of processor time, median (fastest to slowest); a round's count from its call")
    for caches, samples in found.items():
        for name, taken in samples.items():
            middle = statistics.median(taken)
            print(f"{caches} {name:13} {middle:6.0f} ({min(taken):.0f} to {max(taken):.0f})")


if __name__ == "__main__":
    main()
