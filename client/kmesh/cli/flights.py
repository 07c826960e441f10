"""``kmesh flights``: what is being computed now, by whom, and who waits for it."""

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
    """Lists flights: spans that one engine computes and others wait for."""
    shown = 0
    try:
        with connected(context) as tool:
            while True:
                found = tool.flights(limit)
                _show(found, as_json, again=interval > 0)
                shown += 1
                if not interval or shown == count:
                    return
                time.sleep(interval)
    except KeyboardInterrupt:
        return


def _show(found: Sequence[flights_pb2.FlightInfo], as_json: bool, again: bool) -> None:
    if not as_json:
        _print(found)
        return
    document: render.Json = {"flights": [flight_json(flight) for flight in found]}
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


def _print(found: Sequence[flights_pb2.FlightInfo]) -> None:
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
    else:
        console.print("nothing is in the air")
