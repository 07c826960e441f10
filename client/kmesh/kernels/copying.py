"""Payloads from host memory by the copy engine: into buffers on the GPU, chunk by chunk.

While one chunk is scattered the next one is on the bus. The buffers belong to the device's
restores in the order in which they were started.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from kmesh.kernels.device import Device
from kmesh.kernels.plan import Load

_TO_DEVICE = 1
_NO_TIMING = 2
_NON_BLOCKING = 1
_LAST_BYTES = 4 << 20


def chunks_of(lengths: Sequence[int], room: int, smallest: int) -> list[tuple[int, int]]:
    """Half-open ranges of parts that fit ``room`` together; a larger part is alone in its own.

    Towards the end they get smaller, down to ``smallest`` bytes: what has come last is scattered
    when the bus has nothing left to bring.
    """
    found: list[tuple[int, int]] = []
    left = sum(lengths)
    begin = filled = 0
    target = min(room, max(left // 2, smallest))
    for i, length in enumerate(lengths):
        taken = _whole(length)
        if i > begin and filled + taken > target:
            found.append((begin, i))
            left -= filled
            begin, filled = i, 0
            target = min(room, max(left // 2, smallest))
        filled += taken
    if len(lengths) > begin:
        found.append((begin, len(lengths)))
    return found


def runs_of(addresses: Sequence[int], lengths: Sequence[int]) -> list[tuple[int, int, int]]:
    """(offset, address, bytes) of copies that bring payloads to a buffer one behind the other.

    Neighbours in memory that stay neighbours are one copy.
    """
    found: list[tuple[int, int, int]] = []
    offset = 0
    for address, length in zip(addresses, lengths, strict=True):
        if found and found[-1][1] + offset - found[-1][0] == address:
            begin, first, _ = found[-1]
            found[-1] = (begin, first, offset + length - begin)
        else:
            found.append((offset, address, length))
        offset += _whole(length)
    return found


def _whole(length: int) -> int:
    return -(-length // 256) * 256


class Copier:
    """The buffers, and the stream that fills them.

    Args:
        chunk_bytes: of a buffer; it grows to the largest payload.
        chunks: buffers.
    """

    def __init__(self, device: Device, chunk_bytes: int, chunks: int) -> None:
        self._runtime = runtime = device.runtime
        self.room = chunk_bytes
        self.stream = runtime.streamCreateWithFlags(_NON_BLOCKING)
        self.copied = [runtime.eventCreateWithFlags(_NO_TIMING) for _ in range(chunks)]
        self.scattered = [runtime.eventCreateWithFlags(_NO_TIMING) for _ in range(chunks)]
        self.buffers = [runtime.malloc(chunk_bytes) for _ in range(chunks)]
        self.next = 0

    def start(self, loads: Sequence[Load]) -> Trip:
        """Starts to copy the payloads of loads, as far as there are buffers."""
        largest = max((int(load.records["length"].max(initial=0)) for load in loads), default=0)
        if largest > self.room:
            self._grow(_whole(largest))
        return Trip(self, self._runtime, loads)

    def _grow(self, room: int) -> None:
        self._runtime.deviceSynchronize()
        for buffer in self.buffers:
            self._runtime.free(buffer)
        self.buffers = [self._runtime.malloc(room) for _ in self.buffers]
        self.room = room

    def close(self) -> None:
        """Waits and frees."""
        self._runtime.streamSynchronize(self.stream)
        for event in (*self.copied, *self.scattered):
            self._runtime.eventDestroy(event)
        for buffer in self.buffers:
            self._runtime.free(buffer)
        self._runtime.streamDestroy(self.stream)
        self.buffers.clear()


class Trip:
    """The payloads of one restore on their way. Loads must need one read each.

    Attributes:
        loads: the same loads, with the addresses that the payloads have in the buffers.
    """

    def __init__(self, copier: Copier, runtime: Any, loads: Sequence[Load]) -> None:
        self._copier = copier
        self._runtime = runtime
        self.loads = [Load(load.records.copy(), load.requests) for load in loads]
        lengths = [n for load in loads for n in load.records["length"].tolist()]
        addresses = [a for load in loads for a in load.records["address"].tolist()]
        self._chunks = chunks_of(lengths, copier.room, _LAST_BYTES)
        self._copies = [runs_of(addresses[b:e], lengths[b:e]) for b, e in self._chunks]
        self._first = copier.next
        self._started = 0
        for _ in range(min(len(copier.buffers), len(self._chunks))):
            self._copy()
        moved = [0] * len(lengths)
        for number, (begin, end) in enumerate(self._chunks):
            offset = copier.buffers[self._buffer(number)]
            for i in range(begin, end):
                moved[i] = offset
                offset += _whole(lengths[i])
        at = 0
        for load in self.loads:
            load.records["address"] = moved[at : at + len(load.records)]
            at += len(load.records)

    def chunks(self, stream: int) -> Iterator[tuple[int, int]]:
        """Parts of the job whose payloads are there when the stream gets to them.

        What is started on the stream before the next one is asked for may read them.
        """
        copier, runtime = self._copier, self._runtime
        for number, chunk in enumerate(self._chunks):
            if number >= self._started:
                self._copy()
            buffer = self._buffer(number)
            runtime.streamWaitEvent(stream, copier.copied[buffer])
            yield chunk
            runtime.eventRecord(copier.scattered[buffer], stream)
            if self._started < len(self._chunks):
                self._copy()

    def end(self, stream: int) -> None:
        """Nothing more will be read: gives the buffers to the next restore."""
        runtime = self._runtime
        for number in range(self._started):
            if number + len(self._copier.buffers) >= self._started:
                event = self._copier.scattered[self._buffer(number)]
                runtime.eventRecord(event, stream)
        self._copier.next = self._first + self._started

    def _buffer(self, number: int) -> int:
        return (self._first + number) % len(self._copier.buffers)

    def _copy(self) -> None:
        copier, runtime = self._copier, self._runtime
        number = self._started
        buffer = self._buffer(number)
        runtime.streamWaitEvent(copier.stream, copier.scattered[buffer])
        for offset, address, size in self._copies[number]:
            runtime.memcpyAsync(
                copier.buffers[buffer] + offset, address, size, _TO_DEVICE, copier.stream
            )
        runtime.eventRecord(copier.copied[buffer], copier.stream)
        self._started += 1
