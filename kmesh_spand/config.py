"""Reads settings: flags, then environment, then a TOML file, then defaults.

Runs in a short-lived process, because the libraries it needs are larger than the supervisor.
"""

from __future__ import annotations

import importlib.util
import os
import tomllib
from collections.abc import Mapping
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
)

from kmesh import numa
from kmesh.errors import ConfigError
from kmesh.layout import SPAN_TOKENS, SUB_TOKENS, TILE_BYTES
from kmesh_spand import units
from kmesh_spand.core.diskfile import BLOCK_BYTES
from kmesh_spand.settings import GPU_GRANULARITY, MIN_SLAB_BYTES, Settings
from kmesh_spand.wrong import describe

ENV_PREFIX = "KMESH_SPAND_"

_MEMORY_OF_A_RECORD = 256 << 10
_HUGE_PAGE = 2 << 20
_MAX_PATH = 107 - len("/session.sock")
_TRACE_MODULES = {
    "console": "opentelemetry.sdk.trace",
    "file": "opentelemetry.sdk.trace",
    "otlp": "opentelemetry.exporter.otlp.proto.grpc",
}

#: Settings that have to be set when another one is: what is wrong came from there.
_NEEDED_BY = {"gpu_memory": "gpu", "gpu": "gpu_memory", "disk_bytes": "disk", "disk": "disk_bytes"}

Size = Annotated[int, BeforeValidator(units.parse_size)]
Mode = Annotated[int, BeforeValidator(units.parse_mode)]
Uid = Annotated[int, Field(ge=0, lt=2**32)]
Uids = Annotated[list[Uid], NoDecode, BeforeValidator(units.parse_list)]
Quotas = Annotated[
    dict[str, Annotated[int, Field(ge=0)]], NoDecode, BeforeValidator(units.parse_quotas)
]
Gpus = Annotated[list[str], NoDecode, BeforeValidator(units.parse_gpus)]
Listen = Annotated[str, AfterValidator(units.check_listen)]
Trace = Annotated[str, AfterValidator(units.check_trace)]
Level = Literal["debug", "info", "warning", "error"]


def _set(text: str, default: Any = None, **bounds: Any) -> Any:
    """A setting. Its text ends with its default in brackets where that is computed."""
    return Field(default, description=text, **bounds)


