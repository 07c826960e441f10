"""``kmesh evict`` and ``kmesh drain``: what changes a running daemon."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from kmesh import errors
from kmesh.cli import render
from kmesh.cli.app import EXIT_CHECK_FAILED, EXIT_USAGE, AsJson, app, connected, pick
from kmesh.cli.rpc import Tool
from kmesh.keys import KEY_BYTES
from kmesh.v1 import admin_pb2

_KEY = re.compile(f"[0-9a-fA-F]{{1,{2 * KEY_BYTES}}}")
#: More spans than a daemon can have.
_EVERY = 1 << 32
_UNITS = {"": 1.0, "ms": 0.001, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


def milliseconds(text: str) -> int:
    """``90s``, ``5min``, ``2h``, ``1d``, or seconds without a unit."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|s|min|h|d)?", text.strip())
    if not found:
        raise typer.BadParameter(
            f"{text!r} is no time: a number and ms, s, min, h or d, such as 90s or 1.5h;"
            " a number alone is seconds"
        )
    return int(float(found[1]) * _UNITS[found[2] or ""] * 1000)


@app.command()
def evict(
    context: typer.Context,
    namespace: Annotated[str, typer.Option(help="Of this namespace; or")] = "",
    key: Annotated[
        list[str] | None,
        typer.Option(help="these spans, by their keys in hex or the beginnings of them; or"),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="all spans.")] = False,
    older: Annotated[
        str,
        typer.Option(
            "--older-than",
            metavar="TIME",
            help="Only what was stored so long ago, such as 90s, 5min, 2h, 1d.",
        ),
    ] = "",
    idle: Annotated[
        str, typer.Option(metavar="TIME", help="Only what was not leased for so long.")
    ] = "",
    drop_mirrors: Annotated[
        bool,
        typer.Option(
            "--drop-mirrors",
            help="A base goes when its mirrors are dense: drop those that find no room.",
        ),
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only count.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Don't ask.")] = False,
    as_json: AsJson = False,
) -> None:
    """Drops stored spans that nobody leases, from memory and from disk.

    Where a daemon keeps uids apart, only those of this uid: root and the daemon's user evict all.

    With an age, only from memory: of what is on disk the age is not known.
    """
    if bool(namespace) + bool(key) + every > 1:
        raise typer.BadParameter("only one of --namespace, --key and --all makes sense")
    if not (namespace or key or every or older or idle):
        raise typer.BadParameter("one of --namespace, --key, --all, or an age, is needed")
    for text in key or []:
        if not _KEY.fullmatch(text):
            raise typer.BadParameter(f"{text!r} is not 1 to 64 hex digits", param_hint="--key")
    request = admin_pb2.EvictRequest(
        all=every,
        min_age_ms=milliseconds(older) if older else 0,
        min_idle_ms=milliseconds(idle) if idle else 0,
        dry_run=dry_run,
        drop_mirrors=drop_mirrors,
    )
    with connected(context) as tool:
        if namespace:
            request.namespace = _namespace(tool, namespace)
        request.keys = _keys(tool, [text.lower() for text in key or []])
        if not dry_run and not yes:
            _confirm(tool, request)
        answer = tool.evict(request)
    if as_json:
        render.print_json(
            {
                "dry_run": dry_run,
                "spans": answer.spans,
                "bytes": answer.bytes,
                "leased": answer.leased,
                "busy": answer.busy,
                "held": answer.held,
                "disk_spans": answer.disk_spans,
                "disk_bytes": answer.disk_bytes,
            }
        )
    else:
        print(f"{'would evict' if dry_run else 'evicted'} {_count(answer)}")
    if not dry_run and (answer.leased or answer.busy):
        raise typer.Exit(EXIT_CHECK_FAILED)


def _namespace(tool: Tool, beginning: str) -> bytes:
    """A whole digest may be of one that was forgotten meanwhile."""
    if re.fullmatch("[0-9a-fA-F]{64}", beginning):
        return bytes.fromhex(beginning)
    return pick(tool.namespaces(), beginning).digest


