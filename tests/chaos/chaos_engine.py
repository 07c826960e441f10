"""A client of a chaos run: it does what engines do through the public client, and checks each byte.

What it does follows from seed, number and life, and from how much it has done: neither from time
nor from answers. It ends when it is told to (SIGTERM), or after a look at everything (--audit).
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import itertools
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))

from chaos_content import (
    FAMILIES,
    FULL,
    NAMESPACE,
    SALTS,
    SHARDS,
    SPAN_TOKENS,
    SUB_TOKENS,
    Name,
    difference,
    payload,
    tail,
)
from chaos_pulse import Pulse
from fake_cuda import UUIDS, FakeDriver, Gpu
from leaks import mapped_memfds, open_fds

import kmesh
from kmesh import errors
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
STAGING = 1 << 20
#: Leases that are kept for a while.
HELD = 3
_PR_SET_PDEATHSIG = 1
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


class Engine:
    """One engine with its scheduler's session and a worker's."""

    def __init__(self, options: argparse.Namespace, pulse: Pulse) -> None:
        self._options = options
        self._pulse = pulse
        self._uid = os.getuid()
        self._places = ["", *UUIDS[: options.gpus]]
        self.ending = False
        self.wrong = False
        self._held: list[Held] = []
        self._driver = FakeDriver(Gpu(), Gpu(UUIDS[1]))
        self._devices: dict[str, Device] = {}
        self._slabs: dict[tuple[Session, str], DeviceSlabs] = {}
        self._staged: tuple[Session, Any] | None = None
        engine = {"engine_id": f"engine-{options.number}-{options.life}", "namespace": NAMESPACE}
        who = {"client_name": f"engine {options.number}", "timeout": CALL_SECONDS, **engine}
        self._scheduler = Client(options.sockets, role=Role.SCHEDULER, **who)
        self._worker = Client(options.sockets, role=Role.WORKER, **who)

    def close(self) -> None:
        """Ends everything; nothing may be left of it in this process."""
        for held in self._held:
            held.lease.release()
        self._held.clear()
        self._drop_slabs(keep=None)
        for device in self._devices.values():
            device.close()
        self._devices.clear()
        self._staged = None
        with self._pulse.calling("close", CALL_SECONDS):
            self._scheduler.close()
            self._worker.close()
        del self._scheduler, self._worker

    # What goes wrong.

    def report(self, what: str, **more: object) -> None:
        """For the runner: something that may be a fault of KMesh's."""
        row = {"what": what, "client": self._options.number, "pid": os.getpid(), **more}
        print(json.dumps(row), flush=True)

    def broken(self, what: str, **more: object) -> None:
        """For the runner: something that must never be."""
        self.wrong = True
        self.report("broken", text=what, **more)

    @contextlib.contextmanager
    def _survive(self, operation: str) -> Iterator[None]:
        """Errors that an engine may be told; each of them is counted, any other is reported."""
        try:
            yield
        except NotConnected:
            self._pulse.count("not_connected")
        except errors.ProtocolError as failed:
            if "none is left" not in str(failed):
                self.broken(f"{operation}: {failed!r}")
            self._pulse.count("no_descriptor")
        except (errors.KMeshError, OSError) as failed:
            for kind, name in _COUNTED:
                if isinstance(failed, kind):
                    self._pulse.count(name)
                    return
            self.broken(f"{operation}: {failed!r}")
        except RuntimeError as failed:
            if "thread" not in str(failed):
                raise
            self._pulse.count("os_error")

    # Sessions.

    def _session(self, client: Client) -> Session:
        session = client.session
        if session is None:
            with self._pulse.calling("connect", 1), contextlib.suppress(errors.DaemonUnavailable):
                session = client.wait(0.2)
                self._pulse.count("connects")
        if session is None:
            raise NotConnected
        return session

    def _staging(self, session: Session) -> Any:
        if self._staged is None or self._staged[0] is not session:
            self._staged = None
            with self._pulse.calling("staging", CALL_SECONDS):
                self._staged = session, session.staging(STAGING)
        return self._staged[1]

    def _drop_slabs(self, keep: Session | None) -> None:
        for session, place in list(self._slabs):
            if session is not keep:
                self._slabs.pop((session, place)).close()

    # Operations. Each takes its decisions from ``rng`` before it asks anybody.

    def step(self, number: int) -> None:
        options = self._options
        rng = random.Random(f"{options.seed}/{options.number}/{options.life}/{number}")
        operations: tuple[tuple[Callable[[random.Random], None], int], ...] = (
            (self.store, 30),
            (self.store_tail, 8),
            (self.read, 34),
            (self.read_tail, 8),
            (self.hold, 6),
            (self.abandon, 4),
            (self.report_falsely, 2),
            (self.burst, 2),
            (self.probe, 4),
            (self.leave, 1),
        )
        chosen = rng.choices([one for one, _ in operations], [w for _, w in operations])[0]
        self._pulse.count("ops")
        with self._survive(chosen.__name__):
            chosen(rng)
        for held in list(self._held):
            held.left -= 1
            if held.left <= 0 or held.session.closed:
                self._held.remove(held)
                with self._survive("held"):
                    self._again(held)

    def _names(self, rng: random.Random, count: int) -> tuple[list[Name], str]:
        """Names of full spans, with one salt, and where they are."""
        salt, place = rng.randrange(len(SALTS)), rng.choice(self._places)
        # Some are popular.
        most = rng.choice((FULL // 8, FULL, FULL))
        return [Name(n, SPAN_TOKENS, salt) for n in rng.sample(range(most), count)], place

    def store(self, rng: random.Random) -> None:
        names, place = self._names(rng, rng.randint(1, 6))
        self._put(names, b"", rng.randrange(len(SHARDS)), place)

    def store_tail(self, rng: random.Random) -> None:
        name = tail(rng.randrange(FAMILIES), SUB_TOKENS * rng.randint(1, 3), rng.randrange(2))
        shorter = range(SUB_TOKENS, name.tokens, SUB_TOKENS)
        sub_keys = b"".join(Name(name.number, tokens, name.salt).key for tokens in shorter)
        self._put([name], sub_keys, rng.randrange(len(SHARDS)), rng.choice(self._places))

    def _put(self, names: list[Name], sub_keys: bytes, shard: int, place: str) -> None:
        session = self._session(self._worker)
        staging = self._staging(session)
        payloads = [payload(self._uid, place, name, shard) for name in names]
        batch = ReserveBatch(
            NAMESPACE.digest(),
            SHARDS[shard],
            b"".join(name.key for name in names),
            [name.tokens for name in names],
            [64 * n for n in range(len(names))],
            [len(bytes_) for bytes_ in payloads],
            sub_keys,
            SALTS[names[0].salt],
            place,
        )
        try:
            # Reserve, two commits at most, and an abort.
            with self._pulse.calling("put_spans", 4 * CALL_SECONDS):
                reasons = put_spans(session, staging, batch, payloads)
        except BaseException:
            self._pulse.count("store_failed")
            raise
        finally:
            # It is ours again: whoever still reads it, and serves that, serves this.
            staging.view()[:] = b"\xee" * staging.size
        for reason in reasons:
            if reason in (common_pb2.REASON_OK, common_pb2.REASON_EXISTS):
                self._pulse.count("store_exists" if reason else "store_ok")
            else:
                self._pulse.count("store_refused")

    def read(self, rng: random.Random) -> None:
        names, place = self._names(rng, rng.randint(1, 8))
        held, _ = self._acquire(names, place, rng.random() < 0.3, 0)
        with held.lease:
            self._check(held)

    def read_tail(self, rng: random.Random) -> None:
        name = tail(rng.randrange(FAMILIES), SUB_TOKENS * rng.randint(1, 3), rng.randrange(2))
        held, _ = self._acquire([name], rng.choice(self._places), False, 0)
        with held.lease:
            self._check(held)

    def hold(self, rng: random.Random) -> None:
        names, place = self._names(rng, rng.randint(1, 4))
        left = rng.randint(2, 60)
        if len(self._held) < HELD:
            held, hits = self._acquire(names, place, False, left)
            if hits:
                self._held.append(held)

    def _again(self, held: Held) -> None:
        """What was leased is still what it was, whatever was stored meanwhile."""
        if not held.session.closed:
            with held.lease:
                self._pulse.count("held_ok", self._check(held))

    def _acquire(
        self, names: list[Name], place: str, prefix: bool, left: int
    ) -> tuple[Held, int]:
        session = self._session(self._scheduler)
        keys = b"".join(name.key for name in names)
        salt = SALTS[names[0].salt]
        with self._pulse.calling("acquire", CALL_SECONDS):
            lease = session.acquire(keys, SHARDS, prefix=prefix, salt=salt, device=place)
        reasons = list(lease.reason)
        self._pulse.count("read_miss", reasons.count(common_pb2.REASON_MISS))
        self._pulse.count("read_pending", reasons.count(common_pb2.REASON_PENDING))
        return Held(session, lease, names, place, left), reasons.count(common_pb2.REASON_OK)

    def _check(self, held: Held) -> int:
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
            with self._pulse.calling("read_span", 2 * CALL_SECONDS):
                data = self._read(held, at, shard)
        except errors.CorruptionError:
            self._corrupt(held, entry)
            return
        expected = payload(self._uid, held.place, full, shard)
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
        self._pulse.count("read_ok")
        self._pulse.count("read_bytes", len(data))

    def _read(self, held: Held, at: int, shard: int) -> bytes:
        session = self._session(self._worker)
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

    def _corrupt(self, held: Held, entry: int) -> None:
        """Bytes do not match. Only a lease that has ended, or a flipped bit, explains that."""
        lease = held.lease
        where = {"slab": lease.slab[entry], "offset": lease.offset[entry]}
        with self._pulse.calling("export_slab", CALL_SECONDS):
            handle = held.session.export_slab(lease.slab[entry])
        inode = os.fstat(handle.fd).st_ino
        os.close(handle.fd)
        with self._pulse.calling("report_corrupt", CALL_SECONDS):
            taken = held.session.report_corrupt(lease, [entry])
        # Answered by the session that leased it: the lease held while we read.
        self._pulse.count("corrupt")
        self._pulse.count("reported", taken)
        self.report(
            "corrupt", inode=inode, size=handle.size, length=lease.length[entry], **where
        )

    def abandon(self, rng: random.Random) -> None:
        names, place = self._names(rng, rng.randint(1, 4))
        shard, tidy = rng.randrange(len(SHARDS)), rng.random() < 0.7
        session = self._session(self._worker)
        size = [len(payload(self._uid, place, name, shard)) for name in names]
        batch = ReserveBatch(
            NAMESPACE.digest(),
            SHARDS[shard],
            b"".join(name.key for name in names),
            [name.tokens for name in names],
            [0] * len(names),
            size,
            salt=SALTS[names[0].salt],
            device=place,
        )
        with self._pulse.calling("reserve", CALL_SECONDS):
            reserved = session.reserve(batch)
        self._pulse.count("abandoned", sum(map(bool, reserved.reservation)))
        if tidy:
            with self._pulse.calling("abort", CALL_SECONDS):
                session.abort([one for one in reserved.reservation if one])

    def report_falsely(self, rng: random.Random) -> None:
        names, place = self._names(rng, 1)
        held, hits = self._acquire(names, place, False, 0)
        with held.lease, self._pulse.calling("report_corrupt", CALL_SECONDS):
            if hits:
                entry = next(n for n, reason in enumerate(held.lease.reason) if not reason)
                self._pulse.count("false_reports", held.session.report_corrupt(held.lease, [entry]))

    def burst(self, rng: random.Random) -> None:
        names, place = self._names(rng, 8)
        session = self._session(self._scheduler)
        keys, salt = b"".join(name.key for name in names), SALTS[names[0].salt]
        with self._pulse.calling("burst", CALL_SECONDS):
            futures = [
                session.acquire_async(keys, SHARDS, prefix=False, salt=salt, device=place)
                for _ in range(30)
            ]
            failed = [future.exception() for future in futures]
        for future, error in zip(futures, failed, strict=True):
            if error is None:
                future.result().release()
        self._pulse.count("bursts")
        for error in failed:
            if error is not None:
                raise error

    def probe(self, rng: random.Random) -> None:
        names, _ = self._names(rng, 8)
        session = self._session(self._scheduler)
        session.index.probe(b"".join(n.key for n in names), [shard.code() for shard in SHARDS])
        self._pulse.count("probes")

    def leave(self, rng: random.Random) -> None:
        """Ends a session as it is, with whatever it holds."""
        session = self._session(rng.choice((self._scheduler, self._worker)))
        with self._pulse.calling("close", CALL_SECONDS):
            session.close()
        self._pulse.count("left")

    def audit(self) -> None:
        """Stores once more, and reads everything that this user may have stored."""
        names = [[Name(n, SPAN_TOKENS, salt) for n in range(FULL)] for salt in range(len(SALTS))]
        tails = [
            [tail(family, tokens, salt) for family in range(FAMILIES)]
            for salt in range(len(SALTS))
            for tokens in range(SUB_TOKENS, SPAN_TOKENS, SUB_TOKENS)
        ]
        until = time.monotonic() + 60
        stored = self._pulse.counts()["store_ok"]
        for number in itertools.count():
            if self._pulse.counts()["store_ok"] > stored:
                break
            if time.monotonic() > until:
                self.broken("nothing can be stored within a minute")
                return
            self._put([Name(number % FULL)], b"", 0, "")
            time.sleep(0.02)
        for place in self._places:
            for some in (*names, *tails):
                pending = True
                while pending:
                    held, _ = self._acquire(some, place, False, 0)
                    with held.lease:
                        self._check(held)
                        pending = common_pb2.REASON_PENDING in held.lease.reason
                    if pending and time.monotonic() > until:
                        self.broken(f"still pending after a minute, {place or 'host'}: {some[0]}")
                        return
                    time.sleep(0.05 * pending)


def main() -> int:
    """Returns the exit status: 0, or 3 after something that must never be."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sockets")
    parser.add_argument("pulse", type=Path)
    for name in ("seed", "number", "life", "uid", "gpus"):
        parser.add_argument(f"--{name}", type=int, default=0)
    parser.add_argument("--audit", action="store_true")
    options = parser.parse_args()
    pulse = Pulse(options.pulse)
    # What is imported late is imported now: the user may not be let to where Python lies.
    assert kmesh.__version__
    if options.uid != os.getuid():
        os.setgroups([])
        os.setresgid(options.uid, options.uid, options.uid)
        os.setresuid(options.uid, options.uid, options.uid)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    before = open_fds()
    engine = Engine(options, pulse)

    def end(*_: object) -> None:
        engine.ending = True

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A life that was killed at its start has said nothing.
    pulse.count("lives", options.life - pulse.counts()["lives"])
    if options.audit:
        engine._scheduler.wait(30)
        engine._worker.wait(30)
        engine.audit()
    number = 0
    while not (engine.ending or engine.wrong or options.audit):
        number += 1
        engine.step(number)
    engine.close()
    gc.collect()
    left = open_fds() - before
    if left or mapped_memfds():
        engine.broken(f"left in the client: {dict(left)}, mapped {dict(mapped_memfds())}")
    pulse.close()
    return 3 if engine.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
