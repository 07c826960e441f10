"""Accepts connections of the session socket, or refuses them with a reason."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import socket
import struct
from collections.abc import Collection

from google.protobuf.message import Message

from kmesh import errors
from kmesh.v1 import session_socket_pb2
from kmesh_spand.control import limits
from kmesh_spand.control.connection import Connection, status_of
from kmesh_spand.control.crowd import Crowd, count_files, max_files
from kmesh_spand.control.handler import Handler
from kmesh_spand.control.registry import Peer

logger = logging.getLogger(__name__)

_UCRED = struct.Struct("iII")
#: Refused connections that are kept until they have said something.
_MAX_REFUSED = 4
_REFUSED_SECONDS = 1.0
_RETRY_SECONDS = 0.1


class Listener:
    """The listening socket and every connection that came from it."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        handler: Handler,
        sock: socket.socket,
        crowd: Crowd,
    ) -> None:
        self._loop = loop
        self._handler = handler
        self._sock = sock
        self._allowed = frozenset(handler.settings.allow_uids)
        self._connections: set[Connection] = set()
        self._refused = 0
        self._crowd = crowd
        self._limit = max_files()
        # Given up for a moment when a connection has to be refused and no fd is left.
        self._spare = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
        self._listening = True
        loop.add_reader(sock.fileno(), self._acceptable)

    def stop(self) -> None:
        """No new connection from now on."""
        if self._listening:
            self._listening = False
            self._loop.remove_reader(self._sock.fileno())

    def close(self, reason: str) -> None:
        """Ends every connection."""
        self.stop()
        for connection in list(self._connections):
            connection.close(reason)
        if self._spare >= 0:
            os.close(self._spare)
            self._spare = -1

    def notify(self, sessions: Collection[int], notice: Message) -> None:
        """Tells sessions something that they did not ask for."""
        for connection in list(self._connections):
            if connection.member is not None and connection.member.id in sessions:
                connection.notify(notice)

    def _acceptable(self) -> None:
        for _ in range(16):
            if not self._listening:
                return
            try:
                sock, _ = self._sock.accept()
            except BlockingIOError:
                return
            except OSError as failed:
                if failed.errno in (errno.EMFILE, errno.ENFILE):
                    if self._crowd.trim():
                        # It waits in the backlog until their files are free.
                        self._pause()
                        return
                    self._refuse_without_fd()
                    continue
                logger.error("accept: %s", failed.strerror)
                self._pause()
                return
            self._accepted(sock)

    def _accepted(self, sock: socket.socket) -> None:
        peer = Peer(
            *_UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))[:2]
        )
        refusal = self._refusal(peer)
        if refusal is None:
            connection = Connection(self._loop, self._handler, sock, peer, self._on_ended)
            self._connections.add(connection)
            return
        self._handler.counters["connections_refused"] += 1
        logger.warning("connection refused: %s", refusal, extra={"uid": peer.uid, "peer": peer.pid})
        if self._refused >= _MAX_REFUSED:
            self._say_and_close(sock, refusal)
            return
        # It is answered with its own request's id, if it says something soon.
        self._refused += 1
        self._connections.add(
            Connection(
                self._loop, self._handler, sock, peer, self._on_ended, refusal, _REFUSED_SECONDS
            )
        )

    def _refusal(self, peer: Peer) -> errors.RequestError | None:
        if peer.uid not in self._allowed:
            return errors.PermissionDenied(
                f"uid {peer.uid} may not connect: allow_uids has not got it", field="uid"
            )
        if len(self._connections) - self._refused >= self._handler.settings.max_sessions:
            return errors.Exhausted("sessions: max_sessions are connected")
        if self._files_left() < limits.FD_MARGIN and (
            self._crowd.trim() + self._files_left() < limits.FD_MARGIN
        ):
            return errors.Exhausted("file descriptors: the daemon's limit (ulimit -n) is near")
        return None

    def _files_left(self) -> int:
        # One more is open while they are counted.
        return self._limit - count_files() - 1

    def _on_ended(self, connection: Connection) -> None:
        self._connections.discard(connection)
        if connection.refused:
            self._refused -= 1

    def _refuse_without_fd(self) -> None:
        """Takes one connection with the spare fd, to tell it why it is not served."""
        self._handler.counters["connections_refused"] += 1
        if self._spare >= 0:
            os.close(self._spare)
            self._spare = -1
        with contextlib.suppress(OSError):
            sock, _ = self._sock.accept()
            self._say_and_close(sock, errors.Exhausted("file descriptors: none is left"))
        try:
            self._spare = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._pause()

    def _say_and_close(self, sock: socket.socket, failed: errors.RequestError) -> None:
        self._handler.count_refusal(failed)
        response = session_socket_pb2.Response(epoch=self._handler.epoch, status=status_of(failed))
        with contextlib.suppress(OSError):
            sock.setblocking(False)
            sock.send(response.SerializeToString(), socket.MSG_NOSIGNAL)
        sock.close()

    def _pause(self) -> None:
        """Stops accepting for a moment instead of spinning."""
        self.stop()
        self._loop.call_later(_RETRY_SECONDS, self._resume)

    def _resume(self) -> None:
        if not self._handler.draining and not self._listening:
            self._listening = True
            self._loop.add_reader(self._sock.fileno(), self._acceptable)
