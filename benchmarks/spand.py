"""A daemon to measure, with its own directory, and spans to put in it."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import grpc

from demo.processes import Process
from kmesh.calls import ReserveBatch
from kmesh.errors import KMeshError
from kmesh.keys import KEY_BYTES, Namespace
from kmesh.layout import Shard
from kmesh.session import Role, Session
from kmesh.store import put_spans
from kmesh.v1 import admin_pb2, admin_pb2_grpc

ROOT = Path(__file__).resolve().parent.parent
START_SECONDS = 60.0
_PUT = 512


def environment(**more: str) -> dict[str, str]:
    """For children: this checkout's code, and nothing that configures a daemon."""
    ours = {k: v for k, v in os.environ.items() if not k.startswith("KMESH_")}
    paths = [str(ROOT / "client"), str(ROOT), str(ROOT / "vllm_connector")]
    # Behind them what the caller's environment adds: packages that lie apart.
    paths += filter(None, [os.environ.get("PYTHONPATH")])
    return {**ours, "PYTHONPATH": os.pathsep.join(paths), **more}


class Spand:
    """A running daemon.

    Attributes:
        socket_dir: where its sockets are.
        pid: of its supervisor.
    """

    def __init__(self, socket_dir: Path, pid: int) -> None:
        self.socket_dir = socket_dir
        self.pid = pid

    def connect(
        self, role: Role = Role.TOOL, engine: str = "", namespace: Namespace | None = None
    ) -> Session:
        """A new session, which the caller closes."""
        return Session.connect(
            self.socket_dir, role=role, engine_id=engine, namespace=namespace, client_name="bench"
        )

    @contextmanager
    def rpc(self) -> Iterator[tuple[grpc.Channel, tuple[tuple[str, str], ...]]]:
        """A gRPC channel, and the metadata of a session that lives as long."""
        with (
            self.connect() as session,
            grpc.insecure_channel(f"unix:{self.socket_dir}/grpc.sock") as channel,
        ):
            yield channel, (("kmesh-session", session.welcome.token),)

    def status(self) -> admin_pb2.StatusResponse:
        """What the daemon says of itself."""
        with self.rpc() as (channel, metadata):
            stub = admin_pb2_grpc.AdminStub(channel)
            answer: admin_pb2.StatusResponse = stub.Status(
                admin_pb2.StatusRequest(), metadata=metadata, timeout=20
            )
        return answer

    def settle(self) -> admin_pb2.StatusResponse:
        """Waits until all memory is there and nothing is leased or being stored."""
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            with contextlib.suppress(grpc.RpcError, KMeshError):
                status = self.status()
                whole = all(slab.populated >= slab.capacity for slab in status.slabs)
                if whole and not status.leases and not status.reservations:
                    return status
            time.sleep(0.05)
        raise TimeoutError(f"kmesh-spand is not at rest after {START_SECONDS:.0f} s")

    def processes(self) -> list[int]:
        """Pids of the supervisor and of all below it."""
        found = [self.pid]
        for pid in found:
            for children in Path(f"/proc/{pid}/task").glob("*/children"):
                found += [int(child) for child in children.read_text().split()]
        return found


@contextmanager
def serve(*, wait: bool = True, **settings: object) -> Iterator[Spand]:
    """Starts a daemon with these settings; all of its memory is there unless ``wait`` is False."""
    with tempfile.TemporaryDirectory(prefix="kmesh-bench-") as base:
        command = [sys.executable, "-m", "kmesh_spand", f"--socket-dir={base}/s"]
        command += [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
        log = Path(base) / "spand.log"
        with Process("kmesh-spand", command, log, env=environment()) as process:
            spand = Spand(Path(base) / "s", process.pid)
            if wait:
                process.wait_ready(lambda: _answers(spand), START_SECONDS)
                spand.settle()
            yield spand


def _answers(spand: Spand) -> bool:
    try:
        spand.connect().close()
    except KMeshError:
        return False
    return True


def store(
    session: Session, keys: bytes, shard: Shard, *, length: int, namespace: bytes = bytes(32)
) -> None:
    """Stores a full span of ``length`` zero bytes under each key.

    Raises:
        RuntimeError: one of them was not stored.
    """
    span, payload = session.welcome.span_tokens, bytes(length)
    staging = session.staging(_PUT * length)
    for begin in range(0, len(keys), _PUT * KEY_BYTES):
        part = keys[begin : begin + _PUT * KEY_BYTES]
        count = len(part) // KEY_BYTES
        first = begin // KEY_BYTES
        start = [(first + i) * span for i in range(count)]
        batch = ReserveBatch(namespace, shard, part, [span] * count, start, [length] * count)
        reasons = put_spans(session, staging, batch, [payload] * count)
        if any(reasons):
            raise RuntimeError(f"a span was not stored: {sorted(set(reasons))}")


def pss(pids: Sequence[int]) -> Mapping[str, int]:
    """Proportional set size in bytes of processes, by mapping: memfd names, else "other"."""
    found: dict[str, int] = {}
    for pid in pids:
        name = "other"
        for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
            head = line.split()
            if not head[0].endswith(":"):
                path = head[5] if len(head) > 5 else ""
                name = path.removeprefix("/memfd:") if path.startswith("/memfd:") else "other"
            elif head[0] == "Pss:":
                found[name] = found.get(name, 0) + int(head[1]) * 1024
    return found
