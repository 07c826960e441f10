"""Families as a client sees them: spans that differ little, kept as exact recipes over a base.

    session.families.declare(Family("round-17", namespace, "bfloat16", 64, shards, base=keys))
    session.families.join("round-17", "agent-3", keys, namespace)

Spans are stored as always. Whether one is a dense payload or a recipe is the daemon's business:
``Session.acquire(recipes=True)`` leases both, and ``kmesh.store.read_span`` gives either's payload.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field

from kmesh import errors
from kmesh.calls import Procedure, body_of, shard_message
from kmesh.kernels.rotary import Rotary
from kmesh.keys import KEY_BYTES
from kmesh.layout import DTYPE_BYTES, Shard
from kmesh.v1 import families_pb2

#: UTF-8 bytes of a family's or a member's name.
NAME_BYTES = 128
#: Base keys of one family.
MAX_BASE = 512
#: Runs of provenance in one call.
MAX_RECOVERED = 1024
#: Pairs of elements that a rotary embedding has at most.
MAX_PAIRS = 1024


class MirrorFate(enum.IntEnum):
    """What becomes of recipes when their family is dissolved; numbers as ``kmesh.v1.MirrorFate``.

    DENSE: they are made dense, and stay where there is no room. DENSE_OR_DROP: they are dropped
    where there is no room. KEEP: they stay.
    """

    DENSE = 1
    DENSE_OR_DROP = 2
    KEEP = 3


@dataclass(frozen=True, slots=True)
class Family:
    """What a family's spans have in common, and what its recipes may refer to.

    Attributes:
        name: 1 to 128 bytes that can be printed; a tenant's own.
        namespace: 32-byte digest.
        dtype: of the elements, a key of ``layout.DTYPE_BYTES``.
        head_dim: elements of one head's K, and of its V.
        shards: in which every span of the family is stored.
        base: keys, 32 bytes each, of spans in the frame in which they were computed; at most 512.
        rotary: how the model turns its keys; None: not known, so that no keys are turned. Whoever
            knows it may declare the family again with it.
        salt: digest of the requests' salt, 32 bytes, or empty.

    Raises:
        ConfigError: a field makes no sense; named by the message.
    """

    name: str
    namespace: bytes
    dtype: str
    head_dim: int
    shards: tuple[Shard, ...]
    base: bytes
    rotary: Rotary | None = None
    salt: bytes = field(default=b"", repr=False)

    def __post_init__(self) -> None:
        _check_name("name", self.name)
        _check_digest("namespace", self.namespace)
        if self.dtype not in DTYPE_BYTES:
            raise errors.ConfigError(f"dtype: {self.dtype!r} is none of {', '.join(DTYPE_BYTES)}")
        if self.head_dim < 1:
            raise errors.ConfigError(f"head_dim: {self.head_dim}")
        if not self.shards:
            raise errors.ConfigError("shards: none")
        _check_keys("base", self.base, MAX_BASE)
        if self.rotary is not None:
            if self.rotary.dtype != self.dtype:
                raise errors.ConfigError(f"rotary: turns keys of {self.rotary.dtype}")
            if not 2 <= self.rotary.dim <= min(self.head_dim, 2 * MAX_PAIRS):
                raise errors.ConfigError(f"rotary: {self.rotary.dim} elements are turned")
        if self.salt:
            _check_digest("salt", self.salt)


@dataclass(frozen=True, slots=True)
class Recovered:
    """A run of tokens that a member took from the base; what recovery wrote down.

    Keys were turned by the distance of the two positions. Tokens that were computed anew since
    need not be left out: bytes are compared.

    Attributes:
        position: of the run's first token, as the member's spans count (``start``).
        tokens: of the run.
        base: key, 32 bytes, of the base span with the run's first token.
        source: token of that span; the run goes on in the base keys behind it.
        kernel: version of the arithmetic that turned them; 0 for the only one there is.
    """

    position: int
    tokens: int
    base: bytes
    source: int
    kernel: int = 0


@dataclass(frozen=True, slots=True)
class Declared:
    """``id`` is unique in an epoch. ``created``: it was not declared before. ``added``: base keys
    that it did not have."""

    id: int
    created: bool
    added: int


@dataclass(frozen=True, slots=True)
class Joined:
    """``spans`` of the member (keys times shards), and how many of them are ``stored`` by now."""

    spans: int
    stored: int


@dataclass(frozen=True, slots=True)
class Dissolved:
    """``members`` that it had, and how many of its spans were recipes."""

    members: int
    mirrors: int


@dataclass(frozen=True, slots=True)
class Description:
    """A family as the daemon sees it: messages of ``kmesh.v1``, see there."""

    family: families_pb2.FamilyInfo
    members: tuple[families_pb2.MemberInfo, ...]


# Calls as procedures; see ``kmesh.calls``.


def declare(family: Family) -> Procedure[Declared]:
    """Raises InvalidArgument for what contradicts an earlier declaration; names the field."""
    rotary = None
    if family.rotary is not None:
        rotary = families_pb2.Rotary(
            frequencies=family.rotary.frequencies, interleaved=family.rotary.interleaved
        )
    request = families_pb2.DeclareFamilyRequest(
        family=family.name,
        salt=family.salt,
        namespace=family.namespace,
        dtype=family.dtype,
        head_dim=family.head_dim,
        shards=[shard_message(shard) for shard in family.shards],
        base=family.base,
        rotary=rotary,
    )
    answer = body_of(families_pb2.DeclareFamilyResponse, (yield request))
    return Declared(answer.id, answer.created, answer.added)


def join(
    family: str,
    member: str,
    keys: bytes,
    namespace: bytes,
    shards: Sequence[Shard],
    recovered: Sequence[Recovered],
    salt: bytes,
) -> Procedure[Joined]:
    """Raises NotFound for a family that is not declared."""
    _check_name("member", member)
    _check_keys("keys", keys)
    _check_digest("namespace", namespace)
    request = families_pb2.JoinFamilyRequest(
        family=family,
        salt=salt,
        member=member,
        namespace=namespace,
        keys=keys,
        shards=[shard_message(shard) for shard in shards],
        provenance=_provenance(recovered),
    )
    answer = body_of(families_pb2.JoinFamilyResponse, (yield request))
    return Joined(answer.spans, answer.stored)


def fork(
    family: str, parent: str, member: str, keys: bytes, recovered: Sequence[Recovered], salt: bytes
) -> Procedure[Joined]:
    """Raises NotFound for a family or a parent that is not there."""
    _check_name("member", member)
    if keys:
        _check_keys("keys", keys)
    request = families_pb2.ForkMemberRequest(
        family=family,
        salt=salt,
        parent=parent,
        member=member,
        keys=keys,
        provenance=_provenance(recovered),
    )
    answer = body_of(families_pb2.ForkMemberResponse, (yield request))
    return Joined(answer.spans, answer.stored)


def dissolve(family: str, mirrors: MirrorFate, salt: bytes) -> Procedure[Dissolved]:
    """Raises NotFound for a family that is not declared."""
    request = families_pb2.DissolveFamilyRequest(
        family=family, salt=salt, mirrors=families_pb2.MirrorFate.ValueType(mirrors)
    )
    answer = body_of(families_pb2.DissolveFamilyResponse, (yield request))
    return Dissolved(answer.members, answer.mirrors)


def describe(family: str, salt: bytes, device: str) -> Procedure[Description]:
    """Raises NotFound for a family that is not declared."""
    token, members = "", list[families_pb2.MemberInfo]()
    while True:
        request = families_pb2.DescribeFamilyRequest(
            family=family, salt=salt, page_token=token, device=device
        )
        answer = body_of(families_pb2.DescribeFamilyResponse, (yield request))
        members.extend(answer.members)
        token = answer.next_page_token
        if not token:
            return Description(answer.family, tuple(members))


def list_all(device: str) -> Procedure[tuple[families_pb2.FamilyInfo, ...]]:
    """All families that the session may see."""
    token, found = "", list[families_pb2.FamilyInfo]()
    while True:
        request = families_pb2.ListFamiliesRequest(page_token=token, device=device)
        answer = body_of(families_pb2.ListFamiliesResponse, (yield request))
        found.extend(answer.families)
        token = answer.next_page_token
        if not token:
            return tuple(found)


def _check_name(name: str, value: str) -> None:
    if not 0 < len(value.encode(errors="replace")) <= NAME_BYTES or not value.isprintable():
        raise errors.ConfigError(f"{name}: not 1 to {NAME_BYTES} bytes that can be printed")


def _check_digest(name: str, value: bytes) -> None:
    if len(value) != 32:
        raise errors.ConfigError(f"{name}: not a digest of 32 bytes")


def _check_keys(name: str, keys: bytes, most: int = 0) -> None:
    if not keys or len(keys) % KEY_BYTES:
        raise errors.ConfigError(f"{name}: not a multiple of {KEY_BYTES} bytes, or none")
    if most and len(keys) > most * KEY_BYTES:
        raise errors.ConfigError(f"{name}: over {most} keys")


def _provenance(recovered: Sequence[Recovered]) -> list[families_pb2.Provenance]:
    if len(recovered) > MAX_RECOVERED:
        raise errors.ConfigError(f"recovered: over {MAX_RECOVERED} runs")
    return [
        families_pb2.Provenance(
            position=run.position,
            tokens=run.tokens,
            base=run.base,
            source=run.source,
            kernel=run.kernel,
        )
        for run in recovered
    ]
