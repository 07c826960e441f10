"""The control process: its parts, put together, and what it hears from the supervisor."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import socket
from functools import partial
from typing import TYPE_CHECKING

from kmesh.errors import ConfigError
from kmesh.index import IndexWriter
from kmesh.mapping import Mapping
from kmesh.v1 import sessions_pb2
from kmesh_spand import ipc, messages
from kmesh_spand.control.applier import Applier
from kmesh_spand.control.broker import Exported
from kmesh_spand.control.crowd import Crowd
from kmesh_spand.control.diskjobs import DiskJobs
from kmesh_spand.control.gpus import Gpus
from kmesh_spand.control.growth import Growth, SlabState
from kmesh_spand.control.handler import Handler
from kmesh_spand.control.limits import MAX_BATCH
from kmesh_spand.control.link import Link
from kmesh_spand.control.listener import Listener
from kmesh_spand.control.native import NativeBatch
from kmesh_spand.control.observer import Observer
from kmesh_spand.control.operator import Operator
from kmesh_spand.control.readiness import Readiness
from kmesh_spand.control.report import Report
from kmesh_spand.control.staging import StagingPool
from kmesh_spand.control.storeworker import StoreWorker
from kmesh_spand.control.web import Web
from kmesh_spand.control.workers import Workers
from kmesh_spand.core import events
from kmesh_spand.core.config import CoreConfig
from kmesh_spand.core.core import Core
from kmesh_spand.core.policies import make_policy
from kmesh_spand.core.record import RECORD_BYTES
from kmesh_spand.core.records import read
from kmesh_spand.core.tenants import OWNER_BYTES, SlabOwner, decode_owner
from kmesh_spand.memory import reopen_read_only
from kmesh_spand.settings import GRPC_SOCKET, METRICS_SOCKET, Settings
from kmesh_spand.storage import Shared, owners_offset

if TYPE_CHECKING:
    from kmesh_spand.control.metrics import Page
    from kmesh_spand.control.rpc import RpcServer
    from kmesh_spand.tracing import Tracer

logger = logging.getLogger(__name__)

_TICK_SECONDS = 0.25
_ASK_SECONDS = 1.0
#: A store worker maps slabs and starts threads.
_START_SECONDS = 60.0


class Control:
    """One life of the control process."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        settings: Settings,
        version: str,
        storage: Shared,
        listener: socket.socket,
        supervisor: socket.socket,
        restarts: int,
    ) -> None:
        self._loop = loop
        self._gpus = gpus = Gpus(settings)
        self._settings = settings
        self._wake = asyncio.Event()
        self._healthy: bool | None = None
        self._catalog = Mapping(storage.catalog.fd, storage.catalog.size, writable=True)
        writers = {}
        for group, index in storage.indexes.items():
            mapping = Mapping(index.fd, index.size, writable=True)
            writers[group] = IndexWriter(mapping, storage.epoch)
            writers[group].set_slab_count(max(storage.slabs) + 1 + len(settings.gpu_slabs()))
        self._owners = self._catalog.view(owners_offset(settings))
        exported = _export(storage, gpus)
        observer = Observer(settings.slow_call_ms, _tracer(settings, version))
        self._growth = Growth(
            {
                number: SlabState.of(slab.size, sealed=number in storage.sealed)
                for number, slab in storage.slabs.items()
                if number not in storage.spares
            },
            self._event,
        )
        self._spares = {number: storage.slabs[number].size for number in storage.spares}
        make = partial(
            StoreWorker,
            loop,
            timeout=settings.copy_timeout_ms / 1000,
            verify_rate=settings.verify_rate,
            event=self._event,
            observer=observer,
        )
        disk = settings.disk_limits()
        self._disk = DiskJobs(loop, self._event) if disk is not None else None
        self._worker = make(
            "store worker",
            start_seconds=_START_SECONDS,
            growth=self._growth,
            restart=self._restart_worker,
            disk=self._disk,
        )
        # How long a device worker may take to start is the supervisor's to say.
        devices = [
            make(
                f"device worker {gpu}",
                start_seconds=None,
                growth=None,
                fell_back=self._growth.fell_back,
                restart=partial(self._restart_worker, gpu=gpu),
            )
            for gpu in range(len(settings.gpu))
        ]
        self._workers = Workers(self._worker, devices, gpus.gpu_of)
        self._added: set[int] = set()
        self._ask_at = 0.0
        staging = StagingPool(
            loop, self._workers, total=settings.staging_memory, each=settings.session_staging
        )
        batch = NativeBatch()
        core = Core(
            CoreConfig(
                max_spans=settings.max_spans,
                span_tokens=settings.span_tokens,
                max_batch=MAX_BATCH,
                remembered_keys=settings.remembered_keys,
            ),
            make_policy(settings.memory_policy, settings.max_spans, batch),
            tenancy=settings.tenancy(),
            batch=batch,
            disk=disk,
        )
        self._handler = Handler(
            loop,
            settings,
            version,
            core,
            staging,
            exported,
            self._workers.export,
            storage.epoch,
            observer,
        )
        self._handler.applier = Applier(
            self._catalog.view(0, owners_offset(settings)),
            self._owners,
            writers,
            self._workers,
            staging,
            self._handler.reply,
            self._handler.journal.span,
            self._handler.broker.gpus.tier_device,
            self._disk,
            lambda slab: self._supervisor.send(messages.GivenUp(slab)),
        )
        self._supervisor = Link(loop, supervisor, self._heard, self._orphaned)
        self._crowd = Crowd(self._handler, os.path.join(settings.socket_dir, GRPC_SOCKET))
        self._readiness = Readiness(
            loop,
            self._handler,
            self._worker,
            self._growth,
            self._crowd,
            gpus,
            settings.stuck_ms,
            self._tell_supervisor,
            self._disk,
        )
        self._report = Report(
            self._handler, self._worker, self._growth, restarts, self._readiness, gpus, self._disk
        )
        self._operator = Operator(loop, self._handler, restarts, self._ask_to_stop)
        self._recover()
        self._listener = Listener(loop, self._handler, listener, self._crowd)
        # Slabs of a GPU come when its worker has found them, which may take longer.
        ended = events.GraceEnded(gpus.expected)
        loop.call_later(settings.grace_ms / 1000, self._event, ended)

    async def run(self) -> None:
        """Serves until told to drain."""
        settings = self._settings
        web = Web(self._readiness, frozenset({0, os.geteuid(), *settings.allow_uids}))
        rpc: RpcServer | None = None
        try:
            await web.listen_unix(
                os.path.join(settings.socket_dir, METRICS_SOCKET), settings.socket_mode
            )
            if settings.metrics_listen:
                try:
                    await web.listen_tcp(settings.metrics_listen)
                except OSError as failed:
                    raise ConfigError(f"metrics_listen: {failed.strerror or failed}") from None
            # Sessions are served already; these are large to load.
            make_rpc, make_page = await self._loop.run_in_executor(None, _load)
            path = os.path.join(settings.socket_dir, GRPC_SOCKET)
            rpc = make_rpc(self._handler, self._report, self._operator, path)
            web.page = make_page(self._report)
            await rpc.start()
            gc.freeze()
            self._readiness.serving = True
            self._supervisor.send(messages.Ready())
            await self._turn(rpc)
        finally:
            # Also after an error: what stays open would keep the process from ending.
            self._listener.close("the daemon is stopping")
            self._operator.close()
            web.close()
            if rpc is not None:
                await rpc.stop()
            self._workers.close()
            self._crowd.close()
            self._supervisor.close()
            self._gpus.close()
            await self._loop.run_in_executor(None, self._handler.observer.close)

    async def _turn(self, rpc: RpcServer) -> None:
        """The control loop, until it is drained."""
        while True:
            self._wake.clear()
            self._workers.check()
            if self._handler.core.waits:
                self._event(events.Tick())
            self._readiness.turn()
            self._ask_for_slabs()
            await self._tell_health(rpc)
            if self._handler.draining and self._handler.core.idle:
                return
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), self._tick())

    def _tick(self) -> float:
        return 0.01 if self._handler.draining else _TICK_SECONDS

    async def _tell_health(self, rpc: RpcServer) -> None:
        healthy = not self._readiness.reasons()
        if healthy != self._healthy:
            self._healthy = healthy
            await rpc.set_healthy(healthy)

    def _recover(self) -> None:
        catalog = self._catalog.view()
        found, damaged = read(catalog, self._settings.max_spans)
        for slot in damaged:
            # It would be counted again by the next life.
            catalog[slot * RECORD_BYTES : (slot + 1) * RECORD_BYTES] = bytes(RECORD_BYTES)
        self._handler.core.counters["recovered_dropped"] += len(damaged)
        self._event(events.Recovered(found))
        for number, slab in list(self._growth.slabs.items()):
            owner = self._owner(number)
            self._event(events.SlabAdded(number, slab.capacity, owner, sealed=slab.sealed))
        if found:
            logger.info("catalog read", extra={"records": len(found), "damaged": len(damaged)})

    def _owner(self, slab: int) -> SlabOwner | None:
        """What an earlier life wrote."""
        return decode_owner(self._owners[slab * OWNER_BYTES : (slab + 1) * OWNER_BYTES])

    def _replaced(self, message: messages.Replaced) -> None:
        """Memory that can be written is there instead of a sealed slab, of its group of uids."""
        given = self._handler.broker.forget(message.slab)
        self._listener.notify(given, sessions_pb2.SlabsGone(slab=[message.slab]))
        self._growth.slabs.pop(message.slab)
        slab = SlabState.of(self._spares.pop(message.heir))
        self._growth.slabs[message.heir] = slab
        self._workers.replaced(message)
        event = events.SlabAdded(message.heir, slab.capacity, replaces=message.slab)
        self._event(event)

    def _gpu_heard(self, message: ipc.AnyMessage, fd: int | None) -> bool:
        """Takes what is about GPUs; False if it is not."""
        if isinstance(message, messages.GpuWorker):
            worker = self._workers.gpus[message.gpu]
            if fd is not None:
                worker.attach(fd, message.restarts, message.pid)
            elif message.pid:
                worker.attach_failed(message.restarts, message.pid)
            self._wake.set()
        if not self._gpus.hear(message, fd):
            return False
        if isinstance(message, messages.GpuState) and message.ready:
            # Spans of an earlier life are verified from here on: there is who does it.
            for number in self._gpus.numbers(message.gpu):
                if number not in self._added:
                    self._added.add(number)
                    capacity = self._gpus.capacity(number)
                    owner = self._owner(number)
                    self._event(events.SlabAdded(number, capacity, owner, message.gpu + 1))
                    self._event(events.Populated(number, capacity))
        return True

    def _event(self, event: events.Event) -> None:
        try:
            self._handler.event(event)
        except Exception:
            logger.exception("an event failed", extra={"event": type(event).__name__})

    def _heard(self, message: ipc.AnyMessage, fd: int | None) -> None:
        if self._gpu_heard(message, fd):
            return
        match message:
            case messages.NewWorker():
                if fd is not None:
                    self._worker.attach(fd, message.restarts, message.pid, message.killed_by)
                else:
                    self._worker.attach_failed(message.restarts, message.pid)
                self._handler.journal.worker_started(message.restarts)
                self._wake.set()
            case messages.Replaced():
                self._replaced(message)
            case messages.Drain():
                self._handler.draining = True
                self._operator.stopping()
                self._event(events.Drain())
                self._listener.stop()
                self._wake.set()
            case _:
                logger.error("unexpected message %s", type(message).__name__)

    def _ask_for_slabs(self) -> None:
        """Now and then, for those that no file descriptor was left for when they were told."""
        now = self._loop.time()
        if now >= self._ask_at:
            self._ask_at = now + _ASK_SECONDS
            for number in self._gpus.missing():
                self._supervisor.send(messages.SlabWanted(number))

    def _ask_to_stop(self) -> None:
        self._supervisor.send(messages.Stop())

    def _restart_worker(self, reason: str, gpu: int = -1) -> None:
        self._supervisor.send(messages.RestartWorker(reason, gpu))

    def _tell_supervisor(self, reasons: dict[str, str]) -> None:
        self._supervisor.send(messages.Health("; ".join(reasons.values())))

    def _orphaned(self) -> None:
        """The supervisor is gone, and the memory with it."""
        os._exit(1)


def _load() -> tuple[type[RpcServer], type[Page]]:
    from kmesh_spand.control.metrics import Page
    from kmesh_spand.control.rpc import RpcServer

    return RpcServer, Page


def _tracer(settings: Settings, version: str) -> Tracer | None:
    if settings.trace == "off":
        return None
    from kmesh_spand.tracing import Tracer

    return Tracer(settings.trace, version)


def _export(storage: Shared, gpus: Gpus) -> Exported:
    """Swaps this process's writable fds for read-only ones: it never writes a slab."""
    indexes = {
        group: (reopen_read_only(index.fd), index.size) for group, index in storage.indexes.items()
    }
    slabs = {
        number: (reopen_read_only(slab.fd), slab.size) for number, slab in storage.slabs.items()
    }
    for fd in set(storage.fds) - set(storage.dma_bufs.fds):
        os.close(fd)
    return Exported(indexes, slabs, gpus, storage.dma_bufs)
