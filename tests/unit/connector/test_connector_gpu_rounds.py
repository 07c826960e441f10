"""From plans to pages with the kernels' own code, on a GPU that is the CPU: recipes whose keys are
turned, dense spans, ragged ones, parts of them, and bytes that were changed."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from codec.codec_cases import turned
from cpu_gpu import Gpu as CupyOnCpu
from cpu_gpu import instead_of_cupy
from fake_cuda import UUIDS
from fake_gpu_streams import FakeGpu
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mini_engine import DIM, HEADS, LAYERS, NAMESPACE, WAIT, OnGpu

from kmesh import _host
from kmesh.codec import Base, Encoder, Form, Provenance, Segment, SpanDescription
from kmesh.codec.memory import root_of
from kmesh.cuda.slabs import DeviceSlab
from kmesh.fake_state import create_memfd, reopen_read_only
from kmesh.handles import Handle, HandleKind
from kmesh.kernels.cuda import Restorer
from kmesh.kernels.cuda_fetch import Fetcher
from kmesh.kernels.cuda_rounds import RoundRestorer
from kmesh.kernels.host import PagedLayout
from kmesh.kernels.rotary import Rotary
from kmesh.layout import TILE_BYTES, sums_offset, tiles
from kmesh.mapping import Mapping
from kmesh_vllm.counts import Counts
from kmesh_vllm.gpumover import GpuMover
from kmesh_vllm.identity import Identity
from kmesh_vllm.loadjob import Clerk, LoadJob
from kmesh_vllm.metadata import BASE_RECORD, MIRROR_RECORD, SPAN_RECORD, LoadPlan, packed_ids
from kmesh_vllm.paged import PagedCache
from kmesh_vllm.sharding import Sharding

State = npt.NDArray[np.uint32]
SPAN = 64
BLOCKS = 80
DIGEST = NAMESPACE.digest()
ROTARY = Rotary(tuple(100 ** (-i / 4) for i in range(4)), False, "float32")


class CpuGpu(FakeGpu):
    """Kernels are those of a GPU, compiled for the CPU."""

    def fetcher(self) -> Fetcher:  # type: ignore[override]
        return Fetcher()

    def restorer(self, layout: PagedLayout, settings: Any) -> Restorer:  # type: ignore[override]
        return Restorer(layout, settings=settings)

    def round_restorer(self, layout: PagedLayout, settings: Any) -> RoundRestorer:  # type: ignore[override]
        return RoundRestorer(layout, settings=settings)


@pytest.fixture
def cupy(kernels: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> Iterator[CupyOnCpu]:
    found = CupyOnCpu(kernels)
    with instead_of_cupy(found, monkeypatch):
        yield found
    assert not found.held


class Memory:
    """A slab that a test writes; ``far``: one that only the GPU reads."""

    def __init__(self, number: int, *, far: bool) -> None:
        self._fd = create_memfd("kmesh-slab", 8 << 20)
        self._writable = Mapping(self._fd, 8 << 20, writable=True)
        reader = reopen_read_only(self._fd)
        mapping = Mapping(reader, 8 << 20)
        os.close(reader)
        kind = HandleKind.CUDA_VMM_FD if far else HandleKind.MEMFD
        handle = Handle(kind, -1, mapping.size, UUIDS[0] if far else "")
        self.slab = DeviceSlab(number, handle, mapping.address, None if far else mapping)
        self._kept, self._used = mapping, 0

    def put(self, data: Any) -> tuple[int, int, int, int]:
        """Slab, offset, length and root."""
        raw, offset = np.frombuffer(bytes(data), np.uint8), self._used
        self._used += tiles(raw.size) * TILE_BYTES
        self._writable.view(offset, raw.size)[:] = raw
        base = self._writable.address
        sums = base + sums_offset(self._writable.size) + offset // TILE_BYTES * 8
        root = _host.tile_sums(base + offset, raw.size, sums)
        return self.slab.slab, offset, raw.size, root

    def flip(self, offset: int) -> None:
        self._writable.view(offset, 1)[0] ^= 0x10

    def close(self) -> None:
        self._writable.close()
        os.close(self._fd)


@dataclass
class One:
    """A span of a request: its state, and if it is a recipe, what of it comes from which base.

    Attributes:
        pieces: (base, or -1 for own tokens; first token there; how many).
        cold: the recipe is in the form that is not moved as it lies.
        bad: 0, or 1: its own bytes are changed, where that is seen.
    """

    tokens: int
    pieces: list[tuple[int, int, int]]
    cold: bool = False
    bad: bool = False
    state: State = field(default_factory=lambda: np.zeros(0, np.uint32))

    @property
    def mirror(self) -> bool:
        return any(base >= 0 for base, _, _ in self.pieces)

    def uses(self, begin: int, end: int) -> set[int]:
        """Bases of which it takes something for its tokens [begin, end)."""
        used, at = set(), 0
        for base, _, count in self.pieces:
            if base >= 0 and at < end and at + count > begin:
                used.add(base)
            at += count
        return used


@dataclass
class Wanted:
    """A request: its spans, and which of their tokens it loads."""

    spans: list[One]
    begin: int
    end: int


@dataclass
class Case:
    """Some requests of a step, for one rank; ``bad`` are bases whose bytes are changed, ``far`` is
    the share of bases and spans that lie in the GPU's memory."""

    seed: int
    block: int
    stored: int
    read: int
    rank: int
    bases: list[int]
    requests: list[Wanted]
    bad: set[int]
    far: float = 0.0


