"""The round kernel's code, run by one CPU thread, against the reference and the codec's decoder."""

from __future__ import annotations

import ctypes

import numpy as np
import one_thread
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from round_cases import RoundCase, rounds

from kmesh.kernels import round_reference
from kmesh.kernels.host import Status


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return one_thread.build(tmp_path_factory.mktemp("kernels"))


@settings(max_examples=150, deadline=None)
@given(case=rounds(), blocks=st.integers(1, 7), slow=st.integers(1, 4), stages=st.integers(1, 4))
def test_rounds_move_what_the_reference_moves(
    kernels: ctypes.CDLL, case: RoundCase, blocks: int, slow: int, stages: int
) -> None:
    engine, expected = case.engine(), case.engine()
    done = one_thread.restore_round(
        kernels, engine.layout, case.round(), blocks=blocks, slow_blocks=slow, stages=stages
    )
    assert done.members == bytes(len(case.members))
    assert round_reference.restore(expected.layout, *case.built()) == done
    assert engine.image() == expected.image()
