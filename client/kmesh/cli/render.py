"""What the commands print: rows of tables, and the stable keys of ``--json``."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from kmesh import negotiation
from kmesh.handles import HandleKind
from kmesh.v1 import admin_pb2, common_pb2, sessions_pb2

Json = dict[str, object]


def console() -> Console:
    """Standard output; a pipe gets whole lines, not eighty columns of them."""
    return Console(width=None if sys.stdout.isatty() else 200, highlight=False)


def print_json(value: object) -> None:
    """One JSON document on standard output."""
    print(json.dumps(value, indent=2))


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """A table; columns whose name begins with ``>`` are aligned to the right."""
    made = Table(title=title or None, title_justify="left", box=None, pad_edge=False)
    for name in columns:
        right = name.startswith(">")
        made.add_column(name.lstrip(">"), justify="right" if right else "left", overflow="fold")
    for row in rows:
        made.add_row(*row)
    return made


def size(count: int) -> str:
    """Bytes for people: 1,536 is ``1.5 KiB``."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def age(milliseconds: int) -> str:
    """A time for people: ``340 ms``, ``12 s``, ``3 min``, ``5 h``, ``2 d``."""
    if milliseconds < 1000:
        return f"{milliseconds} ms"
    value = milliseconds / 1000
    for unit, step in (("s", 60), ("min", 60), ("h", 24)):
        if value < step:
            return f"{value:.0f} {unit}"
        value /= step
    return f"{value:.0f} d"


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


def _disk_rows(disk: admin_pb2.DiskInfo) -> list[tuple[str, str]]:
    text = f"{size(disk.used)} used of {size(disk.capacity)}, {disk.spans:,} spans"
    if not disk.ready:
        text += ", being looked through"
    if disk.failing_ms:
        text += f", not written for {age(disk.failing_ms)}"
    if disk.away_ms:
        text += f", does not answer for {age(disk.away_ms)}"
    moving = (
        f"{disk.writing:,} written, {disk.queued:,} to be; {disk.reading:,} read, "
        f"{disk.wanted:,} to be; {disk.waits:,} wait"
    )
    return [("disk", text), ("", disk.directory), ("", moving)]


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


def gpus_table(gpus: Iterable[admin_pb2.GpuInfo]) -> Table:
    """GPUs on which the daemon has memory."""
    rows = [
        (
            gpu.device,
            gpu.name.replace("[", r"\["),
            size(gpu.slab_bytes),
            size(gpu.free_bytes),
            size(gpu.total_bytes),
            str(gpu.restarts),
            "ready" if gpu.ready else (gpu.error or "starts").replace("[", r"\["),
        )
        for gpu in gpus
    ]
    columns = ("device", "name", ">slabs", ">free", ">size", ">restarts", "state")
    return table("\ngpus", columns, rows)


def _pages(slab: admin_pb2.SlabInfo) -> str:
    if slab.read_only:
        return "read-only"
    if slab.in_host:
        return "in host"
    return "huge" if slab.hugepages else "small"


