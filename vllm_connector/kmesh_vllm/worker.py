"""The worker half: moves what the scheduler half decided, between slabs, staging and KV pages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from kmesh_vllm.config import Settings
from kmesh_vllm.counts import Counts
from kmesh_vllm.identity import Identity
from kmesh_vllm.loading import Loader
from kmesh_vllm.metadata import LoadReport, StepPlan
from kmesh_vllm.paged import PagedCache
from kmesh_vllm.saving import Saver
from kmesh_vllm.scheduler import Sessions

if TYPE_CHECKING:
    import torch


class WorkerHalf:
    """Acts for one rank.

    Args:
        rank: within the tensor-parallel group.
    """

    def __init__(
        self, identity: Identity, settings: Settings, client: Sessions, *, rank: int
    ) -> None:
        self._identity = identity
        self._settings = settings
        self._client = client
        self._mine = identity.sharding.shard(rank)
        self._stores = settings.store and identity.sharding.stores(rank)
        self._loader: Loader | None = None
        self._saver: Saver | None = None
        self._bad_blocks: set[int] = set()
        self._report = LoadReport()
        self.counts = Counts()

    def register(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """The engine's KV cache, by layer name.

        Raises:
            UnsupportedError: it is not served; says why.
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
        )
        common = (self._identity, self._mine, lambda: self._client.session, self._settings)
        self._loader = Loader(cache, *common, self.counts)
        if self._stores:
            self._saver = Saver(cache, *common, self.counts)

    def begin(self, step: StepPlan) -> None:
        """Before the forward pass: asks for reservations in the background."""
        if self._saver is not None:
            self._saver.begin(step.stores)

    def load(self, step: StepPlan) -> None:
        """Starts the loads of a step."""
        for plan in step.loads:
            if self._loader is None:
                raise RuntimeError("a load came before the KV cache")
            self._loader.start(plan)

    def save(self, *, failed: bool) -> None:
        """After the forward pass: copies out what it made; nothing if it failed."""
        if self._saver is None:
            return
        if failed:
            self._saver.abandon()
        else:
            self._saver.finish()

    def finished(self) -> set[str]:
        """Requests whose loads have ended, well or not, since the last call."""
        if self._loader is None:
            return set()
        requests, bad_blocks, report = self._loader.finished()
        self._bad_blocks |= bad_blocks
        self._report.merge(report)
        return requests

    def bad_blocks(self) -> set[int]:
        """Ids of blocks whose loads failed, since the last call."""
        blocks, self._bad_blocks = self._bad_blocks, set()
        return blocks

    def report(self) -> LoadReport | None:
        """What the scheduler half has to know of loads, since the last call."""
        if not self._report:
            return None
        report, self._report = self._report, LoadReport()
        return report

    def close(self) -> None:
        """Waits for copies under way."""
        if self._loader is not None:
            self._loader.close()
        if self._saver is not None:
            self._saver.close()
