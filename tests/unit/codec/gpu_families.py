"""Families in a device's memory, for tests of the encoder that works there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from codec_cases import Family, Geometry, recovered
from hypothesis import strategies as st

from kmesh.codec import Base, Encoder, Form, decode
from kmesh.codec.gpu import GpuBytes, GpuEncoded, GpuEncoder, GpuSegment

ELEMENTS = ["bfloat16", "float16", "float32"]


class Placed:
    """A family's bytes on a device.

    Args:
        off: bytes from each allocation's beginning: 4, so that nothing is aligned to 16.
    """

    def __init__(self, device: Any, family: Family, off: int = 0) -> None:
        self._device, self._off = device, off
        self._held: list[int] = []
        self.base = Base(
            GpuSegment(one.description, self.put(one.rows), digest=one.digest, root=one.root)
            for one in family.base
        )
        self.payload = self.put(family.state)

    def put(self, data: Any) -> GpuBytes:
        flat = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        with self._device as device:
            address = device.runtime.malloc(flat.nbytes + self._off)
            self._held.append(address)
            device.runtime.memcpy(address + self._off, flat.ctypes.data, flat.nbytes, 4)
        return GpuBytes(address + self._off, flat.nbytes)

    def free(self) -> None:
        with self._device as device:
            for address in self._held:
                device.runtime.free(address)


@contextmanager
def encoded(
    device: Any, family: Family, *, stream: int = 0, off: int = 0, **more: Any
) -> Iterator[GpuEncoded]:
    """Its member's recipe, made on the device."""
    placed = Placed(device, family, off)
    try:
        encoder = GpuEncoder(placed.base, family.rotary, device=device)
        with encoder.encode(
            family.member, placed.payload, family.provenance, stream, **more
        ) as found:
            yield found
    finally:
        placed.free()


def same(device: Any, family: Family, **more: Any) -> GpuEncoded:
    """The member's recipe, which is the CPU's; the member comes out of it."""
    expected = Encoder(family.base, family.rotary, form=Form.ADDRESSABLE).encode(
        family.member, family.state, family.provenance
    )
    with encoded(device, family, **more) as found:
        assert found.data == expected.data
        assert found.refused == expected.refused
        assert found.depends == expected.depends
        assert found.size == len(expected.data)
    assert decode(found.data, family.base).tobytes() == family.state.tobytes()
    return found


def nearly(family: Family, share: float, most: int, seed: int) -> Family:
    """A share of all tokens of each run has up to so many other elements."""
    rng = np.random.default_rng(seed)
    state = family.state.reshape(-1, *family.state.shape[2:])
    for run in state:
        heads, tokens, dim = run.shape
        for token in np.flatnonzero(rng.random(tokens) < share):
            at = rng.integers(0, heads * dim, rng.integers(1, most + 1))
            run[at // dim, token, at % dim] ^= rng.integers(1, 1 << 15, dtype=run.dtype)
    return family


@st.composite
def families(draw: st.DrawFn) -> Family:
    """Any that the kernels serve."""
    dtype = draw(st.sampled_from(ELEMENTS))
    geometry = Geometry(
        dtype=dtype,
        layers=draw(st.integers(1, 3)),
        heads=draw(st.integers(1, 3)),
        head_dim=draw(st.sampled_from([2, 4, 6, 8, 10, 12, 16, 24, 64])),
    )
    pairs = draw(st.integers(1, geometry.head_dim // 2))
    rotary = geometry.rotary(interleaved=draw(st.booleans()), pairs=pairs)
    segments: Sequence[int] = draw(st.lists(st.integers(1, 70), min_size=1, max_size=3))
    own = [max(draw(st.integers(0, 30)), 0) for _ in range(len(segments) + 1)]
    seed = draw(st.integers(0, 2**32))
    # Where the member's first segment has its own frame: what lies there is not turned.
    position = draw(st.sampled_from([100, 0, max(7 - own[0], 0)]))
    family = recovered(
        geometry, seed, segments=segments, own=own, rotary=rotary, position=position,
        anew=draw(st.sampled_from([0.0, 0.0, 0.1, 0.9])),
    )  # fmt: skip
    if draw(st.booleans()):
        nearly(family, draw(st.sampled_from([0.05, 0.5, 1.0])), draw(st.integers(1, 9)), seed)
    return family
