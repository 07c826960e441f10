"""What the daemon's processes say of themselves, of each other and of the memory they have."""

from __future__ import annotations

import msgspec

#: What ``Fallback`` can say, and what it means.
FALLBACKS = {
    "hugepages": "a slab has small pages, although huge ones were asked for",
    "populate": "the kernel can't fill mapped memory: a slab was filled through its file",
    "encode": "the processor, and not the GPU, encodes spans that are on the GPU",
}


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """One packet."""


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


ProcessMessage = (
    Populated
    | PopulateFailed
    | PopulatePaused
    | Fallback
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
