"""A GPU without a GPU, behind ``kmesh_vllm.gpu.Gpu``: streams that run when a test lets them.

Its memory is this process's, and its kernels are the reference.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
from fake_cuda import FakeDriver, Gpu

from kmesh.codec import RecipeTables, SpanDescription
from kmesh.codec.recipe import _tables_end
from kmesh.codec.records import HEAD as RECIPE_HEAD
from kmesh.codec.records import HEAD_FIELDS
from kmesh.cuda.device import Device
from kmesh.errors import CudaError, UnsupportedError
from kmesh.kernels import reference, round_reference, rounds
from kmesh.kernels.chooser import Rates, Route
from kmesh.kernels.cuda import H200, Load, Memory, Request
from kmesh.kernels.cuda_fetch import UNIT
from kmesh.kernels.host import PagedLayout, SpanPart, Status, part_reads
from kmesh.kernels.rotary import ELEMENTS
from kmesh.kernels.rounds import BaseSpan, Member, Place, Round, RoundStatuses
from kmesh.layout import Shard

#: The stream on which the engine computes.
COMPUTE = 1


class _Mark:
    """A point in a stream."""

    def __init__(self) -> None:
        self.reached = False


class FakeGpu:
    """See ``kmesh_vllm.gpu.Gpu``.

    Attributes:
        held: what is started waits for ``run``; otherwise it runs at once, in its order.
        launches: (program, memory, loads, requests) of each launch with something to do; of a
            round, its bases in the place of loads.
        fetched: pieces of each launch that brings some to the host.
        unread: of these launches, those whose results nobody has taken; each keeps its memory.
        refuse: called with a call's name before it does anything; raises what it likes.
        dead: every wait for what was started fails.
        asked: how often each event was asked for.
        seen: what ``rates`` gives.
    """

    def __init__(self, driver: FakeDriver | None = None, **attributes: Any) -> None:
        self.driver = driver or FakeDriver(Gpu(**attributes))
        self.device = Device(self.driver, "0")
        self.held = False
        self.dead = False
        self.asked: Counter[int] = Counter()
        self.launches: list[tuple[str, Memory, int, int]] = []
        self.fetched: list[int] = []
        self.unread = 0
        self.refuse: Callable[[str], None] = lambda name: None
        self._lock = threading.RLock()
        self._streams: dict[int, deque[_Mark | Callable[[], None]]] = {COMPUTE: deque()}
        self._events: dict[int, _Mark] = {}
        self._last = COMPUTE
        self.open = 0
        self.seen: Rates | None = None

    def called(self, name: str) -> None:
        """A call, of whichever thread, that this GPU may refuse."""
        self.driver.used(name)
        self.refuse(name)

    def start(
        self, stream: int, work: Callable[[], None] | _Mark, after: _Mark | None = None
    ) -> None:
        """Puts something on a stream; ``after``: it waits there for that mark."""
        with self._lock:
            if after is not None:
                self._streams[stream].append(lambda: None if after.reached else _stay())
            else:
                self._streams[stream].append(work)
            if not self.held:
                self.run()

    def run(self, steps: int = 1 << 30, only: Sequence[int] | None = None) -> None:
        """Lets streams go on as far as they can, at most so many steps."""
        with self._lock:
            moved = True
            while moved and steps:
                moved = False
                for number, stream in self._streams.items():
                    if only is not None and number not in only:
                        continue
                    while stream and steps:
                        first = stream[0]
                        if isinstance(first, _Mark):
                            first.reached = True
                        else:
                            try:
                                first()
                            except _Stay:
                                break
                        stream.popleft()
                        steps -= 1
                        moved = True

    def finish(self, mark: _Mark) -> None:
        """Waits for a mark."""
        self.called("wait")
        if self.dead:
            raise CudaError("cuEventSynchronize", 719, "CUDA_ERROR_LAUNCH_FAILED")
        if not self.held:
            self.run()
        until = time.monotonic() + 30
        while not mark.reached:
            assert time.monotonic() < until, "waits for what never comes"
            time.sleep(0.001)

    # As ``Gpu`` has them.

    def enter(self) -> None:
        self.device.enter()

    def compute(self) -> int:
        return COMPUTE

    def stream(self) -> int:
        self.driver.used("stream")
        with self._lock:
            self._last += 1
            self._streams[self._last] = deque()
            return self._last

    def event(self) -> int:
        self.driver.used("event")
        with self._lock:
            self._last += 1
            return self._last

    def record(self, event: int, stream: int) -> None:
        self.called("record")
        mark = self._events[event] = _Mark()
        self.start(stream, mark)

    def follow(self, stream: int, event: int) -> None:
        self.called("follow")
        self.start(stream, lambda: None, after=self._events[event])

    def done(self, event: int) -> bool:
        self.driver.used("done")
        self.asked[event] += 1
        return self.dead or self._events[event].reached

    def wait(self, event: int) -> None:
        self.finish(self._events[event])

    def allocate(self, size: int) -> int:
        self.called("allocate")
        with self.device.current() as driver:
            return driver.allocate(size)

    def free(self, address: int) -> None:
        with self.device.current() as driver:
            driver.free(address)

    def fetch(self, target: int, address: int, size: int, stream: int) -> None:
        self.called("fetch")
        self.start(stream, lambda: ctypes.memmove(target, address, size) and None)
        if not self.driver.registered(target, size):
            end = _Mark()
            self.start(stream, end)
            self.finish(end)

    def fetcher(self) -> _Fetcher:
        self.called("fetcher")
        return _Fetcher(self)

    def restorer(self, layout: PagedLayout, settings: Any) -> _Restorer:
        self.called("restorer")
        return _Restorer(self, layout)

    def round_restorer(self, layout: PagedLayout, settings: Any) -> _RoundRestorer:
        self.called("round_restorer")
        return _RoundRestorer(self, layout)

    def storer(self, layout: PagedLayout, settings: Any) -> _Storer:
        self.called("storer")
        return _Storer(self, layout)

    def rates(self) -> Rates | None:
        self.called("rates")
        return self.seen

    def close(self) -> None:
        self.device.close()


class _Stay(Exception):
    """A stream waits."""


def _stay() -> None:
    raise _Stay


class _Pending:
    def __init__(
        self,
        gpu: FakeGpu,
        stream: int,
        work: Callable[[], Any],
        route: Route,
        read_bytes: int = 0,
    ) -> None:
        self._gpu = gpu
        self._mark = _Mark()
        self._found: Any = None
        self.route = route
        self.read_bytes = read_bytes

        def act() -> None:
            self._found = work()

        gpu.start(stream, act)
        gpu.start(stream, self._mark)

    def done(self) -> bool:
        self._gpu.driver.used("done")
        return self._gpu.dead or self._mark.reached

    def wait(self) -> Any:
        self._gpu.finish(self._mark)
        return self._found


class _Fetcher:
    def __init__(self, gpu: FakeGpu) -> None:
        self._gpu = gpu
        gpu.open += 1

    def fetch(
        self, addresses: npt.NDArray[np.uint64], sizes: npt.NDArray[np.uint64], stream: int
    ) -> _Pending:
        self._gpu.called("pieces")
        self._gpu.fetched.append(len(addresses))
        assert not (addresses % UNIT).any()
        assert not (sizes % UNIT).any()

        def act() -> npt.NDArray[np.uint8]:
            places = zip(addresses.tolist(), sizes.tolist(), strict=True)
            return np.frombuffer(b"".join(ctypes.string_at(*one) for one in places), np.uint8)

        return _PendingFetch(self._gpu, stream, act, Route.KERNEL)

    def close(self) -> None:
        self._gpu.open -= 1


class _PendingFetch(_Pending):
    def __init__(self, gpu: FakeGpu, *what: Any) -> None:
        super().__init__(gpu, *what)
        gpu.unread += 1
        self._unread = True

    def wait(self) -> Any:
        found = super().wait()
        if self._unread:
            self._unread = False
            self._gpu.unread -= 1
        return found


class _Kernels:
    def __init__(self, gpu: FakeGpu, layout: PagedLayout) -> None:
        self._gpu = gpu
        self._layout = layout
        self.rates = H200
        gpu.open += 1

    def close(self) -> None:
        self._gpu.open -= 1


class _Restorer(_Kernels):
    def prepare(self, *, copies: bool) -> None:
        self._gpu.called("prepare")

    def restore(self, loads: Sequence[Load], stream: int, *, memory: Memory) -> _Pending:
        gpu = self._gpu
        gpu.called("restore")
        if sum(len(load.records) for load in loads):
            requests = sum(len(load.requests) for load in loads)
            gpu.launches.append(("restore", memory, len(loads), requests))
        reads = [sum(part_reads(o.records.tobytes(), self._layout.row_bytes)) for o in loads]
        work = lambda: _restore(self._layout, loads)  # noqa: E731
        return _Pending(gpu, stream, work, Route.KERNEL, sum(reads))


def _restore(layout: PagedLayout, loads: Sequence[Load]) -> list[list[bytes]]:
    """As the reference, but pages of bad parts hold rubbish then, as those of a GPU do."""
    found = reference.restore(layout, loads)
    for load, statuses in zip(loads, found, strict=True):
        for request, status in zip(load.requests, statuses, strict=True):
            for i, code in enumerate(status):
                if code in (Status.BAD_ROOT, Status.BAD_TILE):
                    record = load.records[i : i + 1].copy()
                    rubbish = np.full(int(record["length"][0]), 0xEE, np.uint8)
                    sums = reference.tile_sums(rubbish)
                    record["address"], record["root"] = rubbish.ctypes.data, reference.fold(sums)
                    record["sums_address"] = sums.ctypes.data
                    assert reference.restore(layout, [Load(record, [request])]) == [[b"\0"]]
    return found


class _Refused(_Pending):
    """What is not served, as is seen when copies are on their way."""

    def __init__(self, gpu: FakeGpu, stream: int, why: UnsupportedError) -> None:
        super().__init__(gpu, stream, lambda: None, Route.COPY)
        self._why = why

    def wait(self) -> Any:
        super().wait()
        raise self._why


class _RoundRestorer(_Kernels):
    def prepare(self, *, copies: bool) -> None:
        self._gpu.called("prepare_rounds")

    def restore(self, wanted: Round, stream: int) -> _Pending:
        gpu = self._gpu
        gpu.called("round")
        try:
            gpu.called("plan_round")
        except UnsupportedError as why:
            return _Refused(gpu, stream, why)
        memory = Memory.GPU if wanted.members["order"].any() else Memory.HOST
        gpu.launches.append(("round", memory, len(wanted.bases), len(wanted.requests)))
        read = rounds.write(self._layout, wanted).read_bytes
        work = lambda: _restore_round(self._layout, wanted)  # noqa: E731
        return _Pending(gpu, stream, work, Route.KERNEL, read)


def _restore_round(layout: PagedLayout, wanted: Round) -> RoundStatuses:
    """As the reference, but pages of bad members hold rubbish then, as those of a GPU do."""
    bases, members, requests = unpacked(wanted)
    found = round_reference.restore(layout, bases, members, requests)
    for member, code in zip(members, found.members, strict=True):
        if code in (Status.BAD_ROOT, Status.BAD_TILE):
            part = member.part
            size = 2 * part.src_layers * part.src_heads * part.tokens * layout.row_bytes
            rubbish = np.full(size, 0xEE, np.uint8)
            sums = reference.tile_sums(rubbish)
            part = replace(
                part,
                address=rubbish.ctypes.data,
                length=size,
                sums_address=sums.ctypes.data,
                root=reference.fold(sums.tolist()),
            )
            load = Load.of([part], [requests[member.request]])
            assert reference.restore(layout, [load]) == [[b"\0"]]
    return found


def unpacked(wanted: Round) -> tuple[list[BaseSpan], list[Member], Sequence[Request]]:
    """What a round was made of."""
    memories = (Memory.HOST, Memory.GPU)
    dtypes = {number: name for name, number in ELEMENTS.items()}
    bases = []
    for base in wanted.bases:
        where = (int(base[name]) for name in ("address", "sums_address", "root"))
        what = SpanDescription(
            key=base["key"].tobytes(),
            namespace=base["namespace"].tobytes(),
            dtype=dtypes[int(base["dtype"])],
            shard=Shard(*base["layers"].tolist(), *base["heads"].tolist()),
            head_dim=int(base["head_dim"]),
            **{name: int(base[name]) for name in ("tokens", "position", "generation")},
        )
        digest = base["digest"].tobytes() if base["known"] else None
        bases.append(BaseSpan(Place(*where, memories[int(base["order"])]), what, digest))
    members = []
    for member in wanted.members:
        part = SpanPart(**{n: int(member["part"][n]) for n in member["part"].dtype.names})
        tables = None
        if at := int(member["tables"]):
            head = RECIPE_HEAD.unpack(reference.at(at, RECIPE_HEAD.size))
            size = _tables_end(dict(zip(HEAD_FIELDS, head, strict=True)))
            tables = RecipeTables(reference.at(at, size))
        members.append(Member(part, int(member["request"]), tables, memories[int(member["order"])]))
    return bases, members, wanted.requests


class _Storer(_Kernels):
    def store(
        self, records: npt.NDArray[np.void], request: Request, stream: int, *, memory: Memory
    ) -> _Pending:
        gpu = self._gpu
        gpu.called("store")
        if len(records):
            gpu.launches.append(("store", memory, 1, 1))
        return _Pending(
            gpu, stream, lambda: reference.store(self._layout, records, request), Route.KERNEL
        )
