"""The daemon's memory and the kernels, before a GPU's engine can use them."""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest
from fake_cuda import refuse_nth
from fake_gpu_streams import FakeGpu
from gpu_cases import DIGEST, Make, promised, prompt, stored_by, warm
from mini_engine import WAIT, MiniEngine, until

from kmesh import _host
from kmesh.cuda import proof
from kmesh.cuda.driver import Attribute
from kmesh.errors import (
    ConnectionClosed,
    CudaError,
    DeadlineExceeded,
    NotFound,
    UnsupportedError,
)
from kmesh.handles import HandleKind
from kmesh.session import Session
from kmesh.testing import FakeDaemon
from kmesh_vllm import bringing, gpumemory, gpumover
from kmesh_vllm.bringing import Bringer
from kmesh_vllm.gpumemory import GpuMemory


def test_a_load_whose_memory_comes_too_late_never_writes(engine: Make, daemon: FakeDaemon) -> None:
    stored_by(engine("a"), daemon, prompt(192))
    gpu = FakeGpu()
    with daemon.hold("attach_slab"):
        other = engine("b", gpu=gpu, load_timeout_ms=100)
        assert promised(other, "r", prompt(192)) == 160
        assert other.load("r", [1, 2, 3, 4, 5], 160).bad_blocks == {1, 2, 3, 4, 5}
    warm(other, daemon)
    assert other.workers[0].finished() == set()
    assert gpu.launches == []
    assert other.wrong(7, [1, 2, 3, 4, 5], 0, 160) == list(range(160))


def test_a_load_that_comes_first_waits_for_its_memory(engine: Make, daemon: FakeDaemon) -> None:
    stored_by(engine("a"), daemon, prompt(192))
    with daemon.hold("attach_slab"):
        other = engine("b", gpu=FakeGpu())
        mover: Any = other.workers[0]._mover
        assert promised(other, "r", prompt(192)) == 160
        assert mover.attached(other.workers_client.session, 0) is None
        other.scheduler.allocated("r", [1, 2, 3, 4, 5], 160)
        other.run(other.scheduler.plan([], []))
        assert other.workers[0].finished() == set()
    assert not other.settle("r").bad_blocks
    assert other.wrong(7, [1, 2, 3, 4, 5], 0, 160) == []


def test_no_thread_of_ours_spoils_a_graph_that_the_engine_captures(
    engine: Make, daemon: FakeDaemon
) -> None:
    """Each of them tells the driver before it calls what a capture elsewhere forbids."""
    stored_by(engine("a"), daemon, prompt(192))
    gpu = FakeGpu()
    with daemon.hold("attach_slab"):
        other = engine("b", gpu=gpu)
        assert promised(other, "r", prompt(192)) == 160
        other.scheduler.allocated("r", [1, 2, 3, 4, 5], 160)
        other.run(other.scheduler.plan([], []))
    assert not other.settle("r").bad_blocks
    warm(other, daemon)
    stored_by(other, daemon, prompt(128, seed=6), seed=2)
    mover: Any = other.workers[0]._mover
    session = other.workers_client.session
    assert session is not None
    session.close()
    other.workers_client.session = None
    mover.warm(None)
    until(
        lambda: not gpu.driver._registered.keys() - {s.address for s in mover._store._staging}, WAIT
    )
    other.workers[0].close()
    engines = threading.current_thread().name
    assert {thread for thread, _ in gpu.driver.unsafe} == {engines}
    assert {thread.removesuffix("_0") for thread in gpu.driver.relaxed} == {
        *("kmesh-kernels", "kmesh-slabs", "kmesh-wait", "kmesh-reserve", "kmesh-store")
    }


