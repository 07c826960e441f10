"""A session that comes back: connects in the background, again after every loss.

client = Client("/run/kmesh", role=Role.SCHEDULER, engine_id=e, namespace=ns)
session = client.session          # a live Session, or None: never blocks
"""

# A wait says how long, as that of the threaded client does.
# ruff: noqa: ASYNC109

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import threading
import time
from collections.abc import Awaitable, Callable

from kmesh import errors
from kmesh.aio import AsyncSession
from kmesh.handles import COMMON, Preferences
from kmesh.keys import Namespace
from kmesh.session import Role, Session
from kmesh.wire import DEFAULT_TIMEOUT

logger = logging.getLogger("kmesh")

FIRST_DELAY = 0.05
LAST_DELAY = 2.0
#: After a refusal that the next attempt will most likely meet as well.
REFUSED_DELAY = 30.0

_PERMANENT = (
    errors.ConfigError,
    errors.InvalidArgument,
    errors.NamespaceMismatch,
    errors.PermissionDenied,
    errors.UnsupportedError,
    errors.VersionMismatch,
)


class Reconnect:
    """When to try again, and what to say about it; knows neither threads nor sockets."""

    def __init__(self, socket_dir: str) -> None:
        self._where = socket_dir
        self._delay = FIRST_DELAY
        self._refusals: set[str] = set()
        self._silent = False

    def failed(self, error: Exception) -> float:
        """An attempt failed; returns seconds to wait."""
        if isinstance(error, _PERMANENT):
            if str(error) not in self._refusals:
                self._refusals.add(str(error))
                logger.error("KMesh at %s refuses this client: %s", self._where, str(error))
            return REFUSED_DELAY
        if not self._silent:
            self._silent = True
            logger.warning("no KMesh at %s (%s); going on without it", self._where, str(error))
        return self._next()

    def connected(self, epoch: int) -> None:
        self._silent = False
        self._refusals.clear()
        logger.info("connected to KMesh at %s, epoch %016x", self._where, epoch)

    def lost(self, lived: float) -> float:
        """A session ended after ``lived`` seconds; returns seconds to wait."""
        self._silent = True
        logger.warning("lost KMesh at %s; going on without it", self._where)
        if lived > LAST_DELAY:
            self._delay = FIRST_DELAY
        return self._next()

    def _next(self) -> float:
        delay = self._delay * random.uniform(0.5, 1.0)
        self._delay = min(self._delay * 2, LAST_DELAY)
        return delay


class Client:
    """Keeps a ``Session`` alive from a thread of its own. A daemon that is not there is no error.

    Arguments are those of ``Session.connect``.
    """

    def __init__(
        self,
        socket_dir: str | os.PathLike[str],
        *,
        role: Role,
        engine_id: str = "",
        namespace: Namespace | None = None,
        client_name: str = "kmesh",
        timeout: float = DEFAULT_TIMEOUT,
        handles: Preferences = COMMON,
    ) -> None:
        self._connect: Callable[[], Session] = lambda: Session.connect(
            socket_dir,
            role=role,
            engine_id=engine_id,
            namespace=namespace,
            client_name=client_name,
            timeout=timeout,
            handles=handles,
        )
        self._reconnect = Reconnect(os.fspath(socket_dir))
        self._session: Session | None = None
        self._callbacks: list[Callable[[Session | None], None]] = []
        self._notifying = threading.RLock()
        self._notifier = 0
        self._change = threading.Condition()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kmesh-client", daemon=True)
        self._thread.start()

    @property
    def session(self) -> Session | None:
        """The live session, or None. Costs nothing."""
        session = self._session
        return session if session is not None and not session.closed else None

    def wait(self, timeout: float) -> Session:
        """The live session, waited for at most ``timeout`` seconds.

        Raises:
            DaemonUnavailable: there was none by then.
        """
        with self._change:
            self._change.wait_for(lambda: self.session or self._closing.is_set(), timeout)
        session = self.session
        if session is None:
            raise errors.DaemonUnavailable(f"no session after {timeout} s")
        return session

    def on_change(self, callback: Callable[[Session | None], None]) -> None:
        """Calls ``callback`` with each new session, and with None when one is lost.

        At once if there is a session now; later in the client's thread, which it must not hold
        up. Exceptions are logged.
        """
        with self._notifying:
            self._callbacks.append(callback)
            if self._session is not None:
                self._notify(callback)

    def close(self) -> None:
        """Ends the session and the thread; in a callback it does not wait for the thread."""
        self._closing.set()
        with self._change:
            self._change.notify_all()
        session = self._session
        if session is not None:
            session.close()
        # The thread may wait until the callback that we are called in has returned.
        if threading.get_ident() not in (self._thread.ident, self._notifier):
            self._thread.join()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                session = self._connect()
            except (errors.KMeshError, OSError) as error:
                delay = self._reconnect.failed(error)
            except Exception as error:
                logger.exception("connecting to KMesh failed")
                delay = self._reconnect.failed(error)
            else:
                delay = self._serve(session)
            self._closing.wait(delay)

    def _serve(self, session: Session) -> float:
        """Shows the session until it ends; returns seconds to wait."""
        since = time.monotonic()
        ended = threading.Event()
        session.on_close(ended.set)
        self._reconnect.connected(session.epoch)
        self._show(session)
        if self._closing.is_set():
            session.close()
        ended.wait()
        session.close()
        self._show(None)
        return 0.0 if self._closing.is_set() else self._reconnect.lost(time.monotonic() - since)

    def _show(self, session: Session | None) -> None:
        with self._notifying:
            with self._change:
                self._session = session
                self._change.notify_all()
            for callback in self._callbacks:
                self._notify(callback)

    def _notify(self, callback: Callable[[Session | None], None]) -> None:
        outer, self._notifier = self._notifier, threading.get_ident()
        try:
            callback(self._session)
        except Exception:
            logger.exception("a callback for a change of session failed")
        finally:
            self._notifier = outer


