"""What a span costs the daemon: a real core, catalog and index that hold a million of them."""

from __future__ import annotations

import gc
import os
import tracemalloc
from collections.abc import Iterator
from typing import cast

from benchmarks.bench_core import filled
from benchmarks.results import Row
from benchmarks.spand import pss
from kmesh.index import IndexWriter, capacity_for, index_size
from kmesh.keys import KEY_BYTES
from kmesh.layout import TILE_BYTES
from kmesh.mapping import Mapping
from kmesh_spand.control.applier import Applier
from kmesh_spand.control.staging import StagingPool
from kmesh_spand.control.storeworker import StoreWorker
from kmesh_spand.core import effects
from kmesh_spand.core.record import RECORD_BYTES
from kmesh_spand.core.tenants import OWNER_BYTES
from kmesh_spand.memory import make_memfd


class NoWorker:
    """In place of the store worker: there is no payload to copy."""

    def copy(self, copy: effects.Copy) -> None:
        """Nothing: whoever fills the core answers for it."""


def mapped(name: str, size: int) -> Mapping:
    """A mapping of a new memfd, as the daemon makes them."""
    fd = make_memfd(name, size)
    try:
        return Mapping(fd, size, writable=True)
    finally:
        os.close(fd)


def run(quick: bool) -> Iterator[Row]:
    """Rows of this file."""
    spans = 50_000 if quick else 1_000_000
    catalog = mapped("catalog", -(-spans * RECORD_BYTES // 4096) * 4096)
    index = mapped("index", index_size(capacity_for(spans)))
    writer = IndexWriter(index, 1)
    applier = Applier(
        catalog.view(),
        memoryview(bytearray(OWNER_BYTES)),
        {0: writer},
        cast(StoreWorker, NoWorker()),
        cast(StagingPool, None),
        lambda reply: None,
        lambda event: None,
    )
    gc.collect()
    before = pss([os.getpid()])
    core = filled(spans, applier.apply)
    gc.collect()
    after = pss([os.getpid()])
    if (writer.live, core.views.status().spans) != (spans, spans):
        raise RuntimeError(f"{writer.live} of {spans} spans are in the index")
    grown = {name: after[name] - before.get(name, 0) for name in after}
    shared = sum(size for name, size in grown.items() if name.startswith("kmesh-"))
    core_bytes = sum(grown.values()) - shared
    what = f"{spans:,} spans of one tile ({TILE_BYTES >> 10} KiB) under keys of {KEY_BYTES} B"
    yield Row(
        "span_catalog_index",
        "B",
        "sum a / sum b",
        {"bytes": [shared], "spans": [spans]},
        f"{what}; proportional set size",
    )
    yield Row(
        "span_all",
        "B",
        "sum a / sum b",
        {"bytes": [shared + core_bytes], "spans": [spans]},
        "the core's own columns with it",
    )
    del core
    gc.collect()
    few = spans // 10
    tracemalloc.start()
    core = filled(few)
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    del core
    yield Row(
        "span_core_traced",
        "B",
        "sum a / sum b",
        {"bytes": [used], "spans": [few]},
        f"the core alone, {few:,} spans, as tracemalloc counts",
    )
