"""The supervisor's own decisions, without any process: what it sends when, and what it needs."""

from __future__ import annotations

import asyncio
import errno
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from room import settings

from kmesh.errors import ConfigError
from kmesh_spand import child, ipc, jobmessages, messages, outbox
from kmesh_spand.control.link import Link
from kmesh_spand.controlkeeper import ControlKeeper
from kmesh_spand.fdstore import FdStore
from kmesh_spand.gpukeeper import GpuKeeper
from kmesh_spand.holdings import Holdings
from kmesh_spand.launch import Prepared
from kmesh_spand.outbox import Outbox
from kmesh_spand.supervisor import Supervisor

SCARCE = [errno.ENOBUFS, errno.ENOMEM, errno.ETOOMANYREFS]


class Scarce(socket.socket):
    """A socket that can be written, for which the kernel has nothing at first."""

    code = 0
    tries = 0

    def sendmsg(self, *args: object) -> int:  # type: ignore[override]
        self.tries += 1
        if self.code:
            raise OSError(self.code, os.strerror(self.code))
        return super().sendmsg(*args)  # type: ignore[arg-type]


@pytest.fixture
def ends() -> Iterator[tuple[Scarce, socket.socket]]:
    ours, theirs = ipc.pair()
    scarce = Scarce(fileno=ours.detach())
    scarce.setblocking(False)
    theirs.setblocking(False)
    with scarce, theirs:
        yield scarce, theirs


def received(sock: socket.socket) -> list[ipc.AnyMessage]:
    found = []
    while True:
        try:
            found.append(ipc.receive(sock)[0])
        except BlockingIOError:
            return found


@pytest.mark.parametrize("code", SCARCE, ids=errno.errorcode.get)
def test_control_tries_again_later_what_the_kernel_has_no_memory_for(
    ends: tuple[Scarce, socket.socket], code: int
) -> None:
    ours, theirs = ends
    loop = asyncio.new_event_loop()
    now = 1000.0
    loop.time = lambda: now  # type: ignore[method-assign]

    def turn() -> None:
        for _ in range(20):
            loop.run_until_complete(asyncio.sleep(0))

    link = Link(loop, ours, lambda *_: None, lambda: None)
    try:
        ours.code = code
        link.send(messages.Beat(1))
        link.send(messages.Beat(2))
        # The socket can be written all the time.
        turn()
        assert ours.tries == 1
        now += 2 * outbox.RETRY_SECONDS
        turn()
        assert ours.tries == 2
        ours.code = 0
        now += 2 * outbox.RETRY_SECONDS
        turn()
        assert received(theirs) == [messages.Beat(1), messages.Beat(2)]
        link.send(messages.Beat(3))
        assert received(theirs) == [messages.Beat(3)]
    finally:
        link.close()
        loop.close()


def test_control_sends_on_as_soon_as_a_full_socket_has_room(
    ends: tuple[Scarce, socket.socket],
) -> None:
    ours, theirs = ends
    loop = asyncio.new_event_loop()
    # No timer ever fires.
    loop.time = lambda: 1000.0  # type: ignore[method-assign]
    link = Link(loop, ours, lambda *_: None, lambda: None)
    try:
        sent = 0
        while not link._outbox.waiting:
            sent += 1
            link.send(messages.Beat(sent))
        tries = ours.tries
        for _ in range(20):
            loop.run_until_complete(asyncio.sleep(0))
        assert ours.tries == tries
        found = received(theirs)
        for _ in range(20):
            loop.run_until_complete(asyncio.sleep(0))
        found += received(theirs)
        assert found == [messages.Beat(number + 1) for number in range(sent)]
    finally:
        link.close()
        loop.close()


