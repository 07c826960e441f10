"""The kernels on a GPU: the same bytes as the reference, and exactly the bad parts reported."""

from __future__ import annotations

import dataclasses
import mmap
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from gpu_engine import GpuEngine, Payloads
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel_cases import Case, cases, rotary
from paged_reference import Engine, Stored

from kmesh.cuda.device import Device
from kmesh.cuda.memory import Registration
from kmesh.kernels import reference
from kmesh.kernels.calibration import fitted, timed
from kmesh.kernels.chooser import Route
from kmesh.kernels.cuda import H200, Load, Memory, Request, Restorer, Settings, Storer
from kmesh.kernels.device import Device as Launches
from kmesh.kernels.host import Status
from kmesh.layout import TILE_BYTES

pytestmark = pytest.mark.gpu

WAYS = [
    pytest.param(Memory.GPU, None, (), id="gpu"),
    pytest.param(Memory.HOST, Route.KERNEL, (), id="host"),
    pytest.param(Memory.HOST, Route.COPY, (), id="copy"),
    # What a GPU without the bulk copy engine runs.
    pytest.param(Memory.GPU, None, ("-DKM_NO_BULK",), id="gpu-threads"),
    pytest.param(Memory.HOST, Route.KERNEL, ("-DKM_NO_BULK",), id="host-threads"),
]
FEW = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def restored(
    cupy: Any, stream: int, case: Case, engine: Engine, way: tuple[Any, ...], **more: Any
) -> tuple[list[list[bytes]], bytes]:
    memory, route, options = way
    gpu, payloads = GpuEngine(cupy, engine), Payloads(cupy, memory)
    loads = payloads.loads(case.loads, case.spans)
    cupy.cuda.runtime.deviceSynchronize()
    restorer = Restorer(gpu.layout, options=options, **more)
    done = restorer.restore(loads, stream, memory=memory, route=route).wait()
    restorer.close()
    return done, gpu.image()


@pytest.mark.parametrize(("memory", "route", "options"), WAYS)
@FEW
@given(case=cases(), ctas=st.sampled_from([1, 2, 5, None]), stages=st.integers(1, 8))
def test_restores_are_the_reference(
    cupy: Any, stream: int, memory: Memory, route: Any, options: Any, case: Case, ctas: Any,
    stages: int,
) -> None:  # fmt: skip
    how = Settings(
        max_ctas=ctas, host_stages=stages, gpu_stages=min(stages, 4), chunk_bytes=1 << 18
    )
    engine = case.engine()
    done, image = restored(cupy, stream, case, engine, (memory, route, options), settings=how)
    assert reference.restore(engine.layout, case.loads) == done
    assert image == engine.image()


@pytest.mark.parametrize(("memory", "route", "options"), WAYS)
@FEW
@given(
    case=cases(whole=True, rows=[16, 32, 80, 128, 256, 512]), ctas=st.sampled_from([1, 2, 5, None]),
    stages=st.integers(0, 7),
)  # fmt: skip
def test_whole_pages_are_the_reference(
    cupy: Any, stream: int, memory: Memory, route: Any, options: Any, case: Case, ctas: Any,
    stages: int,
) -> None:  # fmt: skip
    how = Settings(max_ctas=ctas, unit_stages=stages, chunk_bytes=1 << 18)
    engine = case.engine()
    done, image = restored(cupy, stream, case, engine, (memory, route, options), settings=how)
    assert reference.restore(engine.layout, case.loads) == done
    assert image == engine.image()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("interleaved", [False, True])
@FEW
@given(
    case=st.booleans().flatmap(
        lambda whole: cases(deltas=True, rows=[32, 80, 128, 160, 256], whole=whole)
    ),
    part=st.sampled_from([1.0, 0.5, 0.3]),
)  # fmt: skip
def test_turned_keys_are_the_reference_bit_by_bit(
    cupy: Any, stream: int, dtype: str, interleaved: bool, case: Case, part: float
) -> None:
    how = rotary(dtype, case.sizes["row"], interleaved=interleaved, part=part)
    engine = case.engine()
    done, image = restored(cupy, stream, case, engine, (Memory.GPU, None, ()), rotary=how)
    assert reference.restore(engine.layout, case.loads, how) == done
    assert image == engine.image()