@st.composite
def cases(draw: st.DrawFn) -> Case:
    block = draw(st.sampled_from([16, 32]))
    bases = draw(st.lists(st.sampled_from([64, 48, 17]), min_size=1, max_size=3))
    requests = []
    for _ in range(draw(st.integers(1, 3))):
        count = draw(st.integers(1, 3))
        spans = []
        for number in range(count):
            tokens = SPAN if number < count - 1 else draw(st.sampled_from([64, 48, 32]))
            pieces, at = [], 0
            kinds = st.sampled_from([-1, -1, *range(len(bases))])
            while at < tokens:
                base = draw(kinds)
                first = draw(st.integers(0, bases[base] - 1)) if base >= 0 else 0
                room = min(tokens - at, bases[base] - first if base >= 0 else tokens)
                pieces.append((base, first, draw(st.integers(1, room))))
                at += pieces[-1][2]
            if draw(st.integers(0, 3)) == 0:
                pieces = [(-1, 0, tokens)]
            rare = st.integers(0, 7)
            spans.append(One(tokens, pieces, draw(rare) == 0, draw(rare) == 0))
        length = sum(one.tokens for one in spans) // block * block
        begin = draw(st.integers(0, length // block - 1)) * block if length else 0
        requests.append(Wanted(spans, begin, length))
    read = draw(st.sampled_from([1, 2]))
    return Case(
        draw(st.integers(0, 99)), block, draw(st.sampled_from([1, 2])), read,
        draw(st.integers(0, read - 1)), bases, requests,
        {n for n in range(len(bases)) if draw(st.integers(0, 7)) == 0},
        draw(st.sampled_from([0.0, 0.5, 1.0])),
    )  # fmt: skip


class Bench:
    """A case in memory, its plans, and pages."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.memory = [Memory(0, far=False), Memory(1, far=True)]
        self.stored = Sharding(LAYERS, HEADS, case.stored)
        self.identity = Identity(NAMESPACE, Sharding(LAYERS, HEADS, case.read), case.block, BLOCKS)
        self.mine = self.identity.sharding.shard(case.rank)
        self._rng = np.random.default_rng(case.seed)
        self._where = np.random.default_rng(case.seed + 1)
        self.states = [self._drawn(tokens) for tokens in case.bases]
        self.places: list[list[tuple[int, int, int, int]]] = [
            [self._put(self._part(state, part)) for part in range(self.stored.parts)]
            for state in self.states
        ]
        self.blocks: list[list[int]] = []
        self.plans = [self._plan(n, wanted) for n, wanted in enumerate(case.requests)]
        for base in case.bad:
            for slab, offset, _, _ in self.places[base]:
                self.memory[slab].flip(offset + 5)
        shape = (BLOCKS, self.mine.heads, case.block, 2 * DIM)
        self.pages = [torch.zeros(shape) for _ in range(LAYERS)]
        cache = PagedCache(
            {f"layers.{n}": OnGpu(page) for n, page in enumerate(self.pages)},  # type: ignore[misc]
            layers=LAYERS, heads=self.mine.heads, head_dim=DIM, element_bytes=4,
            block_tokens=case.block, num_blocks=BLOCKS,
        )  # fmt: skip
        self.counts = Counts()
        self.gpu = CpuGpu()
        self.mover = GpuMover(
            self.gpu, cache.layout, lambda: None, self.counts, max_ctas=0, buffer_bytes=0,
            recipes=True,
        )  # fmt: skip
        assert self.mover.takes_recipes(WAIT)
        self.clerk = Clerk(self.mover, cache, self.identity, self.mine, self.counts)

    def _put(self, data: Any) -> tuple[int, int, int, int]:
        return self.memory[self._where.random() < self.case.far].put(data)

    def _drawn(self, tokens: int) -> State:
        values = self._rng.standard_normal((LAYERS, 2, HEADS, tokens, DIM)).astype(np.float32)
        return values.view(np.uint32)

    def _part(self, state: State, part: int) -> bytes:
        shard = self.stored.shards[part]
        return state[:, :, shard.head_begin : shard.head_end].tobytes()

    def _describe(self, key: bytes, part: int, tokens: int, position: int) -> SpanDescription:
        shard, padded = self.stored.shards[part], key.ljust(32, b"\0")
        return SpanDescription(padded, DIGEST, "float32", shard, DIM, tokens, position, 3)

    def _plan(self, number: int, wanted: Wanted) -> LoadPlan:
        spans, mirrors, bases = [], [], []
        for at, one in enumerate(wanted.spans):
            position = 1000 * (number + 1) + at * SPAN
            one.state = self._state(one, position)
            if at * SPAN >= wanted.end or at * SPAN + one.tokens <= wanted.begin:
                continue
            for part in range(self.stored.parts):
                payload = self._part(one.state, part)
                key = b"request %d span %d" % (number, at)
                file = self._recipe(one, key, part, position) if one.mirror else payload
                slab, offset, length, root = self._put(file)
                if one.bad:
                    self.memory[slab].flip(offset + length - 1 if length > 400 else offset)
                if one.mirror:
                    mirrors.append((len(spans), len(payload), root_of(payload)))
                spans.append((slab, part, offset, length, root, one.tokens, len(spans), at * SPAN))
        for n, tokens in enumerate(self.case.bases):
            for part, (slab, offset, length, root) in enumerate(self.places[n]):
                key = np.frombuffer((b"base %d" % n).ljust(32, b"\0"), np.uint8)
                bases.append((key, part, slab, offset, length, root, 3, tokens, 100 * n))
        size = self.case.block
        first = 1 + sum(map(len, self.blocks))
        count = (wanted.end - wanted.begin) // size
        self.blocks.append(list(range(first, first + count))[::-1])
        return LoadPlan(
            str(number), 1, self.case.stored, np.array(spans, SPAN_RECORD).tobytes(),
            wanted.begin, wanted.end, packed_ids(self.blocks[-1]),
            np.array(mirrors, MIRROR_RECORD).tobytes(),
            np.array(bases, BASE_RECORD).tobytes() if mirrors else b"", DIGEST,
        )  # fmt: skip

    def _state(self, one: One, position: int) -> State:
        state, at = self._drawn(one.tokens), 0
        for base, first, count in one.pieces:
            if base >= 0:
                taken = self.states[base][:, :, :, first : first + count]
                delta = position + at - 100 * base - first
                state[:, 1, :, at : at + count] = taken[:, 1]
                state[:, 0, :, at : at + count] = turned(taken[:, 0], ROTARY, delta)
            at += count
        return state

    def _recipe(self, one: One, key: bytes, part: int, position: int) -> bytes:
        segments = [
            Segment(self._describe(b"base %d" % n, part, tokens, 100 * n), self._part(state, part))
            for n, (tokens, state) in enumerate(zip(self.case.bases, self.states, strict=True))
        ]
        provenance, at = [], 0
        for base, first, count in one.pieces:
            if base >= 0:
                delta = position + at - 100 * base - first
                name = segments[base].description.key
                provenance.append(Provenance(at, count, name, first, delta))
            at += count
        form = Form.COLD if one.cold else Form.ADDRESSABLE
        encoder = Encoder(Base(segments), ROTARY, form=form)
        what = self._describe(key, part, one.tokens, position)
        state = np.frombuffer(self._part(one.state, part), np.uint8)
        return encoder.encode(what, state, provenance).data

    def slab(self, number: int) -> DeviceSlab:
        return self.memory[number].slab

    def run(self) -> list[set[int]]:
        """Bad blocks of each request."""
        jobs = [LoadJob(plan, 1e9) for plan in self.plans]
        decoded = any(o.cold and o.mirror for w in self.case.requests for o in w.spans)
        for job in jobs:
            if not self.clerk.write(job, self.slab):
                assert decoded or job.far
                assert self.clerk.write(job, self.slab, decodes=True)
        moving = self.mover.restore([job.piece for job in jobs if job.piece])
        for job, status in zip(jobs, moving.statuses(), strict=True):
            self.clerk.judge(job, status)
            job.close()
        return [self.clerk.bad_blocks(job) for job in jobs]

    def bad(self, wanted: Wanted, blocks: list[int]) -> set[int]:
        """Blocks with tokens of spans that are bad themselves, or whose bases are, as they are
        wanted."""
        found = set()
        for at, one in enumerate(wanted.spans):
            begin, end = max(wanted.begin, at * SPAN), min(wanted.end, at * SPAN + one.tokens)
            if begin >= end:
                continue
            bases = one.uses(begin - at * SPAN, end - at * SPAN)
            # Decoding looks at all that a recipe names.
            if one.cold:
                bases = one.uses(0, one.tokens)
            if one.bad or bases & self.case.bad:
                size = self.case.block
                found |= {(p - wanted.begin) // size for p in range(begin, end)}
        return {blocks[n] for n in found}

    def wrong(self, wanted: Wanted, blocks: list[int]) -> set[int]:
        """Blocks whose bytes are not those of the spans."""
        state = np.concatenate([one.state for one in wanted.spans], axis=3)
        state = state[:, :, self.mine.head_begin : self.mine.head_end, wanted.begin : wanted.end]
        found, size = set(), self.case.block
        for n, block in enumerate(blocks):
            for layer in range(LAYERS):
                page = self.pages[layer][block].numpy().view(np.uint32)
                own = state[layer, :, :, n * size : (n + 1) * size]
                if (page[..., :DIM] != own[0]).any() or (page[..., DIM:] != own[1]).any():
                    found.add(block)
        return found

    def close(self) -> None:
        self.mover.close()
        for memory in self.memory:
            memory.close()


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(case=cases())
def test_pages_hold_the_spans_and_bad_blocks_are_exactly_those(cupy: CupyOnCpu, case: Case) -> None:
    bench = Bench(case)
    try:
        bad = bench.run()
        for wanted, blocks, named in zip(case.requests, bench.blocks, bad, strict=True):
            # Of bytes that nobody wants nobody hears; what is not named is right.
            assert named <= bench.bad(wanted, blocks)
            assert bench.wrong(wanted, blocks) <= named
        if not case.bad and not any(one.bad for w in case.requests for one in w.spans):
            assert not any(bad)
        untouched = set(range(BLOCKS)) - {block for blocks in bench.blocks for block in blocks}
        for page in bench.pages:
            assert not page[sorted(untouched)].any()
    finally:
        bench.close()
    assert not bench.gpu.driver._registered


def sibling(**more: Any) -> Wanted:
    return Wanted([One(SPAN, [(-1, 0, 8), (0, 4, 56)], **more) for _ in range(2)], 0, 128)


@pytest.mark.parametrize("far", [0.0, 1.0])
@pytest.mark.parametrize("where", ["base", "recipe", "dense", "cold"])
def test_all_blocks_of_what_is_bad_are_named(cupy: CupyOnCpu, where: str, far: float) -> None:
    """Eight siblings over a base, one of which has a dense span too: one launch."""
    requests = [sibling() for _ in range(8)]
    requests[3].spans[1] = One(SPAN, [(-1, 0, SPAN)], bad=where == "dense")
    if where == "cold":
        requests[2].spans[0].cold = True
    requests[2].spans[0].bad = where in ("recipe", "cold")
    case = Case(5, 16, 1, 1, 0, [64, 64], requests, {0} if where == "base" else set(), far)
    bench = Bench(case)
    try:
        before = len(cupy.launched)
        bad = bench.run()
        launched = [name for name, _, _ in cupy.launched[before:] if "upload" not in name]
        # Of each request the tables are brought here first.
        assert launched == ["kmesh_round_fetch"] * 8 * bool(far) + ["kmesh_round_16"]
        for number, (wanted, blocks) in enumerate(zip(requests, bench.blocks, strict=True)):
            spans = {
                "base": [0, 1] if number != 3 else [0],
                "recipe": [0] if number == 2 else [],
                "cold": [0] if number == 2 else [],
                "dense": [1] if number == 3 else [],
            }[where]
            assert bad[number] == {blocks[4 * span + n] for span in spans for n in range(4)}
            assert bench.wrong(wanted, blocks) <= bad[number]
        counted = bench.counts.take()
        assert counted["load_failed_corrupt"] == sum(map(len, bad)) // 4
        assert counted.get("recipes_decoded", 0) == (where == "cold")
    finally:
        bench.close()


def read_bytes(case: Case) -> int:
    """That the launch of a case reads."""
    bench = Bench(case)
    try:
        jobs = [LoadJob(plan, 1e9) for plan in bench.plans]
        assert all(bench.clerk.write(job, bench.slab, decodes=True) for job in jobs)
        moving = bench.mover.restore([job.piece for job in jobs if job.piece])
        assert moving._round is not None
        found = moving._round.read_bytes
        assert not any(map(any, moving.statuses()))
        return found
    finally:
        bench.close()


@pytest.mark.parametrize("far", [0.0, 1.0])
def test_a_round_reads_each_base_once(cupy: CupyOnCpu, far: float) -> None:
    """Whoever of how many requests refers to it."""
    read = [
        read_bytes(Case(1, 16, 1, 1, 0, [64], [sibling() for _ in range(n)], set(), far))
        for n in (1, 6)
    ]
    base = LAYERS * 2 * HEADS * SPAN * DIM * 4
    own = read[0] - base
    assert own > 0
    assert read[1] == base + 6 * own