def test_states_of_gpus_do_not_pile_up_before_a_control_that_is_stopped(
    ends: tuple[Scarce, socket.socket],
) -> None:
    def state(gpu: int, free: int) -> messages.GpuState:
        return messages.GpuState(gpu, f"GPU-{gpu}", "card", True, free, 1 << 30, False)

    ours, theirs = ends
    kept = Outbox(ours)
    ours.code = errno.ENOBUFS
    kept.send(state(0, 1))
    kept.send(messages.GpuWorker(1, 0, 77))
    for free in range(1000):
        for gpu in (0, 1):
            kept.send(state(gpu, free))
    assert kept.waiting == 4
    kept.send(messages.GpuFailed(0, "dead", False))
    kept.send(state(0, 5))
    ours.code = 0
    kept.flush()
    # In their order: none is told before what it follows.
    assert received(theirs) == [
        state(0, 1),
        messages.GpuWorker(1, 0, 77),
        state(0, 999),
        state(1, 999),
        messages.GpuFailed(0, "dead", False),
        state(0, 5),
    ]
    kept.close()


@pytest.mark.parametrize("code", SCARCE, ids=errno.errorcode.get)
def test_the_supervisor_tries_again_later_too(
    socket_dir: Path,
    ends: tuple[Scarce, socket.socket],
    code: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours, theirs = ends
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    supervisor = Supervisor(settings(socket_dir), "test", None)  # type: ignore[arg-type]
    supervisor._control.take(ours)
    supervisor._control.start_at = None
    wake, waker = socket.socketpair()
    with wake, waker:
        assert supervisor._timeout_ms() is None
        ours.code = code
        supervisor._control.tell(messages.Beat(1))
        allowed = supervisor._timeout_ms()
        assert allowed is not None
        assert 0 < allowed <= 51
        # It waits for that long, unless something is heard.
        for _ in range(5):
            waker.send(b"x")
            supervisor._wait(wake)
        assert ours.tries == 1
        now += 1
        supervisor._wait(wake)
        assert ours.tries == 2
        ours.code = 0
        now += 1
        supervisor._wait(wake)
        assert received(theirs) == [messages.Beat(1)]
        assert supervisor._timeout_ms() is None


def test_a_message_that_could_not_be_kept_leaves_nothing_to_try_again(
    ends: tuple[Scarce, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = ends
    box = Outbox(ours)

    def none_left(fd: int) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    ours.code = errno.ENOBUFS
    with monkeypatch.context() as patch:
        patch.setattr(os, "dup", none_left)
        with pytest.raises(OSError, match="Too many open files"):
            box.send(jobmessages.Staging(1, 4096), theirs.fileno())
    assert not box.waiting
    box.flush()
    assert box.retry_at is None
    box.close()


def keeper_of(socket_dir: Path, pid: int) -> tuple[GpuKeeper, socket.socket, list[ipc.AnyMessage]]:
    """One whose worker is a process of the test's, and the worker's end of the way to it."""
    told: list[ipc.AnyMessage] = []
    chosen = settings(socket_dir, gpu="0", gpu_memory="4MiB", gpu_slab_size="2MiB")
    keeper = GpuKeeper(chosen, lambda message, fd: told.append(message), FdStore({}))
    (worker,) = keeper._workers
    ours, theirs = ipc.pair()
    ours.setblocking(False)
    worker.channel, worker.pid, worker.lives, worker.start_at = ours, pid, 1, None
    return keeper, theirs, told


def test_nobody_is_killed_for_what_a_device_worker_sent_before_it_was_reaped(
    socket_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with subprocess.Popen(["true"]) as process:
        process.wait()
    keeper, theirs, told = keeper_of(socket_dir, process.pid)
    killed: list[object] = []
    monkeypatch.setattr(os, "kill", lambda *whom: killed.append(whom))
    memory = os.memfd_create("slab")
    with theirs:
        ipc.send(theirs, messages.GpuState(0, "GPU-1", "a GPU", True, 1, 2))
        ipc.send(theirs, messages.GpuSlab(4, 2 << 20))
        ipc.send(theirs, messages.GpuSlab(5, 2 << 20), memory)
    os.close(memory)
    keeper.died(process.pid, "exit 1")
    assert not killed
    # What it sent besides is not lost, and another is started.
    assert list(keeper.slabs) == [5]
    assert keeper.ready
    assert keeper.failure is None
    assert told[-1] == messages.GpuWorker(0, 0, 0)
    assert len(keeper.moments) == 1
    assert not keeper.pids
    assert not keeper.sockets
    keeper.close()
    assert not killed


def test_a_device_worker_whose_slab_came_without_its_descriptor_is_ended(socket_dir: Path) -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        keeper, theirs, _ = keeper_of(socket_dir, process.pid)
        with theirs:
            ipc.send(theirs, messages.GpuSlab(4, 2 << 20))
            assert keeper.hear(keeper.sockets[0].fileno())
    assert process.returncode == -signal.SIGKILL
    keeper.died(process.pid, "killed by SIGKILL")
    assert not keeper.slabs
    keeper.close()


def test_descriptors_are_counted_for_slabs_that_are_exported_as_well(
    socket_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One more for each slab, of host memory and of GPUs."""
    monkeypatch.setattr(child, "raise_file_limit", lambda: 10)

    def needed(dma_buf: str) -> int:
        chosen = settings(
            socket_dir, slab_size="1MiB", gpu="0,1", gpu_memory="20MiB", gpu_slab_size="2MiB",
            dma_buf=dma_buf,
        )  # fmt: skip
        with pytest.raises(ConfigError) as refused:
            Supervisor(chosen, "test", None)._open()  # type: ignore[arg-type]
        (count,) = re.findall(r"24 slabs need (\d+) file descriptors", str(refused.value))
        return int(count)

    assert needed("slabs") - needed("off") == 24
    assert needed("spans") == needed("off")


def test_what_is_left_of_a_handover_that_failed_has_no_other_beside_it(
    socket_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A control that the kernel holds: neither a second one nor a second store worker."""
    chosen = settings(socket_dir)
    supervisor = Supervisor(chosen, "test", None)  # type: ignore[arg-type]
    held = supervisor._holdings = Holdings(chosen, "test", FdStore({}))
    started: list[float] = []
    monkeypatch.setattr(supervisor, "_start_control", started.append)
    monkeypatch.setattr("kmesh_spand.controlkeeper.Prepared", lambda _: None)
    monkeypatch.setattr("kmesh_spand.supervisor._HALT_SECONDS", 0.01)
    kill = os.kill
    try:
        with (
            subprocess.Popen(["sleep", "600"]) as control,
            subprocess.Popen(["sleep", "600"]) as worker,
        ):

            def held_back(pid: int, number: int) -> None:
                if pid != control.pid:
                    kill(pid, number)

            supervisor._control.pid, supervisor._control.worked = control.pid, True
            supervisor._control.start_at = None
            supervisor._worker.pid = worker.pid
            try:
                with monkeypatch.context() as stuck:
                    stuck.setattr(os, "kill", held_back)
                    assert "has not ended" in supervisor.halt()
                    supervisor._start_due()
                    assert not started
                    # The worker must not write for a control that is gone.
                    assert supervisor._worker.ending
                    os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)
                    supervisor._reap()
                    supervisor._start_due()
                    assert not started
                    assert supervisor._worker.pid == 0
                    # It sleeps until a process ends.
                    assert supervisor._timeout_ms() is None
                kill(control.pid, signal.SIGKILL)
                os.waitid(os.P_PID, control.pid, os.WEXITED | os.WNOWAIT)
                supervisor._reap()
                supervisor._control.start_at = time.monotonic()
                supervisor._start_due()
                assert len(started) == 1
            finally:
                for one in (control, worker):
                    # Those that were not reaped above.
                    one.kill()
    finally:
        held.close()


def test_a_worker_that_the_kernel_holds_keeps_nobody_waiting_but_control(
    socket_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is killed with control, and may be stuck in a disk: the next control must not start."""
    chosen = settings(socket_dir)
    supervisor = Supervisor(chosen, "test", None)  # type: ignore[arg-type]
    held = supervisor._holdings = Holdings(chosen, "test", FdStore({}))
    started: list[float] = []
    monkeypatch.setattr(supervisor, "_start_control", started.append)
    prepared: list[object] = []
    monkeypatch.setattr("kmesh_spand.controlkeeper.Prepared", prepared.append)
    now = time.monotonic()
    kill = os.kill
    try:
        with subprocess.Popen(["true"]) as control, subprocess.Popen(["sleep", "600"]) as worker:
            supervisor._control.pid, supervisor._control.worked = control.pid, True
            supervisor._control.start_at = None
            supervisor._worker.pid = worker.pid
            os.waitid(os.P_PID, control.pid, os.WEXITED | os.WNOWAIT)
            with monkeypatch.context() as stuck:
                stuck.setattr(os, "kill", lambda *_: None)
                supervisor._reap()
                assert supervisor._control.pid == 0
                assert supervisor._control.start_at is not None
                # The next control loads its code meanwhile.
                assert len(prepared) == 1
                supervisor._control.start_at = now
                supervisor._start_due()
                supervisor._reap()
                assert not started
                # It looks at the worker now and then, and says once that this takes long.
                allowed = supervisor._timeout_ms()
                assert allowed is not None
                assert 0 < allowed <= 1001
                monkeypatch.setattr(time, "monotonic", lambda: now + 11)
                for _ in range(2):
                    supervisor._start_due()
                assert caplog.text.count("has not ended: the kernel holds it") == 1
                assert "control starts when it has left its memory" in caplog.text
                allowed = supervisor._timeout_ms()
                assert allowed is not None
                assert 900 < allowed <= 1001
            kill(worker.pid, signal.SIGKILL)
            os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)
            supervisor._reap()
            supervisor._start_due()
            assert len(started) == 1
            assert supervisor._worker.start_at is not None
            for one in (control, worker):
                # They were reaped above.
                one.returncode = 0
    finally:
        held.close()


@pytest.mark.parametrize("ends", ["stopped", "handed over", "no process is left"])
def test_no_control_is_prepared_that_nobody_needs(
    socket_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    ends: str,
) -> None:
    chosen = settings(socket_dir)
    supervisor = Supervisor(chosen, "test", None)  # type: ignore[arg-type]
    held = supervisor._holdings = Holdings(chosen, "test", FdStore({}))
    asked: list[object] = []

    def refuse(forget: object) -> None:
        asked.append(forget)
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr("kmesh_spand.controlkeeper.Prepared", refuse)
    try:
        with subprocess.Popen(["sleep", "600"]) as control:
            supervisor._control.pid, supervisor._control.worked = control.pid, True
            supervisor._control.start_at = None
            if ends == "handed over":
                assert supervisor.halt() == ""
            else:
                supervisor._stop_signal = signal.SIGTERM if ends == "stopped" else 0
                control.kill()
                os.waitid(os.P_PID, control.pid, os.WEXITED | os.WNOWAIT)
                supervisor._reap()
            # It was reaped above.
            control.returncode = 0
        assert len(asked) == (ends == "no process is left")
        assert ("prepared later" in caplog.text) == (ends == "no process is left")
        assert supervisor._control._prepared is None
        assert (supervisor._control.start_at is None) == (ends == "handed over")
    finally:
        held.close()


def test_a_prepared_control_that_has_died_is_not_launched(
    socket_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another one takes its place at once, and no time to wait is added."""

    class Waiting:
        def __init__(self, _: object, *, gone: bool = False) -> None:
            self.pid, self.gone, self.launched, self.ended = len(made) + 7, gone, 0, 0
            made.append(self)

        def launch(self, *_: object) -> None:
            self.launched += 1

        def end(self) -> None:
            self.ended += 1

    made: list[Waiting] = []
    chosen = settings(socket_dir)
    dead: Any = Waiting(None, gone=True)
    keeper = ControlKeeper(chosen, "test", dead)
    monkeypatch.setattr("kmesh_spand.controlkeeper.Prepared", Waiting)
    held = Holdings(chosen, "test", FdStore({}))
    try:
        keeper.start(1.0, held)
        assert [(one.launched, one.ended) for one in made] == [(0, 1), (1, 0)]
        assert keeper.pid == made[1].pid
    finally:
        keeper.forget()
        held.close()


def test_whether_a_process_that_waits_has_died_is_known() -> None:
    waiting = Prepared.__new__(Prepared)
    with subprocess.Popen(["sleep", "600"]) as child:
        waiting.pid = child.pid
        try:
            assert not waiting.gone
        finally:
            child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert waiting.gone
        # It is still to be reaped.
        assert waiting.gone