@pytest.mark.parametrize("memory", list(Memory))
@FEW
@given(case=cases())
def test_stores_are_the_reference(cupy: Any, stream: int, memory: Memory, case: Case) -> None:
    engine = case.engine()
    reference.restore(engine.layout, case.loads)
    gpu = GpuEngine(cupy, engine)
    storer = Storer(gpu.layout)
    for load in case.loads:
        for request in load.requests:
            payloads, records, host = Payloads(cupy, memory), load.records.copy(), []
            for record in records:
                host.append(np.full(int(record["length"]), 0x5A, dtype=np.uint8))
                record["address"] = payloads.put(host[-1])
            cupy.cuda.runtime.deviceSynchronize()
            status, sums = storer.store(records, request, stream, memory=memory).wait()
            on_host = load.records.copy()
            on_host["address"] = [one.ctypes.data for one in host]
            expected, all_sums = reference.store(engine.layout, on_host, request)
            assert status == expected
            for record, one, mine, theirs in zip(records, host, sums, all_sums, strict=True):
                assert payloads.read(int(record["address"]), one.nbytes) == one.tobytes()
                assert set(mine.tolist()) <= set(theirs.tolist())
                if len(mine) == len(theirs):
                    assert mine.tolist() == theirs.tolist()
    storer.close()


SIZES = {"order": "NHD", "layers": 4, "heads": 4, "slots": 16, "row": 256, "gap": 0}


@pytest.mark.parametrize(("memory", "route", "options"), WAYS)
def test_each_flipped_bit_is_reported_for_its_part_alone(
    cupy: Any, stream: int, memory: Memory, route: Any, options: Any
) -> None:
    spans = [Stored.make(i, 4, 4, 64, 256) for i in range(12)]
    rng = np.random.default_rng(5)
    bad = {1, 4, 5, 11}
    for i in bad:
        flat = spans[i].array.reshape(-1)
        flat[rng.integers(flat.size)] ^= 1 << rng.integers(8)
    spans[7].sums[3] ^= np.uint64(1 << 40)
    engine = Engine.make(**SIZES, blocks=100)
    parts = [span.part(position=64 * i) for i, span in enumerate(spans)]
    pages = rng.permutation(96).reshape(2, 48)
    case = Case(SIZES, spans, [Load.of(parts, [Request(one) for one in pages])], 100)
    done, _ = restored(cupy, stream, case, engine, (memory, route, options))
    expected = [
        Status.BAD_TILE if i in bad else Status.BAD_ROOT if i == 7 else Status.DONE
        for i in range(12)
    ]
    assert done == [[bytes(expected)] * 2]


def test_restores_under_way_do_not_disturb_each_other(cupy: Any, stream: int) -> None:
    engine = Engine.make(**SIZES, blocks=200)
    spans = [Stored.make(i, 4, 4, 64, 256) for i in range(40)]
    loads = [
        Load.of([span.part()], [Request(np.arange(4) + 4 * i)]) for i, span in enumerate(spans)
    ]
    for memory, route in (
        (Memory.GPU, None),
        (Memory.HOST, Route.KERNEL),
        (Memory.HOST, Route.COPY),
    ):
        gpu, payloads = GpuEngine(cupy, engine), Payloads(cupy, memory)
        moved = payloads.loads(loads, spans)
        cupy.cuda.runtime.deviceSynchronize()
        restorer = Restorer(gpu.layout, settings=Settings(chunk_bytes=1 << 20))
        pending = [restorer.restore([one], stream, memory=memory, route=route) for one in moved]
        assert [one.wait() for one in pending] == [[[b"\0"]]] * 40
        assert all(one.done() for one in pending)
        restorer.close()
        expected = Engine.make(**SIZES, blocks=200)
        reference.restore(expected.layout, loads)
        assert gpu.image() == expected.image()


