"""Packets with file descriptors over a ``SOCK_SEQPACKET`` Unix socket."""

from __future__ import annotations

import array
import errno
import os
import socket
import time

from kmesh import errors

SOCKET_NAME = "session.sock"
_FD_BYTES = array.array("i").itemsize
#: Room for one descriptor; the kernel flags a packet that had more.
_ANCILLARY_BYTES = socket.CMSG_SPACE(_FD_BYTES)


def dial(socket_dir: str | os.PathLike[str], timeout: float) -> socket.socket:
    """A non-blocking connection to the daemon's session socket.

    Raises:
        DaemonUnavailable: nothing listens there, or it does not accept in time.
        PermissionDenied: the socket's mode does not let us.
        ConfigError: the path is too long for a socket's name.
    """
    path = os.path.join(socket_dir, SOCKET_NAME)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        deadline = time.monotonic() + timeout
        sock.setblocking(False)
        while True:
            try:
                sock.connect(path)
                return sock
            except BlockingIOError:
                # The backlog is full, and poll does not tell when it no longer is.
                if time.monotonic() >= deadline:
                    raise errors.DaemonUnavailable(f"{path}: does not accept") from None
                time.sleep(0.01)
    except BaseException as failed:
        sock.close()
        raise refusal(path, failed) from None


def refusal(path: str, failed: BaseException) -> BaseException:
    """What a failed connect means."""
    if isinstance(failed, PermissionError):
        return errors.PermissionDenied(f"may not connect to {path}", field="socket_dir")
    if isinstance(failed, OSError):
        if failed.errno is None or failed.errno == errno.ENAMETOOLONG:
            return errors.ConfigError(f"socket_dir: {path}: {failed}")
        return errors.DaemonUnavailable(f"{path}: {os.strerror(failed.errno)}")
    return failed


def receive(sock: socket.socket, size: int) -> tuple[bytes, list[int]]:
    """One packet and its descriptors, which the caller owns; an empty packet is the end.

    Raises:
        BlockingIOError: none is there.
        ProtocolError: the packet or its descriptors were cut short; the connection must end.
    """
    data, ancillary, flags, _ = sock.recvmsg(size, _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC)
    fds: list[int] = []
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            found = array.array("i")
            found.frombytes(content[: len(content) // _FD_BYTES * _FD_BYTES])
            fds.extend(found)
    if flags & (socket.MSG_CTRUNC | socket.MSG_TRUNC):
        for fd in fds:
            os.close(fd)
        what = "file descriptors" if flags & socket.MSG_CTRUNC else "bytes"
        raise errors.ProtocolError(f"a packet with more {what} than allowed")
    return data, fds
