"""Clients of a daemon with a disk: what they store, and what they find again."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import faulty
from daemon_process import Daemon

from kmesh.layout import Shard
from kmesh.session import ReserveBatch, Role, Session
from kmesh.store import put_spans, read_span
from kmesh.v1 import admin_pb2

SHARD = Shard(0, 2, 0, 2)
NAMESPACE = hashlib.blake2b(b"disk", digest_size=32).digest()
PATIENCE = 60.0
#: More than a tile, and no multiple of anything. Memory of ``SMALL`` has room for twelve.
LENGTH = 300_000
SMALL = {"host_memory": "4MiB", "slab_size": "4MiB", "disk_bytes": "64MiB"}


def name(number: int) -> bytes:
    return hashlib.blake2b(b"span %d" % number, digest_size=32).digest()


def payload(number: int) -> bytes:
    return hashlib.shake_128(b"payload %d" % number).digest(LENGTH)


class DiskFaults:
    """What goes wrong with the disk of a daemon; ``faulty`` says how."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir()
        self._directory = directory
        self.settings: dict[str, Any] = {
            "command": faulty.COMMAND,
            "env": {faulty.DIRECTORY: str(directory)},
        }

    def begin(self, fault: str) -> None:
        (self._directory / fault).touch()

    def end(self, fault: str) -> None:
        (self._directory / fault).unlink()


class Peer:
    """One client of a daemon, with staging for one span."""

    def __init__(self, daemon: Daemon) -> None:
        self.daemon = daemon
        self.session = Session.connect(str(daemon.socket_dir), role=Role.TOOL)
        self._staging = self.session.staging(LENGTH)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.session.close()

    def store(self, numbers: Iterable[int]) -> None:
        """One span after the other."""
        for number in numbers:
            assert self.put(number) == 0

    def put(self, number: int) -> int:
        """Stores one span; the reason if it was not."""
        batch = ReserveBatch(NAMESPACE, SHARD, name(number), [64], [0], [LENGTH])
        return put_spans(self.session, self._staging, batch, [payload(number)])[0]

    def cool(self, count: int) -> None:
        """Spans 0 … count - 1 are in files only: twelve others take their memory."""
        self.store(range(count))
        written(self.daemon, count)
        self.store(range(1000, 1012))
        written(self.daemon, count + 12)

    def fetch(self, numbers: Iterable[int], wait: float = 40.0) -> list[bytes | None]:
        """Payloads that an Acquire gets which waits for the disk; None where it got none."""
        keys = b"".join(map(name, numbers))
        acquired = self.session.acquire(keys, [SHARD], prefix=False, wait=wait, timeout=PATIENCE)
        with acquired as lease:
            return [
                None if reason else read_span(self.session, lease, entry)
                for entry, reason in enumerate(lease.reason)
            ]

    def indexed(self, number: int) -> bool:
        """Whether the index promises a span."""
        return self.session.index.probe(name(number), [SHARD.code()]).hits == 1


def written(daemon: Daemon, count: int) -> admin_pb2.StatusResponse:
    """Waits until so many spans are in files, and nothing else is to be written."""
    return daemon.wait_status(
        lambda s: s.disk.ready and s.disk.spans == count and not (s.disk.queued or s.disk.writing),
        PATIENCE,
    )


def files(directory: Path) -> list[Path]:
    """All that lies in the folders of a directory."""
    return sorted(directory.glob("??/*"))
