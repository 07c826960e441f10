"""What the core shows of itself. Views are copies: nothing in them changes later."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SlabStatus:
    """Bytes of one slab; ``used`` by spans, reservations and ranges not reusable yet.

    ``tenant`` is its tenant's name, or empty; ``sealed``: nothing can be written there.
    """

    slab: int
    capacity: int
    populated: int
    used: int
    tenant: str
    sealed: bool = False


@dataclass(frozen=True, slots=True)
class CoreStatus:
    """Counts of the whole core; bytes are payload bytes.

    Attributes:
        spans, span_bytes: that have a catalog record, verified or not.
        slots: catalog slots in use, by spans, their further names and reservations.
        index_entries: keys that are published.
        recovering: spans of an earlier epoch that are not verified yet.
        families: that are declared.
        mirrors, mirror_bytes, mirror_dense_bytes: spans that are kept as recipes, bytes of these,
            and that they would take dense. mirror_used_bytes: of the tiles that they take.
        base_spans: that mirrors refer to.
    """

    draining: bool
    spans: int
    span_bytes: int
    max_spans: int
    slots: int
    sessions: int
    leases: int
    leased_spans: int
    leased_bytes: int
    reservations: int
    index_entries: int
    recovering: int
    families: int
    mirrors: int
    mirror_bytes: int
    mirror_dense_bytes: int
    mirror_used_bytes: int
    base_spans: int
    slabs: tuple[SlabStatus, ...]


@dataclass(frozen=True, slots=True)
class SpanRow:
    """One span, for ``kmesh ls``. ``state`` is a name of ``docs/states.md``; times in ms.

    Attributes:
        dense: payload bytes that it gives, if it is a recipe; else 0. bases: that it refers to.
        mirrors: recipes that refer to it.
    """

    slot: int
    key: bytes
    namespace: bytes
    slab: int
    offset: int
    length: int
    start: int
    tokens: int
    shard: int
    generation: int
    state: str
    leases: int
    age_ms: int
    idle_ms: int
    dense: int = 0
    bases: int = 0
    mirrors: int = 0


@dataclass(frozen=True, slots=True)
class FamilyRow:
    """One family in one tier; fields as in ``kmesh.v1.FamilyInfo``, shards are codes.

    ``gpus`` are the tiers of GPUs where something of it is stored.
    """

    id: int
    name: str
    tenant: str
    namespace: bytes
    dtype: str
    head_dim: int
    shards: tuple[int, ...]
    base_spans: int
    base_stored: int
    base_bytes: int
    members: int
    spans: int
    mirrors: int
    dense_bytes: int
    stored_bytes: int
    recipe_bytes: int
    used_bytes: int
    age_ms: int
    gpus: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class MemberRow:
    """One member of a family in one tier; fields as in ``kmesh.v1.MemberInfo``."""

    name: str
    parent: str
    master: bool
    spans: int
    base: int
    mirrors: int
    dense: int
    waiting: int
    refused: int
    dense_bytes: int
    stored_bytes: int
    recipe_bytes: int
    used_bytes: int
    refusal: str


@dataclass(frozen=True, slots=True)
class NamespaceRow:
    """What is stored under one namespace digest: spans in memory, and files on disk."""

    namespace: bytes
    spans: int = 0
    bytes: int = 0
    files: int = 0
    file_bytes: int = 0


@dataclass(frozen=True, slots=True)
class TenantRow:
    """One tenant. ``used`` bytes are those of whole tiles, also of what is being written.

    ``quota`` is 0 for no limit; ``counters`` have the names in ``tenants.TENANT_COUNTERS``.
    """

    name: str
    group: int
    quota: int
    used: int
    spans: int
    stored_bytes: int
    slabs: int
    counters: dict[str, int]


@dataclass(frozen=True, slots=True)
class FlightRow:
    """One flight, for ``kmesh flights``.

    Attributes:
        state: a name of ``docs/states.md``.
        tenant: its tenant's name.
        leader: its session; 0 when there is none any more.
        keys, landed: promised by the present leader; of those, landed from the first on.
        deaths: leaders whose session ended.
        age_ms: since the present leader began.
        key: the first that has not landed.
    """

    flight: int
    state: str
    tenant: str
    leader: int
    keys: int
    landed: int
    waiters: int
    deaths: int
    age_ms: int
    key: bytes


@dataclass(frozen=True, slots=True)
class SessionRow:
    """What one session holds. ``leased_*`` count a span once for each lease on it.

    Attributes:
        hits, misses, pending: entries of its Acquires.
        reasons: entries of its Reserves and Commits that were not OK, by ``Reason``.
        committed, committed_bytes: spans that it stored.
    """

    session: int
    leases: int
    leased_spans: int
    leased_bytes: int
    reservations: int
    reserved_bytes: int
    copies: int
    hits: int
    misses: int
    pending: int
    reasons: dict[int, int]
    committed: int
    committed_bytes: int


@dataclass(frozen=True, slots=True)
class DiskStatus:
    """The disk tier. Bytes are of files, ``span_bytes`` of payloads; the rest counts files.

    Attributes:
        queued: spans in memory that wait to be written. waits: Acquires that wait for files.
        failing_ms: for how long no file could be written; 0: it can.
        away_ms: for how long the disk has been treated as not there; 0: it answers.
    """

    capacity: int
    used: int
    spans: int
    span_bytes: int
    writing: int
    queued: int
    reading: int
    wanted: int
    waits: int
    held: int
    ready: bool
    failing_ms: int
    away_ms: int


@dataclass(frozen=True, slots=True)
class DiskTenantRow:
    """Files of one tenant; ``quota`` is 0 for no limit, both are bytes."""

    name: str
    quota: int
    used: int
    spans: int


@dataclass(frozen=True, slots=True)
class FetchRow:
    """One fetch, for ``kmesh flights``; ``leader`` is 0 when nobody wants it any more."""

    fetch: int
    state: str
    tenant: str
    leader: int
    waiters: int
    length: int
    age_ms: int
    key: bytes