def test_pages_behind_the_last_tile_stay_as_they_were(cupy: Any, stream: int) -> None:
    """A span that ends inside a tile and a stage."""
    sizes = {**SIZES, "layers": 1, "heads": 3, "row": 160}
    span = Stored.make(3, 1, 3, 16, 160)
    assert span.array.nbytes % TILE_BYTES
    engine = Engine.make(**sizes, blocks=4)
    case = Case(sizes, [span], [Load.of([span.part()], [Request(np.array([2]))])], 4)
    done, image = restored(cupy, stream, case, engine, (Memory.GPU, None, ()))
    assert done == [[b"\0"]] == reference.restore(engine.layout, case.loads)
    assert image == engine.image()


@pytest.mark.parametrize("route", [Route.KERNEL, Route.COPY])
def test_a_restore_that_is_refused_leaves_the_next_one_alone(
    cupy: Any, stream: int, route: Route
) -> None:
    engine, span = Engine.make(**SIZES, blocks=8), Stored.make(1, 4, 4, 64, 256)
    good = Load.of([span.part()], [Request(np.arange(4))])
    gpu, payloads = GpuEngine(cupy, engine), Payloads(cupy, Memory.HOST)
    (good,) = payloads.loads([good], [span])
    turned = Load(good.records, [Request(np.arange(4), delta=1)])
    cupy.cuda.runtime.deviceSynchronize()
    restorer = Restorer(gpu.layout)
    for _ in range(5):
        with pytest.raises(ValueError, match="nothing says how"):
            restorer.restore([turned], stream, memory=Memory.HOST, route=route).wait()
    pending = restorer.restore([good], stream, memory=Memory.HOST, route=route)
    assert pending.wait() == [[b"\0"]]
    assert pending.route is route
    restorer.close()


@pytest.mark.parametrize("together", [True, False])
def test_many_copies_are_what_was_asked_for(
    cupy: Any, stream: int, device: Device, together: bool
) -> None:
    """Out of registered memory, and in the stream's order."""
    rng, known = np.random.default_rng(5), device.driver.version() >= 12080
    if together and not known:
        pytest.skip("the driver is older than the call")
    size, count = 1 << 20, 40
    with mmap.mmap(-1, size) as memory:
        source = np.frombuffer(memory, np.uint8)
        source[:] = rng.integers(0, 256, size, dtype=np.uint8)
        seen = Registration(device, source.ctypes.data, size, writable=True)
        at = seen.address
        target, expected = cupy.zeros(size, dtype=cupy.uint8), np.zeros(size, dtype=np.uint8)
        cupy.cuda.runtime.deviceSynchronize()
        with Launches(0) as launches:
            assert (launches.batch is not None) is known
            if not together:
                launches.batch = None
            for _ in range(2):
                sizes = rng.integers(1, size // count, count).astype(np.uint64)
                where = np.arange(count, dtype=np.uint64) * np.uint64(size // count)
                begin = rng.integers(0, size - size // count, count).astype(np.uint64)
                to = where + np.uint64(target.data.ptr)
                launches.copy(np.stack([to, begin + np.uint64(at), sizes], axis=1), stream)
                for one, source_at, length in zip(where, begin, sizes, strict=True):
                    expected[int(one) :][: int(length)] = source[int(source_at) :][: int(length)]
            cupy.cuda.runtime.streamSynchronize(stream)
        assert (target.get() == expected).all()
        seen.close()
        del source


def test_rates_are_measured_and_everything_is_given_back(
    cupy: Any, record: Callable[[str, object], None]
) -> None:
    timed(0)
    free = cupy.cuda.runtime.memGetInfo()[0]
    found = [dataclasses.asdict(fitted(timed(0), H200)) for _ in range(3)]
    assert cupy.cuda.runtime.memGetInfo()[0] == free
    assert all(value >= 0 for one in found for value in one.values())
    record("chooser_rates", found)
