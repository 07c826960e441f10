"""What the fake daemon's model holds, and the memory that it hands out."""

from __future__ import annotations

import fcntl
import os
from dataclasses import dataclass, field

from kmesh import layout
from kmesh.mapping import Mapping


@dataclass(slots=True)
class FakeRecipe:
    """A recipe of a span, beside its payload; ``bases`` are the spans that it refers to."""

    slab: int
    offset: int
    length: int
    root: int
    bases: list[Span]


@dataclass(slots=True)
class Span:
    """A committed span, or one that is reserved (``session`` says by whom)."""

    slot: int
    keys: list[bytes]
    shard: int
    tokens: int
    slab: int
    offset: int
    length: int
    session: int
    root: int = 0
    generation: int = 1
    leases: int = 0
    committed: bool = False
    dropped: bool = False
    salt: bytes = b""
    start: int = 0
    recipe: FakeRecipe | None = None


@dataclass(slots=True)
class Slab:
    memory: Mapping
    fd: int
    free: list[tuple[int, int]]  # (offset, bytes), sorted

    def take(self, length: int) -> int | None:
        need = layout.tiles(length) * layout.TILE_BYTES
        for i, (offset, size) in enumerate(self.free):
            if size >= need:
                self.free[i : i + 1] = [(offset + need, size - need)] if size > need else []
                return offset
        return None

    def give(self, offset: int, length: int) -> None:
        self.free.append((offset, layout.tiles(length) * layout.TILE_BYTES))
        self.free.sort()


@dataclass(slots=True)
class Peer:
    """A connection that has said Hello, and what it holds."""

    id: int
    role: int
    engine: str
    namespace: dict[str, str]
    staging: Mapping | None = None
    staging_fd: int = -1
    reservations: dict[int, Span] = field(default_factory=dict)
    leases: dict[int, list[Span | None]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Limits:
    """Settings of the fake; sizes in bytes."""

    slabs: int = 1
    slab_bytes: int = 4 << 20
    max_spans: int = 4096
    max_message_bytes: int = 128 * 1024
    max_batch: int = 1024
    max_staging_bytes: int = 64 << 20
    span_tokens: int = layout.SPAN_TOKENS
    sub_tokens: int = layout.SUB_TOKENS


def create_memfd(name: str, size: int, mode: int = 0o400) -> int:
    """A sealed memfd; its mode keeps others from opening it writable again."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.fchmod(fd, mode)
    os.ftruncate(fd, size)
    seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def reopen_read_only(fd: int) -> int:
    """A descriptor of the same memory that can't be mapped writable."""
    return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
