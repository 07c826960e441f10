"""Reads settings: flags, then environment, then a TOML file, then defaults.

Runs in a short-lived process, because the libraries it needs are larger than the supervisor.
"""

from __future__ import annotations

import argparse
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    InitSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from kmesh.errors import ConfigError
from kmesh.layout import SPAN_TOKENS, SUB_TOKENS, TILE_BYTES
from kmesh_spand.settings import MIN_SLAB_BYTES, Settings

ENV_PREFIX = "KMESH_SPAND_"

_UNITS = {"": 1, "B": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)\Z")
_LISTEN = re.compile(r"(\[[0-9a-fA-F:.]+\]|[^\s:\[\]]+):(\d{1,5})\Z")
_BYTES_OF_MEMORY_A_RECORD = 256 << 10
_MAX_PATH = 107 - len("/session.sock")


def parse_size(value: object) -> object:
    """Bytes of ``8GiB``, ``512 MiB``, ``1.5TiB`` or a plain number.

    Raises:
        ValueError: it is none of these, or not a whole number of bytes.
    """
    if not isinstance(value, str):
        return value
    found = _SIZE.match(value.strip())
    unit = _UNITS.get(found[2].upper()) if found else None
    if found is None or unit is None:
        raise ValueError(f"{value!r} is no size: write 8GiB, 512MiB or a number of bytes")
    size = float(found[1]) * unit if "." in found[1] else int(found[1]) * unit
    if size != int(size):
        raise ValueError(f"{value!r} is not a whole number of bytes")
    return int(size)


def format_size(size: int) -> str:
    """Inverse of ``parse_size`` in the largest unit that is exact."""
    for unit, name in ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size and size % unit == 0:
            return f"{size // unit}{name}"
    return str(size)


def _split(value: object) -> object:
    return (
        [part for part in re.split(r"[,\s]+", value) if part] if isinstance(value, str) else value
    )


def _octal(value: object) -> object:
    if isinstance(value, str):
        if not re.fullmatch(r"0?o?[0-7]{3}", value):
            raise ValueError(f"{value!r} is no file mode: write 0660")
        return int(value.replace("o", ""), 8)
    return value


def _listen(value: str) -> str:
    found = _LISTEN.match(value)
    if value and (found is None or not 0 < int(found[2]) < 65536):
        raise ValueError(f"{value!r} is no address: write 127.0.0.1:9464, or nothing")
    return value


Size = Annotated[int, BeforeValidator(parse_size)]


