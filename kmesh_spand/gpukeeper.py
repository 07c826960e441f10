"""The supervisor's part in GPU memory: it keeps device workers alive, and holds what they made.

It needs no CUDA for that: the memory lives as long as the file descriptors do.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator

import msgspec

from kmesh_spand import child, ipc, logs, messages
from kmesh_spand.backoff import Backoff
from kmesh_spand.fdstore import FdStore
from kmesh_spand.inherit import Named, gpu_name
from kmesh_spand.settings import Settings
from kmesh_spand.storage import Memory

logger = logging.getLogger(__name__)

#: A driver that starts may take so long; one that runs is not silent for so long.
_START_SECONDS = 180.0
_SILENT_SECONDS = 30.0
#: One that was killed and is stuck in the driver ends when that lets it go. It is said after this.
_END_SECONDS = 10.0
#: At the daemon's own end it is not waited for longer.
_CLOSE_SECONDS = 5.0
#: Deaths before the first success after which the daemon gives up.
_TRIES = 3


class _Worker:
    """One device worker, over all of its lives.

    Attributes:
        ending: it was killed, and is not gone yet. late_at: when that is said to take long.
        at_once: it was not its own fault, so the next one need not wait.
    """

    def __init__(self, gpu: int) -> None:
        self.gpu = gpu
        self.pid = 0
        self.lives = 0
        self.channel: socket.socket | None = None
        self.backoff = Backoff()
        self.start_at: float | None = 0.0
        self.kill_at: float | None = None
        self.late_at: float | None = None
        self.ending = False
        self.at_once = False
        self.state: messages.GpuState | None = None
        self.failed: messages.GpuFailed | None = None
        self.was_ready = False


class GpuKeeper:
    """All device workers of a daemon.

    Attributes:
        slabs: GPU memory that was made, by number; owned by this object.
        failure: why the daemon can't have what it was started for, if it can't.

    Args:
        tell: where control is told what happens; a file descriptor stays ours.
        store: where slabs are put, too.
    """

    def __init__(
        self,
        settings: Settings,
        tell: Callable[[ipc.AnyMessage, int | None], None],
        store: FdStore,
    ) -> None:
        self._settings = settings
        self._store = store
        self._tell = tell
        self._plan = settings.gpu_slabs()
        self._workers = [_Worker(gpu) for gpu in range(len(settings.gpu))]
        self._life: tuple[int, ...] = ()
        self._unproved: dict[int, str] = {}
        self.slabs: dict[int, Memory] = {}
        self.failure: messages.GpuFailed | None = None

    def begin(self, life: int, inherited: dict[int, tuple[Memory, str]]) -> None:
        """Once, before anything is started.

        Args:
            life: file descriptor of the lock that workers hold as long as they live.
            inherited: slabs of an earlier daemon, and the UUIDs of their GPUs. They become this
                object's. Nobody is told of them before a worker has mapped them.
        """
        self._life = (life,)
        for number, (memory, device) in inherited.items():
            self.slabs[number] = memory
            self._unproved[number] = device

    def named(self) -> Iterator[Named]:
        """The slabs that are there, with the names under which another daemon takes them."""
        for worker in self._workers:
            for number in self._numbers(worker):
                if number in self.slabs:
                    yield Named(self._name(worker, number), self.slabs[number].fd)

    def _numbers(self, worker: _Worker) -> list[int]:
        return [plan.slab for plan in self._plan if plan.gpu == worker.gpu]

    def _name(self, worker: _Worker, slab: int) -> str:
        found = worker.state.device if worker.state is not None else ""
        return gpu_name(slab, self._unproved.get(slab, found))

    @property
    def ready(self) -> bool:
        """Whether every GPU has had all of its slabs."""
        return all(worker.was_ready for worker in self._workers)

    @property
    def sockets(self) -> list[socket.socket]:
        """To hear from."""
        return [worker.channel for worker in self._workers if worker.channel is not None]

    @property
    def moments(self) -> list[float]:
        """When something is due."""
        return [
            at
            for worker in self._workers
            for at in (worker.start_at, worker.kill_at, worker.late_at)
            if at is not None
        ]

    @property
    def pids(self) -> list[int]:
        """Of the workers that run."""
        return [worker.pid for worker in self._workers if worker.pid]

    def ends(self, pid: int) -> bool:
        """Whether it is a worker that ends with a control that is gone."""
        return any(worker.pid == pid and worker.at_once for worker in self._workers)

    def known(self) -> Iterator[tuple[ipc.AnyMessage, int | None]]:
        """What a new control must be told."""
        for number, memory in self.slabs.items():
            if number not in self._unproved:
                yield messages.GpuSlab(number, memory.size), memory.fd
        for worker in self._workers:
            yield messages.GpuWorker(worker.gpu, max(worker.lives - 1, 0), 0), None
            if worker.state is not None:
                yield worker.state, None
            if worker.failed is not None:
                yield worker.failed, None

    def start_due(self, now: float) -> None:
        """Starts what is due, ends what has been silent for too long."""
        for worker in self._workers:
            if worker.start_at is not None and now >= worker.start_at:
                worker.start_at = None
                try:
                    self._start(worker, now)
                except OSError as failed:
                    logger.error("a device worker could not be started: %s", failed)
                    worker.start_at = worker.backoff.died(now)
            if worker.kill_at is not None and now >= worker.kill_at:
                logger.error("ending a device worker that is silent", extra={"gpu": worker.gpu})
                self._kill(worker)
            if worker.late_at is not None and now >= worker.late_at:
                worker.late_at = None
                text = (
                    f"gpu: the device worker of {self._settings.gpu[worker.gpu]} was killed, and "
                    f"has not ended: the driver holds it (process {worker.pid})"
                )
                logger.error("%s", text, extra={"gpu": worker.gpu})
                self._tell(messages.GpuFailed(worker.gpu, text, False), None)

    def _start(self, worker: _Worker, now: float) -> None:
        ours, theirs = ipc.pair()
        with theirs:
            try:
                to_control, from_control = ipc.pair()
            except OSError:
                ours.close()
                raise
            with to_control, from_control:
                self._fork(worker, ours, theirs, from_control)
                ours.setblocking(False)
                worker.channel = ours
                worker.lives += 1
                worker.backoff.started(now)
                worker.kill_at = now + _START_SECONDS
                news = messages.GpuWorker(worker.gpu, worker.lives - 1, worker.pid)
                self._tell(news, to_control.fileno())

    def _fork(
        self,
        worker: _Worker,
        ours: socket.socket,
        theirs: socket.socket,
        from_control: socket.socket,
    ) -> None:
        settings, gpu = self._settings, worker.gpu
        nothing = Memory(-1, 0)
        pieces = [
            (plan.slab, plan.size, self.slabs.get(plan.slab, nothing).fd)
            for plan in self._plan
            if plan.gpu == gpu
        ]

        def main() -> int:
            logs.configure(f"gpu{gpu}", level=settings.log_level, form=settings.log_format)
            from kmesh_spand import gpuworker

            made = [gpuworker.Piece(*piece) for piece in pieces]
            return gpuworker.run(settings, gpu, theirs, from_control, made)

        held = (fd for _, _, fd in pieces if fd >= 0)
        keep = [theirs.fileno(), from_control.fileno(), *held, *self._life]
        worker.pid = child.fork_or_close(ours, f"gpu{gpu}", keep, main)

    def restart(self, gpu: int) -> None:
        """Ends a worker that control has given up; the next one follows."""
        for worker in self._workers:
            if worker.gpu == gpu and worker.pid:
                self._kill(worker)

    def end_lives(self) -> None:
        """Ends all workers: control is gone, and their jobs are for nobody.

        It is not waited for. The next control uses a GPU's slabs when the next worker is ready,
        and that one starts when this one is gone.
        """
        for worker in self._workers:
            if worker.pid:
                worker.at_once = True
                self._kill(worker)

    def _kill(self, worker: _Worker) -> None:
        worker.kill_at = None
        # One that was reaped has no process any more: its number may be another's by now.
        if worker.pid and not worker.ending:
            worker.ending = True
            worker.late_at = time.monotonic() + _END_SECONDS
            os.kill(worker.pid, signal.SIGKILL)
            self._not_ready(worker)

    def tell(self, slab: int) -> None:
        """Control asks for a slab that it has no file descriptor of."""
        memory = self.slabs.get(slab)
        if memory is not None and slab not in self._unproved:
            self._tell(messages.GpuSlab(slab, memory.size), memory.fd)

    def hear(self, fd: int) -> bool:
        """Takes a message from the socket with that descriptor, if it is one of ours."""
        for worker in self._workers:
            if worker.channel is not None and worker.channel.fileno() == fd:
                self._hear(worker, worker.channel)
                return True
        return False

    def _hear(self, worker: _Worker, channel: socket.socket) -> bool:
        """Takes one message; False if there was none."""
        try:
            message, fd = ipc.receive(channel)
        except BlockingIOError:
            return False
        except (EOFError, OSError):
            # SIGCHLD tells the rest.
            channel.close()
            worker.channel = None
            return False
        match message:
            case messages.GpuSlab():
                self._slab(worker, message, fd)
            case messages.GpuState():
                if not worker.ending:
                    self._state(worker, message)
            case messages.GpuFailed():
                worker.failed = message
                self._tell(message, None)
            case _:
                logger.error("unexpected message %s", type(message).__name__)
        return True

    def _slab(self, worker: _Worker, message: messages.GpuSlab, fd: int | None) -> None:
        if fd is None:
            # It is freed with its maker; the next one makes it anew.
            logger.error("no file descriptor is left for a slab", extra={"slab": message.slab})
            self._kill(worker)
            return
        self.slabs[message.slab] = Memory(fd, message.size)
        self._store.put(self._name(worker, message.slab), fd)
        self._tell(message, fd)
        if worker.kill_at is not None:
            worker.kill_at = time.monotonic() + _START_SECONDS

    def _state(self, worker: _Worker, state: messages.GpuState) -> None:
        mine = [number for number in self._numbers(worker) if number in self._unproved]
        if any(self._unproved[number] != state.device for number in mine):
            self._refuse(worker, f"it is on another GPU than {state.device}")
            worker.at_once = True
            self._kill(worker)
            return
        if state.ready:
            for number in mine:
                del self._unproved[number]
                self._tell(messages.GpuSlab(number, self.slabs[number].size), self.slabs[number].fd)
        others = [w.state.device for w in self._workers if w.state and w is not worker]
        if state.device in others:
            text = f"gpu: {state.device} is named twice"
            self.failure = messages.GpuFailed(worker.gpu, text, True)
        worker.was_ready |= state.ready
        worker.kill_at = time.monotonic() + (_SILENT_SECONDS if state.ready else _START_SECONDS)
        if state != worker.state:
            worker.state = state
            if state.ready:
                worker.failed = None
            self._tell(state, None)

    def _refuse(self, worker: _Worker, why: str) -> None:
        """Gives up the inherited slabs of a GPU: the next worker makes new ones."""
        logger.error("GPU memory of the earlier daemon is given up: %s", why)
        for number in self._numbers(worker):
            if number in self._unproved:
                self._store.remove(self._name(worker, number))
                del self._unproved[number]
                os.close(self.slabs.pop(number).fd)

    def died(self, pid: int, how: str) -> None:
        """A worker was reaped."""
        now = time.monotonic()
        worker = next(worker for worker in self._workers if worker.pid == pid)
        at_once = worker.at_once
        worker.pid = 0
        self._ended(worker)
        worker.start_at = now if at_once else worker.backoff.died(now)
        self._tell(messages.GpuWorker(worker.gpu, worker.lives - 1, 0), None)
        if worker.failed is not None:
            logger.error("%s", worker.failed.error, extra={"gpu": worker.gpu})
        if not worker.was_ready:
            unproved = self._unproved.keys() & self._numbers(worker)
            if unproved and (worker.failed is not None or worker.lives >= _TRIES):
                self._refuse(worker, worker.failed.error if worker.failed else how)
                worker.failed, worker.start_at = None, now
            elif worker.failed is not None:
                self.failure = worker.failed
            elif worker.lives >= _TRIES and not at_once:
                text = f"gpu: the device worker of {self._settings.gpu[worker.gpu]} died: {how}"
                self.failure = messages.GpuFailed(worker.gpu, text, False)

    def _ended(self, worker: _Worker) -> None:
        # What it sent before its end is still to be read: memory must not be lost.
        while worker.channel is not None and self._hear(worker, worker.channel):
            pass
        if worker.channel is not None:
            worker.channel.close()
            worker.channel = None
        worker.kill_at = worker.late_at = None
        worker.ending = worker.at_once = False
        self._not_ready(worker)

    def _not_ready(self, worker: _Worker) -> None:
        if worker.state is not None and worker.state.ready:
            worker.state = msgspec.structs.replace(worker.state, ready=False, free=0)
            self._tell(worker.state, None)

    def stop(self) -> None:
        """Starts nothing any more."""
        for worker in self._workers:
            worker.start_at = worker.kill_at = worker.late_at = None

    def close(self) -> None:
        """Ends the workers, and gives the memory back.

        A worker that the driver holds is left to the system: it has been killed.
        """
        pids = self.pids
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        child.wait(pids, _CLOSE_SECONDS)
        for worker in self._workers:
            if worker.channel is not None:
                worker.channel.close()
        for memory in self.slabs.values():
            os.close(memory.fd)
        self.slabs.clear()
