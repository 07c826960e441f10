"""``kmesh call`` and ``kmesh token``: the whole gRPC interface, for scripts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Annotated

import typer
from google.protobuf import json_format, message_factory

from kmesh.cli.app import EXIT_USAGE, app, connected
from kmesh.cli.options import Options
from kmesh.cli.rpc import GRPC_NAME
from kmesh.v1 import admin_pb2, families_pb2, flights_pb2, sessions_pb2, spans_pb2

_SERVICES = {
    service.name: service
    for module in (admin_pb2, families_pb2, flights_pb2, sessions_pb2, spans_pb2)
    for service in module.DESCRIPTOR.services_by_name.values()
}
_NOT_FOUND = 127


@app.command()
def call(
    context: typer.Context,
    method: Annotated[str, typer.Argument(help="Such as Admin/Status.")],
    request: Annotated[str, typer.Argument(help="JSON form of the request's message.")] = "{}",
    as_json: Annotated[bool, typer.Option("--json", help="It always prints JSON.")] = False,
) -> None:
    """Calls a method of the gRPC interface; a stream prints an answer a line."""
    service, _, name = method.removeprefix("kmesh.v1.").replace(".", "/").partition("/")
    found = _SERVICES[service].methods_by_name.get(name) if service in _SERVICES else None
    if found is None:
        known = [f"{s.name}/{m.name}" for s in _SERVICES.values() for m in s.methods]
        raise typer.BadParameter(f"{method!r} is none of {', '.join(known)}")
    message = message_factory.GetMessageClass(found.input_type)()
    try:
        json_format.Parse(request, message)
    except json_format.ParseError as wrong:
        raise typer.BadParameter(str(wrong), param_hint="REQUEST") from None
    answer = message_factory.GetMessageClass(found.output_type)
    path = f"/kmesh.v1.{service}/{name}"
    stream = bool(found.server_streaming)
    with connected(context) as tool:
        for item in tool.call(path, message, answer, stream):
            shown = json_format.MessageToDict(item, preserving_proto_field_name=True)
            print(json.dumps(shown, indent=None if stream else 2), flush=True)


@app.command(context_settings={"allow_interspersed_args": False})
def token(
    context: typer.Context,
    command: Annotated[list[str], typer.Argument(help="Command and its arguments, after --.")],
) -> None:
    """Runs a command that finds a session's token in KMESH_TOKEN.

    The session ends with the command, and the token with it. It is on no command line.
    """
    known: Options = context.obj
    with connected(context) as tool:
        ours = {
            "KMESH_TOKEN": tool.session.welcome.token,
            "KMESH_SOCKET_DIR": os.path.abspath(known.socket_dir),
            "KMESH_GRPC": os.path.join(os.path.abspath(known.socket_dir), GRPC_NAME),
        }
        try:
            process = subprocess.Popen(command, env={**os.environ, **ours})
        except OSError as failed:
            print(f"kmesh: {command[0]}: {failed.strerror}", file=sys.stderr)
            missing = isinstance(failed, FileNotFoundError)
            raise typer.Exit(_NOT_FOUND if missing else EXIT_USAGE) from None
        status = outcome(process)
    raise typer.Exit(status)


def outcome(process: subprocess.Popen[bytes]) -> int:
    """Waits for a command; its exit code as a shell would say it."""
    while True:
        try:
            status = process.wait()
        except KeyboardInterrupt:
            # The command got it too, and decides.
            continue
        return status if status >= 0 else 128 - status
