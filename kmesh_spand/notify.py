"""Tells systemd how the service is, if it asked (``NOTIFY_SOCKET``)."""

from __future__ import annotations

import array
import contextlib
import os
import socket

#: A manager that does not read for so long is not waited for.
SECONDS = 10.0


def notify(state: str) -> None:
    """Sends ``READY=1``, ``STOPPING=1``, ``STATUS=…``; nothing happens without systemd."""
    with contextlib.suppress(OSError):
        send(state)


def send(state: str, fd: int | None = None, seconds: float = SECONDS) -> None:
    """Sends lines of ``NAME=VALUE``, with a file descriptor that stays the caller's.

    Nothing happens without systemd. ``seconds``: how long to wait, at most.

    Raises:
        OSError: it could not be sent, or not in time.
    """
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    if address.startswith("@"):
        address = "\0" + address[1:]
    ancillary = []
    if fd is not None:
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
        sock.settimeout(seconds)
        sock.connect(address)
        sock.sendmsg([state.encode()], ancillary, socket.MSG_NOSIGNAL)
