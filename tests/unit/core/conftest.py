"""Fixtures of the core's tests."""

from __future__ import annotations

import pytest
from world import World

from kmesh_spand.control.native import NativeBatch
from kmesh_spand.core.batch import Batch


@pytest.fixture(params=[Batch, NativeBatch], ids=["plain", "native"])
def world(request: pytest.FixtureRequest) -> World:
    """One slab of eight tiles."""
    return World({0: 8}, batch=request.param())


@pytest.fixture
def room() -> World:
    """One slab of 24 tiles."""
    return World({0: 24})
