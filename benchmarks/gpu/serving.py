"""Daemons beside the benchmark, and what engines on its GPU pay them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks.gpu.hits import Hits
from benchmarks.gpu.rig import LARGE
from benchmarks.gpu.rows import Bench
from benchmarks.spand import serve
from kmesh.keys import Namespace
from kmesh_vllm.gpu import CudaGpu

NAMESPACE = Namespace(
    "bench", "w", "bfloat16",
    layers=LARGE.layers, kv_heads=LARGE.heads, head_dim=LARGE.head_dim,
)  # fmt: skip


@contextmanager
def hitting(bench: Bench) -> Iterator[Hits]:
    """A connector for the benchmark's pages, and a daemon that holds the benchmark's spans."""
    with serve(host_memory="1GiB", staging_memory="512MiB") as spand:
        blocks = [request.pages for request in bench.pages.requests]
        layout, gpu = bench.pages.layout, CudaGpu(0, compute=lambda: 0)
        engine = Hits(spand, gpu, NAMESPACE, layout, LARGE.tokens, blocks)
        try:
            engine.store(span.tobytes() for span in bench.slab.payload())
            yield engine
        finally:
            engine.close()
