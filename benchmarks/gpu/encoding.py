"""Members of families in the GPU's memory, encoded there: the call until the recipe is verified."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import cupy
import numpy as np

from benchmarks.gpu.rig import LARGE, new_stream, runtime, until_done
from benchmarks.results import Row
from kmesh import _host
from kmesh.codec import Base, Encoder, Provenance, Segment, SpanDescription
from kmesh.codec.gpu import GpuBytes, GpuEncoder, GpuSegment
from kmesh.kernels.rotary import ELEMENTS, Rotary, turns
from kmesh.layout import Shard

#: Of each prompt of 512 tokens 416 are shared, as in the experiment of docs/families.md.
_PROMPT, _SHARED = 512, 416
_WARM = 3


@dataclass
class Case:
    """A member, the segment that it was recovered from, and both on the GPU."""

    base: Base
    on_gpu: Base
    rotary: Rotary
    member: SpanDescription
    state: Any
    told: list[Provenance]
    kept: list[Any]

    @classmethod
    def make(cls, position: int, seed: int, own_frame: bool) -> Case:
        """A member of as many tokens as ``LARGE`` has; K turned, or in the segment's frame.

        In the segment's frame own tokens are in the same places of both, and other ones.
        """
        s, rng = LARGE, np.random.default_rng(seed)
        shard = Shard(0, s.layers, 0, s.heads)
        step = _PROMPT if own_frame else _SHARED
        count = s.tokens // _PROMPT * step
        shape = (s.layers, 2, s.heads)
        source = rng.integers(0, 1 << 16, (*shape, count, s.head_dim), dtype=np.uint16)
        state = rng.integers(0, 1 << 16, (*shape, s.tokens, s.head_dim), dtype=np.uint16)
        rotary = Rotary.from_parameters(
            {"rope_theta": 1e6}, head_dim=s.head_dim, interleaved=False, dtype="bfloat16"
        )

        def describe(key: bytes, tokens: int, at: int) -> SpanDescription:
            return SpanDescription(
                key * 32, b"n" * 32, "bfloat16", shard, s.head_dim, tokens, at
            )  # fmt: skip

        segment, member = describe(b"s", count, 0), describe(b"m", s.tokens, position)
        told, own = [], _PROMPT - _SHARED
        for number in range(s.tokens // _PROMPT):
            token = number * _PROMPT + own
            at = number * step + (own if own_frame else 0)
            delta = position + token - at
            part = np.ascontiguousarray(source[..., at : at + _SHARED, :])
            if delta:
                keys = np.ascontiguousarray(part[:, 0])
                out = np.empty_like(keys)
                _host.turn_rows(
                    out.view(np.uint8).reshape(-1).data, keys.view(np.uint8).reshape(-1).data,
                    s.row_bytes, turns(rotary, delta), False, ELEMENTS["bfloat16"],
                )  # fmt: skip
                part[:, 0] = out
            state[..., token : token + _SHARED, :] = part
            told.append(Provenance(token, _SHARED, segment.key, at, delta))
        kept = [cupy.asarray(one) for one in (source, state)]
        cpu = Segment(segment, source)
        there = GpuBytes(kept[0].data.ptr, kept[0].nbytes)
        on_gpu = Base([GpuSegment(segment, there, digest=cpu.digest, root=cpu.root)])
        return cls(Base([cpu]), on_gpu, rotary, member, state, told, kept)

    def encode(self, encoder: GpuEncoder, stream: int, room: Any) -> Callable[[], None]:
        """Encodes into the same memory, from the call until all of it was compared."""
        payload = GpuBytes(self.kept[1].data.ptr, self.kept[1].nbytes)

        def call() -> None:
            encoder.encode(self.member, payload, self.told, stream, place=lambda _: room.data.ptr)

        return call

    def checked(self, call: Callable[[], None], room: Any) -> str:
        """Runs it once, and compares the recipe with the one that the CPU makes."""
        expected = Encoder(self.base, self.rotary).encode(self.member, self.state, self.told).data
        room.fill(0xEE)
        runtime.deviceSynchronize()
        call()
        if room[: len(expected)].get().tobytes() != expected:
            raise RuntimeError("the recipe is not the CPU's")
        return f"a recipe of {len(expected) / 1e6:.1f} MB, which is the CPU's"


def encode(bench: Any) -> Iterator[Row]:
    """GB/s of dense input, verification included."""
    size, here = LARGE.bytes, bench.scratch.data.ptr
    room = cupy.empty(size, dtype=cupy.uint8)
    with new_stream() as stream:

        def start() -> None:
            runtime.memcpyAsync(here + size, here, size, 3, stream)

        copy = until_done(start, stream)
        for name, position, own_frame in (("turned", 1000, False), ("same_frame", 0, True)):
            case = Case.make(position, 1, own_frame)
            encoder = GpuEncoder(case.on_gpu, case.rotary)
            call = case.encode(encoder, stream, room)
            note = f"{size / 1e6:.0f} MB, one call; {case.checked(call, room)}"
            taken = bench.in_turn({"copy": copy, "encode": call})
            rates = {"encode": [size / one / 1e9 for one in taken["encode"]]}
            yield Row(f"encode_{name}", "GB/s", "median", rates, note)
            yield Row(f"encode_{name}_copy", "ratio", "median of a/b", taken, "a device copy")
            alone = [
                size / one / 1e9 for one in _kernels(encoder, call, start, stream, bench.rounds)
            ]
            note = "the kernels alone, queued behind a copy: from the first to the last one's end"
            yield Row(f"encode_{name}_device", "GB/s", "median", {"kernels": alone}, note)
            encoder.close()


def _kernels(
    encoder: GpuEncoder,
    call: Callable[[], None],
    ahead: Callable[[], None],
    stream: int,
    rounds: int,
) -> list[float]:
    """Seconds on the device from the first kernel of a call to its last one's end.

    Args:
        ahead: starts what takes the stream longer than the host takes to start the kernels, so
            that none of them waits for the host.
    """
    device = encoder._device
    launch, events = device.launch, [runtime.eventCreate() for _ in range(2)]
    names: list[str] = []

    def timed(program: str, name: str, *more: Any) -> None:
        if not names:
            ahead()
            runtime.eventRecord(events[0], stream)
        names.append(name)
        launch(program, name, *more)
        runtime.eventRecord(events[1], stream)

    device.launch = timed  # type: ignore[method-assign]
    taken = []
    for _ in range(_WARM + rounds):
        names.clear()
        call()
        taken.append(runtime.eventElapsedTime(*events) / 1e3)
        if names != ["kmesh_encode_gather_16", "kmesh_encode_verify_16"]:
            raise RuntimeError(f"{names} were started")
    device.launch = launch  # type: ignore[method-assign]
    for event in events:
        runtime.eventDestroy(event)
    return taken[_WARM:]
