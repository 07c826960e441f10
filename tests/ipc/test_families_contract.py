"""What a session may rely on of families: one suite for the daemon and for the fake.

Whatever the fake answers otherwise than the daemon is found here. What recipes are made of, and
when, is each one's own affair.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from daemon_process import Daemon

from kmesh import errors
from kmesh.aio import AsyncSession
from kmesh.families import Family, MirrorFate, Recovered
from kmesh.kernels.rotary import Rotary
from kmesh.layout import Shard
from kmesh.session import ReserveBatch, Role, Session
from kmesh.store import put_spans, read_span
from kmesh.testing import FakeDaemon

SHARD = Shard(0, 2, 0, 2)
#: Bytes of a span of 64 tokens, whose heads have 64 elements of bfloat16.
LENGTH = 2 * 2 * 2 * 64 * 2 * 64
SPACE = b"n" * 32

Connect = Callable[[], Session]


@pytest.fixture(scope="module", autouse=True)
def _started(shared_spand: Daemon) -> None:
    """The daemon runs before a test looks at what it leaves behind."""


@pytest.fixture(params=["fake", "daemon"])
def connect(request: pytest.FixtureRequest, shared_spand: Daemon) -> Iterator[Connect]:
    """Opens sessions, which are closed at the end of the test."""
    with contextlib.ExitStack() as stack:
        if request.param == "fake":
            dial: Callable[..., Session] = stack.enter_context(FakeDaemon()).connect
        else:
            dial = partial(Session.connect, shared_spand.socket_dir)
        yield lambda: stack.enter_context(dial(role=Role.TOOL))


def family(base: bytes, **more: object) -> Family:
    """One that nobody else has declared."""
    name = os.urandom(4).hex()
    made = Family(name, SPACE, "bfloat16", 64, (SHARD,), base)
    return replace(made, **more)  # type: ignore[arg-type]


def store(session: Session, keys: bytes, payloads: list[bytes]) -> None:
    count = len(keys) // 32
    start = range(0, 64 * count, 64)
    batch = ReserveBatch(SPACE, SHARD, keys, [64] * count, start, [LENGTH] * count)
    assert put_spans(session, session.staging(1 << 20), batch, payloads) == [0] * count


def test_where_a_family_is_looked_at_is_checked(connect: Connect) -> None:
    session = connect()
    made = family(os.urandom(32))
    session.families.declare(made)
    assert not session.families.describe(made.name).family.devices
    gpu = "GPU-00000000-0000-0000-0000-0000000000a0"
    with pytest.raises(errors.InvalidArgument, match=r"no memory on this GPU") as failed:
        session.families.describe(made.name, device=gpu)
    assert failed.value.field == "describe_family.device"
    with pytest.raises(errors.InvalidArgument, match=r"no memory on this GPU") as failed:
        session.families.list(device=gpu)
    assert failed.value.field == "list_families.device"


def test_members_come_and_go(connect: Connect) -> None:
    session = connect()
    keys = os.urandom(32 * 5)
    base, member, tail = keys[:64], keys[64:128], keys[128:]
    made = family(base)
    declared = session.families.declare(made)
    assert (declared.created, declared.added) == (True, 2)
    assert session.families.declare(made) == replace(declared, created=False, added=0)
    more = replace(made, base=base + tail)
    assert session.families.declare(more) == replace(declared, created=False, added=1)
    store(session, keys[:128], [os.urandom(LENGTH) for _ in range(4)])
    joined = session.families.join(made.name, "a", member, SPACE, shards=[SHARD])
    assert (joined.spans, joined.stored) == (2, 2)
    forked = session.families.fork(made.name, "a", "b", os.urandom(32))
    assert (forked.spans, forked.stored) == (3, 2)
    assert session.families.join(made.name, "c", base + tail, SPACE).stored == 2
    found = session.families.describe(made.name)
    info = found.family
    assert (info.id, info.name, info.members) == (declared.id, made.name, 3)
    assert (info.base_spans, info.base_stored, info.spans) == (3, 2, 3)
    assert (info.dense_bytes, info.base_bytes) == (4 * LENGTH, 2 * LENGTH)
    members = {row.name: row for row in found.members}
    assert [row.parent for row in found.members] == ["", "a", ""]
    assert [row.master for row in found.members] == [False, False, True]
    assert (members["b"].spans, members["b"].waiting) == (3, 1)
    assert members["b"].dense + members["b"].mirrors == 2
    assert (members["c"].base, members["c"].waiting) == (2, 1)
    assert declared.id in {row.id for row in session.families.list()}
    assert session.families.dissolve(made.name, MirrorFate.KEEP).members == 3
    with pytest.raises(errors.NotFound, match=r"dissolve_family\.family"):
        session.families.dissolve(made.name)


def test_who_knows_how_keys_are_turned_may_say_it_later(connect: Connect) -> None:
    session = connect()
    made = family(os.urandom(32))
    assert session.families.declare(made).created
    rotary = Rotary((1.0, 0.25), False, "bfloat16")
    for said in (rotary, None, rotary):
        again = session.families.declare(replace(made, rotary=said))
        assert (again.created, again.added) == (False, 0)
    other = replace(made, rotary=Rotary((1.0, 0.5), False, "bfloat16"))
    with pytest.raises(errors.InvalidArgument, match="rotary"):
        session.families.declare(other)


def test_a_family_of_many(connect: Connect) -> None:
    """More members than one answer holds, with names as long as they may be."""
    session = connect()
    made = family(os.urandom(32))
    session.families.declare(made)
    names = [f"{number:04}".rjust(128, "m") for number in range(450)]
    joined = [
        session.families.join_async(made.name, name, os.urandom(32), SPACE, timeout=60)
        for name in names
    ]
    assert all(future.result().spans == 1 for future in joined)
    assert [row.name for row in session.families.describe(made.name).members] == names


def test_salts_have_families_of_their_own(connect: Connect) -> None:
    session = connect()
    made = family(os.urandom(32))
    session.families.declare(made)
    salted = session.families.declare(replace(made, salt=b"s" * 32))
    assert salted.created
    with pytest.raises(errors.NotFound, match=r"join_family\.family"):
        session.families.join(made.name, "a", os.urandom(32), SPACE, salt=b"t" * 32)
    session.families.join(made.name, "a", os.urandom(32), SPACE, salt=b"s" * 32)
    assert session.families.describe(made.name).members == ()


def test_refusals_name_the_field(connect: Connect) -> None:
    session = connect()
    made = family(os.urandom(32))
    session.families.declare(made)
    key = os.urandom(32)
    run = Recovered(0, 64, made.base, 0)

    def join(keys: bytes = key, **more: object) -> None:
        fields = {"namespace": SPACE, **more}
        session.families.join(made.name, "a", keys, **fields)  # type: ignore[arg-type]

    cases: list[tuple[Callable[[], object], str]] = [
        (lambda: session.families.declare(replace(made, dtype="float16")), "declare_family.dtype"),
        (lambda: session.families.declare(replace(made, head_dim=32)), "declare_family.head_dim"),
        (lambda: join(namespace=b"x" * 32), "join_family.namespace"),
        (lambda: join(shards=[Shard(0, 1, 0, 2)]), "join_family.shards"),
        (lambda: join(recovered=[replace(run, base=key)]), "join_family.provenance[0].base"),
        (lambda: join(recovered=[replace(run, tokens=0)]), "join_family.provenance[0].tokens"),
        (lambda: join(recovered=[run, run]), "join_family.provenance[1].position"),
        (lambda: session.families.fork(made.name, "nobody", "x"), "fork_member.parent"),
    ]
    for call, field in cases:
        with pytest.raises((errors.InvalidArgument, errors.NotFound)) as refused:
            call()
        assert refused.value.field == field
    join()
    with pytest.raises(errors.InvalidArgument) as refused:
        join(os.urandom(32))
    assert refused.value.field == "join_family.member"


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"name": ""}, "name"),
        ({"name": "x" * 129}, "name"),
        ({"name": "\x1b[31m"}, "name"),
        ({"namespace": b"x"}, "namespace"),
        ({"dtype": "int8"}, "dtype"),
        ({"head_dim": 0}, "head_dim"),
        ({"shards": ()}, "shards"),
        ({"base": b""}, "base"),
        ({"base": b"x" * 32 * 513}, "base"),
        ({"salt": b"x"}, "salt"),
    ],
)
def test_what_is_wrong_is_said_before_anybody_is_asked(
    change: dict[str, object], what: str
) -> None:
    with pytest.raises(errors.ConfigError, match=f"^{what}: "):
        replace(family(b"k" * 32), **change)  # type: ignore[arg-type]


def test_spans_of_a_family_are_read_like_any_other(connect: Connect) -> None:
    """Whether they are recipes by now or not."""
    session = connect()
    keys = os.urandom(32 * 2)
    shared = os.urandom(LENGTH)
    # The first half of each head's tokens is the same.
    own = b"".join(shared[at : at + 4096] + os.urandom(4096) for at in range(0, LENGTH, 8192))
    store(session, keys, [shared, own])
    made = family(keys[:32])
    session.families.declare(made)
    session.families.join(made.name, "a", keys[32:], SPACE)
    for recipes in (True, False, True):
        with session.acquire(keys, [SHARD], recipes=recipes) as lease:
            for number, payload in enumerate((shared, own)):
                if not lease.reason[number]:
                    assert read_span(session, lease, number) == payload
                    assert recipes or not lease.is_recipe(number)


def test_coroutines_say_the_same(shared_spand: Daemon) -> None:
    async def talk(path: Path) -> None:
        async with await AsyncSession.connect(path, role=Role.TOOL) as session:
            made = family(os.urandom(32))
            assert (await session.families.declare(made)).created
            joined = await session.families.join(made.name, "a", os.urandom(64), SPACE)
            assert (joined.spans, joined.stored) == (2, 0)
            assert (await session.families.fork(made.name, "a", "b")).spans == 2
            assert len((await session.families.describe(made.name)).members) == 2
            assert made.name in {row.name for row in await session.families.list()}
            assert (await session.families.dissolve(made.name)).members == 2

    asyncio.run(talk(shared_spand.socket_dir))


def test_recipes_of_the_fake() -> None:
    """What a test asks it for it serves: as a recipe, or as a payload."""
    with FakeDaemon() as daemon, daemon.connect() as session:
        keys = os.urandom(64)
        shared = os.urandom(LENGTH)
        own = b"".join(shared[at : at + 4096] + os.urandom(4096) for at in range(0, LENGTH, 8192))
        store(session, keys, [shared, own])
        made = family(keys[:32])
        session.families.declare(made)
        session.families.join(made.name, "a", keys[32:], SPACE)
        assert daemon.encode(made.name) == 1
        with session.acquire(keys, [SHARD], recipes=True) as lease:
            assert [lease.is_recipe(number) for number in range(2)] == [False, True]
            assert lease.length[1] < LENGTH == lease.dense_length[1]
            assert read_span(session, lease, 1) == own
        with session.acquire(keys, [SHARD]) as lease:
            assert not lease.is_recipe(1)
            assert read_span(session, lease, 1) == own
