"""Recipes that a device worker has made on a GPU, restored into the pages of an engine there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from daemon_process import Daemon, wait_for
from fake_cuda import UUIDS
from gpu_reader import Reader
from gpus import import_slab
from household import SPAN, Household
from test_engine_recipes import BLOCK, WAIT, Worker

from kmesh.cuda.device import Device
from kmesh.cuda.slabs import DeviceSlabs
from kmesh.errors import UnsupportedError
from kmesh.kernels.cuda import Memory
from kmesh.session import Role, Session
from kmesh_vllm import bringing

from fake_gpu_streams import FakeGpu  # isort: skip

GPU = UUIDS[0]
Start = Callable[..., Daemon]


@pytest.fixture
def household() -> Household:
    return Household(percent=5)


@contextmanager
def settled(
    daemon: Daemon, household: Household, device: Device, *more: str, gpu: FakeGpu | None = None
) -> Iterator[Worker]:
    """A worker of an engine on the GPU, when all of a family there is as it is going to be."""
    with (
        Session.connect(daemon.socket_dir, role=Role.TOOL, timeout=30) as session,
        DeviceSlabs(session, device) as slabs,
    ):
        household.settle(session, GPU)
        Reader(daemon, session, slabs, device).settled(6)
        for other in more:
            with Session.connect(daemon.socket_dir, role=Role.TOOL) as second:
                room = second.staging(4 << 20)
                for spans in (household.primer, *household.siblings):
                    household.store(second, room, spans, other)
            wait_for(lambda: session.families.describe("round").family.mirrors == 6, WAIT)
        made = Worker(session, household, gpu)
        try:
            yield made
        finally:
            for lease in made.leases.values():
                lease.release()
            made.close()


def right(worker: Worker, places: dict[str, list[int]]) -> None:
    """All of it ends, and the pages are what was stored."""
    assert worker.ends(set(places)) == set()
    for spans in worker.household.siblings:
        if spans.name in places:
            assert worker.wrong(spans, places[spans.name]) == set()


@pytest.mark.parametrize(("place", "memory"), [("gpu", Memory.GPU), ("host", Memory.HOST)])
def test_a_round_of_siblings_is_one_launch(
    start_encoding: Start, household: Household, gpu_device: Device, place: str, memory: Memory
) -> None:
    """Their tables are brought here by one launch for each, and nothing is made dense."""
    daemon = start_encoding(gpu_place=place)
    with settled(daemon, household, gpu_device) as worker:
        assert worker.mover.recipes == (GPU,)
        places = worker.start(GPU)
        right(worker, places)
        bases = {key for lease in worker.leases.values() for _, key in lease.bases}
        assert worker.gpu.launches == [("round", memory, len(bases), 2)]
        assert worker.gpu.fetched == [3, 3]
        counted = worker.counts.take()
        assert 0 < counted["restored_bytes_recipes"] < counted["restored_bytes"]
        assert "recipes_decoded" not in counted
        assert daemon.status().counters["spans_densified"] == 0


def test_siblings_out_of_either_memory(
    start_encoding: Start, household: Household, gpu_device: Device
) -> None:
    """The family is in host memory, too, and so are what one of them needs and its bases."""
    daemon = start_encoding()
    with settled(daemon, household, gpu_device, "") as worker:
        one, other = (spans.name for spans in household.siblings)
        right(worker, worker.start("", [one]))
        right(worker, worker.start(GPU, [other]))
        memories = [memory for _, memory, _, _ in worker.gpu.launches]
        assert memories == [Memory.HOST, Memory.GPU]
        assert worker.gpu.fetched == [3]


def flip(daemon: Daemon, device: Device, slab: int, offset: int) -> None:
    """A bit of GPU memory."""
    with import_slab(daemon, device, slab, writable=True) as memory:
        (byte,) = memory.read(offset, 1)
        memory.write(bytes([byte ^ 4]), offset)


@pytest.mark.parametrize("at", [30, 260, -1, "base"])
def test_a_byte_is_changed(
    start_encoding: Start, household: Household, gpu_device: Device, at: int | str
) -> None:
    """In a recipe's head, tables and literals, or in what it refers to: its blocks are named."""
    daemon = start_encoding()
    with settled(daemon, household, gpu_device) as worker:
        spans, good = household.siblings
        with worker.session.acquire(
            spans.keys, [household.shard], recipes=True, device=GPU
        ) as lease:
            number = next(n for n in range(len(spans.payloads)) if lease.is_recipe(n))
            if isinstance(at, str):
                base = next(iter(lease.bases.values()))
                flip(daemon, gpu_device, base.slab, base.offset + base.length // 3)
            else:
                place = lease.entry(number)
                flip(daemon, gpu_device, place.slab, place.offset + at % place.length)
        places = worker.start(GPU)
        bad = worker.ends(set(places))
        if isinstance(at, int):
            own = places[spans.name][number * SPAN // BLOCK : (number + 1) * SPAN // BLOCK]
            assert bad == set(own)
            assert worker.wrong(good, places[good.name]) == set()
        found = {
            block
            for one in household.siblings
            for n in worker.wrong(one, places[one.name])
            for block in places[one.name][n * SPAN // BLOCK : (n + 1) * SPAN // BLOCK]
        }
        assert found
        assert found <= bad
        assert worker.counts.take()["load_failed_corrupt"] == len(bad) * BLOCK // SPAN


def test_without_the_kernel_they_are_decoded_until_the_scheduler_knows(
    start_encoding: Start, household: Household, gpu_device: Device
) -> None:
    """Recipes and bases are brought here whole; no more are asked for, and the daemon decodes."""
    daemon, gpu = start_encoding(), FakeGpu()

    def refuse(name: str) -> None:
        if name == "prepare_rounds":
            raise UnsupportedError("no registers")

    gpu.refuse = refuse
    with settled(daemon, household, gpu_device, gpu=gpu) as worker:
        assert worker.mover.recipes == ()
        right(worker, worker.start(GPU))
        assert worker.counts.take()["recipes_decoded"] == 6
        assert gpu.fetched == []


def test_a_gpu_that_hangs_while_it_brings_tables(
    start_encoding: Start,
    household: Household,
    gpu_device: Device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The loads fail, nothing of them is moved, and what is still read stays; later ones go on
    when it does."""
    daemon = start_encoding()
    with settled(daemon, household, gpu_device) as worker:
        monkeypatch.setattr(bringing, "_DEVICE_WAIT", 0.02)
        worker.gpu.held = True
        places = worker.start(GPU)
        assert worker.ends(set(places)) == {block for own in places.values() for block in own}
        assert worker.gpu.launches == []
        # The second one does not even begin.
        assert worker.gpu.fetched == [3]
        assert worker.mover._memory._loads, "memory may go while it is read"
        for spans in household.siblings:
            assert worker.wrong(spans, places[spans.name])
        assert worker.counts.take()["load_failed_error"] == 2
        monkeypatch.undo()
        worker.gpu.held = False
        worker.gpu.run()
        for lease in worker.leases.values():
            lease.release()
        right(worker, worker.start(GPU))
        assert not worker.mover._memory._loads
