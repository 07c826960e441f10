"""The native part of KMesh for host memory (C, ``_host.c``); bulk calls release the GIL.

Addresses are integers; their owner must keep the memory alive during the call. Everything
else is checked: a wrong size, range or block id is a ValueError or a status, never an access
outside the memory that was named.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Buffer

#: ``kmesh.kernels.plan.RECORD``s. A view of such an array would cost more than most calls.
Parts = Buffer | NDArray[np.void]

TILE_BYTES: int

def address(buffer: Buffer, /) -> int:
    """Address of a contiguous buffer's first byte (read-only buffers too)."""

def tile_sums(src: int, length: int, sums: int, /) -> int:
    """Writes the sums of ceil(length / TILE_BYTES) tiles at ``sums``; returns their fold (root)."""

def copy_with_sums(dst: int, src: int, length: int, sums: int, /) -> int:
    """memcpy and ``tile_sums`` of what was *written to dst*, in one pass; returns the root.

    Each byte of src is read once: a source that changes meanwhile cannot make the sums wrong.
    """

def fold(sums: int, tiles: int, /) -> int:
    """The root of stored tile sums."""

def verify(src: int, length: int, sums: int, root: int, /) -> bool:
    """Whether the tile sums at ``sums`` fold to ``root`` and the payload has those sums."""

def scatter(layout: Buffer, spans: Buffer, blocks: Buffer, status: Buffer, /) -> int:
    """Restores spans into paged KV, verifying each tile that is read.

    layout: a packed ``kmesh.kernels.host.PagedLayout``. spans: packed ``SpanPart`` records.
    blocks: int64 block ids of the request. status: one byte for each record, written:
    0 done, 1 sums do not fold to the root, 2 a tile's sum differs, 3 a block id is out of range,
    4 the record contradicts itself or the layout. Statuses 3 and 4 have written nothing, 1
    neither, 2 may have written part.
    Returns the number of records whose status is not 0.

    Raises:
        ValueError: a buffer has the wrong length, or the layout a zero or a size too large.
    """

def gather(layout: Buffer, spans: Buffer, blocks: Buffer, status: Buffer, /) -> int:
    """Copies paged KV into payloads (the inverse of scatter, no sums)."""

def check(layout: Buffer, spans: Buffer, blocks: Buffer, status: Buffer, /) -> int:
    """What ``scatter`` would refuse before it reads or writes anything: statuses 0, 3 and 4."""

def part_reads(spans: Buffer, row_bytes: int, reads: Buffer, /) -> None:
    """Bytes of payloads that a restore of each part reads: the tiles that hold what it wants.

    spans: packed ``SpanPart`` records. row_bytes: as in the layout. reads: a u64 for each record,
    written; 0 for one that contradicts itself.

    Raises:
        ValueError: a buffer has the wrong length.
    """

def round(
    layout: Buffer,
    wanted: Buffer,
    members: Buffer,
    bases: Buffer,
    options: Buffer,
    memory: Buffer,
    status: Buffer,
    /,
) -> tuple[int, int, int, int, int, int, int, int, int, int, bytes, bytes]:
    """Writes a job that restores a round into ``memory`` (aligned to 16); see kmesh.kernels.rounds.

    wanted: as of ``job``, turns not looked at. members, bases: MEMBER and BASE records. options:
    most shared memory, most stages, blocks, of these for what has order 0 (0: all move all), as
    u32. status: of each member, before anything is read; written.

    Returns:
        (size, bytes to upload, bytes of a vector, parts, items, tiles, bytes that are read, bytes
        of shared memory, blocks, whether keys are turned, pairs of u32: an owner and a part of
        which it takes bytes; owners are members, and behind them bases, order of each part as
        u64, which ascend). When size is more than the memory's, the job was not written.

    Raises:
        ValueError: a buffer has the wrong length, or sizes, alignments or recipes are not served.
        MemoryError: there is none for planning.
    """

