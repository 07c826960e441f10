"""Runs the kernels' own code on the CPU, one thread to a block. For index arithmetic, not races."""

from __future__ import annotations

import ctypes
import os
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from kmesh.kernels import plan, rounds
from kmesh.kernels.host import PagedLayout
from kmesh.kernels.plan import Load, Request
from kmesh.kernels.rotary import Rotary

HERE = Path(__file__).parent
KERNELS = Path(plan.__file__).parent


def build(folder: Path) -> ctypes.CDLL:
    """The kernels as a shared library of the CPU's."""
    library = folder / "one_thread.so"
    command = [*shlex.split(os.environ.get("CXX", "g++")), "-std=c++17", "-O1", "-Wall", "-Werror"]
    command += ["-Wno-unknown-pragmas", "-ffp-contract=off", "-shared", "-fPIC", "-I", str(KERNELS)]
    command += ["-x", "c++", str(HERE / "one_thread.cpp"), "-o", str(library)]
    subprocess.run(command, check=True, timeout=110)
    return ctypes.CDLL(str(library))


class Range(ctypes.Structure):
    """Parts of a job that a launch moves."""

    _fields_ = (("begin", ctypes.c_uint32), ("end", ctypes.c_uint32))


def _run(
    library: ctypes.CDLL,
    name: str,
    job: plan.Job | rounds.RoundJob,
    results: np.ndarray,
    blocks: int,
    *more: object,
) -> None:
    library[f"kmesh_{name}_{job.vector}"](
        ctypes.c_void_p(job.memory.ctypes.data),
        ctypes.c_void_p(results.ctypes.data),
        ctypes.c_uint32(blocks),
        *more,
    )


def aligned(size: int) -> np.ndarray:
    """Memory as a device's allocator gives it, full of what was there before."""
    memory = np.full(size + 64, 0xC7, dtype=np.uint8)
    return memory[-memory.ctypes.data % 64 :][:size]


def restore(
    library: ctypes.CDLL,
    layout: PagedLayout,
    loads: Sequence[Load],
    *,
    rotary: Rotary | None = None,
    blocks: int = 3,
    stages: int = 2,
    unit_stages: int = 0,
    burst: int = 1,
    at_once: int = 2,
) -> list[list[bytes]]:
    """As ``kmesh.kernels.cuda`` does it on a GPU."""
    job = plan.write(
        layout, loads, rotary=rotary, stages=stages, unit_stages=unit_stages,
        unit_shared=1 << 19, burst=burst, allocate=aligned,
    )  # fmt: skip
    results = np.full(job.parts, 0xFF, dtype=np.uint32)
    name = f"restore{'_units' if job.units else ''}{'_turn' if job.turns else ''}"
    # In several launches, as when the payloads arrive bit by bit.
    for begin in range(0, job.parts, at_once):
        parts = Range(begin, min(begin + at_once, job.parts))
        _run(library, name, job, results, blocks, parts)
    return job.statuses(results)


def restore_round(
    library: ctypes.CDLL,
    layout: PagedLayout,
    wanted: rounds.Round,
    *,
    stages: int = 2,
    blocks: int = 5,
    slow_blocks: int = 2,
) -> rounds.RoundStatuses:
    """As ``kmesh.kernels.cuda_rounds`` does it on a GPU."""
    job = rounds.write(
        layout, wanted, stages=stages, blocks=blocks, slow_blocks=slow_blocks, allocate=aligned
    )
    assert job.blocks <= blocks
    results = np.full(job.parts, 0xFF, dtype=np.uint32)
    _run(library, "round", job, results, job.blocks, Range(0, job.parts))
    return job.statuses(results)


def store(
    library: ctypes.CDLL,
    layout: PagedLayout,
    records: np.ndarray,
    request: Request,
    *,
    blocks: int = 3,
) -> tuple[bytes, list[np.ndarray]]:
    """The inverse, with sums."""
    job = plan.write(layout, [Load(records, [request])], allocate=aligned)
    results = np.full(job.tiles, 0xFF, dtype=np.uint64)
    _run(library, "store", job, results, blocks)
    statuses = job.statuses(np.zeros(job.parts, dtype=np.uint32))
    return statuses[0][0], job.sums(results)
