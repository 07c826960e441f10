"""Catalog records: what a restarted daemon knows of a span without reading its payload.

A record is 128 bytes, little-endian:

    4s magic · u16 version · u8 state · pad · u32 tokens · u32 start · u32 generation ·
    u32 slab · u32 primary or born · u64 offset · u32 length · u32 dense · u64 shard · u64 root ·
    32s key · 32s namespace · u32 crc32 of all before it

``dense`` is 0 where the range holds the payload itself. Otherwise it holds a recipe of ``length``
bytes and of this ``root``, which gives a payload of ``dense`` bytes.

Three states are written. ``COMMITTED`` is a span; ``born`` is the tick at which it was committed,
of 64 ms since the machine was started: the memory does not last longer either. ``ALIAS`` is one
sub-key of a tail: its ``primary`` is 1 + the slot of the span that it names, and ``slab``,
``offset`` and ``root`` repeat that span's, so that an alias never binds to other bytes. ``FREE``
keeps nothing but the slot's generation.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass

from kmesh_spand.core.states import State

RECORD_BYTES = 128
MAGIC = b"KMSR"
#: Raised with each change: what one daemon has written, another reads after an upgrade.
VERSION = 2

_BODY = struct.Struct("<4sHBxIIIIIQIIQQ32s32s")
_CRC = struct.Struct("<I")
_WRITTEN = {State.FREE: State.FREE, State.COMMITTED: State.COMMITTED, State.ALIAS: State.ALIAS}
_NOTHING = bytes(32)
#: The first eight bytes of each record, as u64.
HEADS = frozenset(
    int.from_bytes(struct.pack("<4sHBx", MAGIC, VERSION, state), "little") for state in _WRITTEN
)


@dataclass(frozen=True, slots=True)
class Record:
    """One record. ``offset`` and ``length`` are bytes; ``key`` and ``namespace`` 32 bytes each.

    ``born`` is of a COMMITTED record, ``primary`` of an ALIAS; they are 0 in others.
    """

    state: State
    generation: int
    tokens: int = 0
    start: int = 0
    slab: int = 0
    offset: int = 0
    length: int = 0
    shard: int = 0
    root: int = 0
    key: bytes = _NOTHING
    namespace: bytes = _NOTHING
    primary: int = 0
    dense: int = 0
    born: int = 0

    def encode(self) -> bytes:
        """``RECORD_BYTES`` bytes."""
        body = _BODY.pack(
            MAGIC,
            VERSION,
            self.state,
            self.tokens,
            self.start,
            self.generation,
            self.slab,
            self.primary or self.born,
            self.offset,
            self.length,
            self.dense,
            self.shard,
            self.root,
            self.key,
            self.namespace,
        )
        return body + _CRC.pack(zlib.crc32(body))


def decode(data: bytes | bytearray | memoryview) -> Record | None:
    """The record, or None for anything that is not one (never written, torn, damaged)."""
    if len(data) != RECORD_BYTES or int.from_bytes(data[:8], "little") not in HEADS:
        return None
    if _CRC.unpack_from(data, _BODY.size)[0] != zlib.crc32(data[: _BODY.size]):
        return None
    return unpack(data)


def unpack(data: bytes | bytearray | memoryview) -> Record:
    """A record of which it is known that it is one."""
    (
        _,
        _,
        number,
        tokens,
        start,
        generation,
        slab,
        word,
        offset,
        length,
        dense,
        shard,
        root,
        key,
        namespace,
    ) = _BODY.unpack_from(data)
    state = _WRITTEN[number]
    return Record(
        state=state,
        generation=generation,
        tokens=tokens,
        start=start,
        slab=slab,
        offset=offset,
        length=length,
        shard=shard,
        root=root,
        key=key,
        namespace=namespace,
        primary=word if state is State.ALIAS else 0,
        dense=dense,
        born=word if state is State.COMMITTED else 0,
    )