def print_status(
    status: admin_pb2.StatusResponse, clients: Sequence[sessions_pb2.SessionInfo]
) -> None:
    out = console()
    state = "draining" if status.draining else "serving"
    if status.not_ready and not status.draining:
        state = "not ready: " + "; ".join(reason.text for reason in status.not_ready)
    capacity = sum(slab.capacity for slab in status.slabs if not slab.device)
    used = sum(slab.used for slab in status.slabs if not slab.device)
    rows = [
        ("daemon", f"{status.version}, {state}, up {age(status.uptime_ms)}"),
        ("sockets", status.socket_dir),
        ("epoch", f"{status.epoch:016x}"),
        ("memory", f"{size(used)} used of {size(capacity)}"),
        (
            "spans",
            f"{status.spans:,} of at most {status.max_spans:,}, {size(status.span_bytes)}, "
            f"{status.span_tokens} tokens each",
        ),
        ("leases", f"{status.leases:,} on {size(status.leased_bytes)}"),
        ("reservations", f"{status.reservations:,}"),
        ("sessions", f"{status.sessions:,}"),
        ("staging", f"{size(status.staging_bytes)} of {size(status.max_staging_bytes)}"),
        ("restarts", f"control {status.control_restarts}, worker {status.worker_restarts}"),
    ]
    if status.families or status.mirrors:
        text = f"{status.families:,}; {status.mirrors:,} mirrors take "
        text += f"{size(status.mirror_used_bytes)} instead of {size(status.mirror_dense_bytes)}"
        text += f", {size(status.mirror_bytes)} of it"
        rows.insert(5, ("families", f"{text} recipes, over {status.base_spans:,} base spans"))
    if status.HasField("disk"):
        rows[4:4] = _disk_rows(status.disk)
    if sealed := [slab for slab in status.slabs if slab.read_only]:
        text = f"{len(sealed)} slabs of an earlier daemon, {size(sum(s.used for s in sealed))} used"
        rows.insert(4, ("read-only", text))
    rows += [("warning", warning.text) for warning in status.warnings]
    out.print(table("", ("", ""), rows))
    slabs = [
        (
            str(slab.slab),
            slab.kind,
            size(slab.size),
            size(slab.populated),
            size(slab.used),
            slab.device or _pages(slab),
        )
        for slab in status.slabs
    ]
    out.print(table("\nslabs", (">slab", "kind", ">size", ">ready", ">used", "pages"), slabs))
    out.print(handles_table(status.handles))
    if status.gpus:
        out.print(gpus_table(status.gpus))
    out.print(tenants_table(status.tenants))
    out.print(sessions_table(clients))
    counters = [(name, f"{count:,}") for name, count in sorted(status.counters.items()) if count]
    if counters:
        out.print(table("\ncounters", ("counter", ">count"), counters))


def _name(enum: Any, prefix: str, number: int) -> str:
    """In lower case; a number that is newer than this version stays one."""
    known = number in enum.values()
    return str(enum.Name(number)).removeprefix(prefix).lower() if known else str(number)


def handles_json(tier: common_pb2.TierHandles) -> Json:
    """Names in lower case but for kinds; null where nothing is chosen or refused."""
    return {
        "tier": _name(common_pb2.Tier, "TIER_", tier.tier),
        "chosen": negotiation.kind_name(tier.chosen) if tier.chosen else None,
        "offers": [
            {
                "kind": negotiation.kind_name(offer.kind),
                "slabs": offer.slabs,
                "spans": offer.spans,
                "refusal": _name(common_pb2.HandleRefusal, "HANDLE_REFUSAL_", offer.refusal)
                if offer.refusal
                else None,
                "text": offer.text,
            }
            for offer in tier.offers
        ],
    }


def handles_table(tiers: Iterable[common_pb2.TierHandles]) -> Table:
    """What is given of each tier, and why not more."""
    rows = []
    for tier in tiers:
        name = _name(common_pb2.Tier, "TIER_", tier.tier)
        if not tier.offers:
            rows.append((name, "none", "", "the daemon has no memory of this tier"))
        for offer in tier.offers:
            what = [word for word in ("slabs", "spans") if getattr(offer, word)]
            kind = negotiation.kind_name(offer.kind)
            rows.append((name, kind, ", ".join(what) or "no", offer.text.replace("[", r"\[")))
    return table("\nhandles", ("tier", "kind", "given", "why not slabs"), rows)


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


def print_spans(spans: Sequence[admin_pb2.SpanInfo]) -> None:
    rows = [
        (
            span.key.hex()[:16],
            span.namespace.hex()[:8],
            span.state,
            f"{span.start}+{span.tokens}",
            f"{span.layer_begin}:{span.layer_end}",
            f"{span.head_begin}:{span.head_end}",
            size(span.length),
            _kept_as(span),
            str(span.leases),
            age(span.age_ms),
            age(span.idle_ms),
        )
        for span in spans
    ]
    columns = (
        *("key", "namespace", "state", ">tokens", ">layers", ">heads"),
        *(">size", "kept as", ">leases", ">age", ">idle"),
    )
    console().print(table("", columns, rows))


