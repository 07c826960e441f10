"""What a session is answered."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class BasePlace:
    """Fields as in ``kmesh.v1.BasePlace``."""

    shard: int
    key: bytes
    slab: int
    offset: int
    length: int
    generation: int
    root: int
    tokens: int
    position: int


@dataclass(frozen=True, slots=True)
class AcquireResult:
    """Parallel arrays as in ``kmesh.v1.AcquireResponse``.

    Those of recipes are empty without, and so is ``start`` where nobody asked for it.
    """

    lease: int
    reason: Sequence[int]
    slab: array[int]
    offset: array[int]
    length: array[int]
    tokens: array[int]
    generation: array[int]
    root: array[int]
    start: array[int] = field(default_factory=lambda: array("I"))
    dense_length: array[int] = field(default_factory=lambda: array("Q"))
    dense_root: array[int] = field(default_factory=lambda: array("Q"))
    bases: Sequence[BasePlace] = ()


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
class Progress:
    """Fields as in ``kmesh.v1.FlightProgress``."""

    begin: int = 0
    landed: int = 0
    computed: int = 0
    age_ms: int = 0
    quiet_ms: int = 0
    pause_ms: int = 0
    beside: bool = False


@dataclass(frozen=True, slots=True)
class ProgressResult:
    """None: there is no such flight."""

    progress: Progress | None


@dataclass(frozen=True, slots=True)
class ClaimResult:
    """Fields as in ``kmesh.v1.ClaimResponse``."""

    standing: int
    flight: int = 0
    first: int = 0
    covered: int = 0
    ahead: int = 0
    progress: Progress = Progress()


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
class DeclareResult:
    id: int
    created: bool
    added: int


@dataclass(frozen=True, slots=True)
class JoinResult:
    """Of a Join or a Fork."""

    spans: int
    stored: int


@dataclass(frozen=True, slots=True)
class DissolveResult:
    members: int
    mirrors: int


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
    | ProgressResult
    | DeclareResult
    | JoinResult
    | DissolveResult
    | Refused
)
