"""Stands in for systemd where a service keeps file descriptors; the rules are systemd's own.

It takes what is sent to ``NOTIFY_SOCKET``, keeps the file descriptors, and starts the service
again with them.
"""

from __future__ import annotations

import array
import os
import socket
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Self

#: Moves the file descriptors to where they are expected, then becomes the service.
_LAUNCH = """
import fcntl, os, sys
fds = [int(fd) for fd in sys.argv[1].split(",") if fd]
above = [fcntl.fcntl(fd, fcntl.F_DUPFD, max([*fds, len(fds) + 3]) + 1) for fd in fds]
for place, fd in enumerate(above, 3):
    os.dup2(fd, place)
for fd in {*fds, *above} - set(range(3, 3 + len(fds))):
    os.close(fd)
os.environ["LISTEN_PID"] = str(os.getpid())
os.environ["LISTEN_FDS"] = str(len(fds))
os.environ["LISTEN_FDNAMES"] = sys.argv[2]
os.execv(sys.argv[3], sys.argv[3:])
"""


class Start(NamedTuple):
    """A command, the file descriptors that it is given, and what its environment has more."""

    command: tuple[str, ...]
    pass_fds: tuple[int, ...]
    env: dict[str, str]


class ServiceManager:
    """Holds what a daemon stores, until the end of the context.

    Args:
        address: of the socket that is made for it.
        size: ``FileDescriptorStoreMax``.

    Attributes:
        states: lines that were sent, but those about the store.
        stored: names and file descriptors; owned.
        refused: names of which no more were taken.
    """

    def __init__(self, address: Path, size: int = 4096) -> None:
        self._address = address
        self._size = size
        self.states: list[str] = []
        self.stored: list[tuple[str, int]] = []
        self.refused: list[str] = []
        self._change = threading.Condition()
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._sock.bind(str(address))
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as last:
            last.sendto(b"", str(self._address))
        self._thread.join()
        self._sock.close()
        self.clear()

    def clear(self) -> None:
        """Forgets the store, as when a service is stopped for good."""
        with self._change:
            for _, fd in self.stored:
                os.close(fd)
            self.stored.clear()

    @property
    def names(self) -> list[str]:
        """Of what is stored, without the part that all have in common."""
        with self._change:
            return sorted(name.removeprefix("kmesh-store-") for name, _ in self.stored)

    def fd(self, name: str) -> int:
        """What is stored under a name."""
        with self._change:
            return next(fd for stored, fd in self.stored if stored == f"kmesh-store-{name}")

    def replace(self, name: str, *fds: int) -> None:
        """Stores other file descriptors, which it owns then, instead."""
        with self._change:
            self._remove(f"kmesh-store-{name}")
            self.stored += [(f"kmesh-store-{name}", fd) for fd in fds]

    def start(self, command: Sequence[str]) -> Start:
        """How the service is started with what is stored now."""
        with self._change:
            stored = list(self.stored)
        fds, names = [fd for _, fd in stored], ":".join(name for name, _ in stored)
        if stored:
            launch = (sys.executable, "-c", _LAUNCH, ",".join(map(str, fds)), names)
            command = (*launch, *command)
        env = {"NOTIFY_SOCKET": str(self._address), "FDSTORE": str(self._size)}
        return Start(tuple(command), tuple(fds), env)

    def _serve(self) -> None:
        while True:
            data, ancillary, flags, _ = self._sock.recvmsg(
                4096, socket.CMSG_SPACE(768 * array.array("i").itemsize), socket.MSG_CMSG_CLOEXEC
            )
            assert not flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC)
            fds = array.array("i")
            for _level, _type, content in ancillary:
                fds.frombytes(content)
            if not data:
                return
            with self._change:
                self._take(data.decode(), list(fds))

    def _take(self, text: str, fds: list[int]) -> None:
        lines = dict(line.split("=", 1) for line in text.splitlines())
        if "BARRIER" in lines:
            assert lines == {"BARRIER": "1"}
        elif lines.get("FDSTORE") == "1":
            self._store(lines["FDNAME"], fds)
            return
        elif lines.get("FDSTOREREMOVE") == "1":
            self._remove(lines["FDNAME"])
        else:
            self.states.append(text)
        for fd in fds:
            os.close(fd)

    def _store(self, name: str, fds: list[int]) -> None:
        assert len(name) <= 255
        assert ":" not in name
        assert name.isprintable()
        for fd in fds:
            if len(self.stored) >= self._size:
                self.refused.append(name)
                os.close(fd)
            elif any(os.path.sameopenfile(fd, held) for _, held in self.stored):
                os.close(fd)
            else:
                self.stored.append((name, fd))

    def _remove(self, name: str) -> None:
        for item in [item for item in self.stored if item[0] == name]:
            os.close(item[1])
            self.stored.remove(item)
