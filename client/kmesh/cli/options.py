"""What every command is told: where the daemon is, and how long to wait for it."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
from collections.abc import Callable
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

TIMEOUT = 5.0

SocketDir = Annotated[
    str | None,
    typer.Option(
        help="Directory of the daemon's sockets; KMESH_SOCKET_DIR, $XDG_RUNTIME_DIR/kmesh or "
        "/run/kmesh when not given.",
    ),
]
Timeout = Annotated[
    float | None,
    typer.Option(min=0.01, help=f"Seconds that one question may take [{TIMEOUT:.0f}]."),
]

F = TypeVar("F", bound=Callable[..., Any])


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    """What every command knows."""

    socket_dir: str
    timeout: float


def chosen(socket_dir: str | None, timeout: float | None) -> Options:
    """What was given before the command's name, and defaults for the rest."""
    where = socket_dir or os.environ.get("KMESH_SOCKET_DIR") or default_socket_dir()
    return Options(where, TIMEOUT if timeout is None else timeout)


def default_socket_dir() -> str:
    """Where a daemon listens that was not told otherwise."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return os.path.join(runtime, "kmesh") if runtime else "/run/kmesh"


class App(typer.Typer):
    """Its commands take ``--socket-dir`` and ``--timeout`` behind their names too, so that nobody
    has to know on which side of the name an option stands. The later one counts.
    """

    def command(self, *args: Any, **settings: Any) -> Callable[[F], F]:
        """As ``Typer.command``; the function's first parameter is the context."""
        register = super().command(*args, **settings)

        def add(function: F) -> F:
            register(_with_options(function))
            return function

        return add


def _with_options(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def run(context: typer.Context, socket_dir: SocketDir, timeout: Timeout, **given: Any) -> Any:
        known: Options = context.obj
        context.obj = Options(
            socket_dir or known.socket_dir, known.timeout if timeout is None else timeout
        )
        return function(context, **given)

    # Typer reads both.
    hints = get_type_hints(function, include_extras=True)
    run.__annotations__ = {**hints, "socket_dir": SocketDir, "timeout": Timeout}
    signature = inspect.signature(function, eval_str=True)
    kind = inspect.Parameter.KEYWORD_ONLY
    ours = [
        inspect.Parameter(name, kind, default=None, annotation=run.__annotations__[name])
        for name in ("socket_dir", "timeout")
    ]
    parameters = [*signature.parameters.values(), *ours]
    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return run
