"""Packets with file descriptors over a ``SOCK_SEQPACKET`` Unix socket."""

from __future__ import annotations

import array
import os
import socket
import struct
import time
import weakref
from typing import Protocol

from kmesh import errors

SOCKET_NAME = "session.sock"
REDIAL_SECONDS = 0.01
# As plain numbers: an enum's operators take longer than the rest of a look at a packet.
_FLAGS = int(socket.MSG_CMSG_CLOEXEC)
_CUT_CONTROL, _CUT_DATA = int(socket.MSG_CTRUNC), int(socket.MSG_TRUNC)
# pid, uid, gid
_CREDENTIALS = struct.Struct("=iII")
_FD_BYTES = array.array("i").itemsize
#: Room for one descriptor; the kernel flags a packet that had more.
_ANCILLARY_BYTES = socket.CMSG_SPACE(_FD_BYTES)


def dial(socket_dir: str | os.PathLike[str], timeout: float) -> socket.socket:
    """A non-blocking connection to the daemon's session socket, as ``try_dial`` opens it.

    Raises:
        DaemonUnavailable: also when it does not accept in time.
    """
    deadline = time.monotonic() + timeout
    while True:
        sock = try_dial(socket_dir)
        if sock is not None:
            return sock
        if time.monotonic() >= deadline:
            raise busy(socket_dir)
        time.sleep(REDIAL_SECONDS)


def try_dial(socket_dir: str | os.PathLike[str]) -> socket.socket | None:
    """One attempt; None when the daemon's backlog is full, which no poll can wait for.

    Raises:
        DaemonUnavailable: nothing listens there.
        PermissionDenied: the socket's mode does not let us.
        ConfigError: the path is too long for a socket's name.
    """
    path = os.path.join(socket_dir, SOCKET_NAME)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        sock.setblocking(False)
        sock.connect(path)
    except BlockingIOError:
        sock.close()
        return None
    except OSError as failed:
        sock.close()
        raise _refusal(path, failed) from None
    return sock


def busy(socket_dir: str | os.PathLike[str]) -> errors.DaemonUnavailable:
    """The error of a daemon that exists and does not accept."""
    return errors.DaemonUnavailable(f"{os.fspath(socket_dir)}: the daemon does not accept")


def _refusal(path: str, failed: OSError) -> errors.KMeshError:
    if isinstance(failed, PermissionError):
        return errors.PermissionDenied(
            f"may not connect to {path}, whose group and mode keep this user out",
            field="socket_dir",
        )
    if failed.errno is None:  # Python itself found the path too long.
        return errors.ConfigError(f"socket_dir: {path}: {failed}")
    return errors.DaemonUnavailable(f"{path}: {os.strerror(failed.errno)}: no daemon serves there")


def peer_pid(sock: socket.socket) -> int:
    """The process at the other end; 0 when it is not in our PID namespace."""
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid: int = _CREDENTIALS.unpack(credentials)[0]
    return pid


def receive(sock: socket.socket, buffer: bytearray) -> tuple[bytes, list[int]]:
    """One packet and its descriptors, which the caller owns; an empty packet is the end.

    Args:
        buffer: scratch, as long as a packet may be. Allocating that much for each packet would
            cost ten times what receiving does.

    Raises:
        BlockingIOError: none is there.
        ProtocolError: the packet or its descriptors were cut short; the connection must end.
    """
    try:
        size, ancillary, flags, _ = sock.recvmsg_into([buffer], _ANCILLARY_BYTES, _FLAGS)
    except ConnectionResetError:
        # The peer closed without reading all of ours; its last words are behind this error.
        size, ancillary, flags, _ = sock.recvmsg_into([buffer], _ANCILLARY_BYTES, _FLAGS)
    fds: list[int] = []
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            found = array.array("i")
            found.frombytes(content[: len(content) // _FD_BYTES * _FD_BYTES])
            fds.extend(found)
    if flags & (_CUT_CONTROL | _CUT_DATA):
        for fd in fds:
            os.close(fd)
        if flags & _CUT_DATA:
            raise errors.ProtocolError("a packet with more bytes than allowed")
        if not fds:
            raise errors.ProtocolError(
                "a packet's file descriptor could not be taken: none is left (ulimit -n)"
            )
        # The kernel says the same when only some could be taken.
        raise errors.ProtocolError(
            "a packet with more file descriptors than allowed, or than this process may open"
        )
    return bytes(memoryview(buffer)[:size]), fds


class Forked(Protocol):
    """Something that must let go of its socket in a forked child."""

    def forked(self) -> None: ...


_open: weakref.WeakSet[Forked] = weakref.WeakSet()


def close_in_child(owner: Forked) -> None:
    """Calls ``owner.forked()`` in every child that this process forks.

    A child that kept the connection open would keep the session alive after its owner's death.
    """
    _open.add(owner)


def _after_fork() -> None:
    for owner in list(_open):
        owner.forked()


os.register_at_fork(after_in_child=_after_fork)
