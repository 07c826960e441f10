"""What a tensor-parallel rank reads of spans that another number of ranks stored: whole tiles."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import one_thread
import pytest
from cpu_gpu import Gpu, instead_of_cupy
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import Case, cases
from paged_reference import Engine, Stored, summed

from kmesh.kernels import host, plan
from kmesh.kernels.chooser import Rates, Route
from kmesh.kernels.cuda import Memory, Restorer, Settings, Storer
from kmesh.kernels.host import SpanPart, part_reads
from kmesh.kernels.plan import Load, Request
from kmesh.layout import TILE_BYTES
from kmesh_vllm.sharding import Sharding, overlaps

#: Bytes of a token of one head: 128 elements of bf16.
ROW = 256
LAYERS, SLOTS = 2, 16


def touched(part: SpanPart, row: int) -> int:
    """Bytes of the tiles that a part's rows lie in, row by row."""
    tiles = set()
    for plane in range(2 * part.src_layer_begin, 2 * (part.src_layer_begin + part.layers)):
        for head in range(part.src_head_begin, part.src_head_begin + part.heads):
            for token in range(part.token_begin, part.token_end):
                at = ((plane * part.src_heads + head) * part.tokens + token) * row
                tiles.update(range(at // TILE_BYTES, (at + row - 1) // TILE_BYTES + 1))
    return sum(min(TILE_BYTES, part.length - tile * TILE_BYTES) for tile in tiles)


@settings(max_examples=200, deadline=None)
@given(case=cases())
def test_what_is_read_is_each_tile_that_holds_a_wanted_row(case: Case) -> None:
    row = case.sizes["row"]
    for load in case.loads:
        parts = [SpanPart(*map(int, record)) for record in load.records]
        assert part_reads(load.records.tobytes(), row).tolist() == [touched(p, row) for p in parts]


@pytest.mark.parametrize(
    "wrong",
    [{"length": 1}, {"token_end": 65}, {"token_begin": 9, "token_end": 8}, {"heads": 5},
     {"src_head_begin": 2**64 - 1}, {"layers": 3}, {"tokens": 2**63}],
)  # fmt: skip
def test_nothing_is_read_of_what_contradicts_itself(wrong: dict[str, int]) -> None:
    part = replace(Stored.make(1, LAYERS, 4, 64, ROW).part(), **wrong)
    assert part_reads(part.pack(), ROW).tolist() == [0]


@pytest.mark.parametrize(
    "none",
    [{"heads": 0, "src_heads": 0, "layers": 2**62, "src_layers": 2**62},
     {"heads": 2**62, "src_heads": 2**62, "layers": 0, "src_layers": 0},
     {"heads": 0, "layers": 0}],
)  # fmt: skip
def test_nothing_is_read_of_no_heads_or_no_layers(none: dict[str, int]) -> None:
    """At once, however many of the others there are."""
    part = Stored.make(1, LAYERS, 4, 64, ROW).part()
    if "src_heads" in none:
        none = {**none, "length": 0}
    assert part_reads(replace(part, **none).pack(), ROW).tolist() == [0]


@pytest.mark.parametrize("some", [{"token_end": 32}, {"src_head_begin": 1, "heads": 3}])
def test_what_lies_near_is_counted_at_once(some: dict[str, int]) -> None:
    """However many layers there are, of which a part of each is wanted."""
    layers = 2**40
    part = Stored.make(1, LAYERS, 4, 64, ROW).part(src_layers=layers, layers=layers, **some)
    part = replace(part, length=2 * layers * 4 * 64 * ROW)
    assert part_reads(part.pack(), ROW).tolist() == [part.length]


@settings(max_examples=200, deadline=None)
@given(
    tokens=st.integers(1, 300), cut=st.tuples(st.integers(0, 299), st.integers(0, 300)),
    heads=st.integers(1, 6), some=st.tuples(st.integers(0, 5), st.integers(1, 6)),
    row=st.sampled_from([64, 256, 1024]),
)  # fmt: skip
def test_runs_that_are_near_and_far(
    tokens: int, cut: tuple[int, int], heads: int, some: tuple[int, int], row: int
) -> None:
    begin, end = min(cut[0], tokens), min(max(cut), tokens)
    first = min(some[0], heads - 1)
    part = SpanPart(
        address=0, sums_address=0, root=0, length=2 * 3 * heads * tokens * row, tokens=tokens,
        token_begin=begin, token_end=end, position=0, src_heads=heads, src_head_begin=first,
        dst_head_begin=0, heads=min(some[1], heads - first), src_layers=3, src_layer_begin=1,
        dst_layer_begin=0, layers=2,
    )  # fmt: skip
    assert part_reads(part.pack(), row).tolist() == [touched(part, row)]


def ranks(
    heads: int, stored: int, read: int, tokens: int
) -> Iterator[tuple[list[Stored], list[SpanPart]]]:
    """Spans of one stretch of tokens as ``stored`` ranks have them, and what each reader wants."""
    whole = Stored.make(7, LAYERS, heads, tokens, ROW)
    cut = Sharding(LAYERS, heads, stored)
    spans = []
    for shard in cut.shards:
        mine = np.ascontiguousarray(whole.array[:, :, shard.head_begin : shard.head_end])
        root, sums = summed(mine.reshape(-1))
        spans.append(Stored(mine, sums, root))
    wanting = Sharding(LAYERS, heads, read)
    for rank in range(read):
        found = overlaps(cut, wanting.shard(rank))
        yield spans, [
            spans[one.part].part(
                src_head_begin=one.src_head_begin, dst_head_begin=one.dst_head_begin,
                heads=one.heads,
            )
            for one in found
        ]  # fmt: skip


#: KV heads, ranks that read, tokens of a span that one rank has stored: bytes that a rank reads
#: over bytes that it wants.
FACTORS = {
    (4, 2, 64): 2, (4, 4, 64): 4,
    (8, 2, 64): 1, (8, 4, 64): 2,
    (16, 2, 64): 1, (16, 4, 64): 1,
    (4, 2, 128): 1, (4, 4, 128): 2, (4, 4, 256): 1,
    (8, 4, 128): 1,
    # Tails: several planes share a tile.
    (4, 2, 16): 2, (4, 4, 16): 4, (8, 2, 16): 2, (8, 4, 16): 4, (16, 2, 16): 2, (16, 4, 16): 4,
    (8, 2, 32): 2, (16, 2, 32): 1, (16, 4, 32): 2,
}  # fmt: skip


@pytest.mark.parametrize(("heads", "read", "tokens"), FACTORS)
def test_how_much_more_than_its_heads_a_rank_reads(heads: int, read: int, tokens: int) -> None:
    """By the planner's own count too; each rank of a size alike."""
    for spans, parts in ranks(heads, 1, read, tokens):
        (part,) = parts
        wanted = spans[0].array.nbytes // read
        reads = part_reads(part.pack(), ROW)[0]
        assert reads == touched(part, ROW) == wanted * FACTORS[heads, read, tokens]
        engine = Engine.make("HND", LAYERS, tokens // SLOTS, heads // read, SLOTS, ROW, 0)
        pages = np.arange(tokens // SLOTS, dtype=np.int64)
        job = plan.write(engine.layout, [Load.of([part], [Request(pages)])])
        assert job.read_bytes == reads


@pytest.mark.parametrize("tokens", [16, 48, 64, 128])
@pytest.mark.parametrize("heads", [4, 8, 16])
@pytest.mark.parametrize(("stored", "read"), [(1, 2), (2, 1), (1, 4), (4, 1), (4, 2), (2, 4)])
def test_every_rank_gets_its_heads_bit_by_bit(
    kernels: ctypes.CDLL, heads: int, stored: int, read: int, tokens: int
) -> None:
    """On the host and by the GPU's kernel, from spans of any number of ranks."""
    whole = Stored.make(7, LAYERS, heads, tokens, ROW).array
    blocks = np.arange(tokens // SLOTS, dtype=np.int64)[::-1].copy()
    each = heads // read
    for rank, (_, parts) in enumerate(ranks(heads, stored, read, tokens)):
        mine = whole[:, :, rank * each : (rank + 1) * each]
        for how in ("host", "kernel"):
            engine = Engine.make("NHD", LAYERS, len(blocks), each, SLOTS, ROW, 0)
            if how == "host":
                assert not any(host.scatter(engine.layout, parts, blocks.tolist()))
            else:
                done = one_thread.restore(
                    kernels, engine.layout, [Load.of(parts, [Request(blocks)])]
                )
                assert done == [[bytes(len(parts))]]
            for layer in range(LAYERS):
                for plane in (0, 1):
                    got = engine.views[layer][plane][blocks]
                    got = got.transpose(1, 0, 2, 3).reshape(each, tokens, ROW)
                    assert (got == mine[layer, plane]).all()


@pytest.mark.parametrize("how", ["host", "kernel"])
@pytest.mark.parametrize("rank", [0, 1])
def test_what_the_other_rank_wants_is_not_touched(
    kernels: ctypes.CDLL, how: str, rank: int
) -> None:
    """Eight heads: every other tile can't be read at all, and its sum is not missed."""
    span = Stored.make(3, LAYERS, 8, 64, ROW)
    size = span.array.nbytes
    with mmap.mmap(-1, size) as memory:
        memory.write(span.array.tobytes())
        base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        part = span.part(address=base, src_head_begin=4 * rank, heads=4)
        engine = Engine.make("HND", LAYERS, 4, 4, SLOTS, ROW, 0)
        child = os.fork()
        if not child:
            _restore_without(kernels, how, base, size, 1 - rank, part, engine)
        _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


def _restore_without(
    kernels: ctypes.CDLL, how: str, base: int, size: int, first: int, part: SpanPart, engine: Engine
) -> None:
    """In a process of its own, which whoever reads what it must not ends."""
    protect = ctypes.CDLL(None).mprotect
    failed = 0
    for at in range(base + first * TILE_BYTES, base + size, 2 * TILE_BYTES):
        failed |= protect(ctypes.c_void_p(at), ctypes.c_size_t(TILE_BYTES), 0)
    if how == "host":
        failed |= any(host.scatter(engine.layout, [part], range(4)))
    else:
        load = Load.of([part], [Request(np.arange(4, dtype=np.int64))])
        failed |= one_thread.restore(kernels, engine.layout, [load]) != [[b"\0"]]
    os._exit(bool(failed))


#: A GPU on which copies are a little faster than the kernel, for any number of bytes.
NEARLY_EQUAL = Rates(
    kernel=50e9, kernel_block=50e9, copy=55e9, write=3e12, write_block=3e12, kernel_start=1e-9,
    copy_start=1e-9, copy_chunk=1 << 16,
)  # fmt: skip


@pytest.mark.parametrize(
    ("heads", "read", "route", "factor"),
    [
        (8, 1, Route.COPY, 1),
        (8, 2, Route.KERNEL, 1),
        (4, 2, Route.COPY, 2),
        (8, 4, Route.KERNEL, 2),
    ],
)
def test_copies_bring_whole_spans_so_the_kernel_reads_halves(
    kernels: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, heads: int, read: int, route: Route,
    factor: int,
) -> None:  # fmt: skip
    with instead_of_cupy(gpu := Gpu(kernels), monkeypatch):
        for spans, parts in ranks(heads, 1, read, 64):
            size = spans[0].array.nbytes
            engine = Engine.make("HND", LAYERS, 4, heads // read, SLOTS, ROW, 0)
            load = Load.of(parts, [Request(np.arange(4, dtype=np.int64))])
            restorer = Restorer(
                engine.layout, settings=Settings(chunk_bytes=1 << 20), rates=NEARLY_EQUAL
            )
            gpu.copied.clear()
            pending = restorer.restore([load], 0, memory=Memory.HOST)
            assert not any(pending.wait()[0][0])
            assert pending.route is route
            assert pending.read_bytes == size // read * factor
            assert sum(gpu.copied) == (size if route is Route.COPY else 0)
            # By copies, if one insists, it is all of it.
            pending = restorer.restore([load], 0, memory=Memory.HOST, route=Route.COPY)
            assert not any(pending.wait()[0][0])
            assert pending.read_bytes == size
            restorer.close()


def test_no_launch_has_more_blocks_than_it_may(
    kernels: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor those that bring jobs."""
    with instead_of_cupy(gpu := Gpu(kernels), monkeypatch):
        (_, parts), *_ = ranks(8, 1, 1, 64)
        engine = Engine.make("HND", LAYERS, 4, 8, SLOTS, ROW, 0)
        request = Request(np.arange(4, dtype=np.int64))
        for most in (1, None):
            limits = Settings(chunk_bytes=1 << 20, max_ctas=most)
            restorer = Restorer(engine.layout, settings=limits)
            for route in (Route.KERNEL, Route.COPY):
                load = Load.of(parts, [request])
                assert restorer.restore([load], 0, memory=Memory.HOST, route=route).wait()
            restorer.close()
            storer = Storer(engine.layout, settings=limits)
            assert storer.store(Load.of(parts, []).records, request, 0, memory=Memory.HOST).wait()
            storer.close()
            blocks = {name: count for name, count, _ in gpu.launched}
            assert len(blocks) == 5
            assert (max(blocks.values()) == 1) == (most == 1)
            gpu.launched.clear()
