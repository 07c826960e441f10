"""The shared index: which (key, shard) are stored, read without a call.

The format is in ``docs/architecture.md``. The index is a hint: what it misses may be there,
what it finds may be gone; Acquire decides.
"""

from __future__ import annotations

import os
import struct
from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from blake3 import blake3

from kmesh import _host
from kmesh.errors import ProtocolError
from kmesh.keys import KEY_BYTES
from kmesh.mapping import Mapping

MAGIC = b"KMIX0001"
FORMAT_VERSION = 1
HEADER_BYTES = 4096
ENTRY_BYTES = 16
PROBE_LIMIT = 64
#: A slot is below this, so that slot + 1 is a u32.
MAX_SLOT = 0xFFFFFFFF

# magic, format, entry bytes, epoch, capacity, version, poisoned, slab count, live entries
_HEADER = struct.Struct("<8sIIQQQIIQ")
_VERSION, _POISONED, _SLABS, _LIVE = 32, 40, 44, 48
_U64 = 0xFFFFFFFFFFFFFFFF


def mix(shard_code: int) -> int:
    """``splitmix64`` of ``Shard.code()``: what a key's first u64 is XORed with."""
    x = (shard_code + 0x9E3779B97F4A7C15) & _U64
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _U64
    x = (x ^ x >> 27) * 0x94D049BB133111EB & _U64
    return x ^ x >> 31


def device_mix(device: str) -> int:
    """What tags of spans on a GPU are XORed with further, by its UUID; 0 for host memory."""
    return int.from_bytes(blake3(device.encode()).digest(8), "little") if device else 0


def on_device(tag: int, device: str) -> int:
    """The tag of the same span in the memory of a GPU; as it is for host memory."""
    return max(tag ^ device_mix(device), 2)


def tag(key: bytes, shard_code: int) -> int:
    """The tag of one (key, shard); never 0 or 1."""
    return max(int.from_bytes(key[:8], "little") ^ mix(shard_code), 2)


