"""What the core wants done. The shell carries effects out in order, each once."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kmesh_spand.core.diskfile import SpanFile


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
    the job again. ``recipe``: it is one, and what it says is told.
    """

    job: int
    slab: int
    offset: int
    length: int
    root: int
    recipe: bool = False


@dataclass(frozen=True, slots=True)
class Payload:
    """A stored span that a job reads: where it lies, and what it is.

    Attributes:
        position: of its first token.
    """

    key: bytes
    slab: int
    offset: int
    length: int
    generation: int
    root: int
    tokens: int
    position: int


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens [token, token + tokens) of a span were recovered from token ``source`` on of the
    job's base number ``base``."""

    token: int
    tokens: int
    base: int
    source: int

    def of(self, numbers: Mapping[int, int]) -> Piece:
        """The same, where bases have other numbers."""
        return Piece(self.token, self.tokens, numbers[self.base], self.source)


@dataclass(frozen=True, slots=True)
class Encode:
    """Make a recipe of a payload, then send one of Encoded, NotEncoded, EncodeSpoiled and
    RecodeFailed for ``job``.

    What is read stays as it is until then. The recipe is kept by whoever made it until KeepRecipe
    or ForgetRecipe.

    Attributes:
        frequencies, interleaved: how keys are turned; none: they are not.
        pieces: provenance; none: runs of equal tokens are looked for.
    """

    job: int
    span: Payload
    namespace: bytes
    dtype: str
    head_dim: int
    shard: int
    bases: Sequence[Payload]
    frequencies: tuple[float, ...]
    interleaved: bool
    pieces: Sequence[Piece]


@dataclass(frozen=True, slots=True)
class KeepRecipe:
    """Write the recipe of ``job`` into a slab, sum it, then send RecipeKept or RecodeFailed."""

    job: int
    slab: int
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class ForgetRecipe:
    """The recipe of ``job`` is not wanted; it was made of a span in ``slab``. No event follows."""

    job: int
    slab: int


@dataclass(frozen=True, slots=True)
class Densify:
    """Decode a recipe into a slab, verified, with sums; then send Densified or RecodeFailed.

    Attributes:
        mirror: where the recipe lies; its length and root are the recipe's.
        length, root: of the payload.
        slab, offset: where it goes.
    """

    job: int
    mirror: Payload
    bases: Sequence[Payload]
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
    """Read a file into a range if it holds ``span``, then send Fetched or FetchFailed.

    The file may have names beside those of ``span``: ones that other files have as well.
    """

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
class DiskOutage:
    """The disk is treated as not there from now on, or it answers again; for people to know."""

    away: bool


@dataclass(frozen=True, slots=True)
class GiveUp:
    """A sealed slab is empty: SlabAdded follows, of another that replaces it."""

    slab: int


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
    | Encode
    | KeepRecipe
    | ForgetRecipe
    | Densify
    | Wipe
    | GiveUp
    | Spill
    | Fetch
    | Unlink
    | DiskOutage
    | PutOwner
    | PutRecord
    | Publish
    | Unpublish
    | DropStaging
    | SpanCommitted
    | SpanEnded
)
