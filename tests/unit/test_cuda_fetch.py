"""Pieces that a GPU brings to the host, by the kernel's own code on a GPU that is the CPU."""

from __future__ import annotations

import numpy as np
import pytest
from cpu_gpu import Gpu
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kmesh.kernels.cuda_fetch import UNIT, Fetcher


@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    turns=st.lists(
        st.lists(st.tuples(st.integers(0, 400), st.integers(0, 90)), min_size=1, max_size=40),
        min_size=1, max_size=3,
    )
)  # fmt: skip
def test_pieces_come_in_their_order(gpu: Gpu, turns: list[list[tuple[int, int]]]) -> None:
    """Any number of any sizes, none of no bytes left out; several may be under way."""
    room = np.random.default_rng(1).integers(0, 256, 500 * UNIT, np.uint8)
    memory = room[-room.ctypes.data % UNIT :]
    fetcher = Fetcher()
    pending = []
    for pieces in turns:
        begins, sizes = (UNIT * np.array(one, np.uint64) for one in zip(*pieces, strict=True))
        addresses = begins + np.uint64(memory.ctypes.data)
        pending.append(fetcher.fetch(addresses, sizes, 0))
    for pieces, one in zip(turns, pending, strict=True):
        expected = [memory[UNIT * at : UNIT * (at + size)] for at, size in pieces]
        assert one.wait().tobytes() == np.concatenate(expected).tobytes()
        assert one.done()
        assert one.wait() is one.wait()
    fetcher.close()
    launched = {name for name, _, _ in gpu.launched}
    assert launched == {"kmesh_round_upload", "kmesh_round_fetch"}


@pytest.mark.parametrize("wrong", ["address", "size"])
def test_what_is_not_counted_in_units_is_refused(gpu: Gpu, wrong: str) -> None:
    fetcher = Fetcher()
    address, size = np.array([4096], np.uint64), np.array([64], np.uint64)
    with pytest.raises(ValueError, match="by 16 bytes"):
        fetcher.fetch(address + (wrong == "address"), size + (wrong == "size"), 0)
    assert not gpu.launched
    fetcher.close()