def tags(keys: bytes, shard_codes: Iterable[int]) -> list[int]:
    """Tags of keys (32 bytes each) in all shards, in the order of Acquire: key-major."""
    mixes = [mix(code) for code in shard_codes]
    words = struct.unpack(f"<{len(keys) // 8}Q", keys)[:: KEY_BYTES // 8]
    return [max(word ^ m, 2) for word in words for m in mixes]


def capacity_for(entries: int) -> int:
    """The capacity (a power of two) in which that many entries find their place quickly."""
    return 1 << max(2 * entries - 1, 1).bit_length()


def index_size(capacity: int) -> int:
    """Bytes of an index of that capacity; ValueError unless it is a power of two."""
    if capacity < 1 or capacity & (capacity - 1):
        raise ValueError(f"capacity {capacity} is not a power of two")
    return HEADER_BYTES + capacity * ENTRY_BYTES


def poison(fd: int) -> None:
    """Says that nothing in the index in this memfd holds any more. For writers of any epoch.

    It needs neither memory nor a mapping, so that it can be said when there is none.
    """
    os.pwrite(fd, struct.pack("<I", 1), _POISONED)
    # Last: whoever remembers answers looks again when it changes, and must find it poisoned then.
    version = int.from_bytes(os.pread(fd, 8, _VERSION), "little")
    os.pwrite(fd, struct.pack("<Q", version + 1 & _U64), _VERSION)


class IndexWriter:
    """The one writer of an index; makes it empty first.

    Args:
        mapping: writable, zeroed, of ``index_size(capacity)`` bytes; its capacity is the
            largest that fits.
        epoch: of this daemon start.

    Raises:
        ValueError: the mapping is too small, or read-only.
    """

    __slots__ = ("_base", "_mapping", "_size", "capacity", "epoch")

    def __init__(self, mapping: Mapping, epoch: int) -> None:
        places = (mapping.size - HEADER_BYTES) // ENTRY_BYTES
        if places < 1 or not mapping.writable:
            raise ValueError("an index needs a writable mapping of at least one entry")
        self.capacity = 1 << (places.bit_length() - 1)
        self.epoch = epoch
        self._mapping = mapping
        self._base = mapping.address
        self._size = mapping.size
        header = _HEADER.pack(MAGIC, FORMAT_VERSION, ENTRY_BYTES, epoch, self.capacity, 0, 0, 0, 0)
        mapping.view(0, len(header))[:] = header

    @property
    def live(self) -> int:
        """Entries that are in it."""
        return _host.load(self._base + _LIVE, 64)

    @property
    def version(self) -> int:
        return _host.load(self._base + _VERSION, 64)

    def insert(self, tag: int, slot: int) -> bool:
        """Points ``tag`` at ``slot``, also where it pointed elsewhere; False: no place near."""
        return _host.index_insert(self._base, self._size, tag, slot)

    def remove(self, tag: int, slot: int) -> bool:
        """False: ``tag`` is not there or points at another slot, and nothing was changed."""
        return _host.index_remove(self._base, self._size, tag, slot)

    def bump(self) -> None:
        """Ends a batch of changes: readers that remember answers look again."""
        _host.store(self._base + _VERSION, 64, self.version + 1)

    def set_slab_count(self, count: int) -> None:
        _host.store(self._base + _SLABS, 32, count)

    def poison(self) -> None:
        """Readers find nothing from here on."""
        _host.store(self._base + _POISONED, 32, 1)
        self.bump()


class Probe(NamedTuple):
    """Answer of ``IndexReader.probe``.

    Attributes:
        hits: with ``prefix``, leading keys of which all shards are there; without, all such keys.
        slots: for key i, shard j of m, at i·m + j: catalog slot + 1, or 0. With ``prefix``,
            what lies behind the first miss was not looked up.
    """

    hits: int
    slots: array[int]


class IndexReader:
    """Reads an index that another process writes.

    Raises:
        ProtocolError: the mapping is not an index of this format, or claims more than it holds.
    """

    __slots__ = ("_base", "_mapping", "_mixes", "_size", "epoch")

    def __init__(self, mapping: Mapping) -> None:
        if mapping.size < HEADER_BYTES:
            raise ProtocolError(f"index: {mapping.size} bytes are too few")
        magic, version, entry, epoch, capacity, *_ = _HEADER.unpack(mapping.view(0, _HEADER.size))
        if magic != MAGIC:
            raise ProtocolError("index: wrong magic")
        if (version, entry) != (FORMAT_VERSION, ENTRY_BYTES):
            raise ProtocolError(f"index: format {version} with {entry}-byte entries is unknown")
        if capacity < 1 or capacity & (capacity - 1) or index_size(capacity) > mapping.size:
            raise ProtocolError(f"index: capacity {capacity} in {mapping.size} bytes")
        self.epoch: int = epoch
        self._mapping = mapping
        self._base = mapping.address
        self._size = mapping.size
        self._mixes: dict[tuple[str, tuple[int, ...]], bytes] = {}

    @property
    def version(self) -> int:
        """Grows with each batch of changes, and when the index is poisoned."""
        return _host.load(self._base + _VERSION, 64)

    @property
    def poisoned(self) -> bool:
        """The daemon that wrote it is gone: attach to the new one."""
        return _host.load(self._base + _POISONED, 32) != 0

    @property
    def slab_count(self) -> int:
        return _host.load(self._base + _SLABS, 32)

    @property
    def live(self) -> int:
        return _host.load(self._base + _LIVE, 64)

    def probe(
        self, keys: bytes, shard_codes: Sequence[int], *, prefix: bool = True, device: str = ""
    ) -> Probe:
        """Looks up keys (32 bytes each) in all shards. A poisoned or broken index has nothing.

        Args:
            device: UUID of the GPU whose memory is looked in, or empty: host memory.

        Raises:
            ValueError: ``keys`` is not whole keys, or there is no shard.
        """
        codes = tuple(shard_codes)
        mixes = self._mixes.get((device, codes))
        if mixes is None:
            there = device_mix(device)
            mixes = array("Q", [mix(code) ^ there for code in codes]).tobytes()
            self._mixes[device, codes] = mixes
        slots = array("I", bytes(4 * (len(keys) // KEY_BYTES) * len(codes)))
        hits = _host.index_probe(self._base, self._size, self.epoch, keys, mixes, slots, prefix)
        return Probe(hits, slots)
