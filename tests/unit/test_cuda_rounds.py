"""How rounds are started, on a GPU that is the CPU: routes, chunks, and what is refused."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import numpy as np
import pytest
from cpu_gpu import NOT_READY, Gpu
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from round_cases import (
    GEOMETRY,
    Blob,
    RoundCase,
    Wanted,
    rounds,
    sibling,
    siblings,
    tables_of,
)

from kmesh.codec import Base, Segment
from kmesh.errors import UnsupportedError
from kmesh.kernels import batches, copying, round_reference
from kmesh.kernels.chooser import Route
from kmesh.kernels.cuda_rounds import RoundRestorer, RoundSettings
from kmesh.kernels.host import Status
from kmesh.kernels.plan import Memory
from kmesh.kernels.rounds import HostBytes
from kmesh.layout import TILE_BYTES


@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(case=rounds(), chunk=st.sampled_from([1 << 14, 1 << 17, 1 << 22]), data=st.data())
def test_either_route_moves_what_the_reference_moves(
    gpu: Gpu, case: RoundCase, chunk: int, data: st.DataObject
) -> None:
    if data.draw(st.integers(0, 2)) == 0:
        array = data.draw(st.sampled_from([member.blob for member in case.members])).data
        array[data.draw(st.integers(0, array.size - 1))] ^= 4
    gpu.batch = data.draw(st.sampled_from([None, gpu.together]))
    expected = case.engine()
    wanted = round_reference.restore(expected.layout, *case.built())
    for route in Route:
        engine = case.engine()
        restorer = RoundRestorer(engine.layout, settings=RoundSettings(chunk_bytes=chunk))
        pending = restorer.restore(case.round(), 0, route=route)
        assert pending.wait() == wanted == pending.wait()
        assert pending.done()
        if not any(wanted.members):
            assert engine.image() == expected.image()
        restorer.close()


def test_what_is_copied_comes_in_chunks_and_the_rest_at_once(gpu: Gpu) -> None:
    case, _ = siblings(8, memory=Memory.GPU)
    engine, expected = case.engine(), case.engine()
    chunk = 3 * TILE_BYTES
    restorer = RoundRestorer(engine.layout, settings=RoundSettings(chunk_bytes=chunk))
    pending = restorer.restore(case.round(), 0, route=Route.COPY)
    assert pending.route is Route.COPY
    assert pending.wait() == round_reference.restore(expected.layout, *case.built())
    assert engine.image() == expected.image()
    # The base is there, and is moved while recipes come, one or two in a buffer.
    assert gpu.launched[0][0] == "kmesh_round_upload"
    launched = [parts for _, _, parts in gpu.launched[1:]]
    assert launched[0][0] == 1
    assert (0, 1) in launched[1:-2]
    assert sorted(p for a, b in launched for p in range(a, b)) == list(range(9))
    assert len(launched) > 4
    assert sum(gpu.copied) >= sum(len(member.blob.data) for member in case.members)
    restorer.close()


class Slab:
    """Each payload or recipe on a tile of its own, sums where they are."""

    def __init__(self, case: RoundCase) -> None:
        blobs = [*(b for _, b, _ in case.bases), *(m.blob for m in case.members)]
        self._sums = {id(blob.sums) for blob in blobs}
        self._memory = np.zeros(80 * TILE_BYTES, dtype=np.uint8)
        self._used = 0

    def __call__(self, data: np.ndarray, _memory: Memory) -> int:
        if id(data) in self._sums:
            return int(data.ctypes.data)
        flat, at = data.reshape(-1).view(np.uint8), self._used
        self._memory[at : at + flat.size] = flat
        self._used += -(-flat.size // TILE_BYTES) * TILE_BYTES
        return int(self._memory.ctypes.data) + at


def test_neighbours_of_a_slab_are_one_copy() -> None:
    case, _ = siblings(4)
    host = HostBytes(case.round())
    lengths = host.records["length"]
    assert len(lengths) == 6
    # Sums lie between the payloads here, so nothing is a neighbour.
    assert sorted(lengths.tolist()) == sorted(
        [*(len(b.data) for _, b, _ in case.bases), *(len(m.blob.data) for m in case.members)]
    )
    slab = Slab(case)
    near = HostBytes(case.round(slab))
    ends = near.records["address"] + near.records["length"]
    assert (ends[:-1] == near.records["address"][1:]).all()
    moved = near.moved(np.arange(6, dtype=np.uint64) * 1000)
    assert sorted(moved.bases["order"].tolist() + moved.members["order"].tolist()) == [*range(1, 7)]


def test_recipes_of_a_slab_are_one_copy_with_what_is_between_them(gpu: Gpu) -> None:
    case, _ = siblings(12, frames=1)
    engine, expected = case.engine(), case.engine()
    restorer, slab = RoundRestorer(engine.layout), Slab(case)
    pending = restorer.restore(case.round(slab), 0, route=Route.COPY)
    assert pending.route is Route.COPY
    assert pending.wait() == round_reference.restore(expected.layout, *case.built())
    assert engine.image() == expected.image()
    assert len(gpu.copied) == 1
    restorer.close()


def test_recipes_of_a_slab_are_copied_together_without_what_is_between_them(gpu: Gpu) -> None:
    together: list[int] = []

    def batch(copies: np.ndarray, stream: int) -> int:
        together.append(len(copies))
        return gpu.together(copies, stream)

    gpu.batch = batch
    case, _ = siblings(12, frames=1)
    engine, expected = case.engine(), case.engine()
    restorer, slab = RoundRestorer(engine.layout), Slab(case)
    round = case.round(slab)
    pending = restorer.restore(round, 0, route=Route.COPY)
    assert pending.wait() == round_reference.restore(expected.layout, *case.built())
    assert engine.image() == expected.image()
    # A few of the first chunk come before the others.
    assert together == [copying._SOON, len(gpu.copied) - copying._SOON]
    assert sum(gpu.copied) == HostBytes(round, 0).records["length"].sum()
    assert sum(gpu.copied) < HostBytes(round).records["length"].sum()
    restorer.close()


def test_the_drivers_call_gets_what_was_asked_for() -> None:
    """As its header has it: three lists, one kind for all from number 0 on, and the stream."""
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    heard: list[tuple[object, ...]] = []

    @ctypes.CFUNCTYPE(
        ctypes.c_int, pointer, pointer, pointer, size, pointer, pointer, size, pointer, pointer
    )
    def driver(*given: int) -> int:
        to, source, sizes, count, kinds, firsts, kind_count, failed, stream = given
        each = [(ctypes.c_uint64 * count).from_address(at) for at in (to, source, sizes)]
        for target, begin, length in zip(*each, strict=True):
            ctypes.memmove(target, begin, length)
        order = ctypes.c_int.from_address(kinds).value
        heard.append((count, order, size.from_address(firsts).value, kind_count, stream))
        size.from_address(failed).value = 0
        return 0 if count > 1 else 801

    batch = batches._batch(ctypes.cast(driver, pointer).value or 0)
    source, target = np.arange(100, dtype=np.uint8), np.zeros(100, dtype=np.uint8)
    copies = np.array([[40, 3, 20], [0, 50, 7], [99, 0, 1]], dtype=np.uint64)
    expected = target.copy()
    for to, begin, length in copies.tolist():
        expected[to : to + length] = source[begin : begin + length]
    copies[:, 0] += np.uint64(target.ctypes.data)
    copies[:, 1] += np.uint64(source.ctypes.data)
    assert batch(copies, 77) == 0
    assert (target == expected).all()
    assert batch(copies[1:2], 5) == 801
    assert heard == [(3, 1, 0, 1, 77), (1, 1, 0, 1, 5)]


def test_a_driver_that_does_not_copy_together_is_not_asked_again(
    gpu: Gpu, caplog: pytest.LogCaptureFixture
) -> None:
    asked: list[int] = []
    gpu.batch = lambda copies, _: asked.append(len(copies)) or 801
    case, _ = siblings(12, frames=1)
    engine, expected = case.engine(), case.engine()
    restorer, slab = RoundRestorer(engine.layout), Slab(case)
    for _ in range(2):
        pending = restorer.restore(case.round(slab), 0, route=Route.COPY)
        assert pending.wait() == round_reference.restore(expected.layout, *case.built())
        assert engine.image() == expected.image()
    assert len(asked) == 1
    assert "error 801" in caplog.text
    restorer.close()


def test_what_fits_no_buffer_and_what_has_none_goes_by_the_kernel(gpu: Gpu) -> None:
    case, _ = siblings(2)
    engine = case.engine()
    for how, room in ((RoundSettings(chunk_bytes=4096), 1 << 40), (RoundSettings(), 1 << 20)):
        gpu.room = room
        restorer = RoundRestorer(engine.layout, settings=how)
        for _ in range(2):
            pending = restorer.restore(case.round(), 0, route=Route.COPY)
            assert pending.route is Route.KERNEL
            assert pending.wait().members == bytes(2)
        restorer.close()


def test_a_round_that_is_refused_leaves_the_next_one_alone(gpu: Gpu) -> None:
    case, _ = siblings(2)
    engine = case.engine()
    restorer = RoundRestorer(engine.layout)
    good, bad = case.round(), case.round()
    bad.members["part"]["address"][0] += 2
    for route in Route:
        # A recipe that can't be read by words is read by nobody.
        with pytest.raises(UnsupportedError, match="multiples of 4"):
            restorer.restore(bad, 0, route=Route.KERNEL)
        pending = restorer.restore(good, 0, route=route)
        assert pending.wait().members == bytes(2)
        assert pending.route is route
    case.members[1].blob.data[-1] ^= 1
    assert list(restorer.restore(case.round(), 0).wait().members) == [0, Status.BAD_TILE]
    restorer.close()


@pytest.mark.parametrize(
    "wrong", [{"ctas": 0}, {"slow_ctas": 0}, {"stages": 0}, {"max_ctas": 0}, {"chunks": 1}]
)
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        RoundSettings(**wrong)


def test_what_the_first_round_needs_can_be_there_before(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[object] = []
    module = gpu.RawModule
    monkeypatch.setattr(gpu, "RawModule", lambda **how: compiled.append(how) or module(**how))
    case, _ = siblings(2)
    engine = case.engine()
    restorer = RoundRestorer(engine.layout)
    assert compiled == []
    restorer.prepare(copies=False)
    assert (len(compiled), gpu.held) == (1, 1)
    restorer.prepare(copies=True)
    before = gpu.held, len(gpu.pooled)
    assert before[0] == 1 + RoundSettings().chunks
    for route in Route:
        pending = restorer.restore(case.round(), 0, route=route)
        assert pending.route is route
        assert pending.wait().members == bytes(2)
    assert (len(compiled), gpu.held, len(gpu.pooled)) == (1, *before)
    assert gpu.launched
    restorer.close()


def test_what_there_is_no_memory_for_is_asked_for_again(gpu: Gpu) -> None:
    case, _ = siblings(2)
    engine = case.engine()
    restorer = RoundRestorer(engine.layout)
    gpu.room = 1 << 20
    with pytest.raises(MemoryError, match="out of memory"):
        restorer.prepare(copies=True)
    gpu.room = 1 << 40
    pending = restorer.restore(case.round(), 0, route=Route.COPY)
    assert pending.route is Route.COPY
    assert pending.wait().members == bytes(2)
    restorer.close()


def test_a_refusal_is_not_waited_for(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stream may have other work before it, and copies can't be called back."""
    case, _ = siblings(2)
    base = Base(Segment(what, blob.data) for what, blob, _ in case.bases)
    rotary, rng = GEOMETRY.rotary(interleaved=True), np.random.default_rng(1)
    other = sibling(GEOMETRY, rotary, base, [(0, 0, 60), (-1, 0, 4)], rng, position=900)
    wanted = Wanted(other.what, Blob(other.data), 1, 0, tables_of(other.data))
    bad_case = replace(case, members=[case.members[0], wanted])
    engine, good, bad = case.engine(), case.round(), bad_case.round()
    restorer = RoundRestorer(engine.layout)
    restorer.prepare(copies=True)
    runtime, ended, waits = gpu.cuda.runtime, [False], []
    monkeypatch.setattr(runtime, "eventQuery", lambda _: 0 if ended[0] else NOT_READY)
    monkeypatch.setattr(runtime, "eventSynchronize", waits.append)
    monkeypatch.setattr(runtime, "streamSynchronize", waits.append)
    with pytest.raises(UnsupportedError, match="in different ways"):
        restorer.restore(bad, 0, route=Route.KERNEL)
    assert (gpu.launched, gpu.copied) == ([], [])
    pending = restorer.restore(bad, 0, route=Route.COPY)
    assert waits == []
    assert (pending.route, pending.read_bytes, pending.done()) == (Route.COPY, 0, False)
    assert gpu.copied
    ended[0] = True
    for _ in range(2):
        assert pending.done()
        with pytest.raises(UnsupportedError, match="in different ways"):
            pending.wait()
    assert len(waits) == 1
    assert gpu.launched == []
    held = gpu.held
    for route in Route:
        assert restorer.restore(good, 0, route=route).wait().members == bytes(2)
    assert gpu.held == held
    restorer.close()
