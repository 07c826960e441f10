"""The shared index: against a dict, under a churning writer, and with a lying header."""

from __future__ import annotations

import fcntl
import os
import random
import struct
import subprocess
import sys
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kmesh import _host
from kmesh.errors import ProtocolError
from kmesh.index import (
    ENTRY_BYTES,
    HEADER_BYTES,
    MAX_SLOT,
    PROBE_LIMIT,
    IndexReader,
    IndexWriter,
    capacity_for,
    index_size,
    mix,
    poison,
    tag,
    tags,
)
from kmesh.mapping import Mapping

U64 = 2**64 - 1
SHARD, OTHER = 0x0004_0000_001C_0000, 0x0004_0002_001C_0000


def memfd(size: int) -> int:
    fd = os.memfd_create("kmesh-test-index", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    return fd


class Pair:
    """A writer, a reader and the memory between them."""

    def __init__(self, capacity: int = 1024, epoch: int = 99) -> None:
        self.size = index_size(capacity)
        self.fd = fd = memfd(self.size)
        self.memory = Mapping(fd, self.size, writable=True)
        self.writer = IndexWriter(self.memory, epoch)
        self.shown = Mapping(fd, self.size)
        self.reader = IndexReader(self.shown)

    def close(self) -> None:
        os.close(self.fd)
        self.memory.close()
        self.shown.close()

    def put(self, offset: int, form: str, *values: int) -> None:
        """Writes behind the writer's back."""
        data = struct.pack("<" + form, *values)
        self.memory.view(offset, len(data))[:] = data


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.close()


def keys_of(count: int, seed: int = 1) -> bytes:
    return random.Random(seed).randbytes(32 * count)


def splitmix64(x: int) -> int:
    """Steele, Lea and Flood; the first output for seed 0 is a known number."""
    z = (x + 0x9E3779B97F4A7C15) & U64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & U64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & U64
    return z ^ (z >> 31)


def test_tags_are_the_documented_function() -> None:
    assert mix(0) == splitmix64(0) == 0xE220A8397B1DCDAF
    key = keys_of(1)
    first = int.from_bytes(key[:8], "little")
    assert tag(key, SHARD) == first ^ splitmix64(SHARD)
    for low in (0, 1):
        assert tag((splitmix64(SHARD) ^ low).to_bytes(8, "little") + bytes(24), SHARD) == 2


@given(st.binary(max_size=320).map(lambda b: b[: len(b) // 32 * 32]), st.lists(st.integers(0, U64)))
def test_tags_are_key_major(keys: bytes, shards: list[int]) -> None:
    expected = [tag(keys[i : i + 32], s) for i in range(0, len(keys), 32) for s in shards]
    assert tags(keys, shards) == expected


def test_bytes_of_an_index(pair: Pair) -> None:
    """Written out by hand from docs/architecture.md."""
    pair.writer.set_slab_count(3)
    pair.writer.bump()
    pair.writer.bump()
    value, slot, epoch = 0xABCDEF0123456789, 77, 99
    assert pair.writer.insert(value, slot)
    header = bytes(pair.memory.view(0, 56))
    assert header == struct.pack("<8sIIQQQIIQ", b"KMIX0001", 1, 16, epoch, 1024, 2, 0, 3, 1)
    home = value % 1024
    entry = bytes(pair.memory.view(HEADER_BYTES + home * ENTRY_BYTES, ENTRY_BYTES))
    check = splitmix64(value ^ epoch ^ slot * 0x9E3779B97F4A7C15 & U64) & 0xFFFFFFFF
    assert entry == struct.pack("<QII", value, slot, check)
    reader = pair.reader
    assert (reader.version, reader.epoch, reader.slab_count, reader.live) == (2, 99, 3, 1)
    assert not reader.poisoned


def test_prefix_stops_at_the_first_key_with_a_missing_shard(pair: Pair) -> None:
    keys = keys_of(6)
    for i, (one, two) in enumerate(zip(tags(keys, [SHARD]), tags(keys, [OTHER]), strict=True)):
        pair.writer.insert(one, 2 * i)
        if i != 3:
            pair.writer.insert(two, 2 * i + 1)
    hits, slots = pair.reader.probe(keys, [SHARD, OTHER])
    assert hits == 3
    assert list(slots) == [1, 2, 3, 4, 5, 6, 7, 0, 0, 0, 0, 0]
    hits, slots = pair.reader.probe(keys, [SHARD, OTHER], prefix=False)
    assert hits == 5
    assert list(slots) == [1, 2, 3, 4, 5, 6, 7, 0, 9, 10, 11, 12]
    assert pair.reader.probe(keys, [SHARD]).hits == 6
    assert pair.reader.probe(keys, [OTHER]).hits == 3
    assert pair.reader.probe(b"", [SHARD]).hits == 0


def test_a_lookup_of_2048_keys_finds_all() -> None:
    pair = Pair(capacity_for(2048))
    keys = keys_of(2048)
    assert all(pair.writer.insert(t, i) for i, t in enumerate(tags(keys, [SHARD])))
    probe = pair.reader.probe(keys, [SHARD])
    assert probe.hits == 2048
    assert list(probe.slots) == list(range(1, 2049))
    pair.close()


def test_insert_moves_a_tag_and_remove_wants_its_slot(pair: Pair) -> None:
    writer, keys = pair.writer, keys_of(1)
    (t,) = tags(keys, [SHARD])
    assert writer.insert(t, 5)
    assert writer.insert(t, 6)
    assert writer.live == 1
    assert not writer.remove(t, 5)
    assert list(pair.reader.probe(keys, [SHARD]).slots) == [7]
    assert writer.remove(t, 6)
    assert not writer.remove(t, 6)
    assert writer.live == 0
    assert pair.reader.probe(keys, [SHARD]).hits == 0


OPERATIONS = st.lists(st.tuples(st.booleans(), st.integers(0, 23), st.integers(0, 3)), max_size=200)


@settings(max_examples=200)
@given(OPERATIONS)
def test_the_index_is_a_dict(operations: list[tuple[bool, int, int]]) -> None:
    """Few homes and many collisions, around the end of the table, so that tombstones matter."""
    pair = Pair(64)
    names = [0x1000 * (n + 1) + (60 + n % 3) for n in range(24)]
    key_bytes = b"".join((n ^ mix(SHARD)).to_bytes(8, "little") + bytes(24) for n in names)
    model: dict[int, int] = {}
    for insert, n, slot in operations:
        if insert:
            assert pair.writer.insert(names[n], slot)
            model[n] = slot
        else:
            assert pair.writer.remove(names[n], slot) == (model.get(n) == slot)
            if model.get(n) == slot:
                del model[n]
        probe = pair.reader.probe(key_bytes, [SHARD], prefix=False)
        assert probe.hits == len(model) == pair.reader.live
        assert {i: s - 1 for i, s in enumerate(probe.slots) if s} == model
    for n, slot in model.items():
        assert pair.writer.remove(names[n], slot)
    # Every chain ended at an empty entry, so nothing is left of them.
    assert bytes(pair.memory.view(HEADER_BYTES)[::ENTRY_BYTES]) == bytes(64)
    pair.close()


def test_inserts_stop_at_the_probe_limit_and_go_on_after_a_removal() -> None:
    pair = Pair(1024)
    crowd = [0x10000 * (n + 1) + 1000 for n in range(PROBE_LIMIT + 1)]
    for n, t in enumerate(crowd[:-1]):
        assert pair.writer.insert(t, n)
    assert not pair.writer.insert(crowd[-1], 64)
    assert pair.writer.insert(crowd[7], 70)
    assert pair.writer.live == PROBE_LIMIT
    assert pair.writer.remove(crowd[3], 3)
    assert pair.writer.insert(crowd[-1], 64)
    pair.close()


def test_a_full_table_ends_its_probes() -> None:
    pair = Pair(4)
    for n in range(4):
        assert pair.writer.insert(100 + n, n)
    assert not pair.writer.insert(200, 4)
    assert not pair.writer.remove(200, 4)
    assert pair.reader.probe(keys_of(50), [SHARD], prefix=False).hits == 0
    pair.close()


@pytest.mark.parametrize("how", ["by fd", "by its writer"])
def test_a_poisoned_index_has_nothing(pair: Pair, how: str) -> None:
    """Also for those who remember what it had at its last version."""
    keys = keys_of(3)
    for i, t in enumerate(tags(keys, [SHARD])):
        pair.writer.insert(t, i)
    pair.writer.bump()
    assert pair.reader.probe(keys, [SHARD]).hits == 3
    if how == "by fd":
        poison(pair.fd)
    else:
        pair.writer.poison()
    assert pair.reader.poisoned
    assert pair.reader.version == 2
    hits, slots = pair.reader.probe(keys, [SHARD])
    assert (hits, list(slots)) == (0, [0, 0, 0])


def test_a_torn_entry_is_a_miss(pair: Pair) -> None:
    keys = keys_of(1)
    (t,) = tags(keys, [SHARD])
    pair.writer.insert(t, 5)
    pair.put(HEADER_BYTES + t % 1024 * ENTRY_BYTES + 8, "I", 6)
    assert pair.reader.probe(keys, [SHARD]).hits == 0


def test_an_entry_of_another_epoch_is_a_miss(pair: Pair) -> None:
    keys = keys_of(1)
    (t,) = tags(keys, [SHARD])
    pair.writer.insert(t, 5)
    pair.put(16, "Q", 100)
    assert pair.reader.probe(keys, [SHARD]).hits == 0
    assert IndexReader(pair.memory).probe(keys, [SHARD]).hits == 0


@pytest.mark.parametrize(
    ("offset", "form", "value", "message"),
    [
        (0, "Q", 0, "magic"),
        (8, "I", 2, "format 2"),
        (12, "I", 24, "24-byte"),
        (24, "Q", 0, "capacity 0"),
        (24, "Q", 1000, "capacity 1000"),
        (24, "Q", 2048, "capacity 2048"),
        (24, "Q", 1 << 63, "capacity"),
    ],
)
def test_a_lying_header_is_refused(
    pair: Pair, offset: int, form: str, value: int, message: str
) -> None:
    pair.put(offset, form, value)
    with pytest.raises(ProtocolError, match=message):
        IndexReader(pair.memory)


@pytest.mark.parametrize("capacity", [0, 3, 2048, 1 << 32, 1 << 60, 1 << 63, U64])
def test_a_header_that_starts_to_lie_finds_nothing(pair: Pair, capacity: int) -> None:
    keys = keys_of(200)
    for i, t in enumerate(tags(keys, [SHARD])):
        pair.writer.insert(t, i)
    pair.put(24, "Q", capacity)
    hits, slots = pair.reader.probe(keys, [SHARD], prefix=False)
    assert (hits, any(slots)) == (0, False)


@given(st.binary(max_size=600), st.integers(0, 5))
def test_garbage_in_the_table_is_never_followed_outside(garbage: bytes, power: int) -> None:
    pair = Pair(32)
    pair.memory.view(HEADER_BYTES, min(len(garbage), 512))[:] = garbage[:512]
    pair.put(24, "Q", 1 << power)
    pair.reader.probe(keys_of(40), [SHARD, OTHER], prefix=False)
    pair.close()


def test_arguments_are_checked(pair: Pair) -> None:
    with pytest.raises(ValueError, match="keys"):
        pair.reader.probe(bytes(33), [SHARD])
    with pytest.raises(ValueError, match="mixes"):
        pair.reader.probe(bytes(32), [])
    for bad in (0, 1):
        with pytest.raises(ValueError, match="tag"):
            pair.writer.insert(bad, 0)
    for bad in (MAX_SLOT, 1 << 40):
        with pytest.raises(ValueError, match="slot"):
            pair.writer.insert(7, bad)
    for bad in (-1, 1 << 64):
        with pytest.raises(OverflowError):
            pair.writer.insert(bad, 0)
    with pytest.raises(ValueError, match="slots"):
        _host.index_probe(
            pair.memory.address, pair.size, 99, bytes(32), bytes(8), bytearray(8), True
        )
    with pytest.raises(ValueError, match="power of two"):
        index_size(1000)
    with pytest.raises(ValueError, match="writable"):
        IndexWriter(pair.shown, 1)
    assert pair.writer.insert(7, MAX_SLOT - 1)


@given(st.integers(1, 1 << 24))
def test_capacity_leaves_half_of_the_table_empty(entries: int) -> None:
    capacity = capacity_for(entries)
    assert 2 * entries <= capacity < 4 * max(entries, 1)
    assert index_size(capacity) == 4096 + 16 * capacity


READER = """
import os, sys
from kmesh.index import IndexReader
from kmesh.mapping import Mapping
fd, size, keys = int(sys.argv[1]), int(sys.argv[2]), bytes.fromhex(sys.stdin.readline())
reader = IndexReader(Mapping(fd, size))
os.close(fd)
count, hits, misses, rounds = len(keys) // 32, 0, 0, 0
print("ready", flush=True)
while not reader.poisoned:
    for i, slot in enumerate(reader.probe(keys, [1], prefix=False).slots):
        if slot:
            # The writer gives key i only slots that are i modulo the number of keys.
            assert (slot - 1) % count == i, (slot, i)
            hits += 1
        else:
            misses += 1
    rounds += 1
assert reader.probe(keys, [1]).hits == 0
print(hits, misses, rounds)
"""


def test_a_reader_beside_a_churning_writer_never_sees_anothers_slot() -> None:
    capacity, count = 256, 97
    fd = memfd(index_size(capacity))
    memory = Mapping(fd, index_size(capacity), writable=True)
    writer = IndexWriter(memory, 5)
    keys = keys_of(count, seed=3)
    names = tags(keys, [1])
    child = subprocess.Popen(
        [sys.executable, "-c", READER, str(fd), str(index_size(capacity))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        pass_fds=[fd],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    os.close(fd)
    try:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write(keys.hex() + "\n")
        child.stdin.flush()
        assert child.stdout.readline() == "ready\n"
        rng = random.Random(4)
        held: dict[int, int] = {}
        for step in range(300_000):
            i = rng.randrange(count)
            if i in held:
                assert writer.remove(names[i], held.pop(i))
            else:
                held[i] = i + count * (step % 40_000)
                assert writer.insert(names[i], held[i])
        writer.poison()
        out, _ = child.communicate(timeout=60)
    finally:
        child.kill()
        child.wait()
        memory.close()
    assert child.returncode == 0
    hits, misses, rounds = map(int, out.split())
    assert min(hits, misses, rounds) > 100
