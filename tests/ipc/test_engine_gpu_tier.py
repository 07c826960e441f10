"""An engine's two halves with a daemon that has GPU memory, on a driver that needs no GPU."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from daemon_process import Daemon, wait_for

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "connector"))

from fake_cuda import UUIDS, FakeDriver
from fake_cuda import Gpu as FakeCard
from fake_gpu_streams import FakeGpu
from mini_engine import NAMESPACE, MiniEngine

from kmesh.cuda import proof
from kmesh.cuda.driver import Attribute
from kmesh.errors import UnsupportedError
from kmesh.kernels.cuda import Memory
from kmesh.session import Session

DIGEST = NAMESPACE.digest()
MIB = 1 << 20
WAIT = 30.0
BLOCKS = [5, 1, 2, 9, 7, 3, 8, 4, 6, 10]


def prompt(count: int, seed: int = 0) -> list[int]:
    return [(i * 31 + seed * 977) % 5000 for i in range(count)]


class Connects:
    """A daemon as ``MiniEngine`` connects to one."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon

    def connect(self, **arguments: Any) -> Session:
        return Session.connect(self._daemon.socket_dir, **arguments)


@pytest.fixture
def daemon(start_gpu: Callable[..., Daemon]) -> Daemon:
    daemon = start_gpu()
    daemon.wait_populated()
    return daemon


@pytest.fixture
def engine(daemon: Daemon, engine_of: Callable[..., MiniEngine]) -> Callable[..., MiniEngine]:
    """Makes engines whose pages are on the first GPU, unless said otherwise."""
    return lambda name, **settings: engine_of(daemon, name, **settings)


@pytest.fixture
def engine_of() -> Iterator[Callable[..., MiniEngine]]:
    """The same, of any daemon."""
    engines: list[MiniEngine] = []

    def make(daemon: Daemon, name: str, *, on_gpu: bool = True, **settings: Any) -> MiniEngine:
        gpu = FakeGpu(FakeDriver(FakeCard(UUIDS[0]))) if on_gpu else None
        usual = {"gpu": gpu, "reserve_timeout_ms": 30_000, "acquire_timeout_ms": 30_000}
        engines.append(MiniEngine(Connects(daemon), name, **{**usual, **settings}))  # type: ignore[arg-type]
        return engines[-1]

    yield make
    while engines:
        one = engines.pop()
        sessions = [client.session for client in one._clients]
        one.close()
        for session in sessions:
            if session is not None:
                del session.index
                session._slabs.clear()


def tell(engine: MiniEngine) -> None:
    """What vLLM brings from the worker to the scheduler with a step."""
    engine.scheduler.worked(engine.workers[0].report(), ())


def stored_by(engine: MiniEngine, daemon: Daemon, tokens: list[int], seed: int, name: str) -> None:
    before = daemon.status().spans
    engine.scheduler.add(name, tokens, DIGEST)
    # What comes before its kernels are compiled is not stored.
    mover: Any = engine.workers[0]._mover
    wait_for(mover.ready, WAIT, "kernels")
    engine.prefill(name, seed, BLOCKS, 0, len(tokens))
    spans = before + len(tokens) // 64
    wait_for(lambda: daemon.status().spans == spans, WAIT, f"{spans} spans")
    engine.scheduler.finished(name)


def launches(engine: MiniEngine) -> list[Memory]:
    gpu: Any = engine.workers[0]._mover
    return [memory for program, memory, *_ in gpu._gpu.launches if program == "restore"]


def test_what_one_engine_stores_on_the_gpu_another_restores(
    engine: Callable[..., MiniEngine], daemon: Daemon
) -> None:
    one, other = engine("a", tier="gpu"), engine("b", tier="gpu")
    # Also before the scheduler knows which GPU its worker has.
    stored_by(one, daemon, prompt(256), 7, "first")
    slabs = [slab for slab in daemon.status().slabs if slab.used]
    assert {slab.device for slab in slabs} == {UUIDS[0]}
    other.scheduler.add("r", prompt(256), DIGEST)
    assert other.scheduler.match("r", 0, 256) == (None, False)
    tell(other)
    assert other.match("r", 0, 256, WAIT) == 224
    assert not other.load("r", BLOCKS[:7], 224, WAIT).bad_blocks
    assert other.wrong(7, BLOCKS, 0, 224) == []
    assert launches(other) == [Memory.GPU]
    counted = other.workers[0].counts.take()
    assert counted["restored_bytes_gpu"] == counted["restored_bytes"] > 0
    wait_for(lambda: not daemon.status().leases, WAIT)
    # Known now, and a miss makes no call.
    acquires = daemon.status().counters["acquires"]
    other.scheduler.add("s", prompt(256, seed=3), DIGEST)
    assert other.scheduler.match("s", 0, 256) == (0, False)
    assert daemon.status().counters["acquires"] == acquires
    # Nothing is stored twice.
    other.prefill("r", 7, BLOCKS, 224, 32)
    assert daemon.status().spans == 4


