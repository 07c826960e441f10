"""What the daemon's processes say to each other, over ``SOCK_SEQPACKET`` pairs.

The supervisor makes every pair. A message is one packet; ``Staging``, ``NewWorker``, ``Exported``,
``GpuSlab`` and ``GpuWorker`` of one that was started carry exactly one file descriptor each, the
others none.
"""

from __future__ import annotations

import array
import os
import socket

import msgspec

from kmesh_spand.core.diskfile import SpanFile

MAX_BYTES = 128 * 1024

#: What ``Fallback`` can say, and what it means.
FALLBACKS = {
    "hugepages": "a slab has small pages, although huge ones were asked for",
    "populate": "the kernel can't fill mapped memory: a slab was filled through its file",
    "encode": "the processor, and not the GPU, encodes spans that are on the GPU",
}


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """One packet."""


class Staging(Message, frozen=True):
    """To the worker: a session's staging, with its fd."""

    session: int
    size: int


class DropStaging(Message, frozen=True):
    """To the worker: forget a session's staging."""

    session: int


class Copy(Message, frozen=True):
    """To the worker: answered by CopyDone or Failed."""

    job: int
    session: int
    staging_offset: int
    slab: int
    offset: int
    length: int
    request: int = 0


class Verify(Message, frozen=True):
    """To the worker: answered by Verified or Failed. ``recipe``: with what the recipe says."""

    job: int
    slab: int
    offset: int
    length: int
    root: int
    recipe: bool = False


class Payload(msgspec.Struct, frozen=True, array_like=True):
    """A stored span; fields as of ``core.effects.Payload``."""

    key: bytes
    slab: int
    offset: int
    length: int
    generation: int
    root: int
    tokens: int
    position: int


class Fact(msgspec.Struct, frozen=True, array_like=True):
    """A span as a recipe names it; fields as of ``core.mirrors.BaseFact``."""

    key: bytes
    generation: int
    root: int
    tokens: int
    position: int


class Encode(Message, frozen=True):
    """To the worker: answered by Encoded, NotEncoded, EncodeSpoiled or Failed. Fields as of the
    core's effect; a piece is (token, tokens, number of the base, token there)."""

    job: int
    span: Payload
    namespace: bytes
    dtype: str
    head_dim: int
    shard: int
    bases: list[Payload]
    frequencies: list[float]
    interleaved: bool
    pieces: list[tuple[int, int, int, int]]


class Encoded(Message, frozen=True):
    """From the worker: a recipe of so many bytes, which it keeps; numbers of bases in it."""

    job: int
    length: int
    used: list[int]


class NotEncoded(Message, frozen=True):
    """From the worker: a payload is not worth a recipe, or can't have one."""

    job: int
    why: str


class EncodeSpoiled(Message, frozen=True):
    """From the worker: bytes are not those that were stored; of the span, or of these bases."""

    job: int
    span: bool
    bases: list[int]


class KeepRecipe(Message, frozen=True):
    """To the worker: write what was encoded; answered by RecipeKept or Failed."""

    job: int
    slab: int
    offset: int
    length: int


class RecipeKept(Message, frozen=True):
    job: int
    root: int


class ForgetRecipe(Message, frozen=True):
    """To the worker: what was encoded is not wanted."""

    job: int


class Densify(Message, frozen=True):
    """To the worker: answered by Densified or Failed. Fields as of the core's effect."""

    job: int
    mirror: Payload
    bases: list[Payload]
    slab: int
    offset: int
    length: int
    root: int


class Densified(Message, frozen=True):
    job: int
    good: bool


class Wipe(Message, frozen=True):
    """To the worker: write zeros over a slab; answered by Wiped or Failed."""

    job: int
    slab: int


class Export(Message, frozen=True):
    """To the worker: make a DMA-BUF of whole pages; answered by Exported or NotExported."""

    job: int
    slab: int
    offset: int
    length: int


class Exported(Message, frozen=True):
    """From the worker: a DMA-BUF, with its fd."""

    job: int


class NotExported(Message, frozen=True):
    """From the worker: why there is none; ``refusal`` is a ``HandleRefusal``."""

    job: int
    refusal: int
    error: str


class Wiped(Message, frozen=True):
    job: int


class CopyDone(Message, frozen=True):
    """``seconds`` that the copy itself took."""

    job: int
    root: int
    seconds: float


class Verified(Message, frozen=True):
    """``length`` and ``root`` of the payload that a good recipe gives, and its base."""

    job: int
    good: bool
    length: int = 0
    root: int = 0
    bases: list[Fact] | None = None


class Failed(Message, frozen=True):
    """From the worker: a job could not be done, although the worker itself is well.

    ``unloadable``: nor can others of its kind, until another process loads what they need.
    """

    job: int
    error: str
    unloadable: bool = False


class Populated(Message, frozen=True):
    """From the worker: so much of a slab's payload area has pages."""

    slab: int
    capacity: int
    hugepages: bool


class PopulateFailed(Message, frozen=True):
    """From the worker: the machine has no memory for the rest of a slab."""

    slab: int
    error: str


class PopulatePaused(Message, frozen=True):
    """From the worker: slabs do not grow for this reason; empty: they do again."""

    reason: str


class Fallback(Message, frozen=True):
    """From a worker: a slab was filled, or a span in it encoded, in a lesser way.

    ``kind`` is one of ``FALLBACKS``.
    """

    kind: str
    slab: int


class DiskScan(Message, frozen=True):
    """To the worker: look through the directory; answered by DiskFound, DiskScanned at the end."""


class DiskFound(Message, frozen=True):
    """From the worker: files whose headers hold, by name."""

    files: tuple[tuple[int, SpanFile], ...]


