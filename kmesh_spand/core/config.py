"""What the core is told once, at its start."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kmesh.errors import ConfigError
from kmesh.layout import SPAN_TOKENS, SUB_TOKENS
from kmesh_spand.core.policies import POLICIES


@dataclass(frozen=True, slots=True)
class CoreConfig:
    """Limits of the core. ConfigError names a field that is out of range.

    Attributes:
        max_spans: catalog records; slots are 0 … max_spans - 1.
        span_tokens, sub_tokens: tokens of a full span, and of the step at which tails are found.
        max_batch: entries of one request (keys times shards for Acquire).
        max_reservations: open reservations of one session.
        max_leases, max_leased_spans: open leases of one session, and spans in them.
        max_verify: verifications in flight at a time.
        patience_ms: how long after a slab last grew Reserve still answers "not ready"
            instead of evicting.
        remembered_keys: endings of keys that are remembered, to explain misses; may be 0.
        max_flights, max_flight_keys: flights that one session leads, and keys in them; a key takes
            some 400 bytes.
        max_flight_shards: shards that one Claim names.
        max_waits: Awaits and waiting Acquires of one session; half of the requests that it may
            have pending, so that waiting leaves room for work.
        death_memory_ms, hold_ms, longest_hold_ms: a key whose leaders died twice within the first
            is left alone for the second, twice as long after each further death, at most for the
            third.
        remembered_deaths: keys whose leaders died that are remembered.
        max_families, max_members: families of one group of uids, and members of one family.
        max_base, max_runs: base keys of one family, and runs of provenance in one call.
        max_family_spans, max_group_spans: spans (keys times shards) that one family names, and
            all of one group's; one takes some 300 bytes.
        max_family_names, max_group_names: keys and runs that the members of one family name, and
            those of one group's families, those of several members counted for each; one takes up
            to 250 bytes.
        dense_rest_ms: a mirror that was read by somebody who takes no recipes stays dense until
            nobody has done that for so long.
        max_encodes, max_densify: jobs in flight that make recipes, and that make them dense.
        max_bases: spans that one answer names as what its recipes refer to.
    """

    max_spans: int
    span_tokens: int = SPAN_TOKENS
    sub_tokens: int = SUB_TOKENS
    max_batch: int = 1024
    max_reservations: int = 4096
    max_leases: int = 65536
    max_leased_spans: int = 1 << 20
    max_verify: int = 4
    patience_ms: int = 5000
    remembered_keys: int = 0x8000
    max_flights: int = 256
    max_flight_keys: int = 65_536
    max_flight_shards: int = 64
    max_waits: int = 128
    death_memory_ms: int = 60_000
    hold_ms: int = 10_000
    longest_hold_ms: int = 600_000
    remembered_deaths: int = 1024
    max_families: int = 256
    max_members: int = 4096
    max_base: int = 512
    max_runs: int = 1024
    max_family_spans: int = 65_536
    max_group_spans: int = 262_144
    max_family_names: int = 262_144
    max_group_names: int = 524_288
    dense_rest_ms: int = 600_000
    max_encodes: int = 1
    max_densify: int = 2
    max_bases: int = 768

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if getattr(self, name) < (name != "remembered_keys"):
                raise ConfigError(f"{name}: must be positive")
        if self.max_spans >= 0xFFFF_FFFF:
            raise ConfigError("max_spans: must fit in 32 bits")
        if self.span_tokens > 0xFFFF or self.span_tokens % self.sub_tokens:
            raise ConfigError("span_tokens: must be a multiple of sub_tokens and below 65536")


@dataclass(frozen=True, slots=True)
class DiskConfig:
    """Limits of the disk tier. ConfigError names a field that is out of range.

    Attributes:
        capacity: bytes that its files may take, whole blocks.
        max_files: spans in files, and their further names.
        max_writes, max_reads: files that are written, and read, at a time.
        max_wanted: fetches that wait for their turn or run.
        hold_ms, longest_hold_ms: how long a span is left alone that could not be fetched, and the
            whole tier after it could not be written: twice as long each time, at most the second.
        max_failures: a file that could not be read so often is removed.
        max_removals: files that are removed at a time.
        max_late, stall_ms: the tier is treated as not there when so many waits have ended while
            nothing was read for so long; for ``hold_ms`` first, as above.
        policy: order in which files make room, of ``policies.POLICIES``.
        quotas: bytes by name of a tenant, or of its group without salt; 0 is no limit.
        default_quota: bytes of the others.
    """

    capacity: int
    max_files: int
    max_writes: int = 2
    max_reads: int = 8
    max_wanted: int = 4096
    hold_ms: int = 1000
    longest_hold_ms: int = 60_000
    max_failures: int = 3
    max_removals: int = 64
    max_late: int = 3
    stall_ms: int = 500
    policy: str = "s3-fifo"
    quotas: Mapping[str, int] = field(default_factory=dict)
    default_quota: int = 0

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if isinstance(value, int) and value < (name != "default_quota"):
                raise ConfigError(f"{name}: must be positive")
        if self.policy not in POLICIES:
            raise ConfigError(f"policy: {self.policy} is none of {', '.join(POLICIES)}")
        if self.max_files >= 0x7FFF_FFFF:
            raise ConfigError("max_files: must fit in 31 bits")
