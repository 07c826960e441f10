"""The commands, and what their exit codes mean."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from typing import Annotated

import typer

import kmesh
from kmesh import errors
from kmesh.cli import doctor as doctor_module
from kmesh.cli import documents, render
from kmesh.cli.options import App, Options, SocketDir, Timeout, chosen
from kmesh.cli.rpc import Tool
from kmesh.keys import Namespace
from kmesh.v1 import admin_pb2

EXIT_OK, EXIT_CHECK_FAILED, EXIT_USAGE, EXIT_UNAVAILABLE, EXIT_REFUSED = range(5)

app = App(
    help="Looks at a KMesh daemon, and steers it: what it holds, why it misses, whether it works.",
    epilog="Exit codes: 0 ok, 1 something failed or was not done, 2 usage, 3 daemon unavailable, "
    "4 refused.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]


def _version(wanted: bool) -> None:
    if wanted:
        print(f"kmesh {kmesh.__version__}")
        raise typer.Exit


@app.callback()
def options(
    context: typer.Context,
    socket_dir: SocketDir = None,
    timeout: Timeout = None,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    context.obj = chosen(socket_dir, timeout)


@app.command()
def status(context: typer.Context, as_json: AsJson = False) -> None:
    """Shows what the daemon holds and how it is."""
    with connected(context) as tool:
        answer, clients = tool.status(), tool.sessions()
    if as_json:
        render.print_json(documents.status_json(answer, clients))
    else:
        render.print_status(answer, clients)


@app.command()
def ls(
    context: typer.Context,
    namespace: Annotated[
        str, typer.Option(help="Only of this namespace: its digest in hex, or its beginning.")
    ] = "",
    limit: Annotated[int, typer.Option(min=1, help="At most so many spans.")] = 100,
    namespaces: Annotated[
        bool, typer.Option("--namespaces", help="List namespaces, not spans.")
    ] = False,
    remembered: Annotated[
        bool,
        typer.Option("--remembered", help="List namespaces, those without any spans too."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Lists the spans in memory, or the namespaces of which something is there or on disk."""
    namespaces = namespaces or remembered
    with connected(context) as tool:
        spaces = tool.namespaces(remembered) if namespaces or namespace else []
        if namespace:
            spaces = [pick(spaces, namespace)]
        if namespaces:
            if as_json:
                render.print_json({"namespaces": [documents.namespace_json(s) for s in spaces]})
            else:
                render.print_namespaces(spaces)
            return
        spans, more = tool.listed(spaces[0].digest if spaces else b"", limit)
    if as_json:
        render.print_json({"spans": [documents.span_json(span) for span in spans], "more": more})
    else:
        render.print_spans(spans, more)


@app.command()
def doctor(
    context: typer.Context,
    gpu: Annotated[
        list[str] | None,
        typer.Option(help="Try this GPU too: number or UUID; may be repeated."),
    ] = None,
    disk: Annotated[
        str, typer.Option(help="Try this directory too, as for the daemon's --disk.")
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Proves by doing that this machine and the daemon can share memory."""
    known: Options = context.obj
    report = doctor_module.examine(known.socket_dir, known.timeout, gpu or (), disk)
    if as_json:
        render.print_json(report.as_json())
    else:
        report.print(render.console())
    if isinstance(report.refusal, errors.RequestError):
        raise typer.Exit(EXIT_REFUSED)
    if report.refusal is not None:
        raise typer.Exit(EXIT_UNAVAILABLE)
    if not report.passed:
        raise typer.Exit(EXIT_CHECK_FAILED)


def pick(spaces: Sequence[admin_pb2.NamespaceInfo], beginning: str) -> admin_pb2.NamespaceInfo:
    """The namespace whose digest begins like this, in hex; BadParameter unless it is one."""
    found = [space for space in spaces if space.digest.hex().startswith(beginning.lower())]
    if len(found) != 1:
        count = "no namespace" if not found else f"{len(found)} namespaces"
        raise typer.BadParameter(f"{count} begins with {beginning!r}")
    return found[0]


@contextlib.contextmanager
def connected(context: typer.Context, namespace: Namespace | None = None) -> Iterator[Tool]:
    """A way to the daemon; errors become a line and an exit code.

    Args:
        namespace: of what is going to be stored.
    """
    known: Options = context.obj
    try:
        with Tool(known.socket_dir, known.timeout, namespace) as tool:
            yield tool
    except errors.RequestError as refused:
        complain(refused)
        code = EXIT_UNAVAILABLE if isinstance(refused, errors.DeadlineExceeded) else EXIT_REFUSED
        raise typer.Exit(code) from None
    except errors.ConfigError as wrong:
        complain(wrong)
        raise typer.Exit(EXIT_USAGE) from None
    except errors.DaemonUnavailable as absent:
        complain(absent, " (is kmesh-spand running? --socket-dir says where)")
        raise typer.Exit(EXIT_UNAVAILABLE) from None
    except errors.KMeshError as gone:
        complain(gone)
        raise typer.Exit(EXIT_UNAVAILABLE) from None


def complain(error: errors.KMeshError, hint: str = "") -> None:
    """One line on standard error."""
    print(f"kmesh: {error}{hint}", file=sys.stderr)
