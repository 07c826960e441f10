"""Sessions for asyncio: ``AsyncSession`` has the methods of ``Session`` as coroutines.

async with await AsyncSession.connect("/run/kmesh", role=Role.TOOL) as session:
    with await session.acquire(keys, [shard]) as lease:
        ...
"""

# Deadlines are arguments: they travel to the daemon, and what comes later is given back.
# ruff: noqa: ASYNC109

from __future__ import annotations

import asyncio
import itertools
import os
import socket
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from kmesh import calls, errors, flightcalls, memory, packets
from kmesh.aiochannel import AsyncChannel
from kmesh.aiofamilies import AsyncFamilies
from kmesh.calls import Procedure, Reservations, ReserveBatch, Welcome
from kmesh.flight import Arrived, Claim, FlightCause, Progress
from kmesh.handles import COMMON, Handle, HandleKind, Preferences, SpanHandle
from kmesh.hello import Role, hello
from kmesh.index import IndexReader
from kmesh.keys import Namespace
from kmesh.layout import Shard
from kmesh.lease import Lease
from kmesh.memory import SlabMapping, Staging
from kmesh.v1 import sessions_pb2
from kmesh.wire import DEFAULT_TIMEOUT

T = TypeVar("T")


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
            flightcalls.claim(self.welcome, keys, shards, salt, device, place), timeout
        )

    async def await_flight(
        self, claim: Claim, timeout: float | None = None, *, wait: int = 0
    ) -> Arrived:
        wait = wait or next(self._waits)
        try:
            return await self._run(flightcalls.await_flight(claim, wait), timeout)
        except asyncio.CancelledError:
            await self.leave(claim.flight, wait)
            raise

    async def leave(self, flight: int, wait: int = 0) -> None:
        self._channel.forget(flightcalls.leave(flight, wait))

    async def land(self, flight: int, cause: FlightCause = FlightCause.DONE) -> None:
        self._channel.forget(flightcalls.land(flight, cause))

    async def progress(
        self, flight: int, place: str = "", timeout: float | None = None
    ) -> Progress | None:
        return await self._run(flightcalls.progress(flight, place), timeout)

    async def computed(self, flight: int, keys: int) -> None:
        self._channel.forget(flightcalls.progressed(flight, keys))

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
