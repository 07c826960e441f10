"""Families whose spans lie on a GPU: the device worker makes recipes of them, with the GPU's
kernels (which the CPU runs here), and they are served, made dense, and survive what may happen."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from daemon_process import Daemon, wait_for
from fake_cuda import UUIDS
from gpu_reader import Reader, reader
from gpus import Faults, command, import_slab
from household import LARGE, SMALL, Household
from test_cli import as_json, kmesh

from experiments.tokendance.workload import Shape
from kmesh import errors
from kmesh.cuda.device import Device
from kmesh.cuda.reading import read_span
from kmesh.families import MirrorFate
from kmesh.store import read_span as read_host_span
from kmesh.v1 import admin_pb2, admin_pb2_grpc

Start = Callable[..., Daemon]
GPU = UUIDS[0]
LACKING = """
from kmesh.cuda import nvrtc
nvrtc._candidates = lambda major: ()
"""


@pytest.fixture
def start(start_encoding: Start) -> Start:
    return start_encoding


@pytest.fixture(scope="module")
def household() -> Household:
    return Household()


@pytest.fixture
def dial(gpu_device: Device) -> Iterator[Callable[[Daemon], Reader]]:
    with ExitStack() as stack:
        yield lambda daemon: stack.enter_context(reader(daemon, gpu_device))


@pytest.mark.parametrize(
    ("shape", "recipes", "memory"),
    [(SMALL, 3, {}), (LARGE, 4, {"gpu_memory": "60MiB", "gpu_slab_size": "60MiB"})],
    ids=["small", "28 layers of 4 x 128"],
)
@pytest.mark.parametrize("place", ["gpu", "host"])
def test_members_are_recipes_on_the_gpu_and_read_back_bit_for_bit(
    start: Start,
    dial: Callable[[Daemon], Reader],
    shape: Shape,
    recipes: int,
    memory: dict[str, str],
    place: str,
) -> None:
    daemon = start(gpu_place=place, **memory)
    household = Household(shape)
    both = 2 * recipes
    ours = dial(daemon)
    household.settle(ours.session, GPU)
    for sibling in household.siblings:
        assert ours.read(household, sibling, recipes=False) == 0
    assert daemon.status().mirrors == 0, "nobody takes recipes there"
    ours.settled(both)
    assert daemon.status().counters["fallback_encode"] == 0
    family = ours.session.families.describe("round").family
    assert list(family.devices) == [GPU]
    assert (family.mirrors, family.base_stored) == (0, 0)
    gpu = ours.session.families.describe("round", device=GPU).family
    assert (gpu.base_stored, gpu.mirrors) == (5, both)
    assert gpu.used_bytes < gpu.dense_bytes
    where = {"socket_dir": daemon.socket_dir}
    assert as_json("families", "round", **where)["devices"] == [GPU]
    shown = as_json("families", "round", "--device", GPU, **where)
    assert (shown["mirrors"], shown["base_stored"]) == (both, 5)
    assert {member["mirrors"] for member in shown["of_members"]} == {recipes}
    assert f"also on {GPU}: see --device" in kmesh("families", "round", **where).stdout
    for sibling in household.siblings:
        assert ours.read(household, sibling, recipes=True) == recipes
    assert daemon.status().counters["spans_densified"] == 0
    for sibling in household.siblings:
        assert ours.read(household, sibling, recipes=False) == 0
    status = daemon.status()
    assert (status.mirrors, status.counters["spans_densified"]) == (0, both)


def test_the_same_family_in_host_memory_and_on_the_gpu(
    start: Start, dial: Callable[[Daemon], Reader], household: Household
) -> None:
    daemon = start()
    ours = dial(daemon)
    household.settle(ours.session)
    staging = dial(daemon)
    room = staging.session.staging(4 << 20)
    for spans in (household.primer, *household.siblings):
        household.store(staging.session, room, spans, GPU)
    ours.settled(6)
    wait_for(lambda: ours.session.families.describe("round").family.mirrors == 6)
    assert daemon.status().mirrors == 12
    sibling = household.siblings[0]
    assert ours.read(household, sibling, recipes=True) == 3
    with ours.session.acquire(sibling.keys, [household.shard], recipes=True) as lease:
        for number, payload in enumerate(sibling.payloads):
            assert read_host_span(ours.session, lease, number) == payload
    answer = ours.session.families.dissolve("round", MirrorFate.DENSE)
    assert answer.mirrors == 12
    daemon.wait_status(lambda status: status.mirrors == 0)


def test_without_a_compiler_the_processor_encodes(
    start: Start, dial: Callable[[Daemon], Reader], household: Household
) -> None:
    """Once said, counted for each span, and the same recipes."""
    daemon = start(command=command(LACKING))
    ours = dial(daemon)
    household.settle(ours.session, GPU)
    ours.settled(6)
    assert daemon.status().counters["fallback_encode"] >= 6
    said = [line for line in daemon.log().splitlines() if "encoded by the processor" in line]
    assert len(said) == 1
    assert "libnvrtc.so.13" in said[0]
    for sibling in household.siblings:
        assert ours.read(household, sibling, recipes=True) == 3


@pytest.mark.parametrize("victim", ["gpu0", "control"])
def test_recipes_survive_processes(
    start: Start, dial: Callable[[Daemon], Reader], household: Household, victim: str
) -> None:
    daemon = start(errors=True)
    ours = dial(daemon)
    household.settle(ours.session, GPU)
    ours.settled(6)
    pid = daemon.child(victim)
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: daemon.child(victim) != pid, 30)
    if victim == "control":
        daemon.wait_ready(2)
        daemon.wait_status(lambda s: s.counters.get("spans_verified", 0) >= 15)
        ours = dial(daemon)
    assert daemon.status().counters["spans_mirrors_dropped"] == 0
    for sibling in household.siblings:
        assert ours.read(household, sibling, recipes=True) == 3
        assert ours.read(household, sibling, recipes=False) == 0


def test_encoding_survives_the_device_worker(
    start: Start, dial: Callable[[Daemon], Reader], household: Household
) -> None:
    """Killed with a job that it was told: it is tried once more, and host memory does not wait."""
    daemon = start(errors=True)
    ours = dial(daemon)
    session, staging = ours.session, ours.session.staging(4 << 20)
    for spans in (household.primer, *household.siblings):
        household.store(session, staging, spans, GPU)
        household.store(session, staging, spans)
    session.families.declare(household.family)
    ours.take_recipes()
    worker = daemon.child("gpu0")
    os.kill(worker, signal.SIGSTOP)
    for sibling in household.siblings:
        household.join(session, sibling)
    wait_for(lambda: session.families.describe("round").family.mirrors == 6)
    assert session.families.describe("round", device=GPU).family.mirrors == 0
    os.kill(worker, signal.SIGKILL)
    wait_for(lambda: daemon.child("gpu0") != worker, 30)
    ours.settled(6)
    assert daemon.status().counters["spans_encode_failed"] == 1
    for sibling in household.siblings:
        assert ours.read(household, sibling, recipes=True) == 3


def test_a_driver_that_fails_while_it_encodes(
    start: Start, dial: Callable[[Daemon], Reader], household: Household, gpu_faults: Faults
) -> None:
    """First it loses its context, with which the worker ends; then it only refuses, and spans stay
    dense."""
    daemon = start(errors=True, bugs=True)
    ours = dial(daemon)
    session, staging = ours.session, ours.session.staging(4 << 20)
    for spans in (household.primer, *household.siblings):
        household.store(session, staging, spans, GPU)
    session.families.declare(household.family)
    one, other = household.siblings
    ours.take_recipes()
    worker = daemon.child("gpu0")
    gpu_faults.begin("launch", "719 CUDA_ERROR_LAUNCH_FAILED")
    gpu_faults.begin("memory_info", "719 CUDA_ERROR_LAUNCH_FAILED")
    household.join(session, one)
    wait_for(lambda: daemon.status().gpus[0].restarts >= 1, 60)
    gpu_faults.end("launch")
    gpu_faults.end("memory_info")
    ours.settled(3)
    assert daemon.child("gpu0") != worker
    assert daemon.status().counters["spans_encode_failed"] == 1
    restarts = daemon.status().gpus[0].restarts
    gpu_faults.begin("launch", "700 a bug that a test put here")
    household.join(session, other)
    ours.settled(3)
    gpu_faults.end("launch")
    (found,) = [
        member
        for member in session.families.describe("round", device=GPU).members
        if member.name == other.name
    ]
    assert (found.refusal, found.mirrors) == ("the job failed", 0)
    assert daemon.status().gpus[0].restarts == restarts
    for sibling, mirrors in ((one, 3), (other, 0)):
        assert ours.read(household, sibling, recipes=True) == mirrors


def test_a_bad_base_on_the_gpu_is_never_decoded(
    start: Start, dial: Callable[[Daemon], Reader], household: Household, gpu_device: Device
) -> None:
    daemon = start(errors=True)
    ours = dial(daemon)
    household.settle(ours.session, GPU)
    ours.settled(6)
    sibling = household.siblings[0]
    with ours.session.acquire(sibling.keys, [household.shard], recipes=True, device=GPU) as lease:
        number = next(n for n in range(5) if lease.is_recipe(n))
        for base in lease.bases.values():
            slab = import_slab(daemon, gpu_device, base.slab, writable=True)
            byte = slab.read(base.offset + 5000, 1)[0]
            slab.write(bytes([byte ^ 4]), base.offset + 5000)
            slab.close()
        with pytest.raises(errors.CorruptionError):
            read_span(ours.slabs, gpu_device, lease, number)
        assert ours.session.report_corrupt(lease, [number]) == 1
        wait_for(lambda: daemon.status().counters["spans_mirrors_dropped"] > 0)
    with ours.session.acquire(
        sibling.key(number), [household.shard], recipes=True, device=GPU
    ) as again:
        assert again.hits == 0


def test_a_base_on_the_gpu_goes_when_its_mirrors_are_dense(
    start: Start, dial: Callable[[Daemon], Reader], household: Household
) -> None:
    daemon = start()
    ours = dial(daemon)
    household.settle(ours.session, GPU)
    ours.settled(6)
    with daemon.rpc() as (channel, metadata):
        stub = admin_pb2_grpc.AdminStub(channel)
        request = admin_pb2.EvictRequest(keys=household.primer.keys)
        answer = stub.Evict(request, metadata=metadata, timeout=20)
    assert answer.held > 0
    daemon.wait_status(lambda status: status.mirrors == 0)
    for sibling in household.siblings:
        assert ours.read(household, sibling, recipes=False) == 0
