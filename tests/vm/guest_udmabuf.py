"""What the kernel does with DMA-BUFs of host memory, and what ``kmesh.dmabuf`` makes of it.

Run in the machine of ``machine.py``: nothing here is skipped or pretended.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kmesh import dmabuf
from kmesh.cli import checks
from kmesh.dmabuf import DmaBufMapping, Limits, NotExported
from kmesh.errors import ProtocolError
from kmesh.handles import HandleRefusal

PAGE = mmap.PAGESIZE
MIB = 1 << 20
SHRINK, WRITE, FUTURE_WRITE = fcntl.F_SEAL_SHRINK, fcntl.F_SEAL_WRITE, 0x10
PARAMETERS = Path("/sys/module/udmabuf/parameters")


def memfd(size: int, seals: int = SHRINK) -> int:
    fd = os.memfd_create("t", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


@pytest.fixture
def parameters() -> Iterator[None]:
    before = {path: path.read_text() for path in PARAMETERS.iterdir()}
    yield
    for path, text in before.items():
        path.write_text(text)


def test_a_dma_buf_is_the_pages_of_its_memfd() -> None:
    owner = memfd(8 * PAGE)
    os.pwrite(owner, b"second page", PAGE)
    fd = dmabuf.create(owner, [(PAGE, 2 * PAGE)])
    assert dmabuf.look(fd) == dmabuf.Info("udmabuf", 2 * PAGE)
    assert not os.get_inheritable(fd)
    with DmaBufMapping(fd, 2 * PAGE) as mapping:
        os.close(fd)
        with mapping.reading():
            assert bytes(mapping.view(0, 11)) == b"second page"
        os.pwrite(owner, b"changed", PAGE)
        os.close(owner)
        with mapping.reading():
            assert bytes(mapping.view(0, 11)) == b"changedpage"
        assert len(mapping.view(PAGE)) == PAGE
        with pytest.raises(ValueError, match="are not in"):
            mapping.view(PAGE, 2 * PAGE)
    assert mapping.closed
    mapping.close()


def test_ranges_are_joined_in_their_order() -> None:
    owner = memfd(4 * PAGE)
    for page in range(4):
        os.pwrite(owner, bytes([page]) * PAGE, page * PAGE)
    fd = dmabuf.create(owner, [(3 * PAGE, PAGE), (0, 2 * PAGE)])
    with DmaBufMapping(fd, 3 * PAGE) as mapping, mapping.reading():
        assert [mapping.view(n * PAGE, 1)[0] for n in range(3)] == [3, 0, 1]
    os.close(fd)
    os.close(owner)


def test_what_is_no_dma_buf_of_host_memory_is_not_taken_for_one() -> None:
    owner = memfd(PAGE)
    with pytest.raises(ProtocolError, match="is none"):
        DmaBufMapping(owner, PAGE)
    fd = dmabuf.create(owner, [(0, PAGE)])
    with pytest.raises(ProtocolError, match="holds 4096 bytes, 8192 were promised"):
        DmaBufMapping(fd, 2 * PAGE)
    with pytest.raises(ProtocolError, match="'udmabuf', where 'nv_dmabuf'"):
        dmabuf.check(fd, PAGE, "nv_dmabuf")
    for each in (owner, fd):
        os.close(each)


def test_limits_are_named_when_they_are_exceeded(parameters: None) -> None:
    limits = Limits.read()
    assert limits == Limits(64 * MIB, 1024)
    owner = memfd(65 * MIB)
    with pytest.raises(NotExported, match="65 MiB are more than size_limit_mb = 64") as large:
        dmabuf.create(owner, [(0, 65 * MIB)])
    assert large.value.refusal == HandleRefusal.SIZE_LIMIT
    with pytest.raises(NotExported, match="1025 ranges are more than list_limit = 1024"):
        dmabuf.create(owner, [(0, PAGE)] * 1025)
    os.close(dmabuf.create(owner, [(0, PAGE)] * 1024))
    (PARAMETERS / "size_limit_mb").write_text("2")
    with pytest.raises(NotExported, match="size_limit_mb = 2"):
        dmabuf.create(owner, [(0, 3 * MIB)])
    # Nothing was put behind what was refused.
    assert os.fstat(owner).st_blocks * 512 <= PAGE
    os.close(owner)


@pytest.mark.parametrize("place", [(1, PAGE), (0, 100), (0, 0), (PAGE, PAGE), (-PAGE, PAGE)])
def test_only_whole_pages_inside_of_the_memfd(place: tuple[int, int]) -> None:
    owner = memfd(PAGE)
    with pytest.raises(ValueError, match=r"whole pages|end outside"):
        dmabuf.create(owner, [place])
    os.close(owner)


@pytest.mark.parametrize("seal", [WRITE, FUTURE_WRITE])
def test_sealed_memory_is_not_exported(seal: int) -> None:
    owner = memfd(PAGE, SHRINK | seal)
    with pytest.raises(NotExported, match="sealed") as refused:
        dmabuf.create(owner, [(0, PAGE)])
    assert refused.value.refusal == HandleRefusal.SEALED
    os.close(owner)


def test_a_dma_buf_from_before_the_seal_still_writes() -> None:
    owner = memfd(PAGE)
    fd = dmabuf.create(owner, [(0, PAGE)])
    fcntl.fcntl(owner, fcntl.F_ADD_SEALS, FUTURE_WRITE)
    with pytest.raises(PermissionError):
        mmap.mmap(owner, PAGE)
    with mmap.mmap(fd, PAGE) as writer:
        writer[:5] = b"still"
    assert os.pread(owner, 5, 0) == b"still"
    os.close(fd)
    os.close(owner)


def test_a_read_only_import_can_be_made_writable_by_whoever_opens_the_device() -> None:
    """Why docs/security.md says who may open /dev/udmabuf, and what the seal is good for."""
    owner = memfd(PAGE)
    importer = os.open(f"/proc/self/fd/{owner}", os.O_RDONLY)
    with pytest.raises(PermissionError):
        mmap.mmap(importer, PAGE)
    fd = dmabuf.create(importer, [(0, PAGE)])
    with mmap.mmap(fd, PAGE) as writer:
        writer[:4] = b"oops"
    assert os.pread(owner, 4, 0) == b"oops"
    fcntl.fcntl(owner, fcntl.F_ADD_SEALS, FUTURE_WRITE)
    with pytest.raises(NotExported, match="sealed"):
        dmabuf.create(importer, [(0, PAGE)])
    for each in (fd, importer, owner):
        os.close(each)


EXPORTER = """
import fcntl, os, signal, socket, sys
from kmesh import dmabuf
owner = os.memfd_create("t", os.MFD_ALLOW_SEALING)
os.ftruncate(owner, 8192)
fcntl.fcntl(owner, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
os.pwrite(owner, b"left behind", 4096)
fd = dmabuf.create(owner, [(0, 8192)])
sock = socket.socket(fileno=int(sys.argv[1]))
socket.send_fds(sock, [b"here"], [fd])
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_it_outlives_an_exporter_that_is_killed() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        child = subprocess.Popen(
            [sys.executable, "-c", EXPORTER, str(theirs.fileno())], pass_fds=[theirs.fileno()]
        )
        # It dies with the descriptor on its way.
        assert child.wait(120) == -signal.SIGKILL
        _, (fd,), _, _ = socket.recv_fds(ours, 16, 1)
    with DmaBufMapping(fd, 8192) as mapping, mapping.reading():
        assert bytes(mapping.view(4096, 11)) == b"left behind"
    os.close(fd)


def test_no_descriptor_left_is_said_and_leaves_nothing() -> None:
    owner = memfd(PAGE)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (owner + 1, before[1]))
    try:
        with pytest.raises(NotExported, match="Too many open files") as none:
            dmabuf.create(owner, [(0, PAGE)])
        # One for the device, none for what it makes.
        resource.setrlimit(resource.RLIMIT_NOFILE, (owner + 2, before[1]))
        with pytest.raises(NotExported, match="Too many open files"):
            dmabuf.create(owner, [(0, PAGE)])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert none.value.refusal == HandleRefusal.NO_MEMORY
    os.close(dmabuf.create(owner, [(0, PAGE)]))
    os.close(owner)


def test_the_probe_and_the_doctor_prove_it() -> None:
    dmabuf.probe()
    found = checks.udmabuf()
    assert (found.level, found.fix) == ("ok", "")
    assert "a second process read a pattern" in found.seen


def test_who_may_not_open_the_device_is_told_so() -> None:
    script = (
        "import os; from kmesh import dmabuf; os.setgid(65534); os.setuid(65534)\n"
        "try:\n dmabuf.probe()\n"
        "except dmabuf.NotExported as failed: print(failed.refusal.name, failed)"
    )
    os.chmod(dmabuf.DEVICE, 0o600)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout == "NO_ACCESS /dev/udmabuf: Permission denied for uid 65534\n", done.stderr
