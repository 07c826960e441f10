"""A small engine around both halves of the connector: real kernels, a fake daemon, no vLLM."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, field
from typing import Any

import torch

from kmesh.keys import Namespace
from kmesh.session import Role, Session
from kmesh.testing import FakeDaemon
from kmesh_vllm.config import Settings
from kmesh_vllm.gpu import Gpu
from kmesh_vllm.identity import Identity
from kmesh_vllm.metadata import LoadReport, StepPlan
from kmesh_vllm.scheduler import SchedulerHalf
from kmesh_vllm.sharding import Sharding
from kmesh_vllm.worker import WorkerHalf

LAYERS, HEADS, DIM = 3, 4, 8
#: Seconds in which other threads get round to what they have to do, whatever else runs here.
WAIT = 30.0
NAMESPACE = Namespace(
    model="tiny", weights="w", dtype="float32", layers=LAYERS, kv_heads=HEADS, head_dim=DIM
)


@dataclass
class Holder:
    """Stands for ``kmesh.client.Client``: a session that tests put in and take away."""

    session: Session | None = None

    def on_change(self, callback: Callable[[Session | None], None]) -> None:
        callback(self.session)


class OnGpu:
    """A tensor that says that it is on a GPU."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self.device = torch.device("cuda", 0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tensor, name)


@dataclass
class Outcome:
    """What a load came to."""

    bad_blocks: set[int] = field(default_factory=set)
    report: LoadReport = field(default_factory=LoadReport)


