"""What the core wants done. The shell carries effects out in order, each once."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from kmesh_spand.core.diskfile import SpanFile


@dataclass(frozen=True, slots=True)
class AcquireResult:
    """Parallel arrays as in ``kmesh.v1.AcquireResponse``."""

    lease: int
    reason: Sequence[int]
    slab: array[int]
    offset: array[int]
    length: array[int]
    tokens: array[int]
    generation: array[int]
    root: array[int]


@dataclass(frozen=True, slots=True)
class ReleaseResult:
    released: int
    refused: Sequence[int]


@dataclass(frozen=True, slots=True)
class ReserveResult:
    reason: Sequence[int]
    reservation: Sequence[int]


@dataclass(frozen=True, slots=True)
class CommitResult:
    reason: Sequence[int]


@dataclass(frozen=True, slots=True)
class AbortResult:
    aborted: int


@dataclass(frozen=True, slots=True)
class ReportCorruptResult:
    accepted: int


@dataclass(frozen=True, slots=True)
class ClaimResult:
    """Fields as in ``kmesh.v1.ClaimResponse``."""

    standing: int
    flight: int = 0
    first: int = 0
    covered: int = 0
    ahead: int = 0
    landed: int = 0
    age_ms: int = 0


@dataclass(frozen=True, slots=True)
class AwaitResult:
    """``arrival`` is a ``codes.Arrival``, ``cause`` a ``codes.FlightCause`` or 0."""

    arrival: int
    cause: int = 0


@dataclass(frozen=True, slots=True)
class LeaveResult:
    left: int


@dataclass(frozen=True, slots=True)
class LandResult:
    ended: bool


@dataclass(frozen=True, slots=True)
class Refused:
    """The whole call failed; ``code`` is a number of ``kmesh.v1.Code``."""

    code: int
    message: str
    field: str = ""


Result = (
    AcquireResult
    | ReleaseResult
    | ReserveResult
    | CommitResult
    | AbortResult
    | ReportCorruptResult
    | ClaimResult
    | AwaitResult
    | LeaveResult
    | LandResult
    | Refused
)


@dataclass(frozen=True, slots=True)
class Reply:
    """Answer ``request`` of ``session``; dropped by the shell if the session is gone."""

    session: int
    request: int
    result: Result


@dataclass(frozen=True, slots=True)
class Copy:
    """Copy staging bytes into a slab, sum them, then send CopyDone or CopyFailed for ``job``."""

    job: int
    session: int
    staging_offset: int
    slab: int
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Verify:
    """Read a payload, compare it with its tile sums and ``root``, then send VerifyDone.

    A worker that ends before it answers says nothing about the payload: the next one is given
    the job again.
    """

    job: int
    slab: int
    offset: int
    length: int
    root: int


@dataclass(frozen=True, slots=True)
class Wipe:
    """Write zeros wherever a slab has pages, sums too, then send WipeDone for ``job``.

    A worker that dies before it answers must be given the job again.
    """

    job: int
    slab: int


@dataclass(frozen=True, slots=True)
class Spill:
    """Write a payload to a file, then send Spilled or SpillFailed for ``job``.

    The range may be given to another span meanwhile: what is written must have ``span.root``.
    """

    job: int
    slab: int
    offset: int
    span: SpanFile


@dataclass(frozen=True, slots=True)
class Fetch:
    """Read a file into a range if it holds exactly ``span``, then send Fetched or FetchFailed."""

    job: int
    name: int
    slab: int
    offset: int
    span: SpanFile


@dataclass(frozen=True, slots=True)
class Unlink:
    """Remove a file, then send Unlinked. A worker that dies must be followed by one that does."""

    job: int
    name: int


@dataclass(frozen=True, slots=True)
class PutOwner:
    """Write whose a slab is (``tenants.OWNER_BYTES``), before any record of a span in it."""

    slab: int
    data: bytes


@dataclass(frozen=True, slots=True)
class PutRecord:
    """Write a catalog record (``record.RECORD_BYTES``) at ``slot``; zeros free it."""

    slot: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Publish:
    """Make keys visible in the index of a group of uids.

    ``tags`` as ``kmesh.index.tag``; they point at ``slot``. ``tier``: 0 is host memory; to tags of
    a GPU's the shell adds which one it is. Slots from ``max_spans`` on are files of the disk tier.
    A tag that points elsewhere points here afterwards.
    """

    slot: int
    tags: Sequence[int] = field(default_factory=tuple)
    group: int = 0
    tier: int = 0


@dataclass(frozen=True, slots=True)
class Unpublish:
    """Take keys out of the index, before anything else happens to their span."""

    slot: int
    tags: Sequence[int] = field(default_factory=tuple)
    group: int = 0
    tier: int = 0


@dataclass(frozen=True, slots=True)
class DropStaging:
    """Nothing reads this session's staging any more: destroy it."""

    session: int


@dataclass(frozen=True, slots=True)
class SpanCommitted:
    """For who watches: a span became visible for the first time in this epoch."""

    key: bytes
    namespace: bytes
    shard: int
    tokens: int
    length: int


@dataclass(frozen=True, slots=True)
class SpanEnded:
    """For who watches: a stored span is gone; ``cause`` is a number of ``kmesh.v1.Cause``."""

    key: bytes
    namespace: bytes
    shard: int
    tokens: int
    length: int
    cause: int


Effect = (
    Reply
    | Copy
    | Verify
    | Wipe
    | Spill
    | Fetch
    | Unlink
    | PutOwner
    | PutRecord
    | Publish
    | Unpublish
    | DropStaging
    | SpanCommitted
    | SpanEnded
)
