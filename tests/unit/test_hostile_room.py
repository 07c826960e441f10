"""Hostile clients against control's own parts, so that there can be very many of them."""

from __future__ import annotations

import contextlib
import logging
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from hostile import Hostile, attack, receive
from leaks import open_fds
from room import Room, room

from kmesh.v1 import session_socket_pb2
from kmesh_spand.control.connection import Connection

CASES = 90_000
_STAGING = session_socket_pb2.Request(id=1, attach_staging={"size": 262_144}).SerializeToString()


def _give_staging(parts: Room, sock: socket.socket) -> None:
    """So that what it commits is copied. There may be none left for it, too."""
    sock.send(_STAGING)
    answered = []

    def heard() -> bool:
        with contextlib.suppress(BlockingIOError):
            answered.append(receive(sock))
        return bool(answered)

    parts.turn(heard)


@pytest.fixture
def parts(socket_dir: Path) -> Iterator[Room]:
    with room(socket_dir, slab_size="1MiB") as made:
        yield made


class Errors(logging.Handler):
    """Keeps what is logged as an error: there is to be none, whatever clients send."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.seen: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.seen.append(self.format(record))


@pytest.fixture
def errors() -> Iterator[list[str]]:
    handler = Errors()
    logging.getLogger("kmesh_spand").addHandler(handler)
    logging.getLogger("asyncio").addHandler(handler)
    yield handler.seen
    logging.getLogger("kmesh_spand").removeHandler(handler)
    logging.getLogger("asyncio").removeHandler(handler)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ninety_thousand_hostile_packets(parts: Room, errors: list[str], run_seed: int) -> None:
    hostile = Hostile(run_seed)
    before = open_fds()
    sessions: list[tuple[socket.socket, Connection]] = []
    sent = rounds = 0
    while sent < CASES:
        rounds += 1
        if len(sessions) < 6:
            sessions.append(parts.session())
            _give_staging(parts, sessions[-1][0])
        chosen = hostile.rng.randrange(len(sessions))
        sock, _ = sessions[chosen]
        count, alive = attack(sock, hostile, parts.turn)
        sent += count
        if not alive or hostile.rng.random() < 0.03:
            # Some leave with requests under way.
            if alive:
                sock.send(hostile.request().SerializeToString())
            sessions.pop(chosen)[0].close()
        if rounds % 250 == 0:
            parts.core.check()
        assert not errors, errors
    assert all(hostile.made[sort] > 100 for sort in ("cut", "flipped", "random", "replayed"))
    assert hostile.made["reordered"] > 1000
    assert hostile.made["oversized"] > 20
    counters = parts.core.counters
    # It was no use of time to send what is refused at the door: the core has been everywhere.
    for name in ("committed", "evicted", "hits", "released", "aborted", "reported", "refused"):
        assert counters[name], dict(counters)
    for sock, _ in sessions:
        sock.close()
    parts.turn(lambda: not parts.handler.registry.members)
    parts.turn(lambda: not parts.staging.used and parts.core.idle)
    parts.core.check()
    status = parts.core.views.status()
    assert (status.sessions, status.leases, status.reservations) == (0, 0, 0)
    assert not parts.handler._pending
    assert not parts.handler._of_session
    for writer in parts.handler.applier._indexes.values():
        # One key under two salts, which no honest client makes, is one entry of the index.
        assert 0 < writer.live <= status.index_entries
    assert open_fds() == before
    assert not errors, errors
    # And it serves.
    sock, _ = parts.session()
    with sock:
        sock.send(session_socket_pb2.Request(id=7, ping={}).SerializeToString())
        parts.turn()
        assert session_socket_pb2.Response.FromString(sock.recv(4096)).HasField("pong")
    parts.turn()
