"""What the commands print with ``--json``: the stable keys of ``docs/cli.md``."""

from __future__ import annotations

from collections.abc import Sequence

from kmesh import negotiation
from kmesh.cli.render import Json, name_of, role
from kmesh.v1 import admin_pb2, common_pb2, sessions_pb2


def status_json(
    status: admin_pb2.StatusResponse, clients: Sequence[sessions_pb2.SessionInfo]
) -> Json:
    return {
        "version": status.version,
        "epoch": f"{status.epoch:016x}",
        "uptime_ms": status.uptime_ms,
        "draining": status.draining,
        "not_ready": [{"name": c.name, "text": c.text} for c in status.not_ready],
        "warnings": [{"name": c.name, "text": c.text} for c in status.warnings],
        "socket_dir": status.socket_dir,
        "span_tokens": status.span_tokens,
        "spans": status.spans,
        "span_bytes": status.span_bytes,
        "max_spans": status.max_spans,
        "index_entries": status.index_entries,
        "families": status.families,
        "mirrors": status.mirrors,
        "mirror_bytes": status.mirror_bytes,
        "mirror_dense_bytes": status.mirror_dense_bytes,
        "mirror_used_bytes": status.mirror_used_bytes,
        "base_spans": status.base_spans,
        "sessions": status.sessions,
        "leases": status.leases,
        "leased_bytes": status.leased_bytes,
        "reservations": status.reservations,
        "staging_bytes": status.staging_bytes,
        "max_staging_bytes": status.max_staging_bytes,
        "control_restarts": status.control_restarts,
        "worker_restarts": status.worker_restarts,
        "paused": status.paused,
        "hardened": status.hardened,
        "slabs": [
            {
                "slab": slab.slab,
                "kind": slab.kind,
                "size": slab.size,
                "capacity": slab.capacity,
                "populated": slab.populated,
                "used": slab.used,
                "hugepages": slab.hugepages,
                "read_only": slab.read_only,
                "device": slab.device,
                "in_host": slab.in_host,
            }
            for slab in status.slabs
        ],
        "disk": disk_json(status.disk) if status.HasField("disk") else None,
        "handles": [handles_json(tier) for tier in status.handles],
        "gpus": [gpu_json(gpu) for gpu in status.gpus],
        "tenants": [tenant_json(tenant) for tenant in status.tenants],
        "clients": [session_json(client) for client in clients],
        "counters": dict(sorted(status.counters.items())),
    }


def disk_json(disk: admin_pb2.DiskInfo) -> Json:
    """The disk tier, by the keys of ``docs/cli.md``."""
    return {
        "directory": disk.directory,
        "capacity": disk.capacity,
        "used": disk.used,
        "spans": disk.spans,
        "span_bytes": disk.span_bytes,
        "writing": disk.writing,
        "queued": disk.queued,
        "reading": disk.reading,
        "wanted": disk.wanted,
        "waits": disk.waits,
        "held": disk.held,
        "ready": disk.ready,
        "direct": disk.direct,
        "failing_ms": disk.failing_ms,
        "away_ms": disk.away_ms,
        "tenants": [
            {"name": t.name, "quota": t.quota, "used": t.used, "spans": t.spans}
            for t in disk.tenants
        ],
    }


def gpu_json(gpu: admin_pb2.GpuInfo) -> Json:
    return {
        "device": gpu.device,
        "name": gpu.name,
        "ready": gpu.ready,
        "restarts": gpu.restarts,
        "pid": gpu.pid,
        "slabs": gpu.slabs,
        "slab_bytes": gpu.slab_bytes,
        "free_bytes": gpu.free_bytes,
        "total_bytes": gpu.total_bytes,
        "error": gpu.error,
    }


def handles_json(tier: common_pb2.TierHandles) -> Json:
    """Names in lower case but for kinds; null where nothing is chosen or refused."""
    return {
        "tier": name_of(common_pb2.Tier, "TIER_", tier.tier),
        "chosen": negotiation.kind_name(tier.chosen) if tier.chosen else None,
        "offers": [
            {
                "kind": negotiation.kind_name(offer.kind),
                "slabs": offer.slabs,
                "spans": offer.spans,
                "refusal": name_of(common_pb2.HandleRefusal, "HANDLE_REFUSAL_", offer.refusal)
                if offer.refusal
                else None,
                "text": offer.text,
            }
            for offer in tier.offers
        ],
    }


def span_json(span: admin_pb2.SpanInfo) -> Json:
    return {
        "key": span.key.hex(),
        "namespace": span.namespace.hex(),
        "state": span.state,
        "start": span.start,
        "tokens": span.tokens,
        "layers": [span.layer_begin, span.layer_end],
        "heads": [span.head_begin, span.head_end],
        "slab": span.slab,
        "device": span.device,
        "offset": span.offset,
        "length": span.length,
        "dense_length": span.dense_length or None,
        "bases": span.bases,
        "mirrors": span.mirrors,
        "generation": span.generation,
        "leases": span.leases,
        "age_ms": span.age_ms,
        "idle_ms": span.idle_ms,
    }


def namespace_json(space: admin_pb2.NamespaceInfo) -> Json:
    return {
        "digest": space.digest.hex(),
        "spans": space.spans,
        "bytes": space.bytes,
        "disk_spans": space.disk_spans,
        "disk_bytes": space.disk_bytes,
        "fields": dict(sorted(space.fields.items())),
    }


def tenant_json(tenant: admin_pb2.TenantInfo) -> Json:
    return {
        "tenant": tenant.name,
        "quota": tenant.quota,
        "used": tenant.used,
        "spans": tenant.spans,
        "span_bytes": tenant.span_bytes,
        "slabs": tenant.slabs,
        "counters": dict(sorted(tenant.counters.items())),
    }


def session_json(client: sessions_pb2.SessionInfo) -> Json:
    return {
        "session": client.session_id,
        "role": role(client),
        "client": client.client_name,
        "client_version": client.client_version,
        "engine_id": client.engine_id,
        "uid": client.uid,
        "pid": client.pid,
        "age_ms": client.age_ms,
        "leases": client.leases,
        "leased_spans": client.leased_spans,
        "leased_bytes": client.leased_bytes,
        "reservations": client.reservations,
        "reserved_bytes": client.reserved_bytes,
        "staging_bytes": client.staging_bytes,
        "hits": client.hits,
        "misses": client.misses,
        "pending": client.pending,
        "committed": client.committed,
        "committed_bytes": client.committed_bytes,
        "reasons": dict(sorted(client.reasons.items())),
        "handles": [handles_json(tier) for tier in client.handles],
    }
