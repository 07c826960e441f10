"""Requests that make no sense are refused, and change nothing."""

from __future__ import annotations

import pytest
from asking import A, B, C, D, refused
from contents import NAMESPACE, OTHER_SHARD, SHARD
from world import World

from kmesh_spand.core import events as ev
from kmesh_spand.core import requests as rq
from kmesh_spand.core.codes import Code

GOOD = dict(
    namespace=NAMESPACE, shard=SHARD, keys=A, tokens=[48], start=[0], length=[9], sub_keys=B + C
)


@pytest.mark.parametrize(
    ("field", "value", "code"),
    [
        ("namespace", b"short", Code.INVALID_ARGUMENT),
        ("shard", 0, Code.INVALID_ARGUMENT),
        ("shard", 1 << 64, Code.INVALID_ARGUMENT),
        ("keys", A[:-1], Code.INVALID_ARGUMENT),
        ("keys", A * 9, Code.TOO_LARGE),
        ("tokens", [], Code.INVALID_ARGUMENT),
        ("tokens", [0], Code.INVALID_ARGUMENT),
        ("tokens", [17], Code.INVALID_ARGUMENT),
        ("tokens", [80], Code.INVALID_ARGUMENT),
        ("start", [0, 0], Code.INVALID_ARGUMENT),
        ("start", [-1], Code.INVALID_ARGUMENT),
        ("start", [2**32], Code.INVALID_ARGUMENT),
        ("length", [0], Code.INVALID_ARGUMENT),
        ("length", [-5], Code.INVALID_ARGUMENT),
        ("sub_keys", B, Code.INVALID_ARGUMENT),
        ("sub_keys", B + C + D, Code.INVALID_ARGUMENT),
    ],
)
def test_bad_reserves_are_refused(field: str, value: object, code: Code) -> None:
    world = World({0: 8}, max_batch=8)
    one = world.connect()
    answer = world.ask(rq.Reserve, one, *{**GOOD, field: value}.values())
    assert refused(answer) == (code, field)
    assert world.core.counters["refused"] == 1
    assert not any(world.ask(rq.Reserve, one, *GOOD.values()).reason)  # type: ignore[union-attr]
    world.wanted.clear()
    world.check()


@pytest.mark.parametrize(
    ("keys", "shards", "code", "field"),
    [
        (A + b"x", [SHARD], Code.INVALID_ARGUMENT, "keys"),
        (A, [], Code.INVALID_ARGUMENT, "shards"),
        (A, [SHARD, 7], Code.INVALID_ARGUMENT, "shards"),
        (A, [-1], Code.INVALID_ARGUMENT, "shards"),
        (A * 5, [SHARD, OTHER_SHARD], Code.TOO_LARGE, "keys"),
        (b"", [SHARD] * 9, Code.TOO_LARGE, "keys"),
    ],
)
def test_bad_acquires_are_refused(keys: bytes, shards: list[int], code: Code, field: str) -> None:
    world = World({0: 8}, max_batch=8)
    assert refused(world.ask(rq.Acquire, world.connect(), keys, shards, False)) == (code, field)


def test_requests_need_a_session_and_are_bounded() -> None:
    world = World({0: 8}, max_batch=2)
    assert refused(world.core.handle(rq.Release(5, 1, [1]), 0)[0].result)[0] == (  # type: ignore[union-attr]
        Code.UNAUTHENTICATED
    )
    one = world.connect()
    three = [1, 2, 3]
    assert refused(world.ask(rq.Release, one, three))[0] == Code.TOO_LARGE
    assert refused(world.ask(rq.Abort, one, three))[0] == Code.TOO_LARGE
    assert refused(world.ask(rq.Commit, one, three, three, 9))[0] == Code.TOO_LARGE
    assert refused(world.ask(rq.ReportCorrupt, one, 1, three))[0] == Code.TOO_LARGE
    assert refused(world.ask(rq.Commit, one, [1], [0, 0], 9)) == (
        Code.INVALID_ARGUMENT,
        "staging_offset",
    )
    world.send(ev.SessionClosed(99))
    world.check()
