"""The chooser's rates, measured: out of times that follow from some, and by restores on the CPU."""

from __future__ import annotations

import ctypes
import dataclasses
import logging
from collections.abc import Iterator

import numpy as np
import pytest
from cpu_gpu import Gpu, instead_of_cupy
from hypothesis import given
from hypothesis import strategies as st

from kmesh.kernels import calibration
from kmesh.kernels.calibration import Times, fitted, rates, timed
from kmesh.kernels.chooser import Rates, Route, choose
from kmesh.kernels.cuda import H200, Load, Memory, Request, Restorer
from kmesh.kernels.host import PagedLayout
from kmesh.kernels.plan import RECORD

MIB = 1 << 20
#: Blocks that are no limit.
MANY = 10**9
SMALL, LARGE, PAGES, ROUNDS, FEW = MIB, 32 * MIB, 64 * MIB, 8, 4


def times_of(known: Rates, *, copies: bool = True) -> Times:
    """What restores take where these rates hold; blocks are no limit where nothing is said."""

    def written(blocks: int) -> tuple[float, float]:
        one = PAGES / min(known.write, blocks * known.write_block)
        return known.kernel_start + one, known.kernel_start + ROUNDS * one

    both = (SMALL, LARGE)
    kernel = tuple(known.kernel_time(size, 1, MANY) for size in both)
    copied = tuple(known.copy_time(size, 1, MANY) for size in both)
    return Times(
        small=SMALL,
        large=LARGE,
        kernel=(kernel[0], kernel[1]),
        copies=(copied[0], copied[1]) if copies else None,
        one_block=known.kernel_time(SMALL, 1, 1),
        pages=PAGES,
        rounds=ROUNDS,
        written=written(MANY),
        few=written(FEW),
        few_blocks=FEW,
    )


@given(
    kernel=st.floats(5e9, 2e11), copy=st.floats(5e9, 2e11), block=st.floats(0.02, 0.5),
    write=st.floats(1e12, 8e12), start=st.floats(0, 1e-3),
)  # fmt: skip
def test_rates_are_found_again(
    kernel: float, copy: float, block: float, write: float, start: float
) -> None:
    known = Rates(
        kernel=kernel, kernel_block=kernel * block, copy=copy, write=write,
        write_block=2 * kernel * block, kernel_start=start, copy_start=2 * start,
        copy_chunk=4 * MIB,
    )  # fmt: skip
    found = fitted(times_of(known), H200)
    for name, value in dataclasses.asdict(known).items():
        assert getattr(found, name) == pytest.approx(value, rel=1e-3, abs=1e-7), name


def test_what_was_not_measured_stays_as_it_was() -> None:
    slow = dataclasses.replace(H200, copy=1e9, kernel=2e9, kernel_block=1e9)
    found = fitted(times_of(slow, copies=False), H200)
    assert (found.copy, found.copy_start) == (H200.copy, H200.copy_start)
    assert found.kernel == pytest.approx(2e9)
    # A machine on which the kernel is the faster way, however much there is.
    assert choose(1 << 30, 1, 16, fitted(times_of(slow), H200)) is Route.KERNEL
    assert choose(1 << 30, 1, 16, H200) is Route.COPY


@pytest.mark.parametrize(
    "wrong",
    [
        {"kernel": (2e-3, 1e-3)},
        {"copies": (1e-3, 1e-3)},
        {"one_block": 0.0},
        {"written": (1e-3, float("nan"))},
        {"few": (2.0, 1.0)},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_times_that_cannot_be_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="more than one of less"):
        fitted(dataclasses.replace(times_of(H200), **wrong), H200)  # type: ignore[arg-type]


# By restores.


def test_what_the_first_restore_needs_can_be_there_before(gpu: Gpu) -> None:
    layout = PagedLayout((1 << 20,), (1 << 20,), 4096, 256, 16, 16, 4, 1, 16)
    restorer = Restorer(layout)
    restorer.prepare(copies=False)
    assert gpu.held == 1
    restorer.prepare(copies=True)
    before = gpu.held
    assert before == 4
    nothing = Load(np.zeros(0, RECORD), [Request(np.zeros(0, np.int64))])
    assert restorer.restore([nothing], 2, memory=Memory.HOST).wait() == [[b""]]
    assert gpu.held == before
    restorer.close()
    assert gpu.held == 0


@pytest.fixture
def gpu(kernels: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    found = Gpu(kernels)
    monkeypatch.setattr(calibration, "cupy", lambda: found)
    monkeypatch.setattr(calibration, "_known", {})
    with instead_of_cupy(found, monkeypatch):
        yield found


def test_restores_of_both_routes_and_memories_are_timed(gpu: Gpu) -> None:
    taken = timed(0, spans=4, repeats=1)
    assert (taken.small, taken.large, taken.pages) == (MIB, 4 * MIB, 8 * MIB)
    assert taken.copies is not None
    every = (*taken.kernel, *taken.copies, taken.one_block, *taken.written, *taken.few)
    assert all(took > 0 for took in every)
    # Each twice; those by copies in chunks.
    blocks = [blocks for _, blocks, _ in gpu.launched]
    assert blocks.count(1) >= 2
    assert sum(gpu.copied) >= 2 * 5 * MIB
    assert gpu.held == 0
    # The jobs' alone; payloads are not to stay page-locked.
    assert max(gpu.pooled) < MIB


def test_without_memory_for_copies_the_rest_is_timed(gpu: Gpu) -> None:
    gpu.room = 31 * MIB
    assert timed(0, spans=2, repeats=1).copies is None
    assert gpu.held == 0


def test_memory_that_an_engine_may_want_is_left_alone(
    gpu: Gpu, caplog: pytest.LogCaptureFixture
) -> None:
    gpu.free = (1 << 30) - 1
    assert rates(0, "GPU-a", 13000) is None
    assert caplog.text.count("only 1023 MiB of its memory are free") == 1
    assert gpu.launched == []
    assert gpu.held == 0


def test_a_gpu_is_measured_once_for_each_driver(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked = []
    monkeypatch.setattr(calibration, "timed", lambda n: asked.append(n) or times_of(H200))
    caplog.set_level(logging.INFO, "kmesh.kernels")
    first = rates(0, "GPU-a", 13000)
    assert first is not None
    assert first.kernel == pytest.approx(H200.kernel, rel=1e-3)
    assert rates(0, "GPU-a", 13000) is first
    assert "GPU-a: from host memory the kernel reads 50.9 GB/s" in caplog.text
    rates(0, "GPU-a", 13010)
    rates(1, "GPU-b", 13000)
    assert asked == [0, 0, 1]


def test_what_cannot_be_measured_is_said_and_not_tried_again(
    gpu: Gpu, caplog: pytest.LogCaptureFixture
) -> None:
    gpu.room = MIB
    assert rates(0, "GPU-a", 13000) is None
    assert rates(0, "GPU-a", 13000) is None
    (record,) = caplog.records
    assert record.getMessage() == (
        "GPU-a: its restores are chosen by the rates of an H200, as its own can't be measured:"
        " out of memory"
    )
    assert gpu.held == 0
