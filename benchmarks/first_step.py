"""Processor time of the connector's hooks in the steps of a hit, of a 28-layer model of 7B shape:
one request's, and eight siblings' in one step, which share no blocks.

The daemon is real, the GPU is not: jobs are written as for one, and launched nowhere. Payloads are
a tile long in the daemon, as the bytes themselves are nothing to the hooks; the workers are told
their real lengths. For work on the connector, beside ``make bench``:

    python -m benchmarks.first_step [--quick] [--json]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from benchmarks.bench_scheduler import Holder
from benchmarks.spand import Spand, serve, store
from kmesh.kernels import plan as jobs
from kmesh.kernels.chooser import Route
from kmesh.kernels.cuda import Load, Memory
from kmesh.kernels.host import PagedLayout
from kmesh.keys import KeyChain, Namespace
from kmesh.layout import TILE_BYTES, Shard
from kmesh.session import Role, Session
from kmesh_vllm.config import Settings
from kmesh_vllm.counts import Counts
from kmesh_vllm.gpumover import GpuMover
from kmesh_vllm.identity import Identity
from kmesh_vllm.loading import Loader
from kmesh_vllm.metadata import SPAN_RECORD, LoadPlan
from kmesh_vllm.movers import Ids
from kmesh_vllm.scheduler import SchedulerHalf
from kmesh_vllm.sharding import Sharding

NAMESPACE = Namespace("bench", "w", "bfloat16", layers=28, kv_heads=4, head_dim=128)
SHARDING = Sharding(28, 4, 1)
BLOCK = 16
BLOCKS = 1 << 15
SPANS = (64, 256, 469)
REQUESTS = (1, 8)
WARM = 5
#: What is timed, in the order in which it happens.
HOOKS = ("add", "match", "allocated", "plan", "load", "finished", "worked")


class _Pending:
    """A launch that ended at once, well."""

    route = Route.KERNEL

    def __init__(self, job: jobs.Job) -> None:
        self._job = job

    def done(self) -> bool:
        return True

    def wait(self) -> list[list[bytes]]:
        return self._job.statuses(np.zeros(self._job.parts, np.uint32))


class _Restorer:
    """Writes jobs as ``kmesh.kernels.cuda.Restorer`` does for payloads in a GPU's memory."""

    def __init__(self, layout: PagedLayout) -> None:
        self._layout = layout
        self._memory = np.zeros(1 << 21, np.uint8)

    def restore(self, loads: Sequence[Load], stream: int, *, memory: Memory) -> _Pending:
        return _Pending(
            jobs.write(self._layout, loads, unit_stages=3, allocate=lambda size: self._memory)
        )

    def prepare(self, *, copies: bool) -> None:
        pass

    def close(self) -> None:
        pass


class _Gpu:
    """What a ``GpuMover`` asks of a GPU, where all of it costs nothing."""

    device: Any = SimpleNamespace(
        uuid="GPU-bench", name="none", can=lambda _: True, peers=lambda: ()
    )

    def restorer(self, layout: PagedLayout, settings: object) -> _Restorer:
        return _Restorer(layout)

    def __getattr__(self, name: str) -> Callable[..., int]:
        return lambda *_: 1


class _Slab:
    """A slab that is attached; where it lies is of no matter, as nothing reads it."""

    def __init__(self, number: int) -> None:
        self.slab = number
        self.address = 1 << 40

    def sums_address(self, offset: int) -> int:
        return (1 << 44) + offset // TILE_BYTES * 8

    def contains(self, offset: int, length: int) -> bool:
        return offset + length <= 1 << 36


class _Pages:
    """``PagedCache`` of tensors that nobody made."""

    device = 0

    def __init__(self, identity: Identity) -> None:
        shape = identity.namespace
        row = shape.head_dim * 2
        block = 2 * row * shape.kv_heads * BLOCK
        k = tuple((1 << 45) + layer * block * BLOCKS for layer in range(shape.layers))
        self.layout = PagedLayout(
            k_base=k,
            v_base=tuple(at + row for at in k),
            block_stride=block,
            head_stride=2 * row * BLOCK,
            token_stride=2 * row,
            block_tokens=BLOCK,
            num_blocks=BLOCKS,
            heads=shape.kv_heads,
            row_bytes=row,
        )

    def expand(self, blocks: Ids) -> Ids:
        return blocks


