"""What the commands print for people: tables, sizes and times."""

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


def name_of(enum: Any, prefix: str, number: int) -> str:
    """In lower case; a number that is newer than this version stays one."""
    known = number in enum.values()
    return str(enum.Name(number)).removeprefix(prefix).lower() if known else str(number)


def handles_table(tiers: Iterable[common_pb2.TierHandles]) -> Table:
    """What is given of each tier, and why not more."""
    rows = []
    for tier in tiers:
        name = name_of(common_pb2.Tier, "TIER_", tier.tier)
        if not tier.offers:
            rows.append((name, "none", "", "the daemon has no memory of this tier"))
        for offer in tier.offers:
            what = [word for word in ("slabs", "spans") if getattr(offer, word)]
            kind = negotiation.kind_name(offer.kind)
            rows.append((name, kind, ", ".join(what) or "no", offer.text.replace("[", r"\[")))
    return table("\nhandles", ("tier", "kind", "given", "why not slabs"), rows)


def print_spans(spans: Sequence[admin_pb2.SpanInfo], more: int) -> None:
    """Those that are given, and how many ``more`` there are."""
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
    if more:
        print(f"… {more:,} more: --limit")


def _kept_as(span: admin_pb2.SpanInfo) -> str:
    """What a range holds, where that is not all that is to be said of it."""
    if span.dense_length:
        return f"recipe of {size(span.dense_length)} over {span.bases}"
    return f"base of {span.mirrors:,}" if span.mirrors else "dense"


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