def test_a_gpu_that_reads_no_registered_memory_restores_from_the_hosts_all_the_same(
    start_gpu: Callable[..., Daemon], engine_of: Callable[..., MiniEngine]
) -> None:
    daemon = start_gpu(gpu_place="host", gpu_memory="96MiB", gpu_slab_size="32MiB")
    daemon.wait_populated()
    card = FakeCard(UUIDS[0], attributes={Attribute.READ_ONLY_REGISTER: 0})
    one, other = (
        engine_of(daemon, name, tier="gpu", gpu=FakeGpu(FakeDriver(card))) for name in "ab"
    )
    assert other.workers[0]._mover.devices == (UUIDS[0],)  # type: ignore[union-attr]
    stored_by(one, daemon, prompt(256), 7, "first")
    tell(other)
    other.scheduler.add("r", prompt(256), DIGEST)
    assert other.match("r", 0, 256, WAIT) == 224
    assert not other.load("r", BLOCKS[:7], 224, WAIT).bad_blocks
    assert other.wrong(7, BLOCKS, 0, 224) == []
    # As host memory is: over the bus, by few blocks or by copies.
    assert launches(other) == [Memory.HOST]
    assert other.workers[0].counts.take()["restored_bytes_kernel"] > 0


def test_host_memory_is_looked_in_too(engine: Callable[..., MiniEngine], daemon: Daemon) -> None:
    host, one = engine("h", on_gpu=False), engine("a", tier="gpu")
    stored_by(host, daemon, prompt(256), 7, "first")
    tell(one)
    one.scheduler.add("r", prompt(256), DIGEST)
    assert one.match("r", 0, 256, WAIT) == 224
    assert not one.load("r", BLOCKS[:7], 224, WAIT).bad_blocks
    assert one.wrong(7, BLOCKS, 0, 224) == []
    assert launches(one) == [Memory.HOST]
    one.scheduler.finished("r")
    # What it computes itself is stored on the GPU, where engines of the host tier don't look,
    # although it is in host memory already.
    other = engine("b", tier="gpu")
    stored_by(other, daemon, prompt(256), 7, "second")
    stored_by(other, daemon, prompt(192, seed=4), 5, "third")
    host.scheduler.add("t", prompt(192, seed=4), DIGEST)
    assert host.scheduler.match("t", 0, 192) == (0, False)
    # As long in both: the nearer one.
    one.scheduler.add("u", prompt(256), DIGEST)
    assert one.match("u", 0, 256, WAIT) == 224
    assert not one.load("u", BLOCKS[3:], 224, WAIT).bad_blocks
    assert launches(one) == [Memory.HOST, Memory.GPU]


def test_a_scheduler_that_is_told_nothing_computes(
    engine: Callable[..., MiniEngine], daemon: Daemon
) -> None:
    now = [0.0]
    one = engine("a", tier="gpu", clock=lambda: now[0], acquire_timeout_ms=1000)
    one.scheduler.add("r", prompt(256), DIGEST)
    assert one.scheduler.match("r", 0, 256) == (None, False)
    now[0] = 2.0
    assert one.scheduler.match("r", 0, 256) == (0, False)


def test_what_can_not_be(engine: Callable[..., MiniEngine]) -> None:
    with pytest.raises(UnsupportedError, match="needs an engine whose KV cache is on a GPU"):
        engine("a", on_gpu=False, tier="gpu")
    with pytest.raises(UnsupportedError, match="not served with tensor parallelism"):
        engine("b", tier="gpu", tp=2)


def test_flights_are_of_the_tier_that_is_stored_in(engine: Callable[..., MiniEngine]) -> None:
    """What is being computed for a GPU is waited for by engines of that GPU alone."""
    patient = {"min_flight_tokens": 128, "flight_patience": 100_000}
    # An answer that comes late is no answer, and this machine may be busy.
    patient |= {"acquire_timeout_ms": 30_000}
    one, other = engine("a", tier="gpu", **patient), engine("b", tier="gpu", **patient)
    host = engine("c", on_gpu=False, **patient)
    for each in (one, other):
        tell(each)
    for each in (one, other, host):
        each.scheduler.add("r", prompt(256), DIGEST)
    assert one.match("r", 0, 256, WAIT) == 0
    assert one.scheduler.counts.take() == {"flight_leads": 1}
    assert host.match("r", 0, 256, WAIT) == 0
    assert host.scheduler.counts.take() == {"flight_leads": 1}
    assert other.scheduler.match("r", 0, 256) == (None, False)
    one.scheduler.finished("r")
    # The one that waited is promoted.
    assert other.match("r", 0, 256, WAIT) == 0
    assert other.scheduler.counts.take()["flight_leads"] == 1


