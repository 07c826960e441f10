"""Settings as people write them: sizes, modes, lists, addresses."""

from __future__ import annotations

import re

from kmesh.cuda.device import check_name

#: Settings that are bytes, and written with a unit.
SIZES = {
    "host_memory",
    "slab_size",
    "staging_memory",
    "session_staging",
    "verify_rate",
    "memory_headroom",
    "gpu_memory",
    "gpu_slab_size",
    "disk_bytes",
}

_UNITS = {"": 1, "B": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)\Z")
_TENANT = re.compile(r"(default|(all|\d{1,10})(:[0-9a-f]{16})?)\Z")
_LISTEN = re.compile(r"(\[[0-9a-fA-F:.]+\]|[^\s:\[\]]+):(\d{1,5})\Z")


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


def parse_list(value: object) -> object:
    """The parts of ``1000,1001``; anything but text is left alone."""
    if isinstance(value, str):
        return [part for part in re.split(r"[,\s]+", value) if part]
    return value


def parse_quotas(value: object) -> object:
    """Bytes by tenant of ``1000=4GiB,default=1GiB``, or of a table; sizes as ``parse_size``.

    Raises:
        ValueError: a name is no uid, ``all`` or ``default``, or a part has no size.
    """
    if isinstance(value, str):
        parts = [part.partition("=") for part in re.split(r"[,\s]+", value) if part]
        value = {name: size for name, _, size in parts}
    if not isinstance(value, dict):
        return value
    for name in value:
        if not isinstance(name, str) or not _TENANT.match(name):
            raise ValueError(f"{name!r} is no tenant: write 1000, 1000:SALT, all or default")
    return {name: parse_size(size) for name, size in value.items()}


def format_quotas(quotas: dict[str, int]) -> str:
    """Inverse of ``parse_quotas``, as a table of TOML."""
    parts = (f'"{name}" = "{format_size(size)}"' for name, size in sorted(quotas.items()))
    return "{ " + ", ".join(parts) + " }" if quotas else "{}"


def parse_gpus(value: object) -> object:
    """Numbers and UUIDs of ``0,GPU-…``, or of a list of such.

    Raises:
        ValueError: a part names no GPU, or one is named twice.
    """
    parts = value if isinstance(value, list) else [value]
    names = [name for part in parts for name in re.split(r"[,\s]+", str(part)) if name]
    found = [check_name(name) for name in names]
    if len(set(found)) < len(found):
        raise ValueError("a GPU is named twice")
    return found


def parse_mode(value: object) -> object:
    """The bits of ``0660``, which is octal with or without its zero.

    Raises:
        ValueError: it is not three octal digits.
    """
    if not isinstance(value, str):
        return value
    if not re.fullmatch(r"(0|0o)?[0-7]{3}", value):
        raise ValueError(f"{value!r} is no file mode: write 0660")
    return int(value.replace("o", ""), 8)


def check_listen(value: str) -> str:
    """``HOST:PORT`` or nothing.

    Raises:
        ValueError: it is neither.
    """
    found = _LISTEN.match(value)
    if value and (found is None or not 0 < int(found[2]) < 65536):
        raise ValueError(f"{value!r} is no address: write 127.0.0.1:9464, or nothing")
    return value


def check_trace(value: str) -> str:
    """``off``, ``console``, ``file:/PATH`` or ``otlp:ENDPOINT``.

    Raises:
        ValueError: it is none of these.
    """
    kind, colon, target = value.partition(":")
    if value in ("off", "console"):
        return value
    if colon and (
        (kind == "file" and target.startswith("/"))
        or (kind == "otlp" and target.startswith(("unix:/", "http://", "https://")))
    ):
        return value
    raise ValueError(
        f"{value!r} is no trace: write off, console, file:/PATH, otlp:unix:/PATH, "
        "otlp:http://HOST:PORT or otlp:https://HOST:PORT"
    )
