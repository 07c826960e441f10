"""What sessions ask about families, as messages of ``kmesh.v1`` and events of the core."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import asdict

from google.protobuf.message import Message

from kmesh import errors
from kmesh.keys import KEY_BYTES
from kmesh.layout import Shard
from kmesh.v1 import common_pb2, families_pb2
from kmesh_spand.control.gpus import Gpus
from kmesh_spand.core import events, requests, results
from kmesh_spand.core.core import Core
from kmesh_spand.core.family import Run
from kmesh_spand.core.tenants import Tenancy
from kmesh_spand.core.views import FamilyRow

#: So many fit in a message, whatever they are called.
_MEMBERS, _FAMILIES = 200, 100
#: Version of the arithmetic that turns keys: the only one there is (``kmesh.codec.TURN_KERNEL``).
_TURN_KERNEL = 1


def seen_by(tenancy: Tenancy, uid: int) -> int | None:
    """Whose spans, sessions and families a uid may see: None is everybody's.

    Root and the daemon's own user could read all of it anyway.
    """
    if len(tenancy.groups) == 1 or uid in (0, os.getuid()):
        return None
    return tenancy.group(uid)


def to_event(
    session: int, request: int, body: Message, shards: tuple[int, ...]
) -> events.Event | None:
    """The event that a request about families is; None if it is none that changes anything.

    Args:
        shards: codes of those in the body.

    Raises:
        InvalidArgument: provenance is of another arithmetic; ``field`` names it.
    """
    match body:
        case families_pb2.DeclareFamilyRequest():
            return requests.Declare(
                session,
                request,
                body.family,
                body.namespace,
                body.dtype,
                body.head_dim,
                shards,
                body.base,
                tuple(body.rotary.frequencies),
                body.rotary.interleaved,
                body.salt,
            )
        case families_pb2.JoinFamilyRequest():
            runs = _runs(body.provenance, "join_family")
            return requests.Join(
                session,
                request,
                body.family,
                body.member,
                body.namespace,
                body.keys,
                shards,
                runs,
                body.salt,
            )
        case families_pb2.ForkMemberRequest():
            runs = _runs(body.provenance, "fork_member")
            return requests.Fork(
                session,
                request,
                body.family,
                body.parent,
                body.member,
                body.keys,
                runs,
                body.salt,
            )
        case families_pb2.DissolveFamilyRequest():
            return requests.Dissolve(session, request, body.family, body.mirrors, body.salt)
    return None


def _runs(provenance: Iterable[families_pb2.Provenance], call: str) -> list[Run]:
    found = []
    for number, run in enumerate(provenance):
        at = f"{call}.provenance[{number}]"
        if run.kernel not in (0, _TURN_KERNEL):
            raise errors.InvalidArgument(
                f"only version {_TURN_KERNEL} is known", field=f"{at}.kernel"
            )
        if len(run.base) != KEY_BYTES:
            raise errors.InvalidArgument(f"not {KEY_BYTES} bytes", field=f"{at}.base")
        found.append(Run(run.position, run.tokens, run.base, run.source))
    return found


def to_message(result: results.Result, name: str) -> Message | None:
    """The answer's body; None if the result is about something else."""
    match result:
        case results.DeclareResult():
            return families_pb2.DeclareFamilyResponse(
                id=result.id, created=result.created, added=result.added
            )
        case results.JoinResult() if name == "fork_member":
            return families_pb2.ForkMemberResponse(spans=result.spans, stored=result.stored)
        case results.JoinResult():
            return families_pb2.JoinFamilyResponse(spans=result.spans, stored=result.stored)
        case results.DissolveResult():
            return families_pb2.DissolveFamilyResponse(
                members=result.members, mirrors=result.mirrors
            )
    return None


def describe(
    core: Core, body: families_pb2.DescribeFamilyRequest, uid: int, now_ms: int, gpus: Gpus
) -> families_pb2.DescribeFamilyResponse:
    """Answer of Families.Describe: what a uid may see.

    Raises:
        NotFound, InvalidArgument, Unavailable: of which field.
    """
    tier = gpus.tier(body.device, "describe_family.device")
    first, limit = _page(body, _MEMBERS)
    family = core.family_views.find(
        number=body.id,
        name=body.family,
        salt=body.salt,
        group=core.tenancy.group(uid),
        every=seen_by(core.tenancy, uid) is None,
    )
    if family is None:
        field = "describe_family.id" if body.id else "describe_family.family"
        raise errors.NotFound("no such family", field=field)
    answer = families_pb2.DescribeFamilyResponse(
        family=_info(core.family_views.row(family, now_ms, tier), gpus),
        members=[
            families_pb2.MemberInfo(**asdict(row))
            for row in core.family_views.members(family, first, limit, tier)
        ],
    )
    if len(family.members) > first + limit:
        answer.next_page_token = str(first + limit)
    return answer


def list_all(
    core: Core, body: families_pb2.ListFamiliesRequest, uid: int, now_ms: int, gpus: Gpus
) -> families_pb2.ListFamiliesResponse:
    """Answer of Families.List: what a uid may see.

    Raises:
        InvalidArgument, Unavailable: of which field.
    """
    tier = gpus.tier(body.device, "list_families.device")
    after, limit = _page(body, _FAMILIES)
    group = seen_by(core.tenancy, uid)
    rows = core.family_views.rows(after, limit + 1, now_ms=now_ms, group=group, tier=tier)
    shown = [_info(row, gpus) for row in rows[:limit]]
    answer = families_pb2.ListFamiliesResponse(families=shown)
    if len(rows) > limit:
        answer.next_page_token = str(rows[limit - 1].id)
    return answer


def _info(row: FamilyRow, gpus: Gpus) -> families_pb2.FamilyInfo:
    fields = asdict(row)
    fields["devices"] = [gpus.tier_device(tier) for tier in fields.pop("gpus")]
    shards = [Shard.from_code(code) for code in fields.pop("shards")]
    return families_pb2.FamilyInfo(
        shards=[
            common_pb2.Shard(
                layer_begin=shard.layer_begin,
                layer_end=shard.layer_end,
                head_begin=shard.head_begin,
                head_end=shard.head_end,
            )
            for shard in shards
        ],
        **fields,
    )


def _page(
    body: families_pb2.DescribeFamilyRequest | families_pb2.ListFamiliesRequest, most: int
) -> tuple[int, int]:
    """Behind what the page begins, and how long it is. InvalidArgument names the field."""
    if body.limit > most:
        raise errors.InvalidArgument(f"over {most}", field="limit")
    if not body.page_token.isdecimal() and body.page_token:
        raise errors.InvalidArgument("not from an earlier answer", field="page_token")
    return int(body.page_token[:18] or 0), body.limit or most