class Bench:
    """Both halves of the connector over one session.

    Args:
        sharing: siblings wait for each other's blocks, as where vLLM's own prefix cache is on.
    """

    def __init__(self, spand: Spand, session: Session, *, sharing: bool) -> None:
        identity = Identity(NAMESPACE, SHARDING, BLOCK, BLOCKS)
        # Patience as long as it takes: what is measured is work, not who wins a race.
        settings = Settings(str(spand.socket_dir), acquire_timeout_ms=60_000)
        self.half = SchedulerHalf(
            identity, settings, Holder(session), patience=30.0, sharing=sharing
        )
        self._length = identity.geometry(4).payload_bytes(64)
        pages: Any = _Pages(identity)
        gpu: Any = _Gpu()
        self._mover: Any = GpuMover(
            gpu, pages.layout, lambda: None, Counts(), max_ctas=0, buffer_bytes=0
        )
        self._mover._compiled.wait()
        self._mover.attached = lambda session, number: _Slab(number)
        self._mover.reads_gpu = lambda slab: True
        self.loader = Loader(
            self._mover,
            pages,
            identity,
            Shard(0, 28, 0, 4),
            lambda: session,
            settings,
            Counts(),
        )
        self._digest = NAMESPACE.digest()
        self._count = 0

    def hit(self, tokens: list[int], requests: int) -> dict[str, float]:
        """Microseconds of this thread in each hook, of the process in all of them, and of the clock
        (``wall``)."""
        first = self._count
        self._count += requests
        names = [f"request-{number}" for number in range(first, self._count)]
        each = len(tokens) // BLOCK + 1
        blocks = [list(range(i * each, (i + 1) * each)) for i in range(requests)]
        taken = dict.fromkeys((*HOOKS, "process", "wall"), 0.0)

        def timed(hook: str, call: Callable[[], Any]) -> Any:
            before = time.perf_counter_ns(), time.process_time_ns(), time.thread_time_ns()
            found = call()
            after = time.perf_counter_ns(), time.process_time_ns(), time.thread_time_ns()
            for name, begin, end in zip(("wall", "process", hook), before, after, strict=True):
                taken[name] += (end - begin) / 1e3
            return found

        half, loader = self.half, self.loader
        for name in names:
            timed("add", lambda name=name: half.add(name, tokens, self._digest))
        for name, ids in zip(names, blocks, strict=True):
            answer, _ = timed("match", lambda name=name: half.match(name, 0, len(tokens)))
            if answer != len(tokens) // 64 * 64:
                raise RuntimeError(f"a hit was answered with {answer}")
            timed(
                "allocated",
                lambda name=name, ids=ids, answer=answer: half.allocated(name, ids, answer),
            )
        step = timed("plan", lambda: half.plan([], []))
        loads = self._real(step.loads)
        timed("load", lambda: loader.start(loads))
        ended, bad, report = timed("finished", loader.finished)
        if ended != set(names) or bad or report:
            raise RuntimeError(f"loads ended with {ended}, {bad}, {report}")
        timed("worked", lambda: half.worked(report, ended))
        for name in names:
            half.finished(name)
        return taken

    def _real(self, loads: Sequence[LoadPlan]) -> list[LoadPlan]:
        """As if the payloads were as long as a model's; siblings' plans share them as before."""
        records = np.frombuffer(loads[0].spans, SPAN_RECORD).copy()
        records["length"] = self._length
        records["offset"] = np.arange(len(records)) * -(-self._length // TILE_BYTES) * TILE_BYTES
        spans = records.tobytes()
        return [dataclasses.replace(load, spans=spans) for load in loads]

    def close(self) -> None:
        self.half.shutdown()
        self.loader.close()
        self._mover.close()


def measured(rounds: int) -> Iterator[tuple[tuple[int, int], dict[str, list[float]]]]:
    """Spans of a hit and requests, and samples of each hook, the whole process and the clock."""
    rng = random.Random(1)
    with serve(host_memory="128MiB", staging_memory="64MiB") as spand:
        session = spand.connect(Role.SCHEDULER, "bench", NAMESPACE)
        benches = {n: Bench(spand, session, sharing=n == 1) for n in REQUESTS}
        try:
            for spans in SPANS:
                tokens = [rng.randrange(128_000) for _ in range(spans * 64 + 17)]
                chain = KeyChain(NAMESPACE.digest())
                chain.extend(tokens)
                with spand.connect() as tool:
                    store(tool, chain.keys, SHARDING.shards[0], length=TILE_BYTES)
                for requests, bench in benches.items():
                    hits = [bench.hit(tokens, requests) for _ in range(rounds + WARM)][WARM:]
                    samples = {name: [hit[name] for hit in hits] for name in hits[0]}
                    samples["hooks"] = [sum(hit[hook] for hook in HOOKS) for hit in hits]
                    yield (spans, requests), samples
        finally:
            for bench in benches.values():
                bench.close()
            session.close()


def main() -> None:
    """Prints a line for each number of spans and of requests: medians."""
    arguments = argparse.ArgumentParser(
        description="Processor time of the connector's hooks in the steps of a hit."
    )
    arguments.add_argument("--quick", action="store_true", help="few samples")
    arguments.add_argument("--json", action="store_true", help="all samples")
    chosen = arguments.parse_args()
    found = dict(measured(40 if chosen.quick else 200))
    if chosen.json:
        print(json.dumps({f"{spans} x {n}": samples for (spans, n), samples in found.items()}))
        return
    print(
        "µs of processor time, medians; process: all threads of the engine's process; wall: clock"
    )
    for (spans, requests), samples in found.items():
        row = ", ".join(f"{name} {statistics.median(s):.0f}" for name, s in samples.items())
        print(f"{spans:4} spans, {requests} requests: {row}")


if __name__ == "__main__":
    main()
