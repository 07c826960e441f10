"""What happens to the core. Times are milliseconds of one monotonic clock.

Every event that carries ``request`` is answered by exactly one ``effects.Reply``,
at once or (``Commit``, ``Await``) later.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kmesh_spand.core.diskfile import SpanFile
from kmesh_spand.core.family import Run
from kmesh_spand.core.mirrors import RecipeFacts
from kmesh_spand.core.records import Records
from kmesh_spand.core.tenants import SlabOwner


@dataclass(frozen=True, slots=True)
class SessionOpened:
    """A client said Hello and was let in.

    Attributes:
        session: unique for this epoch, never reused.
        engine: (uid, engine id) joined by the caller, or empty for tools.
        role: number of ``kmesh.v1.Role``.
    """

    session: int
    uid: int
    engine: str
    role: int


@dataclass(frozen=True, slots=True)
class SessionClosed:
    """The connection ended, for whatever reason. Not an error if unknown."""

    session: int


@dataclass(frozen=True, slots=True)
class Acquire:
    """``keys`` are 32 bytes each; ``shards`` are shard codes; entry i·m + j is key i, shard j.

    ``salt`` is the 32-byte digest of the request's salt, or empty; uid and salt are the tenant.
    ``tier`` is where it looks: 0 is host memory, the others are GPUs. ``recipes``: who asks can
    decode them. ``positions``: it wants to know where spans were computed. With ``wait`` it is
    answered when what has to be fetched from disk has come, or can't, or ``Hurry`` says so.
    """

    session: int
    request: int
    keys: bytes
    shards: Sequence[int]
    prefix: bool
    salt: bytes = b""
    tier: int = 0
    recipes: bool = False
    positions: bool = False
    wait: bool = False


@dataclass(frozen=True, slots=True)
class Release:
    session: int
    request: int
    leases: Sequence[int]


@dataclass(frozen=True, slots=True)
class Reserve:
    """Parallel arrays, one entry a span; see ``kmesh.v1.ReserveRequest``."""

    session: int
    request: int
    namespace: bytes
    shard: int
    keys: bytes
    tokens: Sequence[int]
    start: Sequence[int]
    length: Sequence[int]
    sub_keys: bytes = b""
    salt: bytes = b""
    tier: int = 0


@dataclass(frozen=True, slots=True)
class Commit:
    """``staging_size`` is what the session's staging holds: offsets are checked against it."""

    session: int
    request: int
    reservations: Sequence[int]
    offsets: Sequence[int]
    staging_size: int


@dataclass(frozen=True, slots=True)
class Abort:
    session: int
    request: int
    reservations: Sequence[int]


@dataclass(frozen=True, slots=True)
class ReportCorrupt:
    session: int
    request: int
    lease: int
    entries: Sequence[int]


@dataclass(frozen=True, slots=True)
class Claim:
    """``keys`` are 32 bytes each, in chain order; ``shards`` those in which the caller stores.

    ``place`` names what it computes on, or is empty.
    """

    session: int
    request: int
    keys: bytes
    shards: Sequence[int]
    salt: bytes = b""
    tier: int = 0
    place: str = ""


@dataclass(frozen=True, slots=True)
class Await:
    """For keys [first, first + covered) of a flight; answered when that has come to an end.

    ``wait`` is the session's own number for it, ``place`` as in ``Claim``.
    """

    session: int
    request: int
    flight: int
    first: int
    covered: int
    shards: Sequence[int]
    wait: int = 0
    place: str = ""


@dataclass(frozen=True, slots=True)
class Leave:
    """The session's Awaits of a flight end.

    Attributes:
        only: the request that ends; 0: all of them.
        wait: the Await's own number; 0: all of them.
    """

    session: int
    request: int
    flight: int
    only: int = 0
    wait: int = 0


@dataclass(frozen=True, slots=True)
class Land:
    """The leader's own end; ``cause`` is a ``codes.FlightCause``."""

    session: int
    request: int
    flight: int
    cause: int


@dataclass(frozen=True, slots=True)
class AskProgress:
    """How far a flight is; ``computed`` is its leader's word, ``place`` as in ``Claim``."""

    session: int
    request: int
    flight: int
    computed: int = 0
    place: str = ""