def round_reads(members: Buffer, bases: Buffer, gap: int, /) -> tuple[bytes, bytes]:
    """What has order 0 in a round, each once, in the order of addresses.

    Where one begins on the tile behind another, the other reaches to it.

    Returns:
        (address, bytes and anything, as u64; for each base and, behind them, each member the number
        of its bytes as u32, 2**32 - 1 if they are elsewhere).

    Raises:
        ValueError: a buffer has the wrong length or alignment.
    """

def job(
    layout: Buffer,
    spans: Buffer,
    groups: Buffer,
    wanted: Buffer,
    turns: Buffer,
    options: Buffer,
    memory: Buffer,
    status: Buffer,
    /,
) -> tuple[int, int, int, int, int, int, int, int, int, int]:
    """Writes a job of the GPU's kernels into ``memory`` (aligned to 16); see kmesh.kernels.plan.

    groups: (parts, requests) as u32 each; spans and wanted are those of all groups in order.
    wanted: (address of int64 page ids, their number, shift: i64, by slot: u32, turns: u32) for each
    request. turns: cosines and sines as float32. options: most shared memory, most stages,
    the same two for units, units in a burst, rotary dim, interleaved, element as u32. status: as
    ``check`` for each group's requests, one after the other, written.

    Returns:
        (size, bytes to upload, bytes of a vector, parts, items, tiles, bytes of tiles that are
        read, bytes of shared memory, units, bytes of shared memory for them). When size is more
        than the memory's, the job was not written.

    Raises:
        ValueError: a buffer has the wrong length, or a size or alignment is not served.
    """

def index_probe(
    index: int, size: int, epoch: int, keys: Buffer, mixes: Buffer, slots: Buffer, prefix: bool, /
) -> int:
    """Looks up keys (32 bytes each) x shard mixes (u64 each) in an index; see kmesh.index.

    Writes slot + 1, or 0 for a miss, as u32 for each pair. With ``prefix``, stops at the first
    key of which a shard is missing and returns the number of leading keys found; without, the
    number of keys of which all shards were found. A poisoned index, one of another epoch and one
    whose header claims more than ``size`` bytes have nothing.

    Raises:
        ValueError: a buffer has the wrong length.
    """

def index_insert(index: int, size: int, tag: int, slot: int, /) -> bool:
    """Writer only. Points ``tag`` at ``slot``, also where it pointed elsewhere.

    False when no place was found within the probe limit.
    """

def index_remove(index: int, size: int, tag: int, slot: int, /) -> bool:
    """Writer only. False when no entry points from ``tag`` to ``slot``."""

def rows_find(
    index: Buffer,
    words: tuple[Buffer, Buffer, Buffer, Buffer],
    scopes: Buffer,
    keys: Buffer,
    fold: int,
    scope: int,
    limit: int,
    rows: Buffer,
    /,
) -> int:
    """Looks up keys (32 bytes each) in a table's hash; see ``kmesh_spand.core.batch``.

    Writes the row of each, or 0, as u32 to ``rows`` and returns how many were found.

    Raises:
        ValueError: items of a wrong size or number, or the index names a row without columns.
    """

def rows_gather(column: Buffer, rows: Buffer, out: Buffer, factor: int, /) -> None:
    """Writes ``column[row] * factor`` for each row, cut to the item size of ``out``."""

def rows_pin(pins: Buffer, rows: Buffer, fresh: Buffer, /) -> int:
    """Adds one to each row's u32; returns how many of ``fresh`` are now rows that had 0."""

def rows_unpin(pins: Buffer, rows: Buffer, used: Buffer, tick: int, idle: Buffer, /) -> int:
    """Takes one from each row's u32, the last row first; rows that reach 0 get ``tick``.

    Returns how many of ``idle`` are now such rows.
    """

def rows_link(after: Buffer, before: Buffer, head: int, rows: Buffer, /) -> None:
    """Appends rows to a doubly linked list (u32 columns)."""

def rows_unlink(after: Buffer, before: Buffer, rows: Buffer, /) -> None:
    """Takes rows out of their list."""

def pack_field(number: int, column: Buffer, fixed: bool, /) -> bytes:
    """A column of u8 to u64 as a packed field of a protobuf message, with its head.

    ``fixed``: the field is fixed32 or fixed64, as the column's items are; else it has varints.
    """

