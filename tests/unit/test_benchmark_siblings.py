"""The round that `python -m benchmarks.gpu` measures, a small one, on the CPU."""

from __future__ import annotations

import ctypes

import numpy as np
import one_thread
from paged_reference import Engine

from benchmarks.gpu.siblings import Siblings, Sizes
from kmesh.kernels.plan import Memory, Request


def test_mirrors_and_dense_members_give_the_same_pages(kernels: ctypes.CDLL) -> None:
    sizes = Sizes(layers=2, heads=2, head_dim=64, spans=2, span_tokens=64, own=12, members=3)
    made = Siblings(sizes)
    assert 0.18 < made.literal_share < 0.22
    requests = [Request(np.arange(8) + 8 * i) for i in range(3)]
    shape = {"order": "NHD", "layers": 2, "heads": 2, "slots": 16, "row": 128, "gap": 0}
    mirrors, dense = Engine.make(**shape, blocks=24), Engine.make(**shape, blocks=24)
    host = Memory.HOST
    wanted = made.round(requests, (made.base.address, host), (made.recipes.address, host))
    assert one_thread.restore_round(kernels, mirrors.layout, wanted).members == bytes(6)
    loads = made.loads(requests, made.dense.address)
    done = one_thread.restore(kernels, dense.layout, loads)
    assert not any(any(status) for load in done for status in load)
    assert mirrors.image() == dense.image()
    page = mirrors.views[1][0][4:8].transpose(1, 0, 2, 3).reshape(2, 64, 128)
    assert (page.reshape(-1) == made.payload(0)[1, 1, 0].reshape(-1).view(np.uint8)).all()
    for stock in made.stocks():
        stock.close()
