"""Spans that the daemon keeps as recipes: restored like any other, bit for bit, or not at all."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from mini_engine import DIM, NAMESPACE, MiniEngine, until
from test_connector_halves import prompt, stored_by

from kmesh.families import Family
from kmesh.keys import KeyChain
from kmesh.testing import FakeDaemon
from kmesh_vllm.metadata import MIRROR_RECORD

DIGEST = NAMESPACE.digest()
Make = Callable[..., MiniEngine]
TOKENS = 200


def keys(tokens: list[int]) -> KeyChain:
    chain = KeyChain(DIGEST)
    chain.extend(tokens)
    return chain


def mirrored(daemon: FakeDaemon, engine: MiniEngine) -> list[int]:
    """A prompt whose full spans are recipes: its state has the bytes of another prompt's."""
    base, member = prompt(TOKENS), prompt(TOKENS, seed=5)
    stored_by(engine, daemon, base)
    stored_by(engine, daemon, member)
    session = engine.client.session
    assert session is not None
    shards = engine.identity.sharding.shards
    family = Family("round", DIGEST, "float32", DIM, shards, keys(base).keys)
    session.families.declare(family)
    session.families.join("round", "member", keys(member).keys, DIGEST)
    assert daemon.encode("round") == 3 * len(shards)
    return member


@pytest.mark.parametrize(("stored", "read"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_mirrors_are_restored_bit_for_bit(
    engine: Make, daemon: FakeDaemon, stored: int, read: int
) -> None:
    member = mirrored(daemon, engine("a", tp=stored))
    other = engine("b", tp=read)
    other.scheduler.add("r", member, DIGEST)
    found = other.match("r", 0, TOKENS)
    assert found == 192
    blocks = list(range(5, 11))
    other.scheduler.allocated("r", blocks, found)
    step = other.scheduler.plan([], [])
    (plan,) = step.loads
    assert len(plan.mirrors) // MIRROR_RECORD.itemsize == 3 * stored
    other.run(step)
    outcome = other.settle("r")
    assert not outcome.bad_blocks
    assert other.wrong(7, blocks, 0, found) == []
    other.scheduler.finished("r")
    until(lambda: daemon.leases == 0)


def test_an_engine_that_decodes_no_recipes_gets_none(engine: Make, daemon: FakeDaemon) -> None:
    member = mirrored(daemon, engine("a"))
    other = engine("b", recipes=False)
    other.scheduler.add("r", member, DIGEST)
    found = other.match("r", 0, TOKENS)
    blocks = list(range(5, 11))
    other.scheduler.allocated("r", blocks, found)
    step = other.scheduler.plan([], [])
    assert step.loads[0].mirrors == step.loads[0].bases == b""
    other.run(step)
    assert not other.settle("r").bad_blocks
    assert other.wrong(7, blocks, 0, found) == []


def test_a_mirror_whose_base_is_bad_is_computed(engine: Make, daemon: FakeDaemon) -> None:
    """Its pages are reported bad, and no other's; the daemon is told of the entry."""
    writer = engine("a")
    member = mirrored(daemon, writer)
    daemon.corrupt(keys(prompt(TOKENS)).key(1), writer.identity.sharding.shards[0])
    other = engine("b")
    other.scheduler.add("r", member, DIGEST)
    found = other.match("r", 0, TOKENS)
    blocks = list(range(5, 11))
    outcome = other.load("r", blocks, found)
    assert outcome.bad_blocks == {7, 8}
    assert outcome.report.corrupt == {"r": [1]}
    assert outcome.report.failed == {"r": 64}
    assert set(other.wrong(7, blocks, 0, found)) == set(range(64, 128))
