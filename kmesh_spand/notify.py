"""Tells systemd how the service is, if it asked (``NOTIFY_SOCKET``)."""

from __future__ import annotations

import contextlib
import os
import socket


def notify(state: str) -> None:
    """Sends ``READY=1``, ``STOPPING=1``, ``STATUS=…``; nothing happens without systemd."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    if address.startswith("@"):
        address = "\0" + address[1:]
    with (
        contextlib.suppress(OSError),
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock,
    ):
        sock.connect(address)
        sock.sendall(state.encode())