class MiniEngine:
    """A scheduler half and the workers of ``tp`` ranks, with KV pages of their own, in host memory
    or on the GPU of each.

    A token's KV is a function of its position and of the prompt's seed, so that a wrong byte
    anywhere is seen.
    """

    def __init__(
        self,
        daemon: FakeDaemon,
        name: str,
        *,
        tp: int = 1,
        block: int = 32,
        blocks: int = 64,
        kernel_block: int | None = None,
        heads_last: bool = False,
        sharing: bool = True,
        patience: float = 0.0,
        recipes: bool = True,
        gpu: Gpu | Sequence[Gpu] | None = None,
        clock: Callable[[], float] = time.monotonic,
        **settings: Any,
    ) -> None:
        self.block = block
        self.settings = Settings(
            **(
                {
                    "socket_dir": "-",
                    "min_restore_tokens": 1,
                    "min_flight_tokens": 0,
                    "calibrate": False,
                    "staging_bytes": 4 << 20,
                    "acquire_timeout_ms": 60_000,
                    "load_timeout_ms": 60_000,
                    "reserve_timeout_ms": 60_000,
                }
                | settings
            )
        )
        self.identity = Identity(NAMESPACE, Sharding(LAYERS, HEADS, tp), block, blocks)
        self.client = Holder(self._connect(daemon, name, Role.SCHEDULER))
        self.workers_client = Holder(self._connect(daemon, name, Role.WORKER))
        self.scheduler = SchedulerHalf(
            self.identity,
            self.settings,
            self.client,
            sharing=sharing,
            patience=patience,
            recipes=recipes,
            clock=clock,
        )
        self.pages: list[dict[str, torch.Tensor]] = []
        self.workers: list[WorkerHalf] = []
        kernel_block = kernel_block or block
        heads = max(1, HEADS // tp)
        for rank in range(tp):
            pages = {}
            for layer in range(LAYERS):
                shape = (blocks * (block // kernel_block), heads, kernel_block, 2 * DIM)
                if heads_last:
                    swapped = (shape[0], shape[2], shape[1], shape[3])
                    tensor = torch.zeros(swapped).transpose(1, 2)
                else:
                    tensor = torch.zeros(shape)
                # Not in the order of the layers, as a dictionary may be.
                pages[f"model.layers.{(layer + 1) % LAYERS}.attn"] = tensor
            # Each session gets its staging once, so every rank has one.
            client = (
                self.workers_client
                if rank == 0
                else Holder(self._connect(daemon, name, Role.WORKER))
            )
            worker = WorkerHalf(self.identity, self.settings, client, rank=rank, step_tokens=1024)
            if gpu is not None:
                own = gpu[rank] if isinstance(gpu, Sequence) else gpu
                worker.make_gpu = lambda ordinal, own=own: own  # type: ignore[misc]
            worker.register({n: OnGpu(t) for n, t in pages.items()} if gpu else pages)  # type: ignore[misc]
            self.pages.append(pages)
            self.workers.append(worker)
        self._clients = [self.client, *(w._client for w in self.workers)]

    @staticmethod
    def _connect(daemon: FakeDaemon, name: str, role: Role) -> Session:
        return daemon.connect(role=role, engine_id=name, namespace=NAMESPACE)

    def expected(self, rank: int, layer: int, seed: int, positions: torch.Tensor) -> torch.Tensor:
        """[positions, heads of the rank, 2 * DIM]."""
        shard = self.identity.sharding.shard(rank)
        heads = torch.arange(shard.head_begin, shard.head_end).reshape(1, -1, 1)
        lanes = torch.arange(2 * DIM).reshape(1, 1, -1)
        at = positions.reshape(-1, 1, 1)
        return (seed * 31 + at * 7 + layer * 1009 + heads * 101 + lanes * 3).to(torch.float32)

    def slots(self, tensor: torch.Tensor, blocks: list[int], at: torch.Tensor) -> Any:
        """Index of the tokens at these positions, whose blocks are the scheduler's."""
        size = tensor.shape[2]
        block = torch.tensor(blocks)[at // self.block]
        inside = at % self.block
        return block * (self.block // size) + inside // size, slice(None), inside % size

    def compute(self, seed: int, blocks: list[int], begin: int, end: int) -> None:
        """Prefill of positions [begin, end)."""
        at = torch.arange(begin, end)
        for rank, pages in enumerate(self.pages):
            for layer in range(LAYERS):
                tensor = pages[f"model.layers.{layer}.attn"]
                tensor[self.slots(tensor, blocks, at)] = self.expected(rank, layer, seed, at)

    def wrong(self, seed: int, blocks: list[int], begin: int, end: int) -> list[int]:
        """Positions whose pages do not hold what ``compute`` would have written."""
        at = torch.arange(begin, end)
        bad = torch.zeros(end - begin, dtype=torch.bool)
        for rank, pages in enumerate(self.pages):
            for layer in range(LAYERS):
                tensor = pages[f"model.layers.{layer}.attn"]
                found = tensor[self.slots(tensor, blocks, at)]
                bad |= (found != self.expected(rank, layer, seed, at)).any(-1).any(-1)
        return (begin + bad.nonzero().flatten()).tolist()

    def prefill(
        self,
        request: str,
        seed: int,
        blocks: list[int],
        computed: int,
        scheduled: int,
        during: Callable[[], None] = lambda: None,
    ) -> StepPlan:
        """A step that takes up a request, computes and stores; ``during`` while it computes."""
        step = self.scheduler.plan([(request, blocks, computed, scheduled)], [])

        def forward() -> None:
            self.compute(seed, blocks, computed, computed + scheduled)
            during()

        self.run(step, forward)
        return step

    def reserved(self) -> None:
        """Waits until the reservations of the step that runs are answered."""
        for worker in self.workers:
            if worker._saver is not None and worker._saver._pending is not None:
                wait([worker._saver._pending[0]], WAIT)

    def run(self, step: StepPlan, forward: Callable[[], None] = lambda: None) -> None:
        """What vLLM's model runner does with a step."""
        for worker in self.workers:
            worker.begin(step)
            worker.load(step)
        forward()
        for worker in self.workers:
            worker.save(failed=False)

    def match(self, request: str, local: int, total: int, seconds: float = WAIT) -> int:
        """Asks until there is an answer."""
        until = time.monotonic() + seconds
        while True:
            tokens, is_async = self.scheduler.match(request, local, total)
            if tokens is not None:
                assert is_async == (tokens > 0)
                return tokens
            assert time.monotonic() < until, "never answered"
            time.sleep(0.001)

    def load(self, request: str, blocks: list[int], tokens: int, seconds: float = WAIT) -> Outcome:
        """Runs a load that was promised, until every rank has said that it has ended."""
        self.scheduler.allocated(request, blocks, tokens)
        self.run(self.scheduler.plan([], []))
        return self.settle(request, seconds)

    def settle(self, request: str, seconds: float = WAIT) -> Outcome:
        """Polls the workers until a load has ended, and tells the scheduler half."""
        outcome = Outcome()
        waiting = set(range(len(self.workers)))
        until = time.monotonic() + seconds
        while waiting:
            assert time.monotonic() < until, "the load never ended"
            for rank in list(waiting):
                worker = self.workers[rank]
                if request in worker.finished():
                    waiting.discard(rank)
                outcome.bad_blocks |= worker.bad_blocks()
                if report := worker.report():
                    outcome.report.merge(report)
            time.sleep(0.001)
        self.scheduler.worked(outcome.report, [request])
        return outcome

    def close(self) -> None:
        self.scheduler.shutdown()
        for worker in self.workers:
            worker.close()
        for client in self._clients:
            if client.session is not None:
                client.session.close()


def until(condition: Callable[[], bool], seconds: float = WAIT) -> None:
    """Waits for something that happens in another thread."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "never happened"
        time.sleep(0.002)
