"""A round of mirrors against dense restores of the same members, in one process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import cupy
import numpy as np

from benchmarks.gpu.rig import LARGE, Memory, new_stream, runtime
from benchmarks.gpu.rows import Bench
from benchmarks.gpu.siblings import Siblings, Sizes, Stock
from benchmarks.results import Row
from kmesh.kernels import rounds as planning
from kmesh.kernels.chooser import Route
from kmesh.kernels.cuda import Restorer
from kmesh.kernels.cuda_rounds import RoundRestorer
from kmesh.kernels.rounds import Round

#: 12 of each 64 tokens are a mirror's own.
SIZES = Sizes(
    layers=LARGE.layers, heads=LARGE.heads, head_dim=LARGE.head_dim, spans=LARGE.spans,
    span_tokens=LARGE.span_tokens, own=12, members=8,
)  # fmt: skip
_RATIO = "median of a/b"


class _Rig:
    """Siblings in registered host memory and copied to the GPU, and who restores them."""

    def __init__(self, bench: Bench, stream: int) -> None:
        self.stream, self.pages = stream, bench.pages
        self.siblings = Siblings(SIZES)
        self.requests = bench.pages.requests[: SIZES.members]
        self._driver = bench.driver
        self.host = {
            id(one): self._driver.register(one.address, one.size) for one in self.siblings.stocks()
        }
        self._copies: dict[int, Any] = {}
        self._restorer = Restorer(bench.pages.layout)
        self._rounds = RoundRestorer(bench.pages.layout)

    def at(self, stock: Stock, memory: Memory) -> tuple[int, Memory]:
        """Where all of a stock begins; a copy on the GPU is made when it is first asked for."""
        if memory is Memory.HOST:
            return self.host[id(stock)], memory
        if id(stock) not in self._copies:
            self._copies[id(stock)] = copy = cupy.empty(stock.size, dtype=cupy.uint8)
            runtime.memcpy(copy.data.ptr, stock.address, stock.size, 1)
        return int(self._copies[id(stock)].data.ptr), memory

    def round(self, base: Memory, recipes: Memory) -> Round:
        s = self.siblings
        return s.round(self.requests, self.at(s.base, base), self.at(s.recipes, recipes))

    def mirrors(self, wanted: Round, route: Route | None) -> Callable[[], None]:
        """A round from the call until its statuses are known, which must be good."""

        def call() -> None:
            done = self._rounds.restore(wanted, self.stream, route=route).wait()
            if any(done.members) or any(done.bases):
                raise RuntimeError("a round went wrong")

        return call

    def dense(self, memory: Memory, route: Route | None) -> Callable[[], None]:
        """The same members, each with a payload of its own, in one call."""
        loads = self.siblings.loads(self.requests, self.at(self.siblings.dense, memory)[0])

        def call() -> None:
            done = self._restorer.restore(loads, self.stream, memory=memory, route=route).wait()
            if any(any(status) for load in done for status in load):
                raise RuntimeError("a restore went wrong")

        return call

    def checked(self, call: Callable[[], None]) -> str:
        """Runs it once on wiped pages and compares every byte of every member."""
        self.pages.wipe()
        runtime.deviceSynchronize()
        call()
        for member, request in enumerate(self.requests):
            if not self.pages.holds(request, cupy.asarray(self.siblings.payload(member))):
                raise RuntimeError(f"the pages of member {member} are not what it holds")
        return "every byte compared"

    def planning_seconds(self, wanted: Round, count: int) -> list[float]:
        """Of the CPU alone: who takes what, written down."""
        memory = np.empty(1 << 26, dtype=np.uint8)
        memory = memory[-memory.ctypes.data % 16 :]
        taken = []
        for _ in range(count):
            began = time.perf_counter()
            planning.write(self.pages.layout, wanted, allocate=lambda _: memory)
            taken.append(time.perf_counter() - began)
        return taken

    def close(self) -> None:
        self._restorer.close()
        self._rounds.close()
        for stock in self.siblings.stocks():
            self._driver.unregister(stock.address)
            stock.close()


def rounds(bench: Bench) -> Iterator[Row]:
    """Eight mirrors by one launch, against eight dense restores in one call."""
    with new_stream() as stream:
        rig = _Rig(bench, stream)
        share = f"8 mirrors of 235 MB, recipes {100 * rig.siblings.literal_share:.1f} % of dense"
        host, gpu = Memory.HOST, Memory.GPU
        cases: Sequence[tuple[str, Memory, Memory, Memory, str]] = (
            ("round_host", host, host, host, "all in host memory"),
            ("round_gpu", gpu, host, host, "base in GPU memory, recipes and dense spans in host"),
            ("round_all_gpu", gpu, gpu, gpu, "all in GPU memory"),
        )
        for name, base, recipes, dense, where in cases:
            wanted = rig.round(base, recipes)
            routes = {"": None, "_kernel": Route.KERNEL} if dense is host else {"": None}
            calls = {}
            for suffix, route in routes.items():
                calls[f"dense{suffix}"] = rig.dense(dense, route)
                calls[f"round{suffix}"] = rig.mirrors(wanted, route)
            notes = {label: rig.checked(call) for label, call in calls.items()}
            taken = bench.in_turn(calls)
            for suffix in routes:
                how = "both by the kernel" if suffix else "both by the route that is chosen"
                note = f"{share}; {where}; {how}; {notes[f'round{suffix}']}"
                series = {kind: taken[kind + suffix] for kind in ("dense", "round")}
                yield Row(name + suffix, "ratio", _RATIO, series, note)
            if name == "round_host":
                seconds = rig.planning_seconds(wanted, bench.rounds)
                series = {"plan": [1e3 * t for t in seconds]}
                yield Row("round_plan", "ms", "median", series, "512 recipes over 64 spans, CPU")
        rig.close()