def test_what_lies_on_another_gpu_is_read_where_gpus_reach_each_other(
    engine: Callable[..., MiniEngine], daemon: Daemon
) -> None:
    stored_by(engine("a", tier="gpu"), daemon, prompt(256), 7, "first")
    apart = FakeGpu(FakeDriver(FakeCard(UUIDS[1]), FakeCard(UUIDS[0])))
    beside = FakeGpu(
        FakeDriver(FakeCard(UUIDS[1], peers=frozenset({UUIDS[0]})), FakeCard(UUIDS[0]))
    )
    one, other = engine("b", tier="gpu", gpu=apart), engine("c", tier="gpu", gpu=beside)
    for each in (one, other):
        tell(each)
        each.scheduler.add("r", prompt(256), DIGEST)
    assert one.scheduler.match("r", 0, 256) == (0, False)
    assert other.match("r", 0, 256, WAIT) == 224
    assert not other.load("r", BLOCKS[:7], 224, WAIT).bad_blocks
    assert other.wrong(7, BLOCKS, 0, 224) == []
    assert launches(other) == [Memory.GPU]
    assert other.workers[0].counts.take()["restored_bytes_gpu"] > 0
    wait_for(lambda: not daemon.status().leases, WAIT)


def asked(engine: MiniEngine, name: str) -> list[tuple[str, bool]]:
    """For which memory a new request asks for leases, and whether it takes recipes from there."""
    session, found = engine.client.session, []
    assert session is not None
    acquire = session.acquire_async

    def told(*given: Any, **more: Any) -> Any:
        found.append((more["device"], more["recipes"]))
        return acquire(*given, **more)

    session.acquire_async = told  # type: ignore[method-assign]
    engine.scheduler.add(name, prompt(256), DIGEST)
    assert engine.match(name, 0, 256, WAIT) == 224
    engine.scheduler.finished(name)
    del session.acquire_async
    return found


def test_recipes_are_asked_for_where_the_workers_restore_them(
    engine: Callable[..., MiniEngine], daemon: Daemon
) -> None:
    """On the engine's own GPU, if it is to, until its kernel for them turns out not to compile; on
    another one the daemon makes them dense."""
    stored_by(engine("a", tier="gpu"), daemon, prompt(256), 7, "first")
    beside = FakeGpu(
        FakeDriver(FakeCard(UUIDS[1], peers=frozenset({UUIDS[0]})), FakeCard(UUIDS[0]))
    )
    unable, go = FakeGpu(FakeDriver(FakeCard(UUIDS[0]))), threading.Event()

    def refuse(name: str) -> None:
        if name == "prepare_rounds":
            assert go.wait(2 * WAIT)
            raise UnsupportedError("no registers")

    unable.refuse = refuse
    words = {"tier": "gpu", "gpu_recipes": True}
    own, other = engine("b", **words), engine("c", gpu=beside, **words)
    late, plain = engine("d", gpu=unable, **words), engine("e", tier="gpu")
    for each in (own, other, late, plain):
        tell(each)
    assert asked(own, "r") == [(UUIDS[0], True)]
    assert asked(plain, "r") == [(UUIDS[0], False)]
    assert asked(other, "r") == [(UUIDS[0], False)]
    assert asked(late, "r") == [(UUIDS[0], True)]
    assert late.workers[0].report() is None
    go.set()
    mover: Any = late.workers[0]._mover
    wait_for(mover._rounds_compiled.is_set, WAIT)
    tell(late)
    assert asked(late, "s") == [(UUIDS[0], False)]
    assert late.workers[0].report() is None


def test_a_peer_that_gives_other_bytes_is_not_looked_in(
    engine: Callable[..., MiniEngine], caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(FakeDriver):
        def write(self, address: int, source: int, size: int) -> None:
            pass

    # What is proved is so for the process.
    proof._proved.clear()
    cards = FakeCard(UUIDS[1], peers=frozenset({UUIDS[0]})), FakeCard(UUIDS[0])
    host = engine("a", gpu=FakeGpu(Broken(*cards)))
    one = engine("b", tier="gpu", gpu=FakeGpu(Broken(*cards)))
    report = one.workers[0].report()
    assert report is not None
    assert report.devices == (UUIDS[1], "")
    assert f"{UUIDS[0]} is not read by {UUIDS[1]}: CUDA_VMM_FD" in caplog.text
    mover: Any = host.workers[0]._mover
    assert mover.devices == (UUIDS[1], "")
