"""``kmesh top``: what a daemon does, as it does it."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import typer
from rich.console import Group, RenderableType
from rich.live import Live

from kmesh.cli import documents, render
from kmesh.cli.app import app, connected
from kmesh.cli.render import size
from kmesh.cli.rpc import Tool
from kmesh.v1 import admin_pb2, sessions_pb2

#: Name in the output, and the counter whose growth it is.
RATES = {
    "acquires_per_s": "spans_acquires",
    "hits_per_s": "spans_hits",
    "misses_per_s": "spans_misses",
    "stored_per_s": "spans_committed",
    "evicted_per_s": "spans_evicted",
    "refused_per_s": "spans_refused",
}


@dataclass(frozen=True, slots=True)
class Sample:
    """What the daemon said at one time."""

    at: float
    status: admin_pb2.StatusResponse
    clients: Sequence[sessions_pb2.SessionInfo]

    @classmethod
    def take(cls, tool: Tool) -> Sample:
        return cls(time.monotonic(), tool.status(), tool.sessions())

    def rates(self, before: Sample) -> dict[str, float]:
        """Growth a second since an earlier sample; 0 after a restart in between."""
        seconds = self.at - before.at
        now, then = self.status, before.status
        if now.epoch != then.epoch or seconds <= 0:
            return dict.fromkeys(RATES, 0.0)
        return {
            name: round((now.counters[key] - then.counters[key]) / seconds, 2)
            for name, key in RATES.items()
        }

    def as_json(self, before: Sample) -> render.Json:
        status, rates = self.status, self.rates(before)
        asked = rates["hits_per_s"] + rates["misses_per_s"]
        return {
            "time_ms": time.time_ns() // 1_000_000,
            "epoch": f"{status.epoch:016x}",
            "draining": status.draining,
            "spans": status.spans,
            "span_bytes": status.span_bytes,
            "used": sum(slab.used for slab in status.slabs if not slab.device),
            "capacity": sum(slab.capacity for slab in status.slabs if not slab.device),
            "leased_bytes": status.leased_bytes,
            "staging_bytes": status.staging_bytes,
            "sessions": status.sessions,
            **rates,
            "hit_rate": round(rates["hits_per_s"] / asked, 4) if asked else None,
            "clients": [documents.session_json(client) for client in self.clients],
        }


@app.command()
def top(
    context: typer.Context,
    interval: Annotated[float, typer.Option(min=0.05, help="Seconds between samples.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="One interval, then end.")] = False,
    count: Annotated[int, typer.Option(min=0, help="So many intervals; 0: until Ctrl-C.")] = 0,
    as_json: Annotated[
        bool, typer.Option("--json", help="A JSON object a line, for each interval.")
    ] = False,
) -> None:
    """Shows what the daemon does, again and again."""
    left = 1 if once else count
    try:
        with connected(context) as tool:
            if as_json or once:
                _lines(tool, interval, left, as_json)
            else:
                _live(tool, interval, left)
    except KeyboardInterrupt:
        return


def _lines(tool: Tool, interval: float, left: int, as_json: bool) -> None:
    before = Sample.take(tool)
    while True:
        time.sleep(interval)
        now = Sample.take(tool)
        if as_json:
            print(json.dumps(now.as_json(before)), flush=True)
        else:
            render.console().print(_page(now, before))
        before, left = now, left - 1
        if left == 0:
            return


def _live(tool: Tool, interval: float, left: int) -> None:
    before = Sample.take(tool)
    with Live(_page(before, before), console=render.console(), auto_refresh=False) as live:
        while True:
            time.sleep(interval)
            now = Sample.take(tool)
            live.update(_page(now, before), refresh=True)
            before, left = now, left - 1
            if left == 0:
                return


def _page(now: Sample, before: Sample) -> RenderableType:
    status, rates = now.status, now.rates(before)
    used = sum(slab.used for slab in status.slabs if not slab.device)
    capacity = sum(slab.capacity for slab in status.slabs if not slab.device)
    asked = rates["hits_per_s"] + rates["misses_per_s"]
    share = f"{100 * rates['hits_per_s'] / asked:.0f} % hits" if asked else "nothing asked"
    rows = [
        ("daemon", "draining" if status.draining else "serving", status.socket_dir),
        ("memory", f"{size(used)} of {size(capacity)}", f"{100 * used / max(capacity, 1):.0f} %"),
        ("spans", f"{status.spans:,}", size(status.span_bytes)),
        ("leased", size(status.leased_bytes), f"{status.leases:,} leases"),
        ("lookups", f"{asked:,.0f} spans/s", share),
        ("stores", f"{rates['stored_per_s']:,.0f} spans/s", ""),
        ("evicted", f"{rates['evicted_per_s']:,.0f} spans/s", ""),
    ]
    clients = sorted(now.clients, key=lambda client: -client.leased_bytes)
    return Group(render.table("", ("", ">", ""), rows), render.sessions_table(clients))
