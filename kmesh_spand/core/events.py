"""What happens to the core: what sessions ask (``requests``), and all else.

Times are milliseconds of one monotonic clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kmesh_spand.core.diskfile import SpanFile
from kmesh_spand.core.mirrors import RecipeFacts
from kmesh_spand.core.records import Records
from kmesh_spand.core.requests import Request
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
