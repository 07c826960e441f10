"""Where memory lies."""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path

import pytest

from kmesh import numa


def test_pages_lie_where_they_are_bound() -> None:
    known = numa.nodes()
    if not known:
        pytest.skip("the kernel names no NUMA nodes")
    for node in known:
        with mmap.mmap(-1, 4 * mmap.PAGESIZE) as pages:
            held = ctypes.c_char.from_buffer(pages)
            address = ctypes.addressof(held)
            numa.bind(address, 4 * mmap.PAGESIZE, node)
            assert "bind:" + str(node) in _policy(address)
            assert numa.node_of(address + mmap.PAGESIZE) == node
            del held


@pytest.mark.parametrize("node", [-1, 1023, 1024])
def test_nodes_that_are_not_there(node: int) -> None:
    with mmap.mmap(-1, mmap.PAGESIZE) as page:
        held = ctypes.c_char.from_buffer(page)
        with pytest.raises(OSError, match=r"no NUMA node|Invalid argument"):
            numa.bind(ctypes.addressof(held), mmap.PAGESIZE, node)
        del held


def test_lists_of_nodes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "has_memory"
    monkeypatch.setattr(numa, "_ONLINE", file)
    assert numa.nodes() == []
    for text, wanted in (("0\n", [0]), ("0-2,5\n", [0, 1, 2, 5]), ("\n", [])):
        file.write_text(text)
        assert numa.nodes() == wanted


def _policy(address: int) -> str:
    with open("/proc/self/numa_maps") as maps:
        return next(line for line in maps if line.startswith(f"{address:x} "))