def unpack_field(data: Buffer, number: int, out: Buffer, fixed: bool, /) -> int:
    """Writes the values of a repeated field of a protobuf message to ``out``; how many there are.

    ``fixed``: as for ``pack_field``.

    Raises:
        ValueError: ``data`` is no message, or ``out`` too short or its items too small.
    """

def recipe_check(recipe: Buffer, length: int = 0, /) -> tuple[str, int] | None:
    """What is wrong with a recipe (``docs/recipe-format.md``): a field, and of which record.

    None: everything that can be said without its segments and without decompressing is right.
    length: bytes of the file, where ``recipe`` is only what is before its literals; these are not
    looked at then. 0: ``recipe`` is all of it.

    Raises:
        ValueError: the buffer is not aligned to 8 bytes.
    """

def recipe_decode(
    recipe: Buffer, literals: Buffer, segments: Buffer, begin: int, end: int, out: Buffer, /
) -> tuple[str, int] | None:
    """Writes runs [begin, end) of a recipe's member to ``out``; sums are not looked at.

    literals: the literal area, as ops see it. segments: address and length, as u64, of each
    segment's dense payload. Returns what is wrong, as ``recipe_check`` does.

    Raises:
        ValueError: a buffer has the wrong length or alignment.
    """

def recipe_tables(
    places: Buffer, memory: Buffer, offsets: Buffer, /
) -> tuple[int, list[tuple[int, str]]]:
    """Copies head and tables of recipes, one behind the other, and checks the copies.

    places: address and length, as u64, of each recipe, any readable memory. memory: for the copies.
    offsets: gets a u64 for each, where its copy begins. Returns the bytes of all copies, and number
    and field of each recipe that is wrong, as ``recipe_check`` says it without looking at literals,
    or "cold" or "xor" of one that is right, but in the cold form or with differences. Where there
    are more bytes than ``memory`` has, nothing is said.

    Raises:
        ValueError: a buffer has the wrong length or alignment.
    """

def turn_rows(
    dst: Buffer, src: Buffer, row_bytes: int, turns: Buffer, interleaved: bool, element: int, /
) -> None:
    """Rows of keys turned, with the bits of ``kmesh.kernels.reference.turn``.

    turns: cosines and sines as float32, side by side. element: see ``kernels.rotary.ELEMENTS``.
    dst and src must not overlap.

    Raises:
        ValueError: a buffer has the wrong length or alignment, or rows are too short for ``turns``.
    """

def rows_equal(a: Buffer, b: Buffer, equal: Buffer, /) -> None:
    """Sets those bytes of ``equal``, one for each row, to 0 whose rows differ."""

def token_hashes(run: Buffer, heads: int, hashes: Buffer, /) -> None:
    """A hash of each token of a run [head, token, row], as u64; no defence against anybody.

    Raises:
        ValueError: a buffer has the wrong length or alignment.
    """

def token_words(ids: Sequence[int], /) -> bytes:
    """Token ids as little-endian u32, one behind the other.

    Raises:
        OverflowError: one does not fit in 32 bits.
        TypeError: one is no integer.
    """

def chain_keys(
    parent: Buffer,
    words: Buffer,
    step: int,
    known_words: Buffer = b"",
    known_keys: Buffer = b"",
    /,
) -> bytes:
    """Keys of 32 bytes: of each run of ``step`` bytes the BLAKE3 of the key before it, for the
    first one ``parent``, and of the run.

    known_words, known_keys: runs behind the same parent, and their keys, which are taken for the
    runs that ``words`` begins with too.

    Raises:
        ValueError: ``parent`` is no key, ``words`` are not whole runs, or there is no run for a
            known key.
    """

def rows_place(
    ground: tuple[Buffer, ...],
    arrivals: tuple[Buffer, ...],
    terms: tuple[int, int, int, int, int],
    held: Buffer,
    /,
) -> None:
    """Places records in the columns of a table; see ``Batch.place`` of ``kmesh_spand.core.batch``.

    Args:
        ground: as ``Ground`` there, the four columns of words first.
        arrivals, terms: as ``Arrivals`` and ``Terms`` there.
        held: a byte for each record that is to be placed; becomes 1 or 0.

    Raises:
        ValueError: items of a wrong size or number, a term that can't be, a record, slot or kind
            outside of the columns (nothing is placed then), or the index names a row without
            columns (what was placed by then, stays).
    """

