"""Digests of what lies in files: a model's weights, an adapter's directory.

Reading a large model takes a while, so digests of files are kept in
``$XDG_CACHE_HOME/kmesh/weights.json``, by path, size, modification time and inode.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import struct
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from blake3 import blake3

from kmesh.errors import ConfigError

logger = logging.getLogger("kmesh_vllm")

#: Files of a model directory that decide what the model computes.
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
CONFIG_NAMES = ("config.json", "params.json")

_CONTEXT = "kmesh 2026-11 file contents v1"
_SLOW_BYTES = 1 << 30


def cache_path() -> Path:
    """The file in which digests are kept."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "kmesh" / "weights.json"


def model_files(path: Path) -> list[Path]:
    """The files of a model, sorted by name; ``path`` is its directory or its only file.

    Where there are safetensors files, other formats beside them are copies and left out.

    Raises:
        ConfigError: no weights are there.
    """
    if path.is_file():
        return [path]
    found = [p for p in path.iterdir() if p.suffix in WEIGHT_SUFFIXES and p.is_file()]
    safe = [p for p in found if p.suffix == ".safetensors"]
    if not found:
        raise ConfigError(
            f"{path}: no weights to take a digest of; set weights_digest in"
            " kv_connector_extra_config"
        )
    configs = [path / name for name in CONFIG_NAMES if (path / name).is_file()]
    return sorted((safe or found) + configs, key=lambda p: p.name)


def files_digest(files: Iterable[Path]) -> str:
    """Digest of names and contents of files, in the order given; hexadecimal."""
    files = list(files)
    hasher = blake3(derive_key_context=_CONTEXT)
    with _kept() as kept:
        missing = [p for p in files if _stat_key(p) not in kept]
        size = sum(p.stat().st_size for p in missing)
        if size >= _SLOW_BYTES:
            logger.info("reading %.1f GiB of weights once, to know them", size / (1 << 30))
        for path in files:
            stat_key = _stat_key(path)
            if stat_key not in kept:
                kept[stat_key] = _file_digest(path)
            for part in (path.name.encode(), bytes.fromhex(kept[stat_key])):
                hasher.update(struct.pack("<Q", len(part)))
                hasher.update(part)
    return hasher.hexdigest()


def directory_signature(path: Path) -> tuple[tuple[str, int, int, int], ...]:
    """What changes when a file below ``path`` changes: names, sizes, times, inodes."""
    rows = []
    for file in sorted(p for p in path.rglob("*") if p.is_file()):
        stat = file.stat()
        rows.append((str(file.relative_to(path)), stat.st_size, stat.st_mtime_ns, stat.st_ino))
    return tuple(rows)


def directory_digest(path: Path) -> str:
    """Digest of names and contents of all files below ``path``; hexadecimal."""
    hasher = blake3(derive_key_context=_CONTEXT)
    for file in sorted(p for p in path.rglob("*") if p.is_file()):
        for part in (str(file.relative_to(path)).encode(), bytes.fromhex(_file_digest(file))):
            hasher.update(struct.pack("<Q", len(part)))
            hasher.update(part)
    return hasher.hexdigest()


def _file_digest(path: Path) -> str:
    if path.stat().st_size == 0:
        return blake3().hexdigest()
    return blake3(max_threads=blake3.AUTO).update_mmap(path).hexdigest()


def _stat_key(path: Path) -> str:
    real = path.resolve()
    stat = real.stat()
    return f"{real}|{stat.st_size}|{stat.st_mtime_ns}|{stat.st_ino}"


@contextlib.contextmanager
def _kept() -> Iterator[dict[str, str]]:
    """The kept digests; additions are written when the block ends. One process at a time."""
    path = cache_path()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as wrong:
        logger.warning("digests of weights are not kept: %s", wrong)
        yield {}
        return
    try:
        # The workers of an engine start together: the first reads the files, the others wait.
        fcntl.flock(lock, fcntl.LOCK_EX)
        kept = _read(path)
        before = dict(kept)
        yield kept
        if kept != before:
            with contextlib.suppress(OSError):
                _write(path, kept)
    finally:
        os.close(lock)


def _read(path: Path) -> dict[str, str]:
    try:
        kept = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    if not isinstance(kept, dict):
        return {}
    return {k: v for k, v in kept.items() if isinstance(v, str) and _is_digest(v)}


def _is_digest(text: str) -> bool:
    return len(text) == 64 and all(c in "0123456789abcdef" for c in text)


def _write(path: Path, kept: dict[str, str]) -> None:
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
        json.dump(kept, file, indent=0)
    os.replace(file.name, path)
