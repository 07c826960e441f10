"""Rounds on a GPU: the same bytes as the reference, and exactly those concerned reported."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gpu_engine import GpuEngine
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from round_cases import RoundCase, rounds, siblings

from kmesh.kernels import round_reference
from kmesh.kernels.chooser import Route
from kmesh.kernels.cuda_rounds import RoundRestorer, RoundSettings
from kmesh.kernels.host import Status
from kmesh.kernels.plan import Memory
from kmesh.kernels.rounds import RoundStatuses
from kmesh.layout import TILE_BYTES

pytestmark = pytest.mark.gpu

WAYS = [
    pytest.param(Route.KERNEL, (), id="kernel"),
    pytest.param(Route.COPY, (), id="copies"),
    # What a GPU without the bulk copy engine runs.
    pytest.param(Route.KERNEL, ("-DKM_NO_BULK",), id="threads"),
]
FEW = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


class Copies:
    """Blobs where a GPU reads them: in its memory, or pinned on the host, as in a slab."""

    def __init__(self, cupy: Any) -> None:
        self._cupy, self._used = cupy, 0
        self._kept: list[Any] = []
        self._pinned = cupy.cuda.alloc_pinned_memory(48 << 20)
        self._slab = np.frombuffer(self._pinned, dtype=np.uint8, count=48 << 20)

    def __call__(self, data: np.ndarray, memory: Memory) -> int:
        flat = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        if memory is Memory.GPU:
            made = self._cupy.asarray(flat)
            self._kept.append(made)
            return int(made.data.ptr)
        at = self._used
        self._slab[at : at + flat.nbytes] = flat
        self._used += -(-flat.nbytes // TILE_BYTES) * TILE_BYTES
        return int(self._pinned.ptr) + at


def restored(
    cupy: Any, stream: int, case: RoundCase, route: Route | None = None, **more: Any
) -> tuple[RoundStatuses, bytes]:
    """Statuses, and all pages afterwards."""
    gpu, copies = GpuEngine(cupy, case.engine()), Copies(cupy)
    wanted = case.round(copies)
    cupy.cuda.runtime.deviceSynchronize()
    restorer = RoundRestorer(gpu.layout, **more)
    done = restorer.restore(wanted, stream, route=route).wait()
    restorer.close()
    return done, gpu.image()


@pytest.mark.parametrize(("route", "options"), WAYS)
@FEW
@given(case=rounds(), ctas=st.sampled_from([1, 2, 5, None]), stages=st.integers(1, 6))
def test_rounds_are_the_reference(
    cupy: Any, stream: int, route: Route, options: tuple[str, ...], case: RoundCase, ctas: Any,
    stages: int,
) -> None:  # fmt: skip
    how = RoundSettings(max_ctas=ctas, slow_ctas=3, stages=stages, chunk_bytes=1 << 18)
    done, image = restored(cupy, stream, case, route, settings=how, options=options)
    expected = case.engine()
    assert round_reference.restore(expected.layout, *case.built()) == done
    assert image == expected.image()


@pytest.mark.parametrize(("route", "options"), WAYS)
@FEW
@given(case=rounds(), data=st.data())
def test_a_changed_byte_is_reported_as_the_reference_does(
    cupy: Any, stream: int, route: Route, options: tuple[str, ...], case: RoundCase,
    data: st.DataObject,
) -> None:  # fmt: skip
    blobs = [*(one.blob for one in case.members), *(blob for _, blob, _ in case.bases)]
    array = data.draw(st.sampled_from(blobs)).data
    array[data.draw(st.integers(0, array.size - 1))] ^= 1 << data.draw(st.integers(0, 7))
    done, _ = restored(cupy, stream, case, route, options=options)
    expected = case.engine()
    assert round_reference.restore(expected.layout, *case.built()) == done


@pytest.mark.parametrize("base", list(Memory))
@pytest.mark.parametrize("literals", list(Memory))
@pytest.mark.parametrize("route", list(Route))
def test_siblings_of_many_blocks(
    cupy: Any, stream: int, base: Memory, literals: Memory, route: Route
) -> None:
    """Enough tokens that every multiprocessor has items of both kinds, and bad ones among them."""
    case, _ = siblings(8, memory=base, literals=literals, own=200, tokens=1024)
    done, image = restored(cupy, stream, case, route)
    expected = case.engine()
    assert round_reference.restore(expected.layout, *case.built()) == done
    assert done.members == bytes(8)
    assert image == expected.image()
    case.members[3].blob.data[-5] ^= 16
    done, _ = restored(cupy, stream, case, route)
    assert list(done.members) == [Status.BAD_TILE if i == 3 else Status.DONE for i in range(8)]
    case.bases[0][1].data[9] ^= 1
    done, _ = restored(cupy, stream, case, route)
    assert list(done.members) == [Status.BAD_TILE] * 8
    assert list(done.bases) == [Status.BAD_TILE, Status.DONE]


def test_rounds_under_way_do_not_disturb_each_other(cupy: Any, stream: int) -> None:
    cases = [siblings(3, seed=i)[0] for i in range(12)]
    gpus = [GpuEngine(cupy, case.engine()) for case in cases]
    copies = Copies(cupy)
    wanted = [case.round(copies) for case in cases]
    cupy.cuda.runtime.deviceSynchronize()
    restorers = [RoundRestorer(gpu.layout) for gpu in gpus]
    pending = [
        restorer.restore(one, stream) for restorer, one in zip(restorers, wanted, strict=True)
    ]
    for case, gpu, restorer, one in zip(cases, gpus, restorers, pending, strict=True):
        assert one.wait().members == bytes(3)
        assert one.done()
        expected = case.engine()
        round_reference.restore(expected.layout, *case.built())
        assert gpu.image() == expected.image()
        restorer.close()
