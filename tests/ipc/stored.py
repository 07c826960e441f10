"""Spans that are known by their number, and a daemon that is to keep them."""

from __future__ import annotations

from typing import Any

from daemon_process import Daemon, wait_for
from rawclient import RawClient

from kmesh.v1 import common_pb2

COUNT = 24
SETTINGS: dict[str, Any] = {"host_memory": "32MiB", "slab_size": "8MiB", "max_spans": 512}


def key(number: int) -> bytes:
    return number.to_bytes(2, "little") * 16


def payload(number: int) -> bytes:
    return key(number + 1000) * 2000 + bytes([number])


def fill(daemon: Daemon, count: int = COUNT) -> None:
    daemon.wait_populated()
    with RawClient(daemon.socket_dir) as client:
        for number in range(count):
            assert client.store(key(number), payload(number)) == 0


def read(client: RawClient, number: int) -> bytes | int:
    """A span, or the reason why there is none; what is still verified is waited for."""
    found: list[bytes | int] = []

    def settled() -> bool:
        found[:] = [client.read(key(number))]
        return found != [common_pb2.REASON_PENDING]

    wait_for(settled)
    return found[0]


def assert_filled(daemon: Daemon) -> None:
    """All spans are there, bit for bit, and nothing was dropped."""
    with RawClient(daemon.socket_dir) as client:
        for number in range(COUNT):
            assert read(client, number) == payload(number)
    counters = daemon.status().counters
    assert (counters["spans_recovered_dropped"], counters["spans_corrupt"]) == (0, 0)
