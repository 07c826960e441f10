"""A daemon takes over from the one that runs, on the same directory: ``kmesh-spand --upgrade``.

    new: Ask(manifest)       old: Refused, or Part … with all file descriptors
    new: Have                old: ends its children, releases the life, Yours
    new: begins its life, serves, Serving                old: ends

Whoever has begun the life of the memory serves it, and nobody else (``life.py``). Until the last
message the old daemon takes it back when the new one goes; when the old one goes before, the new
one has all that it needs.
"""

from __future__ import annotations

import array
import contextlib
import logging
import os
import socket
import struct
from collections.abc import Sequence

import msgspec

from kmesh.errors import ConfigError
from kmesh_spand import manifest as manifests
from kmesh_spand.inherit import Named
from kmesh_spand.life import Life
from kmesh_spand.place import Place
from kmesh_spand.settings import UPGRADE_SOCKET, Settings
from kmesh_spand.storage import catalog_bytes

logger = logging.getLogger(__name__)

LOCK, SESSIONS, UPGRADES = "lock", "sessions", "upgrades"
#: Most fds that the kernel takes in one packet, with room to spare.
FDS = 200
#: A daemon that answers does so sooner.
ANSWER_SECONDS = 30.0
_BYTES = 192 << 10


class _Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """One packet."""


class Ask(_Message, frozen=True):
    """What the new daemon would make by itself, as ``manifest`` writes it."""

    manifest: bytes


class Refused(_Message, frozen=True):
    text: str


class Part(_Message, frozen=True):
    """Names of the packet's file descriptors, in their order."""

    names: tuple[str, ...]
    last: bool


class Have(_Message, frozen=True):
    """The new daemon has checked it all, and can serve."""


class Yours(_Message, frozen=True):
    """No process of the old daemon uses the memory any more."""


class Serving(_Message, frozen=True):
    """The old daemon is not needed any more."""


_AnyMessage = Ask | Refused | Part | Have | Yours | Serving
_decoder: msgspec.msgpack.Decoder[_AnyMessage] = msgspec.msgpack.Decoder(_AnyMessage)


def send(sock: socket.socket, message: _AnyMessage, fds: Sequence[int] = ()) -> None:
    """Sends one message; the file descriptors stay the caller's.

    Raises:
        OSError: the peer is gone, or does not read.
    """
    ancillary = []
    if fds:
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
    sock.sendmsg([msgspec.msgpack.encode(message)], ancillary, socket.MSG_NOSIGNAL)


def receive(sock: socket.socket) -> tuple[_AnyMessage, list[int]]:
    """One message, and its file descriptors, which the caller owns.

    Raises:
        EOFError: the peer is gone.
        OSError: it does not answer, or sends what is no message.
    """
    data, ancillary, flags, _ = sock.recvmsg(
        _BYTES, socket.CMSG_SPACE(FDS * array.array("i").itemsize), socket.MSG_CMSG_CLOEXEC
    )
    fds = array.array("i")
    for _level, _type, content in ancillary:
        fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
    try:
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            raise OSError("a message of an upgrade was cut short")
        if not data:
            raise EOFError
        message = _decoder.decode(data)
        if len(fds) != (len(message.names) if isinstance(message, Part) else 0):
            raise OSError("a message of an upgrade has not the file descriptors that it names")
    except BaseException as failed:
        for fd in fds:
            os.close(fd)
        if isinstance(failed, msgspec.MsgspecError):
            raise OSError(f"a message of an upgrade can't be read: {failed}") from None
        raise
    return message, list(fds)


def send_all(sock: socket.socket, named: Sequence[Named]) -> None:
    """Sends all file descriptors; they stay the caller's.

    Raises:
        OSError: as ``send``.
    """
    for at in range(0, len(named), FDS):
        some = named[at : at + FDS]
        part = Part(tuple(name for name, _ in some), at + FDS >= len(named))
        send(sock, part, [fd for _, fd in some])


def peer(sock: socket.socket) -> tuple[int, int]:
    """Process and uid at the other end."""
    size = struct.calcsize("3i")
    pid, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return pid, uid


