"""``/livez``, ``/readyz``, ``/metrics`` over HTTP, on ``metrics.sock`` and where asked on TCP."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import struct
from collections.abc import Callable

from kmesh_spand.control.readiness import Readiness

_REQUEST_BYTES = 8192
_SECONDS = 5.0
#: At a time. More are hung up on: sessions need the file descriptors.
_CONNECTIONS = 8
_UCRED = struct.Struct("iII")
_JSON = "application/json"

#: Status line, content type, body.
Answer = tuple[str, str, bytes]


class Web:
    """Answers GET and nothing else; one request a connection.

    Args:
        allowed: uids that may read metrics over the Unix socket. Probes may be read by
            whoever can connect, like gRPC's health.

    Attributes:
        page: makes the metrics page, as content type and text; None while it is being loaded.
    """

    def __init__(self, readiness: Readiness, allowed: frozenset[int]) -> None:
        self.page: Callable[[], tuple[str, bytes]] | None = None
        self._readiness = readiness
        self._allowed = allowed
        self._open = 0
        self._servers: list[asyncio.Server] = []

    async def listen_unix(self, path: str, mode: int) -> None:
        """Serves on a socket; OSError if it can't be had."""
        sock = _bind(path, mode)
        self._servers.append(
            await asyncio.start_unix_server(self._serve, sock=sock, limit=_REQUEST_BYTES)
        )

    async def listen_tcp(self, address: str) -> None:
        """Serves on ``HOST:PORT``; OSError if it can't be had."""
        host, _, port = address.rpartition(":")
        self._servers.append(
            await asyncio.start_server(
                self._serve, host.strip("[]"), int(port), limit=_REQUEST_BYTES
            )
        )

    def close(self) -> None:
        for server in self._servers:
            server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._open >= _CONNECTIONS:
            writer.close()
            return
        self._open += 1
        try:
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), _SECONDS)
            status, kind, body = self._answer(head, self._peer(writer))
            writer.write(
                f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
                "Connection: close\r\n\r\n".encode()
                + body
            )
            await asyncio.wait_for(writer.drain(), _SECONDS)
        except (TimeoutError, OSError, EOFError, asyncio.LimitOverrunError):
            return
        finally:
            self._open -= 1
            writer.close()

    def _peer(self, writer: asyncio.StreamWriter) -> int | None:
        """The caller's uid on a Unix socket, None on TCP."""
        sock = writer.get_extra_info("socket")
        if sock.family != socket.AF_UNIX:
            return None
        credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
        return int(_UCRED.unpack(credentials)[1])

    def _answer(self, head: bytes, uid: int | None) -> Answer:
        method, _, rest = head.partition(b" ")
        path = rest.partition(b" ")[0].partition(b"?")[0]
        if method != b"GET":
            return "405 Method Not Allowed", "text/plain", b"GET only\n"
        match path:
            case b"/livez":
                return self._live()
            case b"/readyz":
                return self._ready()
            case b"/metrics":
                return self._metrics(uid)
        return "404 Not Found", "text/plain", b"GET /metrics, /livez or /readyz\n"

    def _live(self) -> Answer:
        live = self._readiness.live
        seconds = round(self._readiness.turned_seconds, 3)
        body = {"live": live, "seconds_since_turn": seconds}
        return _status(live), _JSON, json.dumps(body).encode() + b"\n"

    def _ready(self) -> Answer:
        reasons = self._readiness.reasons()
        body = {
            "ready": not reasons,
            "reasons": [{"name": name, "text": text} for name, text in reasons.items()],
            "warnings": [
                {"name": name, "text": text} for name, text in self._readiness.warnings().items()
            ],
        }
        return _status(not reasons), _JSON, json.dumps(body).encode() + b"\n"

    def _metrics(self, uid: int | None) -> Answer:
        if uid is not None and uid not in self._allowed:
            return "403 Forbidden", "text/plain", f"uid {uid} may not read metrics\n".encode()
        if self.page is None:
            return _status(False), "text/plain", b"starting\n"
        kind, body = self.page()
        return "200 OK", kind, body


def _bind(path: str, mode: int) -> socket.socket:
    with contextlib.suppress(FileNotFoundError):
        # Of an earlier control process.
        os.unlink(path)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    before = os.umask(0o177)
    try:
        sock.bind(path)
    except BaseException:
        sock.close()
        raise
    finally:
        os.umask(before)
    os.chmod(path, mode)
    return sock


def _status(good: bool) -> str:
    return "200 OK" if good else "503 Service Unavailable"
