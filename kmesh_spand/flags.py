"""The command line of ``kmesh-spand``, and its settings printed as a file."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args, get_origin

from kmesh_spand import units
from kmesh_spand.config import ENV_PREFIX, Config, Loaded, load


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, as for settings from elsewhere."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def parser() -> argparse.ArgumentParser:
    """A flag for each setting, and a few of its own."""
    made = Parser(
        prog="kmesh-spand",
        description="Memory server for the KV state of related LLM inference requests on a node.",
        epilog=f"Each setting can also be {ENV_PREFIX}NAME in the environment, or a key of the "
        "file. Flags come before the environment, that before the file, that before defaults "
        "[in brackets].",
        allow_abbrev=False,
    )
    made.add_argument("--config", metavar="FILE", help="read settings from a TOML file")
    made.add_argument(
        "--print-config", action="store_true", help="print the effective settings and exit"
    )
    made.add_argument(
        "--upgrade",
        action="store_true",
        help="take over from the daemon that runs on socket_dir, with all spans; it ends when this "
        "one serves, and goes on if this one can't",
    )
    made.add_argument("--version", action="store_true", help="print the version and exit")
    group = made.add_argument_group("settings")
    for name, field in Config.model_fields.items():
        text = field.description or ""
        if not text.endswith("]"):
            text += f" [{_value(name, field.default)}]"
        group.add_argument(
            "--" + name.replace("_", "-"),
            dest=name,
            metavar=_metavar(field.annotation),
            action="append" if name == "gpu" else "store",
            default=argparse.SUPPRESS,
            help=text.replace("%", "%%"),
        )
    return made


def parse(argv: Sequence[str], environ: Mapping[str, str]) -> tuple[argparse.Namespace, Loaded]:
    """Reads the command line and everything it points to. Exits for ``--help`` and bad flags.

    Raises:
        ConfigError: a setting is wrong.
    """
    known = vars(parser().parse_args(argv))
    own = ("config", "print_config", "upgrade", "version")
    options = argparse.Namespace(**{name: known.pop(name) for name in own})
    return options, load(known, environ, Path(options.config) if options.config else None)


def to_toml(loaded: Loaded) -> str:
    """The effective settings as a file that ``load`` reads back to the same.

    What only says something of GPUs is left out where there are none: it would be taken for a wish
    by whoever adds one.
    """
    lines = []
    for name in Config.model_fields:
        if (
            name == "gpu_slab_size"
            and not loaded.settings.gpu
            and loaded.origins[name] == "default"
        ):
            continue
        value: Any = getattr(loaded.settings, name)
        if name == "hugepages":
            text = '"auto"' if value else '"off"'
        elif name in ("tenants", "disk_tenants"):
            text = units.format_quotas(value)
        elif isinstance(value, bool):
            text = str(value).lower()
        elif name == "allow_uids":
            text = "[" + ", ".join(map(str, value)) + "]"
        elif name == "gpu":
            text = "[" + ", ".join(f'"{gpu}"' for gpu in value) + "]"
        elif isinstance(value, str) or name in units.SIZES or name == "socket_mode":
            quoted = _value(name, value).replace("\\", "\\\\").replace('"', '\\"')
            text = f'"{quoted}"'
        else:
            text = str(value)
        lines.append(f"{name} = {text}  # {loaded.origins[name]}")
    return "\n".join(lines) + "\n"


def _metavar(kind: Any) -> str:
    choices = ("true", "false") if kind is bool else get_args(kind)
    if kind is bool or get_origin(kind) is Literal:
        return "{" + ",".join(choices) + "}"
    return "VALUE"


def _value(name: str, value: Any) -> str:
    if name in units.SIZES:
        return units.format_size(value)
    if name == "socket_mode":
        return f"{value:04o}"
    if name in ("tenants", "disk_tenants", "gpu"):
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)
