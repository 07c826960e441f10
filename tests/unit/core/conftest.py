"""Fixtures of the core's tests."""

from __future__ import annotations

import pytest
from world import World


@pytest.fixture
def world() -> World:
    """One slab of eight tiles."""
    return World({0: 8})
