"""What every session is built on: a connection with the daemon, and calls over it."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Self, TypeVar

from kmesh import calls, errors, memory
from kmesh.calls import Procedure, Welcome
from kmesh.channel import Channel
from kmesh.index import IndexReader
from kmesh.running import Running
from kmesh.v1 import sessions_pb2
from kmesh.wire import DEFAULT_TIMEOUT

T = TypeVar("T")


class Connected:
    """Says Hello, runs calls in the connection's thread, and ends once. ``Session`` has the calls.

    Attributes:
        welcome, epoch, index: as of ``Session``.
    """

    welcome: Welcome
    epoch: int
    index: IndexReader

    def __init__(self, sock: socket.socket, hello: sessions_pb2.Hello, timeout: float) -> None:
        """Over a connected socket, which this object owns from now on; says Hello.

        Raises:
            DaemonUnavailable, RequestError: as ``Session.connect``.
        """
        self._channel = Channel(sock)
        self._slabs = memory.Slabs()
        self._channel.exchange.gone = self._slabs.forget
        self._attaching = threading.Lock()
        # Memory of a daemon that is gone is not kept from the machine by a cache.
        self._channel.on_close(self._slabs.clear)
        try:
            until = time.monotonic() + timeout
            self.welcome = self._run(calls.hello(hello), timeout)
            self.epoch = self._channel.exchange.epoch or 0
            self._channel.limit(self.welcome.max_message_bytes)
            self.index = self._run(memory.attach_index(self.epoch), until - time.monotonic())
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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def closed(self) -> bool:
        return self._channel.closed

    @property
    def peer_pid(self) -> int:
        """The daemon's process, for people only; 0 when it is not in our PID namespace."""
        return self._channel.peer_pid

    @property
    def pending(self) -> int:
        """Answers that are still to come, also those that nobody waits for."""
        return self._channel.exchange.pending + self._channel.exchange.unanswered

    def close(self) -> None:
        """Ends the session: leases, reservations and staging with it.

        Memory stays mapped as long as its ``SlabMapping`` or ``Staging`` is held.
        """
        self._channel.close()

    def on_close(self, callback: Callable[[], None]) -> None:
        """Calls ``callback`` once when the session has ended; at once if it already has."""
        self._channel.on_close(callback)

    def _run(self, procedure: Procedure[T], timeout: float | None) -> T:
        if self._channel.in_callback:
            procedure.close()
            raise RuntimeError("a callback of the session may not wait for the session")
        return self._start(procedure, timeout).result()

    def _start(self, procedure: Procedure[T], timeout: float | None) -> Future[T]:
        deadline = time.monotonic() + (DEFAULT_TIMEOUT if timeout is None else timeout)
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()
        Running(self._channel, procedure, deadline, future).step(None, None)
        return future
