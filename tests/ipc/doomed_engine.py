"""An engine that gets into a state, says so, and stays there until it is killed.

Arguments: socket directory, state, and the keys (in hexadecimal) of a span on disk alone and of one
in memory. It prints "ready", reads a line, gets into the state, and prints
"there".
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import NamedTuple

from kmesh.layout import Shard
from kmesh.session import ReserveBatch, Role, Session

#: What others compute while this engine waits for it.
FLIGHT = b"f" * 32
NAMESPACE = b"n" * 32
SHARD = Shard(0, 2, 0, 2)


class Spans(NamedTuple):
    """Keys of what is there."""

    on_disk: bytes
    in_memory: bytes


def batch(key: bytes, count: int = 2) -> ReserveBatch:
    keys = b"".join(bytes([number]) + key[1:] for number in range(count))
    return ReserveBatch(
        NAMESPACE, SHARD, keys, [64] * count, range(0, 64 * count, 64), [90_000] * count
    )


def staging(session: Session, spans: Spans) -> None:
    session.staging(1 << 20)


def reserved(session: Session, spans: Spans) -> None:
    session.staging(1 << 20)
    assert session.reserve(batch(b"r" * 32)).reason == [0, 0]


def copying(session: Session, spans: Spans) -> None:
    session.staging(1 << 20)
    held = session.reserve(batch(b"c" * 32))
    session.commit_async(held.reservation, [0, 1 << 17])


def leased(session: Session, spans: Spans) -> None:
    lease = session.acquire(spans.in_memory, [SHARD])
    assert lease.hits == 1


def leads(session: Session, spans: Spans) -> None:
    assert session.claim(b"l" * 32, [SHARD]).standing.name == "LEAD"


def waits_for_a_flight(session: Session, spans: Spans) -> None:
    claim = session.claim(FLIGHT, [SHARD])
    assert claim.standing.name == "COMPUTING"
    session.await_flight_async(claim, 120)


def waits_for_a_fetch(session: Session, spans: Spans) -> None:
    session.acquire_async(
        spans.on_disk + spans.in_memory, [SHARD], prefix=False, wait=120.0, timeout=120.0
    )


def encoded(session: Session, spans: Spans) -> None:
    # Takes a while to load, and others do without.
    from household import Household

    household = Household()
    for sibling in household.siblings:
        household.join(session, sibling)
    session.acquire(household.siblings[0].keys, [household.shard], recipes=True)


def made_dense(session: Session, spans: Spans) -> None:
    # Takes a while to load, and others do without.
    from household import Household

    household = Household()
    session.acquire_async(household.siblings[0].keys, [household.shard], timeout=120.0)


STATES: dict[str, Callable[[Session, Spans], object]] = {
    found.__name__: found
    for found in (
        staging,
        reserved,
        copying,
        leased,
        leads,
        waits_for_a_flight,
        waits_for_a_fetch,
        encoded,
        made_dense,
    )
}


def main(socket_dir: str, state: str, *keys: str) -> None:
    with Session.connect(socket_dir, role=Role.TOOL, timeout=60) as session:
        print("ready", flush=True)
        sys.stdin.readline()
        held = STATES[state](session, Spans(*map(bytes.fromhex, keys)))
        print("there", flush=True)
        sys.stdin.readline()
        del held


if __name__ == "__main__":
    main(*sys.argv[1:])
