"""A session with the daemon: one connection, and everything that it holds.

    with Session.connect("/run/kmesh", role=Role.SCHEDULER, engine_id=e, namespace=ns) as session:
        with session.acquire(chain.keys, [shard]) as lease:
            ...

Everything that the session holds (leases, reservations, staging) ends with its connection.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from kmesh import calls, flightcalls, memory, packets
from kmesh.calls import Procedure, Reservations, ReserveBatch, Welcome
from kmesh.connected import Connected
from kmesh.familycalls import Families
from kmesh.flight import Arrived, Claim, FlightCause, Progress
from kmesh.handles import COMMON, Handle, HandleKind, Preferences, SpanHandle
from kmesh.hello import Role, hello
from kmesh.keys import Namespace
from kmesh.layout import Shard
from kmesh.lease import Lease
from kmesh.memory import SlabMapping, Staging
from kmesh.wire import DEFAULT_TIMEOUT

__all__ = [
    "Lease",
    "Reservations",
    "ReserveBatch",
    "Role",
    "Session",
    "SlabMapping",
    "Staging",
    "Welcome",
]


class Session(Connected):
    """Thread-safe; every call has a deadline (``timeout`` seconds, 5 unless said otherwise).

    Calls raise DeadlineExceeded, ConnectionClosed, or the RequestError that the daemon gives. A
    call that comes too late holds nothing. Futures run their callbacks in the session's thread,
    where waiting for another call of the session is a RuntimeError.

    Attributes:
        welcome: what the daemon said at connect.
        epoch: of the daemon's boot; changes at every restart.
        index: the shared index, readable also after the session has ended.
    """

    @classmethod
    def connect(
        cls,
        socket_dir: str | os.PathLike[str],
        *,
        role: Role,
        engine_id: str = "",
        namespace: Namespace | None = None,
        client_name: str = "kmesh",
        timeout: float = DEFAULT_TIMEOUT,
        handles: Preferences = COMMON,
    ) -> Session:
        """Opens a session with the daemon whose socket lies in ``socket_dir``.

        Args:
            role: what the session is for.
            engine_id: joins the sessions of one engine; empty for tools.
            namespace: the engine's base namespace; sessions of one engine must agree.
            client_name: for people who look at the daemon.
            timeout: seconds for all of it.
            handles: for each tier the kinds of handle that can be used, best first; what was
                agreed is in ``welcome.handles``.

        Raises:
            DaemonUnavailable: nobody answers.
            VersionMismatch, NamespaceMismatch, PermissionDenied: refused; ``field`` says why.
            OSError: this process has no file descriptor or no memory left for it.
        """
        until = time.monotonic() + timeout
        message = hello(role, engine_id, namespace, client_name, handles)
        sock = packets.dial(socket_dir, timeout)
        return cls(sock, message, max(until - time.monotonic(), 0.001))

    @property
    def slabs_gone(self) -> frozenset[int]:
        """Slabs that the daemon has given up: their memory is free when nobody has it mapped."""
        return self._slabs.gone

    def on_slabs_gone(self, callback: Callable[[], None]) -> None:
        """Calls ``callback``, which may not wait, whenever ``slabs_gone`` has grown."""
        self._slabs.on_gone(callback)

    def ping(self, timeout: float | None = None) -> None:
        """Returns when the daemon has answered."""
        self._run(calls.ping(), timeout)

    def acquire(
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
        """Leases every (key, shard).

        Args:
            keys: 32 bytes each.
            shards: at least one.
            prefix: stop at the first key of which a shard is missing; the rest are misses.
            salt: digest of the request's salt (``bytes.fromhex(keys.salt_digest(...))``), or
                empty: what was stored under another is not found.
            device: UUID of the GPU on which the spans are stored, or empty: in host memory.
            recipes: spans that are kept as recipes may be given as such, to be decoded here.
            positions: ``Lease.start`` is to say where they were computed.
                Otherwise such a span is REASON_PENDING while the daemon makes it dense.
            wait: seconds for which the answer may be held back until spans that are only on disk
                are in memory; at most nine tenths of ``timeout``. With 0 they are misses of which
                ``reason`` says PENDING: they are brought, and are hits later.

        Raises:
            ConfigError: an argument is malformed.
        """
        return self._run(
            self._acquire(keys, shards, prefix, salt, device, recipes, positions, wait), timeout
        )

    def acquire_async(
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
    ) -> Future[Lease]:
        """As ``acquire``, without waiting. The future can't be cancelled: release its lease."""
        return self._start(
            self._acquire(keys, shards, prefix, salt, device, recipes, positions, wait), timeout
        )

    def release(self, lease: Lease) -> None:
        """Gives a lease back, without waiting for the answer. Nothing if it already was."""
        lease.release()

    def reserve(self, batch: ReserveBatch, timeout: float | None = None) -> Reservations:
        """Asks for room for spans that this session will write.

        Raises:
            ConfigError: an argument is malformed.
            Draining: the daemon is about to stop.
        """
        return self._run(calls.reserve(self.welcome, batch, self._channel.forget), timeout)

    def commit(
        self, reservations: Sequence[int], offsets: Sequence[int], timeout: float | None = None
    ) -> list[int]:
        """Makes spans visible whose payloads lie in the staging at ``offsets``.

        Args:
            offsets: bytes from the staging's start, multiples of 64 (``layout.STAGING_ALIGN``).

        Returns a ``kmesh.v1.Reason`` for each, when they are visible: 0 is OK. The staging may be
        written again from then on.
        """
        return self._run(calls.commit(self.welcome, reservations, offsets), timeout)

    def commit_async(
        self, reservations: Sequence[int], offsets: Sequence[int], timeout: float | None = None
    ) -> Future[list[int]]:
        """As ``commit``, without waiting."""
        return self._start(calls.commit(self.welcome, reservations, offsets), timeout)

    def abort(self, reservations: Sequence[int], timeout: float | None = None) -> int:
        """Ends reservations that will not be committed; returns how many there were."""
        return self._run(calls.abort(self.welcome, reservations), timeout)

    def report_corrupt(
        self, lease: Lease, entries: Sequence[int], timeout: float | None = None
    ) -> int:
        """Tells that entries of a lease hold wrong bytes; returns how many reports were taken."""
        return self._run(calls.report_corrupt(self.welcome, lease, entries), timeout)

    def claim(
        self,
        keys: bytes,
        shards: Sequence[Shard],
        *,
        timeout: float | None = None,
        salt: bytes = b"",
        device: str = "",
        place: str = "",
    ) -> Claim:
        """Asks who computes the spans of these keys: the caller itself, if nobody does yet.

        A flight that is ours ends when all of its keys are stored, with ``land``, or with the
        session.

        Args:
            keys: 32 bytes each, in chain order, at least one; of more than ``welcome.max_batch``
                the first are claimed.
            shards: in which this engine stores, at least one.
            salt, device: as for ``reserve``.
            place: names what this engine computes on, such as a GPU's UUID: those are told who
                would share it. At most 64 characters.

        Raises:
            ConfigError: an argument is malformed.
            Exhausted: the session leads too many flights.
        """
        return self._run(
            flightcalls.claim(self.welcome, keys, shards, salt, device, place), timeout
        )

    def claim_async(
        self,
        keys: bytes,
        shards: Sequence[Shard],
        *,
        timeout: float | None = None,
        salt: bytes = b"",
        device: str = "",
        place: str = "",
    ) -> Future[Claim]:
        """As ``claim``, without waiting. A flight that comes too late is given back by itself."""
        return self._start(
            flightcalls.claim(self.welcome, keys, shards, salt, device, place), timeout
        )

    def await_flight_async(
        self, claim: Claim, timeout: float | None = None, *, wait: int = 0
    ) -> Future[Arrived]:
        """Waits, in the background, for a flight that another session leads; ``leave`` ends that.

        Args:
            claim: whose standing is COMPUTING.
            wait: the caller's own number for this wait, by which ``leave`` can name it; or 0.
        """
        return self._start(flightcalls.await_flight(claim, wait), timeout)

    def leave(self, flight: int, wait: int = 0) -> None:
        """Ends this session's waits for a flight, without waiting for the answer.

        Args:
            wait: only the one of this number; 0: all of them. A daemon that is too old to know
                numbers ends all of them.
        """
        self._channel.forget(flightcalls.leave(flight, wait))

    def land(self, flight: int, cause: FlightCause = FlightCause.DONE) -> None:
        """Ends a flight that this session leads, without waiting for the answer.

        Args:
            cause: DONE or NOT_STORED: what is reserved or stored by now still lands, the rest is
                given up. ABORTED or PREEMPTED: the first that waits leads.
        """
        self._channel.forget(flightcalls.land(flight, cause))

    def progress_async(
        self, flight: int, place: str = "", timeout: float | None = None
    ) -> Future[Progress | None]:
        """Asks, in the background, how far a flight is; None: there is none any more.

        Args:
            place: as for ``claim``.
        """
        return self._start(flightcalls.progress(flight, place), timeout)

    def computed(self, flight: int, keys: int) -> None:
        """Says how far this session is with a flight that it leads, without waiting.

        Args:
            keys: of its own that it has computed, from the first on.
        """
        self._channel.forget(flightcalls.progressed(flight, keys))

    def slab(self, slab_id: int, timeout: float | None = None) -> SlabMapping:
        """A slab, mapped at the first call; later calls cost a dictionary look-up.

        Hold it as long as its addresses are used, and no longer: when the daemon gives a slab up,
        its memory is free when the last who holds it lets go.

        Raises:
            NotFound: no such slab.
            UnsupportedError: it is not host memory, or no kind of handle was agreed on.
            OSError: it can't be mapped.
        """
        found = self._slabs.get(slab_id)
        if found is None:
            with self._attaching:
                found = self._slabs.get(slab_id)
                if found is None:
                    found = self._run(memory.attach_slab(self.welcome, slab_id), timeout)
                    self._slabs.keep(found)
        return found

    def mapped(self, slab_id: int) -> SlabMapping | None:
        """A slab that ``slab`` has mapped before, or None. Never waits."""
        return self._slabs.get(slab_id)

    def export_slab(
        self, slab_id: int, timeout: float | None = None, kind: HandleKind | None = None
    ) -> Handle:
        """A slab's handle, for an importer of another kind; the caller closes its fd.

        Args:
            kind: the one that was agreed on at connect if None.

        Raises:
            PermissionDenied: the daemon does not give slabs of that kind; says why.
        """
        return self._run(memory.export_slab(slab_id, kind), timeout)[0]

    def export_span(
        self,
        lease: Lease,
        key: int,
        shard: int = 0,
        *,
        kind: HandleKind = HandleKind.DMA_BUF,
        timeout: float | None = None,
    ) -> SpanHandle:
        """The pages of one leased span alone, for a NIC, storage or another program.

        The caller closes its fd. Whoever holds it can write the span, and still could when the
        lease has ended and the pages are another span's: keep the lease as long as the fd.

        Raises:
            IndexError, LookupError: as ``Lease.entry``.
            PermissionDenied: the daemon's settings do not permit it.
            TooLarge: the machine does not make DMA-BUFs so large.
        """
        lease.entry(key, shard)
        return self._run(memory.export_span(lease, lease.index(key, shard), kind), timeout)

    def staging(self, size: int, timeout: float | None = None) -> Staging:
        """Memory of ``size`` bytes, in whole pages, to write spans in.

        A session has one. Who asks for as much again maps the same memory once more.

        Raises:
            Exhausted: the daemon's limit for staging is reached.
            InvalidArgument: the session has staging of another size.
        """
        return self._run(memory.attach_staging(size), timeout)

    @property
    def families(self) -> Families:
        """Calls about families."""
        return Families(self._run, self._start)

    def _acquire(
        self,
        keys: bytes,
        shards: Sequence[Shard],
        prefix: bool,
        salt: bytes,
        device: str,
        recipes: bool,
        positions: bool,
        wait: float,
    ) -> Procedure[Lease]:
        forget = self._channel.forget
        return calls.acquire(
            self.welcome, keys, shards, prefix, forget, salt, device, recipes, positions, wait
        )
