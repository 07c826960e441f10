"""Restores on a GPU that has not what they need, or refuses: nothing is left, nothing still runs.

The GPU is a ledger of what is allocated and of what its streams were told and have not done.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cpu_gpu import NOT_READY, instead_of_cupy
from paged_reference import Engine, Stored

from kmesh.kernels import device as devices
from kmesh.kernels.chooser import Route
from kmesh.kernels.copying import Copier
from kmesh.kernels.cuda import Memory, Restorer, Settings, Storer
from kmesh.kernels.plan import Load, Request

SETTINGS = Settings(chunk_bytes=1 << 20)


class Refused(RuntimeError):
    """As CuPy says it; 2 is ``cudaErrorMemoryAllocation``."""

    def __init__(self, status: int) -> None:
        super().__init__(f"error {status}")
        self.status = status


class Runtime:
    """What KMesh calls of CuPy's runtime.

    Attributes:
        held: what was made and not given back.
        running: streams with work that nobody has waited for.
        copied: the stream of each copy.
        waits: what was waited for.
        refuse: names of the functions that fail, with the number of calls that go well before.
    """

    def __init__(self) -> None:
        self.held: dict[int, str] = {}
        self.running: set[int] = set()
        self.copied: list[int] = []
        self.waits: list[int] = []
        self.refuse: dict[str, int] = {}
        self.status = 2
        self._last = 0

    def ask(self, name: str) -> None:
        if name in self.refuse:
            if not self.refuse[name]:
                raise Refused(self.status)
            self.refuse[name] -= 1

    def _make(self, what: str) -> int:
        self.ask(what)
        self._last += 4096
        self.held[self._last] = what
        return self._last

    def streamCreateWithFlags(self, _flags: int) -> int:
        return self._make("stream")

    def eventCreateWithFlags(self, _flags: int) -> int:
        return self._make("event")

    def malloc(self, _size: int) -> int:
        return self._make("malloc")

    def _end(self, thing: int) -> None:
        del self.held[thing]

    streamDestroy = eventDestroy = free = _end

    def memcpyAsync(self, _target: int, _source: int, _size: int, _kind: int, stream: int) -> None:
        self.ask("memcpy")
        self.running.add(stream)
        self.copied.append(stream)

    def streamWaitEvent(self, _stream: int, event: int) -> None:
        assert self.held[event] == "event"

    def eventRecord(self, event: int, _stream: int) -> None:
        assert self.held[event] == "event"

    def eventSynchronize(self, event: int) -> None:
        self.waits.append(event)
        self.running.discard(0)

    def eventQuery(self, _event: int) -> int:
        return NOT_READY if self.running else 0

    def streamSynchronize(self, stream: int) -> None:
        self.waits.append(stream)
        self.running.discard(stream)

    def getDevice(self) -> int:
        return 0


class Pinned(np.ndarray):
    """Host memory that knows where it is."""

    @property
    def ptr(self) -> int:
        return int(self.ctypes.data)


class Gpu:
    """CuPy, as far as it is imported."""

    def __init__(self) -> None:
        self.runtime = Runtime()
        self.launched: list[Any] = []
        attributes = {
            "MultiProcessorCount": 4,
            "MaxSharedMemoryPerMultiprocessor": 200_000,
            "MaxSharedMemoryPerBlockOptin": 200_000,
        }
        self.cuda = SimpleNamespace(
            runtime=self.runtime,
            driver=SimpleNamespace(launchKernel=self._launch),
            alloc_pinned_memory=self._pinned,
            Device=lambda _ordinal: SimpleNamespace(attributes=attributes),
        )

    def _launch(self, *arguments: Any) -> None:
        self.runtime.ask("launch")
        self.launched.append(arguments)
        self.runtime.running.add(0)

    def _pinned(self, size: int) -> Any:
        self.runtime.ask("pinned")
        return np.zeros(size, dtype=np.uint8).view(Pinned)

    def RawModule(self, **_: Any) -> Any:
        function = SimpleNamespace(kernel=SimpleNamespace(ptr=1))
        return SimpleNamespace(get_function=lambda _name: function)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    found = Gpu()
    with instead_of_cupy(found, monkeypatch):
        yield found
    assert not found.runtime.held
    assert not found.runtime.running


@pytest.fixture
def engine() -> Engine:
    return Engine.make("HND", layers=2, blocks=128, heads=2, slots=16, row=256, gap=0)


def load(spans: int = 6) -> Load:
    """Of spans of 128 KiB for one request; with one buffer of 1 MiB each it is several chunks."""
    stored = [Stored.make(n, 2, 2, 64, 256) for n in range(spans)]
    parts = [
        span.part(position=64 * n, tokens=64, heads=2, layers=2) for n, span in enumerate(stored)
    ]
    return Load.of(parts, [Request(np.arange(128), False, 0, 0)])


@pytest.mark.parametrize("lacking", ["stream", "event", "malloc"])
@pytest.mark.parametrize("before", range(3))
def test_buffers_that_cannot_all_be_had_are_given_back(gpu: Gpu, lacking: str, before: int) -> None:
    gpu.runtime.refuse = {lacking: 0 if lacking == "stream" else before}
    device = devices.Device(0)
    with pytest.raises(Refused):
        Copier(device, 1 << 20, 3)
    assert not gpu.runtime.held
    gpu.runtime.refuse.clear()
    copier = Copier(device, 1 << 20, 3)
    assert sorted(gpu.runtime.held.values()) == ["event"] * 6 + ["malloc"] * 3 + ["stream"]
    copier.close()


def test_without_memory_for_buffers_the_kernel_does_it(
    gpu: Gpu, engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    restorer = Restorer(engine.layout, settings=SETTINGS)
    job = load()
    # The job's own memory is had first, as in an engine that has restored before.
    restorer.restore([job], 0, memory=Memory.HOST, route=Route.KERNEL).wait()
    gpu.runtime.refuse = {"malloc": 1}
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            pending = restorer.restore([job], 0, memory=Memory.HOST, route=Route.COPY)
            assert pending.route is Route.KERNEL
            pending.wait()
    assert [r.message for r in caplog.records] == [
        "no memory on GPU 0 for 3 buffers of 1048576 bytes: payloads of host memory are restored "
        "by the kernel alone"
    ]
    # Each has its job brought.
    assert len(gpu.launched) == 3 * 2
    restorer.close()


def test_a_refusal_that_is_not_for_want_of_memory_is_raised(gpu: Gpu, engine: Engine) -> None:
    restorer = Restorer(engine.layout, settings=SETTINGS)
    gpu.runtime.refuse, gpu.runtime.status = {"malloc": 0}, 700
    with pytest.raises(Refused, match="700"):
        restorer.restore([load()], 0, memory=Memory.HOST, route=Route.COPY)
    gpu.runtime.refuse.clear()
    restorer.close()


@pytest.mark.parametrize("lacking", ["pinned", "malloc"])
def test_a_job_is_written_only_where_it_has_memory(gpu: Gpu, engine: Engine, lacking: str) -> None:
    """Also the next one, which finds what the one before could not have."""
    restorer = Restorer(engine.layout, settings=SETTINGS)
    gpu.runtime.refuse = {lacking: 0}
    for _ in range(2):
        with pytest.raises(Refused):
            restorer.restore([load()], 0, memory=Memory.GPU)
    gpu.runtime.refuse.clear()
    restorer.restore([load()], 0, memory=Memory.GPU).wait()
    assert len(gpu.launched) == 2
    assert "malloc" in gpu.runtime.held.values()
    restorer.close()


@pytest.mark.parametrize(("lacking", "before"), [("launch", 0), ("launch", 1), ("memcpy", 1)])
def test_a_restore_that_fails_reads_nothing_any_more(
    gpu: Gpu, engine: Engine, lacking: str, before: int
) -> None:
    """Whoever asked for it gives the payloads back to the daemon as soon as it hears."""
    restorer = Restorer(engine.layout, settings=SETTINGS)
    restorer.restore([load()], 0, memory=Memory.HOST, route=Route.COPY).wait()
    gpu.runtime.streamSynchronize(next(iter(gpu.runtime.running), 0))
    gpu.runtime.refuse = {lacking: before}
    with pytest.raises(Refused):
        restorer.restore([load(30)], 0, memory=Memory.HOST, route=Route.COPY)
    assert not gpu.runtime.running
    gpu.runtime.refuse.clear()
    pending = restorer.restore([load(30)], 0, memory=Memory.HOST, route=Route.COPY)
    assert pending.route is Route.COPY
    pending.wait()
    restorer.close()


def test_a_refusal_is_not_waited_for(gpu: Gpu, engine: Engine) -> None:
    """The stream may have other work before it, and copies can't be called back."""
    restorer, runtime = Restorer(engine.layout, settings=SETTINGS), gpu.runtime
    restorer.restore([load()], 0, memory=Memory.HOST, route=Route.COPY).wait()
    runtime.running.clear()
    runtime.waits.clear()
    launched = len(gpu.launched)
    bad = Load(load().records, [Request(np.arange(128), delta=5)])
    for memory in Memory:
        with pytest.raises(ValueError, match="nothing says how"):
            restorer.restore([bad], 0, memory=memory, route=Route.KERNEL)
    pending = restorer.restore([bad], 0, memory=Memory.HOST, route=Route.COPY)
    assert (runtime.waits, len(gpu.launched)) == ([], launched)
    assert (pending.route, pending.read_bytes, pending.done()) == (Route.COPY, 0, False)
    runtime.running.clear()
    for _ in range(2):
        with pytest.raises(ValueError, match="nothing says how"):
            pending.wait()
        assert pending.done()
    assert len(runtime.waits) == 1
    held = dict(runtime.held)
    for route in Route:
        restorer.restore([load()], 0, memory=Memory.HOST, route=route).wait()
    assert runtime.held == held
    restorer.close()


