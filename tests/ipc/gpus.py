"""Daemons with GPU memory, for tests: what they hold, and drivers that fail."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fake_gpu
from daemon_process import Daemon, environment
from leaks import open_fds

from kmesh.calls import ReserveBatch
from kmesh.cuda.device import Device
from kmesh.cuda.memory import DeviceMemory
from kmesh.cuda.reading import read_span
from kmesh.cuda.slabs import DeviceSlabs
from kmesh.handles import HandleKind
from kmesh.keys import Namespace
from kmesh.layout import Shard
from kmesh.lease import Lease
from kmesh.memory import Staging
from kmesh.session import Role, Session
from kmesh.store import put_spans
from kmesh.v1 import admin_pb2

TESTS = Path(__file__).parents[1]


NAMESPACE = Namespace("m", "w", "float32", 1, 1, 1)
SHARD = fake_gpu.SHARD


def key(number: int) -> bytes:
    return number.to_bytes(32, "little")


class Client:
    """One session with staging, and the daemon's slabs on a GPU."""

    staging: Staging

    def __init__(
        self, session: Session, staging: Staging | None, slabs: DeviceSlabs, gpu: Device
    ) -> None:
        self.session, self.slabs, self.gpu = session, slabs, gpu
        if staging is not None:
            self.staging = staging

    def _where(self, device: str | None) -> str:
        return self.gpu.uuid if device is None else device

    def put(
        self, numbers: list[int], payloads: list[bytes], device: str | None = None
    ) -> list[int]:
        keys = b"".join(map(key, numbers))
        sizes = [len(payload) for payload in payloads]
        tokens, starts = [64] * len(numbers), [0] * len(numbers)
        digest = NAMESPACE.digest()
        batch = ReserveBatch(digest, SHARD, keys, tokens, starts, sizes, device=self._where(device))
        return put_spans(self.session, self.staging, batch, payloads)

    def acquire(self, *numbers: int, device: str | None = None) -> Lease:
        keys = b"".join(map(key, numbers))
        return self.session.acquire(keys, [SHARD], prefix=False, device=self._where(device))

    def read(self, number: int, device: str | None = None) -> bytes | None:
        """A payload, or None for a miss."""
        with self.acquire(number, device=device) as lease:
            if not lease.hits:
                return None
            return read_span(self.slabs, self.gpu, lease, 0)


@contextmanager
def client(daemon: Daemon, gpu: Device, staging: int = 8 << 20) -> Iterator[Client]:
    """A client with so many bytes of staging, or none yet."""
    daemon.wait_populated()
    session = Session.connect(daemon.socket_dir, role=Role.TOOL)
    with session, DeviceSlabs(session, gpu) as slabs:
        yield Client(session, session.staging(staging) if staging else None, slabs, gpu)
    # What is mapped would count as left behind.
    del session.index
    session._slabs.clear()


class Faults:
    """Files that make a daemon's driver refuse; ``fake_gpu`` says how.

    Args:
        real: the driver is the machine's.
    """

    def __init__(self, directory: Path, *, real: bool = False) -> None:
        directory.mkdir()
        self.directory = directory
        self.settings: dict[str, Any] = {
            "command": fake_gpu.COMMAND,
            "env": {
                fake_gpu.DIRECTORY: str(directory),
                "PYTHONPATH": os.pathsep.join(
                    [environment()["PYTHONPATH"], str(TESTS), str(TESTS / "ipc")]
                ),
                "CUDA_VISIBLE_DEVICES": "",
                fake_gpu.REAL: str(int(real)),
            },
        }

    def begin(self, name: str, error: str = "999 CUDA_ERROR_UNKNOWN") -> None:
        part = self.directory / f".{name}"
        part.write_text(error)
        part.rename(self.directory / name)

    def reached(self, name: str) -> bool:
        """Whether something hangs there."""
        return (self.directory / f"{name}.reached").exists()

    def end(self, name: str) -> None:
        (self.directory / name).unlink()


def command(code: str) -> tuple[str, ...]:
    """That starts ``fake_gpu`` in a process that has run ``code`` before."""
    program, path = fake_gpu.COMMAND
    begin = f"import runpy, sys; sys.argv[0] = 'spand'; runpy.run_path({path!r}, None, '__main__')"
    return program, "-c", f"{code}\n{begin}"


def vram(pid: int) -> dict[str, int]:
    """GPU memory that a process holds file descriptors of."""
    return {link: n for link, n in open_fds(pid).items() if "fake-vram" in link}


def import_slab(
    daemon: Daemon, device: Device, slab: int, *, writable: bool = False
) -> DeviceMemory:
    with Session.connect(daemon.socket_dir, role=Role.TOOL) as session:
        handle = session.export_slab(slab)
    try:
        assert (handle.kind, handle.device) == (HandleKind.CUDA_VMM_FD, device.uuid)
        return DeviceMemory.open(device, handle.fd, handle.size, writable=writable)
    finally:
        os.close(handle.fd)


#: A client that imports and registers every slab, on a driver that fails as ``fake_gpu`` says.
_IMPORTING = """
import sys
import fake_gpu
from kmesh.cuda.device import Device, see_all
from kmesh.cuda.slabs import DeviceSlabs
from kmesh.layout import Shard
from kmesh.session import Role, Session
see_all()
session = Session.connect(sys.argv[1], role=Role.TOOL)
shard = Shard.from_code(int(sys.argv[4]))
lease = session.acquire(bytes.fromhex(sys.argv[3]), [shard], device=sys.argv[2])
assert lease.hits
with Device(fake_gpu.load(), sys.argv[2]) as device, DeviceSlabs(session, device) as slabs:
    for number in range(session.welcome.slab_count):
        slabs.slab(number)
    print("done", flush=True)
    sys.stdin.read()
"""
#: Calls of the driver that it makes, in their order.
IMPORT_STEPS = (
    *("retain_context", "register", "device_pointer", "allocate", "copy", "read"),
    *("create", "export_fd", "import_fd", "reserve", "map", "set_access"),
)


@contextmanager
def importing(
    daemon: Daemon, faults: Faults, device: Device, keys: bytes, shard: Shard = SHARD
) -> Iterator[subprocess.Popen[bytes]]:
    """Another process that imports all slabs; it is killed at the end, if it still runs.

    It leases ``keys`` on the GPU, and says "done" when it has all slabs.
    """
    arguments = [str(daemon.socket_dir), device.uuid, keys.hex(), str(shard.code())]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", _IMPORTING, *arguments],
        env={**environment(), **faults.settings["env"]},
        stdin=pipe,
        stdout=pipe,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def ledger(status: admin_pb2.StatusResponse) -> tuple[Any, ...]:
    """What must be the same before and after a fault."""
    return (
        status.leased_bytes,
        status.reservations,
        status.staging_bytes,
        [(slab.slab, slab.kind, slab.size, slab.used, slab.device) for slab in status.slabs],
        [(gpu.device, gpu.slabs, gpu.slab_bytes) for gpu in status.gpus],
    )


def refused(daemon: Daemon) -> tuple[int, str]:
    """Exit status and last words of a daemon that does not start; it has left nothing."""
    status = daemon.process.wait(60)
    lines = [line for line in daemon.log().splitlines() if "could not start" in line]
    assert len(lines) == 1, daemon.log()
    assert "Traceback" not in daemon.log()
    return status, lines[0].partition("could not start: ")[2]
