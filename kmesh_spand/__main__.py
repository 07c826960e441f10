"""``kmesh-spand``: reads the settings in one child, prepares control in another, supervises."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kmesh_spand.settings import Settings

#: Of the extra ``daemon``; who has them has the others.
_NEEDED = ("msgspec", "pydantic_settings", "prometheus_client", "uvloop")


def _read_settings(argv: list[str], out: int) -> int:
    """Runs in the child: prints or sends the settings; returns the exit status."""
    import msgspec

    from kmesh.errors import ConfigError
    from kmesh_spand import flags

    try:
        options, loaded = flags.parse(argv, os.environ)
    except ConfigError as failed:
        print(f"kmesh-spand: {failed}", file=sys.stderr)
        return 2
    if options.version:
        from kmesh import __version__

        print(f"kmesh-spand {__version__}")
    elif options.print_config:
        sys.stdout.write(flags.to_toml(loaded))
    else:
        # Whoever was to read them may be gone.
        with contextlib.suppress(BrokenPipeError), open(out, "wb", closefd=False) as pipe:
            pipe.write(msgspec.msgpack.encode((loaded.settings, options.upgrade)))
    return 0


def _fork_reader(argv: list[str]) -> tuple[int, int]:
    """Starts the child: its pid, and the fd at which its settings arrive."""
    receive, send = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.close(receive)
            status = _read_settings(argv, send)
        except SystemExit as leaving:
            status = leaving.code if isinstance(leaving.code, int) else 1
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    os.close(send)
    return pid, receive


def _settings(pid: int, receive: int) -> tuple[Settings, bool] | int:
    """The settings and whether to upgrade, or the status to exit with: nothing is to run."""
    import msgspec

    from kmesh_spand.settings import Settings

    with open(receive, "rb") as pipe:
        data = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if status or not data:
        return status if status >= 0 else 1
    return msgspec.msgpack.decode(data, type=tuple[Settings, bool])


def main(argv: list[str] | None = None) -> int:
    """Entry point. Returns the exit status: 0, 1 (could not run) or 2 (a setting is wrong)."""
    if missing := next((name for name in _NEEDED if not importlib.util.find_spec(name)), ""):
        print(
            f"kmesh-spand: the daemon needs the package {missing}: pip install '.[daemon]' in a"
            " clone of KMesh",
            file=sys.stderr,
        )
        return 2
    # Before anything is loaded here: the longest way to serving leads through this child.
    reader = _fork_reader(sys.argv[1:] if argv is None else argv)
    from kmesh_spand.launch import Prepared

    prepared = Prepared()
    # While both of them load their code.
    from kmesh import __version__
    from kmesh_spand.supervisor import Supervisor

    read = _settings(*reader)
    if isinstance(read, int):
        prepared.end()
        return read
    settings, upgrade = read
    return Supervisor(settings, __version__, prepared, upgrade=upgrade).run()


if __name__ == "__main__":
    sys.exit(main())
