"""The metrics page, for Prometheus: HTTP on an address that the operator chose."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from kmesh_spand.control.report import Report
from kmesh_spand.core.tenants import TENANT_COUNTERS

_REQUEST_BYTES = 8192
_SECONDS = 5.0


class Metrics(Collector):
    """Makes all metrics from one Status. Names and meanings are in ``docs/metrics.md``."""

    def __init__(self, report: Report) -> None:
        self._report = report

    def collect(self) -> Iterator[Metric]:
        status = self._report.status()
        gauges = {
            "up": 1,
            "draining": int(status.draining),
            "uptime_seconds": status.uptime_ms / 1000,
            "spans": status.spans,
            "span_bytes": status.span_bytes,
            "max_spans": status.max_spans,
            "sessions": status.sessions,
            "leases": status.leases,
            "leased_bytes": status.leased_bytes,
            "reservations": status.reservations,
            "staging_bytes": status.staging_bytes,
            "max_staging_bytes": status.max_staging_bytes,
            "index_entries": status.index_entries,
        }
        for name, value in gauges.items():
            yield GaugeMetricFamily(f"kmesh_{name}", name.replace("_", " "), value)
        for name in ("size", "capacity", "populated", "used"):
            family = GaugeMetricFamily(
                f"kmesh_slab_{name}_bytes", f"{name} of a slab", None, ["slab"]
            )
            for slab in status.slabs:
                family.add_metric([str(slab.slab)], getattr(slab, name))
            yield family
        for name in ("quota", "used", "spans", "span_bytes", "slabs"):
            family = GaugeMetricFamily(
                f"kmesh_tenant_{name}", f"{name} of a tenant", None, ["tenant"]
            )
            for tenant in status.tenants:
                family.add_metric([tenant.name], getattr(tenant, name))
            yield family
        for name in TENANT_COUNTERS:
            count = CounterMetricFamily(
                f"kmesh_tenant_{name}", f"{name} of a tenant", None, ["tenant"]
            )
            for tenant in status.tenants:
                count.add_metric([tenant.name], tenant.counters[name])
            yield count
        yield GaugeMetricFamily(
            "kmesh_population_paused", "slabs do not grow for want of memory", bool(status.paused)
        )
        counters = dict(status.counters)
        counters["control_restarts"] = status.control_restarts
        counters["worker_restarts"] = status.worker_restarts
        for name, value in sorted(counters.items()):
            yield CounterMetricFamily(f"kmesh_{name}", name.replace("_", " "), value)


async def serve(address: str, report: Report) -> asyncio.Server:
    """Serves ``GET /metrics`` on ``HOST:PORT`` until it is closed.

    Raises:
        OSError: the address can't be had.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Metrics(report))

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), _SECONDS)
            if head.startswith((b"GET /metrics ", b"GET /metrics?")):
                status, kind, body = "200 OK", CONTENT_TYPE_LATEST, generate_latest(registry)
            else:
                status, kind, body = "404 Not Found", "text/plain", b"GET /metrics\n"
            writer.write(
                f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
                "Connection: close\r\n\r\n".encode()
                + body
            )
            await asyncio.wait_for(writer.drain(), _SECONDS)
        except (TimeoutError, OSError, EOFError, asyncio.LimitOverrunError):
            return
        finally:
            writer.close()

    host, _, port = address.rpartition(":")
    return await asyncio.start_server(answer, host.strip("[]"), int(port), limit=_REQUEST_BYTES)