class DiskScanned(Message, frozen=True):
    """From the worker: that was all.

    ``removed`` files were none; ``direct``: they are read and written past the page cache;
    ``error``: why none can be written, or empty.
    """

    removed: int
    direct: bool
    error: str


class DiskWrite(Message, frozen=True):
    """To the worker: a payload to a file; answered by DiskWritten or DiskFailed."""

    job: int
    slab: int
    offset: int
    span: SpanFile


class DiskWritten(Message, frozen=True):
    job: int
    name: int
    seconds: float


class DiskRead(Message, frozen=True):
    """To the worker: a file into a range; answered by DiskTaken or DiskFailed."""

    job: int
    name: int
    slab: int
    offset: int
    span: SpanFile


class DiskTaken(Message, frozen=True):
    job: int
    seconds: float


class DiskRemove(Message, frozen=True):
    """To the worker: answered by DiskRemoved."""

    job: int
    name: int


class DiskRemoved(Message, frozen=True):
    job: int
    ok: bool


class DiskFailed(Message, frozen=True):
    """From the worker: ``trouble`` is a ``codes.Trouble``."""

    job: int
    trouble: int
    error: str


class GpuSlab(Message, frozen=True):
    """From a device worker, and on to control: GPU memory was made, with its fd."""

    slab: int
    size: int


class GpuState(Message, frozen=True):
    """From a device worker now and then, and on to control: how its GPU is.

    ``gpu`` counts the settings' GPUs; ``ready``: all slabs are there; bytes of the whole GPU;
    ``dma_buf``: its memory can be had as DMA-BUF.
    """

    gpu: int
    device: str
    name: str
    ready: bool
    free: int
    total: int
    dma_buf: bool = False


class GpuFailed(Message, frozen=True):
    """From a device worker, and on to control: it ends. ``setting``: a setting is wrong."""

    gpu: int
    error: str
    setting: bool


class GpuWorker(Message, frozen=True):
    """To control: a device worker was started; its fd is the way to it. Or it has ended: pid 0."""

    gpu: int
    restarts: int
    pid: int


class SlabWanted(Message, frozen=True):
    """From control: it has no file descriptor of that GPU slab; answered by GpuSlab."""

    slab: int


class Beat(Message, frozen=True):
    """To the worker, and back at once: it takes messages."""

    number: int


class NewWorker(Message, frozen=True):
    """To control: a store worker was started; its fd is the way to it, any earlier is dead.

    ``killed_by`` is the signal by which the one before died, or 0.
    """

    restarts: int
    pid: int
    killed_by: int = 0


class Drain(Message, frozen=True):
    """To control: finish what is in flight, then exit."""


class Ready(Message, frozen=True):
    """From control: it serves."""


class Health(Message, frozen=True):
    """From control: why it is not ready, or nothing."""

    text: str


class RestartWorker(Message, frozen=True):
    """From control: the worker does not answer, end it. ``gpu``: a device worker, if not -1."""

    reason: str
    gpu: int = -1


class GivenUp(Message, frozen=True):
    """To the supervisor: a sealed slab is empty, and its spare is to take its place."""

    slab: int


class Replaced(Message, frozen=True):
    """From the supervisor, and on to the worker: that was done; ``heir`` is the spare's number."""

    slab: int
    heir: int


class Stop(Message, frozen=True):
    """From control: an operator wants the daemon to end, as by SIGTERM."""


AnyMessage = (
    Staging
    | DropStaging
    | Copy
    | Verify
    | Encode
    | Encoded
    | NotEncoded
    | EncodeSpoiled
    | KeepRecipe
    | RecipeKept
    | ForgetRecipe
    | Densify
    | Densified
    | Wipe
    | Export
    | Exported
    | NotExported
    | Wiped
    | CopyDone
    | Verified
    | Failed
    | Populated
    | PopulateFailed
    | PopulatePaused
    | Fallback
    | DiskScan
    | DiskFound
    | DiskScanned
    | DiskWrite
    | DiskWritten
    | DiskRead
    | DiskTaken
    | DiskRemove
    | DiskRemoved
    | DiskFailed
    | GpuSlab
    | GpuState
    | GpuFailed
    | GpuWorker
    | SlabWanted
    | Beat
    | NewWorker
    | Drain
    | Ready
    | Health
    | RestartWorker
    | GivenUp
    | Replaced
    | Stop
)

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)


def pair() -> tuple[socket.socket, socket.socket]:
    """Two connected ends, both closed on exec."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def send(sock: socket.socket, message: AnyMessage, fd: int | None = None) -> None:
    """Sends one message; ``fd`` stays the caller's.

    Raises:
        BlockingIOError: the socket doesn't block and its peer doesn't read.
        OSError: the peer is gone.
    """
    ancillary = []
    if fd is not None:
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))]
    sock.sendmsg([_encoder.encode(message)], ancillary, socket.MSG_NOSIGNAL)


def receive(sock: socket.socket) -> tuple[AnyMessage, int | None]:
    """One message, and its fd, which the caller owns.

    None for a message that carries one: this process had no descriptor left for it.

    Raises:
        EOFError: the peer is gone.
        BlockingIOError: the socket doesn't block and nothing is there.
        OSError: the packet was longer than any message.
    """
    data, ancillary, flags, _ = sock.recvmsg(
        MAX_BYTES, socket.CMSG_SPACE(array.array("i").itemsize), socket.MSG_CMSG_CLOEXEC
    )
    fds = array.array("i")
    for _level, _type, content in ancillary:
        fds.frombytes(content)
    if flags & socket.MSG_TRUNC:
        for fd in fds:
            os.close(fd)
        raise OSError("a message between the daemon's processes was cut short")
    if not data:
        raise EOFError
    return _decoder.decode(data), fds[0] if fds else None
