"""Siblings of one step use one lease, as long as one of them does."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
from fake_gpu_streams import FakeGpu
from gpu_cases import DIGEST, prompt, warm
from mini_engine import WAIT, MiniEngine, until

from kmesh import _host
from kmesh.keys import KEY_BYTES
from kmesh.lease import Lease
from kmesh.session import Session
from kmesh.testing import FakeDaemon
from kmesh_vllm.leases import Leases

Make = Callable[..., MiniEngine]
BLOCKS = [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]]


def engine_of(patient: Make, daemon: FakeDaemon) -> MiniEngine:
    """An engine without a prefix cache of its own; what it is asked for is stored."""
    one = patient("a")
    one.scheduler.add("first", prompt(160), DIGEST)
    assert one.match("first", 0, 160) == 0
    one.scheduler.allocated("first", [1, 2, 3, 4, 5], 0)
    one.prefill("first", 7, [1, 2, 3, 4, 5], 0, 160)
    until(lambda: daemon.spans == 3, WAIT)
    one.scheduler.finished("first")
    return patient("b", sharing=False, patience=WAIT)


def promised(engine: MiniEngine, names: str) -> None:
    for name in names:
        engine.scheduler.add(name, prompt(160), DIGEST)
        assert engine.scheduler.match(name, 0, 160) == (128, True)


def test_one_lease_serves_all_and_goes_with_the_last(patient: Make, daemon: FakeDaemon) -> None:
    siblings = engine_of(patient, daemon)
    promised(siblings, "rst")
    assert daemon.leases == 1
    for name, blocks in zip("rst", BLOCKS, strict=True):
        siblings.scheduler.allocated(name, blocks, 128)
    siblings.run(siblings.scheduler.plan([], []))
    done: set[str] = set()
    while done != set("rst"):
        ended = siblings.workers[0].finished()
        siblings.scheduler.worked(siblings.workers[0].report(), ended)
        done |= ended
    for blocks in BLOCKS:
        assert siblings.wrong(7, blocks, 0, 128) == []
    until(lambda: daemon.leases == 0, WAIT)
    # The next one asks anew.
    promised(siblings, "u")
    assert daemon.leases == 1
    siblings.scheduler.finished("u")
    until(lambda: daemon.leases == 0, WAIT)


def test_who_leaves_takes_nothing_from_the_others(patient: Make, daemon: FakeDaemon) -> None:
    siblings = engine_of(patient, daemon)
    promised(siblings, "rs")
    siblings.scheduler.finished("r")
    siblings.scheduler.finished("r")
    assert daemon.leases == 1
    assert not siblings.load("s", BLOCKS[0], 128, WAIT).bad_blocks
    assert siblings.wrong(7, BLOCKS[0], 0, 128) == []
    until(lambda: daemon.leases == 0, WAIT)


def test_what_siblings_read_is_worked_out_once_and_each_has_its_own_pages(
    patient: Make, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine_of(patient, daemon)
    gpu = FakeGpu()
    other = patient("c", gpu=gpu, sharing=False, patience=WAIT)
    warm(other, daemon)
    for name, local in (("s", 32), ("r", 0), ("t", 0)):
        other.scheduler.add(name, prompt(160), DIGEST)
        assert other.scheduler.match(name, local, 160) == (128 - local, True)
    for name, blocks in zip("srt", BLOCKS, strict=True):
        other.scheduler.allocated(name, blocks, 96 if name == "s" else 128)
    made: list[int] = []
    leased_parts = _host.leased_parts

    def counted(*given: Any) -> Any:
        found = leased_parts(*given)
        made.append(len(found[1]))
        return found

    monkeypatch.setattr(_host, "leased_parts", counted)
    other.run(other.scheduler.plan([], []))
    assert other.workers[0].finished() == set("rst")
    # That of "s" begins elsewhere; "t" reads what "r" does.
    assert made == [2, 2]
    for name, blocks in zip("srt", BLOCKS, strict=True):
        begin = 32 if name == "s" else 0
        assert other.wrong(7, blocks, begin, 128) == []
        assert other.wrong(7, blocks, 0, begin) == list(range(begin))
    other.scheduler.worked(other.workers[0].report(), "rst")


def test_other_salts_share_nothing(
    patient: Make, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    siblings = engine_of(patient, daemon)
    asked: list[bytes] = []
    acquire = Session.acquire_async

    def counted(session: Session, keys: bytes, *rest: Any, **more: Any) -> Future[Lease]:
        asked.append(more["salt"])
        return acquire(session, keys, *rest, **more)

    monkeypatch.setattr(Session, "acquire_async", counted)
    promised(siblings, "rst")
    siblings.scheduler.add("other", prompt(160), DIGEST, salt=b"s" * 32)
    siblings.scheduler.match("other", 0, 160)
    assert asked == [b"", b"s" * 32]


def test_a_daemon_that_hangs_is_counted_once_for_all_who_wait(
    engine: Make, daemon: FakeDaemon
) -> None:
    engine_of(engine, daemon)
    now = [0.0]
    siblings = engine("c", sharing=False, clock=lambda: now[0])
    with daemon.hold("acquire"):
        for name in "rst":
            siblings.scheduler.add(name, prompt(160), DIGEST)
            assert siblings.scheduler.match(name, 0, 160) == (None, False)
        now[0] = 61.0
        for name in "rst":
            assert siblings.scheduler.match(name, 0, 160) == (0, False)
            # Nor do the later ones make the pause longer.
            now[0] += 100.0
        assert siblings.scheduler.counts.take() == {"acquire_late": 1}
    until(lambda: daemon.leases == 0, WAIT)
    now[0] = 362.0
    siblings.scheduler.add("u", prompt(160), DIGEST)
    assert siblings.match("u", 0, 160) == 128


# By themselves.


class _Asked:
    """Questions to a daemon, which the test answers."""

    def __init__(self) -> None:
        self.futures: list[Future[Lease]] = []
        self.released: list[int] = []

    def acquire(self) -> Future[Lease]:
        self.futures.append(Future())
        return self.futures[-1]

    def answer(self, number: int, hits: int = 2) -> None:
        self.futures[number].set_result(_Watched(lambda: self.released.append(number), hits))


class _Watched(Lease):
    """One whose release can be looked at."""

    def __init__(self, told: Callable[[], Any], hits: int) -> None:
        super().__init__(bytes(2 * KEY_BYTES), [], lambda ids: None)
        self.hits = hits
        self._told = told

    def release(self) -> None:
        self._told()


@pytest.fixture
def asked() -> _Asked:
    return _Asked()


def test_a_lease_that_comes_when_nobody_wants_it_goes_back(asked: _Asked) -> None:
    leases = Leases()
    one, two = (leases.ask("q", asked.acquire, now=0.0, timeout=2.0) for _ in "ab")
    assert one is two
    one.leave()
    assert leases.ask("q", asked.acquire, now=0.0, timeout=2.0) is two
    one.leave()
    two.leave()
    assert not leases._held
    # While it is on its way nobody joins it any more.
    assert leases.ask("q", asked.acquire, now=0.0, timeout=2.0) is not two
    assert len(asked.futures) == 2
    asked.answer(0)
    assert asked.released == [0]
    asked.answer(1)
    assert asked.released == [0]


def test_one_on_its_way_is_joined_while_half_of_its_time_is_left(asked: _Asked) -> None:
    """Its waiting ends at the time of who asked first."""
    leases = Leases()
    first, early, late = (
        leases.ask("q", asked.acquire, now=now, timeout=2.0) for now in (5.0, 6.0, 6.5)
    )
    assert early is first is not late
    assert (first.deadline, late.deadline) == (7.0, 8.5)
    asked.answer(1)
    # One that is there serves for as long as somebody has it.
    assert leases.ask("q", asked.acquire, now=9.0, timeout=2.0) is late
    for held in (first, early):
        held.leave()
    asked.answer(0)
    assert asked.released == [0]
    for _ in range(2):
        late.leave()
    assert asked.released == [0, 1]


@pytest.mark.parametrize("how", ["part", "error"])
def test_what_is_not_all_that_was_asked_for_is_shared_with_nobody_new(
    asked: _Asked, how: str
) -> None:
    leases = Leases()
    first = leases.ask("q", asked.acquire, now=0.0, timeout=2.0)
    if how == "part":
        asked.answer(0, hits=1)
    else:
        asked.futures[0].set_exception(RuntimeError("no"))
    second = leases.ask("q", asked.acquire, now=0.0, timeout=2.0)
    assert second is not first
    first.leave()
    assert leases.ask("q", asked.acquire, now=0.0, timeout=2.0) is second
    assert asked.released == ([0] if how == "part" else [])