def trusted(uid: int) -> bool:
    """Whether a process of that uid may have the daemon's memory, or give it."""
    return uid in (0, os.geteuid())


class Predecessor:
    """The new daemon's side: the daemon that runs.

    Attributes:
        memory: what it has; the caller takes it out, and owns it then.
        pid: its process.
    """

    def __init__(self, settings: Settings, version: str) -> None:
        """Asks, and takes what comes.

        Raises:
            ConfigError: there is no daemon, or it refuses; it goes on.
            OSError: it does not answer.
        """
        self.memory: list[Named] = []
        self._others: dict[str, int] = {}
        self._sock = _connect(settings)
        try:
            self.pid, uid = peer(self._sock)
            if not trusted(uid):
                raise ConfigError(f"upgrade: the daemon that runs is of another user, {uid}")
            logger.info("upgrade: taking over from process %d", self.pid)
            mine = manifests.Manifest.of(settings, version, catalog_bytes(settings))
            send(self._sock, Ask(manifests.encode(mine)))
            self._take()
        except EOFError:
            self.close()
            raise OSError("upgrade: the daemon that runs has ended, or broken off") from None
        except TimeoutError:
            self.close()
            raise OSError("upgrade: the daemon that runs does not answer") from None
        except BaseException:
            self.close()
            raise

    def _take(self) -> None:
        last = False
        while not last:
            message, fds = receive(self._sock)
            if isinstance(message, Refused):
                raise ConfigError(f"upgrade: the daemon that runs goes on: {message.text}")
            if not isinstance(message, Part):
                raise OSError(f"upgrade: unexpected answer {type(message).__name__}")
            last = message.last
            for name, fd in zip(message.names, fds, strict=True):
                if name in (LOCK, SESSIONS, UPGRADES) and name not in self._others:
                    self._others[name] = fd
                else:
                    self.memory.append(Named(name, fd))

    def place(self, settings: Settings) -> Place:
        """Its directory and sockets, shared with it.

        Raises:
            OSError: it has not sent them.
        """
        if len(self._others) != 3:
            raise OSError("upgrade: lock or sockets are missing")
        others, self._others = self._others, {}
        listeners = [socket.socket(fileno=others[name]) for name in (SESSIONS, UPGRADES)]
        place = Place(settings.socket_dir, others[LOCK], *listeners)
        place.lent = True
        return place

    def wait_to_begin(self, life: Life) -> bool:
        """Says that all is here, and begins the life when the old daemon's has ended.

        Returns:
            Whether it has given it. If not, it is gone, and its sockets may be.

        Raises:
            OSError: it goes on itself, or does not answer.
        """
        given = False
        try:
            send(self._sock, Have())
            message, _ = receive(self._sock)
            given = isinstance(message, Yours)
            if isinstance(message, Refused):
                raise OSError(f"upgrade: the daemon that runs goes on: {message.text}")
        except (ConnectionError, EOFError):
            logger.warning("upgrade: the other daemon is gone")
        except TimeoutError:
            raise OSError("upgrade: the daemon that runs does not answer") from None
        if not life.begin(ANSWER_SECONDS):
            raise OSError("upgrade: the other daemon has not let go of the memory")
        return given

    def serving(self) -> None:
        """It may end."""
        # If it has ended already, that is as well.
        with contextlib.suppress(OSError):
            send(self._sock, Serving())
        logger.info("upgrade: done")
        self.close()

    def close(self) -> None:
        """Breaks off, unless it was said that this daemon serves."""
        self._sock.close()
        for fd in (*self._others.values(), *(fd for _, fd in self.memory)):
            os.close(fd)
        self._others.clear()
        self.memory.clear()


def _connect(settings: Settings) -> socket.socket:
    path = os.path.join(settings.socket_dir, UPGRADE_SOCKET)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    try:
        sock.settimeout(ANSWER_SECONDS)
        sock.connect(path)
    except (FileNotFoundError, ConnectionRefusedError):
        sock.close()
        raise ConfigError(f"upgrade: no daemon serves {settings.socket_dir}") from None
    except BaseException:
        sock.close()
        raise
    return sock
