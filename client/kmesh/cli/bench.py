"""``kmesh bench``: how fast a running daemon is from here. It removes what it stored."""

from __future__ import annotations

import os
import signal
import statistics
import time
from collections.abc import Callable
from typing import Annotated

import typer

from kmesh import errors
from kmesh.cli import render
from kmesh.cli.app import EXIT_CHECK_FAILED, AsJson, app, complain, connected
from kmesh.cli.options import Options
from kmesh.cli.rpc import Tool
from kmesh.keys import KEY_BYTES, Namespace
from kmesh.layout import TILE_BYTES, Shard
from kmesh.session import ReserveBatch, Session, Staging
from kmesh.store import put_spans, read_span

BENCH = Namespace("kmesh bench", "", "float32", 1, 1, 1)
SHARD = Shard(0, 1, 0, 1)
_TINY = 256
_LARGE = 1 << 20
_MAX_LARGE = 64
_FORGET = f"kmesh evict --namespace {BENCH.digest().hex()}"


@app.command()
def bench(
    context: typer.Context,
    rounds: Annotated[int, typer.Option(min=10, help="Repetitions of each call.")] = 200,
    as_json: AsJson = False,
) -> None:
    """Measures calls and copies, in a namespace of its own that is empty again after it."""
    known: Options = context.obj
    # Told to end, it removes what it stored, as it does after Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with connected(context) as first:
        free = _free(first)
    if free < _TINY * TILE_BYTES:
        complain(
            errors.KMeshError(
                f"bench evicts nobody: {render.size(_TINY * TILE_BYTES)} and {_TINY} spans must "
                "be free"
            )
        )
        raise typer.Exit(EXIT_CHECK_FAILED)
    large = max(1, min(free // _LARGE // 2, _MAX_LARGE))
    keys, more = os.urandom(KEY_BYTES * _TINY), os.urandom(KEY_BYTES * large)
    with connected(context, BENCH) as tool:
        try:
            found = _measure(tool, rounds, keys, more, known.timeout)
            found["left_spans"] = tool.remove(keys + more)
        except BaseException:
            # With the session its leases, reservations and copies end.
            tool.session.close()
            _tidy(known, keys + more)
            raise
    if as_json:
        render.print_json(found)
    else:
        rows = [(name, f"{value:,}") for name, value in found.items()]
        render.console().print(render.table("", ("figure", ">value"), rows))


def _free(tool: Tool) -> int:
    """Bytes that can be stored without evicting anything; 0 where the catalog is short.

    A uid that sees only its own tenants is not told which other slabs are full.
    """
    status = tool.status()
    if status.max_spans - status.spans - status.reservations < _TINY:
        return 0
    ours = ("all", str(os.getuid()))
    free = sum(
        slab.populated - slab.used
        for slab in status.slabs
        if not slab.device and not slab.read_only and slab.tenant in ("", *ours)
    )
    for tenant in status.tenants:
        if tenant.name in ours and tenant.quota:
            free = min(free, max(0, tenant.quota - tenant.used))
    return free


def _tidy(known: Options, keys: bytes) -> None:
    """Removes what a run stored that was cut short; says so if it can't."""
    until = time.monotonic() + known.timeout
    try:
        with Tool(known.socket_dir, known.timeout) as tool:
            # The daemon may not have seen the end of the other session yet.
            while (left := tool.remove(keys)) and time.monotonic() < until:
                time.sleep(0.02)
    except errors.KMeshError as failed:
        complain(errors.KMeshError(f"spans may stay ({failed}): {_FORGET}"))
        return
    if left:
        complain(errors.KMeshError(f"{left} spans stay: {_FORGET}"))


def _measure(
    tool: Tool, rounds: int, keys: bytes, more: bytes, timeout: float
) -> dict[str, object]:
    session, large = tool.session, len(more) // KEY_BYTES
    staging = session.staging(min(max(large * _LARGE, 1 << 20), session.welcome.max_staging_bytes))
    _store(session, staging, keys, [b"tiny"] * _TINY)
    session.acquire(keys, [SHARD], timeout=timeout).release()
    pings = _times(lambda: session.ping(timeout), rounds)
    grpc = _times(tool.status, rounds)
    leases = _times(lambda: _lease(session, keys, timeout), rounds)
    tool.remove(keys)
    payloads = [os.urandom(_LARGE)] * large
    before = time.perf_counter()
    _store(session, staging, more, payloads)
    stored = time.perf_counter() - before
    with session.acquire(more, [SHARD], timeout=timeout) as lease:
        session.slab(lease.entry(0).slab)
        before = time.perf_counter()
        for entry in range(lease.hits):
            read_span(session, lease, entry)
        read = time.perf_counter() - before
        size = lease.hits * _LARGE
    return {
        "rounds": rounds,
        "ping_median_us": _us(statistics.median(pings)),
        "ping_p99_us": _us(_p99(pings)),
        "grpc_median_us": _us(statistics.median(grpc)),
        "grpc_p99_us": _us(_p99(grpc)),
        "lease_spans": _TINY,
        "lease_median_us": _us(statistics.median(leases)),
        "lease_p99_us": _us(_p99(leases)),
        "copied_bytes": size,
        "store_mb_per_s": round(large * _LARGE / stored / 1e6, 1),
        "read_mb_per_s": round(size / read / 1e6, 1),
    }


def _store(session: Session, staging: Staging, keys: bytes, payloads: list[bytes]) -> None:
    count, tokens = len(payloads), session.welcome.span_tokens
    lengths = [len(payload) for payload in payloads]
    starts = range(0, tokens * count, tokens)
    batch = ReserveBatch(BENCH.digest(), SHARD, keys, [tokens] * count, starts, lengths)
    reasons = put_spans(session, staging, batch, payloads)
    if any(reasons):
        raise errors.Exhausted(f"{sum(map(bool, reasons))} spans could not be stored")


def _lease(session: Session, keys: bytes, timeout: float) -> None:
    """Acquire and Release, both answered."""
    session.acquire(keys, [SHARD], timeout=timeout).release()
    session.ping(timeout)


def _times(call: Callable[[], object], rounds: int) -> list[float]:
    found = []
    for _ in range(rounds):
        before = time.perf_counter()
        call()
        found.append(time.perf_counter() - before)
    return found


def _p99(times: list[float]) -> float:
    return sorted(times)[int(0.99 * (len(times) - 1))]


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 1)
