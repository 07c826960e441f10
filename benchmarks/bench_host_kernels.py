"""Host kernels against what they could be replaced by, in one run, one thread each.

copy_with_sums against numpy's copyto (memcpy); verify alone; scatter (which verifies) and gather
against torch's index_copy_ and index_select of the same bytes, whole blocks at a time.

    python benchmarks/bench_host_kernels.py [--json] [--tokens 4096] [--rounds 7]

Figures are GB/s of payload, median of the rounds, and ratios to the peer. Label: functional;
they say something only about the machine that ran them.
"""

from __future__ import annotations

import argparse
import json
import mmap
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import numpy as np
import torch

from kmesh import _host
from kmesh.kernels.host import PagedLayout, SpanPart, gather, scatter
from kmesh.layout import SPAN_TOKENS, SpanGeometry, tiles

LAYERS, HEADS, HEAD_DIM, ELEMENT = 28, 4, 128, 2
#: torch copies wide elements faster than bytes.
PEER_DTYPE = torch.int64


def aligned(size: int) -> np.ndarray:
    """Zeroed bytes that begin on a page, as slabs, staging and KV pages do."""
    return np.frombuffer(mmap.mmap(-1, size), dtype=np.uint8)


@dataclass
class Result:
    """``ratio`` is the peer's time over ours: above 1, ours is faster."""

    name: str
    gbps: float
    peer: str
    peer_gbps: float
    ratio: float


def compare(
    name: str,
    ours: Callable[[], object],
    peer_name: str,
    peer: Callable[[], object],
    size: int,
    rounds: int,
) -> Result:
    """Alternates the two, so that both see the same noise."""
    times: tuple[list[float], list[float]] = ([], [])
    for warm in (True, *[False] * rounds):
        for taken, call in zip(times, (ours, peer), strict=True):
            begin = time.perf_counter()
            call()
            if not warm:
                taken.append(time.perf_counter() - begin)
    mine, theirs = (statistics.median(t) for t in times)
    return Result(name, size / mine / 1e9, peer_name, size / theirs / 1e9, theirs / mine)


