"""The metrics page, for Prometheus. Names and meanings are in ``docs/metrics.md``."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from kmesh.v1 import admin_pb2
from kmesh_spand.control import metrichelp
from kmesh_spand.control.histogram import Histogram
from kmesh_spand.control.readiness import REASONS, WARNINGS
from kmesh_spand.control.report import Report
from kmesh_spand.control.usage import read_all
from kmesh_spand.core.tenants import TENANT_COUNTERS


class Metrics(Collector):
    """Makes all metrics anew for each look at them; nothing is kept."""

    def __init__(self, report: Report) -> None:
        self._report = report

    def collect(self) -> Iterator[Metric]:
        status = self._report.status()
        yield from self._gauges(status)
        yield from _slabs(status)
        yield from _gpus(status)
        yield from _tenants(status)
        yield from _disk(status)
        yield from self._conditions(status)
        yield from self._worker()
        yield from self._processes()
        yield from self._times()
        counters = dict(status.counters)
        counters["control_restarts"] = status.control_restarts
        counters["worker_restarts"] = status.worker_restarts
        for name, count in sorted(counters.items()):
            yield CounterMetricFamily(f"kmesh_{name}", metrichelp.counter(name), count)

    def _gauges(self, status: admin_pb2.StatusResponse) -> Iterator[Metric]:
        records, leased_spans, recovering = self._report.catalog()
        flights, waits = self._report.flying()
        gauges = {
            "up": 1,
            "draining": int(status.draining),
            "uptime_seconds": status.uptime_ms / 1000,
            "spans": status.spans,
            "span_bytes": status.span_bytes,
            "max_spans": status.max_spans,
            "catalog_records": records,
            "recovering_spans": recovering,
            "sessions": status.sessions,
            "leases": status.leases,
            "leased_spans": leased_spans,
            "leased_bytes": status.leased_bytes,
            "reservations": status.reservations,
            "staging_bytes": status.staging_bytes,
            "max_staging_bytes": status.max_staging_bytes,
            "index_entries": status.index_entries,
            "families": status.families,
            "mirrors": status.mirrors,
            "mirror_bytes": status.mirror_bytes,
            "mirror_dense_bytes": status.mirror_dense_bytes,
            "mirror_used_bytes": status.mirror_used_bytes,
            "base_spans": status.base_spans,
            "flights": flights,
            "flight_waits": waits,
        }
        for name, value in gauges.items():
            yield GaugeMetricFamily(f"kmesh_{name}", metrichelp.gauge(name), value)
        yield _labelled("sessions_by_role", "role", self._report.sessions_by_role())

    def _conditions(self, status: admin_pb2.StatusResponse) -> Iterator[Metric]:
        yield GaugeMetricFamily("kmesh_ready", metrichelp.gauge("ready"), int(not status.not_ready))
        for metric, names, found in (
            ("not_ready", REASONS, status.not_ready),
            ("warning", WARNINGS, status.warnings),
        ):
            held = {condition.name for condition in found}
            yield _labelled(metric, "reason", {name: int(name in held) for name in names})

    def _worker(self) -> Iterator[Metric]:
        worker = self._report.worker
        gauges = {
            "worker_up": int(worker.up),
            "worker_copies": worker.copies,
            "worker_checks": worker.checks,
            "worker_silent_seconds": worker.silent_seconds,
            "worker_owed_seconds": worker.owed_seconds,
        }
        for name, value in gauges.items():
            yield GaugeMetricFamily(f"kmesh_{name}", metrichelp.gauge(name), value)

    def _processes(self) -> Iterator[Metric]:
        worker = self._report.worker.pid
        gpus = {f"gpu{n}": gpu.pid for n, gpu in enumerate(self._report.gpus.gpus)}
        ours = {"supervisor": os.getppid(), "control": os.getpid(), "worker": worker}
        used = read_all(ours | gpus)
        for name in ("resident_bytes", "private_bytes", "open_files"):
            values = {process: getattr(usage, name) for process, usage in used.items()}
            yield _labelled(f"process_{name}", "process", values)
        name = "process_max_files"
        most = self._report.readiness.max_files
        yield GaugeMetricFamily(f"kmesh_{name}", metrichelp.gauge(name), most)
        name = "process_cpu_seconds"
        cpu = CounterMetricFamily(f"kmesh_{name}", metrichelp.counter(name), labels=["process"])
        for process, usage in used.items():
            cpu.add_metric([process], usage.cpu_seconds)
        yield cpu

    def _times(self) -> Iterator[Metric]:
        observer = self._report.observer
        requests = HistogramMetricFamily(
            "kmesh_request_seconds", metrichelp.histogram("request_seconds"), labels=["request"]
        )
        for name, histogram in observer.requests.items():
            _fill(requests, [name], histogram)
        yield requests
        for name in ("copy_seconds", "copy_wait_seconds", "copy_bytes"):
            family = HistogramMetricFamily(f"kmesh_{name}", metrichelp.histogram(name))
            _fill(family, [], getattr(observer, name))
            yield family
        disk = self._report.disk
        for name in ("read_seconds", "write_seconds") if disk is not None else ():
            family = HistogramMetricFamily(
                f"kmesh_disk_{name}", metrichelp.histogram(f"disk_{name}")
            )
            _fill(family, [], getattr(disk, name))
            yield family


def _tenants(status: admin_pb2.StatusResponse) -> Iterator[Metric]:
    for name in ("quota", "used", "spans", "span_bytes", "slabs"):
        values = {tenant.name: getattr(tenant, name) for tenant in status.tenants}
        yield _labelled(f"tenant_{name}", "tenant", values)
    for name in TENANT_COUNTERS:
        text = metrichelp.counter(f"tenant_{name}")
        count = CounterMetricFamily(f"kmesh_tenant_{name}", text, labels=["tenant"])
        for tenant in status.tenants:
            count.add_metric([tenant.name], tenant.counters[name])
        yield count
    paused = GaugeMetricFamily("kmesh_population_paused", metrichelp.gauge("population_paused"))
    paused.add_metric([], int(bool(status.paused)))
    yield paused


def _labelled(name: str, label: str, values: Mapping[str, float]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(f"kmesh_{name}", metrichelp.gauge(name), labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family


def _slabs(status: admin_pb2.StatusResponse) -> Iterator[Metric]:
    for name in ("size", "capacity", "populated", "used"):
        values = {str(slab.slab): getattr(slab, name) for slab in status.slabs}
        yield _labelled(f"slab_{name}_bytes", "slab", values)
    huge = {str(slab.slab): int(slab.hugepages) for slab in status.slabs}
    yield _labelled("slab_hugepages", "slab", huge)
    sealed = {str(slab.slab): int(slab.read_only) for slab in status.slabs}
    yield _labelled("slab_read_only", "slab", sealed)


def _disk(status: admin_pb2.StatusResponse) -> Iterator[Metric]:
    if not status.HasField("disk"):
        return
    disk = status.disk
    gauges = {
        "capacity_bytes": disk.capacity,
        "used_bytes": disk.used,
        "spans": disk.spans,
        "span_bytes": disk.span_bytes,
        "writing": disk.writing,
        "queued": disk.queued,
        "reading": disk.reading,
        "wanted": disk.wanted,
        "waits": disk.waits,
        "held": disk.held,
        "ready": int(disk.ready),
        "direct": int(disk.direct),
        "failing_seconds": disk.failing_ms / 1000,
        "away_seconds": disk.away_ms / 1000,
    }
    for name, value in gauges.items():
        yield GaugeMetricFamily(f"kmesh_disk_{name}", metrichelp.gauge(f"disk_{name}"), value)
    for name in ("quota", "used", "spans"):
        values = {tenant.name: getattr(tenant, name) for tenant in disk.tenants}
        yield _labelled(f"disk_tenant_{name}", "tenant", values)


def _gpus(status: admin_pb2.StatusResponse) -> Iterator[Metric]:
    # Without a UUID there is nothing to say: the daemon has not started yet.
    found = [gpu for gpu in status.gpus if gpu.device]
    for name in ("ready", "slabs", "slab_bytes", "free_bytes", "total_bytes"):
        values = {gpu.device: int(getattr(gpu, name)) for gpu in found}
        yield _labelled(f"gpu_{name}", "device", values)
    restarts = CounterMetricFamily(
        "kmesh_gpu_restarts", metrichelp.counter("gpu_restarts"), labels=["device"]
    )
    for gpu in found:
        restarts.add_metric([gpu.device], gpu.restarts)
    yield restarts


def _fill(family: HistogramMetricFamily, labels: list[str], histogram: Histogram) -> None:
    family.add_metric(labels, list(histogram.cumulative()), histogram.sum)


class Page:
    """The page as it is asked for; cheap enough for every few seconds."""

    def __init__(self, report: Report) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(Metrics(report))

    def __call__(self) -> tuple[str, bytes]:
        """Content type and text."""
        return CONTENT_TYPE_LATEST, generate_latest(self._registry)
