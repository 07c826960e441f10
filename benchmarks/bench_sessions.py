"""Leases through the session socket and gRPC: one client alone, and many at once."""

from __future__ import annotations

import random
import select
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.results import Row, p99
from benchmarks.spand import Spand, serve, store
from benchmarks.timing import in_turn
from kmesh.hello import Role, hello
from kmesh.keys import KEY_BYTES, KeyChain, Namespace
from kmesh.layout import TILE_BYTES, Shard
from kmesh.packets import dial
from kmesh.v1 import common_pb2, session_socket_pb2, spans_pb2, spans_pb2_grpc

NAMESPACE = Namespace("bench", "w", "bfloat16", layers=32, kv_heads=8, head_dim=128)
SHARD = Shard(0, 32, 0, 8)
_PB_SHARD = common_pb2.Shard(layer_begin=0, layer_end=32, head_begin=0, head_end=8)
SPANS = 256
#: A prompt of 4,096 tokens.
CROWD_SPANS = 64
SESSIONS, CLIENTS = 300, 64
#: Calls of one kind in a row: an engine's transport is not in turn with another one.
BLOCK = 20


def alone(spand: Spand, keys: bytes, rounds: int) -> Iterator[Row]:
    """One client, both transports in turn."""
    request = spans_pb2.AcquireRequest(keys=keys, shards=[_PB_SHARD], prefix=True)
    with spand.connect() as session, spand.rpc() as (channel, metadata):
        stub = spans_pb2_grpc.SpansStub(channel)

        def over_session() -> None:
            lease = session.acquire(keys, [SHARD])
            if lease.hits != SPANS:
                raise RuntimeError(f"{lease.hits} spans were leased")
            lease.release()

        def over_grpc() -> None:
            answer = stub.Acquire(request, metadata=metadata, timeout=10)
            stub.Release(
                spans_pb2.ReleaseRequest(leases=[answer.lease]), metadata=metadata, timeout=10
            )

        def waited() -> None:
            over_session()
            session.ping()

        taken = in_turn(
            {"session": over_session, "grpc": over_grpc, "waited": waited, "ping": session.ping},
            rounds,
            block=BLOCK,
        )
    ms = {name: [value * 1e3 for value in values] for name, values in taken.items()}
    what = f"Acquire and Release of {SPANS} spans; Release is not waited for"
    yield Row("acquire_release", "ms", "median", {"session": ms["session"]}, what)
    yield Row("acquire_release_p99", "ms", "p99", {"session": ms["session"]}, what)
    note = "the same, until the daemon has answered a Ping sent behind Release"
    yield Row("acquire_release_waited", "ms", "median", {"waited": ms["waited"]}, note)
    yield Row("acquire_release_grpc", "ms", "median", {"grpc": ms["grpc"]}, "both waited for")
    yield Row("round_trip", "ms", "median", {"ping": ms["ping"]}, "Ping, session socket")


@dataclass
class Client:
    """A connection that speaks packets, so that the measuring process adds little."""

    sock: socket.socket
    packet: bytes
    sent: float = 0.0
    owed: int = 0
    count: int = 0
    lease: int = 0

    def ask(self) -> None:
        self.sent = time.perf_counter()
        self.sock.send(self.packet)
        self.owed += 1

    def hear(self) -> float | None:
        """Takes one packet: seconds since ``ask`` if it brings the lease."""
        response = session_socket_pb2.Response.FromString(self.sock.recv(1 << 17))
        self.owed -= 1
        if response.WhichOneof("body") == "release":
            return None
        took = time.perf_counter() - self.sent
        if response.WhichOneof("body") != "acquire" or any(response.acquire.reason):
            raise RuntimeError("not every span was leased")
        self.lease = response.acquire.lease
        self.count += 1
        return took

    def release(self) -> None:
        """Gives the lease back."""
        request = spans_pb2.ReleaseRequest(leases=[self.lease])
        self.sock.send(session_socket_pb2.Request(id=3, release=request).SerializeToString())
        self.owed += 1


