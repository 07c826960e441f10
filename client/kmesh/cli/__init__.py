"""The ``kmesh`` command: what a daemon holds, and whether it works. See ``docs/cli.md``."""

from __future__ import annotations

import sys

_NEEDED = ("grpc", "rich", "typer")


def main() -> None:
    """Entry point of ``kmesh``."""
    try:
        from kmesh.cli.commands import app
    except ModuleNotFoundError as missing:
        if (missing.name or "").partition(".")[0] not in _NEEDED:
            raise
        print(
            f"kmesh: the command needs the package {missing.name}: pip install '.[cli]' in a clone"
            " of KMesh",
            file=sys.stderr,
        )
        sys.exit(2)
    app()
