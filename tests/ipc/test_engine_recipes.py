"""Recipes that a real daemon has made, restored into the pages of an engine on a GPU."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
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
BLOCK, BLOCKS = 16, 64


@pytest.fixture
def household() -> Household:
    return Household(percent=5)


@pytest.fixture
def spand(start_spand: Callable[..., Daemon]) -> Daemon:
    daemon = start_spand(host_memory="16MiB")
    daemon.wait_populated()
    return daemon


class Worker:
    """A worker's loader over pages of a household's shape."""

    def __init__(self, session: Session, household: Household) -> None:
        shape = household.shape
        self.household, self.session = household, session
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
        self.counts, self.gpu = Counts(), FakeGpu()
        self.mover = GpuMover(
            self.gpu, cache.layout, lambda: session, self.counts, max_ctas=0, buffer_bytes=0,
            recipes=True,
        )  # fmt: skip
        settings = Settings(socket_dir="-", load_timeout_ms=60_000)
        mine = self.sharding.shard(0)
        common = (self.mover, cache, identity, mine, lambda: session)
        self.loader = Loader(*common, settings, self.counts)
        assert self.mover.takes_recipes(WAIT)
        for number in range(session.index.slab_count):
            self.mover.attach(session, number, WAIT)

    def plan(self, spans: Spans, lease: Lease, blocks: list[int]) -> LoadPlan:
        tokens = SPAN * len(spans.payloads)
        state = RequestState(spans.name, [0] * tokens, self.household.namespace)
        held = Held(Future(), 0.0, lambda held: None)
        restore = Restore(
            self.session,
            Hit(self.sharding, len(spans.payloads), 0),
            0,
            tokens,
            held,
            lease,
            0,
            tokens,
        )
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
        shape = self.household.shape
        found = set()
        for number, payload in enumerate(spans.payloads):
            state = np.frombuffer(payload, np.uint16)
            state = state.reshape(shape.layers, 2, shape.heads, SPAN, shape.head_dim)
            own = blocks[number * SPAN // BLOCK : (number + 1) * SPAN // BLOCK]
            for layer, page in enumerate(self.pages):
                held = page[own].view(torch.uint16).numpy().swapaxes(0, 1)
                held = held.reshape(shape.heads, SPAN, 2, shape.head_dim)
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
        wait_for(lambda: family.describe("round").family.mirrors == 6, WAIT, "recipes")
        made = Worker(session, household)
        yield made
        made.close()


def test_a_round_of_siblings_is_one_launch(
    spand: Daemon, household: Household, worker: Worker
) -> None:
    leases, plans, places = [], [], {}
    for number, spans in enumerate(household.siblings):
        count = SPAN * len(spans.payloads) // BLOCK
        places[spans.name] = list(range(1 + number * count, 1 + (number + 1) * count))[::-1]
        lease = worker.session.acquire(spans.keys, [household.shard], recipes=True)
        assert sum(map(lease.is_recipe, range(len(spans.payloads)))) == 3
        leases.append(lease)
        plans.append(worker.plan(spans, lease, places[spans.name]))
    worker.loader.start(plans)
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


def test_siblings_that_measurements_and_engines_on_a_gpu_use(spand: Daemon) -> None:
    """They become recipes, and come back as they were."""
    shape = SMALL
    shard = Shard(0, shape.layers, 0, shape.heads)
    passage = Passage(
        spand.socket_dir, shape.namespace, shard, shape.head_dim, list(range(1000, 1192)),
        shape.rotary,
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
        batch = ReserveBatch(shape.namespace, shard, passage.keys, [SPAN] * 3, starts, lengths)
        assert not any(put_spans(session, session.staging(4 << 20), batch, payloads))
        passage.store_siblings(own)
        keys = passage.chain([*own[1], *passage.tokens]).keys
        with session.acquire(keys, [shard]) as lease:
            dense = [read_span(session, lease, number) for number in range(5)]
        passage.join("passage", own)
        wait_for(lambda: passage.mirrors("passage") == 9, WAIT, "recipes")
        with session.acquire(keys, [shard], recipes=True) as lease:
            assert [lease.is_recipe(number) for number in range(5)] == [False] * 2 + [True] * 3
            assert [read_span(session, lease, number) for number in range(5)] == dense
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
