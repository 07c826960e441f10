"""Mapping memfds: what is refused, what a view keeps alive, and that no fd is left."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator

import pytest

from kmesh import _host
from kmesh.errors import ProtocolError
from kmesh.mapping import Mapping

SIZE = 3 * 4096


def memfd(size: int = SIZE, seals: int = fcntl.F_SEAL_SHRINK) -> int:
    fd = os.memfd_create("kmesh-test-mapping", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


@pytest.fixture
def fd() -> Iterator[int]:
    fd = memfd()
    yield fd
    os.close(fd)


def mapped() -> int:
    """Mappings of the test's memfds in this process."""
    with open("/proc/self/maps") as maps:
        return sum("kmesh-test-mapping" in line for line in maps)


def fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_two_mappings_share_their_bytes(fd: int) -> None:
    with Mapping(fd, SIZE, writable=True) as writer, Mapping(fd, SIZE) as reader:
        writer.view(5000, 5)[:] = b"hello"
        assert bytes(reader.view(5000, 5)) == b"hello"
        assert reader.view().nbytes == SIZE
        assert reader.view(4096).nbytes == SIZE - 4096
        assert _host.address(reader.view(4096)) == reader.address + 4096


def test_a_mapping_keeps_no_fd_and_outlives_the_one_it_came_from() -> None:
    before = fds()
    fd = memfd()
    os.pwrite(fd, b"kept", 0)
    mapping = Mapping(fd, SIZE)
    os.close(fd)
    assert fds() == before
    assert bytes(mapping.view(0, 4)) == b"kept"
    mapping.close()


def test_ten_thousand_mappings_leave_nothing(fd: int) -> None:
    before = fds(), mapped()
    for _ in range(10_000):
        Mapping(fd, SIZE).close()
    for _ in range(1_000):
        Mapping(fd, SIZE)
    assert (fds(), mapped()) == before


def test_a_view_is_read_only_unless_the_mapping_is_writable(fd: int) -> None:
    with Mapping(fd, SIZE) as mapping:
        assert mapping.view().readonly
        with pytest.raises(TypeError):
            mapping.view()[0] = 1
    with Mapping(fd, SIZE, writable=True) as mapping:
        assert not mapping.view().readonly


def test_a_read_only_fd_cannot_be_mapped_writable(fd: int) -> None:
    reader = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        with pytest.raises(PermissionError):
            Mapping(reader, SIZE, writable=True)
        Mapping(reader, SIZE).close()
    finally:
        os.close(reader)


def test_memory_is_unmapped_with_its_last_view(fd: int) -> None:
    mapping = Mapping(fd, SIZE, writable=True)
    first, second = mapping.view(0, 10), mapping.view(10, 10)
    mapping.close()
    assert mapping.closed
    assert mapped() == 1
    first[:2] = b"ok"
    assert bytes(first[:2]) == b"ok"
    first.release()
    assert mapped() == 1
    second.release()
    assert mapped() == 0


def test_close_twice_and_use_after_close(fd: int) -> None:
    mapping = Mapping(fd, SIZE)
    assert not mapping.closed
    mapping.close()
    mapping.close()
    assert mapping.closed
    assert mapped() == 0
    with pytest.raises(ValueError, match="closed"):
        _ = mapping.address
    with pytest.raises(ValueError, match="closed"):
        mapping.view(0, 1)


@pytest.mark.parametrize(
    ("offset", "length"), [(-1, 1), (0, SIZE + 1), (SIZE, 1), (1, SIZE), (0, -1), (SIZE + 1, None)]
)
def test_views_outside_are_refused(fd: int, offset: int, length: int | None) -> None:
    with Mapping(fd, SIZE) as mapping, pytest.raises(ValueError, match="not in"):
        mapping.view(offset, length)


@pytest.mark.parametrize("size", [SIZE + 1, 1 << 40, 0, -1])
def test_a_size_that_the_memfd_does_not_hold_is_refused(fd: int, size: int) -> None:
    with pytest.raises(ProtocolError, match=f"holds {SIZE} bytes, {size} were promised"):
        Mapping(fd, size)


def test_a_memfd_that_could_shrink_is_refused() -> None:
    fd = memfd(seals=fcntl.F_SEAL_GROW)
    try:
        with pytest.raises(ProtocolError, match="not sealed"):
            Mapping(fd, SIZE)
    finally:
        os.close(fd)


def test_what_is_no_memfd_is_refused() -> None:
    with tempfile.TemporaryFile(dir="/var/tmp") as file:
        file.truncate(SIZE)
        with pytest.raises(ProtocolError):
            Mapping(file.fileno(), SIZE)
    reader, writer = os.pipe()
    try:
        with pytest.raises(ProtocolError, match="no memfd"):
            Mapping(reader, SIZE)
    finally:
        os.close(reader)
        os.close(writer)


def test_a_refused_mapping_leaves_nothing(fd: int) -> None:
    before = fds(), mapped()
    for size in (SIZE + 1, 0):
        with pytest.raises(ProtocolError):
            Mapping(fd, size)
    assert (fds(), mapped()) == before
