"""What tests of mirrors in the core begin with."""

from __future__ import annotations

from collections.abc import Sequence

from contents import NAMESPACE, SHARD
from world import World

from kmesh.layout import TILE_BYTES
from kmesh_spand.core import requests as rq
from kmesh_spand.core import results as rs
from kmesh_spand.core.family import Run

#: Of a span of 64 tokens: bfloat16, 4 layers, 2 heads of 64.
DENSE = 2 * TILE_BYTES
TAIL = DENSE * 48 // 64


def declare(world: World, session: int, keys: list[bytes], **how: object) -> rs.Result | None:
    fields = {
        "family": "round",
        "namespace": NAMESPACE,
        "dtype": "bfloat16",
        "head_dim": 64,
        "shards": [SHARD],
        "base": b"".join(keys),
        "frequencies": (),
        "interleaved": False,
        "salt": b"",
        **how,
    }
    return world.ask(rq.Declare, session, *fields.values())


def join(
    world: World, session: int, keys: list[bytes], name: str = "a", runs: Sequence[Run] = ()
) -> rs.Result | None:
    return world.ask(rq.Join, session, "round", name, NAMESPACE, b"".join(keys), [SHARD], runs)


def mirrored(world: World, base: list[bytes], member: list[bytes]) -> int:
    """A session that has stored a base and a member, which is mirrors by now."""
    one = world.connect()
    world.store(one, base, length=DENSE)
    world.store(one, member, length=DENSE)
    assert isinstance(declare(world, one, base), rs.DeclareResult)
    assert join(world, one, member) == rs.JoinResult(len(member), len(member))
    settle(world)
    assert len(world.mirrors) == len(member)
    world.check()
    return one


def settle(world: World) -> None:
    while world.encodes or world.keeps:
        for job in list(world.encodes):
            world.encode_ends(job)
        for job in list(world.keeps):
            world.keep_ends(job)