class Paged:
    """Spans in a slab, and pages of an engine in one of two physical layouts."""

    def __init__(self, tokens: int, order: str, block_tokens: int) -> None:
        geometry = SpanGeometry(LAYERS, HEADS, HEAD_DIM, ELEMENT)
        length = geometry.payload_bytes(SPAN_TOKENS)
        row = geometry.row_bytes
        spans = tokens // SPAN_TOKENS
        self.size = spans * length
        self.slab = aligned(self.size)
        self.slab[:] = np.random.default_rng(1).integers(0, 256, self.size, dtype=np.uint8)
        self.sums = np.zeros((spans, tiles(length)), dtype=np.uint64)
        count = tokens // block_tokens
        blocks = list(range(count * 3 // 2))
        random.Random(2).shuffle(blocks)
        self.blocks = blocks[:count]
        # K and V of a token are neighbours, as vLLM packs them.
        block_bytes = HEADS * block_tokens * 2 * row
        self.pages = [
            torch.from_numpy(aligned(len(blocks) * block_bytes))
            .view(PEER_DTYPE)
            .view(len(blocks), -1)
            for _ in range(LAYERS)
        ]
        bases = tuple(page.data_ptr() for page in self.pages)
        heads_first = order == "HND"
        self.layout = PagedLayout(
            k_base=bases,
            v_base=tuple(base + row for base in bases),
            block_stride=block_bytes,
            head_stride=2 * row * (block_tokens if heads_first else 1),
            token_stride=2 * row * (1 if heads_first else HEADS),
            block_tokens=block_tokens,
            num_blocks=len(blocks),
            heads=HEADS,
            row_bytes=row,
        )
        self.parts = []
        for i in range(spans):
            address = self.slab.ctypes.data + i * length
            sums = self.sums[i].ctypes.data
            self.parts.append(
                SpanPart(
                    address=address,
                    sums_address=sums,
                    root=_host.tile_sums(address, length, sums),
                    length=length,
                    tokens=SPAN_TOKENS,
                    token_begin=0,
                    token_end=SPAN_TOKENS,
                    position=i * SPAN_TOKENS,
                    src_heads=HEADS,
                    src_head_begin=0,
                    dst_head_begin=0,
                    heads=HEADS,
                    src_layers=LAYERS,
                    src_layer_begin=0,
                    dst_layer_begin=0,
                    layers=LAYERS,
                )
            )
        self.length = length
        self.index = torch.tensor(self.blocks)
        self.dense = torch.from_numpy(self.slab).view(PEER_DTYPE).view(LAYERS, count, -1)

    def scatter(self) -> None:
        if any(scatter(self.layout, self.parts, self.blocks)):
            raise SystemExit("scatter failed")

    def gather(self) -> None:
        if any(gather(self.layout, self.parts, self.blocks)):
            raise SystemExit("gather failed")

    def verify(self) -> None:
        for part in self.parts:
            if not _host.verify(part.address, part.length, part.sums_address, part.root):
                raise SystemExit("verify failed")

    def index_copy(self) -> None:
        for page, source in zip(self.pages, self.dense, strict=True):
            page.index_copy_(0, self.index, source)

    def index_select(self) -> None:
        for page, target in zip(self.pages, self.dense, strict=True):
            torch.index_select(page, 0, self.index, out=target)


def run(tokens: int, rounds: int) -> list[Result]:
    results = []
    for order, block_tokens in (("HND", 32), ("NHD", 16)):
        paged = Paged(tokens, order, block_tokens)
        if order == "HND":
            other = aligned(paged.size)
            sums = np.zeros(tiles(paged.size), dtype=np.uint64)

            def copy(
                paged: Paged = paged, other: np.ndarray = other, sums: np.ndarray = sums
            ) -> None:
                _host.copy_with_sums(
                    other.ctypes.data, paged.slab.ctypes.data, paged.size, sums.ctypes.data
                )

            def copyto(paged: Paged = paged, other: np.ndarray = other) -> None:
                np.copyto(other, paged.slab)

            results.append(
                compare("copy_with_sums", copy, "numpy.copyto", copyto, paged.size, rounds)
            )
            results.append(
                compare("verify", paged.verify, "numpy.copyto", copyto, paged.size, rounds)
            )
        name = f"{order}, block {block_tokens}"
        results.append(
            compare(
                f"scatter {name}",
                paged.scatter,
                "torch.index_copy_",
                paged.index_copy,
                paged.size,
                rounds,
            )
        )
        results.append(
            compare(
                f"gather {name}",
                paged.gather,
                "torch.index_select",
                paged.index_select,
                paged.size,
                rounds,
            )
        )
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--tokens", type=int, default=4096, help="a multiple of 64")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    torch.set_num_threads(1)
    results = run(args.tokens // SPAN_TOKENS * SPAN_TOKENS, args.rounds)
    if args.json:
        machine = {"machine": platform.machine(), "system": platform.platform()}
        versions = {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": np.__version__,
        }
        shape = {
            "layers": LAYERS,
            "heads": HEADS,
            "head_dim": HEAD_DIM,
            "element_bytes": ELEMENT,
            "tokens": args.tokens,
            "span_tokens": SPAN_TOKENS,
            "rounds": args.rounds,
        }
        print(
            json.dumps(
                {
                    "label": "functional",
                    **machine,
                    **versions,
                    **shape,
                    "results": [asdict(result) for result in results],
                },
                indent=2,
            )
        )
        return 0
    for result in results:
        print(
            f"{result.name:24} {result.gbps:7.2f} GB/s   {result.peer:18} "
            f"{result.peer_gbps:7.2f} GB/s   ratio {result.ratio:5.2f}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