class AsyncClient:
    """Keeps an ``AsyncSession`` alive from a task of the loop in which ``start`` is awaited."""

    def __init__(
        self,
        socket_dir: str | os.PathLike[str],
        *,
        role: Role,
        engine_id: str = "",
        namespace: Namespace | None = None,
        client_name: str = "kmesh",
        timeout: float = DEFAULT_TIMEOUT,
        handles: Preferences = COMMON,
    ) -> None:
        self._connect: Callable[[], Awaitable[AsyncSession]] = lambda: AsyncSession.connect(
            socket_dir,
            role=role,
            engine_id=engine_id,
            namespace=namespace,
            client_name=client_name,
            timeout=timeout,
            handles=handles,
        )
        self._reconnect = Reconnect(os.fspath(socket_dir))
        self._session: AsyncSession | None = None
        self._callbacks: list[Callable[[AsyncSession | None], None]] = []
        self._change = asyncio.Condition()
        self._task: asyncio.Task[None] | None = None

    @property
    def session(self) -> AsyncSession | None:
        """The live session, or None."""
        session = self._session
        return session if session is not None and not session.closed else None

    async def start(self) -> AsyncClient:
        """Begins to connect, and returns at once."""
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="kmesh-client")
        return self

    async def wait(self, timeout: float) -> AsyncSession:
        """As ``Client.wait``."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout), self._change:
                await self._change.wait_for(lambda: self.session is not None)
        session = self.session
        if session is None:
            raise errors.DaemonUnavailable(f"no session after {timeout} s")
        return session

    def on_change(self, callback: Callable[[AsyncSession | None], None]) -> None:
        """As ``Client.on_change``; callbacks run in the loop."""
        self._callbacks.append(callback)
        if self._session is not None:
            self._notify(callback)

    async def close(self) -> None:
        """Ends the session and the task."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def __aenter__(self) -> AsyncClient:
        return await self.start()

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def _run(self) -> None:
        while True:
            try:
                session = await self._connect()
            except (errors.KMeshError, OSError) as error:
                delay = self._reconnect.failed(error)
            except Exception as error:
                logger.exception("connecting to KMesh failed")
                delay = self._reconnect.failed(error)
            else:
                delay = await self._serve(session)
            await asyncio.sleep(delay)

    async def _serve(self, session: AsyncSession) -> float:
        since = time.monotonic()
        ended = asyncio.Event()
        session.on_close(ended.set)
        self._reconnect.connected(session.epoch)
        try:
            await self._show(session)
            await ended.wait()
        finally:
            await session.close()
            await self._show(None)
        return self._reconnect.lost(time.monotonic() - since)

    async def _show(self, session: AsyncSession | None) -> None:
        self._session = session
        for callback in self._callbacks:
            self._notify(callback)
        async with self._change:
            self._change.notify_all()

    def _notify(self, callback: Callable[[AsyncSession | None], None]) -> None:
        try:
            callback(self._session)
        except Exception:
            logger.exception("a callback for a change of session failed")