def leased_spans(
    slab: Buffer,
    offset: Buffer,
    length: Buffer,
    root: Buffer,
    tokens: Buffer,
    count: int,
    shards: int,
    first: int,
    step: int,
    /,
) -> bytes:
    """The first ``count`` entries of a lease's columns, as ``kmesh.kernels.plan.LEASED``.

    Entry i is of part i % shards, and starts at (first + i // shards) * step.

    Raises:
        ValueError: a column is too short, or its items are no integers of 1 to 8 bytes.
    """

def leased_extents(spans: Buffer, heads: Buffer, /) -> bytes:
    """For each slab of spans that give something: its number, and the largest offset, length and
    end of a span in it (2**64 - 1 where that is more), as u64.

    heads: of each part of the sharding (first head there, first head here, heads) as u64.

    Raises:
        ValueError: a buffer has the wrong length, a span begins on no tile, or is of no part.
    """

def leased_parts(
    spans: Buffer,
    heads: Buffer,
    slabs: Buffer,
    begin: int,
    end: int,
    block: int,
    src_heads: int,
    layers: int,
    /,
) -> tuple[bytearray, bytearray, bytearray, int, int]:
    """Parts for the kernels of spans that hold tokens [begin, end) and give something.

    heads: as for ``leased_extents``. slabs: (number, address, address of its sums, whether it is
    GPU memory) as u64, aligned. block: tokens of a page.

    Returns:
        (``kmesh.kernels.plan.RECORD`` of each, whether it is in GPU memory, its entry as u32, the
        position from which theirs count, which begins a page, the one up to which they reach).

    Raises:
        ValueError: a buffer has the wrong length, a span is of no part or slab, or a position is
            2**30 or more.
    """

def chunks(parts: Parts, room: int, smallest: int, /) -> tuple[bytes, bytes, bytes]:
    """Payloads of parts (``kmesh.kernels.plan.RECORD``) in chunks of at most ``room`` bytes, which
    get smaller towards the end, down to ``smallest``.

    Returns:
        As u64: of each part its offset in its chunk, a multiple of 256; (begin, end, bytes of its
        payloads, first copy, end of its copies) of each chunk, half-open; (offset in the chunk,
        address, bytes) of each copy. Neighbours in memory are one copy.

    Raises:
        ValueError: the buffer has the wrong length, or a payload has no room in a chunk.
    """

def payload_bytes(parts: Parts, /) -> tuple[int, int]:
    """Bytes of the payloads of parts (RECORD): of all, and of the largest.

    Raises:
        ValueError: the buffer has the wrong length.
    """

def moved_bytes(parts: Parts, status: Buffer, row_bytes: int, /) -> int:
    """Bytes of pages that those parts (RECORD) have written whose status is 0.

    Raises:
        ValueError: there is not one status for each part.
    """

def nap(nanoseconds: int, /) -> None:
    """Sleeps so long, or until a signal, and hardly longer: without this thread's timer slack.

    Raises:
        ValueError: a second or more.
    """

def load(address: int, bits: int, /) -> int:
    """Atomic load-acquire of an aligned u32 or u64 (``bits`` 32 or 64)."""

def store(address: int, bits: int, value: int, /) -> None:
    """Atomic store-release of an aligned u32 or u64 (``bits`` 32 or 64)."""

class Region(Buffer):
    """A shared mapping of the first ``size`` bytes of ``fd``, which stays the caller's.

    It is a buffer, read-only unless ``writable``. Memory that is still viewed when it is closed
    is unmapped with its last view.

    Raises:
        OSError: mmap refused.
    """

    def __new__(cls, fd: int, size: int, writable: bool, /) -> Region: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...
    @property
    def address(self) -> int:
        """Address of byte 0. ValueError once closed."""
    @property
    def closed(self) -> bool: ...
    def close(self) -> None: ...
