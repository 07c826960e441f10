"""Sessions for asyncio: ``AsyncSession`` has the methods of ``Session`` as coroutines.

async with await AsyncSession.connect("/run/kmesh", role=Role.TOOL) as session:
    with await session.acquire(keys, [shard]) as lease:
        ...
"""

# Deadlines are arguments: they travel to the daemon, and what comes later is given back.
# ruff: noqa: ASYNC109

from __future__ import annotations

import asyncio
import collections
import itertools
import logging
import math
import os
import socket
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from google.protobuf.message import Message

from kmesh import calls, errors, memory, packets
from kmesh.aiofamilies import AsyncFamilies
from kmesh.calls import Procedure, Reservations, ReserveBatch, Welcome
from kmesh.channel import MAX_UNSENT
from kmesh.flight import Arrived, Claim, FlightCause, Progress
from kmesh.handles import COMMON, Handle, HandleKind, Preferences, SpanHandle
from kmesh.index import IndexReader
from kmesh.keys import Namespace
from kmesh.layout import Shard
from kmesh.lease import Lease
from kmesh.memory import SlabMapping, Staging
from kmesh.session import Role, hello
from kmesh.v1 import sessions_pb2
from kmesh.wire import (
    DEFAULT_TIMEOUT,
    MAX_MESSAGE_BYTES,
    MAX_UNANSWERED,
    Answer,
    Exchange,
    awaited,
)

logger = logging.getLogger("kmesh")

T = TypeVar("T")


