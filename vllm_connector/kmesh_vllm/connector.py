"""What vLLM sees: one thin class that hands each call to the half that it is for."""

from __future__ import annotations

import dataclasses
import logging
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)

from kmesh.client import Client
from kmesh.errors import ConfigError
from kmesh.keys import Extra, salt_digest
from kmesh.session import Role
from kmesh_vllm import compat, decoding, gpu, logs
from kmesh_vllm.adapters import Adapters
from kmesh_vllm.config import Settings
from kmesh_vllm.identity import identify
from kmesh_vllm.metadata import LoadReport, StepPlan
from kmesh_vllm.scheduler import SchedulerHalf
from kmesh_vllm.stats import KMeshPromMetrics, KMeshStats
from kmesh_vllm.worker import WorkerHalf

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = logging.getLogger("kmesh_vllm")


@dataclass
class StepMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """A step's plan, as vLLM carries it to the workers."""

    plan: StepPlan


@dataclass
class WorkerMetadata(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """What workers say of loads, as vLLM carries it to the scheduler."""

    report: LoadReport = field(default_factory=LoadReport)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerMetadata:
        self.report.merge(other.report)
        return self


class KMeshConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """Restores prompts' KV state from a KMesh daemon, and stores what prefill makes.

    Raises:
        UnsupportedError: this vLLM, model or setup is not served; says why.
        ConfigError: a setting is wrong; names it.
    """

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Never: nothing happens layer by layer.

        Engines with full CUDA graphs ask before they load the model, so that a wrong setting or
        version is found then.
        """
        compat.check_version(compat.vllm_version())
        Settings.read(extra_config)
        return False

    def __init__(
        self,
        vllm_config: VllmConfig,
        role: KVConnectorRole,
        kv_cache_config: KVCacheConfig | None = None,
    ) -> None:
        logs.join()
        compat.check_version(compat.vllm_version())
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        if kv_cache_config is None:
            raise ConfigError("vLLM gave no kv_cache_config")
        transfer = self._kv_transfer_config
        settings = Settings.read(transfer.kv_connector_extra_config)
        settings = dataclasses.replace(
            settings,
            load=settings.load and transfer.is_kv_consumer,
            store=settings.store and transfer.is_kv_producer,
        )
        self._identity = identify(vllm_config, kv_cache_config, settings)
        self._adapters = Adapters()
        self._scheduler: SchedulerHalf | None = None
        self._worker: WorkerHalf | None = None
        is_scheduler = role == KVConnectorRole.SCHEDULER
        self._client = Client(
            settings.socket_dir,
            role=Role.SCHEDULER if is_scheduler else Role.WORKER,
            engine_id=str(transfer.engine_id),
            namespace=self._identity.namespace,
            client_name="kmesh_vllm",
        )
        lockstep = vllm_config.parallel_config.data_parallel_size > 1
        if is_scheduler:
            self._scheduler = SchedulerHalf(
                self._identity,
                settings,
                self._client,
                sharing=bool(vllm_config.cache_config.enable_prefix_caching),
                recipes=_recipes(vllm_config.device_config.device_type),
                place=_place(vllm_config.device_config.device_type),
                lockstep=lockstep,
            )
            if settings.load and transfer.kv_load_failure_policy != "recompute":
                logger.warning(
                    "kv_load_failure_policy is %r: a restore that fails will fail its request;"
                    ' with "recompute" vLLM computes what is missing',
                    transfer.kv_load_failure_policy,
                )
        else:
            self._worker = WorkerHalf(
                self._identity,
                settings,
                self._client,
                rank=compat.tensor_parallel_rank(),
                step_tokens=vllm_config.scheduler_config.max_num_batched_tokens,
                lockstep=lockstep,
            )

    @property
    def requires_kv_delivery(self) -> bool:
        """A save that was dropped is only a later miss."""
        return False

    # Worker half

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        if self._identity.order is not None:
            self._identity.order.check(compat.attention_isas(self._vllm_config, kv_caches))
        self._of_worker().register(kv_caches)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        self._of_worker().begin(connector_metadata.plan)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._of_worker().load(self._get_connector_metadata().plan)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: a request runs when its load has ended."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Nothing: saves are done in ``wait_for_save``, all layers in one copy."""

    def wait_for_save(self) -> None:
        # vLLM calls this also while an exception leaves the forward pass.
        self._of_worker().save(failed=sys.exc_info()[0] is not None)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        return None, self._of_worker().finished() or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._of_worker().bad_blocks()

    def build_connector_worker_meta(self) -> WorkerMetadata | None:
        report = self._of_worker().report()
        return None if report is None else WorkerMetadata(report)

    # Scheduler half

    def on_new_request(self, request: Any) -> None:
        scheduler = self._of_scheduler()
        params = compat.transfer_params(request)
        if not compat.cacheable(request):
            scheduler.segmenting.declined(
                request.request_id, params, "requests of this kind are neither restored nor stored"
            )
            return
        adapter = ""
        if (lora := request.lora_request) is not None:
            digest = self._adapters.digest(
                lora.lora_int_id,
                lora.lora_path,
                reloaded=bool(getattr(lora, "load_inplace", False)),
            )
            if digest is None:
                scheduler.segmenting.declined(
                    request.request_id, params, "the content of its adapter is not known for sure"
                )
                return
            adapter = digest
        salt = salt_digest(request.cache_salt or "")
        namespace = dataclasses.replace(
            self._identity.namespace,
            adapter=adapter,
            salt=salt,
            reset=scheduler.reset_word,
        )
        scheduler.add(
            request.request_id,
            request.prompt_token_ids,
            namespace.digest(),
            [Extra(*item) for item in compat.items(request)],
            may_load=not getattr(request, "skip_reading_prefix_cache", False),
            salt=bytes.fromhex(salt),
            params=params,
        )

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return self._of_scheduler().match(
            request.request_id, num_computed_tokens, request.num_tokens
        )

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        ids = blocks.get_block_ids()[0] if num_external_tokens else ()
        self._of_scheduler().allocated(request.request_id, ids, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        return StepMetadata(
            self._of_scheduler().plan(
                compat.new_requests(scheduler_output),
                compat.running_requests(scheduler_output),
                compat.preempted(scheduler_output),
            )
        )

    def update_connector_output(self, connector_output: Any) -> None:
        meta = connector_output.kv_connector_worker_meta
        self._of_scheduler().worked(
            meta.report if meta is not None else None, connector_output.finished_recving or ()
        )

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return False, self._of_scheduler().finished(request.request_id)

    def reset_cache(self) -> bool:
        self._of_scheduler().reset()
        return True

    # Both halves

    def get_kv_connector_stats(self) -> KMeshStats | None:
        half = self._scheduler or self._worker
        values = half.told() if half is not None else {}
        return KMeshStats(values) if values else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KMeshStats:
        return KMeshStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KMeshPromMetrics:
        return KMeshPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        if self._scheduler is not None:
            self._scheduler.shutdown()
        if self._worker is not None:
            self._worker.close()
        self._client.close()

    def _of_scheduler(self) -> SchedulerHalf:
        if self._scheduler is None:
            raise RuntimeError("a call for the scheduler came to a worker")
        return self._scheduler

    def _of_worker(self) -> WorkerHalf:
        if self._worker is None:
            raise RuntimeError("a call for a worker came to the scheduler")
        return self._worker


def _place(device_type: str) -> str:
    """Names the cores of an engine without a GPU: others may have some of their own."""
    if device_type != "cpu":
        return ""
    cores = sorted(os.sched_getaffinity(0))
    return f"cores {cores[0]}-{cores[-1]}, {len(cores)}"


def _recipes(device_type: str) -> bool:
    """Whether workers can restore spans out of recipes. Their pages are where the model is."""
    return decoding.AVAILABLE and (device_type == "cpu" or gpu.AVAILABLE)
