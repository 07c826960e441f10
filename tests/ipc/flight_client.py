"""A process that wants spans: claims them, waits or leads, and stores when it is told to.

Arguments: socket directory, keys in hexadecimal. It prints a line for each thing that happens, and
reads one before it claims, before it stores, and before it ends.
"""

from __future__ import annotations

import sys

from kmesh.flight import Arrival, Standing
from kmesh.layout import Shard
from kmesh.session import ReserveBatch, Role, Session
from kmesh.store import put_spans

SHARD = Shard(0, 2, 0, 2)


def main(socket_dir: str, keys: bytes) -> None:
    count = len(keys) // 32
    with Session.connect(socket_dir, role=Role.TOOL, timeout=60) as session:
        print("up", flush=True)
        sys.stdin.readline()
        claim = session.claim(keys, [SHARD], timeout=60)
        print(claim.standing.name, flush=True)
        leads = claim.standing is Standing.LEAD
        if claim.standing is Standing.COMPUTING:
            arrived = session.await_flight_async(claim, 120).result()
            print(arrived.arrival.name, flush=True)
            leads = arrived.arrival is Arrival.LEAD
        if leads and sys.stdin.readline():
            start = range(0, 64 * count, 64)
            batch = ReserveBatch(b"n" * 32, SHARD, keys, [64] * count, start, [1000] * count)
            staging = session.staging(1 << 16)
            assert not any(put_spans(session, staging, batch, [bytes(1000)] * count))
            print("stored", flush=True)
        sys.stdin.readline()


if __name__ == "__main__":
    main(sys.argv[1], bytes.fromhex(sys.argv[2]))
