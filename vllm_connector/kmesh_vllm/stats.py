"""The connector's counts as vLLM's statistics and Prometheus metrics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from prometheus_client import Counter
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from kmesh_vllm.counts import NAMES


@dataclass
class KMeshStats(KVConnectorStats):  # type: ignore[misc]
    """``data``: amounts by name, see ``counts.NAMES``."""

    def reset(self) -> None:
        self.data.clear()

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for name, amount in other.data.items():
            self.data[name] = self.data.get(name, 0) + amount
        return self

    def reduce(self) -> dict[str, int | float]:
        return dict(sorted(self.data.items()))

    def is_empty(self) -> bool:
        return not self.data


class KMeshPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """A counter ``vllm:kmesh_<name>`` for each name, labelled as vLLM's own."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        kind = metric_types[Counter]
        self._counters = {
            name: kind(
                name=f"vllm:kmesh_{name}", documentation=f"KMesh: {what}.", labelnames=labelnames
            )
            for name, what in NAMES.items()
        }
        for values in per_engine_labelvalues.values():
            for counter in self._counters.values():
                # A rate needs the zero from which a counter begins.
                counter.labels(*values)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        values = self.per_engine_labelvalues[engine_idx]
        for name, amount in transfer_stats_data.items():
            if name in self._counters:
                self._counters[name].labels(*values).inc(amount)
