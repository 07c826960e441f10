"""Pieces of memory that a GPU reads, brought to the host by one launch."""

from __future__ import annotations

import mmap
import os
from typing import Any

import numpy as np
import pytest

from kmesh import _host
from kmesh.cuda.device import Device
from kmesh.cuda.memory import DeviceMemory, Registration
from kmesh.kernels.cuda_fetch import UNIT, Fetcher

pytestmark = pytest.mark.gpu


def test_pieces_of_every_memory_that_a_slab_may_be_in(
    cupy: Any, stream: int, device: Device
) -> None:
    """The GPU's, imported read-only; the host's that CUDA makes; registered memory."""
    rng = np.random.default_rng(1)
    size = 4 << 20
    data = rng.integers(0, 256, size, np.uint8)
    plain = mmap.mmap(-1, size)
    plain[:] = data.tobytes()
    seen = Registration(device, _host.address(plain), size, writable=True)
    addresses = [seen.address]
    made = []
    for node in (None, device.host_node):
        memory = DeviceMemory.create(device, size, node=node)
        memory.write(data.tobytes())
        fd = memory.export()
        made += [memory, DeviceMemory.open(device, fd, size)]
        os.close(fd)
        addresses.append(made[-1].address)
    fetcher = Fetcher()
    for count in (1, 3, 700):
        begins = rng.integers(0, size // UNIT - 300, count).astype(np.uint64) * UNIT
        sizes = rng.integers(0, 300, count).astype(np.uint64) * UNIT
        bases = np.array(addresses, np.uint64)[rng.integers(0, len(addresses), count)]
        found = fetcher.fetch(bases + begins, sizes, stream).wait()
        each = zip(begins.tolist(), sizes.tolist(), strict=True)
        expected = np.concatenate([data[at : at + length] for at, length in each])
        assert (found == expected).all()
    fetcher.close()
    for memory in reversed(made):
        memory.close()
    seen.close()
