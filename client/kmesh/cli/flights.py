"""``kmesh flights``: what is computed, or brought from disk, now, and who waits for it."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Annotated

import typer

from kmesh.cli import render
from kmesh.cli.app import app, connected
from kmesh.v1 import flights_pb2


@app.command()
def flights(
    context: typer.Context,
    limit: Annotated[int, typer.Option(min=1, help="At most so many flights.")] = 100,
    interval: Annotated[
        float, typer.Option(min=0, help="Show them again every so many seconds; 0: once.")
    ] = 0.0,
    count: Annotated[
        int, typer.Option(min=0, help="With --interval: so many times; 0: until Ctrl-C.")
    ] = 0,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="One JSON document; with --interval, an object a line."),
    ] = False,
) -> None:
    """Lists flights: spans that one engine computes, or that come from disk, and who waits."""
    shown = 0
    try:
        with connected(context) as tool:
            while True:
                found, fetches = tool.flights(limit)
                _show(found, fetches, as_json, again=interval > 0)
                shown += 1
                if not interval or shown == count:
                    return
                time.sleep(interval)
    except KeyboardInterrupt:
        return


def _show(
    found: Sequence[flights_pb2.FlightInfo],
    fetches: Sequence[flights_pb2.FetchInfo],
    as_json: bool,
    again: bool,
) -> None:
    if not as_json:
        _print(found, fetches)
        return
    document: render.Json = {
        "flights": [flight_json(flight) for flight in found],
        "fetches": [fetch_json(fetch) for fetch in fetches],
    }
    if again:
        document = {"time_ms": time.time_ns() // 1_000_000, **document}
        print(json.dumps(document), flush=True)
    else:
        render.print_json(document)


def flight_json(flight: flights_pb2.FlightInfo) -> render.Json:
    """One flight, by the keys of ``docs/cli.md``."""
    return {
        "flight": flight.flight,
        "state": flight.state,
        "tenant": flight.tenant,
        "leader": flight.leader or None,
        "keys": flight.keys,
        "landed": flight.landed,
        "waiters": flight.waiters,
        "deaths": flight.deaths,
        "age_ms": flight.age_ms,
        "key": flight.key.hex(),
    }


def fetch_json(fetch: flights_pb2.FetchInfo) -> render.Json:
    """One fetch, by the keys of ``docs/cli.md``."""
    return {
        "fetch": fetch.fetch,
        "state": fetch.state,
        "tenant": fetch.tenant,
        "leader": fetch.leader or None,
        "waiters": fetch.waiters,
        "bytes": fetch.bytes,
        "age_ms": fetch.age_ms,
        "key": fetch.key.hex(),
    }


def _print(
    found: Sequence[flights_pb2.FlightInfo], fetches: Sequence[flights_pb2.FetchInfo]
) -> None:
    columns = (
        *(">flight", "state", "tenant", ">leader", ">landed", ">of"),
        *(">waiters", ">deaths", ">age", "next key"),
    )
    rows = [
        (
            str(flight.flight),
            flight.state,
            flight.tenant,
            str(flight.leader) if flight.leader else "",
            str(flight.landed),
            str(flight.keys),
            str(flight.waiters),
            str(flight.deaths),
            render.age(flight.age_ms),
            flight.key.hex()[:16],
        )
        for flight in found
    ]
    console = render.console()
    if rows:
        console.print(render.table("flights", columns, rows))
    if fetches:
        _print_fetches(fetches)
    if not (found or fetches):
        console.print("nothing is in the air")


def _print_fetches(fetches: Sequence[flights_pb2.FetchInfo]) -> None:
    columns = (">fetch", "state", "tenant", ">leader", ">waiters", ">bytes", ">age", "key")
    rows = [
        (
            str(fetch.fetch),
            fetch.state,
            fetch.tenant,
            str(fetch.leader) if fetch.leader else "",
            str(fetch.waiters),
            render.size(fetch.bytes),
            render.age(fetch.age_ms),
            fetch.key.hex()[:16],
        )
        for fetch in fetches
    ]
    render.console().print(render.table("fetches from disk", columns, rows))