class Config(BaseSettings):
    """Every setting, as it may be written. ``resolve`` fills in what follows from others."""

    model_config = SettingsConfigDict(extra="forbid", env_prefix=ENV_PREFIX)

    socket_dir: str = _set("directory of the sockets [$XDG_RUNTIME_DIR/kmesh, else /run/kmesh]", "")
    socket_mode: Mode = _set("mode of the sockets, octal", 0o660, ge=0o600, le=0o777)
    host_memory: Size = _set("memory for spans, such as 8GiB", 1 << 30, ge=MIN_SLAB_BYTES)
    slab_size: Size | None = _set(
        "memory that is exported as one piece "
        "[an eighth of host_memory, 64MiB to 1GiB; two for each uid]",
        ge=MIN_SLAB_BYTES,
    )
    hugepages: Literal["auto", "off"] = _set("huge pages where the kernel grants them", "auto")
    numa_node: int = _set(
        "NUMA node that slabs lie on; -1: where the kernel puts them", -1, ge=-1, le=1023
    )
    populate_threads: int = _set(
        "threads that touch memory at start [CPUs, at most 8]", 0, ge=0, le=256
    )
    copy_threads: int = _set("threads that copy spans [CPUs, at most 4]", 0, ge=0, le=256)
    span_tokens: int = _set("tokens of a span", SPAN_TOKENS, ge=SUB_TOKENS, le=4096)
    max_spans: int | None = _set(
        "spans that can be kept [one for each 256KiB of host_memory]", ge=1, le=1 << 26
    )
    allow_uids: Uids = _set("uids that may connect, such as 1000,1001 [the daemon's own]", [])
    memory_policy: Literal["lru", "s3-fifo"] = _set(
        "which spans go first when memory is full", "lru"
    )
    share: Literal["uid", "all"] = _set(
        "who may be served what a uid stored: that uid, or all that may connect", "uid"
    )
    tenants: Quotas = _set("bytes that tenants may keep, such as 1000=4GiB,default=1GiB", {})
    hardened: bool = _set("seal slabs so that no other process can ever write them", False)
    dma_buf: Literal["off", "spans", "slabs"] = _set(
        "what may be exported as DMA-BUF, which whoever holds it can write through", "off"
    )
    memory_headroom: Size = _set(
        "memory that growing slabs leave to the machine and the control group", 64 << 20, ge=0
    )
    gpu: Gpus = _set("GPUs on which slabs are made: number or UUID; may be repeated", [])
    gpu_memory: Size = _set("memory of each of them, such as 8GiB; 0: none", 0, ge=0)
    gpu_slab_size: Size | None = _set(
        "GPU memory that is exported as one piece [an eighth of gpu_memory, 64MiB to 1GiB]",
        ge=GPU_GRANULARITY,
    )
    gpu_place: Literal["gpu", "host"] = _set(
        "where gpu_memory lies: on the GPU, or in host memory that CUDA makes for it", "gpu"
    )
    disk: str = _set("directory to which spans go that memory forgets [none]", "")
    disk_bytes: Size = _set(
        "what its files may take, headers included, such as 200GiB; 0: nothing", 0, ge=0
    )
    disk_spans: int | None = _set(
        "spans that can be kept there [one for each 256KiB of disk_bytes]", ge=1, le=1 << 26
    )
    disk_policy: Literal["lru", "s3-fifo"] = _set(
        "which files go first when the disk is full", "s3-fifo"
    )
    disk_threads: int = _set("threads that read files", 4, ge=1, le=256)
    disk_sync: Literal["off", "file", "all"] = _set(
        "what is flushed to the medium before a file counts: nothing, the file, its folder too",
        "off",
    )
    disk_tenants: Quotas = _set(
        "bytes that tenants may keep on disk, such as 1000=40GiB,default=10GiB", {}
    )
    max_sessions: int = _set("connections at a time", 1024, ge=1, le=1 << 20)
    staging_memory: Size | None = _set(
        "staging of all sessions, beside host_memory [a quarter of it, at least 64MiB]",
        ge=1 << 20,
    )
    session_staging: Size | None = _set(
        "staging of one session [512MiB, or staging_memory if less]", ge=1 << 16
    )
    deadline_ms: int = _set("deadline of a call that states none", 30_000, ge=1)
    copy_timeout_ms: int = _set(
        "a copy that takes longer restarts the store worker", 30_000, ge=100
    )
    verify_rate: Size = _set(
        "bytes a second that are verified after a restart; 0: no limit", 4 << 30, ge=0
    )
    grace_ms: int = _set("time for engines to re-attach after a restart", 10_000, ge=0)
    shutdown_timeout_ms: int = _set("time to finish on SIGTERM", 10_000, ge=0)
    remembered_keys: int = _set(
        "ends of keys that are remembered, to explain misses", 32768, ge=0, le=1 << 24
    )
    watch_events: int = _set("events that are remembered for who watches", 4096, ge=1, le=1 << 20)
    metrics_listen: Listen = _set("HOST:PORT of the metrics page over HTTP [none]", "")
    stuck_ms: int = _set("a store worker that owes an answer for longer is not ready", 3000, ge=100)
    slow_call_ms: int = _set("calls that take longer are logged; 0: none", 1000, ge=0)
    trace: Trace = _set(
        "OpenTelemetry: off, console, file:/PATH, otlp:unix:/PATH or otlp:http(s)://HOST:PORT",
        "off",
    )
    log_level: Level = _set("least severe line that is logged", "info")
    log_format: Literal["text", "json"] = _set("form of a log line", "text")

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
        directory = self.socket_dir or (f"{runtime}/kmesh" if runtime else "/run/kmesh")
        cpus = len(os.sched_getaffinity(0))
        host = self.host_memory // TILE_BYTES * TILE_BYTES
        staging = self.staging_memory or max(64 << 20, host // 4)
        records = min(max(host // _MEMORY_OF_A_RECORD, 1024), 1 << 20)
        groups = 1 if self.share == "all" else len(set(self.allow_uids)) or 1
        if self.numa_node >= 0 and self.numa_node not in (known := numa.nodes()):
            have = ", ".join(map(str, known)) or "none that the kernel names"
            raise ConfigError(f"numa_node: nodes with memory are {have}")
        settings = Settings(
            socket_dir=os.path.abspath(directory),
            socket_mode=self.socket_mode,
            host_memory=host,
            slab_size=self.slab_size or _slab_size(host, groups),
            hugepages=self.hugepages == "auto",
            numa_node=self.numa_node,
            populate_threads=self.populate_threads or min(8, cpus),
            copy_threads=self.copy_threads or min(4, cpus),
            span_tokens=self.span_tokens,
            max_spans=self.max_spans or records,
            allow_uids=tuple(self.allow_uids) or (os.getuid(),),
            max_sessions=self.max_sessions,
            staging_memory=staging,
            session_staging=self.session_staging or min(512 << 20, staging),
            deadline_ms=self.deadline_ms,
            copy_timeout_ms=self.copy_timeout_ms,
            verify_rate=self.verify_rate,
            grace_ms=self.grace_ms,
            shutdown_timeout_ms=self.shutdown_timeout_ms,
            remembered_keys=self.remembered_keys,
            watch_events=self.watch_events,
            metrics_listen=self.metrics_listen,
            memory_policy=self.memory_policy,
            share=self.share,
            tenants=self.tenants,
            hardened=self.hardened,
            dma_buf=self.dma_buf,
            memory_headroom=self.memory_headroom,
            gpu=tuple(self.gpu),
            gpu_memory=self.gpu_memory // GPU_GRANULARITY * GPU_GRANULARITY,
            gpu_slab_size=self.gpu_slab_size or _gpu_slab_size(self.gpu_memory),
            gpu_place=self.gpu_place,
            disk=os.path.abspath(self.disk) if self.disk else "",
            disk_bytes=self.disk_bytes // BLOCK_BYTES * BLOCK_BYTES,
            disk_spans=self.disk_spans or _disk_spans(self.disk_bytes),
            disk_policy=self.disk_policy,
            disk_threads=self.disk_threads,
            disk_sync=self.disk_sync,
            disk_tenants=self.disk_tenants,
            stuck_ms=self.stuck_ms,
            slow_call_ms=self.slow_call_ms,
            trace=self.trace,
            log_level=self.log_level,
            log_format=self.log_format,
        )
        _check(settings)
        return settings


def _slab_size(host: int, groups: int) -> int:
    """Several slabs, since each has one tenant, but not many: each takes a file descriptor."""
    size = min(host, max(64 << 20, min(1 << 30, host // 8 // _HUGE_PAGE * _HUGE_PAGE)))
    if groups > 1:
        size = min(size, host // (2 * groups) // TILE_BYTES * TILE_BYTES)
    return max(size, MIN_SLAB_BYTES)


def _gpu_slab_size(memory: int) -> int:
    eighth = memory // 8 // GPU_GRANULARITY * GPU_GRANULARITY
    whole = memory // GPU_GRANULARITY * GPU_GRANULARITY
    return max(min(whole, max(64 << 20, min(1 << 30, eighth))), GPU_GRANULARITY)


def _disk_spans(size: int) -> int:
    return min(max(size // _MEMORY_OF_A_RECORD, 1024), 1 << 20)


def _check_disk(settings: Settings) -> None:
    if bool(settings.disk) != bool(settings.disk_bytes):
        if settings.disk:
            raise ConfigError("disk_bytes: how much of it? For example --disk-bytes 200GiB")
        raise ConfigError("disk: which directory? For example --disk /var/lib/kmesh")
    _check_quotas("disk_tenants", settings.disk_tenants, settings)


def _check_quotas(name: str, quotas: Mapping[str, int], settings: Settings) -> None:
    names = {name.partition(":")[0] for name in quotas} - {"default"}
    known = {"all"} if settings.share == "all" else set(map(str, settings.allow_uids))
    if strange := sorted(names - known):
        raise ConfigError(f"{name}: {strange[0]} is not among those that may connect")


def _check_gpus(settings: Settings) -> None:
    if bool(settings.gpu) != bool(settings.gpu_memory):
        if settings.gpu:
            raise ConfigError("gpu_memory: how much of each GPU? For example --gpu-memory 8GiB")
        raise ConfigError("gpu: which GPU? Write for example 0, or a UUID")
    if settings.gpu_slab_size % GPU_GRANULARITY:
        raise ConfigError(f"gpu_slab_size: not a multiple of {units.format_size(GPU_GRANULARITY)}")
    if settings.gpu and settings.gpu_slab_size > settings.gpu_memory:
        size = units.format_size(settings.gpu_memory)
        raise ConfigError(f"gpu_slab_size: over gpu_memory, {size}")
    if settings.gpu and len(settings.tenancy().groups) > 1:
        raise ConfigError("gpu: whoever maps GPU memory can write it: allow one uid, or share all")
    if settings.gpu and settings.hardened:
        raise ConfigError("gpu: whoever maps GPU memory can write it: it can't be hardened")


def _check(settings: Settings) -> None:
    _check_gpus(settings)
    _check_disk(settings)
    if len(os.fsencode(settings.socket_dir)) > _MAX_PATH:
        raise ConfigError(f"socket_dir: longer than {_MAX_PATH} bytes, too long for a socket")
    if settings.slab_size % TILE_BYTES:
        raise ConfigError(f"slab_size: not a multiple of {units.format_size(TILE_BYTES)}")
    if settings.slab_size > settings.host_memory:
        raise ConfigError(f"slab_size: over host_memory, {units.format_size(settings.host_memory)}")
    if settings.span_tokens % SUB_TOKENS:
        raise ConfigError(f"span_tokens: not a multiple of {SUB_TOKENS}")
    _check_quotas("tenants", settings.tenants, settings)
    groups = len(settings.tenancy().groups)
    if groups > len(settings.slab_sizes()):
        raise ConfigError(
            f"slab_size: {len(settings.slab_sizes())} slabs for {groups} uids, each of which "
            "needs one of its own; make slabs smaller, or share"
        )
    if settings.dma_buf == "spans" and settings.hardened:
        raise ConfigError(
            "dma_buf: hardened slabs are sealed before they hold any span, so that only whole "
            'slabs can be exported: "slabs"'
        )
    if settings.session_staging > settings.staging_memory:
        limit = units.format_size(settings.staging_memory)
        raise ConfigError(f"session_staging: over staging_memory, {limit}")
    needed = _TRACE_MODULES.get(settings.trace.partition(":")[0])
    if needed and not _installed(needed):
        raise ConfigError(
            "trace: OpenTelemetry is not installed: pip install '.[otel]' in a clone of KMesh"
        )


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


class Loaded(NamedTuple):
    """``origins`` says where each setting came from, by its name."""

    settings: Settings
    origins: dict[str, str]


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
            if name == "socket_dir" and value == "":
                # What an unset variable of a shell gives: not a wish for the default.
                raise ConfigError(f"socket_dir: is empty ({origin})")
            merged[name] = value
            origins[name] = origin
    try:
        settings = Config(**merged).resolve(environ)
    except ValidationError as failed:
        first = failed.errors()[0]
        name = str(first["loc"][0])
        text = describe(first, merged.get(name))
        raise ConfigError(f"{name}: {text} ({origins.get(name, 'default')})") from None
    except ConfigError as failed:
        name = str(failed).partition(":")[0]
        origin, other = origins.get(name, "default"), _NEEDED_BY.get(name, "")
        if origin == "default" and origins.get(other, "default") != "default":
            origin = f"{other}: {origins[other]}"
        raise ConfigError(f"{failed} ({origin})") from None
    return Loaded(settings, origins)


def _read_file(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
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