def _kept_as(span: admin_pb2.SpanInfo) -> str:
    """What a range holds, where that is not all that is to be said of it."""
    if span.dense_length:
        return f"recipe of {size(span.dense_length)} over {span.bases}"
    return f"base of {span.mirrors:,}" if span.mirrors else "dense"


def namespace_json(space: admin_pb2.NamespaceInfo) -> Json:
    return {
        "digest": space.digest.hex(),
        "spans": space.spans,
        "bytes": space.bytes,
        "disk_spans": space.disk_spans,
        "disk_bytes": space.disk_bytes,
        "fields": dict(sorted(space.fields.items())),
    }


def print_namespaces(spaces: Sequence[admin_pb2.NamespaceInfo]) -> None:
    rows = [
        (
            space.digest.hex()[:16],
            f"{space.spans:,}",
            size(space.bytes),
            f"{space.disk_spans:,}",
            size(space.disk_bytes),
            ", ".join(f"{name}={text}" for name, text in sorted(space.fields.items()) if text),
        )
        for space in spaces
    ]
    console().print(
        table("", ("namespace", ">spans", ">size", ">on disk", ">size", "fields"), rows)
    )


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


def tenants_table(tenants: Sequence[admin_pb2.TenantInfo]) -> Table:
    """What each tenant keeps, of how much."""
    rows = [
        (
            tenant.name,
            f"{tenant.spans:,}",
            size(tenant.used),
            size(tenant.quota) if tenant.quota else "no limit",
            str(tenant.slabs),
            f"{tenant.counters['hits']:,}",
            f"{tenant.counters['misses']:,}",
            f"{tenant.counters['evicted']:,}",
        )
        for tenant in tenants
    ]
    columns = ("tenant", ">spans", ">used", ">quota", ">slabs", ">hits", ">misses", ">evicted")
    return table("\ntenants", columns, rows)


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


def lesser(client: sessions_pb2.SessionInfo) -> list[str]:
    """For each tier in which a client got a lesser kind than it asked for: what, and why."""
    agreed = negotiation.from_messages(client.handles).values()
    return [negotiation.describe(tier) for tier in agreed if tier.fallback is not None]


def _handles(client: sessions_pb2.SessionInfo) -> str:
    agreed = negotiation.from_messages(client.handles).values()
    names = []
    for tier in agreed:
        kind = negotiation.kind_name(tier.chosen) if tier.chosen else "none"
        missed = tier.fallback
        if tier.offers:
            names.append(f"{kind}, not {negotiation.kind_name(missed.kind)}" if missed else kind)
    return "; ".join(names)


def role(client: sessions_pb2.SessionInfo) -> str:
    """``scheduler``, ``worker`` or ``tool``."""
    return sessions_pb2.Role.Name(client.role).removeprefix("ROLE_").lower()


def sessions_table(clients: Sequence[sessions_pb2.SessionInfo]) -> Table:
    """What each session pins, found and stored."""
    columns: tuple[str, ...] = (
        *(">session", "client", "role", "engine", ">pid", ">pinned", ">staging"),
        *(">hits", ">misses", ">stored", "not stored"),
    )
    # What nearly every session has is not worth a column.
    special = any(_handles(client) not in ("", HandleKind.MEMFD.name) for client in clients)
    rows = [
        (
            str(client.session_id),
            client.client_name.replace("[", r"\["),
            role(client),
            client.engine_id[:12].replace("[", r"\["),
            str(client.pid),
            size(client.leased_bytes),
            size(client.staging_bytes),
            f"{client.hits:,}",
            f"{client.misses:,}",
            f"{client.committed:,}",
            ", ".join(f"{name} {count:,}" for name, count in sorted(client.reasons.items())),
            *((_handles(client),) if special else ()),
        )
        for client in clients
    ]
    if special:
        columns = (*columns, "handles")
    return table("\nsessions", columns, rows)
