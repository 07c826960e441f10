"""The clients of a chaos run that keep to nothing, and its operator.

Commands come on stdin: what, seed, seconds.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import random
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

sys.path += [str(Path(__file__).parents[1] / "ipc"), str(Path(__file__).parents[1])]

import grpc
from chaos_watch import admin
from hostile import Hostile, receive
from rawclient import RawClient, Refused

from kmesh.v1 import admin_pb2, common_pb2, session_socket_pb2

_PR_SET_PDEATHSIG = 1
_GONE = (OSError, EOFError, Refused)


def broken(what: str) -> None:
    print(json.dumps({"what": "broken", "text": what, "pid": os.getpid()}), flush=True)


def answers(sock: socket.socket, seconds: float) -> Iterator[session_socket_pb2.Response]:
    """What comes within that time, or until the end of the connection."""
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        sock.settimeout(left)
        try:
            sock.recv(1, socket.MSG_PEEK)
            data = receive(sock)
        except (TimeoutError, BlockingIOError):
            continue
        if not data:
            return
        answer = session_socket_pb2.Response.FromString(data)
        if answer.status.code == common_pb2.CODE_INTERNAL:
            broken(f"an internal error: {answer.status}")
        yield answer


def garbage(sockets: Path, rng: random.Random, seconds: float) -> None:
    """Packets that are spoiled, or make no sense."""
    hostile = Hostile(rng.getrandbits(32))
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        with contextlib.suppress(*_GONE), RawClient(sockets) as client:
            for packet in hostile.batch():
                client.sock.send(packet)
            for answer in answers(client.sock, 0.1):
                hostile.learn(answer)


def half_closed(sockets: Path, rng: random.Random, seconds: float) -> None:
    """Ends its requests, and then reads what it is owed."""
    with contextlib.suppress(*_GONE), RawClient(sockets) as client:
        for _ in range(rng.randint(1, 40)):
            client.send(acquire={"keys": rng.randbytes(32), "shards": [{"layer_end": 1}]})
        client.sock.shutdown(socket.SHUT_WR)
        for _ in answers(client.sock, seconds):
            pass


def slow(sockets: Path, rng: random.Random, seconds: float) -> None:
    """Asks until nobody takes any more, waits, and reads an answer now and then."""
    with contextlib.suppress(*_GONE), RawClient(sockets) as client:
        client.sock.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            for _ in range(20_000):
                client.send(ping={})
        time.sleep(seconds * 0.8)
        for number, _ in enumerate(answers(client.sock, seconds * 0.2)):
            time.sleep(0.01 * (number < 10))


def flood(sockets: Path, rng: random.Random, seconds: float) -> None:
    """Connections that say nothing."""
    with contextlib.ExitStack() as stack, contextlib.suppress(*_GONE):
        for _ in range(rng.randint(20, 200)):
            stack.enter_context(RawClient(sockets, hello=False))
        time.sleep(seconds)


def hoard(sockets: Path, rng: random.Random, seconds: float) -> None:
    """All of the staging, and then reservations for more than there is."""
    with contextlib.ExitStack() as stack, contextlib.suppress(*_GONE):
        while True:
            client = stack.enter_context(RawClient(sockets))
            try:
                client.attach_staging(8 << 20)
            except Refused:
                break
            client.reserve([rng.randbytes(32) for _ in range(16)], 1 << 20)
        time.sleep(seconds)


def noise(sockets: Path, rng: random.Random, seconds: float) -> None:
    """Bytes that are no HTTP, on the sockets that speak it."""
    for name in ("grpc.sock", "metrics.sock"):
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(seconds)
            sock.connect(str(sockets / name))
            sock.sendall(rng.choice((b"GET /", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"")))
            sock.sendall(rng.randbytes(rng.randint(1, 5000)))
            sock.shutdown(socket.SHUT_WR)
            while sock.recv(4096):
                pass


def evict(sockets: Path, rng: random.Random, seconds: float) -> None:
    """An operator drops everything, or what is idle."""
    idle = rng.choice((0, 500, 2000))
    request = admin_pb2.EvictRequest(all=not idle, min_idle_ms=idle)
    with contextlib.suppress(*_GONE, grpc.RpcError), admin(sockets) as call:
        call("Evict", request)


def drain(sockets: Path, rng: random.Random, seconds: float) -> None:
    """An operator lets no more be stored for a while, and cancels that, however long it takes."""
    with contextlib.suppress(*_GONE, grpc.RpcError), admin(sockets) as call:
        list(call("Drain", admin_pb2.DrainRequest(deadline_ms=int(1000 * seconds))))
    until = time.monotonic() + 60
    while time.monotonic() < until:
        with contextlib.suppress(*_GONE, grpc.RpcError), admin(sockets) as call:
            list(call("Drain", admin_pb2.DrainRequest(cancel=True)))
            return
        time.sleep(0.1)


ACTS = (garbage, half_closed, slow, flood, hoard, noise, evict, drain)
RUDE = {one.__name__: one for one in ACTS}


def main() -> int:
    sockets = Path(sys.argv[1])
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    running = []
    for line in sys.stdin:
        what, seed, seconds = line.split()
        arguments = (sockets, random.Random(seed), float(seconds))
        thread = threading.Thread(target=RUDE[what], args=arguments)
        thread.start()
        running.append(thread)
    for thread in running:
        thread.join(60)
        if thread.is_alive():
            broken(f"{thread.name}: nobody answers, and nobody hangs up")
            return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