class AsyncChannel:
    """Owns a connected socket, read and written by one event loop.

    Using it from another loop or thread is a RuntimeError, but for ``forget``.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.exchange = Exchange()
        self._sock = sock
        self._buffer = bytearray(MAX_MESSAGE_BYTES)
        self._loop = asyncio.get_running_loop()
        self._unsent: collections.deque[bytes] = collections.deque()
        self._on_close: list[Callable[[], None]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._error: BaseException | None = None
        try:
            self._loop.add_reader(sock, self._readable)
        except BaseException:
            sock.close()
            raise
        packets.close_in_child(self)

    @property
    def closed(self) -> bool:
        return self._error is not None

    @property
    def error(self) -> BaseException | None:
        """Why the connection is over; None while it is not."""
        return self._error

    def guard(self) -> None:
        """RuntimeError unless the caller runs in this channel's event loop."""
        if asyncio.get_running_loop() is not self._loop:
            raise RuntimeError("a session belongs to the event loop that opened it")

    def limit(self, max_message_bytes: int) -> None:
        """Sets how long a packet may be, in both directions."""
        self.exchange.max_message_bytes = max_message_bytes
        self._buffer = bytearray(max_message_bytes)

    async def call(self, body: Message, deadline: float) -> Answer:
        """The answer to a request. When the caller is cancelled, what comes is given back."""
        future: asyncio.Future[Answer] = self._loop.create_future()

        def done(answer: Answer | None, error: BaseException | None) -> None:
            if future.done():
                if answer is not None:
                    self._undo(body, answer)
            elif error is not None:
                future.set_exception(error)
            elif answer is not None:
                future.set_result(answer)

        if self._error is not None:
            raise errors.ConnectionClosed(f"the session is over: {self._error}")
        call = self.exchange.request(body, now=time.monotonic(), deadline=deadline, done=done)
        self._send(call.packet)
        if call.sooner:
            self._arm()
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.exception() is None:
                self._undo(body, future.result())
            else:
                self.exchange.abandon(call.id)
            raise

    def forget(self, body: Message) -> None:
        """Sends something whose answer nobody waits for, from any thread."""
        if self._error is not None:
            return
        try:
            packet = self.exchange.forget(body).packet
        except errors.ConnectionClosed:
            return
        try:
            here = asyncio.get_running_loop() is self._loop
        except RuntimeError:
            here = False
        if here:
            self._send(packet)
        elif not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._send, packet)

    def on_close(self, callback: Callable[[], None]) -> None:
        """Runs ``callback`` once when the connection is over; at once if it already is."""
        if self._error is None:
            self._on_close.append(callback)
        else:
            callback()

    def close(self, error: BaseException | None = None) -> None:
        """Ends the session. May be called again."""
        if self._error is not None:
            return
        self._error = error or errors.ConnectionClosed("closed")
        if isinstance(error, errors.ProtocolError):
            logger.error("closing the session: %s", str(error))
        self._loop.remove_reader(self._sock)
        self._loop.remove_writer(self._sock)
        if self._timer is not None:
            self._timer.cancel()
        self._sock.close()
        self._unsent.clear()
        self.exchange.close(self._error)
        callbacks, self._on_close = self._on_close, []
        for callback in callbacks:
            try:
                callback()
            except Exception:
                logger.exception("a callback for the end of a session failed")

    def forked(self) -> None:
        """Lets go of the connection in a child, where the loop does not run."""
        self._error = self._error or errors.ConnectionClosed("belongs to the parent process")
        if self._sock.fileno() >= 0:
            self._sock.close()

    def _undo(self, body: Message, answer: Answer) -> None:
        for packet in self.exchange.undo(answer, awaited(body)):
            self._send(packet)

    def _send(self, packet: bytes) -> None:
        if self._error is not None:
            return
        if self._unsent or not self._try(packet):
            self._unsent.append(packet)
            self._loop.add_writer(self._sock, self._writable)
            if len(self._unsent) > MAX_UNSENT:
                self.close(errors.ConnectionClosed("the daemon does not read its socket"))

    def _try(self, packet: bytes) -> bool:
        try:
            self._sock.send(packet, socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return False
        except OSError:
            return True  # The peer is gone; the reader finds out and ends every call.
        return True

    def _writable(self) -> None:
        while self._unsent and self._try(self._unsent[0]):
            self._unsent.popleft()
        if not self._unsent:
            self._loop.remove_writer(self._sock)

    def _readable(self) -> None:
        try:
            while self._error is None:
                packet, fds = packets.receive(self._sock, self._buffer)
                if not packet and not fds:
                    raise errors.ConnectionClosed("the daemon closed the connection")
                for undo in self.exchange.receive(packet, fds):
                    self._send(undo)
        except BlockingIOError:
            return
        except OSError as gone:
            self.close(errors.ConnectionClosed(f"the connection broke: {gone.strerror}"))
        except errors.KMeshError as error:
            self.close(error)

    def _arm(self) -> None:
        """Sets the timer to the next deadline."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        now = time.monotonic()
        deadline = self.exchange.next_deadline(now)
        if deadline < math.inf and self._error is None:
            self._timer = self._loop.call_later(max(deadline - now, 0), self._expire)

    def _expire(self) -> None:
        self.exchange.expire(time.monotonic())
        if self.exchange.unanswered > MAX_UNANSWERED:
            self.close(errors.ProtocolError("the daemon leaves requests unanswered"))
        self._arm()


class AsyncSession:
    """``kmesh.session.Session`` for one event loop; see there for what calls mean and raise.

    Cancelling a call is safe: what the daemon gives afterwards is given back.
    """

    welcome: Welcome
    epoch: int
    index: IndexReader

    def __init__(self, sock: socket.socket) -> None:
        """Over a connected socket; ``open`` says Hello. Use ``connect``."""
        self._channel = AsyncChannel(sock)
        self._slabs = memory.Slabs()
        self._channel.exchange.gone = self._slabs.forget
        self._attaching = asyncio.Lock()
        self._waits = itertools.count(1 << 32)
        self._channel.on_close(self._slabs.clear)

    async def open(self, hello: sessions_pb2.Hello, timeout: float) -> AsyncSession:
        """Says Hello and maps the index; errors as ``Session.connect``."""
        until = time.monotonic() + timeout
        try:
            self.welcome = await self._run(calls.hello(hello), timeout)
            self.epoch = self._channel.exchange.epoch or 0
            self._channel.limit(self.welcome.max_message_bytes)
            attach = memory.attach_index(self.epoch)
            self.index = await self._run(attach, until - time.monotonic())
        except errors.ConnectionClosed as closed:
            self._channel.close()
            if isinstance(self._channel.error, errors.RequestError):
                raise self._channel.error from None
            raise errors.DaemonUnavailable(f"hung up while we connected: {closed}") from None
        except errors.DeadlineExceeded:
            self._channel.close()
            raise errors.DaemonUnavailable(f"did not answer within {timeout} s") from None
        except BaseException:
            self._channel.close()
            raise
        return self

    @classmethod
    async def connect(
        cls,
        socket_dir: str | os.PathLike[str],
        *,
        role: Role,
        engine_id: str = "",
        namespace: Namespace | None = None,
        client_name: str = "kmesh",
        timeout: float = DEFAULT_TIMEOUT,
        handles: Preferences = COMMON,
    ) -> AsyncSession:
        """As ``Session.connect``."""
        until = time.monotonic() + timeout
        message = hello(role, engine_id, namespace, client_name, handles)
        while (sock := packets.try_dial(socket_dir)) is None:
            if time.monotonic() >= until:
                raise packets.busy(socket_dir)
            await asyncio.sleep(packets.REDIAL_SECONDS)
        return await cls(sock).open(message, max(until - time.monotonic(), 0.001))

    async def __aenter__(self) -> AsyncSession:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    @property
    def closed(self) -> bool:
        return self._channel.closed

    @property
    def pending(self) -> int:
        """Answers that are still to come, also those that nobody waits for."""
        return self._channel.exchange.pending + self._channel.exchange.unanswered

    async def close(self) -> None:
        self._channel.guard()
        self._channel.close()

    def on_close(self, callback: Callable[[], None]) -> None:
        """Calls ``callback`` once, in the loop, when the session has ended."""
        self._channel.guard()
        self._channel.on_close(callback)

    async def ping(self, timeout: float | None = None) -> None:
        await self._run(calls.ping(), timeout)

    async def acquire(
        self,
        keys: bytes,
        shards: Sequence[Shard],
        *,
        prefix: bool = True,
        timeout: float | None = None,
        salt: bytes = b"",
        device: str = "",
        recipes: bool = False,
        positions: bool = False,
        wait: float = 0.0,
    ) -> Lease:
        forget = self._channel.forget
        procedure = calls.acquire(
            self.welcome, keys, shards, prefix, forget, salt, device, recipes, positions, wait
        )
        return await self._run(procedure, timeout)

    async def release(self, lease: Lease) -> None:
        lease.release()

    async def reserve(self, batch: ReserveBatch, timeout: float | None = None) -> Reservations:
        return await self._run(calls.reserve(self.welcome, batch, self._channel.forget), timeout)

    async def commit(
        self, reservations: Sequence[int], offsets: Sequence[int], timeout: float | None = None
    ) -> list[int]:
        return await self._run(calls.commit(self.welcome, reservations, offsets), timeout)

    async def abort(self, reservations: Sequence[int], timeout: float | None = None) -> int:
        return await self._run(calls.abort(self.welcome, reservations), timeout)

    async def report_corrupt(
        self, lease: Lease, entries: Sequence[int], timeout: float | None = None
    ) -> int:
        return await self._run(calls.report_corrupt(self.welcome, lease, entries), timeout)

    async def claim(
        self,
        keys: bytes,
        shards: Sequence[Shard],
        *,
        timeout: float | None = None,
        salt: bytes = b"",
        device: str = "",
        place: str = "",
    ) -> Claim:
        return await self._run(
            calls.claim(self.welcome, keys, shards, salt, device, place), timeout
        )

    async def await_flight(
        self, claim: Claim, timeout: float | None = None, *, wait: int = 0
    ) -> Arrived:
        wait = wait or next(self._waits)
        try:
            return await self._run(calls.await_flight(claim, wait), timeout)
        except asyncio.CancelledError:
            await self.leave(claim.flight, wait)
            raise

    async def leave(self, flight: int, wait: int = 0) -> None:
        self._channel.forget(calls.leave(flight, wait))

    async def land(self, flight: int, cause: FlightCause = FlightCause.DONE) -> None:
        self._channel.forget(calls.land(flight, cause))

    async def progress(
        self, flight: int, place: str = "", timeout: float | None = None
    ) -> Progress | None:
        return await self._run(calls.progress(flight, place), timeout)

    async def computed(self, flight: int, keys: int) -> None:
        self._channel.forget(calls.progressed(flight, keys))

    @property
    def families(self) -> AsyncFamilies:
        return AsyncFamilies(self._run)

    async def slab(self, slab_id: int, timeout: float | None = None) -> SlabMapping:
        found = self._slabs.get(slab_id)
        if found is None:
            async with self._attaching:
                found = self._slabs.get(slab_id)
                if found is None:
                    found = await self._run(memory.attach_slab(self.welcome, slab_id), timeout)
                    self._slabs.keep(found)
        return found

    async def export_slab(
        self, slab_id: int, timeout: float | None = None, kind: HandleKind | None = None
    ) -> Handle:
        return (await self._run(memory.export_slab(slab_id, kind), timeout))[0]

    async def export_span(
        self,
        lease: Lease,
        key: int,
        shard: int = 0,
        *,
        kind: HandleKind = HandleKind.DMA_BUF,
        timeout: float | None = None,
    ) -> SpanHandle:
        lease.entry(key, shard)
        return await self._run(memory.export_span(lease, lease.index(key, shard), kind), timeout)

    async def staging(self, size: int, timeout: float | None = None) -> Staging:
        return await self._run(memory.attach_staging(size), timeout)

    async def _run(self, procedure: Procedure[T], timeout: float | None) -> T:
        self._channel.guard()
        deadline = time.monotonic() + (DEFAULT_TIMEOUT if timeout is None else timeout)
        try:
            body = next(procedure)
            while True:
                try:
                    answer = await self._channel.call(body, deadline)
                except BaseException as failed:
                    body = procedure.throw(failed)
                else:
                    body = procedure.send(answer)
        except StopIteration as done:
            value: T = done.value
            return value
