"""Payloads from host memory by the copy engine: into buffers on the GPU, chunk by chunk.

While one chunk is scattered the next one is on the bus. The buffers belong to the device's
restores in the order in which they were started.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from kmesh.kernels.device import Device
from kmesh.kernels.plan import Load

logger = logging.getLogger(__name__)

#: By what the addresses are: memory of the host may be CUDA's own or registered.
_BY_ADDRESS = 4
_OUT_OF_MEMORY = 2
_NO_TIMING = 2
_NON_BLOCKING = 1
_LAST_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Chunk:
    """Parts that are copied together: half-open, with the copies (offset, address, bytes)."""

    begin: int
    end: int
    copies: list[tuple[int, int, int]]
    offsets: list[int]


def chunks_of(
    addresses: Sequence[int], lengths: Sequence[int], room: int, smallest: int
) -> Iterator[Chunk]:
    """Payloads in chunks that fit ``room``; none may be larger.

    Towards the end they get smaller, down to ``smallest`` bytes: what has come last is scattered
    when the bus has nothing left to bring. Neighbours in memory are one copy.
    """
    left, begin = sum(lengths), 0
    while begin < len(lengths):
        target = min(room, max(left // 2, smallest))
        copies: list[tuple[int, int, int]] = []
        offsets: list[int] = []
        offset, end = 0, begin
        while end < len(lengths) and (end == begin or offset + lengths[end] <= target):
            address, length = addresses[end], lengths[end]
            if copies and copies[-1][1] + offset - copies[-1][0] == address:
                copies[-1] = (*copies[-1][:2], offset + length - copies[-1][0])
            else:
                copies.append((offset, address, length))
            offsets.append(offset)
            offset += _whole(length)
            left -= length
            end += 1
        yield Chunk(begin, end, copies, offsets)
        begin = end


def _whole(length: int) -> int:
    return -(-length // 256) * 256


class Copier:
    """The buffers, and the stream that fills them.

    Args:
        chunk_bytes: of a buffer.
        chunks: buffers.

    Raises:
        RuntimeError: the GPU has no memory for all of it; nothing is held then.
    """

    def __init__(self, device: Device, chunk_bytes: int, chunks: int) -> None:
        self._runtime = runtime = device.runtime
        self.room = chunk_bytes
        self.copied: list[int] = []
        self.scattered: list[int] = []
        self.buffers: list[int] = []
        self.next = 0
        with ExitStack() as undo:
            self.stream = runtime.streamCreateWithFlags(_NON_BLOCKING)
            undo.callback(runtime.streamDestroy, self.stream)
            for _ in range(chunks):
                self.buffers.append(runtime.malloc(chunk_bytes))
                undo.callback(runtime.free, self.buffers[-1])
                for events in (self.copied, self.scattered):
                    events.append(runtime.eventCreateWithFlags(_NO_TIMING))
                    undo.callback(runtime.eventDestroy, events[-1])
            self._held = undo.pop_all()

    def start(self, loads: Sequence[Load]) -> Trip:
        """Starts to copy the payloads of loads, as far as there are buffers."""
        try:
            return Trip(self, self._runtime, loads)
        except BaseException:
            self.wait()
            raise

    def wait(self) -> None:
        """Returns when no payload is read any more."""
        self._runtime.streamSynchronize(self.stream)

    def close(self) -> None:
        """Waits and frees."""
        with self._held:
            self.wait()
        self.buffers.clear()


class Buffers:
    """A copier that is made when it is first asked for; none, once the GPU had no memory for it.

    Args: as ``Copier``'s.
    """

    def __init__(self, device: Device, chunk_bytes: int, chunks: int) -> None:
        self._device, self._chunk_bytes, self._chunks = device, chunk_bytes, chunks
        self._copier: Copier | None = None
        self._none = False

    def get(self) -> Copier | None:
        """The copier. Errors that are not for want of memory are raised."""
        if self._copier is None and not self._none:
            try:
                self._copier = Copier(self._device, self._chunk_bytes, self._chunks)
            except RuntimeError as lacking:
                if getattr(lacking, "status", None) != _OUT_OF_MEMORY:
                    raise
                self._none = True
                logger.warning(
                    "no memory on GPU %d for %d buffers of %d bytes: payloads of host memory are "
                    "restored by the kernel alone",
                    self._device.ordinal, self._chunks, self._chunk_bytes,
                )  # fmt: skip
        return self._copier

    def close(self) -> None:
        """Waits and frees."""
        if self._copier:
            self._copier.close()


class Trip:
    """The payloads of one restore on their way. Loads must need one read each, and fit a buffer.

    Attributes:
        loads: the same loads, with the addresses that the payloads have in the buffers.
    """

    def __init__(self, copier: Copier, runtime: Any, loads: Sequence[Load]) -> None:
        self._copier = copier
        self._runtime = runtime
        lengths = [n for load in loads for n in load.records["length"].tolist()]
        addresses = [a for load in loads for a in load.records["address"].tolist()]
        self._chunks: list[Chunk] = []
        self._first = copier.next
        self._started = 0
        moved: list[int] = []
        for chunk in chunks_of(addresses, lengths, copier.room, _LAST_BYTES):
            self._chunks.append(chunk)
            # The bus is at work while the rest is thought about.
            if len(self._chunks) <= len(copier.buffers):
                self._copy()
            buffer = copier.buffers[self._buffer(len(self._chunks) - 1)]
            moved += [buffer + offset for offset in chunk.offsets]
        self.loads = [Load(load.records.copy(), load.requests) for load in loads]
        at = 0
        for load in self.loads:
            load.records["address"] = moved[at : at + len(load.records)]
            at += len(load.records)

    @property
    def count(self) -> int:
        """Of chunks; there is one at least."""
        return len(self._chunks)

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
            yield chunk.begin, chunk.end
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
        for offset, address, size in self._chunks[number].copies:
            runtime.memcpyAsync(
                copier.buffers[buffer] + offset, address, size, _BY_ADDRESS, copier.stream
            )
        runtime.eventRecord(copier.copied[buffer], copier.stream)
        self._started += 1
