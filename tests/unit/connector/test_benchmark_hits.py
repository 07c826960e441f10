"""The hits that `python -m benchmarks.gpu` measures, a small one, with a GPU that is none."""

from __future__ import annotations

import numpy as np
import pytest
from fake_gpu_streams import FakeGpu
from paged_reference import Engine

from benchmarks.gpu.hits import Hits
from benchmarks.spand import serve
from kmesh.kernels.plan import Memory
from kmesh.keys import Namespace

LAYERS, HEADS, DIM, TOKENS = 2, 2, 32, 256
NAMESPACE = Namespace("bench", "w", "bfloat16", layers=LAYERS, kv_heads=HEADS, head_dim=DIM)


def test_each_request_has_its_own_pages_and_every_byte() -> None:
    shape = (TOKENS // 64, LAYERS, 2, HEADS, 64, 2 * DIM)
    payload = np.random.default_rng(3).integers(0, 256, shape, dtype=np.uint8)
    pages = Engine.make(
        order="NHD", layers=LAYERS, heads=HEADS, slots=16, row=2 * DIM, gap=0, blocks=40
    )
    ids = np.random.default_rng(4).permutation(39).astype(np.int64)
    blocks = [ids[:16], ids[16:32]]
    gpu = FakeGpu()
    with serve(host_memory="64MiB", staging_memory="64MiB") as spand:
        engine = Hits(spand, gpu, NAMESPACE, pages.layout, TOKENS, blocks)
        try:
            with pytest.raises(RuntimeError, match="of 256 tokens was answered with 0"):
                engine.run(1)
            engine.store(span.tobytes() for span in payload)
            gpu.launches.clear()
            engine.run(2)
            engine.calls(1)()
        finally:
            engine.close()
    # Both read what is there once.
    assert gpu.launches == [("restore", Memory.HOST, 1, 2), ("restore", Memory.HOST, 1, 1)]
    for request in blocks:
        for layer in range(LAYERS):
            for plane in (0, 1):
                got = pages.views[layer][plane][request].transpose(1, 0, 2, 3)
                wanted = payload[:, layer, plane].transpose(1, 0, 2, 3)
                assert (got.reshape(-1) == wanted.reshape(-1)).all()
    assert not any(gpu.driver.ledger().values())
