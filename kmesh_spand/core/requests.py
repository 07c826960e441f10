"""What a session asks of the core.

Each is answered by exactly one ``effects.Reply``, at once or (``Acquire``, ``Commit``, ``Await``)
later.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kmesh_spand.core.family import Run


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
