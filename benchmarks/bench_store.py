"""From a session's staging into the slab, through the store worker, against one memcpy."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator

import numpy as np

from benchmarks.bench_kernels import ELEMENT, HEAD_DIM, HEADS, LAYERS, aligned
from benchmarks.results import Row
from benchmarks.spand import serve
from benchmarks.timing import seconds
from kmesh.calls import ReserveBatch
from kmesh.keys import Namespace
from kmesh.layout import SPAN_TOKENS, Shard, SpanGeometry
from kmesh.session import Session

NAMESPACE = Namespace("bench", "w", "bfloat16", LAYERS, HEADS, HEAD_DIM)
SHARD = Shard(0, LAYERS, 0, HEADS)
LENGTH = SpanGeometry(LAYERS, HEADS, HEAD_DIM, ELEMENT).payload_bytes(SPAN_TOKENS)
SPANS = 16
SIZE = SPANS * LENGTH


class Stores:
    """Stores the staging's bytes under new keys each time."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._numbers = itertools.count()
        self._digest = NAMESPACE.digest()
        self._offsets = [i * LENGTH for i in range(SPANS)]

    def commit(self) -> float:
        """Seconds from Commit to its answer; SPANS spans are visible then."""
        keys = b"".join(next(self._numbers).to_bytes(32, "little") for _ in range(SPANS))
        tokens, start = [SPAN_TOKENS] * SPANS, [i * SPAN_TOKENS for i in range(SPANS)]
        batch = ReserveBatch(self._digest, SHARD, keys, tokens, start, [LENGTH] * SPANS)
        reserved = self._session.reserve(batch)
        begin = time.perf_counter()
        reasons = self._session.commit(reserved.reservation, self._offsets)
        took = time.perf_counter() - begin
        if any(reserved.reason) or any(reasons):
            raise RuntimeError(f"a span was not stored: {reserved.reason}, {reasons}")
        return took


def run(quick: bool) -> Iterator[Row]:
    """Rows of this file."""
    rounds = 8 if quick else 40
    with (
        serve(host_memory="512MiB", staging_memory="128MiB", copy_threads=1) as spand,
        spand.connect() as session,
    ):
        staging = np.frombuffer(session.staging(SIZE).view(), dtype=np.uint8)[:SIZE]
        staging[:] = np.random.default_rng(1).integers(0, 256, SIZE, dtype=np.uint8)
        flat = aligned(SIZE)
        stores = Stores(session)
        # The pool is filled once and again, so that eviction and old pages are part of it.
        for _ in range(2 * (512 << 20) // SIZE):
            stores.commit()
        np.copyto(flat, staging)
        copied, stored = [], []
        for number in range(rounds):
            for kind in ("copy", "store") if number % 2 else ("store", "copy"):
                if kind == "copy":
                    copied.append(seconds(lambda: np.copyto(flat, staging)))
                else:
                    stored.append(stores.commit())
    rate = SIZE / sorted(stored)[rounds // 2] / 1e9
    what = (
        f"Commit to its answer: {SPANS} spans, {SIZE / 1e6:.0f} MB,"
        f" copied and summed by one thread; {rate:.1f} GB/s"
    )
    samples = {"memcpy": copied, "store": stored}
    yield Row("store_copy", "ratio", "median of a/b", samples, what)
