"""Engines, spans and requests for tests of the kernels that move them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st
from paged_reference import Engine, Stored

from kmesh.kernels.plan import Load, Request
from kmesh.kernels.rotary import Rotary

ROWS = [4, 12, 32, 64, 80, 128, 160, 256, 512]


@dataclass
class Case:
    """Sizes of an engine, its spans (kept alive) and what is to be loaded."""

    sizes: dict[str, Any]
    spans: list[Stored]
    loads: list[Load]
    blocks: int

    def engine(self) -> Engine:
        return Engine.make(**self.sizes, blocks=self.blocks)


def _range(draw: st.DrawFn, size: int) -> tuple[int, int]:
    begin = draw(st.integers(0, size - 1))
    return begin, draw(st.integers(begin + 1, size))


@st.composite
def engines(draw: st.DrawFn, rows: list[int] = ROWS) -> dict[str, Any]:
    return {
        "order": draw(st.sampled_from(["HND", "NHD", "planes"])),
        "layers": draw(st.integers(1, 3)),
        "heads": draw(st.integers(1, 4)),
        "slots": draw(st.sampled_from([1, 3, 16, 32, 128])),
        "row": draw(st.sampled_from(rows)),
        "gap": draw(st.sampled_from([0, 0, 0, 4, 16])),
    }


@st.composite
def cases(
    draw: st.DrawFn, deltas: bool = False, rows: list[int] = ROWS, whole: bool = False
) -> Case:
    """Up to two loads, each of up to three spans for up to three requests; pages never collide.

    Args:
        whole: mostly whole spans that begin where pages begin, so that they are moved in units.
    """
    sizes = draw(engines(rows))
    slots, spans, loads, used = sizes["slots"], [], [], 0
    for _ in range(draw(st.integers(1, 2))):
        position, parts = draw(st.integers(0, 40)), []
        if whole:
            position = position // 8 * slots
        for _ in range(draw(st.integers(1, 3))):
            tokens = draw(st.sampled_from([1, 5, 16, 48, 64, 256]))
            want: dict[str, int] = {"position": position}
            if whole and draw(st.integers(0, 4)):
                heads, layers = sizes["heads"], draw(st.integers(1, sizes["layers"]))
                span = Stored.make(draw(st.integers(0, 99)), layers, heads, tokens, sizes["row"])
                want["dst_layer_begin"] = draw(st.integers(0, sizes["layers"] - layers))
                spans.append(span)
                parts.append(span.part(**want))
                position += tokens if tokens % slots == 0 else slots * (tokens // slots + 1)
                continue
            want["token_begin"], want["token_end"] = 0, tokens
            if draw(st.booleans()):
                want["token_begin"], want["token_end"] = _range(draw, tokens)
            for kind in ("head", "layer"):
                own = sizes[kind + "s"]
                want[f"src_{kind}s"] = stored = draw(st.integers(1, 4))
                begin, end = _range(draw, stored) if draw(st.booleans()) else (0, stored)
                count = min(end - begin, own)
                want[f"src_{kind}_begin"], want[kind + "s"] = begin, count
                want[f"dst_{kind}_begin"] = draw(st.integers(0, own - count))
            span = Stored.make(
                draw(st.integers(0, 99)),
                want["src_layers"],
                want["src_heads"],
                tokens,
                sizes["row"],
            )
            spans.append(span)
            parts.append(span.part(**want))
            position += tokens
        requests = []
        for _ in range(draw(st.integers(1, 3))):
            shift = draw(st.sampled_from([0, 0, slots if whole else 7, -parts[0].position]))
            blocks = -(-(position + max(shift, 0)) // slots)
            ids = np.random.default_rng(draw(st.integers(0, 99))).permutation(blocks) + used
            used += blocks
            by_slot = draw(st.integers(0, 9)) == 0 if whole else draw(st.booleans())
            if by_slot:
                at = np.arange(blocks * slots)
                ids = ids[at // slots] * slots + at % slots
            delta = draw(st.sampled_from([0, 1, -3, 4096])) if deltas else 0
            requests.append(Request(ids.astype(np.int64), by_slot, shift, delta))
        loads.append(Load.of(parts, requests))
    return Case(sizes, spans, loads, used + draw(st.integers(0, 3)))


def rotary(dtype: str, row: int, *, interleaved: bool = False, part: float = 1.0) -> Rotary:
    dim = int(row // (4 if dtype == "float32" else 2) * part) // 2 * 2
    return Rotary.from_parameters(
        {"rope_theta": 1e6}, head_dim=dim, interleaved=interleaved, dtype=dtype
    )
