"""What the GPU's mover asks of CUDA, as an interface: tests replace what is behind it.

Streams and events are handles. CuPy, torch and the driver are loaded when a ``CudaGpu`` is made.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING, Protocol

from kmesh.cuda.device import Device
from kmesh.kernels.host import PagedLayout

if TYPE_CHECKING:
    from kmesh.kernels.chooser import Rates
    from kmesh.kernels.cuda import Restorer, Settings, Storer
    from kmesh.kernels.cuda_fetch import Fetcher
    from kmesh.kernels.cuda_rounds import RoundRestorer, RoundSettings

#: Whether kernels for a GPU can be had here: they need CuPy.
AVAILABLE = find_spec("cupy") is not None

_NON_BLOCKING = 1
_NO_TIMING = 2
#: By what the addresses are: a GPU may reach memory of the host, and read that for us.
_BY_ADDRESS = 4
_NOT_READY = 600


class Gpu(Protocol):
    """One GPU. Nothing waits for it but ``wait`` and the ends of what owns memory.

    Attributes:
        device: the same GPU, as ``kmesh.cuda`` has it.
    """

    @property
    def device(self) -> Device: ...

    def enter(self) -> None:
        """A thread of ours begins: what it calls is about this GPU, and no matter to an engine that
        captures graphs. Not for the engine's own thread."""

    def compute(self) -> int:
        """The stream on which the engine's thread computes now."""

    def stream(self) -> int:
        """A new stream that waits for no other by itself."""

    def event(self) -> int:
        """A new event."""

    def record(self, event: int, stream: int) -> None:
        """The event stands for all that was started on the stream up to now."""

    def follow(self, stream: int, event: int) -> None:
        """What is started on the stream from here on waits for the event."""

    def done(self, event: int) -> bool:
        """Whether what it stands for has ended, well or not."""

    def wait(self, event: int) -> None:
        """Waits for that.

        Raises:
            Exception: it has not ended well, or nothing does any more.
        """

    def allocate(self, size: int) -> int:
        """Memory of the GPU; raises if there is none."""

    def free(self, address: int) -> None: ...

    def fetch(self, target: int, address: int, size: int, stream: int) -> None:
        """Starts to copy what the GPU reads to host memory at ``target``; where that is not
        registered, the call may last as long as the copy."""

    def fetcher(self) -> Fetcher: ...

    def restorer(self, layout: PagedLayout, settings: Settings) -> Restorer: ...

    def round_restorer(self, layout: PagedLayout, settings: RoundSettings) -> RoundRestorer: ...

    def storer(self, layout: PagedLayout, settings: Settings) -> Storer: ...

    def rates(self) -> Rates | None:
        """By which restores choose their route here; may take a tenth of a second. None: they
        can't be measured. Not for the engine's own thread."""

    def close(self) -> None:
        """Frees streams and events. What they stand for has ended."""


class CudaGpu:
    """The real one; see ``Gpu``.

    Args:
        ordinal: as torch and the driver count in this process.
        compute: says on which stream the engine's thread computes now; by default torch does.

    Raises:
        UnsupportedError: CuPy is not installed, or the GPU can't export memory.
        CudaError: the driver refuses.
    """

    def __init__(self, ordinal: int, compute: Callable[[], int] | None = None) -> None:
        from kmesh.cuda import driver
        from kmesh.kernels.device import cupy

        self._compute = compute or _stream_of_torch(ordinal)
        self._ordinal = ordinal
        self._runtime = cupy().cuda.runtime
        self._streams: list[int] = []
        self._events: list[int] = []
        # Whoever counts GPUs in this process counts alike; beyond it the UUID is what names one.
        self.device = Device(driver.load(), str(ordinal))

    def enter(self) -> None:
        self.device.enter()
        self._runtime.setDevice(self._ordinal)

    def compute(self) -> int:
        return self._compute()

    def stream(self) -> int:
        self._streams.append(self._runtime.streamCreateWithFlags(_NON_BLOCKING))
        return self._streams[-1]

    def event(self) -> int:
        self._events.append(self._runtime.eventCreateWithFlags(_NO_TIMING))
        return self._events[-1]

    def record(self, event: int, stream: int) -> None:
        self._runtime.eventRecord(event, stream)

    def follow(self, stream: int, event: int) -> None:
        self._runtime.streamWaitEvent(stream, event)

    def done(self, event: int) -> bool:
        return bool(self._runtime.eventQuery(event) != _NOT_READY)

    def wait(self, event: int) -> None:
        self._runtime.eventSynchronize(event)

    def allocate(self, size: int) -> int:
        return int(self._runtime.malloc(size))

    def free(self, address: int) -> None:
        self._runtime.free(address)

    def fetch(self, target: int, address: int, size: int, stream: int) -> None:
        self._runtime.memcpyAsync(target, address, size, _BY_ADDRESS, stream)

    def fetcher(self) -> Fetcher:
        from kmesh.kernels.cuda_fetch import Fetcher

        return Fetcher(self._ordinal)

    def restorer(self, layout: PagedLayout, settings: Settings) -> Restorer:
        from kmesh.kernels.cuda import Restorer

        return Restorer(layout, device=self._ordinal, settings=settings)

    def round_restorer(self, layout: PagedLayout, settings: RoundSettings) -> RoundRestorer:
        from kmesh.kernels.cuda_rounds import RoundRestorer

        return RoundRestorer(layout, device=self._ordinal, settings=settings)

    def storer(self, layout: PagedLayout, settings: Settings) -> Storer:
        from kmesh.kernels.cuda import Storer

        return Storer(layout, device=self._ordinal, settings=settings)

    def rates(self) -> Rates | None:
        from kmesh.kernels import calibration

        return calibration.rates(self._ordinal, self.device.uuid, self.device.driver.version())

    def close(self) -> None:
        for event in self._events:
            self._runtime.eventDestroy(event)
        for stream in self._streams:
            self._runtime.streamDestroy(stream)
        self._events.clear()
        self._streams.clear()
        self.device.close()


def _stream_of_torch(ordinal: int) -> Callable[[], int]:
    from torch.cuda import current_stream

    return lambda: int(current_stream(ordinal).cuda_stream)
