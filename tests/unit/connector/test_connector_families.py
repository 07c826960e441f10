"""Requests of a family join it, against a fake daemon; whatever happens there is not theirs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import pytest
from mini_engine import NAMESPACE, MiniEngine
from segment_cases import DIGEST, MINUTES, OWN, SAID, computes, keyed, keys_of, until
from test_connector_halves import prompt

from kmesh import errors
from kmesh.families import MAX_BASE, NAME_BYTES, Description
from kmesh.familycalls import Families
from kmesh.keys import KeyChain
from kmesh.segments import MAX_NAME_BYTES, SegmentedPrompt
from kmesh.session import Role
from kmesh.testing import FakeDaemon, Limits
from kmesh_vllm import joining

Make = Callable[..., MiniEngine]
TOKENS = [*OWN, *MINUTES]
T = TypeVar("T")


def ask(daemon: FakeDaemon, question: Callable[[Families], T]) -> T:
    """What another client is told of families."""
    with daemon.connect(role=Role.TOOL) as session:
        return question(session.families)


def described(daemon: FakeDaemon, family: str, salt: bytes = b"") -> Description:
    return ask(daemon, lambda families: families.describe(family, salt=salt))


def listed(daemon: FakeDaemon) -> list[str]:
    return ask(daemon, lambda families: [family.name for family in families.list()])


def joined(engine: MiniEngine, members: int = 1, failed: int = 0) -> None:
    """Waits until so many requests have joined or failed to since the last call."""
    seen = {"family_joins": 0, "family_failed": 0}

    def done() -> bool:
        for name, amount in engine.scheduler.counts.take().items():
            if name in seen:
                seen[name] += amount
        return seen == {"family_joins": members, "family_failed": failed}

    until(done)
    assert len(engine.scheduler.segmenting.joining) == 0


def members(description: Description) -> dict[str, Any]:
    return {member.name: member for member in description.members}


def prefix_spans(tokens: list[int]) -> int:
    return len(tokens) // 64 + (len(tokens) % 64 >= 16)


def test_members_join_over_the_shared_segments(patient: Make, daemon: FakeDaemon) -> None:
    one, other = patient("a"), patient("b", tp=1)
    computes(one, "first", TOKENS, SAID.to_params())
    joined(one)
    until(lambda: daemon.spans == 7)
    moved = SegmentedPrompt("round-17").with_shared(200).with_private(80)
    computes(other, "second", [*MINUTES, *prompt(80, seed=9)], moved.to_params(), seed=8)
    joined(other)
    until(lambda: daemon.spans == 7 + 5)
    found = described(daemon, "round-17")
    family = found.family
    assert (family.namespace, family.dtype, family.head_dim) == (DIGEST, "float32", 8)
    # The base is the minutes, as the first computed them.
    assert (family.base_spans, family.base_stored, family.members) == (3, 3, 2)
    by_name = members(found)
    # The first holds the base, beside the spans of its prompt.
    first, second = by_name["first"], by_name["second"]
    assert (first.master, first.spans, first.base, first.waiting) == (True, 4 + 3, 3, 0)
    assert (second.master, second.spans, second.base, second.waiting) == (False, 5, 0, 0)


def test_another_segment_is_added_to_the_base(patient: Make, daemon: FakeDaemon) -> None:
    one = patient("a")
    computes(one, "first", TOKENS, SAID.to_params())
    notes = prompt(100, seed=60)
    more = SegmentedPrompt("round-17").with_private(37).with_shared(200).with_shared(100)
    computes(one, "second", [*prompt(37, seed=5), *MINUTES, *notes], more.to_params(), seed=8)
    joined(one, 2)
    found = described(daemon, "round-17")
    assert found.family.base_spans == 3 + 2
    assert members(found)["second"].base == 2


def test_families_of_several_ranks_and_salts(patient: Make, daemon: FakeDaemon) -> None:
    one = patient("a", tp=2)
    computes(one, "first", TOKENS, SAID.to_params())
    computes(one, "salted", TOKENS, SAID.to_params(), namespace=b"n" * 32, salt=b"s" * 32)
    joined(one, 2)
    until(lambda: daemon.spans == 2 * 2 * 7)
    for salt, name in ((b"", "first"), (b"s" * 32, "salted")):
        found = described(daemon, "round-17", salt=salt)
        assert len(found.family.shards) == 2
        assert members(found).keys() == {name}
        assert found.members[0].spans == 2 * 7


def test_a_family_without_segments_has_its_first_members_spans_as_base(
    patient: Make, daemon: FakeDaemon
) -> None:
    one = patient("a")
    params = {"kmesh": {"family": "f"}}
    computes(one, "first", TOKENS, params)
    joined(one)
    computes(one, "second", prompt(300, seed=4), params, seed=8)
    joined(one)
    found = described(daemon, "f")
    assert found.family.base_spans == 4
    by_name = members(found)
    assert by_name["first"].master
    assert (by_name["second"].spans, by_name["second"].base) == (5, 0)


def test_a_prompt_of_many_steps_joins_when_all_of_it_is_computed(
    patient: Make, daemon: FakeDaemon
) -> None:
    one = patient("a")
    one.scheduler.add("r", TOKENS, DIGEST, params=SAID.to_params())
    assert one.match("r", 0, 237, 30.0) == 0
    blocks = list(range(1, 9))
    one.scheduler.allocated("r", blocks, 0)
    one.prefill("r", 7, blocks, 0, 224)
    until(lambda: daemon.spans > 3)
    # All of the prompt's spans are planned by now, one token after the other follows.
    for at in range(224, 236):
        one.run(one.scheduler.plan([], [("r", [], False, at, 1)]))
    assert listed(daemon) == []
    one.run(one.scheduler.plan([], [("r", [], False, 236, 1)]))
    joined(one)
    for at in range(237, 240):
        one.run(one.scheduler.plan([], [("r", [], False, at, 1)]))
    assert one.scheduler._states["r"].complete
    assert "family_joins" not in one.scheduler.counts.take()


def test_an_aborted_request_does_not_join(patient: Make, daemon: FakeDaemon) -> None:
    one = patient("a")
    one.scheduler.add("r", TOKENS, DIGEST, params=SAID.to_params())
    assert one.match("r", 0, 237, 30.0) == 0
    one.scheduler.allocated("r", list(range(1, 9)), 0)
    one.prefill("r", 7, list(range(1, 9)), 0, 236)
    one.scheduler.finished("r")
    assert len(one.scheduler.segmenting.joining) == 0
    assert listed(daemon) == []


@pytest.mark.parametrize("kind", ["declare_family", "join_family"])
def test_a_refusal_is_counted_and_nothing_else(
    patient: Make, daemon: FakeDaemon, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    one = patient("a")
    wrong = errors.InvalidArgument("is declared otherwise", field=f"{kind}.namespace")
    daemon.refuse(kind, wrong, times=2)
    for name in ("first", "second"):
        told = computes(one, name, [*prompt(37, seed=ord(name[0])), *MINUTES], SAID.to_params())
        assert told == {"restored_tokens": 0}
        joined(one, 0, failed=1)
    lines = [r.message for r in caplog.records if "did not join" in r.message]
    assert len(lines) == 1, "once for each cause"
    assert f"{kind}.namespace" in lines[0]
    computes(one, "third", [*prompt(37, seed=3), *MINUTES], SAID.to_params())
    joined(one)
    assert members(described(daemon, "round-17")).keys() == {"third"}


def test_a_daemon_that_knows_no_families_is_asked_once(
    patient: Make, daemon: FakeDaemon, caplog: pytest.LogCaptureFixture
) -> None:
    one = patient("a")
    daemon.refuse("declare_family", errors.InvalidArgument("unknown", field="body"))
    for name in ("first", "second"):
        computes(one, name, [*prompt(37, seed=ord(name[0])), *MINUTES], SAID.to_params())
        joined(one, 0, failed=1)
    assert [r.message for r in caplog.records] == ["the daemon knows no families: none is joined"]


def test_a_family_that_was_dissolved_is_declared_again(patient: Make, daemon: FakeDaemon) -> None:
    one = patient("a")
    computes(one, "first", TOKENS, SAID.to_params())
    joined(one)
    ask(daemon, lambda families: families.dissolve("round-17"))
    computes(one, "second", [*prompt(37, seed=5), *MINUTES], SAID.to_params())
    joined(one)
    found = described(daemon, "round-17")
    assert found.family.base_spans == 3
    assert members(found).keys() == {"second"}


def test_what_was_declared_ends_with_the_session(patient: Make, daemon: FakeDaemon) -> None:
    one = patient("a")
    computes(one, "first", TOKENS, SAID.to_params())
    joined(one)
    daemon.restart()
    for client, role in ((one.client, Role.SCHEDULER), (one.workers_client, Role.WORKER)):
        client.session = daemon.connect(role=role, engine_id="a", namespace=NAMESPACE)
    computes(one, "second", [*prompt(37, seed=5), *MINUTES], SAID.to_params())
    joined(one)
    found = described(daemon, "round-17")
    assert found.family.base_spans == 3
    assert members(found)["second"].master, "its base is its own now"


def test_a_session_that_is_gone_delays_nothing(patient: Make, daemon: FakeDaemon) -> None:
    one = patient("a")
    session = one.client.session
    assert session is not None
    daemon.delay("declare_family", 30)
    one.scheduler.add("r", TOKENS, DIGEST, params=SAID.to_params())
    assert one.match("r", 0, 237, 30.0) == 0
    one.scheduler.allocated("r", list(range(1, 9)), 0)
    one.prefill("r", 7, list(range(1, 9)), 0, 237)
    assert len(one.scheduler.segmenting.joining) == 1, "it is on its way, and nobody waits"
    assert one.scheduler.finished("r") == {"kmesh": {"restored_tokens": 0}}
    session.close()
    joined(one, 0, failed=1)


def test_members_on_their_way_are_bounded(
    patient: Make, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joining, "_MOST", 2)
    one = patient("a")
    session = one.client.session
    assert session is not None
    daemon.delay("declare_family", 30, times=4)
    for number in range(4):
        computes(one, f"r{number}", prompt(64, seed=number), {"kmesh": {"family": "f"}})
    # A family without segments is asked for first, so let these have some.
    for number in range(4, 8):
        said = SegmentedPrompt("g").with_shared(64)
        computes(one, f"r{number}", prompt(64, seed=number), said.to_params())
    assert len(one.scheduler.segmenting.joining) <= 2
    session.close()
    until(lambda: len(one.scheduler.segmenting.joining) == 0)
    counts = one.scheduler.counts.take()
    assert counts["family_failed"] + counts.get("family_joins", 0) == 8


def test_a_base_that_is_too_large_is_cut(patient: Make, daemon: FakeDaemon) -> None:
    one = patient("a")
    long = prompt(64 * (MAX_BASE + 3), seed=1)
    joins = one.scheduler.segmenting.joining
    session = one.client.session
    assert session is not None
    chain = KeyChain(DIGEST)
    chain.extend(long)
    base = tuple(chain.key(i) for i in range(chain.spans))
    joins.join(session, joining.Member("f", "r", DIGEST, b"", base, chain.keys))
    joined(one)
    assert described(daemon, "f").family.base_spans == MAX_BASE


def test_of_a_long_prompt_the_first_spans_are_the_members() -> None:
    with FakeDaemon(Limits(max_batch=6)) as daemon:
        one = MiniEngine(daemon, "a", reserve_timeout_ms=30_000)
        computes(one, "first", [*OWN, *MINUTES, *prompt(200)], SAID.with_private(200).to_params())
        joined(one)
        (member,) = described(daemon, "round-17").members
        assert (member.spans, member.base) == (6, 3)
        one.close()
        del one


def test_names_are_the_daemons() -> None:
    assert MAX_NAME_BYTES == NAME_BYTES
    long = joining.Member("f", "é" * 100 + "-82f5551e", b"", b"", (), b"")
    assert len(long.name.encode()) <= NAME_BYTES
    assert long.name.endswith("é-82f5551e")


def test_keys_of_the_base_are_the_segments(patient: Make, daemon: FakeDaemon) -> None:
    """What the daemon is told is what other programs can work out of the request."""
    one = patient("a")
    computes(one, "first", TOKENS, SAID.to_params())
    joined(one)
    (minutes,) = keyed(SAID, TOKENS)
    families = daemon._look(lambda model: dict(model.families.families))
    (family,) = families.values()
    assert b"".join(family.base) == keys_of(minutes)
    chain = KeyChain(DIGEST)
    chain.extend(TOKENS)
    (keys,) = [keys for _, keys in family.members.values()]
    assert b"".join(keys) == chain.keys + chain.key(3, 32) + keys_of(minutes)
    assert len(keys) == prefix_spans(TOKENS) + 3


def test_members_join_a_family_whose_base_is_full(patient: Make, daemon: FakeDaemon) -> None:
    """Whoever filled it: this engine, or another one."""
    chain = KeyChain(DIGEST)
    chain.extend(prompt(64 * (MAX_BASE + 2), seed=1))
    base = tuple(chain.key(i) for i in range(chain.spans))
    for name in ("a", "b"):
        one = patient(name)
        session = one.client.session
        assert session is not None
        for number in range(2):
            member = joining.Member("f", f"{name}{number}", DIGEST, b"", base[number:], base[-1])
            one.scheduler.segmenting.joining.join(session, member)
            joined(one)
    found = described(daemon, "f")
    assert (found.family.base_spans, found.family.members) == (MAX_BASE, 4)
