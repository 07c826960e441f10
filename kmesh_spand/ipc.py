"""How the daemon's processes talk to each other: over ``SOCK_SEQPACKET`` pairs.

The supervisor makes every pair. A message is one packet; ``Staging``, ``NewWorker``, ``Exported``,
``GpuSlab`` and ``GpuWorker`` of one that was started carry exactly one file descriptor each, the
others none.
"""

from __future__ import annotations

import array
import os
import socket

import msgspec

from kmesh_spand.diskmessages import DiskMessage
from kmesh_spand.jobmessages import JobMessage
from kmesh_spand.messages import ProcessMessage

MAX_BYTES = 128 * 1024

AnyMessage = ProcessMessage | JobMessage | DiskMessage

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)


def pair() -> tuple[socket.socket, socket.socket]:
    """Two connected ends, both closed on exec."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def send(sock: socket.socket, message: AnyMessage, fd: int | None = None) -> None:
    """Sends one message; ``fd`` stays the caller's.

    Raises:
        BlockingIOError: the socket doesn't block and its peer doesn't read.
        OSError: the peer is gone.
    """
    ancillary = []
    if fd is not None:
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))]
    sock.sendmsg([_encoder.encode(message)], ancillary, socket.MSG_NOSIGNAL)


def receive(sock: socket.socket) -> tuple[AnyMessage, int | None]:
    """One message, and its fd, which the caller owns.

    None for a message that carries one: this process had no descriptor left for it.

    Raises:
        EOFError: the peer is gone.
        BlockingIOError: the socket doesn't block and nothing is there.
        OSError: the packet was longer than any message.
    """
    data, ancillary, flags, _ = sock.recvmsg(
        MAX_BYTES, socket.CMSG_SPACE(array.array("i").itemsize), socket.MSG_CMSG_CLOEXEC
    )
    fds = array.array("i")
    for _level, _type, content in ancillary:
        fds.frombytes(content)
    if flags & socket.MSG_TRUNC:
        for fd in fds:
            os.close(fd)
        raise OSError("a message between the daemon's processes was cut short")
    if not data:
        raise EOFError
    return _decoder.decode(data), fds[0] if fds else None