@dataclass(frozen=True, slots=True)
class Declare:
    """Fields as in ``kmesh.v1.DeclareFamilyRequest``; ``frequencies`` are none without rotary."""

    session: int
    request: int
    family: str
    namespace: bytes
    dtype: str
    head_dim: int
    shards: Sequence[int]
    base: bytes
    frequencies: tuple[float, ...] = ()
    interleaved: bool = False
    salt: bytes = b""


@dataclass(frozen=True, slots=True)
class Join:
    """Fields as in ``kmesh.v1.JoinFamilyRequest``; no ``shards``: the family's."""

    session: int
    request: int
    family: str
    member: str
    namespace: bytes
    keys: bytes
    shards: Sequence[int] = ()
    runs: Sequence[Run] = ()
    salt: bytes = b""


@dataclass(frozen=True, slots=True)
class Fork:
    """Fields as in ``kmesh.v1.ForkMemberRequest``."""

    session: int
    request: int
    family: str
    parent: str
    member: str
    keys: bytes = b""
    runs: Sequence[Run] = ()
    salt: bytes = b""


@dataclass(frozen=True, slots=True)
class Dissolve:
    """``fate`` is a ``codes.MirrorFate``."""

    session: int
    request: int
    family: str
    fate: int = 0
    salt: bytes = b""


@dataclass(frozen=True, slots=True)
class CopyDone:
    """The store worker wrote a payload and its tile sums, which fold to ``root``."""

    job: int
    root: int


@dataclass(frozen=True, slots=True)
class CopyFailed:
    """The store worker could not copy, or died before it answered."""

    job: int


@dataclass(frozen=True, slots=True)
class VerifyDone:
    """A payload was read again. ``good`` is None when it could not be, for a reason of its own.

    Its worker died at it, by what reading broken memory gives, or was well and said so. That a
    worker ended for any other reason is no event: the next one reads the payload. ``facts`` are of
    a good recipe, if it was one.
    """

    job: int
    good: bool | None
    facts: RecipeFacts | None = None


@dataclass(frozen=True, slots=True)
class Encoded:
    """A recipe of ``length`` bytes was made, which gave its payload back, bit for bit.

    Attributes:
        used: which of the job's bases it refers to; at least one.
    """

    job: int
    length: int
    used: Sequence[int]


@dataclass(frozen=True, slots=True)
class NotEncoded:
    """A payload shares nothing that is worth a recipe, or can't have one: ``why`` says it."""

    job: int
    why: str


@dataclass(frozen=True, slots=True)
class EncodeSpoiled:
    """No recipe was made, since bytes have changed since they were stored.

    Attributes:
        span: whether they are the payload's own.
        bases: which of the job's bases they are of.
    """

    job: int
    span: bool
    bases: Sequence[int]


@dataclass(frozen=True, slots=True)
class RecipeKept:
    """A recipe was written into its range, with its sums, which fold to ``root``."""

    job: int
    root: int


@dataclass(frozen=True, slots=True)
class Densified:
    """A recipe was decoded into a range, with sums. Not ``good``: it did not give its payload."""

    job: int
    good: bool


@dataclass(frozen=True, slots=True)
class RecodeFailed:
    """An encoding, the keeping of a recipe or a decoding could not be done, whatever the bytes."""

    job: int


@dataclass(frozen=True, slots=True)
class SlabAdded:
    """A slab exists; ``capacity`` bytes may be used once they are populated.

    Attributes:
        owner: what an earlier epoch wrote of it; None if it was never anybody's.
        tier: 0 is host memory, the others are GPUs.
        sealed: nobody can write it any more; it comes after ``Recovered``.
        replaces: a sealed slab that was given up, and whose group of uids this one is for.
    """

    slab: int
    capacity: int
    owner: SlabOwner | None = None
    tier: int = 0
    sealed: bool = False
    replaces: int | None = None


@dataclass(frozen=True, slots=True)
class WipeDone:
    """A slab holds zeros. Not ``ok``: it could not be wiped, and is not used any more."""

    job: int
    ok: bool


