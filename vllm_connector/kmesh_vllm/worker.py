"""The worker half: moves what the scheduler half decided, between slabs, staging and KV pages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol

from kmesh.errors import UnsupportedError
from kmesh.session import Session
from kmesh_vllm import decoding
from kmesh_vllm.config import Settings
from kmesh_vllm.counts import Counts
from kmesh_vllm.gpu import CudaGpu, Gpu
from kmesh_vllm.gpumover import GpuMover
from kmesh_vllm.hostmover import HostMover
from kmesh_vllm.identity import Identity
from kmesh_vllm.loading import Loader
from kmesh_vllm.metadata import LoadReport, StepPlan
from kmesh_vllm.movers import Mover
from kmesh_vllm.paged import PagedCache
from kmesh_vllm.saving import Saver
from kmesh_vllm.scheduler import Sessions

if TYPE_CHECKING:
    import torch


#: Seconds that a step in which nothing is computed waits for a load to end.
_REST = 0.002
#: Bytes of a GPU's memory through which is stored, at most, where nothing is set.
_BUFFER = 1 << 30


class WorkerSessions(Sessions, Protocol):
    """What is used of ``kmesh.client.Client``."""

    def on_change(self, callback: Callable[[Session | None], None]) -> None: ...


class WorkerHalf:
    """Acts for one rank.

    Attributes:
        make_gpu: how a GPU is had by its ordinal.

    Args:
        rank: within the tensor-parallel group.
        step_tokens: that a step computes at most, over all requests.
        lockstep: other engines wait for each step of this one.
    """

    def __init__(
        self,
        identity: Identity,
        settings: Settings,
        client: WorkerSessions,
        *,
        rank: int,
        step_tokens: int = 0,
        lockstep: bool = False,
    ) -> None:
        self.make_gpu: Callable[[int], Gpu] = CudaGpu
        self._identity = identity
        self._settings = settings
        self._client = client
        self._mine = identity.sharding.shard(rank)
        self._stores = settings.store and identity.sharding.stores(rank)
        self._step_tokens = step_tokens
        self._mover: Mover | None = None
        self._loader: Loader | None = None
        self._saver: Saver | None = None
        self._computed = False
        self._step = 0
        self._lockstep = lockstep
        self._rest = 0.0
        self._bad_blocks: set[int] = set()
        self._report = LoadReport()
        self._recipes_told: tuple[str, ...] = ()
        self.counts = Counts()

    def register(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """The engine's KV cache, by layer name.

        Raises:
            UnsupportedError: it is not served; says why.
            CudaError: its GPU is not to be had.
        """
        geometry = self._identity.geometry(self._mine.heads)
        cache = PagedCache(
            tensors,
            layers=geometry.layers,
            heads=geometry.heads,
            head_dim=geometry.head_dim,
            element_bytes=geometry.element_bytes,
            block_tokens=self._identity.block_tokens,
            num_blocks=self._identity.num_blocks,
            order=self._identity.order,
        )
        mover = self._mover = self._make_mover(cache)
        common = (mover, cache, self._identity, self._mine, lambda: self._client.session)
        self._loader = Loader(*common, self._settings, self.counts)
        self._client.on_change(self._loader.changed)
        device = mover.devices[0] if self._settings.tier == "gpu" else ""
        if self._stores:
            self._saver = Saver(*common, self._settings, self.counts, device)
        if cache.device is not None:
            self._report.devices = mover.devices

    def _make_mover(self, cache: PagedCache) -> Mover:
        if cache.device is None:
            if self._settings.tier == "gpu":
                raise UnsupportedError('tier "gpu" needs an engine whose KV cache is on a GPU')
            return HostMover(cache.layout)
        if self._settings.tier == "gpu" and self._identity.sharding.tp > 1:
            # A lease is of spans on one GPU, and each rank has one of its own.
            raise UnsupportedError('tier "gpu" is not served with tensor parallelism')
        mover = GpuMover(
            self.make_gpu(cache.device),
            cache.layout,
            lambda: self._client.session,
            self.counts,
            max_ctas=self._settings.max_ctas,
            buffer_bytes=self._buffer_bytes() if self._stores else 0,
            peers=self._settings.tier == "gpu",
            calibrate=self._settings.calibrate,
            recipes=self._settings.load and decoding.AVAILABLE,
        )
        self._client.on_change(mover.warm)
        return mover

    def _buffer_bytes(self) -> int:
        geometry = self._identity.geometry(self._mine.heads)
        # The engine starts a step before the one before it has ended.
        steps = 2 * self._step_tokens * geometry.token_bytes
        return self._settings.store_buffer_bytes or min(max(steps, _BUFFER // 4), _BUFFER)

    def begin(self, step: StepPlan) -> None:
        """Before the forward pass: asks for reservations in the background."""
        self._computed, self._step = step.computes, step.number
        self._rest = 0.0 if step.computes or self._lockstep else _REST
        if self._saver is not None:
            self._saver.begin(step.stores)

    def load(self, step: StepPlan) -> None:
        """Starts the loads of a step."""
        if step.loads:
            if self._loader is None:
                raise RuntimeError("a load came before the KV cache")
            self._loader.start(step.loads)

    def save(self, *, failed: bool) -> None:
        """After the forward pass: copies out what it made; nothing if it failed."""
        if failed:
            self._step = 0
        if self._saver is None:
            return
        if failed:
            self._saver.abandon()
        else:
            self._saver.finish()

    def finished(self) -> set[str]:
        """Requests whose loads have ended, well or not, since the last call.

        In a step that computes nothing a load's end is waited for, a moment: otherwise it would be
        told with a later step, and the steps until then would keep the interpreter busy.
        """
        if self._loader is None:
            return set()
        requests, bad_blocks, report = self._loader.finished(self._rest)
        self._bad_blocks |= bad_blocks
        self._report.merge(report)
        return requests

    def bad_blocks(self) -> set[int]:
        """Ids of blocks whose loads failed, since the last call."""
        blocks, self._bad_blocks = self._bad_blocks, set()
        return blocks

    def report(self) -> LoadReport | None:
        """What the scheduler half has to know, since the last call."""
        if self._saver is not None and (reserved := self._saver.reserved()):
            self._report.merge(LoadReport(reserved=reserved))
        self._report.step, self._step = self._step, 0
        recipes: tuple[str, ...] = ()
        if self._mover is not None and self._settings.gpu_recipes:
            recipes = self._mover.recipes
        if recipes != self._recipes_told:
            self._report.recipes = self._recipes_told = recipes
        if not self._report:
            return None
        report, self._report = self._report, LoadReport()
        return report

    def told(self) -> dict[str, int]:
        """What was counted; only in a step that computes, as vLLM may not look otherwise."""
        computed, self._computed = self._computed, False
        return self.counts.take() if computed else {}

    def close(self) -> None:
        """Waits for what is under way."""
        if self._loader is not None:
            self._loader.close()
        if self._saver is not None:
            self._saver.close()
        if self._mover is not None:
            self._mover.close()
