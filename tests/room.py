"""The parts of control in this process, with a store worker that works when it is told to."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from kmesh.mapping import Mapping
from kmesh.v1 import session_socket_pb2, sessions_pb2
from kmesh_spand import flags, ipc, messages
from kmesh_spand.control.connection import Connection
from kmesh_spand.control.process import Control
from kmesh_spand.jobs import Crews
from kmesh_spand.settings import Settings
from kmesh_spand.storage import Storage
from kmesh_spand.worker import Ground, Worker


def settings(socket_dir: Path, **more: object) -> Settings:
    """Settings as flags would give them; small unless said otherwise."""
    values = {
        "socket_dir": socket_dir,
        "host_memory": "4MiB",
        "staging_memory": "2MiB",
        "max_spans": 256,
        "watch_events": 64,
        "remembered_keys": 64,
        **more,
    }
    argv = [f"--{name.replace('_', '-')}={value}" for name, value in values.items()]
    return flags.parse(argv, {})[1].settings


class Room:
    """One control, one worker, and connections to the first that are socket pairs.

    Nothing runs by itself: ``turn`` lets the event loop see what there is and the worker do its
    jobs.
    """

    def __init__(self, socket_dir: Path, **more: object) -> None:
        chosen = settings(socket_dir, **more)
        socket_dir.mkdir(exist_ok=True)
        self.loop = asyncio.new_event_loop()
        self.supervisor, theirs = ipc.pair()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(str(socket_dir / "session.sock"))
        self._listener.listen()
        self._listener.setblocking(False)
        storage = Storage(chosen)
        self._slabs = {n: (os.dup(slab.fd), slab.size) for n, slab in storage.slabs.items()}
        self._jobs, workers_end = ipc.pair()
        self._jobs.setblocking(False)
        self._worker = Worker(chosen, self._jobs, Ground(self._slabs))
        # Control takes the storage's descriptors, as a forked child has its own.
        self.control = Control(self.loop, chosen, "test", storage.shared, self._listener, theirs, 0)
        self.handler = self.control._handler
        self.core = self.handler.core
        self.staging = self.handler.staging
        self.control._worker.attach(workers_end.detach(), 0, 0)
        for number, slab in self._worker._slabs.items():
            ipc.send(self._jobs, messages.Populated(number, slab.capacity, False))
        self.control._worker.check()
        self.turn(lambda: self.control._worker._started)

    def turn(self, until: Callable[[], Any] | None = None, seconds: float = 30.0) -> None:
        """Runs what is ready; with ``until``, again and again while it is not true."""
        deadline = time.monotonic() + seconds
        while True:
            self.loop.run_until_complete(asyncio.sleep(0))
            self._work()
            if until is None or until():
                return
            assert time.monotonic() < deadline, "never happened"

    def _work(self) -> None:
        def now(job: Callable[..., object], message: ipc.AnyMessage) -> object:
            return job(message)

        with contextlib.suppress(BlockingIOError, EOFError):
            while True:
                message, fd = ipc.receive(self._jobs)
                self._worker.take(message, fd, Crews(now, now, now, now))

    def _staging(self) -> list[Mapping]:
        """What the worker has mapped of sessions, and was not told to forget."""
        return list(self._worker._staging.values())

    def connect(self) -> tuple[socket.socket, Connection]:
        """A client's end, non-blocking, and control's connection behind it."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        known = set(self.control._listener._connections)
        self.control._listener._accepted(theirs)
        (connection,) = self.control._listener._connections - known
        return ours, connection

    def session(self) -> tuple[socket.socket, Connection]:
        """A connection whose Hello was accepted."""
        sock, connection = self.connect()
        hello = sessions_pb2.Hello(
            protocol_version=1, layout_version=1, role=sessions_pb2.ROLE_TOOL
        )
        sock.send(session_socket_pb2.Request(id=1, hello=hello).SerializeToString())
        self.turn(lambda: connection.member is not None)
        answer = session_socket_pb2.Response.FromString(sock.recv(1 << 17))
        assert answer.HasField("welcome")
        return sock, connection

    def close(self) -> None:
        self.control._listener.close("the test is over")
        self.turn()
        self.control._workers.close()
        self.control._crowd.close()
        self.control._supervisor.close()
        self.loop.run_until_complete(self.loop.shutdown_default_executor())
        self.loop.close()
        applier = self.handler.applier
        applier._catalog.release()
        applier._owners.release()
        self.control._catalog.close()
        for index in applier._indexes.values():
            index._mapping.close()  # type: ignore[attr-defined]
        for fd, _ in (*self.handler._indexes.values(), *self.handler.broker._slabs.values()):
            os.close(fd)
        for fd, _ in self._slabs.values():
            os.close(fd)
        for mapping in (*(slab.mapping for slab in self._worker._slabs.values()), *self._staging()):
            mapping.close()
        for sock in (self.supervisor, self._jobs, self._listener):
            sock.close()


@contextlib.contextmanager
def room(socket_dir: Path, **more: object) -> Iterator[Room]:
    made = Room(socket_dir, **more)
    try:
        yield made
    finally:
        made.close()