@pytest.mark.parametrize("call", ["restorer", "restore", "storer", "store", "wait"])
def test_kernels_are_compiled_again_when_something_came_between(
    engine: Make, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    monkeypatch.setattr(gpumover, "_COMPILE_PAUSES", (0.001, 0.001))
    gpu = FakeGpu()
    left = [2]

    def refuse(name: str) -> None:
        ours = threading.current_thread().name.startswith("kmesh-kernels")
        if ours and name == call and left[0]:
            left[0] -= 1
            raise CudaError(name, 900, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED")

    gpu.refuse = refuse
    one = engine("a", gpu=gpu)
    mover: Any = one.workers[0]._mover
    until(mover.ready, WAIT)
    stored_by(one, daemon, prompt(192))
    one.workers[0].close()
    assert (gpu.open, left) == (0, [0])


def test_the_background_fills_no_holes(engine: Make, daemon: FakeDaemon) -> None:
    """Pages that the daemon has not made yet would be made at the engine's cost."""
    (slab,) = daemon._model.slabs
    gpu = FakeGpu()
    one = engine("a", gpu=gpu)
    mover: Any = one.workers[0]._mover
    until(mover.ready, WAIT)
    session = one.workers_client.session
    assert mover._memory._attach_filled(session) == 1
    assert os.fstat(slab.fd).st_blocks == 0
    assert gpu.driver.calls.count("register") == 0
    warm(one, daemon)
    assert mover._memory._attach_filled(session) == 0


def test_a_new_session_attaches_anew_and_registers_no_memory_twice(
    engine: Make, daemon: FakeDaemon
) -> None:
    stored_by(engine("a"), daemon, prompt(192))
    gpu = FakeGpu()
    other = engine("b", gpu=gpu)
    warm(other, daemon)
    mover: Any = other.workers[0]._mover
    registered = gpu.driver.calls.count("register")
    old = other.workers_client.session
    assert old is not None
    old.close()
    other.workers_client.session = MiniEngine._connect(daemon, "b", old.welcome and 2)  # type: ignore[arg-type]
    other._clients.append(type(other.client)(other.workers_client.session))
    mover.warm(other.workers_client.session)
    warm(other, daemon)
    assert gpu.driver.calls.count("register") == registered
    assert promised(other, "r", prompt(192)) == 160
    assert not other.load("r", [1, 2, 3, 4, 5], 160, WAIT).bad_blocks
    assert other.wrong(7, [1, 2, 3, 4, 5], 0, 160) == []
    until(lambda: not mover._memory._ended, WAIT)
    assert len(gpu.driver._registered) == 1


def test_memory_of_a_daemon_that_is_gone_is_given_back_when_nothing_reads_it(
    engine: Make, daemon: FakeDaemon
) -> None:
    stored_by(engine("a"), daemon, prompt(192))
    gpu = FakeGpu()
    other = engine("b", gpu=gpu)
    warm(other, daemon)
    mover: Any = other.workers[0]._mover
    assert promised(other, "r", prompt(192)) == 160
    gpu.held = True
    other.scheduler.allocated("r", [1, 2, 3, 4, 5], 160)
    other.run(other.scheduler.plan([], []))
    session = other.workers_client.session
    assert session is not None
    session.close()
    other.workers_client.session = None
    mover.warm(None)
    until(lambda: mover._memory._known is None, WAIT)
    assert len(gpu.driver._registered) == 1, "memory went while it was read"
    gpu.run()
    assert not other.settle("r", WAIT).bad_blocks
    assert other.wrong(7, [1, 2, 3, 4, 5], 0, 160) == []
    # Without a further step: an engine that has nothing to do keeps nothing.
    until(lambda: not gpu.driver._registered, WAIT)


def test_a_slab_that_the_daemon_gives_up_is_let_go_when_nothing_reads(
    engine: Make, daemon: FakeDaemon
) -> None:
    stored_by(engine("a"), daemon, prompt(192))
    gpu = FakeGpu()
    other = engine("b", gpu=gpu)
    warm(other, daemon)
    mover: Any = other.workers[0]._mover
    assert promised(other, "r", prompt(192)) == 160
    gpu.held = True
    other.scheduler.allocated("r", [1, 2, 3, 4, 5], 160)
    other.run(other.scheduler.plan([], []))
    session = other.workers_client.session
    assert session is not None
    session._slabs.forget([0])
    until(lambda: mover._memory._gone, WAIT)
    assert len(gpu.driver._registered) == 1, "memory went while it was read"
    gpu.run()
    assert not other.settle("r", WAIT).bad_blocks
    assert other.wrong(7, [1, 2, 3, 4, 5], 0, 160) == []
    # Without a further step, and for good: the daemon has no such slab.
    until(lambda: not gpu.driver._registered, WAIT)
    assert mover._memory._attach_filled(session) == 0
    assert not gpu.driver._registered


@pytest.mark.parametrize("how", ["given up", "ended"])
def test_what_is_to_go_waits_for_no_load_that_began_later(daemon: FakeDaemon, how: str) -> None:
    """There may always be one under way."""
    gpu = FakeGpu()
    with daemon.connect() as session:
        now: list[Session | None] = [session]
        memory = GpuMemory(gpu.device, lambda: now[0])
        try:
            load = memory.begin()
            slab = memory.attach(session, 0)
            other = memory.begin()
            assert memory.attached(session, 0) is slab
            if how == "given up":
                session._slabs.forget([0])
                until(lambda: memory.attached(session, 0) is None, WAIT)
                with pytest.raises(NotFound, match="given up"):
                    memory.attach(session, 0)
            else:
                now[0] = None
                session.close()
                memory.changed()
                until(lambda: memory._known is None, WAIT)
            later = memory.begin()
            memory.end(load)
            memory.changed()
            until(lambda: not memory._wake.is_set(), WAIT)
            assert len(gpu.driver._registered) == 1, "memory went while it was read"
            memory.end(other)
            until(lambda: not gpu.driver._registered, WAIT)
            memory.end(later)
        finally:
            assert memory.close()
            gpu.close()
            del session.index


def test_what_is_brought_for_a_load_keeps_what_the_load_had(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slab was given up between the load's beginning and its turn; then the GPU hangs, and the
    load ends."""
    gpu = FakeGpu()
    monkeypatch.setattr(bringing, "_DEVICE_WAIT", 0.01)
    with daemon.connect() as session:
        memory = GpuMemory(gpu.device, lambda: session)
        bringer = Bringer(gpu, memory.join, memory.end)
        try:
            load = memory.begin()
            slab = memory.attach(session, 0)
            session._slabs.forget([0])
            until(lambda: memory._gone, WAIT)
            gpu.held = True
            with pytest.raises(DeadlineExceeded):
                bringer.data(slab.address, 64)
            memory.end(load)
            later = memory.begin()
            memory.changed()
            until(lambda: not memory._wake.is_set(), WAIT)
            assert gpu.driver.registered(slab.address, 64), "memory went while it was read"
            gpu.held = False
            gpu.run()
            # The next turn lets it go.
            other = bytearray(64)
            bringer.data(_host.address(other), 64)
            until(lambda: not gpu.driver.registered(slab.address, 64), WAIT)
            memory.end(later)
            assert not memory._loads
        finally:
            bringer.close()
            assert memory.close()
            gpu.close()
            del session.index


def test_a_thread_that_comes_late_with_an_ended_session_takes_nothing_away(
    daemon: FakeDaemon,
) -> None:
    gpu = FakeGpu()
    with daemon.connect() as old, daemon.connect() as session:
        memory = GpuMemory(gpu.device, lambda: session)
        try:
            slab = memory.attach(session, 0)
            old.close()
            with pytest.raises(ConnectionClosed):
                memory.attach(old, 0)
            assert memory.attached(session, 0) is slab
            assert not memory._ended
        finally:
            assert memory.close()
            gpu.close()
            del old.index, session.index


def test_host_memory_that_the_gpu_can_not_read(
    engine: Make, daemon: FakeDaemon, caplog: pytest.LogCaptureFixture
) -> None:
    stored_by(engine("a"), daemon, prompt(192))
    other = engine("b", gpu=FakeGpu(attributes={Attribute.READ_ONLY_REGISTER: 0}))
    assert other.workers[0].counts.take() == {"host_memory_unreadable": 1}
    assert caplog.text.count("can't read memory that is mapped read-only") == 1
    report = other.workers[0].report()
    assert report is not None
    assert report.devices == (other.workers[0]._mover.devices[0],)  # type: ignore[union-attr]
    other.scheduler.worked(report, ())
    # Nothing is promised that could not be kept; what it computes is stored all the same.
    assert promised(other, "r", prompt(192)) == 0
    stored_by(other, daemon, prompt(128, seed=5), seed=3)


def test_kernels_that_can_not_be_compiled(
    engine: Make, daemon: FakeDaemon, caplog: pytest.LogCaptureFixture
) -> None:
    stored_by(engine("a"), daemon, prompt(192))
    gpu = FakeGpu()

    def refuse(name: str) -> None:
        if name == "restore":
            raise UnsupportedError("no compiler")

    gpu.refuse = refuse
    other = engine("b", gpu=gpu, reserve_timeout_ms=30_000)
    assert promised(other, "r", prompt(192)) == 160
    assert other.load("r", [1, 2, 3, 4, 5], 160, WAIT).bad_blocks == {1, 2, 3, 4, 5}
    other.scheduler.add("s", prompt(128, seed=9), DIGEST)
    other.prefill("s", 7, [1, 2, 3, 4], 0, 128)
    counted = other.workers[0].counts.take()
    assert (counted["load_failed_error"], counted["store_skipped_late"]) == (1, 2)
    assert "the kernels can't be compiled: no compiler" in caplog.text


def test_the_driver_fails_at_each_step_of_attaching(daemon: FakeDaemon) -> None:
    """Whichever call fails: a later one succeeds, and nothing is held twice or left."""
    with daemon.connect() as session:
        with FakeGpu().device as device:
            # The proof of the kind is moved once in a process.
            proof.prove(device, HandleKind.MEMFD)
        for number in range(1, 100):
            gpu = FakeGpu()
            memory = GpuMemory(gpu.device, lambda: None)
            refuse = refuse_nth(number)
            # Undoing something does not fail here, and naming it for later is no call.
            gpu.driver.refuse = lambda name, refuse=refuse: (  # type: ignore[misc]
                None if name in ("unregister", "free", "pop_context") else refuse(name)
            )
            failed = False
            try:
                memory.attach(session, 0)
            except CudaError:
                failed = True
            gpu.driver.refuse = None
            assert memory.attach(session, 0).size == memory.attached(session, 0).size  # type: ignore[union-attr]
            assert len(gpu.driver._registered) == 1
            memory.close()
            gpu.close()
            assert not any(gpu.driver.ledger().values())
            if not failed:
                break
        del session.index
    assert number >= 5


def test_an_end_waits_a_bounded_time_for_kernels(
    engine: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(gpumover, "_CLOSE_WAIT", 0.05)
    gpu = FakeGpu()
    reached, hangs = threading.Event(), threading.Event()

    def hang(name: str) -> None:
        if threading.current_thread().name == "kmesh-kernels" and name == "restore":
            reached.set()
            assert hangs.wait(2 * WAIT)

    gpu.refuse = hang
    one = engine("a", gpu=gpu)
    mover: Any = one.workers[0]._mover
    assert reached.wait(WAIT)
    closing = threading.Thread(target=one.workers[0].close)
    closing.start()
    closing.join(WAIT)
    assert not closing.is_alive()
    assert "kernels are still being compiled" in caplog.text
    assert gpu.driver.ledger()["contexts"] == 1, "closed under a call"
    hangs.set()
    mover._thread.join(WAIT)
    one.workers[0].close()
    assert not any(gpu.driver.ledger().values())


def test_an_end_waits_a_bounded_time_for_what_is_being_attached(
    engine: Make, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpumemory, "_CLOSE_WAIT", 0.05)
    gpu = FakeGpu()
    reached, hangs = threading.Event(), threading.Event()

    def hang(name: str) -> None:
        if name == "register" and threading.current_thread().name == "kmesh-slabs":
            reached.set()
            assert hangs.wait(2 * WAIT)

    gpu.driver.refuse = hang
    (slab,) = daemon._model.slabs
    os.posix_fallocate(slab.fd, 0, slab.memory.size)
    one = engine("a", gpu=gpu)
    mover: Any = one.workers[0]._mover
    assert reached.wait(WAIT)
    closing = threading.Thread(target=one.workers[0].close)
    closing.start()
    closing.join(WAIT)
    assert not closing.is_alive()
    assert gpu.driver.ledger()["contexts"] == 1, "closed under a call"
    hangs.set()
    mover._memory._thread.join(WAIT)
    one.workers[0].close()
    assert not any(gpu.driver.ledger().values())
