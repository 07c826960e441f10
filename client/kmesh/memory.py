"""Memory of the daemon as a client sees it: slabs to read, staging to write."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence

from kmesh import dmabuf, errors
from kmesh.calls import Procedure, Welcome
from kmesh.handles import Handle, HandleKind, SpanHandle, Tier
from kmesh.index import IndexReader
from kmesh.layout import TILE_BYTES, slab_capacity, sums_bytes, whole_pages
from kmesh.lease import Lease
from kmesh.mapping import Mapping
from kmesh.pages import touch
from kmesh.v1 import common_pb2, sessions_pb2
from kmesh.wire import Answer


class SlabMapping:
    """A slab, mapped read-only.

    The memory stays mapped as long as this object lives, also after its session has ended; what
    its spans hold is promised only under a lease.

    Attributes:
        slab: its id.
        kind: what was mapped.
        address: of the first byte.
        size: bytes, payloads and sums.
    """

    __slots__ = ("_mapping", "_sums", "address", "kind", "size", "slab")

    def __init__(self, slab: int, handle: Handle, sums_offset: int) -> None:
        self._mapping: Mapping | dmabuf.DmaBufMapping
        if handle.kind == HandleKind.DMA_BUF:
            self._mapping = dmabuf.DmaBufMapping(handle.fd, handle.size)
        else:
            self._mapping = Mapping(handle.fd, handle.size)
        self._sums = sums_offset
        self.slab = slab
        self.kind = handle.kind
        self.size = handle.size
        self.address = self._mapping.address

    def sums_address(self, offset: int) -> int:
        """Address of the first tile sum of the span at ``offset``, one u64 for each tile."""
        return self.address + self._sums + offset // TILE_BYTES * 8

    def reading(self) -> contextlib.AbstractContextManager[None]:
        """Payloads and sums are read inside of it; costs nothing but where it is a DMA-BUF."""
        if isinstance(self._mapping, dmabuf.DmaBufMapping):
            return self._mapping.reading()
        return contextlib.nullcontext()

    def contains(self, offset: int, length: int) -> bool:
        """Whether a span may lie at ``offset``: on a tile, and before the sums."""
        return offset >= 0 <= length and not offset % TILE_BYTES and offset + length <= self._sums

    def view(self, offset: int, length: int) -> memoryview:
        """Read-only bytes; the view keeps the mapping alive.

        Raises:
            ValueError: no span can lie there.
        """
        if not self.contains(offset, length):
            raise ValueError(f"no span of {length} bytes can lie at {offset}")
        return self._mapping.view(offset, length)


class Slabs:
    """Slabs that a session has mapped. One that the daemon has given up is not kept."""

    __slots__ = ("_gone", "_mapped", "_told")

    def __init__(self) -> None:
        self._mapped: dict[int, SlabMapping] = {}
        self._gone: set[int] = set()
        self._told: list[Callable[[], None]] = []

    @property
    def gone(self) -> frozenset[int]:
        """Numbers of those that were given up."""
        return frozenset(self._gone)

    def get(self, slab: int) -> SlabMapping | None:
        return self._mapped.get(slab)

    def keep(self, mapping: SlabMapping) -> None:
        self._mapped[mapping.slab] = mapping
        # It may have been given up since it was asked for, in another thread.
        if mapping.slab in self._gone:
            self._mapped.pop(mapping.slab, None)

    def forget(self, slabs: Sequence[int]) -> None:
        """These were given up: whoever holds one has it mapped until it lets go."""
        self._gone.update(slabs)
        for slab in slabs:
            self._mapped.pop(slab, None)
        for told in self._told:
            told()

    def on_gone(self, callback: Callable[[], None]) -> None:
        """Calls ``callback`` after each ``forget``."""
        self._told.append(callback)

    def clear(self) -> None:
        """Keeps none."""
        self._mapped.clear()


class Staging:
    """Memory of this session's own, mapped writable: what is committed is read from here.

    Payloads begin at multiples of ``layout.STAGING_ALIGN`` bytes.

    Attributes:
        address: of the first byte.
        size: bytes.
    """

    __slots__ = ("_mapping", "address", "size")

    def __init__(self, handle: Handle) -> None:
        self._mapping = Mapping(handle.fd, handle.size, writable=True)
        self.address = self._mapping.address
        self.size = handle.size

    def view(self) -> memoryview:
        """All of it, writable; the view keeps the mapping alive."""
        return self._mapping.view()

    def touch(self) -> None:
        """Has this process map all of its pages, so that who writes it does not wait for that; may
        take long."""
        with self.view():
            touch(self.address, self.size, writable=True)


def attach_index(epoch: int) -> Procedure[IndexReader]:
    """The shared index of that epoch, mapped read-only."""
    answer = yield sessions_pb2.AttachIndex()
    handle = _handle(answer)
    try:
        index = IndexReader(Mapping(handle.fd, handle.size))
    finally:
        os.close(handle.fd)
    if index.epoch != epoch:
        raise errors.ProtocolError("the index is of another epoch than the session")
    return index


def export_slab(slab: int, kind: HandleKind | None = None) -> Procedure[tuple[Handle, int]]:
    """A slab's handle, whose fd the caller closes, and where its sums begin.

    Args:
        kind: the one that was agreed on at connect if None.

    Raises:
        NotFound: no such slab.
        PermissionDenied: the daemon does not give slabs of this kind.
        ProtocolError: the daemon says sizes that a slab can't have, or it is not that kind.
    """
    number = common_pb2.HandleKind.ValueType(kind or 0)
    answer = yield sessions_pb2.AttachSlab(slab=slab, kind=number)
    body = answer.body
    handle = _handle(answer)
    assert isinstance(body, sessions_pb2.SlabHandle)
    try:
        if body.slab != slab:
            raise errors.ProtocolError(f"asked for slab {slab}, got {body.slab}")
        if kind is not None and handle.kind != kind:
            raise errors.ProtocolError(f"asked for {kind.name}, got {handle.kind.name}")
        if handle.device and handle.kind == HandleKind.DMA_BUF:
            dmabuf.check(handle.fd, handle.size, dmabuf.NVIDIA)
        low, high = slab_capacity(handle.size), handle.size - sums_bytes(handle.size)
        if not 0 < low <= body.sums_offset <= high or body.sums_offset % 8:
            raise errors.ProtocolError(f"slab {slab}: its sums can't begin at {body.sums_offset}")
    except BaseException:
        os.close(handle.fd)
        raise
    return handle, body.sums_offset


def export_span(lease: Lease, entry: int, kind: HandleKind) -> Procedure[SpanHandle]:
    """A leased span's pages alone; the caller closes the fd, and keeps the lease meanwhile.

    Raises:
        IndexError: the lease has no such entry.
        LookupError: that entry is not leased.
        PermissionDenied, TooLarge, Exhausted, NotFound: as the daemon says.
        ProtocolError: what came is not that kind, or not that span's size.
    """
    if not 0 <= entry < len(lease):
        raise IndexError(f"no entry {entry} in this lease")
    if lease.reason[entry] or lease.released:
        raise LookupError(f"entry {entry} is not leased")
    part = next(part for part in lease.parts if entry < part.first + part.count)
    answer = yield sessions_pb2.ExportSpan(
        lease=part.lease, entry=entry - part.first, kind=common_pb2.HandleKind.ValueType(kind)
    )
    body = answer.body
    handle = _handle(answer)
    assert isinstance(body, sessions_pb2.SpanHandle)
    try:
        if handle.kind != kind:
            raise errors.ProtocolError(f"asked for {kind.name}, got {handle.kind.name}")
        if body.length != lease.length[entry] or handle.size != dmabuf.whole_pages(body.length):
            raise errors.ProtocolError(
                f"{handle.size} bytes for a span of {lease.length[entry]} bytes"
            )
        if kind == HandleKind.DMA_BUF:
            exporter = dmabuf.NVIDIA if handle.device else dmabuf.UDMABUF
            dmabuf.check(handle.fd, handle.size, exporter)
    except BaseException:
        os.close(handle.fd)
        raise
    return SpanHandle(kind, handle.fd, handle.size, handle.device, length=body.length)


def attach_slab(welcome: Welcome, slab: int) -> Procedure[SlabMapping]:
    """A slab, mapped; errors as ``export_slab``.

    Raises:
        UnsupportedError: no kind of host memory was agreed on, or this is not host memory.
    """
    agreed = welcome.handles.get(Tier.HOST)
    if agreed is not None and not agreed.chosen:
        why = "; ".join(offer.text for offer in agreed.offers) or "no kind was asked for"
        raise errors.UnsupportedError(f"slabs of host memory are not given to us: {why}")
    handle, sums = yield from export_slab(slab)
    try:
        if handle.device or handle.kind not in (HandleKind.MEMFD, HandleKind.DMA_BUF):
            raise errors.UnsupportedError(f"slab {slab} is {handle.kind.name}, not host memory")
        return SlabMapping(slab, handle, sums)
    finally:
        os.close(handle.fd)


def attach_staging(size: int) -> Procedure[Staging]:
    """Staging of ``size`` bytes, rounded up to whole pages."""
    size = whole_pages(size)
    answer = yield sessions_pb2.AttachStaging(size=size)
    handle = _handle(answer)
    try:
        if handle.size < size:
            raise errors.ProtocolError(f"asked for {size} bytes of staging, got {handle.size}")
        return Staging(handle)
    finally:
        os.close(handle.fd)


def _handle(answer: Answer) -> Handle:
    """What came; the caller closes its descriptor."""
    body = answer.body
    try:
        assert isinstance(
            body,
            sessions_pb2.IndexHandle
            | sessions_pb2.SlabHandle
            | sessions_pb2.StagingHandle
            | sessions_pb2.SpanHandle,
        )
        try:
            kind = HandleKind(body.kind)
        except ValueError:
            raise errors.UnsupportedError(f"a handle of unknown kind {body.kind}") from None
        with_device = sessions_pb2.SlabHandle | sessions_pb2.SpanHandle
        device = body.device if isinstance(body, with_device) else ""
        in_host = isinstance(body, sessions_pb2.SlabHandle) and body.in_host
        return Handle(kind, answer.fd, body.size, device, in_host)
    except BaseException:
        os.close(answer.fd)
        raise
