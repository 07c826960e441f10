"""The fake daemon waits for a client that reads late."""

from __future__ import annotations

import contextlib
import time

from kmesh.hello import Role, hello
from kmesh.testing import FakeDaemon
from kmesh.v1 import session_socket_pb2, sessions_pb2

#: More small packets than a socket of the usual size holds.
PINGS = 400


def test_answers_wait_for_a_place_in_the_socket() -> None:
    with FakeDaemon() as daemon, daemon.dial() as sock:
        greeting = hello(Role.TOOL, "", None, "test")
        sock.send(session_socket_pb2.Request(id=1, hello=greeting).SerializeToString())
        answers: list[int] = []
        sent = 0
        until = time.monotonic() + 60
        stalled = 0.0
        while len(answers) < PINGS + 1:
            assert time.monotonic() < until
            with contextlib.suppress(BlockingIOError):
                while sent < PINGS:
                    ping = session_socket_pb2.Request(id=sent + 2, ping=sessions_pb2.Ping())
                    sock.send(ping.SerializeToString())
                    sent += 1
            if not stalled:
                stalled = time.monotonic() + 0.5
            if time.monotonic() < stalled:
                time.sleep(0.01)
                continue
            with contextlib.suppress(BlockingIOError):
                packet = sock.recv(4096)
                assert packet, "the fake hung up"
                answers.append(session_socket_pb2.Response.FromString(packet).id)
        assert answers == list(range(1, PINGS + 2))
