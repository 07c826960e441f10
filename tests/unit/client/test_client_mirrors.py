"""Recipes read out of a slab that goes away meanwhile."""

from __future__ import annotations

import os

import pytest

from kmesh.cuda.slabs import HostSide
from kmesh.errors import CorruptionError
from kmesh.fake_state import create_memfd
from kmesh.layout import TILE_BYTES
from kmesh.mapping import Mapping
from kmesh.mirrors import MirrorReader, RecipePlace


def mapped(address: int) -> bool:
    with open("/proc/self/maps") as maps:
        ranges = [[int(end, 16) for end in line.split()[0].split("-")] for line in maps]
    return any(begin <= address < end for begin, end in ranges)


class _Leaving(HostSide):
    """A slab that is unmapped by its owner before its sums are read."""

    def sums_address(self, offset: int) -> int:
        found = super().sums_address(offset)
        self._mapping.close()
        assert mapped(found), "the sums' memory went before they were read"
        return found


def test_sums_stay_mapped_until_they_were_read() -> None:
    fd = create_memfd("kmesh-slab", 1 << 20)
    try:
        slab = _Leaving(0, Mapping(fd, 1 << 20))
    finally:
        os.close(fd)
    with pytest.raises(CorruptionError, match="do not match their sums"):
        MirrorReader(lambda number: slab).read(RecipePlace(0, 0, TILE_BYTES, 1, 64, 0), {})
    assert not mapped(slab.address)