@dataclass(frozen=True, slots=True)
class Populated:
    """The first ``capacity`` bytes of a slab's payload area have pages behind them."""

    slab: int
    capacity: int


@dataclass(frozen=True, slots=True)
class Recovered:
    """Records of an earlier epoch, read from the catalog; sent once, first.

    Their payloads are served only after a verification of each.
    """

    records: Records = field(default_factory=Records)


@dataclass(frozen=True, slots=True)
class GraceEnded:
    """Engines of the earlier epoch have re-attached or had their time: ranges may be reused.

    Attributes:
        expected: slabs that may still come; their records are kept for them.
    """

    expected: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Evict:
    """An operator wants these spans gone. Those that are leased, or no spans now, stay."""

    slots: Sequence[int]


@dataclass(frozen=True, slots=True)
class EvictBases:
    """An operator wants these spans gone, which mirrors refer to: those are made dense first.

    Attributes:
        spans: slot and generation of each.
        drop: mirrors for which there is no room are dropped; otherwise they stay, and their base.
    """

    spans: Sequence[tuple[int, int]]
    drop: bool = False


@dataclass(frozen=True, slots=True)
class Hurry:
    """An Acquire that waits has waited long enough: it is answered with what is there."""

    session: int
    request: int


@dataclass(frozen=True, slots=True)
class DiskFound:
    """Files of an earlier epoch, (name, span), as the scan of the directory finds them.

    Their payloads are read only when they are fetched. A file that is known already is no news.
    """

    files: Sequence[tuple[int, SpanFile]]


@dataclass(frozen=True, slots=True)
class DiskReady:
    """The directory has been looked through: files may be written."""


@dataclass(frozen=True, slots=True)
class DiskGone:
    """There is nobody to read and write files, until the next ``DiskReady``."""


@dataclass(frozen=True, slots=True)
class Spilled:
    """A payload is in a file of that name, which is a number that no other has."""

    job: int
    name: int


@dataclass(frozen=True, slots=True)
class SpillFailed:
    """There is no such file. ``trouble`` is a ``codes.Trouble``."""

    job: int
    trouble: int


@dataclass(frozen=True, slots=True)
class Fetched:
    """A payload and its tile sums were read from a file, and are what it was to hold."""

    job: int


@dataclass(frozen=True, slots=True)
class FetchFailed:
    """Nothing can be said of the range. ``trouble`` is a ``codes.Trouble``."""

    job: int
    trouble: int


@dataclass(frozen=True, slots=True)
class Unlinked:
    """A file is gone. Not ``ok``: it could not be removed, and is found by the next scan."""

    job: int
    ok: bool


@dataclass(frozen=True, slots=True)
class Forget:
    """An operator wants these files gone, by row of the disk's table; others stay as they are."""

    rows: Sequence[int]


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


@dataclass(frozen=True, slots=True)
class Drain:
    """No new reservation from now on; what is in flight may finish."""


@dataclass(frozen=True, slots=True)
class GoOn:
    """Nothing has happened: what was left for later is gone on with."""


@dataclass(frozen=True, slots=True)
class Resume:
    """Reservations are welcome again."""


#: What a session asks for, and is answered.
Request = (
    Acquire
    | Release
    | Reserve
    | Commit
    | Abort
    | ReportCorrupt
    | Claim
    | Await
    | Leave
    | Land
    | AskProgress
    | Declare
    | Join
    | Fork
    | Dissolve
)

Event = (
    Request
    | SessionOpened
    | SessionClosed
    | CopyDone
    | CopyFailed
    | VerifyDone
    | Encoded
    | NotEncoded
    | EncodeSpoiled
    | RecipeKept
    | Densified
    | RecodeFailed
    | SlabAdded
    | WipeDone
    | Populated
    | Recovered
    | GraceEnded
    | Evict
    | EvictBases
    | Hurry
    | DiskFound
    | DiskReady
    | DiskGone
    | Spilled
    | SpillFailed
    | Fetched
    | FetchFailed
    | Unlinked
    | Forget
    | Tick
    | Drain
    | GoOn
    | Resume
)