class Config(BaseSettings):
    """Every setting, as it may be written. ``resolve`` fills in what follows from others."""

    model_config = SettingsConfigDict(extra="forbid", env_prefix=ENV_PREFIX, validate_default=True)

    socket_dir: str = Field(
        "", description="directory of the sockets [$XDG_RUNTIME_DIR/kmesh, else /run/kmesh]"
    )
    socket_mode: Annotated[int, BeforeValidator(_octal)] = Field(
        0o660, ge=0o600, le=0o777, description="mode of the sockets, octal"
    )
    host_memory: Size = Field(
        1 << 30, ge=MIN_SLAB_BYTES, description="memory for spans, such as 8GiB"
    )
    slab_size: Size | None = Field(
        None,
        ge=MIN_SLAB_BYTES,
        description="memory that is exported as one piece [1GiB or host_memory]",
    )
    hugepages: Literal["auto", "off"] = Field(
        "auto", description="use huge pages where the kernel grants them"
    )
    populate_threads: int = Field(
        0, ge=0, le=256, description="threads that touch memory at start [CPUs, at most 8]"
    )
    copy_threads: int = Field(
        0, ge=0, le=256, description="threads that copy and verify spans [CPUs, at most 4]"
    )
    span_tokens: int = Field(SPAN_TOKENS, ge=SUB_TOKENS, le=4096, description="tokens of a span")
    max_spans: int | None = Field(
        None,
        ge=1,
        le=1 << 26,
        description="spans that can be kept [one for each 256KiB of host_memory]",
    )
    allow_uids: Annotated[
        list[Annotated[int, Field(ge=0, lt=2**32)]], NoDecode, BeforeValidator(_split)
    ] = Field(
        default_factory=list,
        description="uids that may connect, such as 1000,1001 [the daemon's own]",
    )
    max_sessions: int = Field(1024, ge=1, le=1 << 20, description="connections at a time")
    staging_memory: Size | None = Field(
        None,
        ge=1 << 20,
        description="staging of all sessions, beside host_memory [a quarter of it, at least 64MiB]",
    )
    session_staging: Size | None = Field(
        None, ge=1 << 16, description="staging of one session [512MiB or staging_memory]"
    )
    deadline_ms: int = Field(30_000, ge=1, description="deadline of a call that states none")
    copy_timeout_ms: int = Field(
        30_000, ge=100, description="a copy that takes longer restarts the store worker"
    )
    verify_rate: Size = Field(
        4 << 30, ge=0, description="bytes a second that are verified after a restart; 0: no limit"
    )
    grace_ms: int = Field(10_000, ge=0, description="time for engines to re-attach after a restart")
    shutdown_timeout_ms: int = Field(10_000, ge=0, description="time to finish on SIGTERM")
    metrics_listen: Annotated[str, AfterValidator(_listen)] = Field(
        "", description="HOST:PORT of the metrics page over HTTP [none]"
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="least severe line that is logged"
    )
    log_format: Literal["text", "json"] = Field("text", description="form of a log line")

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """``load`` merges the sources itself, to know where each value came from."""
        return (init_settings,)

    def resolve(self, environ: Mapping[str, str]) -> Settings:
        """Fills in what follows from other settings or from the machine.

        Raises:
            ConfigError: two settings don't fit together; the message begins with one's name.
        """
        runtime = environ.get("XDG_RUNTIME_DIR")
        cpus = len(os.sched_getaffinity(0))
        host = self.host_memory // TILE_BYTES * TILE_BYTES
        staging = self.staging_memory or max(64 << 20, host // 4)
        settings = Settings(
            socket_dir=os.path.abspath(
                self.socket_dir or (os.path.join(runtime, "kmesh") if runtime else "/run/kmesh")
            ),
            socket_mode=self.socket_mode,
            host_memory=host,
            slab_size=self.slab_size or min(1 << 30, host),
            hugepages=self.hugepages == "auto",
            populate_threads=self.populate_threads or min(8, cpus),
            copy_threads=self.copy_threads or min(4, cpus),
            span_tokens=self.span_tokens,
            max_spans=self.max_spans or min(max(host // _BYTES_OF_MEMORY_A_RECORD, 1024), 1 << 20),
            allow_uids=tuple(self.allow_uids) or (os.getuid(),),
            max_sessions=self.max_sessions,
            staging_memory=staging,
            session_staging=self.session_staging or min(512 << 20, staging),
            deadline_ms=self.deadline_ms,
            copy_timeout_ms=self.copy_timeout_ms,
            verify_rate=self.verify_rate,
            grace_ms=self.grace_ms,
            shutdown_timeout_ms=self.shutdown_timeout_ms,
            metrics_listen=self.metrics_listen,
            log_level=self.log_level,
            log_format=self.log_format,
        )
        _check(settings)
        return settings


def _check(settings: Settings) -> None:
    if len(os.fsencode(settings.socket_dir)) > _MAX_PATH:
        raise ConfigError(
            f"socket_dir: longer than {_MAX_PATH} bytes, sockets in it could not be named"
        )
    if settings.slab_size % TILE_BYTES:
        raise ConfigError(f"slab_size: not a multiple of {format_size(TILE_BYTES)}")
    if settings.slab_size > settings.host_memory:
        raise ConfigError(f"slab_size: over host_memory, {format_size(settings.host_memory)}")
    if settings.span_tokens % SUB_TOKENS:
        raise ConfigError(f"span_tokens: not a multiple of {SUB_TOKENS}")
    if settings.session_staging > settings.staging_memory:
        raise ConfigError(
            f"session_staging: over staging_memory, {format_size(settings.staging_memory)}"
        )


class Loaded(NamedTuple):
    """``origins`` says where each setting came from, by its name."""

    settings: Settings
    origins: dict[str, str]


def parser() -> argparse.ArgumentParser:
    """The command line: a flag for each setting."""
    made = argparse.ArgumentParser(
        prog="kmesh-spand",
        description="Memory server for the KV state of related LLM inference requests on one node.",
        epilog=f"Each setting can also be {ENV_PREFIX}NAME in the environment or a key of the file. "
        "Flags come before the environment, that before the file, that before defaults [in brackets].",
        allow_abbrev=False,
    )
    made.add_argument("--config", metavar="FILE", help="read settings from a TOML file")
    made.add_argument(
        "--print-config", action="store_true", help="print the effective settings as TOML and exit"
    )
    made.add_argument("--version", action="store_true", help="print the version and exit")
    group = made.add_argument_group("settings")
    for name, field in Config.model_fields.items():
        text = field.description or ""
        if not text.endswith("]") and not field.is_required() and field.default is not None:
            text += f" [{_value_text(name, field.default)}]"
        group.add_argument(
            "--" + name.replace("_", "-"),
            dest=name,
            metavar="VALUE",
            default=argparse.SUPPRESS,
            help=text.replace("%", "%%"),
        )
    return made


def load(flags: Mapping[str, Any], environ: Mapping[str, str], file: Path | None = None) -> Loaded:
    """Merges the sources.

    Raises:
        ConfigError: one line that names the setting and where it came from.
    """
    sources: list[tuple[str, dict[str, Any]]] = []
    if file is not None:
        sources.append((str(file), _read_file(file)))
    sources.append(("environment", _read_environment(environ)))
    sources.append(("flag", InitSettingsSource(Config, dict(flags))()))
    merged: dict[str, Any] = {}
    origins = dict.fromkeys(Config.model_fields, "default")
    for origin, values in sources:
        for name, value in values.items():
            if name not in Config.model_fields:
                raise ConfigError(f"{name}: unknown setting ({origin})")
            merged[name] = value
            origins[name] = origin
    try:
        settings = Config(**merged).resolve(environ)
    except ValidationError as failed:
        first = failed.errors()[0]
        name = str(first["loc"][0])
        text = first["msg"].removeprefix("Value error, ")
        raise ConfigError(f"{name}: {text} ({origins.get(name, 'default')})") from None
    return Loaded(settings, origins)


def _read_file(file: Path) -> dict[str, Any]:
    try:
        file.stat()
        return TomlConfigSettingsSource(Config, toml_file=file)()
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as failed:
        text = failed.strerror if isinstance(failed, OSError) else failed
        raise ConfigError(f"config: {file}: {text}") from None


def _read_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    ours = {name: value for name, value in environ.items() if name.startswith(ENV_PREFIX)}
    for name in ours:
        if name.removeprefix(ENV_PREFIX).lower() not in Config.model_fields or name != name.upper():
            raise ConfigError(f"{name}: unknown setting (environment)")
    source = EnvSettingsSource(Config)
    source.env_vars = {name.lower(): value for name, value in ours.items()}
    return source()


def _value_text(name: str, value: Any) -> str:
    if name in _SIZES:
        return format_size(value)
    if name == "socket_mode":
        return f"{value:04o}"
    return str(value)


_SIZES = {"host_memory", "slab_size", "staging_memory", "session_staging", "verify_rate"}


def to_toml(loaded: Loaded) -> str:
    """The effective settings as a file that ``load`` reads back to the same."""
    lines = []
    for name in Config.model_fields:
        value: Any = getattr(loaded.settings, name)
        if name == "hugepages":
            text = '"auto"' if value else '"off"'
        elif name == "allow_uids":
            text = "[" + ", ".join(map(str, value)) + "]"
        elif isinstance(value, str) or name in _SIZES or name == "socket_mode":
            quoted = _value_text(name, value).replace("\\", "\\\\").replace('"', '\\"')
            text = f'"{quoted}"'
        else:
            text = str(value)
        lines.append(f"{name} = {text}  # {loaded.origins[name]}")
    return "\n".join(lines) + "\n"


def parse(argv: Sequence[str], environ: Mapping[str, str]) -> tuple[argparse.Namespace, Loaded]:
    """Reads the command line and everything it points to. Exits for ``--help`` and bad flags."""
    known = vars(parser().parse_args(argv))
    options = argparse.Namespace(**{k: known.pop(k) for k in ("config", "print_config", "version")})
    return options, load(known, environ, Path(options.config) if options.config else None)
