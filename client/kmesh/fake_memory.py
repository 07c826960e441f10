"""Memory of the fake daemon: its slabs, its index and the staging of sessions."""

from __future__ import annotations

import os

from google.protobuf.message import Message

from kmesh import _host, errors, layout
from kmesh.fake_state import Limits, Peer, Slab, Span, create_memfd, reopen_read_only
from kmesh.handles import HandleKind
from kmesh.index import IndexWriter, capacity_for, index_size, tag
from kmesh.mapping import Mapping
from kmesh.v1 import common_pb2, sessions_pb2


class FakeMemory:
    """That of one boot. Descriptors that ``attach`` methods return are the caller's.

    Attributes:
        slabs: by number.
    """

    def __init__(self, limits: Limits, epoch: int) -> None:
        self._limits = limits
        size = index_size(capacity_for(limits.max_spans * 4))
        self._index_size = size
        self._index_fd = create_memfd("kmesh-index", size)
        self._index_memory = Mapping(self._index_fd, size, writable=True)
        self._index = IndexWriter(self._index_memory, epoch)
        self.slabs: list[Slab] = []
        for number in range(limits.slabs):
            fd = create_memfd(f"kmesh-slab-{number}", limits.slab_bytes)
            memory = Mapping(fd, limits.slab_bytes, writable=True)
            capacity = layout.slab_capacity(limits.slab_bytes)
            self.slabs.append(Slab(memory, fd, [(0, capacity)]))
        self._index.set_slab_count(limits.slabs)

    def close(self) -> None:
        """The index holds nothing any more; whoever has mapped anything keeps it."""
        self._index.poison()
        self._index_memory.close()
        os.close(self._index_fd)
        for slab in self.slabs:
            slab.memory.close()
            os.close(slab.fd)

    def attach_index(self) -> tuple[Message, int]:
        """The index's handle and descriptor."""
        fd = reopen_read_only(self._index_fd)
        kind = common_pb2.HANDLE_KIND_MEMFD
        return sessions_pb2.IndexHandle(kind=kind, size=self._index_size), fd

    def attach_slab(self, number: int, kind: int) -> tuple[Message, int]:
        """A slab's handle and descriptor.

        Raises:
            RequestError: there is no such slab, or not of that kind.
        """
        if kind not in (0, HandleKind.MEMFD):
            raise errors.PermissionDenied("the fake has memfds", field="attach_slab.kind")
        if number >= len(self.slabs):
            raise errors.NotFound(f"no slab {number}", field="attach_slab.slab")
        size = self._limits.slab_bytes
        return sessions_pb2.SlabHandle(
            slab=number,
            kind=common_pb2.HANDLE_KIND_MEMFD,
            size=size,
            sums_offset=layout.sums_offset(size),
        ), reopen_read_only(self.slabs[number].fd)

    def attach_staging(self, peer: Peer, size: int, used: int) -> tuple[Message, int]:
        """The handle and descriptor of a session's staging, which is made if it has none.

        Args:
            used: bytes that sessions have.

        Raises:
            RequestError: it has another size, can't have that one, or too much is used.
        """
        if peer.staging is not None:
            if size != peer.staging.size:
                raise errors.InvalidArgument(
                    f"the session has its {peer.staging.size} bytes already",
                    field="attach_staging.size",
                )
            return _staging_handle(size), os.dup(peer.staging_fd)
        if size < 1 or size % layout.PAGE_BYTES:
            raise errors.InvalidArgument("not whole pages", field="attach_staging.size")
        if used + size > self._limits.max_staging_bytes:
            raise errors.Exhausted("staging is used up", field="attach_staging.size")
        fd = create_memfd("kmesh-staging", size, mode=0o600)
        peer.staging, peer.staging_fd = Mapping(fd, size), fd
        return _staging_handle(size), os.dup(fd)

    def copy(self, span: Span, address: int) -> None:
        """Fills a span's range from ``address``, with its sums and root."""
        memory = self.slabs[span.slab].memory.address
        span.root = _host.copy_with_sums(
            memory + span.offset, address, span.length, self._sums(span)
        )

    def intact(self, span: Span) -> bool:
        """Whether a span's bytes are those that were stored."""
        address = self.slabs[span.slab].memory.address + span.offset
        return _host.verify(address, span.length, self._sums(span), span.root)

    def _sums(self, span: Span) -> int:
        area = layout.sums_offset(self._limits.slab_bytes)
        first = span.offset // layout.TILE_BYTES * 8
        return self.slabs[span.slab].memory.address + area + first

    def publish(self, span: Span, keys: list[bytes]) -> None:
        """The index leads from these names to a span, when it was bumped."""
        for key in keys:
            self._index.insert(tag(key, span.shard), span.slot)

    def unpublish(self, span: Span, keys: list[bytes]) -> None:
        """The index leads from these names nowhere, when it was bumped."""
        for key in keys:
            self._index.remove(tag(key, span.shard), span.slot)

    def bump(self) -> None:
        """The index has another version."""
        self._index.bump()

    def give(self, span: Span) -> None:
        """A span's range is free."""
        self.slabs[span.slab].give(span.offset, span.length)


def _staging_handle(size: int) -> Message:
    return sessions_pb2.StagingHandle(kind=common_pb2.HANDLE_KIND_MEMFD, size=size)
