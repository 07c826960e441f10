"""What an operator sees of the disk tier, as messages of ``kmesh.v1``."""

from __future__ import annotations

from collections.abc import Iterator

from kmesh.v1 import admin_pb2, flights_pb2
from kmesh_spand.control.diskjobs import DiskJobs
from kmesh_spand.core.disk import Disk


def disk_info(
    disk: Disk, jobs: DiskJobs | None, directory: str, group: int | None
) -> admin_pb2.DiskInfo:
    """The part of a status that is about the disk.

    Args:
        group: whose; None for all. Others' numbers would tell one when another is served.
    """
    status, rows = disk.status(), disk.tenant_rows(group)
    info = admin_pb2.DiskInfo(
        directory=directory,
        capacity=status.capacity,
        ready=status.ready,
        direct=jobs is not None and jobs.direct,
        failing_ms=status.failing_ms,
        away_ms=status.away_ms,
        tenants=[
            admin_pb2.DiskTenantInfo(name=r.name, quota=r.quota, used=r.used, spans=r.spans)
            for r in rows
        ],
    )
    if group is None:
        for name in ("used", "spans", "span_bytes", "writing", "queued", "reading"):
            setattr(info, name, getattr(status, name))
        for name in ("wanted", "waits", "held"):
            setattr(info, name, getattr(status, name))
    return info


def fetches(
    disk: Disk, limit: int, now_ms: int, group: int | None
) -> Iterator[flights_pb2.FetchInfo]:
    """The oldest fetches, of a group or of all."""
    for row in disk.fetch_rows(limit, now_ms, group):
        yield flights_pb2.FetchInfo(
            fetch=row.fetch,
            state=row.state,
            tenant=row.tenant,
            leader=row.leader,
            waiters=row.waiters,
            bytes=row.length,
            age_ms=row.age_ms,
            key=row.key,
        )
