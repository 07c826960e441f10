"""What must hold of a daemon in a chaos run, asked from outside."""

from __future__ import annotations

import json
import stat
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
from leaks import open_fds, process_tree
from probe import get
from rawclient import RawClient

from kmesh.layout import TILE_BYTES, sums_offset, tiles
from kmesh.v1 import admin_pb2, admin_pb2_grpc

#: Reasons for not being ready that the load of a run gives by itself: all places are leased.
LOAD = {"pool", "evictor"}
_TIMEOUT = 5.0


class Broken(Exception):
    """Something that must always hold does not."""


def require(holds: object, text: str) -> None:
    if not holds:
        raise Broken(text)


@contextmanager
def admin(sockets: Path) -> Iterator[Callable[[str, Any], Any]]:
    """Calls of Admin by name; OSError, EOFError or RpcError where nobody answers."""
    with (
        RawClient(sockets) as session,
        grpc.insecure_channel(f"unix:{sockets}/grpc.sock") as channel,
    ):
        token = (("kmesh-session", session.welcome.token),)
        stub = admin_pb2_grpc.AdminStub(channel)

        def call(name: str, request: Any) -> Any:
            return getattr(stub, name)(request, metadata=token, timeout=_TIMEOUT)

        yield call


def reasons(sockets: Path) -> set[str]:
    """Why it is not ready; OSError when nobody answers."""
    status, body = get(sockets, "/readyz", timeout=1)
    found = {reason["name"] for reason in json.loads(body)["reasons"]}
    require(bool(found) == (status == 503), f"/readyz says {status} and {found}")
    return found


def check_status(status: admin_pb2.StatusResponse) -> None:
    """One moment's numbers against each other."""
    used = sum(slab.used for slab in status.slabs)
    for slab in status.slabs:
        require(slab.used <= slab.capacity, f"slab {slab.slab}: more used than there is: {slab}")
        require(slab.populated <= slab.capacity, f"slab {slab.slab}: too many pages: {slab}")
        require(not slab.used % TILE_BYTES, f"slab {slab.slab}: part of a tile is used: {slab}")
    tenants = status.tenants
    require(sum(one.spans for one in tenants) == status.spans, f"spans of tenants: {status}")
    stored = sum(one.span_bytes for one in tenants)
    require(stored == status.span_bytes, f"bytes of tenants: {status}")
    require(sum(one.used for one in tenants) <= used, f"tenants use more than slabs: {status}")
    require(status.span_bytes <= used, f"more stored than used: {status}")
    require(status.staging_bytes <= status.max_staging_bytes, f"too much staging: {status}")
    # What an Acquire has found that waits for the disk stays as if it were leased.
    holders = status.leases or status.disk.waits
    require(bool(holders) or not status.leased_bytes, f"leased without a lease: {status}")


def check_rest(status: admin_pb2.StatusResponse) -> None:
    """All clients are gone: nothing is held."""
    held = (status.sessions, status.leases, status.reservations, status.staging_bytes)
    require(
        held == (1, 0, 0, 0), f"held by nobody (sessions, leases, reservations, staging): {held}"
    )
    require(not status.leased_bytes, f"pinned by nobody: {status.leased_bytes} bytes")
    require(not status.draining, "still draining")


def check_spans(status: admin_pb2.StatusResponse, spans: list[admin_pb2.SpanInfo]) -> None:
    """The status against every span that is listed, when nothing moves."""
    states = {span.state for span in spans}
    require(states <= {"committed"}, f"spans that are not committed: {states}")
    require(len(spans) == status.spans, f"{len(spans)} listed, {status.spans} counted")
    stored = sum(span.length for span in spans)
    require(stored == status.span_bytes, f"{stored} bytes listed, {status.span_bytes} counted")
    used: Counter[int] = Counter()
    places = set()
    for span in spans:
        used[span.slab] += tiles(span.length) * TILE_BYTES
        for tile in range(tiles(span.length)):
            place = span.slab, span.offset // TILE_BYTES + tile
            require(place not in places, f"two spans in one tile: {place}")
            places.add(place)
    for slab in status.slabs:
        require(slab.used == used[slab.slab], f"leaked: {slab}, listed {used[slab.slab]}")


def check_empty(status: admin_pb2.StatusResponse) -> None:
    """Everything was evicted."""
    left = [slab for slab in status.slabs if slab.used]
    require(not left, f"leaked, no span is left: {left}")
    require(not status.spans and not status.span_bytes, f"spans after all were evicted: {status}")
    require(not status.index_entries, f"{status.index_entries} index entries of no span")
    require(not any(one.used for one in status.tenants), f"used by tenants: {status.tenants}")


def list_all(call: Callable[[str, Any], Any]) -> list[admin_pb2.SpanInfo]:
    found: list[admin_pb2.SpanInfo] = []
    token = ""
    while True:
        page = call("List", admin_pb2.ListRequest(limit=10_000, page_token=token))
        found += page.spans
        token = page.next_page_token
        if not token:
            return found


def children(pid: int) -> dict[str, int]:
    """The daemon's processes by name: control, worker, gpu0 …"""
    found = {}
    for one in process_tree(pid):
        try:
            name = Path(f"/proc/{one}/comm").read_text().strip()
        except OSError:
            continue
        if name.startswith("kmesh-"):
            found[name.removeprefix("kmesh-")] = one
    return found


def descriptors(pid: int) -> dict[str, Counter[str]]:
    """What each process of the daemon has open, but for its log."""
    everyone = {"supervisor": pid, **children(pid)}
    found = {name: open_fds(one) for name, one in everyone.items()}
    for held in found.values():
        for link in [link for link in held if link.endswith(".log")]:
            del held[link]
    return found


def memory(pid: int) -> dict[str, Path]:
    """The supervisor's descriptors of slabs and of the catalog, by what they are."""
    found = {}
    for path in sorted(Path(f"/proc/{pid}/fd").iterdir(), key=lambda path: int(path.name)):
        try:
            link, mode = path.readlink().name, path.stat().st_mode
        except OSError:
            continue
        if stat.S_ISREG(mode) and ("kmesh-slab" in link or "fake-vram" in link):
            found[f"{link} {path.name}"] = path
        elif "kmesh-catalog" in link:
            found["catalog"] = path
    return found


def touches(flip: tuple[int, int], inode: int, size: int, offset: int, length: int) -> bool:
    """Whether a flipped bit (a file's inode, and a place in it) is one of a span or its sums."""
    place, at = flip
    first = sums_offset(size) + offset // TILE_BYTES * 8
    return place == inode and (
        offset <= at < offset + length or first <= at < first + tiles(length) * 8
    )
