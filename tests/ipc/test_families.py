"""Families in a real daemon: recipes are made, served, made dense, and survive what may happen."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import resource
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from daemon_process import Daemon, wait_for
from household import SPAN, Household, Spans

from experiments.tokendance.workload import Shape
from kmesh import errors
from kmesh.families import Family, MirrorFate, Recovered
from kmesh.keys import KEY_BYTES
from kmesh.layout import TILE_BYTES
from kmesh.session import Role, Session
from kmesh.store import put_spans, read_span
from kmesh.v1 import admin_pb2, admin_pb2_grpc, families_pb2

Start = Callable[..., Daemon]


@pytest.fixture(scope="module")
def household() -> Household:
    return Household()


@pytest.fixture
def spand(start_spand: Start) -> Daemon:
    daemon = start_spand(host_memory="16MiB")
    daemon.wait_populated()
    return daemon


def connect(daemon: Daemon, role: Role = Role.TOOL) -> Session:
    return Session.connect(daemon.socket_dir, role=role, timeout=30)


@pytest.fixture
def dial(spand: Daemon) -> Iterator[Callable[[], Session]]:
    """Opens sessions, which are closed at the end of the test."""
    with contextlib.ExitStack() as stack:
        yield lambda: stack.enter_context(connect(spand))


def members(session: Session) -> dict[str, families_pb2.MemberInfo]:
    return {member.name: member for member in session.families.describe("round").members}


def encoded(session: Session) -> dict[str, families_pb2.MemberInfo]:
    """All members, once nothing more is going to be encoded."""

    def settled() -> bool:
        found = members(session).values()
        return all(m.base + m.mirrors + m.refused == m.spans for m in found)

    wait_for(settled, what="encoding never ended")
    return members(session)


def read(session: Session, household: Household, spans: Spans, *, recipes: bool) -> list[bool]:
    """Reads a member, and says which of its spans are recipes.

    Without ``recipes`` it is asked for until it is dense.
    """
    count = len(spans.payloads)

    def once() -> list[bool] | None:
        with session.acquire(spans.keys, [household.shard], recipes=recipes, timeout=30) as lease:
            if lease.hits < count:
                return None
            for number, payload in enumerate(spans.payloads):
                assert read_span(session, lease, number) == payload
            return [lease.is_recipe(number) for number in range(count)]

    found = wait_for(once, what="it was never served")
    assert isinstance(found, list)
    return found


def test_members_are_recipes_and_read_back_bit_for_bit(
    spand: Daemon, dial: Callable[[], Session], household: Household
) -> None:
    """Another process reads them, with recipes and without."""
    session = dial()
    household.settle(session)
    before = encoded(session)
    assert all(member.mirrors == 3 and not member.master for member in before.values())
    family = session.families.describe("round").family
    assert (family.base_stored, family.members, family.mirrors) == (5, 2, 6)
    assert family.stored_bytes < family.dense_bytes
    with connect(spand) as reader:
        for sibling in household.siblings:
            recipes = read(reader, household, sibling, recipes=True)
            assert sum(recipes) == 3
        assert spand.status().counters["spans_densified"] == 0
        assert spand.status().mirrors == 6
        for sibling in household.siblings:
            assert not any(read(reader, household, sibling, recipes=False))
    status = spand.status()
    assert (status.mirrors, status.base_spans, status.mirror_bytes) == (0, 0, 0)
    assert status.counters["spans_densified"] == 6
    # They are not encoded again: whoever wants them dense would wait each time.
    assert all(member.mirrors == 0 for member in encoded(session).values())


def test_a_member_that_joined_before_it_was_stored(
    dial: Callable[[], Session], household: Household
) -> None:
    """Neither base nor members are there when they are named."""
    session = dial()
    session.families.declare(household.family)
    sibling = household.siblings[0]
    household.join(session, sibling)
    assert members(session)[sibling.name].waiting == 5
    staging = session.staging(4 << 20)
    household.store(session, staging, sibling)
    assert members(session)[sibling.name].dense == 5
    household.store(session, staging, household.primer)
    assert encoded(session)[sibling.name].mirrors == 3
    read(session, household, sibling, recipes=True)


def test_many_spans_that_are_looked_at_in_turns(
    dial: Callable[[], Session], household: Household
) -> None:
    """Nobody needs to ask for anything until all were looked at."""
    session = dial()
    household.settle(session)
    encoded(session)
    writer, keys = dial(), b""
    staging = writer.staging(4 << 20)
    for _ in range(4):
        made = dataclasses.replace(household.primer, keys=os.urandom(len(household.primer.keys)))
        assert put_spans(writer, staging, household.batch(made), made.payloads) == [0] * 5
        keys += made.keys
    away = Recovered(1_000_000, 4, household.family.base[:KEY_BYTES], 0)
    namespace = household.family.namespace
    session.families.join("round", "away", keys, namespace, recovered=[away])
    assert encoded(session)["away"].refused == 20


def test_the_master_and_a_fork(dial: Callable[[], Session], household: Household) -> None:
    session = dial()
    household.settle(session)
    household.join(session, household.primer)
    assert encoded(session)["member-0"].master
    one, other = household.siblings
    tail = other.key(4)
    assert session.families.fork("round", one.name, "child", tail).spans == 6
    child = encoded(session)["child"]
    assert (child.parent, child.mirrors, child.spans) == (one.name, 3, 6)


def test_a_base_is_held_and_goes_with_its_mirrors(
    spand: Daemon, dial: Callable[[], Session], household: Household
) -> None:
    """An operator's eviction makes mirrors dense first; others' spans never push a base out."""
    session = dial()
    household.settle(session)
    encoded(session)
    with spand.rpc() as (channel, metadata):
        stub = admin_pb2_grpc.AdminStub(channel)
        request = admin_pb2.EvictRequest(keys=household.primer.keys)
        answer = stub.Evict(request, metadata=metadata, timeout=20)
    held = spand.status().base_spans + answer.spans
    assert answer.held > 0
    assert answer.held + answer.spans == 5
    assert held <= 5
    spand.wait_status(lambda s: s.mirrors == 0)
    assert session.acquire(household.primer.keys, [household.shard]).hits == 0
    for sibling in household.siblings:
        assert not any(read(session, household, sibling, recipes=False))


def test_pool_full_of_a_family_makes_room(start_spand: Start, household: Household) -> None:
    """A base goes when its mirrors do: nothing is stuck, and nothing served is wrong."""
    daemon = start_spand(host_memory="2MiB", slab_size="2MiB")
    daemon.wait_populated()
    with connect(daemon) as session:
        household.settle(session)
        encoded(session)
        assert daemon.status().mirrors == 6
        other = Household(seed=8).primer
        with connect(daemon) as writer:
            staging = writer.staging(4 << 20)
            for _ in range(8):
                made = Spans("x", os.urandom(len(other.keys)), other.payloads, [])
                assert put_spans(writer, staging, household.batch(made), made.payloads) == [0] * 5
        status = daemon.status()
        assert (status.mirrors, status.base_spans) == (0, 0)


@pytest.mark.parametrize("fate", list(MirrorFate))
def test_dissolve(
    spand: Daemon, dial: Callable[[], Session], household: Household, fate: MirrorFate
) -> None:
    session = dial()
    household.settle(session)
    encoded(session)
    answer = session.families.dissolve("round", fate)
    assert (answer.members, answer.mirrors) == (2, 6)
    with pytest.raises(errors.NotFound, match=r"describe_family\.family"):
        session.families.describe("round")
    wanted = 6 if fate is MirrorFate.KEEP else 0
    assert spand.wait_status(lambda s: s.mirrors == wanted).families == 0
    for sibling in household.siblings:
        assert any(read(session, household, sibling, recipes=True)) == (wanted > 0)


def test_a_bad_base_is_never_decoded(start_spand: Start, household: Household) -> None:
    """A reader reports it; the daemon drops it and what refers to it."""
    daemon = start_spand(host_memory="16MiB", errors=True)
    daemon.wait_populated()
    with connect(daemon) as session:
        household.settle(session)
        encoded(session)
        sibling = household.siblings[0]
        with session.acquire(sibling.keys, [household.shard], recipes=True) as lease:
            number = next(n for n in range(5) if lease.is_recipe(n))
            for base in lease.bases.values():
                daemon.flip(base.offset + 5000, base.slab)
            with pytest.raises(errors.CorruptionError):
                read_span(session, lease, number)
            assert session.report_corrupt(lease, [number]) == 1
            wait_for(lambda: daemon.status().counters["spans_mirrors_dropped"] > 0)
        status = daemon.wait_status(lambda s: s.counters["spans_corrupt"] > 0)
        assert status.counters["spans_corrupt_false"] <= 1
        with session.acquire(sibling.key(number), [household.shard], recipes=True) as again:
            assert again.hits == 0


def test_encoding_survives_the_worker(start_spand: Start, household: Household) -> None:
    """Killed at whatever it does: spans stay dense or become recipes, and are right."""
    daemon = start_spand(host_memory="16MiB", errors=True)
    daemon.wait_populated()
    with connect(daemon) as session:
        staging = session.staging(4 << 20)
        household.store(session, staging, household.primer)
        session.families.declare(household.family)
        for sibling in household.siblings:
            household.store(session, staging, sibling)
        for sibling in household.siblings:
            household.join(session, sibling)
        worker = daemon.child("worker")
        os.kill(worker, signal.SIGSTOP)
        os.kill(worker, signal.SIGKILL)
        wait_for(lambda: daemon.child("worker") != worker)
        encoded(session)
        for sibling in household.siblings:
            read(session, household, sibling, recipes=True)
            read(session, household, sibling, recipes=False)


def test_mirrors_survive_control(start_spand: Start, household: Household) -> None:
    """A new epoch knows no family, but serves its recipes; declared again, it goes on."""
    daemon = start_spand(host_memory="16MiB", errors=True)
    daemon.wait_populated()
    with connect(daemon) as session:
        household.settle(session)
        encoded(session)
        control = daemon.child("control")
        os.kill(control, signal.SIGKILL)
    daemon.wait_ready(2)
    status = daemon.wait_status(lambda s: s.counters.get("spans_verified", 0) >= 15)
    assert (status.families, status.mirrors) == (0, 6)
    assert status.counters["spans_mirrors_dropped"] == 0
    with connect(daemon) as session:
        for sibling in household.siblings:
            assert sum(read(session, household, sibling, recipes=True)) == 3
        session.families.declare(household.family)
        household.join(session, household.siblings[0])
        assert members(session)[household.siblings[0].name].mirrors == 3
        assert not any(read(session, household, household.siblings[0], recipes=False))


@pytest.mark.parametrize("moment", ["joined", "stored", "asked dense"])
def test_control_killed_while_recipes_are_made(
    start_spand: Start, household: Household, moment: str
) -> None:
    """Whatever step it is killed in, what is served afterwards is right."""
    daemon = start_spand(host_memory="16MiB", errors=True)
    daemon.wait_populated()
    worker = daemon.child("worker")
    with connect(daemon) as session:
        staging = session.staging(4 << 20)
        household.store(session, staging, household.primer)
        session.families.declare(household.family)
        for sibling in household.siblings:
            household.store(session, staging, sibling)
        if moment == "joined":
            # The worker does not answer any more: an encoding is under way.
            os.kill(worker, signal.SIGSTOP)
        for sibling in household.siblings:
            household.join(session, sibling)
        if moment != "joined":
            encoded(session)
        if moment == "asked dense":
            os.kill(worker, signal.SIGSTOP)
            assert session.acquire(household.siblings[0].keys, [household.shard]).hits < 5
        os.kill(daemon.child("control"), signal.SIGKILL)
        os.kill(worker, signal.SIGCONT)
    daemon.wait_ready(2)
    daemon.wait_status(lambda s: s.counters.get("spans_verified", 0) >= 15)
    with connect(daemon) as session:
        for sibling in household.siblings:
            read(session, household, sibling, recipes=True)
        for sibling in household.siblings:
            assert not any(read(session, household, sibling, recipes=False))


def test_a_session_that_goes_leaves_its_family(spand: Daemon, household: Household) -> None:
    with connect(spand) as session:
        household.settle(session)
    with connect(spand) as session:
        encoded(session)
        for sibling in household.siblings:
            read(session, household, sibling, recipes=True)


def test_rounding_to_tiles(start_spand: Start) -> None:
    """The controlled workload in spans of 64 tokens: each recipe is rounded up to whole tiles.

    416 of 512 tokens are shared, four siblings. Stored are the shared source tokens' spans, and
    what is each sibling's own; what a recipe is over that is less than a tile.
    """
    household = Household(
        Shape(24, 2, 64, 10_000.0), shared=416, own=96, prompts=5, seed=20_260_101
    )
    daemon = start_spand(host_memory="64MiB")
    daemon.wait_populated()
    with connect(daemon) as session:
        staging = session.staging(8 << 20)
        household.store(session, staging, household.primer)
        session.families.declare(household.family)
        for sibling in household.siblings:
            household.store(session, staging, sibling)
            household.join(session, sibling)
        found = encoded(session).values()
        used = sum(slab.used for slab in daemon.status().slabs)
        token = 24 * 2 * 64 * 2 * 2
        family = session.families.describe("round").family
        mirrors = sum(member.mirrors for member in found)
        own = family.stored_bytes - family.base_bytes
        # Payload bytes: own tokens, and under 1 % more.
        assert 4 * 96 * token <= own <= 4 * 96 * token * 1.01 + 4 * token * SPAN
        # Dense spans are whole tiles; each recipe is rounded up by less than one.
        assert 0 <= used - family.stored_bytes < mirrors * TILE_BYTES
        for sibling in household.siblings:
            read(session, household, sibling, recipes=True)
        print(f"own {own}, base {family.base_bytes}, used {used}, dense {family.dense_bytes}")


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"dtype": "float16"}, "declare_family.dtype"),
        ({"head_dim": 32}, "declare_family.base[0]"),
        ({"namespace": b"x" * 32}, "declare_family.base[0]"),
    ],
)
def test_a_base_of_another_layout_is_refused(
    dial: Callable[[], Session], household: Household, change: dict[str, object], field: str
) -> None:
    session = dial()
    household.store(session, session.staging(4 << 20), household.primer)
    if "dtype" in change:
        session.families.declare(household.family)
    wrong = dataclasses.replace(household.family, rotary=None, **change)  # type: ignore[arg-type]
    with pytest.raises(errors.InvalidArgument, match=field.replace("[", r"\[")):
        session.families.declare(wrong)


def test_a_mirror_is_no_base(dial: Callable[[], Session], household: Household) -> None:
    session = dial()
    household.settle(session)
    encoded(session)
    sibling = household.siblings[0]
    with session.acquire(sibling.keys, [household.shard], recipes=True) as lease:
        number = next(n for n in range(5) if lease.is_recipe(n))
    family = household.family
    other = Family(
        "other",
        family.namespace,
        family.dtype,
        family.head_dim,
        family.shards,
        household.primer.key(0) + sibling.key(number),
        family.rotary,
    )
    with pytest.raises(errors.InvalidArgument, match=r"declare_family.base\[1\].*recipe"):
        session.families.declare(other)


def test_a_worker_that_can_not_load_the_codec_makes_room_for_one_that_can(
    start_spand: Start, household: Household
) -> None:
    """Half-loaded modules stay half-loaded; memory that lacked is there for the next process."""
    daemon = start_spand(host_memory="16MiB", errors=True)
    daemon.wait_populated()
    with connect(daemon) as session:
        staging = session.staging(4 << 20)
        household.store(session, staging, household.primer)
        for sibling in household.siblings:
            household.store(session, staging, sibling)
        worker = daemon.child("worker")
        used = int(Path(f"/proc/{worker}/statm").read_text().split()[0]) * resource.getpagesize()
        resource.prlimit(worker, resource.RLIMIT_AS, (used + (4 << 20), -1))
        session.families.declare(household.family)
        for sibling in household.siblings:
            household.join(session, sibling)
        wait_for(lambda: daemon.status().worker_restarts >= 1, 60)
        wait_for(lambda: any(member.mirrors for member in members(session).values()), 60)
        for sibling in household.siblings:
            read(session, household, sibling, recipes=True)
    assert "the store worker: the codec can't be loaded: " in daemon.log()
    assert "Traceback" not in daemon.log()
