"""Files of the disk tier: one span each, with what it says of itself. See ``docs/layout.md``."""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass, field, replace

from kmesh.layout import TILE_BYTES, tiles

#: Headers and payloads are padded with zeros to whole blocks, as direct I/O asks for.
BLOCK_BYTES = 4096
MAGIC = b"KMSHSPAN"
VERSION = 1
#: Of the header before its sums and names.
FIXED_BYTES = 256
#: A header is never longer: sums of 4 GiB are 512 KiB.
MAX_HEADER_BYTES = 1 << 20

# magic, version, header bytes, tile bytes, salted, group, file name, directory, tokens, start,
# length, shard, root, tiles, names, salt, key, namespace
_FIXED = struct.Struct("<8sIIIIIxxxxQ16sIIQQQII32s32s32s")
_NAME = struct.Struct("<I32s")
_CRC = struct.Struct("<I")
_NO_SALT = bytes(32)


class BadFile(ValueError):
    """A file is not what it must be."""


@dataclass(frozen=True, slots=True)
class SpanFile:
    """Which span a file holds.

    Attributes:
        group, salt: the tenant; ``salt`` is 32 bytes or empty.
        key, namespace: 32 bytes each. shard: its code.
        tokens, start: in tokens. length: payload bytes. root: fold of the tile sums.
        names: sub-keys of a tail, each with its tokens.
    """

    group: int
    salt: bytes = field(repr=False)
    key: bytes
    namespace: bytes
    shard: int
    tokens: int
    start: int
    length: int
    root: int
    names: tuple[tuple[int, bytes], ...] = ()

    def serves(self, wanted: SpanFile) -> bool:
        """Whether it is the span that is wanted; it may have further names, that others have."""
        same = replace(self, names=wanted.names) == wanted
        return same and set(wanted.names) <= set(self.names)


@dataclass(frozen=True, slots=True)
class Header:
    """The header of one file.

    Attributes:
        name: of the file itself: a number. directory: 16 bytes that tell directories apart.
        sums: of the tiles, u64 each.
    """

    span: SpanFile
    name: int
    directory: bytes
    sums: bytes

    @property
    def file_bytes(self) -> int:
        """Size that the file must have."""
        return file_bytes(self.span.length, len(self.span.names))

    def encode(self) -> bytes:
        """``header_bytes`` bytes."""
        span = self.span
        size = header_bytes(span.length, len(span.names))
        fixed = _FIXED.pack(
            MAGIC,
            VERSION,
            size,
            TILE_BYTES,
            bool(span.salt),
            span.group,
            self.name,
            self.directory,
            span.tokens,
            span.start,
            span.length,
            span.shard,
            span.root,
            tiles(span.length),
            len(span.names),
            span.salt or _NO_SALT,
            span.key,
            span.namespace,
        )
        names = b"".join(_NAME.pack(tokens, key) for tokens, key in span.names)
        body = (fixed.ljust(FIXED_BYTES, b"\0") + self.sums + names).ljust(size - _CRC.size, b"\0")
        return body + _CRC.pack(zlib.crc32(body))


def _padded(size: int) -> int:
    return -(-size // BLOCK_BYTES) * BLOCK_BYTES


def header_bytes(length: int, names: int) -> int:
    """Bytes of the header of a payload of ``length`` bytes with so many sub-keys."""
    return _padded(FIXED_BYTES + 8 * tiles(length) + _NAME.size * names + _CRC.size)


def file_bytes(length: int, names: int) -> int:
    """Bytes of the whole file."""
    return header_bytes(length, names) + _padded(length)


def announced_bytes(block: bytes | memoryview) -> int:
    """How long the header is that begins with this block.

    Raises:
        BadFile: it is no header, or one of another version.
    """
    if len(block) < BLOCK_BYTES or bytes(block[:8]) != MAGIC:
        raise BadFile("no span's file")
    version, size = struct.unpack_from("<II", block, 8)
    if version != VERSION:
        raise BadFile(f"version {version}, this daemon writes {VERSION}")
    if size % BLOCK_BYTES or not BLOCK_BYTES <= size <= MAX_HEADER_BYTES:
        raise BadFile(f"a header of {size} bytes")
    return int(size)


def decode(data: bytes) -> Header:
    """The header that these bytes are.

    Raises:
        BadFile: they are none, in whole or in part.
    """
    size = announced_bytes(data)
    if len(data) != size:
        raise BadFile("the header is cut short")
    body = data[: size - _CRC.size]
    if _CRC.unpack_from(data, size - _CRC.size)[0] != zlib.crc32(body):
        raise BadFile("the header's checksum differs")
    (
        _,
        _,
        _,
        tile_bytes,
        salted,
        group,
        name,
        directory,
        tokens,
        start,
        length,
        shard,
        root,
        count,
        names,
        salt,
        key,
        namespace,
    ) = _FIXED.unpack_from(data)
    if tile_bytes != TILE_BYTES:
        raise BadFile(f"tiles of {tile_bytes} bytes")
    if not 0 < length < 1 << 32 or count != tiles(length) or size != header_bytes(length, names):
        raise BadFile("lengths that contradict each other")
    sums = FIXED_BYTES + 8 * count
    span = SpanFile(
        group=group,
        salt=salt if salted else b"",
        key=key,
        namespace=namespace,
        shard=shard,
        tokens=tokens,
        start=start,
        length=length,
        root=root,
        names=tuple(_NAME.unpack_from(data, sums + at * _NAME.size) for at in range(names)),
    )
    return Header(span, name, directory, data[FIXED_BYTES:sums])