def test_a_store_without_memory_for_its_job_waits_for_nothing(gpu: Gpu, engine: Engine) -> None:
    storer = Storer(engine.layout, settings=SETTINGS)
    gpu.runtime.refuse = {"pinned": 0}
    job = load()
    with pytest.raises(Refused):
        storer.store(job.records, job.requests[0], 0, memory=Memory.HOST)
    assert gpu.runtime.waits == []
    gpu.runtime.refuse.clear()
    storer.close()


def test_no_job_is_behind_what_the_copy_engine_is_asked_for(gpu: Gpu, engine: Engine) -> None:
    """Otherwise the bus would wait when the buffers are full, until the job has been read."""
    restorer, storer = (
        make(engine.layout, settings=SETTINGS)  # type: ignore[operator]
        for make in (Restorer, Storer)
    )
    job = load(30)
    restorer.restore([job], 0, memory=Memory.HOST, route=Route.COPY).wait()
    # Each span is a copy of its own, and none is on the stream of the launches.
    assert len(gpu.runtime.copied) == 30
    assert 0 not in gpu.runtime.copied
    storer.store(job.records, job.requests[0], 0, memory=Memory.HOST)
    restorer.restore([job], 0, memory=Memory.HOST, route=Route.KERNEL).wait()
    assert len(gpu.runtime.copied) == 30
    storer.close()
    restorer.close()
