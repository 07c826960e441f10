"""Recipes that a real daemon has made, restored into the pages of an engine on a GPU."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest
import torch
from daemon_process import Daemon, wait_for
from household import SMALL, SPAN, Household, Spans

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "connector"))

from fake_gpu_streams import FakeGpu
from mini_engine import OnGpu

from benchmarks.gpu.recovered import Passage
from kmesh.cuda import reading
from kmesh.cuda.device import Device
from kmesh.cuda.slabs import DeviceSlabs
from kmesh.kernels.cuda import Memory
from kmesh.keys import Namespace
from kmesh.layout import Shard
from kmesh.lease import Lease
from kmesh.session import ReserveBatch, Role, Session
from kmesh.store import put_spans, read_span
from kmesh_vllm.config import Settings
from kmesh_vllm.counts import Counts
from kmesh_vllm.gpumover import GpuMover
from kmesh_vllm.identity import Identity
from kmesh_vllm.leases import Held
from kmesh_vllm.loading import Loader
from kmesh_vllm.lookup import Hit
from kmesh_vllm.metadata import LoadPlan
from kmesh_vllm.paged import PagedCache
from kmesh_vllm.requests import RequestState, Restore
from kmesh_vllm.restoring import load_plan
from kmesh_vllm.sharding import Sharding

WAIT = 60.0
BLOCK, BLOCKS = 16, 96
#: Spans of each sibling that become recipes, by their tokens. Of the longer ones, whose recipes
#: spare tiles sooner, the first does too.
RECIPES = {64: 3, 128: 4}


@pytest.fixture(params=[SPAN])
def household(request: pytest.FixtureRequest) -> Household:
    """Of spans of so many tokens, as many in each prompt."""
    times = request.param // SPAN
    return Household(percent=5, span=request.param, shared=208 * times, own=112 * times)


@pytest.fixture
def spand(start_spand: Callable[..., Daemon], household: Household) -> Daemon:
    daemon = start_spand(host_memory="16MiB", span_tokens=household.span)
    daemon.wait_populated()
    return daemon


class Worker:
    """A worker's loader over pages of a household's shape."""

    def __init__(self, session: Session, household: Household, gpu: FakeGpu | None = None) -> None:
        shape = household.shape
        self.household, self.session = household, session
        self.leases: dict[str, Lease] = {}
        self.sharding = Sharding(shape.layers, shape.heads, 1)
        names = Namespace("m", "w", "bfloat16", shape.layers, shape.heads, shape.head_dim)
        identity = Identity(names, self.sharding, BLOCK, BLOCKS)
        size = (BLOCKS, shape.heads, BLOCK, 2 * shape.head_dim)
        self.pages = [torch.zeros(size, dtype=torch.bfloat16) for _ in range(shape.layers)]
        cache = PagedCache(
            {f"layers.{n}": OnGpu(page) for n, page in enumerate(self.pages)},  # type: ignore[misc]
            layers=shape.layers, heads=shape.heads, head_dim=shape.head_dim, element_bytes=2,
            block_tokens=BLOCK, num_blocks=BLOCKS,
        )  # fmt: skip
        self.counts, self.gpu = Counts(), gpu or FakeGpu()
        self.mover = GpuMover(
            self.gpu, cache.layout, lambda: session, self.counts, max_ctas=0, buffer_bytes=0,
            recipes=True,
        )  # fmt: skip
        settings = Settings(socket_dir="-", load_timeout_ms=60_000)
        mine = self.sharding.shard(0)
        common = (self.mover, cache, identity, mine, lambda: session)
        self.loader = Loader(*common, settings, self.counts)
        self.mover.takes_recipes(WAIT)
        for number in range(session.index.slab_count):
            self.mover.attach(session, number, WAIT)

    def start(self, device: str = "", names: Sequence[str] = ()) -> dict[str, list[int]]:
        """Loads of siblings in one step, out of the memory of ``device``; the blocks of each."""
        plans, places, behind = [], {}, 1
        for spans in self.household.siblings:
            if names and spans.name not in names:
                continue
            count = self.household.span * len(spans.payloads) // BLOCK
            places[spans.name] = list(range(behind, behind + count))[::-1]
            behind += count
            lease = self.session.acquire(
                spans.keys, [self.household.shard], recipes=True, device=device
            )
            recipes = sum(map(lease.is_recipe, range(len(spans.payloads))))
            assert recipes == RECIPES[self.household.span]
            self.leases[spans.name] = lease
            plans.append(self.plan(spans, lease, places[spans.name]))
        self.loader.start(plans)
        return places

    def plan(self, spans: Spans, lease: Lease, blocks: list[int]) -> LoadPlan:
        tokens = self.household.span * len(spans.payloads)
        state = RequestState(spans.name, [0] * tokens, self.household.namespace)
        held = Held(Future(), 0.0, lambda _: None)
        restore = Restore(
            self.session, Hit(self.sharding, len(spans.payloads), 0), 0, tokens, held, lease, 0,
            tokens,
        )  # fmt: skip
        return load_plan(state, restore, lease, blocks)

    def ends(self, names: set[str]) -> set[int]:
        ended: set[str] = set()
        bad: set[int] = set()

        def all_of_them() -> bool:
            requests, blocks, _ = self.loader.finished()
            ended.update(requests)
            bad.update(blocks)
            return ended == names

        wait_for(all_of_them, WAIT, "loads never ended")
        return bad

    def wrong(self, spans: Spans, blocks: list[int]) -> set[int]:
        """Spans whose bytes the pages do not hold."""
        shape, span = self.household.shape, self.household.span
        found = set()
        for number, payload in enumerate(spans.payloads):
            state = np.frombuffer(payload, np.uint16)
            state = state.reshape(shape.layers, 2, shape.heads, span, shape.head_dim)
            own = blocks[number * span // BLOCK : (number + 1) * span // BLOCK]
            for layer, page in enumerate(self.pages):
                held = page[own].view(torch.uint16).numpy().swapaxes(0, 1)
                held = held.reshape(shape.heads, span, 2, shape.head_dim)
                if (held.transpose(2, 0, 1, 3) != state[layer]).any():
                    found.add(number)
        return found

    def close(self) -> None:
        self.loader.close()
        self.mover.close()
        del self.session.index
        self.session._slabs.clear()


@pytest.fixture
def worker(spand: Daemon, household: Household) -> Iterator[Worker]:
    with Session.connect(spand.socket_dir, role=Role.TOOL, timeout=30) as session:
        household.settle(session)
        family = session.families
        wanted = 2 * RECIPES[household.span]
        wait_for(lambda: family.describe("round").family.mirrors == wanted, WAIT, "recipes")
        made = Worker(session, household)
        assert made.mover.takes_recipes(0)
        yield made
        made.close()


@pytest.mark.parametrize("household", RECIPES, indirect=True)
def test_a_round_of_siblings_is_one_launch(
    spand: Daemon, household: Household, worker: Worker
) -> None:
    places = worker.start()
    leases = worker.leases.values()
    bases = {key for lease in leases for _, key in lease.bases}
    assert worker.gpu.launches == [("round", Memory.HOST, len(bases), 2)]
    assert worker.ends(set(places)) == set()
    for spans in household.siblings:
        assert worker.wrong(spans, places[spans.name]) == set()
    counted = worker.counts.take()
    assert 0 < counted["restored_bytes_recipes"] < counted["restored_bytes"]
    assert "recipes_decoded" not in counted
    assert spand.status().counters["spans_densified"] == 0
    for lease in leases:
        lease.release()


@pytest.mark.parametrize("tier", ["host", "gpu"])
def test_siblings_that_measurements_and_engines_on_a_gpu_use(
    request: pytest.FixtureRequest, gpu_device: Device, tier: str
) -> None:
    """They become recipes, and come back as they were."""
    shape, gpu = SMALL, None
    if tier == "gpu":
        spand, gpu = request.getfixturevalue("start_encoding")(), gpu_device
    else:
        spand = request.getfixturevalue("spand")
    where = gpu.uuid if gpu else ""
    shard = Shard(0, shape.layers, 0, shape.heads)
    passage = Passage(
        spand.socket_dir, shape.namespace, shard, shape.head_dim, list(range(1000, 1192)),
        shape.rotary, gpu,
    )  # fmt: skip
    rng = np.random.default_rng(1)
    state = rng.integers(0x3F00, 0x3F80, (shape.layers, 2, shape.heads, 192, shape.head_dim))
    payloads = [
        state[:, :, :, at : at + SPAN].astype(np.uint16).tobytes() for at in range(0, 192, SPAN)
    ]
    own = [[n] * SPAN * (1 + n % 2) for n in range(3)]
    with Session.connect(spand.socket_dir, role=Role.TOOL) as session:
        starts = range(0, 192, SPAN)
        lengths = [len(payload) for payload in payloads]
        batch = ReserveBatch(
            shape.namespace, shard, passage.keys, [SPAN] * 3, starts, lengths, device=where
        )
        assert not any(put_spans(session, session.staging(4 << 20), batch, payloads))
        passage.store_siblings(own)
        keys = passage.chain([*own[1], *passage.tokens]).keys
        with DeviceSlabs(session, gpu_device) as slabs:

            def read(lease: Lease, number: int) -> bytes:
                if gpu is None:
                    return read_span(session, lease, number)
                return reading.read_span(slabs, gpu, lease, number)

            # Somebody takes recipes there: before, none are made.
            with session.acquire(keys, [shard], device=where, recipes=True) as lease:
                assert not any(map(lease.is_recipe, range(5)))
                dense = [read(lease, number) for number in range(5)]
            passage.join("passage", own)
            wait_for(lambda: passage.mirrors("passage") == 9, WAIT, "recipes")
            with session.acquire(keys, [shard], device=where, recipes=True) as lease:
                assert [lease.is_recipe(number) for number in range(5)] == [False] * 2 + [True] * 3
                assert [read(lease, number) for number in range(5)] == dense
        session._slabs.clear()


def test_a_bad_base_fails_the_spans_that_refer_to_it(
    spand: Daemon, household: Household, worker: Worker
) -> None:
    (spans, *_) = household.siblings
    lease = worker.session.acquire(spans.keys, [household.shard], recipes=True)
    blocks = list(range(1, 1 + SPAN * len(spans.payloads) // BLOCK))
    plan = worker.plan(spans, lease, blocks)
    base = next(iter(lease.bases.values()))
    spand.flip(base.offset + base.length // 3, base.slab)
    worker.loader.start([plan])
    bad = worker.ends({spans.name})
    wrong = worker.wrong(spans, blocks)
    assert wrong
    assert bad == {block for n in wrong for block in blocks[n * 4 : n * 4 + 4]}
    assert worker.counts.take()["load_failed_corrupt"] == len(wrong)
    # The daemon is told of the mirror, and finds what is wrong with its base.
    worker.session.report_corrupt(lease, sorted(wrong))
    lease.release()
    wait_for(lambda: spand.status().counters["spans_corrupt"] == 1, WAIT, "verified")
    assert spand.status().counters["spans_mirrors_dropped"] >= 1