class Crowd:
    """Many sessions, some of which ask."""

    def __init__(self, spand: Spand, keys: bytes, sessions: int) -> None:
        acquire = spans_pb2.AcquireRequest(keys=keys, shards=[_PB_SHARD], prefix=True)
        packet = session_socket_pb2.Request(id=2, acquire=acquire).SerializeToString()
        self.clients = []
        self._epoll = select.epoll()
        self._by_fd: dict[int, Client] = {}
        for number in range(sessions):
            sock = dial(spand.socket_dir, 10)
            sock.setblocking(True)
            message = hello(Role.SCHEDULER, f"engine-{number}", NAMESPACE, "bench")
            sock.send(session_socket_pb2.Request(id=1, hello=message).SerializeToString())
            sock.recv(1 << 17)
            client = Client(sock, packet)
            self.clients.append(client)
            self._by_fd[sock.fileno()] = client
            self._epoll.register(sock.fileno(), select.EPOLLIN)

    def burst(self, clients: list[Client]) -> list[float]:
        """All of them ask at the same moment; seconds until each has its answer.

        Leases are given back when all have one, as engines hold them while they load.
        """
        for client in clients:
            client.ask()
        taken = [took for _, took in self._heard(clients)]
        for client in clients:
            client.release()
        for _ in self._heard(clients):
            raise RuntimeError("a lease that nobody asked for")
        return taken

    def race(self, clients: list[Client], seconds: float) -> list[float]:
        """Each releases and asks again as soon as it has its answer; seconds of every answer."""
        taken = []
        until = time.perf_counter() + seconds
        for client in clients:
            client.count = 0
            client.ask()
        for client, took in self._heard(clients):
            taken.append(took)
            client.release()
            if time.perf_counter() < until:
                client.ask()
        return taken

    def close(self) -> None:
        self._epoll.close()
        for client in self.clients:
            client.sock.close()

    def _heard(self, clients: list[Client]) -> Iterator[tuple[Client, float]]:
        """Answers as they come, until none is owed."""
        while any(client.owed for client in clients):
            ready = self._epoll.poll(10)
            if not ready:
                raise TimeoutError("the daemon has not answered for 10 s")
            for fd, _ in ready:
                took = self._by_fd[fd].hear()
                if took is not None:
                    yield self._by_fd[fd], took


def crowd(spand: Spand, keys: bytes, rounds: int, seconds: float) -> Iterator[Row]:
    """Many sessions; each round, others of them ask at once."""
    rng = random.Random(1)
    many = Crowd(spand, keys, SESSIONS)
    try:
        many.burst(many.clients)
        taken = [
            took * 1e3
            for _ in range(rounds)
            for took in many.burst(rng.sample(many.clients, CLIENTS))
        ]
        chosen = rng.sample(many.clients, CLIENTS)
        racing = [took * 1e3 for took in many.race(chosen, seconds)]
        counts = [float(client.count) for client in chosen]
    finally:
        many.close()
    what = f"{CLIENTS} of {SESSIONS} sessions ask at the same moment, {len(keys) // 32} spans each"
    yield Row("crowd_acquire_p99", "ms", "p99", {"burst": taken}, what)
    again = (
        f"answers for each of {CLIENTS} clients that ask again at once, {seconds:.0f} s;"
        f" p99 of an answer {p99(racing):.1f} ms"
    )
    yield Row("crowd_fairness", "min / mean", "min / mean", {"answers": counts}, again)


def run(quick: bool) -> Iterator[Row]:
    """Rows of this file."""
    chain = KeyChain(NAMESPACE.digest())
    chain.extend(range(64 * SPANS))
    with serve(host_memory="64MiB", staging_memory="64MiB") as spand:
        with spand.connect() as tool:
            store(tool, chain.keys, SHARD, length=TILE_BYTES)
        yield from alone(spand, chain.keys, 5 if quick else 25)
        keys = chain.keys[: CROWD_SPANS * KEY_BYTES]
        yield from crowd(spand, keys, 8 if quick else 40, 1.0 if quick else 4.0)
