"""One engine of a chaos run, as a client of the daemon: its sessions, and bytes in and out.

Whatever it may be told is counted; whatever must never be is reported.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from chaos_content import NAMESPACE, SALTS, SHARDS, SPAN_TOKENS, Name, difference, payload
from chaos_pulse import Pulse
from fake_cuda import UUIDS, FakeDriver, Gpu

from kmesh import _host, errors
from kmesh.calls import ReserveBatch
from kmesh.client import Client
from kmesh.cuda.device import Device
from kmesh.cuda.reading import read_span as read_gpu_span
from kmesh.cuda.slabs import DeviceSlabs
from kmesh.lease import Lease
from kmesh.session import Role, Session
from kmesh.store import put_spans, read_span
from kmesh.v1 import common_pb2

CALL_SECONDS = 5.0
#: What an Acquire waits for the disk.
DISK_SECONDS = 1.0
STAGING = 1 << 20
_COUNTED = (
    (errors.DeadlineExceeded, "deadline_exceeded"),
    (errors.ConnectionClosed, "connection_closed"),
    (errors.Exhausted, "exhausted"),
    (errors.Draining, "draining"),
    (errors.Unavailable, "unavailable"),
    (errors.Stale, "stale"),
    (errors.NotFound, "not_found"),
    (OSError, "os_error"),
)


class NotConnected(Exception):
    """There is no daemon at the moment."""


@dataclass
class Held:
    """A lease that is read again after ``left`` more operations."""

    session: Session
    lease: Lease
    names: list[Name]
    place: str
    left: int


class Member:
    """A scheduler's session and a worker's, which come back when they are lost."""

    def __init__(self, options: argparse.Namespace, pulse: Pulse) -> None:
        self.options = options
        self.pulse = pulse
        self.uid = os.getuid()
        self.places = ["", *UUIDS[: options.gpus]]
        self.wrong = False
        self.held: list[Held] = []
        self._driver = FakeDriver(Gpu(), Gpu(UUIDS[1]))
        self._devices: dict[str, Device] = {}
        self._slabs: dict[tuple[Session, str], DeviceSlabs] = {}
        self._staged: tuple[Session, Any] | None = None
        engine = {"engine_id": f"engine-{options.number}-{options.life}", "namespace": NAMESPACE}
        who = {"client_name": f"engine {options.number}", "timeout": CALL_SECONDS, **engine}
        self.scheduler = Client(options.sockets, role=Role.SCHEDULER, **who)
        self.worker = Client(options.sockets, role=Role.WORKER, **who)

    def close(self) -> None:
        """Ends everything; nothing may be left of it in this process."""
        for held in self.held:
            held.lease.release()
        self.held.clear()
        self._drop_slabs(keep=None)
        for device in self._devices.values():
            device.close()
        self._devices.clear()
        self._staged = None
        with self.pulse.calling("close", CALL_SECONDS):
            self.scheduler.close()
            self.worker.close()
        del self.scheduler, self.worker

    # What goes wrong.

    def report(self, what: str, **more: object) -> None:
        """For the runner: something that may be a fault of KMesh's."""
        row = {"what": what, "client": self.options.number, "pid": os.getpid(), **more}
        print(json.dumps(row), flush=True)

    def broken(self, what: str, **more: object) -> None:
        """For the runner: something that must never be."""
        self.wrong = True
        self.report("broken", text=what, **more)

    @contextlib.contextmanager
    def survive(self, operation: str) -> Iterator[None]:
        """Errors that an engine may be told; each of them is counted, any other is reported."""
        try:
            yield
        except NotConnected:
            self.pulse.count("not_connected")
        except errors.ProtocolError as failed:
            if "none is left" not in str(failed):
                self.broken(f"{operation}: {failed!r}")
            self.pulse.count("no_descriptor")
        except (errors.KMeshError, OSError) as failed:
            for kind, name in _COUNTED:
                if isinstance(failed, kind):
                    self.pulse.count(name)
                    return
            self.broken(f"{operation}: {failed!r}")
        except RuntimeError as failed:
            if "thread" not in str(failed):
                raise
            self.pulse.count("os_error")

    # Sessions.

    def session_of(self, client: Client) -> Session:
        session = client.session
        if session is None:
            with self.pulse.calling("connect", 1), contextlib.suppress(errors.DaemonUnavailable):
                session = client.wait(0.2)
                self.pulse.count("connects")
        if session is None:
            raise NotConnected
        return session

    def staging_of(self, session: Session) -> Any:
        if self._staged is None or self._staged[0] is not session:
            self._staged = None
            with self.pulse.calling("staging", CALL_SECONDS):
                self._staged = session, session.staging(STAGING)
        return self._staged[1]

    def _drop_slabs(self, keep: Session | None) -> None:
        for session, place in list(self._slabs):
            if session is not keep:
                self._slabs.pop((session, place)).close()

    # Bytes.

    def batch(
        self, names: list[Name], sub_keys: bytes, shard: int, place: str
    ) -> tuple[ReserveBatch, list[bytes]]:
        """Spans of one shard and salt, and their payloads (those of nobody, if we are to lie)."""
        uid = self.uid + self.options.lie
        payloads = [payload(uid, place, name, shard) for name in names]
        batch = ReserveBatch(
            NAMESPACE.digest(),
            SHARDS[shard],
            b"".join(name.key for name in names),
            [name.tokens for name in names],
            [SPAN_TOKENS * name.number for name in names],
            list(map(len, payloads)),
            sub_keys,
            SALTS[names[0].salt],
            place,
        )
        return batch, payloads

    def put(self, names: list[Name], sub_keys: bytes, shard: int, place: str) -> None:
        session = self.session_of(self.worker)
        staging = self.staging_of(session)
        batch, payloads = self.batch(names, sub_keys, shard, place)
        try:
            # Reserve, two commits at most, and an abort.
            with self.pulse.calling("put_spans", 4 * CALL_SECONDS):
                reasons = put_spans(session, staging, batch, payloads)
        except BaseException:
            self.pulse.count("store_failed")
            raise
        finally:
            # It is ours again: whoever still reads it, and serves that, serves this.
            staging.view()[:] = b"\xee" * staging.size
        for reason in reasons:
            if reason in (common_pb2.REASON_OK, common_pb2.REASON_EXISTS):
                self.pulse.count("store_exists" if reason else "store_ok")
            else:
                self.pulse.count("store_refused")

    def acquire(
        self, names: list[Name], place: str, prefix: bool, left: int, recipes: bool = False
    ) -> tuple[Held, int]:
        session = self.session_of(self.scheduler)
        keys = b"".join(name.key for name in names)
        salt = SALTS[names[0].salt]
        with self.pulse.calling("acquire", CALL_SECONDS):
            lease = session.acquire(
                keys,
                SHARDS,
                prefix=prefix,
                salt=salt,
                device=place,
                recipes=recipes,
                wait=DISK_SECONDS,
            )
        reasons = list(lease.reason)
        self.pulse.count("read_miss", reasons.count(common_pb2.REASON_MISS))
        self.pulse.count("read_pending", reasons.count(common_pb2.REASON_PENDING))
        return Held(session, lease, names, place, left), reasons.count(common_pb2.REASON_OK)

    def check(self, held: Held) -> int:
        """Reads what is leased and compares it; returns how many spans there were."""
        found = 0
        for at, name in enumerate(held.names):
            for shard in range(len(SHARDS)):
                if not held.lease.reason[held.lease.index(at, shard)]:
                    self._check_one(held, at, name, shard)
                    found += 1
        return found

    def _check_one(self, held: Held, at: int, name: Name, shard: int) -> None:
        lease, entry = held.lease, held.lease.index(at, shard)
        tokens = lease.tokens[entry]
        full = Name(name.number, tokens, name.salt)
        try:
            with self.pulse.calling("read_span", 2 * CALL_SECONDS):
                data = self._read(held, at, shard)
        except errors.CorruptionError:
            self._corrupt(held, entry)
            return
        expected = payload(self.uid, held.place, full, shard)
        if tokens < name.tokens or data != expected:
            self.broken(
                "wrong bytes",
                name=str(name),
                shard=shard,
                tokens=tokens,
                place=held.place,
                slab=lease.slab[entry],
                offset=lease.offset[entry],
                generation=lease.generation[entry],
                difference=difference(data, expected),
            )
        self.pulse.count("read_ok")
        self.pulse.count("read_recipes", lease.is_recipe(at, shard))
        self.pulse.count("read_bytes", len(data))

    def _read(self, held: Held, at: int, shard: int) -> bytes:
        session = self.session_of(self.worker)
        if not held.place:
            return read_span(session, held.lease, at, shard)
        device = self._devices.get(held.place)
        if device is None:
            device = self._devices[held.place] = Device(self._driver, held.place)
        self._drop_slabs(keep=session)
        slabs = self._slabs.get((session, held.place))
        if slabs is None:
            slabs = self._slabs[session, held.place] = DeviceSlabs(session, device)
        return read_gpu_span(slabs, device, held.lease, at, shard)

    def _bad_place(self, held: Held, entry: int) -> tuple[int, int, int]:
        """Slab, offset and length of what is bad: of a span, or of what its recipe refers to."""
        lease, session = held.lease, self.session_of(self.worker)
        mine = lease.slab[entry], lease.offset[entry], lease.length[entry]
        for base in lease.bases.values() if lease.dense_length[entry] else ():
            slab = session.slab(base.slab)
            address, sums = slab.address + base.offset, slab.sums_address(base.offset)
            if not _host.verify(address, base.length, sums, base.root):
                return base.slab, base.offset, base.length
        return mine

    def _corrupt(self, held: Held, entry: int) -> None:
        """Bytes do not match. Only a lease that has ended, or a flipped bit, explains that."""
        lease = held.lease
        number, offset, length = self._bad_place(held, entry)
        where = {"slab": number, "offset": offset}
        with self.pulse.calling("export_slab", CALL_SECONDS):
            handle = held.session.export_slab(number)
        inode = os.fstat(handle.fd).st_ino
        os.close(handle.fd)
        with self.pulse.calling("report_corrupt", CALL_SECONDS):
            taken = held.session.report_corrupt(lease, [entry])
        # Answered by the session that leased it: the lease held while we read.
        self.pulse.count("corrupt")
        self.pulse.count("reported", taken)
        self.report("corrupt", inode=inode, size=handle.size, length=length, **where)
