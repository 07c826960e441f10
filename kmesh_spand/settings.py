"""The daemon's effective settings, as every process of it holds them.

Kept apart from ``config``, which needs a settings library to read them: the supervisor and its
children live for months and never load that.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from kmesh_spand.core.config import DiskConfig
from kmesh_spand.core.tenants import SHARED, Tenancy

LOCK_NAME = "daemon.lock"
SESSION_SOCKET = "session.sock"
GRPC_SOCKET = "grpc.sock"
METRICS_SOCKET = "metrics.sock"
UPGRADE_SOCKET = "upgrade.sock"

#: Below this a slab isn't worth its file descriptor.
MIN_SLAB_BYTES = 1 << 20


#: GPU memory comes in pieces of this.
GPU_GRANULARITY = 2 << 20


class GpuSlabPlan(NamedTuple):
    """One slab of GPU memory: its number, which of the settings' GPUs it is on, its bytes."""

    slab: int
    gpu: int
    size: int


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes are bytes, ``*_ms`` milliseconds. See ``docs/configuration.md``."""

    socket_dir: str
    socket_mode: int
    host_memory: int
    slab_size: int
    hugepages: bool
    numa_node: int
    populate_threads: int
    copy_threads: int
    span_tokens: int
    max_spans: int
    allow_uids: tuple[int, ...]
    max_sessions: int
    staging_memory: int
    session_staging: int
    deadline_ms: int
    copy_timeout_ms: int
    verify_rate: int
    grace_ms: int
    shutdown_timeout_ms: int
    remembered_keys: int
    watch_events: int
    metrics_listen: str
    memory_policy: str
    share: str
    tenants: dict[str, int]
    hardened: bool
    dma_buf: str
    memory_headroom: int
    gpu: tuple[str, ...]
    gpu_memory: int
    gpu_slab_size: int
    gpu_place: str
    disk: str
    disk_bytes: int
    disk_spans: int
    disk_policy: str
    disk_threads: int
    disk_sync: str
    disk_tenants: dict[str, int]
    stuck_ms: int
    slow_call_ms: int
    trace: str
    log_level: str
    log_format: str

    def tenancy(self) -> Tenancy:
        """Who shares spans, and the quotas."""
        quotas = dict(self.tenants)
        default = quotas.pop("default", 0)
        if self.share == "all":
            return Tenancy((SHARED,), True, quotas, default)
        return Tenancy(tuple(sorted(set(self.allow_uids))), False, quotas, default)

    def disk_limits(self) -> DiskConfig | None:
        """Of the tier below host memory; None if there is none."""
        if not self.disk:
            return None
        quotas = dict(self.disk_tenants)
        default = quotas.pop("default", 0)
        return DiskConfig(
            capacity=self.disk_bytes,
            max_files=self.disk_spans,
            max_reads=2 * self.disk_threads,
            policy=self.disk_policy,
            quotas=quotas,
            default_quota=default,
        )

    def slab_sizes(self) -> list[int]:
        """Bytes of each slab; the last one takes what is left, unless that is too little."""
        full, rest = divmod(self.host_memory, self.slab_size)
        return [self.slab_size] * full + ([rest] if rest >= MIN_SLAB_BYTES else [])

    def slab_numbers(self) -> int:
        """How many numbers slabs of host memory may have.

        Sealed ones may outlive their daemon (``storage.Storage``); each place has two numbers.
        """
        return len(self.slab_sizes()) * (2 if self.hardened else 1)

    def heir(self, slab: int) -> int:
        """The other number of a hardened slab's place."""
        places = len(self.slab_sizes())
        return (slab + places) % (2 * places)

    def gpu_slabs(self) -> list[GpuSlabPlan]:
        """Slabs of GPU memory, by number; they come after those of host memory."""
        first = len(self.slab_sizes())
        full, rest = divmod(self.gpu_memory, self.gpu_slab_size) if self.gpu else (0, 0)
        sizes = [self.gpu_slab_size] * full + ([rest] if rest else [])
        return [
            GpuSlabPlan(first + gpu * len(sizes) + n, gpu, size)
            for gpu in range(len(self.gpu))
            for n, size in enumerate(sizes)
        ]
