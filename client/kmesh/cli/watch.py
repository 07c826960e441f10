"""``kmesh watch``: what happens in a daemon, a JSON object a line."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from typing import Annotated

import typer

from kmesh import errors
from kmesh.cli.app import EXIT_UNAVAILABLE, app, complain, connected
from kmesh.cli.options import Options
from kmesh.cli.render import Json
from kmesh.cli.rpc import Tool
from kmesh.v1 import admin_pb2

_PREFIX = "EVENT_KIND_"
_RETRY_SECONDS = 0.2
KINDS = tuple(
    name.removeprefix(_PREFIX).lower() for name, number in admin_pb2.EventKind.items() if number
)


@app.command()
def watch(
    context: typer.Context,
    after: Annotated[int, typer.Option(min=0, help="Go on after this sequence number.")] = 0,
    epoch: Annotated[str, typer.Option(help="Of that number, as in the output.")] = "",
    kind: Annotated[list[str] | None, typer.Option(help=f"Only {', '.join(KINDS)}.")] = None,
    new: Annotated[bool, typer.Option("--new", help="Only what happens from now on.")] = False,
    count: Annotated[int, typer.Option(min=0, help="End after so many events; 0: never.")] = 0,
    patience: Annotated[
        float, typer.Option(min=0, help="Seconds to wait for a daemon that went away.")
    ] = 10.0,
    as_json: Annotated[bool, typer.Option("--json", help="It always does.")] = False,
) -> None:
    """Prints events as they happen, a JSON object a line."""
    request = admin_pb2.WatchRequest(after_sequence=after, only_new=new)
    for name in kind or []:
        if name not in KINDS:
            raise typer.BadParameter(f"{name!r} is none of {', '.join(KINDS)}", param_hint="--kind")
        request.kinds.append(admin_pb2.EventKind.Value(_PREFIX + name.upper()))
    try:
        request.epoch = int(epoch or "0", 16)
    except ValueError:
        raise typer.BadParameter("no hex digits", param_hint="--epoch") from None
    try:
        with connected(context) as tool:
            left = _print(_follow(tool, request), count)
        if left is not None:
            _again(context.obj, request, left, patience)
    except KeyboardInterrupt:
        return
    except BrokenPipeError:
        # Python would complain once more when it flushes at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _again(known: Options, request: admin_pb2.WatchRequest, left: int, patience: float) -> None:
    """Goes on with the daemon that comes in place of the one that went."""
    until = time.monotonic() + patience
    while True:
        try:
            with Tool(known.socket_dir, known.timeout) as tool:
                more = _print(_follow(tool, request), left)
            if more is None:
                return
            left, until = more, time.monotonic() + patience
        except errors.DaemonUnavailable as gone:
            if time.monotonic() > until:
                complain(gone)
                raise typer.Exit(EXIT_UNAVAILABLE) from None
            time.sleep(_RETRY_SECONDS)


def _follow(tool: Tool, request: admin_pb2.WatchRequest) -> Iterator[Json]:
    """Events until the daemon goes away; ``request`` then asks for what comes after them."""
    try:
        for answer in tool.watch(request):
            request.epoch, request.after_sequence = answer.epoch, answer.last_sequence
            request.only_new = False
            if answer.lost:
                yield {"epoch": f"{answer.epoch:016x}", "lost": True}
            for event in answer.events:
                yield event_json(answer.epoch, event)
    except (errors.DaemonUnavailable, errors.Unauthenticated):
        return


def _print(events: Iterator[Json], count: int) -> int | None:
    """How many more events are wanted; None when that is none."""
    for event in events:
        print(json.dumps(event), flush=True)
        if count and "kind" in event:
            count -= 1
            if not count:
                return None
    return count


def event_json(epoch: int, event: admin_pb2.WatchEvent) -> Json:
    """Keys that an event has nothing for are left out."""
    made: Json = {
        "epoch": f"{epoch:016x}",
        "sequence": event.sequence,
        "time_ms": event.time_ms,
        "kind": admin_pb2.EventKind.Name(event.kind).removeprefix(_PREFIX).lower(),
    }
    if event.key:
        made |= {
            "key": event.key.hex(),
            "namespace": event.namespace.hex(),
            "layers": [event.shard.layer_begin, event.shard.layer_end],
            "heads": [event.shard.head_begin, event.shard.head_end],
            "tokens": event.tokens,
            "length": event.length,
        }
    if event.cause:
        made["cause"] = admin_pb2.Cause.Name(event.cause).removeprefix("CAUSE_").lower()
    if event.session_id:
        made |= {"session": event.session_id, "uid": event.uid}
    if event.text:
        made["text"] = event.text
    return made