def _keys(tool: Tool, texts: Sequence[str]) -> bytes:
    """Whole keys; a beginning is looked for among all spans in memory."""
    short = {text for text in texts if len(text) < 2 * KEY_BYTES}
    found: dict[str, set[bytes]] = {text: set() for text in short}
    for span in tool.spans(b"", _EVERY) if short else ():
        digits = span.key.hex()
        for text in short:
            if digits.startswith(text):
                found[text].add(span.key)
    for text, keys in found.items():
        if len(keys) != 1:
            count = f"{len(keys)} spans in memory begin" if keys else "no span in memory begins"
            raise typer.BadParameter(f"{count} with {text!r}", param_hint="--key")
    whole = dict.fromkeys(found[t].pop() if t in short else bytes.fromhex(t) for t in texts)
    return b"".join(whole)


def _confirm(tool: Tool, request: admin_pb2.EvictRequest) -> None:
    if not sys.stdin.isatty():
        print("kmesh: nobody to ask: say --yes, or --dry-run", file=sys.stderr)
        raise typer.Exit(EXIT_USAGE)
    dry = admin_pb2.EvictRequest()
    dry.CopyFrom(request)
    dry.dry_run = True
    typer.confirm(f"Evict {_count(tool.evict(dry))}?", abort=True, err=True)


def _count(answer: admin_pb2.EvictResponse) -> str:
    text = f"{answer.spans:,} spans, {render.size(answer.bytes)}"
    if answer.disk_spans:
        text += f"; {answer.disk_spans:,} on disk, {render.size(answer.disk_bytes)}"
    if answer.held:
        text += f"; {answer.held:,} more when the recipes over them are made dense"
    if answer.leased or answer.busy:
        text += f"; refused: {answer.leased:,} leased, {answer.busy:,} being written or verified"
    return text


@app.command()
def drain(
    context: typer.Context,
    wait: Annotated[bool, typer.Option("--wait", help="Until nothing is being written.")] = False,
    deadline: Annotated[
        str, typer.Option(help="How long writers have; else the daemon's shutdown_timeout_ms.")
    ] = "",
    stop: Annotated[bool, typer.Option("--stop", help="Then end the daemon.")] = False,
    cancel: Annotated[bool, typer.Option("--cancel", help="Take spans again.")] = False,
    as_json: AsJson = False,
) -> None:
    """Takes no new spans; what is stored is served on."""
    if cancel and (stop or wait or deadline):
        raise typer.BadParameter("--cancel goes with nothing else")
    request = admin_pb2.DrainRequest(
        deadline_ms=milliseconds(deadline) if deadline else 0, stop=stop, cancel=cancel
    )
    progress = admin_pb2.DrainProgress()
    with connected(context) as tool:
        try:
            for progress in tool.drain(request):
                if not wait:
                    break
                if not as_json:
                    print(_state(progress), flush=True)
        except errors.DaemonUnavailable:
            # It said that it ends, and did.
            if not progress.stopping:
                raise
    if as_json:
        render.print_json(
            {
                "draining": progress.draining,
                "done": progress.done,
                "late": progress.late,
                "stopping": progress.stopping,
                "reservations": progress.reservations,
                "copies": progress.copies,
                "leases": progress.leases,
                "sessions": progress.sessions,
                "elapsed_ms": progress.elapsed_ms,
            }
        )
    elif not wait:
        # It is idle in a moment, with nobody here to be told.
        idle = not progress.reservations and not progress.copies
        print(_state(progress, "now" if idle else "after that") if stop else _state(progress))
    if wait and progress.late:
        raise typer.Exit(EXIT_CHECK_FAILED)


def _state(progress: admin_pb2.DrainProgress, ends: str = "") -> str:
    """For people; ``ends`` says when the daemon does, where that was asked for."""
    if not progress.draining:
        return "serving: new spans are taken"
    state = "late" if progress.late else "drained" if progress.done else "draining"
    text = f"{state}: {progress.reservations:,} reservations, {progress.copies:,} copies in flight"
    text += f"; {progress.leases:,} leases of readers"
    ends = "now" if progress.stopping else ends
    return text + (f"; the daemon ends {ends}" if ends else "")
