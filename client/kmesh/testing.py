"""A daemon inside the test: ``FakeDaemon`` speaks the real protocol, without a process.

    with FakeDaemon() as daemon, daemon.connect(role=Role.TOOL) as session:
        ...

Sessions are real ones over a socket pair; what answers is ``kmesh.fake_model``.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import math
import os
import select
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from kmesh import errors, packets
from kmesh.fake_model import Model
from kmesh.fake_state import Limits, Peer, Span
from kmesh.handles import COMMON, Preferences
from kmesh.hello import hello
from kmesh.keys import Namespace
from kmesh.layout import Shard
from kmesh.session import Role, Session
from kmesh.v1 import common_pb2, session_socket_pb2
from kmesh.wire import DEFAULT_TIMEOUT

__all__ = ["FakeDaemon", "Limits"]

T = TypeVar("T")

#: How long an answer waits for its client to read those before it.
_PATIENCE_MS = 5000


@dataclass(eq=False, slots=True)
class _Connection:
    sock: socket.socket
    peer: Peer | None = None


@dataclass(order=True, slots=True)
class _Late:
    """An answer that is held back."""

    due: float
    number: int
    connection: _Connection = field(compare=False)
    packet: bytes = field(compare=False)
    fd: int = field(compare=False)


class FakeDaemon:
    """One thread that serves sessions; thread-safe.

    ``kind`` below is a request's name in ``kmesh.v1.Request``: "acquire", "hello", and so on.

    Args:
        limits: settings.
        socket_dir: also listen there, for clients that connect by path.
    """

    def __init__(
        self, limits: Limits | None = None, *, socket_dir: str | os.PathLike[str] | None = None
    ) -> None:
        self.limits = limits or Limits()
        self._model = Model(self.limits)
        self._lock = threading.RLock()
        self._selector = selectors.DefaultSelector()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._buffer = bytearray(self.limits.max_message_bytes)
        self._connections: set[_Connection] = set()
        self._late: list[_Late] = []
        self._count = 0
        self._refusals: dict[str, list[errors.RequestError]] = {}
        self._delays: dict[str, list[float]] = {}
        self._held: dict[str, list[_Late]] = {}
        self._stopping = False
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._listener: socket.socket | None = None
        if socket_dir is not None:
            self._path = os.path.join(socket_dir, packets.SOCKET_NAME)
            self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._listener.bind(self._path)
            self._listener.listen()
            self._listener.setblocking(False)
            self._selector.register(self._listener, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="kmesh-fake-daemon", daemon=True)
        self._thread.start()

    def connect(
        self,
        *,
        role: Role = Role.TOOL,
        engine_id: str = "",
        namespace: Namespace | None = None,
        client_name: str = "kmesh",
        timeout: float = DEFAULT_TIMEOUT,
        handles: Preferences = COMMON,
    ) -> Session:
        """A session, as ``Session.connect`` makes one."""
        return Session(
            self.dial(), hello(role, engine_id, namespace, client_name, handles), timeout
        )

    def dial(self) -> socket.socket:
        """A connected socket on which nothing was said yet; the caller owns it."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        theirs.setblocking(False)
        self._add(ours)
        return theirs

    def close(self) -> None:
        """Ends every session and forgets everything."""
        with self._lock:
            if self._stopping:
                return
            self._stopping = True
            os.eventfd_write(self._wake, 1)
        self._thread.join()

    def __enter__(self) -> FakeDaemon:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def refuse(self, kind: str, error: errors.RequestError, times: int = 1) -> None:
        """The next requests of that kind are refused."""
        with self._lock:
            self._refusals.setdefault(kind, []).extend([error] * times)

    def delay(self, kind: str, seconds: float, times: int = 1) -> None:
        """The next requests of that kind are done at once and answered later."""
        with self._lock:
            self._delays.setdefault(kind, []).extend([seconds] * times)

    @contextlib.contextmanager
    def hold(self, kind: str) -> Iterator[None]:
        """Requests of that kind are done at once, and answered when the block ends.

        Raises:
            ValueError: they are held already.
        """
        with self._lock:
            if kind in self._held:
                raise ValueError(f"{kind} is held already")
            self._held[kind] = []
        try:
            yield
        finally:
            with self._lock:
                for answer in self._held.pop(kind, ()):
                    answer.due = time.monotonic()
                    heapq.heappush(self._late, answer)
                if not self._stopping:
                    os.eventfd_write(self._wake, 1)

    def corrupt(self, key: bytes, shard: Shard) -> None:
        """Flips a bit of a stored span. KeyError if it is not stored."""
        with self._lock:
            span = self._model.spans[key, shard.code()]
            self._model.slabs[span.slab].memory.view(span.offset, span.length)[0] ^= 1

    def encode(self, family: str, salt: bytes = b"") -> int:
        """Makes recipes of a family's members where they share bytes with its base; how many.

        Needs the extra ``codec``.
        """
        with self._lock:
            return self._model.families.encode(salt, family, self._model.slabs)

    def disconnect(self) -> None:
        """Closes every connection; what is stored stays."""
        with self._lock:
            for connection in list(self._connections):
                self._drop(connection)

    def restart(self) -> None:
        """A new boot with a new epoch, which knows nothing of the old one."""
        with self._lock:
            self.disconnect()
            self._model.close()
            self._model = Model(self.limits)

    @property
    def epoch(self) -> int:
        return self._model.epoch

    @property
    def sessions(self) -> int:
        return self._look(lambda model: len(model.peers))

    @property
    def leases(self) -> int:
        """Leases held, over all sessions."""
        return self._look(lambda model: sum(len(p.leases) for p in model.peers.values()))

    @property
    def reservations(self) -> int:
        """Reservations that are open, over all sessions."""
        return self._look(lambda model: sum(len(p.reservations) for p in model.peers.values()))

    @property
    def flights(self) -> int:
        """Flights that are in the air."""
        return self._look(lambda model: len(model.flights.flights))

    @property
    def waits(self) -> int:
        """Answers that are owed to those who wait for flights."""
        return self._look(lambda model: sum(len(f.waits) for f in model.flights.flights.values()))

    @property
    def spans(self) -> int:
        """Committed spans, each once."""

        def count(model: Model) -> int:
            spans: dict[int, Span] = {id(s): s for s in model.spans.values() if s.committed}
            return len(spans)

        return self._look(count)

    def _look(self, question: Callable[[Model], T]) -> T:
        with self._lock:
            return question(self._model)

    def _add(self, sock: socket.socket) -> None:
        with self._lock:
            connection = _Connection(sock)
            self._connections.add(connection)
            self._selector.register(sock, selectors.EVENT_READ, connection)
            os.eventfd_write(self._wake, 1)

    def _run(self) -> None:
        while True:
            with self._lock:
                if self._stopping:
                    break
                due = min(
                    self._late[0].due if self._late else math.inf,
                    self._model.flights.next_deadline,
                )
            timeout = None if due == math.inf else max(due - time.monotonic(), 0)
            ready = self._selector.select(timeout)
            with self._lock:
                for key, _ in ready:
                    if isinstance(key.data, _Connection):
                        if key.data in self._connections:
                            self._read(key.data)
                    elif key.fileobj is self._listener:
                        self._accept()
                    else:
                        os.eventfd_read(self._wake)
                self._model.flights.expire()
                self._send_late()
        self._finish()

    def _accept(self) -> None:
        assert self._listener is not None
        with contextlib.suppress(BlockingIOError):
            sock, _ = self._listener.accept()
            sock.setblocking(False)
            self._add(sock)

    def _read(self, connection: _Connection) -> None:
        try:
            packet, fds = packets.receive(connection.sock, self._buffer)
        except BlockingIOError:
            return
        except (OSError, errors.ProtocolError):
            return self._drop(connection)
        for fd in fds:
            os.close(fd)
        try:
            request = session_socket_pb2.Request.FromString(packet)
        except DecodeError:
            return self._drop(connection)
        if not packet or fds:
            return self._drop(connection)
        self._answer(connection, request)

    def _answer(self, connection: _Connection, request: session_socket_pb2.Request) -> None:
        kind = request.WhichOneof("body") or ""
        response = session_socket_pb2.Response(id=request.id, epoch=self._model.epoch)
        fd = -1
        try:
            refusals = self._refusals.get(kind)
            if refusals:
                raise refusals.pop(0)
            if kind == "hello" and connection.peer is None:
                connection.peer, welcome = self._model.hello(request.hello)
                response.welcome.CopyFrom(welcome)
            elif connection.peer is None or kind in ("", "hello"):
                raise errors.Unauthenticated("Hello comes first, and once", field="body")
            else:

                def reply(later: Message | errors.RequestError) -> None:
                    if isinstance(later, errors.RequestError):
                        response.status.CopyFrom(_status(later))
                    else:
                        getattr(response, kind).CopyFrom(later)
                    self._respond(kind, connection, response, -1)

                body, seconds = getattr(request, kind), request.deadline_ms / 1000
                answer, fd = self._model.handle(connection.peer, body, reply, seconds)
                if answer is None:
                    return
                getattr(response, _ANSWERS.get(kind, kind)).CopyFrom(answer)
        except errors.RequestError as refused:
            response.status.CopyFrom(_status(refused))
        self._respond(kind, connection, response, fd)

    def _respond(
        self, kind: str, connection: _Connection, response: session_socket_pb2.Response, fd: int
    ) -> None:
        delays = self._delays.get(kind)
        due = time.monotonic() + delays.pop(0) if delays else 0.0
        self._count += 1
        late = _Late(due, self._count, connection, response.SerializeToString(), fd)
        if kind in self._held:
            self._held[kind].append(late)
        elif due:
            heapq.heappush(self._late, late)
        else:
            self._send(late)

    def _send_late(self) -> None:
        while self._late and self._late[0].due <= time.monotonic():
            self._send(heapq.heappop(self._late))

    def _send(self, answer: _Late) -> None:
        fds = [answer.fd] if answer.fd >= 0 else []
        try:
            if answer.connection in self._connections:
                self._send_packet(answer.connection.sock, answer.packet, fds)
        except OSError:
            self._drop(answer.connection)
        finally:
            for fd in fds:
                os.close(fd)

    def _send_packet(self, sock: socket.socket, packet: bytes, fds: list[int]) -> None:
        """Waits for a client that is slow to read; OSError if it does not read at all."""
        try:
            socket.send_fds(sock, [packet], fds, socket.MSG_NOSIGNAL)
        except BlockingIOError:
            poll = select.poll()
            poll.register(sock, select.POLLOUT)
            poll.poll(_PATIENCE_MS)
            socket.send_fds(sock, [packet], fds, socket.MSG_NOSIGNAL)

    def _drop(self, connection: _Connection) -> None:
        if connection not in self._connections:
            return
        self._connections.remove(connection)
        self._selector.unregister(connection.sock)
        connection.sock.close()
        if connection.peer is not None:
            self._model.end(connection.peer.id)

    def _finish(self) -> None:
        with self._lock:
            self.disconnect()
            for late in itertools.chain(self._late, *self._held.values()):
                self._send(late)
            self._late.clear()
            self._held.clear()
            self._model.close()
            if self._listener is not None:
                self._listener.close()
                os.unlink(self._path)
            self._selector.close()
            os.close(self._wake)


def _status(refused: errors.RequestError) -> common_pb2.Status:
    code = common_pb2.Code.ValueType(refused.code)
    return common_pb2.Status(code=code, message=refused.message, field=refused.field)


_ANSWERS = {
    "attach_index": "index",
    "attach_slab": "slab",
    "attach_staging": "staging",
    "ping": "pong",
}
